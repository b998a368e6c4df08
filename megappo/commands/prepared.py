"""Steps that commands share: model directories, the device, the world that a rank joined."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:  # imported when a command needs them
    from megappo.config.checks import Device
    from megappo.config.supervised import AnyConfig
    from megappo.runtime.ending import StopRequest

Config = TypeVar("Config", bound="AnyConfig")


def local_models(config: Config) -> Config:
    """Replace models of the hub by directories. Collective for ranks of torchrun or srun, of which one asks the hub."""
    from megappo.runtime.world import is_rank
    from megappo.trainer.prepare.hub import names_models, with_local_models

    if not is_rank() or not names_models(config):  # ranks that megappo itself starts are given directories
        return with_local_models(config)
    from megappo.parallel.device import select_device, start_distributed
    from megappo.trainer.preflight import local_models_of_ranks

    start_distributed(select_device(config.run.device), config.run.timeouts)
    return local_models_of_ranks(config)


def enter_rank(stop: StopRequest | None = None) -> None:
    """Set up tracebacks, signals and the end with the launcher, before anything heavy is imported."""
    from megappo.runtime.failure import record_exceptions
    from megappo.runtime.helper_process import stay_deaf
    from megappo.runtime.world import end_with_launcher

    stay_deaf()
    end_with_launcher()
    if stop is not None:
        stop.listen()
    record_exceptions(int(os.environ["RANK"]))


def leave_world() -> None:
    """Leave a world that was joined before the training. One that the training joined is left already."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def require_device(requested: Literal["auto", "cpu", "cuda"]) -> None:
    """Raise ValueError if the run needs a GPU and there is none. `plan` skips this: it may plan for another machine."""
    from megappo.parallel.device import select_device

    select_device(requested)


def device_of(requested: Literal["auto", "cpu", "cuda"]) -> Device:
    """Device that the ranks will choose."""
    if requested != "auto":
        return requested
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
