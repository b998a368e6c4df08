"""Surroundings of all ranks, checked together before a model is built: a rank that raised alone would leave the others waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from megappo.config.errors import ConfigError
from megappo.config.schema import TrainConfig
from megappo.parallel.consensus import on_rank_zero, raised_by_all
from megappo.trainer.prepare.data import EvaluationData, RunData
from megappo.trainer.prepare.recorded import RecordedData
from megappo.trainer.prepare.remote_run import fetch, find_copies
from megappo.trainer.prepare.surroundings import require_isolation_here, require_servers_here, require_storage
from megappo.trainer.run_facts import require_equal_data, run_facts


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


def require_surroundings(config: TrainConfig, data: RunData | RecordedData | EvaluationData, *, resume: bool) -> None:
    """ConfigError on all ranks, naming the first such rank, if one of them cannot isolate programs or reach a reward server.

    Rank 0 also opens the storage for copies of checkpoints, which it alone makes. Collective.
    """

    def require() -> None:
        try:
            require_isolation_here(config)
            require_servers_here(data, resume=resume)
            if dist.get_rank() == 0:
                require_storage(config)
        except ConfigError as error:
            raise ConfigError(f"rank {dist.get_rank()}: {error}") from error

    raised_by_all(require, ConfigError)
