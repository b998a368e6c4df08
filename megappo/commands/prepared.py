"""Steps that commands share: models as directories, the device, the plan of a run, the world that a rank joined."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:  # imported when a command needs them
    from megappo.commands.plan.memory import Counter
    from megappo.commands.plan.run import PlannedRun
    from megappo.config.checks import Device
    from megappo.config.schema import SftConfig, TrainConfig

Config = TypeVar("Config", "TrainConfig", "SftConfig")


def local_models(config: Config) -> Config:
    """`with_local_models`. Ranks of torchrun or srun join their world for it: one of them asks the hub."""
    from megappo.runtime.world import is_rank
    from megappo.trainer.prepare.hub import names_models, with_local_models

    if not is_rank() or not names_models(config):  # ranks that megappo starts are told directories
        return with_local_models(config)
    from megappo.parallel.device import select_device, start_distributed
    from megappo.trainer.hub_models import local_models_of_ranks

    start_distributed(select_device(config.run.device), config.run.timeouts)
    return local_models_of_ranks(config)


def leave_world() -> None:
    """Leave a world that was joined before the training; one that the training joined, it has left."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def print_on_rank_0(text: str) -> None:
    if os.environ["RANK"] == "0":
        print(text, flush=True)


def require_device(requested: Literal["auto", "cpu", "cuda"]) -> None:
    """ValueError if the run needs a GPU and there is none. Not for `plan`, which may be for another machine."""
    from megappo.parallel.device import select_device

    select_device(requested)


def device_of(requested: Literal["auto", "cpu", "cuda"]) -> Device:
    """Device that the ranks will choose: cpu or cuda."""
    if requested != "auto":
        return requested
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def plan_here(
    config: TrainConfig,
    ranks: int,
    gpu_memory_gib: float | None,
    *,
    resume: bool = False,
    shapes_only: bool = False,
    device: Device | None = None,
    counter: Counter | None = None,
) -> PlannedRun:
    """Check and plan a run. `gpu_memory_gib` or `device` plans for GPUs of another machine.

    shapes_only: see `plan.run.plan_run`. counter: see `plan.memory.Counter`; None counts by shapes.
    """
    from megappo.commands.plan.estimate import bytes_of_gib
    from megappo.commands.plan.memory import count_parameters
    from megappo.commands.plan.run import plan_run

    how = {"resume": resume, "shapes_only": shapes_only, "counter": counter or count_parameters}
    if gpu_memory_gib is not None:
        return plan_run(config, ranks, "cuda", bytes_of_gib(gpu_memory_gib), **how)
    device = device or device_of(config.run.device)
    memory = None
    if device == "cuda":
        import torch

        memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    return plan_run(config, ranks, device, memory, **how)
