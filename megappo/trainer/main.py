"""A run on this rank, from its claimed directory to its export. The loop is built by `assembly.py`."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from megappo.algo.kl import KLController
from megappo.checkpoint.manifest import Manifest, models_of
from megappo.checkpoint.remote import url_of_run
from megappo.checkpoint.store import CheckpointStore
from megappo.config.dump import dump_yaml
from megappo.config.layout_checks import roles_in_use, sampler_of
from megappo.config.redaction import redacted_values
from megappo.config.role_sections import AVERAGE, section_of
from megappo.config.run_directory import apply_permissions
from megappo.config.schema import TrainConfig
from megappo.config.supervised import AnyConfig, SupervisedConfig
from megappo.config.supervised_step import sampling_config
from megappo.data.ahead import AheadLoader
from megappo.engine.base import Engine
from megappo.engine.build import RoleEngines
from megappo.engine.factory import EngineBackend, EngineFactory
from megappo.parallel.device import select_device, start_distributed
from megappo.rollout.build import Again
from megappo.rollout.half import RolloutHalf
from megappo.rollout.types import RolloutEngine
from megappo.runtime.ending import StopRequest, input_accepted
from megappo.runtime.failure import joining_as
from megappo.runtime.lease import Lease
from megappo.runtime.sections import EXPORT
from megappo.runtime.world import is_rank, steps_to_skip
from megappo.telemetry.console import configure_logging
from megappo.telemetry.hardware import profile_of
from megappo.telemetry.predicted import Beside
from megappo.telemetry.runlog import RunLog, columns_without_critic
from megappo.telemetry.trackers.group import make_trackers
from megappo.trainer.assembly import (
    Claimed,
    Models,
    build_models,
    build_ppo,
    build_pretraining,
    build_supervised,
    checkpoints_of,
    kl_controller,
    store_of,
)
from megappo.trainer.build_roles import load_critics
from megappo.trainer.halves import join_half, run_halves, seats_of
from megappo.trainer.instruments import Instruments
from megappo.trainer.kernel_selection import select_kernels
from megappo.trainer.partial_rollouts import resume_partial_rollouts
from megappo.trainer.ppo import PPO
from megappo.trainer.preflight import facts_of_ranks, fetch_on_rank_0, watched, watched_again
from megappo.trainer.prepare.data import RunData
from megappo.trainer.prepare.layouts import model_paths
from megappo.trainer.prepare.recorded import RecordedData
from megappo.trainer.prepare.run import AnyData
from megappo.trainer.prepare.supervised import SupervisedData
from megappo.trainer.recorded import COLUMNS, RecordedPretraining
from megappo.trainer.run import Run, Steps
from megappo.trainer.run_facts import require_same_models, require_same_order, run_facts, warn_of_changes
from megappo.trainer.rundir import RunDir, export_policy
from megappo.trainer.sampling import rollout_of
from megappo.trainer.state import TrainerState
from megappo.trainer.supervised import Supervised, columns_of_kind

Loop = PPO | RecordedPretraining | Supervised


def train(
    config: AnyConfig,
    data: AnyData,
    *,
    resume: bool,
    stop: StopRequest | None = None,
    engines: EngineBackend = RoleEngines,
    wrap_rollout: Callable[[RolloutEngine], RolloutEngine] = lambda engine: engine,
    replay: Path | None = None,
) -> bool:
    """Run PPO, the pretraining of critics on recorded trajectories, or supervised training, on this rank. Collective over the
    world.

    config, data: checked by `commands.plan.run.plan_run`. engines: builds the models of all roles. wrap_rollout: wraps the rollout
    engine on every rank of a synchronous run. replay: directory of an asynchronous run whose order of events is repeated. Returns
    True if the run reached its end, False if a rank was asked to `stop`; the run can then be resumed, and `ended.json` records it.
    An existing process group is kept; otherwise the launcher's is joined and destroyed at the end.
    """
    apply_permissions(config.run.permissions)
    owns_world = not dist.is_initialized()
    device = select_device(config.run.device)
    if (start := _joining_as()) is not None and isinstance(config, TrainConfig) and isinstance(data, RunData):
        return _join(config, data, stop or StopRequest(), device, start)
    start_distributed(device, config.run.timeouts)
    configure_logging(dist.get_rank(), dist.get_world_size())
    _seed(config.run.seed)
    run_dir, facts = RunDir.of(config.run), facts_of_ranks(config, data, resume=resume)
    fetch_on_rank_0(config, run_dir.root, resume=resume)
    with run_dir.claim(config.run, dump_yaml(config), resume=resume) as lease:
        with watched(config.run.timeouts, run_dir.root) as watchdog, closing(_store_of(config, run_dir, lease)) as store:
            claimed = Claimed(run_dir, store, facts, watchdog, stop or StopRequest())
            run = partial(_train, config, engines=engines, device=device, resume=resume)
            if isinstance(config, TrainConfig) and isinstance(data, RunData) and config.rollout.max_staleness is not None:
                finished = run_halves(config, data, claimed, device, replay, run)
            elif sampler_of(config) is None:
                finished = run(data, claimed, _no_rollout)
            else:
                sampled = sampling_config(config)
                assert sampled is not None, "what generates has one"
                finished = run(data, claimed, lambda policy: wrap_rollout(rollout_of(sampled, data, policy, device)))
    if owns_world:
        dist.destroy_process_group()
    return finished


def _joining_as() -> str | None:
    return joining_as(int(os.environ["RANK"])) if is_rank() and not dist.is_initialized() else None


def _join(config: TrainConfig, data: RunData, stop: StopRequest, device: torch.device, start: str) -> bool:
    """Take part again on a rank of a replica that was lost (`halves.join_half`); return as `train`. start: number of it."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seats = seats_of(config, world_size)
    replica = (rank - seats.training) // seats.tp
    start_distributed(device, config.run.timeouts, (f"megappo.replica-{replica}.{start}", seats.of(replica)))
    configure_logging(rank, world_size)
    _seed(config.run.seed)
    run_dir = RunDir.of(config.run)
    with watched_again(rank, config.run.timeouts, run_dir.root) as watchdog:
        with closing(CheckpointStore(run_dir.checkpoints, config.checkpoint.keep_last)) as store:  # of which this half uses nothing
            claimed = Claimed(run_dir, store, run_facts(config, data), watchdog, stop)
            finished = join_half(config, data, claimed, device, rank, Again(replica, seats.replicas, world_size))
    dist.destroy_process_group()
    return finished


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    # Rewards may use these generators. Seed them in every process; a checkpoint keeps their state.
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def _no_rollout(policy: Engine | None) -> RolloutEngine:
    raise AssertionError("a run without sampling builds no rollout engine")


def _train(
    config: AnyConfig,
    data: AnyData,
    claimed: Claimed,
    build_rollout: Callable[[Engine | None], RolloutEngine],
    *,
    engines: EngineBackend,
    device: torch.device,
    resume: bool,
) -> bool:
    """Run in the claimed directory; return True at the run's end, False after a stop. build_rollout: of the policy's engine."""
    # A checkpoint that cannot be resumed is refused before any model is built; its bytes are hashed meanwhile.
    skip = steps_to_skip() if resume else ()
    manifest = _resumable(config, claimed, skip) if resume else None
    log = _log_of(config, claimed.run_dir, data, device)

    factory = engines(config.model, config.run.timeouts, device)
    _note_layers(config, factory, log, data)
    select_kernels(config.kernels, device, log)
    models = build_models(config, factory, data, device)
    rollout = None if sampler_of(config) is None else build_rollout(models.roles.engines.get("policy"))
    state, kl = TrainerState(), kl_controller(config.algorithm.kl) if isinstance(config, TrainConfig) else None
    checkpoints = checkpoints_of(config, data, models, state, kl, claimed, log)
    instruments = Instruments(config, models.roles, claimed.run_dir, device, claimed.watchdog.sections, store_of(data))
    log.note(instruments.note)
    run = Run(Steps(config, state, data.total_steps), state, log, checkpoints, instruments, factory.settle)
    loop = _loop_of(config, data, models, run, rollout, kl)
    if manifest is not None:
        _restore(config, models, run, manifest, skip)
        if isinstance(rollout, RolloutHalf) and isinstance(data.loader, AheadLoader):
            rollout.restore(state.step, data.loader.rows, loop.evaluations.of_push(state.step) if isinstance(loop, PPO) else ())
        claimed.run_dir.record_config(dump_yaml(config))
    elif isinstance(config, TrainConfig):
        load_critics(config, models.roles.engines, log)
    claimed.run_dir.begin()  # only now: a resume that is refused leaves the run as it ended

    with input_accepted(), closing(loop):
        _run_to_its_end(config, data, claimed, models, run, loop)
        if rollout is not None:
            rollout.close()
        if isinstance(data.loader, AheadLoader):
            log.note(data.loader.ledger())
        if not loop.stopped:
            claimed.run_dir.record_finish(state.step)
            log.summary()
        log.wait()  # at last: trackers may still be sending, and the end of the run is on record
        dist.barrier()
        claimed.store.finish_copies()
    return not loop.stopped


def _loop_of(
    config: AnyConfig, data: AnyData, models: Models, run: Run, rollout: RolloutEngine | None, kl: KLController | None
) -> Loop:
    if isinstance(config, SupervisedConfig):
        assert isinstance(data, SupervisedData), "`prepare.run.load_data`"
        return build_supervised(config, data, models, rollout, run)
    if isinstance(data, RecordedData):
        return build_pretraining(config, data, models, run)
    assert isinstance(data, RunData) and rollout is not None and kl is not None, "PPO samples"
    return build_ppo(config, data, models, rollout, run, kl)


def _resumable(config: AnyConfig, claimed: Claimed, skip: Collection[int]) -> Manifest | None:
    """Find the checkpoint to resume from; None if the run has none. ConfigError if it is of another run."""
    manifest = claimed.store.find_resumable(claimed.facts, skip, wait=False)
    if manifest is not None:
        require_same_models(models_of(manifest), config, f"step-{manifest.step}")
        require_same_order(manifest.facts, claimed.facts, f"step-{manifest.step}")
        warn_of_changes(manifest.facts, claimed.facts, f"step-{manifest.step}")
    return manifest


def _restore(config: AnyConfig, models: Models, run: Run, manifest: Manifest, skip: Collection[int]) -> None:
    """Resume from this checkpoint, or from an older one if it is damaged. Collective over the world."""
    absent = run.checkpoints.resume(manifest, skip)
    if isinstance(config, TrainConfig):
        resume_partial_rollouts(config, run.state, run.log)
    if AVERAGE in absent:
        run.log.note("policy.ema: the checkpoint has no average; it starts from the policy's weights there")
        if models.average is not None:
            models.average.start()
    if run.state.step >= run.steps.total:
        end = f"the run ends with step {run.steps.total}; raise trainer.steps or trainer.epochs"
        run.log.note(f"nothing is left to train: {end}")


def _run_to_its_end(config: AnyConfig, data: AnyData, claimed: Claimed, models: Models, run: Run, loop: Loop) -> None:
    run_dir, done_before = claimed.run_dir, run.state.step
    loop.run()
    run.log.close("stopped" if loop.stopped else "finished")
    if loop.stopped:
        run_dir.record_stop(run.state.step, claimed.stop.received)
        run.log.note(f"stopped after step {run.state.step} with a checkpoint; {run.checkpoints.way_on}")
    elif (
        not isinstance(loop, RecordedPretraining)
        and config.checkpoint.export_at_end
        and (run.state.step > done_before or not run_dir.is_exported())
    ):
        _, source = model_paths(config)[config.learner]
        with claimed.watchdog.section(EXPORT):
            export_policy(models.roles.engines.get(config.learner), run_dir, Path(source), data.tokenizer)


SUPERVISED_ROWS = 20
"""Rows that a supervised run prints in all, since its steps are short."""


def _log_of(config: AnyConfig, run_dir: RunDir, data: AnyData, device: torch.device) -> RunLog:
    settings, rows = config.telemetry, 0
    known = profile_of(settings.hardware, torch.cuda.get_device_name(device) if device.type == "cuda" else None)
    if isinstance(config, SupervisedConfig):
        usual, rows = columns_of_kind(config), SUPERVISED_ROWS
    else:
        usual = COLUMNS if isinstance(data, RecordedData) else () if config.algorithm.has_critic else columns_without_critic()
    return RunLog(
        run_dir.root,
        make_trackers(settings, config.run.name, run_dir.root),
        redacted_values(config.model_dump(mode="json")),
        progress=settings.progress or usual,
        summary_every=settings.summary_every,
        rows=rows,
        beside=Beside.of(run_dir.root, None if known is None else known.name),
    )


def _store_of(config: AnyConfig, run_dir: RunDir, lease: Lease) -> CheckpointStore:
    settings = config.checkpoint
    remote = url_of_run(settings.remote, config.run.name) if settings.remote is not None else None
    return CheckpointStore(run_dir.checkpoints, settings.keep_last, settings.save_only_model, lease.id, remote)


def _note_layers(config: AnyConfig, factory: EngineFactory, log: RunLog, data: AnyData) -> None:
    layers = ", ".join(f"{role}: {factory.describe(section_of(config, role))}" for role in roles_in_use(config))
    if (sampler := sampler_of(config)) is not None:
        layers += f"; rollout: {sampler.engine}"
    elif isinstance(data, RecordedData):
        layers += "; rollout: none, the trajectories are recorded"
    log.note(f"layers: {layers}")
