"""Which device this rank works on, and which torch.distributed backend goes with it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from megappo.platform import cpu

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Names of the configuration -> torch types."""


def select_device(requested: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The rank's device. ValueError where CUDA is asked for and absent, unwanted and visible, or short of a GPU for this rank."""
    if requested == "cuda" and not torch.cuda.is_available():
        raise ValueError("run.device = cuda: torch sees no CUDA device; use run.device=cpu or install a CUDA build of torch")
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if requested == "cpu":
        # Megatron-core builds its models on the GPU wherever torch sees one.
        raise ValueError("run.device = cpu: torch sees a CUDA device; hide it (CUDA_VISIBLE_DEVICES=) or use run.device=cuda")
    check_gpus(int(os.environ.get("LOCAL_RANK", "0")) + 1)
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def check_gpus(num_local_ranks: int) -> None:
    """ValueError where this machine has GPUs, but fewer than ranks."""
    if torch.cuda.is_available() and torch.cuda.device_count() < num_local_ranks:
        raise ValueError(
            f"run.num_ranks: {num_local_ranks} ranks on this machine need a GPU each, torch sees {torch.cuda.device_count()}; "
            "lower run.num_ranks (or torchrun's --nproc-per-node), or make more GPUs visible"
        )


def start_alone(device: torch.device) -> None:
    """A world of this one process, for commands that no launcher started; nothing listens on a port."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    start_distributed(device)


def start_distributed(device: torch.device, timeout_s: float = 600.0) -> None:
    """Join the world that torchrun described in the environment, and prepare Megatron-core for the device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        cpu.install()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
