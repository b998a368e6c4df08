"""Device of this rank, the torch.distributed world with the matching backend, and page-locked memory beside it."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.config.run_sections import TimeoutsConfig
from megappo.parallel import cpu_patches
from megappo.parallel.consensus import gathered
from megappo.runtime.messages import first_line


def pin(owner: object, memory: Tensor) -> None:
    """Lock the pages of `memory` [n] uint8 until `owner` is collected: a GPU then copies at full speed, and beside other work."""
    runtime: Any = torch.cuda.cudart()  # a module, None to the type checker
    address = memory.data_ptr()
    torch.cuda.check_error(runtime.cudaHostRegister(address, memory.nbytes, 0))
    # Not at exit: the process frees everything then, in an order of its own.
    weakref.finalize(owner, runtime.cudaHostUnregister, address).atexit = False


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Names of the configuration -> torch types."""
# Read when the first group is made. After a timeout NCCL's watchdog ends the process (3, torch's default) and dumps the last
# exchanges of every rank, which it must record for that.
_NCCL_DEFAULTS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_ENABLE_MONITORING": "1",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}


def select_device(requested: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return this rank's device. ValueError if CUDA is requested and absent, refused and visible, or lacks a GPU for this rank."""
    if requested == "cuda" and not torch.cuda.is_available():
        raise ValueError("run.device = cuda: torch sees no CUDA device; use run.device=cpu or install a CUDA build of torch")
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if requested == "cpu":
        # Megatron-core builds its models on a GPU whenever torch sees one.
        raise ValueError("run.device = cpu: torch sees a CUDA device; hide it (CUDA_VISIBLE_DEVICES=) or use run.device=cuda")
    check_gpus(int(os.environ.get("LOCAL_RANK", "0")) + 1)
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def check_gpus(num_local_ranks: int) -> None:
    """Raise ValueError if this machine has GPUs, but fewer than ranks."""
    if torch.cuda.is_available() and torch.cuda.device_count() < num_local_ranks:
        raise ValueError(
            f"run.num_ranks: {num_local_ranks} ranks on this machine need a GPU each, torch sees {torch.cuda.device_count()}; "
            "lower run.num_ranks (or torchrun's --nproc-per-node), or make more GPUs visible"
        )


def start_alone(device: torch.device) -> None:
    """Start a world of this one process, for commands that no launcher started."""
    # Read by the stage timers (RANK), the bridge (LOCAL_WORLD_SIZE) and vLLM's executor (LOCAL_RANK).
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # no port is opened
    start_distributed(device)


def start_distributed(
    device: torch.device, timeouts: TimeoutsConfig = TimeoutsConfig(), part: tuple[str, Sequence[int]] | None = None
) -> None:
    """Join the world that torchrun described in the environment, unless one exists, and prepare Megatron-core for the device.
    part: name and ranks of a world of some of them instead, later than the others. ValueError on rank 0 if another process has the
    world's port, where the environment describes no world, and on all ranks for GPUs of several kinds."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        for name, value in _NCCL_DEFAULTS.items():
            os.environ.setdefault(name, value)
    else:
        cpu_patches.install()
    if not dist.is_initialized():
        # Not init_process_group's own rendezvous, which has one limit for joining and for all later exchanges.
        limit = timedelta(seconds=timeouts.start_s)
        try:
            store, rank, world_size = next(dist.rendezvous("env://", timeout=limit))
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise ValueError(
                f"MASTER_PORT={os.environ['MASTER_PORT']}: another process of {socket.gethostname()} listens there, such as a "
                "second job from a shell that exports the variable; unset it, or set a free port"
            ) from None
        except ValueError as error:  # one that is missing, or no number: left over in a shell, or set by hand
            raise ValueError(
                f"RANK and WORLD_SIZE are set, and their world cannot be joined: {first_line(error)}; start the ranks by "
                "torchrun or srun, or unset both, and `megappo train` starts them itself"
            ) from None
        store.set_timeout(limit)
        name = "megappo"
        if part is not None:
            name, ranks = part
            rank, world_size = ranks.index(rank), len(ranks)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(name, store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeouts.meeting_s),  # on the host, ranks meet after work of different length
        )
        if part is not None:
            setattr(dist.distributed_c10d._world, "ranks_of_run", part[1])
        set_limit(world_group(), timeouts.start_s, device_only=True)  # a push of weights; later `parallel.groups.settle`
        if device.type == "cuda":
            require_one_kind(gathered(torch.cuda.get_device_name(device)))


def job_store() -> Any:
    """Return a connection of its own to the store through which the job's ranks have met, whatever world they are in now: a wait
    on another one holds that one."""
    store: Any = dist.distributed_c10d._get_default_store()  # its methods are missing in torch's stub
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.clone()


def require_one_kind(names: Sequence[str]) -> None:
    """Raise ValueError if the ranks' GPUs, by their names, are of several kinds: they would round differently, the fastest would
    wait, and the plan of memory is rank 0's."""
    other = next((rank for rank, name in enumerate(names) if name != names[0]), None)
    if other is not None:
        raise ValueError(
            f"run.device = cuda: rank {other} has a {names[other]}, and rank 0 a {names[0]}; take GPUs of one kind "
            "(export CUDA_VISIBLE_DEVICES=..., Slurm: --gpus-per-node=KIND:N)"
        )


def world_group() -> dist.ProcessGroup:
    """Return the group of all ranks, after the world was joined."""
    world = dist.group.WORLD
    assert world is not None, "the world was not joined"
    return world


def ranks_of_run(group: dist.ProcessGroup) -> list[int]:
    """Return a group's world ranks as the run counts them, for messages, also inside a part of the world
    (`rollout/subworld.py`)."""
    ranks = dist.get_process_group_ranks(group)
    outside = getattr(dist.distributed_c10d._world, "ranks_of_run", None)
    return ranks if outside is None else [outside[rank] for rank in ranks]


@contextmanager
def as_world(group: dist.ProcessGroup) -> Iterator[None]:
    """Make `group` the default group inside, for libraries that take no group: Megatron-core agrees on parameter groups and checks
    shards over the default one. Inside, ranks count in the group, and no groups may be made."""
    world = world_group()
    dist.distributed_c10d._update_default_pg(group)
    try:
        yield
    finally:
        dist.distributed_c10d._update_default_pg(world)


def set_limit(group: dist.ProcessGroup, seconds: float, *, device_only: bool = False) -> None:
    """Set the timeout of later exchanges of this group; `device_only` leaves those on the host unchanged. gloo's point-to-point
    messages keep the timeout that the group was made with."""
    # torch's own (private) _set_pg_timeout does not distinguish the backends of a group.
    backends = {kind.type: group._get_backend(kind) for kind in group._device_types}
    for backend in backends.values():
        if not (device_only and backend is backends.get("cpu")):  # a group of gloo alone has it for both devices
            backend._set_default_timeout(timedelta(seconds=seconds))


def limit_of(group: dist.ProcessGroup) -> float:
    """Return the timeout of this group's exchanges in seconds, as `set_limit` has set it without `device_only`."""
    return group._get_backend(group._device_types[0]).options._timeout.total_seconds()
