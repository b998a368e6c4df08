"""Checks the machines that a run starts on, which are no part of a plan: isolation of programs, reward servers, storage for
copies. All ranks check together, before a model is built: if one rank raised alone, the others would wait."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from pydantic import BaseModel

from megappo.checkpoint.remote import open_storage
from megappo.config.errors import ConfigError
from megappo.config.evaluations import rewards_of
from megappo.config.layout_checks import reads_trajectories
from megappo.config.run_sections import TimeoutsConfig
from megappo.config.supervised import AnyConfig
from megappo.parallel.consensus import gathered, raised_by_all, told_by
from megappo.parallel.device import job_store
from megappo.runtime.failure import ATTEMPT_DIR
from megappo.runtime.life import LAUNCHER_LISTENS, SignOfLife
from megappo.runtime.verdict import Member
from megappo.runtime.watchdog import EXCHANGE_S, Watchdog
from megappo.trainer.prepare.checks import about_remote
from megappo.trainer.prepare.code_rewards import require_isolation
from megappo.trainer.prepare.data import EvaluationData
from megappo.trainer.prepare.hub import pinned_names, with_local_models, with_values
from megappo.trainer.prepare.remote_run import fetch, find_copies
from megappo.trainer.prepare.reward_parts import require_reachable
from megappo.trainer.prepare.run import AnyData
from megappo.trainer.run_facts import require_equal_data, run_facts


def require_isolation_here(config: AnyConfig) -> None:
    """ConfigError, one line, if the run executes programs of the policy and this machine cannot isolate them."""
    for reward in () if reads_trajectories(config) else rewards_of(config):
        require_isolation(reward)


def require_servers_here(data: EvaluationData, *, resume: bool) -> None:
    """ConfigError, one line, if a reward server, also of an evaluation, cannot be reached from this machine."""
    for parts in (data.reward_parts, *(one.reward_parts for one in data.evaluations)):
        require_reachable(parts, resume=resume)


def require_storage(config: AnyConfig) -> None:
    """ConfigError, one line, if copies of checkpoints cannot be written to `checkpoint.remote`. Creates the directory."""
    if (url := config.checkpoint.remote) is not None:
        with about_remote(url):
            open_storage(url)


@contextmanager
def watched(timeouts: TimeoutsConfig, run_dir: Path) -> Iterator[Watchdog]:
    """Watch this rank while the context is open. Collective over the world.
    Stack traces and the verdict go to the attempt's folder, or to `stacks` below `run_dir`."""
    rank = dist.get_rank()
    ranks = gathered((uuid.uuid4().hex, Member.of_process(rank, os.getpid())))
    store = None
    if len(ranks) > 1:
        # Rank 0's name, as one world may run many times.
        name, store = f"megappo.watchdog.{ranks[0][0]}", job_store()
        if rank == 0:
            store.set(_WATCHDOG, name)
        store = dist.PrefixStore(name, store)
    with _watched(rank, [member for _, member in ranks], store, timeouts, run_dir) as watchdog:
        yield watchdog


@contextmanager
def watched_again(rank: int, timeouts: TimeoutsConfig, run_dir: Path) -> Iterator[Watchdog]:
    """Watch a rank that was lost, as one of a run whose others are watched. Not collective."""
    store = job_store()
    store = dist.PrefixStore(store.get(_WATCHDOG).decode(), store)
    with _watched(rank, [Member.of_process(rank, os.getpid())], store, timeouts, run_dir) as watchdog:
        yield watchdog


@contextmanager
def _watched(
    rank: int, members: Sequence[Member], store: dist.Store | None, timeouts: TimeoutsConfig, run_dir: Path
) -> Iterator[Watchdog]:
    folder = Path(os.environ.get(ATTEMPT_DIR) or run_dir / "stacks")
    folder.mkdir(parents=True, exist_ok=True)
    sign = None
    if LAUNCHER_LISTENS in os.environ:  # on a connection of its own
        sign = SignOfLife(job_store(), rank, timeouts.heartbeat_s, 0.0 if store is None else 2 * EXCHANGE_S)
    with Watchdog(rank, members, store, timeouts, folder, sign) as watchdog:
        yield watchdog
    if folder.parent == run_dir:
        with contextlib.suppress(OSError):  # not empty: another rank is still there, or an earlier attempt left its stacks
            folder.rmdir()


_WATCHDOG = "megappo.watchdog"  # key of the job's store: under which prefix its ranks watch each other


Config = TypeVar("Config", bound=BaseModel)


def local_models_of_ranks(config: Config) -> Config:
    """Run `with_local_models` on every rank with the commits that rank 0 finds. Collective over the world; ConfigError on all
    ranks. A rank whose cache holds the commit (shared file system) makes no request; others download it."""
    rank = dist.get_rank()
    first = raised_by_all(lambda: with_local_models(config) if rank == 0 else None, ConfigError)
    pins = told_by(0, None if first is None else pinned_names(config, first))

    def with_pins() -> Config:
        try:
            return with_local_models(with_values(config, pins or {}))
        except ConfigError as error:
            raise ConfigError(f"rank {rank}: {error}") from error

    return raised_by_all(lambda: with_pins() if first is None else first, ConfigError)


def facts_of_ranks(config: AnyConfig, data: AnyData, *, resume: bool) -> dict[str, Any]:
    """Return the facts of the run once every rank has what it needs on its machine. Collective over the world; ValueError on all
    ranks. Call before claiming the directory, so that a run that cannot start leaves its name free."""
    facts = run_facts(config, data)
    require_equal_data(facts)
    require_preflight(config, data, resume=resume)
    return facts


def fetch_on_rank_0(config: AnyConfig, run_dir: Path, *, resume: bool) -> None:
    """Fetch a run that is not here, if torchrun or srun started the ranks; other launchers have done so. Collective over the world.
    ValueError on all ranks if that fails."""

    def attempt() -> None:
        if dist.get_rank() == 0 and (copies := find_copies(config, resume=resume)) is not None:
            fetch(copies, run_dir)

    raised_by_all(attempt, ConfigError, ValueError)


def require_preflight(config: AnyConfig, data: EvaluationData, *, resume: bool) -> None:
    """Check on every rank that programs can be isolated and reward servers reached; on rank 0 also the storage for checkpoint
    copies. ConfigError on all ranks, naming the first rank that fails. Collective over the world."""

    def require() -> None:
        try:
            require_isolation_here(config)
            require_servers_here(data, resume=resume)
            if dist.get_rank() == 0:
                require_storage(config)
        except ConfigError as error:
            raise ConfigError(f"rank {dist.get_rank()}: {error}") from error

    raised_by_all(require, ConfigError)
