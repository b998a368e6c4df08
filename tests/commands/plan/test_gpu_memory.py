"""The plan's peak against what torch's allocator really held, on one GPU. Needs a GPU; none was at hand when this was written."""

from __future__ import annotations

import gc
import importlib.util
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.commands.plan import live
from tests.commands.plan.archs import llama

pytestmark = pytest.mark.gpu
ARCH = llama(layers=8, hidden=2048, heads=16, kv_heads=8, head_dim=128, ffn=5632, vocab=32000)
LENGTHS, BUDGET = [512] * 32, 8192


@contextmanager
def world_of_one(folder, device: str):
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()


def peaks(implementation: str, recompute: str, critic: bool, device: str = "cuda") -> tuple[int, int]:
    """Most bytes allocated in (a pass without gradients, the second update with its optimizer step), with all that is resident."""
    role, _ = live.role_of(ARCH, {}, torch.bfloat16, recompute, critic, BUDGET, device=device, implementation=implementation)
    batch = live.batch_of(LENGTHS, ARCH.vocab_size)

    def highest(what) -> int:
        torch.cuda.reset_peak_memory_stats()
        what()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def update() -> None:
        with role.engine.train_mode():
            role.update(batch, 1.0)

    update()  # moments exist from the first step on
    return highest(lambda: role.values(batch) if critic else role.logprobs(batch)), highest(update)


@pytest.mark.parametrize("recompute, critic", [("none", False), ("full", False), ("none", True)])
@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_the_peak_on_a_gpu_is_the_plans_within_a_tenth(tmp_path, implementation, recompute, critic) -> None:
    if importlib.util.find_spec(implementation) is None and implementation != "local":
        pytest.skip("TransformerEngine is not installed")
    torch.cuda.set_device(0)
    gc.collect()  # models of the test before are reference cycles: they would go meanwhile
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with world_of_one(tmp_path, "cuda"):
        forward, update = (peak - before for peak in peaks(implementation, recompute, critic))
    fused = any(importlib.util.find_spec(name) is not None for name in ("transformer_engine", "apex"))
    planned = partial(live.planned_on_one_gpu, ARCH, BUDGET, critic=critic, adam_buffers=not fused)
    memory = planned(recompute)
    assert forward <= 1.1 * (memory.resident + memory.inferring)
    assert update <= 1.1 * (memory.resident + memory.active)
    if implementation == "local":  # TransformerEngine's norms keep less
        assert forward >= 0.9 * (memory.resident + memory.inferring) and update >= 0.9 * (memory.resident + memory.active)
        other = planned("none" if recompute == "full" else "full")
        assert not 0.9 < update / (other.resident + other.active) < 1.1, "negative control"
