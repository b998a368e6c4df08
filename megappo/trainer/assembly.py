"""Builds the loop of a run from its configuration and models: PPO, pretraining of critics on recorded trajectories, or supervised
training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megappo.algo.kl import AdaptiveKL, FixedKL, KLController
from megappo.checkpoint.state import StatefulModel
from megappo.checkpoint.store import CheckpointStore
from megappo.config.batch import step_arithmetic, update_schedule
from megappo.config.evaluations import best_metric, best_mode
from megappo.config.layout_checks import roles_in_use, trained_sections
from megappo.config.role_sections import AVERAGE
from megappo.config.schema import KLConfig, TrainConfig
from megappo.config.supervised import AnyConfig, SupervisedConfig
from megappo.config.supervised_step import step_like
from megappo.data.ahead import AheadLoader
from megappo.data.images import ImageStore
from megappo.engine.factory import EngineFactory
from megappo.parallel.layout import layout_of
from megappo.rollout.half import RolloutHalf
from megappo.rollout.types import RolloutEngine
from megappo.runtime.ending import StopRequest
from megappo.runtime.watchdog import Watchdog
from megappo.telemetry.runlog import RunLog
from megappo.trainer.ahead import Accounts, AheadSource, Canary
from megappo.trainer.average import PolicyAverage, average_of
from megappo.trainer.build_roles import Roles, build_roles
from megappo.trainer.checkpoints import Checkpoints, Contents, RunAround
from megappo.trainer.evaluation import Evaluations, average_in_sampler, policy_in_sampler
from megappo.trainer.extras import (
    AverageOfPolicy,
    EntropyTarget,
    Extra,
    GreedyBaseline,
    Histograms,
    ReplicaChecks,
    Trajectories,
)
from megappo.trainer.left_out import VerdictRules
from megappo.trainer.partial_rollouts import prompt_source_of
from megappo.trainer.ppo import PPO
from megappo.trainer.prepare.data import RunData
from megappo.trainer.prepare.recorded import RecordedData
from megappo.trainer.prepare.run import AnyData
from megappo.trainer.prepare.supervised import SupervisedData
from megappo.trainer.recorded import RecordedPretraining
from megappo.trainer.refresh import REFERENCE, ReferenceRefresh, refresh_sync
from megappo.trainer.reward_model import model_scorer
from megappo.trainer.rollout_side import RolloutSide
from megappo.trainer.rounds import Sampler
from megappo.trainer.run import Run
from megappo.trainer.rundir import RunDir
from megappo.trainer.sampling import evaluators_of_run, place_of_policy, recorded_experts, sampling_params, scorer_of
from megappo.trainer.save_schedule import BestCheckpoint
from megappo.trainer.scoring import ScoringProgress
from megappo.trainer.state import TrainerState
from megappo.trainer.supervised import Supervised
from megappo.trainer.training_side import TrainingSide


@dataclass(frozen=True)
class Claimed:
    """A run directory claimed by this process, with the facts of its data and models and the watchdog of the run. in_flight: makes
    the files of a checkpoint that hold what is drawn beside training."""

    run_dir: RunDir
    store: CheckpointStore
    facts: Mapping[str, Any]
    watchdog: Watchdog
    stop: StopRequest
    in_flight: Callable[[], Mapping[str, bytes]] = dict


@dataclass(frozen=True)
class Models:
    """Models of a run on this rank. average: of the policy; None if not configured and on ranks without the policy."""

    roles: Roles
    average: PolicyAverage | None
    device: torch.device


def build_models(config: AnyConfig, factory: EngineFactory, data: AnyData, device: torch.device) -> Models:
    roles = build_roles(config, factory, updates_of_run(config, data.total_steps), images=store_of(data))
    if isinstance(config, SupervisedConfig):
        return Models(roles, None, device)
    return Models(roles, average_of(config.policy.ema, roles.engines.get("policy")), device)


def store_of(data: AnyData) -> ImageStore | None:
    """Return the images of a run; None if it has none."""
    return None if isinstance(data, RecordedData) or data.images is None else data.images.store


def updates_of_run(config: AnyConfig, total_steps: int) -> dict[str, int]:
    """Return trained role -> optimizer steps of the whole run."""
    if isinstance(config, SupervisedConfig):
        return {config.learner: total_steps}
    steps = dict.fromkeys(trained_sections(config), total_steps)
    # The policy is not updated during a critic warm-up of fixed length.
    warmup = config.critic.warmup
    if "policy" in steps and (warmup is None or warmup.explained_variance is None):
        steps["policy"] = max(1, total_steps - config.critic.warmup_steps)
    samples = step_arithmetic(config).samples
    return {role: number * update_schedule(config, role).optimizer_steps(samples) for role, number in steps.items()}


# -------------------------------------------------------------------------------------------------------------- checkpoints


def _extra_models(config: AnyConfig, models: Models) -> dict[str, StatefulModel | None]:
    """Return the models saved beside the trained ones, None where they do not live: the average and a refreshed reference."""
    if isinstance(config, SupervisedConfig):
        return {}
    found: dict[str, StatefulModel | None] = {} if config.policy.ema is None else {AVERAGE: models.average}
    if config.reference.refresh is not None and REFERENCE in models.roles.placements:
        reference = models.roles.reference
        found[REFERENCE] = None if reference is None else reference.engine
    return found


def kl_controller(kl: KLConfig) -> KLController:
    if kl.placement == "reward" and kl.controller.type == "adaptive":
        return AdaptiveKL(kl.coef, kl.controller.target, kl.controller.horizon)
    return FixedKL(kl.coef)


def checkpoints_of(
    config: AnyConfig, data: AnyData, models: Models, state: TrainerState, kl: KLController | None, claimed: Claimed, log: RunLog
) -> Checkpoints:
    """Build the checkpoints of the run: what they hold and when they are made. kl: of PPO."""
    roles = models.roles
    layouts = {role: layout_of(sizes, len(roles.placements[role])) for role, sizes in roles_in_use(config).items()}
    if "policy" in layouts:
        layouts[AVERAGE] = layouts["policy"]
    texts = {} if data.ptx is None else {"ptx": data.ptx.loader}
    components = {"loader": data.loader, **({} if kl is None else {"kl_controller": kl}), **texts}
    return Checkpoints(
        claimed.store,
        config.checkpoint,
        claimed.facts,
        Contents(roles.trained_engines, state, components, layouts, _extra_models(config, models), claimed.in_flight),
        RunAround(claimed.stop, log, claimed.watchdog.sections, lambda: data.loader.epochs_done),
        best=BestCheckpoint(best_metric(config), best_mode(config), state),
    )


# ------------------------------------------------------------------------------------------------------------------- loops


def refresh_of(config: TrainConfig, models: Models, log: RunLog) -> ReferenceRefresh:
    """Build the refresh of the reference. Collective over the world if its layout differs from the policy's."""
    section, roles, average = config.reference, models.roles, models.average
    assert section.refresh is not None, "built for a reference that is refreshed"
    policy = roles.engines.get("policy")
    reference = None if roles.reference is None else roles.reference.engine
    alike = all(getattr(section, part) == getattr(config.policy, part) for part in ("engine", "parallel", "ranks"))
    sync = None
    if REFERENCE in roles.placements and not alike:
        copied = average if section.refresh.source == "ema" else None
        sync = refresh_sync(place_of_policy(config), policy, copied, reference, roles.placements[REFERENCE], models.device)
    return ReferenceRefresh(section.refresh, policy, reference, average, sync, log.note)


def build_ppo(
    config: TrainConfig, data: RunData, models: Models, rollout: RolloutEngine, run: Run, kl_controller: KLController
) -> PPO:
    """Build the PPO loop with the extras of the configuration. Collective over the world if the reference is refreshed."""
    refresh = refresh_of(config, models, run.log) if config.reference.refresh is not None else None
    roles, log, sampling = models.roles, run.log, sampling_params(config.rollout, data.tokenizer)
    sampling = replace(sampling, record_experts=recorded_experts(config))
    score_model = model_scorer(roles.reward_model, roles.shares.get("reward_model"), data.reward_text, config.reward_model)
    scorer = scorer_of(config.reward, data.reward_parts, ScoringProgress(log.note, run.instruments.sections), score_model)
    ahead: list[Extra] = []
    if isinstance(rollout, RolloutHalf) and isinstance(data.loader, AheadLoader):
        canary = Canary(rollout, roles, models.device, sampling, config.rollout.max_prob_diff)
        source = AheadSource(config, data.train.prompts, data.loader, data.total_steps, rollout, canary)
        ahead = [canary, Accounts(data.loader, log)]
    else:
        source = prompt_source_of(config, data.train.prompts, data.loader, run.state)
    sampler = Sampler(rollout, sampling, data.tokenizer, scorer)
    greedy = [GreedyBaseline(sampler)] if config.algorithm.estimator.type == "remax" else []
    rules = VerdictRules(config.reward.max_without_verdict, config.reward.above_max, config.algorithm.compares_groups)
    rollout_side = RolloutSide(config.rollout, sampler, roles.policy, source, extras=greedy, rules=rules)
    extras = [*ahead, *extras_of_updates(config, models, refresh, run)]  # a canary raises before others change the state
    if config.telemetry.trajectories_every:
        extras.append(Trajectories(config, source.samples_per_row, data.tokenizer, store_of(data), log))
    if config.telemetry.histogram_interval:
        extras.append(Histograms(roles, run.steps, config.telemetry.histogram_interval, log))
    learned_by = {"sampling": sampling, "texts": data.ptx, "extras": extras}
    training_side = TrainingSide(config, run, roles, kl_controller, models.device, **learned_by)
    with_average = config.trainer.evaluate_with != "policy"
    weights = partial(average_in_sampler, models.average, rollout_side.push_weights) if with_average else nullcontext
    evaluators = evaluators_of_run(config, data.evaluations, sampling, scorer, score_model)
    evaluations = Evaluations(evaluators, rollout, data.tokenizer, log, data.total_steps, weights)
    every = {"push_every": config.rollout.push_every, "summary_every": config.telemetry.summary_every}
    return PPO(run, rollout_side, training_side, evaluations, **every)


def extras_of_updates(config: TrainConfig, models: Models, refresh: ReferenceRefresh | None, run: Run) -> list[Extra]:
    """Build the extras that act on models around their updates, in the order in which they run."""
    found: list[Extra] = []
    if config.algorithm.entropy.type == "target":
        found.append(EntropyTarget(config.algorithm.entropy, models.roles, run.state))
    if config.policy.ema is not None:
        found.append(AverageOfPolicy(models.average))
    if config.run.replica_check_every:
        found.append(ReplicaChecks(models.roles, run.steps, config.run.replica_check_every))
    if refresh is not None:
        found.append(refresh)
    return found


def build_pretraining(config: TrainConfig, data: RecordedData, models: Models, run: Run) -> RecordedPretraining:
    replicas = ReplicaChecks(models.roles, run.steps, config.run.replica_check_every)
    return RecordedPretraining(config, run, models.roles, models.device, data.samples, data.loader, replicas)


def build_supervised(
    config: SupervisedConfig, data: SupervisedData, models: Models, rollout: RolloutEngine | None, run: Run
) -> Supervised:
    """Build the supervised loop. rollout: None if nothing is generated."""
    replicas = ReplicaChecks(models.roles, run.steps, config.run.replica_check_every)
    if rollout is None:
        return Supervised(config, run, models.roles, data, replicas)
    sampled, log = step_like(config), run.log
    sampling = sampling_params(sampled.rollout, data.tokenizer)
    scorer = scorer_of(sampled.reward, data.reward_parts, ScoringProgress(log.note, run.instruments.sections))
    evaluators = evaluators_of_run(sampled, data.evaluations, sampling, scorer, None)
    pushed = partial(policy_in_sampler, rollout, models.roles.engines.get(config.learner))
    answers = Evaluations(evaluators, rollout, data.tokenizer, log, data.total_steps, pushed)
    return Supervised(config, run, models.roles, data, replicas, [answers])
