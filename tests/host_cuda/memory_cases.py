"""Peaks of torch's allocator on the host's CUDA device, as scenarios of one rank; what is held at exit."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from megappo.ops import dispatch
from tests.commands.plan import live
from tests.commands.plan.archs import llama

# As tests/commands/plan/test_gpu_memory.py, at a size that the host computes in seconds; the allocator's 512 bytes do not count.
ARCH = llama(layers=4, hidden=512, heads=8, kv_heads=4, head_dim=64, ffn=1408, vocab=2048)
LENGTHS, BUDGET = [128] * 16, 1024


def peaks(rank: int, recompute: str, critic: bool) -> tuple[int, int]:
    """Most bytes allocated in (a pass without gradients, the second update), with all that is resident."""
    dispatch.select("reference", "cuda")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    role, _ = live.role_of(ARCH, {}, torch.bfloat16, recompute, critic, BUDGET, device="cuda", implementation="local")
    batch = live.batch_of(LENGTHS, ARCH.vocab_size)

    def highest(what) -> int:
        torch.cuda.reset_peak_memory_stats()
        what()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def update() -> None:
        with role.engine.train_mode():
            role.update(batch, 1.0)

    update()  # moments exist from the first step on
    forward, trained = highest(lambda: role.values(batch) if critic else role.logprobs(batch)), highest(update)
    assert torch.cuda.memory_allocated() - before < trained, "what the passes made is gone"
    return forward, trained


def _late_and_refused(run: Callable[[], bool]) -> tuple[str, bool]:
    """(what is raised where races are refused, what `run` returns where they are let through, with copies as late as can be)."""
    from host_cuda import runtime

    try:
        with runtime.races_let_through():
            whole = run()
        torch.cuda.synchronize()
        run()
    except RuntimeError as error:
        return str(error), whole
    return "", whole


def offload_across_streams(rank: int, without: str) -> tuple[str, bool]:
    """megappo's offload called on another stream than the tensors are used on; `without` one of its waits.

    Returns (what is raised, whether the tensors came back whole).
    """
    from unittest import mock

    from megappo.engine.offload import StorageOffload

    def run() -> bool:
        torch.cuda.empty_cache()
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        tensors = [torch.arange(4096.0, device="cuda") + i for i in range(3)]
        expected = [tensor.cpu() for tensor in tensors]
        parked = StorageOffload(lambda: tensors)
        for _ in range(2):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                parked.offload()
            garbage = [torch.full((4096,), -1.0, device="cuda") for _ in tensors]  # takes the memory that became free
            del garbage
            parked.restore()
            if without == "the wait for the last copy from the host's buffer":
                parked._restored = None
                side = torch.cuda.Stream()
                side.wait_event(torch.cuda.Event())  # an event that was not recorded: no order
                with torch.cuda.stream(side):
                    parked.offload()
                parked.restore()
        return all(torch.equal(a.cpu(), b) for a, b in zip(tensors, expected))

    def once() -> bool:
        if without != "the wait before the memory is freed":
            return run()
        with mock.patch("torch.cuda.synchronize"):
            return run()

    return _late_and_refused(once)


def snapshot_in_a_thread(rank: int, without: str) -> tuple[str, bool]:
    """The copy for a save, which a thread makes while the tensors are about to change; `without` one of its waits.

    Returns (what is raised, whether the copy is of the tensors as they were).
    """
    from concurrent.futures import ThreadPoolExecutor, wait
    from unittest import mock

    from megappo.checkpoint.image import FileImage, SharedBuffer

    def run() -> bool:
        tensors = [torch.zeros(4096, device="cuda") for _ in range(3)]
        host = [torch.full((4096,), 1.0 + i, pin_memory=True) for i in range(3)]
        for tensor, values in zip(tensors, host):
            tensor.copy_(values, non_blocking=True)  # still queued on this stream, as a restored state may be
        images = [FileImage("weights", tensors)]
        buffer = SharedBuffer(images[0].nbytes, torch.device("cuda", 0))
        copy = buffer.copy_of(images)
        with ThreadPoolExecutor(1) as thread:
            copied = thread.submit(copy)
            wait([copied])
            for tensor in tensors:
                tensor.add_(1.0)
        copied.result()
        return bytes(buffer._memory[: images[0].nbytes].numpy()) == b"".join(values.numpy().tobytes() for values in host)

    left_out = {
        "the wait for what is queued": "torch.cuda.Stream.wait_event",
        "the wait for the copy": "torch.cuda.Stream.synchronize",
    }

    def once() -> bool:
        if without not in left_out:
            return run()
        with mock.patch(left_out[without]):
            return run()

    return _late_and_refused(once)
