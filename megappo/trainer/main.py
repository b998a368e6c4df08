"""Assembly of a PPO run from its configuration, and its execution on this rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from megappo.algo.kl import AdaptiveKL, FixedKL, KLController
from megappo.checkpoint.manifest import models_of
from megappo.checkpoint.remote import url_of_run
from megappo.checkpoint.store import CheckpointStore
from megappo.config.batch import step_arithmetic, update_schedule
from megappo.config.dump import dump_yaml
from megappo.config.errors import ConfigError
from megappo.config.evaluations import best_metric, config_of_set, longest_sequence_tokens
from megappo.config.layout_checks import roles_in_use, trained_sections
from megappo.config.rank_ranges import ALL
from megappo.config.redaction import redacted_values
from megappo.config.reward_sections import RewardConfig
from megappo.config.role_sections import key_of_role, section_of
from megappo.config.schema import KLConfig, RolloutConfig, TrainConfig
from megappo.data.tokenizers import Tokenizer
from megappo.engine.base import Engine
from megappo.engine.build import RoleEngines
from megappo.engine.factory import EngineBackend, EngineFactory
from megappo.parallel.consensus import RankFault, on_rank_zero, raised_by_all
from megappo.parallel.device import select_device, start_distributed
from megappo.parallel.layout import layout_of
from megappo.parallel.placement import placement_of
from megappo.rewards.base import PreparedPart
from megappo.rewards.compose import Composition
from megappo.rewards.scorer import Scorer
from megappo.rollout.build import PolicyPlace, build_rollout
from megappo.rollout.environment import with_environment
from megappo.rollout.types import RolloutEngine, SamplingParams
from megappo.runtime.ending import input_accepted
from megappo.runtime.lease import Lease
from megappo.runtime.permissions import apply_permissions
from megappo.runtime.sections import EXPORT
from megappo.runtime.signals import StopRequest
from megappo.runtime.watchdog import Watchdog
from megappo.runtime.world import steps_to_skip
from megappo.telemetry.log import configure_logging
from megappo.telemetry.progress import columns_without_critic
from megappo.telemetry.runlog import RunLog
from megappo.telemetry.trackers.group import make_trackers
from megappo.trainer.average import AVERAGE, PolicyAverage, average_of
from megappo.trainer.best import BestCheckpoint
from megappo.trainer.build_roles import Roles, build_roles, spec_of_role
from megappo.trainer.checkpoints import Checkpoints, Contents, PlacedModel, RunAround
from megappo.trainer.evaluation import Evaluations, Evaluator, evaluators_of
from megappo.trainer.instruments import Instruments
from megappo.trainer.kernel_selection import select_kernels
from megappo.trainer.ppo import PPO
from megappo.trainer.prepare.critic_source import critic_source
from megappo.trainer.prepare.data import EvaluationData, RunData
from megappo.trainer.prepare.evaluations import EvaluationSet
from megappo.trainer.prepare.recorded import RecordedData
from megappo.trainer.prepare.remote_run import fetch, find_copies
from megappo.trainer.prepare.reward_routes import recipe_of
from megappo.trainer.recorded import COLUMNS, RecordedPretraining
from megappo.trainer.refresh import REFERENCE, FrozenModel, ReferenceRefresh, refresh_sync
from megappo.trainer.replicas import ReplicaCheck
from megappo.trainer.reward_model import ModelScorer, model_scorer
from megappo.trainer.run_facts import require_equal_data, require_same_models, require_same_order, run_facts, warn_of_changes
from megappo.trainer.rundir import RunDir
from megappo.trainer.scoring import ScoringProgress
from megappo.trainer.shaping import HOST_OPS
from megappo.trainer.state import TrainerState
from megappo.trainer.surroundings import require_surroundings
from megappo.trainer.watch import watched
from megappo.trainer.windows import resume_windows


def train(
    config: TrainConfig,
    data: RunData | RecordedData,
    *,
    resume: bool,
    stop: StopRequest | None = None,
    engines: EngineBackend = RoleEngines,
    wrap_rollout: Callable[[RolloutEngine], RolloutEngine] | None = None,
) -> bool:
    """Run PPO, or the pretraining of critics on recorded trajectories, on this rank of the world. `config` and `data` have been
    checked by `plan.run.plan_run`.

    engines: builds the models of all roles. wrap_rollout: what samples, around the rollout engine of the configuration, on every
    rank, as `rollout.environment` has `rollout.turns.TurnsRollout` there. Returns True if the run reached its end, False if a rank
    was asked to `stop`: it can be resumed then. `ended.json` says so either way. An existing world is used and left to the caller;
    otherwise the launcher's is joined and left again.
    """
    apply_permissions(config.run.permissions)
    owns_world = not dist.is_initialized()
    device = select_device(config.run.device)
    start_distributed(device, config.run.timeouts)
    configure_logging(dist.get_rank(), dist.get_world_size())
    torch.manual_seed(config.run.seed)
    # Rewards may draw from these; they start anew in every process, and a checkpoint keeps them too.
    random.seed(config.run.seed)
    numpy.random.seed(config.run.seed % 2**32)
    run_dir, facts = RunDir.of(config.run), facts_of_ranks(config, data, resume=resume)
    fetch_on_rank_0(config, run_dir.root, resume=resume)
    with run_dir.claim(config.run, dump_yaml(config), resume=resume) as lease:
        with watched(config.run.timeouts, run_dir.root) as watchdog, closing(_store_of(config, run_dir, lease)) as store:
            finished = _train(
                config,
                data,
                facts,
                run_dir,
                store,
                device,
                watchdog,
                resume=resume,
                stop=stop or StopRequest(),
                engines=engines,
                wrap_rollout=wrap_rollout,
            )
    if owns_world:
        dist.destroy_process_group()
    return finished


def facts_of_ranks(config: TrainConfig, data: RunData | RecordedData, *, resume: bool) -> dict[str, Any]:
    """Facts of the run, once every rank has what it needs on its own machine. Collective; ValueError on all ranks.

    Before the directory is claimed: a run that cannot start leaves its name free.
    """
    facts = run_facts(config, data)
    require_equal_data(facts)
    require_surroundings(config, data, resume=resume)
    return facts


def fetch_on_rank_0(config: TrainConfig, run_dir: Path, *, resume: bool) -> None:
    """Fetch a run that is not here, where torchrun or srun started the ranks; other launchers have done it. Collective."""

    def attempt() -> str | None:
        try:
            if (copies := find_copies(config, resume=resume)) is not None:
                fetch(copies, run_dir)
        except ValueError as error:
            return str(error)
        return None

    if (fault := on_rank_zero("fetching a checkpoint", attempt)) is not None:
        raise ConfigError(fault)


def _train(
    config: TrainConfig,
    data: RunData | RecordedData,
    facts: Mapping[str, Any],
    run_dir: RunDir,
    store: CheckpointStore,
    device: torch.device,
    watchdog: Watchdog,
    *,
    resume: bool,
    stop: StopRequest,
    engines: EngineBackend,
    wrap_rollout: Callable[[RolloutEngine], RolloutEngine] | None,
) -> bool:
    """Run in the claimed directory; returns True at the run's end, False after a stop."""
    # A checkpoint that cannot be resumed is refused before any model is built; its bytes are hashed meanwhile.
    skip = steps_to_skip() if resume else ()
    manifest = store.find_resumable(facts, skip, wait=False) if resume else None
    if manifest is not None:
        require_same_models(models_of(manifest), config, f"step-{manifest.step}")
        require_same_order(manifest.facts, facts, f"step-{manifest.step}")
        warn_of_changes(manifest.facts, facts, f"step-{manifest.step}")
    settings, recorded = config.telemetry, isinstance(data, RecordedData)
    usual = COLUMNS if recorded else () if config.algorithm.has_critic else columns_without_critic()
    log = RunLog(
        run_dir.root,
        make_trackers(settings, config.run.name, run_dir.root),
        redacted_values(config.model_dump(mode="json")),
        progress=settings.progress or usual,
        summary_every=settings.summary_every,
    )

    factory = engines(config.model, config.run.timeouts, device)
    _note_layers(config, factory, log, recorded=recorded)
    select_kernels(config.kernels, device, log, host_ops=HOST_OPS)
    roles = build_roles(config, factory, updates_of_run(config, data.total_steps))
    average = average_of(config.policy.ema, roles.engines.get("policy"))
    rollout = None if isinstance(data, RecordedData) else rollout_of(config, data, roles.engines.get("policy"), device)
    if rollout is not None and wrap_rollout is not None:
        rollout = wrap_rollout(rollout)
    state, kl = TrainerState(), kl_controller(config.algorithm.kl)
    layouts = {role: layout_of(sizes, len(roles.placements[role])) for role, sizes in roles_in_use(config).items()}
    if "policy" in layouts:
        layouts[AVERAGE] = layouts["policy"]
    components = {"loader": data.loader, "kl_controller": kl, **({} if data.ptx is None else {"ptx": data.ptx.loader})}
    checkpoints = Checkpoints(
        store,
        config.checkpoint,
        facts,
        Contents(roles.trained_engines, state, components, layouts, _extra_models(config, roles, average)),
        RunAround(stop, log, watchdog.sections, lambda: data.loader.epochs_done),
        best=BestCheckpoint(best_metric(config), config.trainer.keep_best_mode, state),
    )
    instruments = Instruments(config, roles, run_dir, device, watchdog.sections)
    log.note(instruments.note)
    if isinstance(data, RecordedData):
        loop = _build_pretraining(config, data, roles, state, log, checkpoints, factory, instruments)
    else:
        assert rollout is not None, "only recorded trajectories need none"
        refresh = refresh_of(config, roles, average, device)
        loop = _build_ppo(config, data, roles, average, rollout, state, kl, log, checkpoints, factory, instruments, refresh)
    if manifest is not None:
        absent = checkpoints.resume(manifest, skip)
        resume_windows(config, state, log)
        if AVERAGE in absent:
            log.note("policy.ema: the checkpoint has no average; it starts from the policy's weights there")
            if average is not None:
                average.start()
        if state.step >= data.total_steps:
            log.note(f"nothing is left to train: the run ends with step {data.total_steps}; raise trainer.steps or trainer.epochs")
        run_dir.record_config(dump_yaml(config))
    else:
        load_critics(config, roles.engines, log)
    run_dir.begin()  # only now: a resume that is refused leaves the run as it ended

    done_before = state.step
    with input_accepted(), closing(loop):
        loop.run()
        log.close("stopped" if loop.stopped else "finished")
        if loop.stopped:
            run_dir.record_stop(state.step, stop.received)
            log.note(f"stopped after step {state.step} with a checkpoint; {checkpoints.way_on}")
        elif not recorded and config.checkpoint.export_at_end and (state.step > done_before or not run_dir.is_exported()):
            with watchdog.section(EXPORT):
                export_policy(roles.engines.get("policy"), run_dir, Path(config.policy.model))
        if rollout is not None:
            rollout.close()
        if not loop.stopped:
            run_dir.record_finish(state.step)
        log.wait()  # at last: trackers may still be sending, and the end of the run is on record
        dist.barrier()
        store.finish_copies()
    return not loop.stopped


def _store_of(config: TrainConfig, run_dir: RunDir, lease: Lease) -> CheckpointStore:
    settings = config.checkpoint
    remote = url_of_run(settings.remote, config.run.name) if settings.remote is not None else None
    return CheckpointStore(run_dir.checkpoints, settings.keep_last, settings.save_only_model, lease.id, remote)


# ---------------------------------------------------------------------------------------------------- weights in and out


def load_critics(config: TrainConfig, engines: Mapping[str, Engine], log: RunLog) -> None:
    """Load the weights of `critic.checkpoint`, if set, in place of those of `critic.model`, and so for every critic. engines: by
    role, of those that live here."""
    for role, critic in config.critics_in_use.items():
        # Another run may be writing there: rank 0 decides which of its checkpoints all ranks read.
        spec = spec_of_role(config, role, None)
        find = partial(critic_source, critic, spec.arch, spec.model, key_of_role(role))
        source = on_rank_zero(f"finding {key_of_role(role)}.checkpoint", find)
        if source is None:
            continue
        store = CheckpointStore(source.directory, keep_last=1)
        store.load_weights(source.role, engines.get(role), source.step, with_head=source.role != "policy")
        log.note(f"{role}: starts from the {source.role} of step {source.step} in {source.directory}")


def export_policy(engine: Engine | None, run_dir: RunDir, source: Path) -> None:
    """Write the policy for transformers and vLLM; an export that a resumed run replaces is renamed. Collective over the world.

    engine: None on ranks that it does not live on.
    """
    if dist.get_rank() == 0 and run_dir.export.exists():
        run_dir.export.rename(run_dir.export_replaced())
    dist.barrier()
    raised_by_all(lambda: None if engine is None else engine.export(run_dir.export, source), ValueError, OSError, RankFault)


# -------------------------------------------------------------------------------------------------------- parts of the loop


def _build_ppo(
    config: TrainConfig,
    data: RunData,
    roles: Roles,
    average: PolicyAverage | None,
    rollout: RolloutEngine,
    state: TrainerState,
    kl: KLController,
    log: RunLog,
    checkpoints: Checkpoints,
    factory: EngineFactory,
    instruments: Instruments,
    refresh: ReferenceRefresh,
) -> PPO:
    sampling = sampling_params(config.rollout, data.tokenizer)
    score_model = model_scorer(roles.reward_model, roles.shares.get("reward_model"), data.reward_text, config.reward_model)
    scorer = scorer_of(config.reward, data.reward_parts, ScoringProgress(log.note, instruments.sections), score_model)
    evaluators = evaluators_of_run(config, data.evaluations, sampling, scorer, score_model)
    return PPO(
        config,
        data.total_steps,
        roles=roles,
        average=average,
        rollout=rollout,
        sampling=sampling,
        prompts=data.train.prompts,
        loader=data.loader,
        texts=data.ptx,
        evaluations=Evaluations(evaluators, rollout, data.tokenizer, log, data.total_steps),
        tokenizer=data.tokenizer,
        scorer=scorer,
        kl_controller=kl,
        refresh=refresh,
        state=state,
        log=log,
        checkpoints=checkpoints,
        settle=factory.settle,
        check_replicas=ReplicaCheck(roles.engines),
        instruments=instruments,
    )


def _build_pretraining(
    config: TrainConfig,
    data: RecordedData,
    roles: Roles,
    state: TrainerState,
    log: RunLog,
    checkpoints: Checkpoints,
    factory: EngineFactory,
    instruments: Instruments,
) -> RecordedPretraining:
    return RecordedPretraining(
        config,
        data.total_steps,
        roles=roles,
        samples=data.samples,
        loader=data.loader,
        state=state,
        log=log,
        checkpoints=checkpoints,
        settle=factory.settle,
        check_replicas=ReplicaCheck(roles.engines),
        instruments=instruments,
    )


def rollout_of(config: TrainConfig, data: RunData | EvaluationData, policy: Engine | None, device: torch.device) -> RolloutEngine:
    """The rollout engine of a run, connected to the policy's engine, in its environment if it has one. Collective over the world;
    errors as `build_rollout`.

    policy: None on ranks that it does not live on.
    """
    engine = build_rollout(
        config.rollout,
        policy,
        model=config.policy.model,
        tokenizer=data.tokenizer,
        max_sequence_tokens=longest_sequence_tokens(config),
        policy_dtype=config.policy.dtype,
        logits_dtype=config.policy.logits_dtype,
        seed=config.run.seed,
        device=device,
        timeouts=config.run.timeouts,
        place=_place_of_policy(config),
        lora=config.policy.lora,
    )
    return engine if data.environment is None else with_environment(engine, data.environment, config, data.tokenizer)


def _extra_models(config: TrainConfig, roles: Roles, average: PolicyAverage | None) -> dict[str, PlacedModel | None]:
    """Models of a checkpoint beside those that train: the average, and a reference that changes; None where they do not live."""
    found: dict[str, PlacedModel | None] = {} if config.policy.ema is None else {AVERAGE: average}
    if config.reference.refreshes and REFERENCE in roles.placements:
        reference = roles.reference
        found[REFERENCE] = None if reference is None else FrozenModel(reference.engine)
    return found


def refresh_of(config: TrainConfig, roles: Roles, average: PolicyAverage | None, device: torch.device) -> ReferenceRefresh:
    """Refreshes of the run's reference. Collective over the world, if it is refreshed and lies otherwise than the policy."""
    section, policy = config.reference, roles.engines.get("policy")
    reference = None if roles.reference is None else roles.reference.engine
    alike = all(getattr(section, part) == getattr(config.policy, part) for part in ("engine", "parallel", "ranks"))
    if not section.refreshes or REFERENCE not in roles.placements or alike:
        return ReferenceRefresh(section, policy, reference, average)
    copied = average if section.refresh_from == "ema" else None
    sync = refresh_sync(_policy_place(config), policy, copied, reference, roles.placements[REFERENCE], device)
    return ReferenceRefresh(section, policy, reference, average, sync)


def _place_of_policy(config: TrainConfig) -> PolicyPlace | None:
    """Place of the policy; None if it and the rollout live on all ranks."""
    return None if config.policy.ranks == config.rollout.ranks == ALL else _policy_place(config)


def _policy_place(config: TrainConfig) -> PolicyPlace:
    placement = placement_of(config.policy.ranks, dist.get_world_size())
    arch = spec_of_role(config, "policy", None).arch
    return PolicyPlace(arch, layout_of(config.policy.parallel, len(placement)), placement, config.policy.engine)


def updates_of_run(config: TrainConfig, total_steps: int) -> dict[str, int]:
    """Trained role -> optimizer steps of the whole run; the policy takes none in a critic's warm-up of fixed length."""
    steps = dict.fromkeys(trained_sections(config), total_steps)
    if "policy" in steps and config.critic.warmup_explained_variance is None:
        steps["policy"] = max(1, total_steps - config.critic.warmup_steps)
    samples = step_arithmetic(config).samples
    return {role: number * update_schedule(config, role).optimizer_steps(samples) for role, number in steps.items()}


def _note_layers(config: TrainConfig, factory: EngineFactory, log: RunLog, *, recorded: bool) -> None:
    layers = ", ".join(f"{role}: {factory.describe(section_of(config, role))}" for role in roles_in_use(config))
    log.note(f"layers: {layers}; rollout: {'none, the trajectories are recorded' if recorded else config.rollout.engine}")


def sampling_params(rollout: RolloutConfig, tokenizer: Tokenizer) -> SamplingParams:
    s = rollout.sampling
    return SamplingParams(
        rollout.max_response_tokens, s.temperature, s.top_p, s.top_k, rollout.stop, tokenizer.eos_ids, s.replay_kept_tokens
    )


def kl_controller(kl: KLConfig) -> KLController:
    if kl.placement == "reward" and kl.controller.type == "adaptive":
        return AdaptiveKL(kl.coef, kl.controller.target, kl.controller.horizon)
    return FixedKL(kl.coef)


def scorer_of(
    reward: RewardConfig,
    parts: Mapping[str, PreparedPart],
    on_progress: Callable[[int, int], None] = lambda found, of: None,
    score_model: ModelScorer | None = None,
) -> Scorer:
    """The scorer of a run on this rank: its parts (as `RunData` has them), and the penalties for a missing end and for length."""
    recipes = {label: {part.label: part.weight for part in parts} for label, parts in reward.recipes.items()}
    penalties = (reward.missing_eos_penalty, reward.length_penalty, reward.length_penalty_start)
    made = {name: part.make() for name, part in parts.items() if part.make is not None}
    return Scorer(made, Composition(recipes, *penalties), partial(recipe_of, reward), on_progress, score_model)


def evaluators_of_run(
    config: TrainConfig,
    sets: Sequence[EvaluationSet],
    sampling: SamplingParams,
    scorer: Scorer | None,
    score_model: ModelScorer | None,
) -> list[Evaluator]:
    """Evaluators of the sets, as `evaluators_of`; sets with a reward of their own get a scorer of their own."""

    def scorer_of_set(one: EvaluationSet) -> Scorer:
        view = config_of_set(config, one.settings)
        model = None if score_model is None else score_model.of_prompts(view.data)
        if one.reward is not None:
            return scorer_of(view.reward, one.reward_parts, score_model=model)
        assert scorer is not None, "a set without a reward shares the training's"
        return scorer if model is score_model or model is None else scorer.with_model(model)

    return evaluators_of(sets, sampling, config.run.seed, scorer_of_set)
