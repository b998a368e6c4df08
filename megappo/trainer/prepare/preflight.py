"""Checks of the machine that a run starts on: isolation of programs, reward servers, storage for copies. They are no part of a
plan, which may be made on another machine."""

from __future__ import annotations

from megappo.checkpoint.remote import open_storage
from megappo.config.errors import ConfigError, problem
from megappo.config.evaluations import rewards_of
from megappo.config.layout_checks import reads_trajectories
from megappo.config.schema import TrainConfig
from megappo.trainer.prepare.code_rewards import require_isolation
from megappo.trainer.prepare.data import EvaluationData, RunData
from megappo.trainer.prepare.recorded import RecordedData
from megappo.trainer.prepare.remote_rewards import require_reachable


def require_isolation_here(config: TrainConfig) -> None:
    """ConfigError, one line, if the run executes programs of the policy and this machine cannot isolate them."""
    for reward in () if reads_trajectories(config) else rewards_of(config):
        require_isolation(reward)


def require_servers_here(data: RunData | RecordedData | EvaluationData, *, resume: bool) -> None:
    """ConfigError, one line, if a reward server, also of an evaluation, cannot be reached from this machine."""
    for parts in (data.reward_parts, *(one.reward_parts for one in data.evaluations)):
        require_reachable(parts, resume=resume)


def require_storage(config: TrainConfig) -> None:
    """ConfigError, one line, if copies of checkpoints cannot be written to `checkpoint.remote`. Creates the directory."""
    if (url := config.checkpoint.remote) is None:
        return
    try:
        open_storage(url)
    except ValueError as error:
        raise ConfigError(problem("checkpoint.remote", url, f"{error}; correct the URL, or set it to null")) from error
