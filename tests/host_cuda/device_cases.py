"""Requirements of the device itself, as scenarios of one rank: each returns what the test asserts on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

SIZE = 1 << 12


def _raised(what: Callable[[], Any]) -> str:
    """The text of what it raises; "" where it raises nothing."""
    try:
        what()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def offload_on_a_stream(leave_out: str) -> Callable[[], tuple[float, float]]:
    """Computes, copies out on a side stream, overwrites, copies back, computes. leave_out: which of the waits is missing."""

    def run() -> tuple[float, float]:
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        device = torch.full((SIZE,), 3.0, device="cuda") + 1.0
        host = torch.zeros(SIZE, pin_memory=True)
        if leave_out != "copy out waits for the kernel":
            side.wait_stream(main)
        with torch.cuda.stream(side):
            host.copy_(device, non_blocking=True)
        if leave_out == "the host waits for the copy out":
            seen = float(host.sum())
        if leave_out != "the kernel waits for the copy out":
            main.wait_stream(side)
        device.zero_()
        side.synchronize()
        if leave_out != "the host waits for the copy out":
            seen = float(host.sum())
        side.wait_stream(main)
        with torch.cuda.stream(side):
            device.copy_(host, non_blocking=True)
        if leave_out != "the kernel waits for the copy back":
            main.wait_stream(side)
        total = float((device + 0.0).sum())
        torch.cuda.synchronize()
        return seen, total

    return run


WAITS = (
    "",
    "copy out waits for the kernel",
    "the kernel waits for the copy out",
    "the host waits for the copy out",
    "the kernel waits for the copy back",
)


def missing_waits(rank: int) -> dict[str, tuple[str, Any]]:
    """wait that is left out -> (what is raised, what is computed where races are let through)"""
    from host_cuda import runtime

    found = {}
    for wait in WAITS:
        raised = _raised(offload_on_a_stream(wait))
        torch.cuda.synchronize()
        with runtime.races_let_through():
            found[wait] = raised, offload_on_a_stream(wait)()
        torch.cuda.synchronize()
    return found


def freed_too_early(rank: int) -> dict[str, tuple[str, float]]:
    """A block that another stream still reads is freed, and given out again: with and without record_stream."""
    from host_cuda import runtime

    def run(record: bool) -> float:
        torch.cuda.empty_cache()
        side, host = torch.cuda.Stream(), torch.zeros(SIZE, pin_memory=True)
        block = torch.ones(SIZE, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            host.copy_(block, non_blocking=True)
        if record:
            block.record_stream(side)
        del block
        torch.full((SIZE,), 7.0, device="cuda")  # the allocator gives the block out again, unless it knows better
        torch.cuda.synchronize()
        return float(host.sum())

    found = {}
    for record in (True, False):
        raised = _raised(lambda: run(record))
        torch.cuda.synchronize()
        with runtime.races_let_through():
            found["recorded" if record else "not recorded"] = raised, run(record)
    return found


def pageable_and_queries(rank: int) -> dict[str, Any]:
    """Copies from pageable memory are over at once; an event becomes ready for those who only ask; the host's waits are counted."""
    from host_cuda import runtime

    source = torch.ones(SIZE)
    target = source.to("cuda", non_blocking=True)
    source.zero_()
    side, event, pinned = torch.cuda.Stream(), torch.cuda.Event(), torch.full((SIZE,), 5.0, pin_memory=True)
    with torch.cuda.stream(side):
        other = pinned.to("cuda", non_blocking=True)
        event.record()
    asked = 1
    while not event.query():
        asked += 1
    found = {"pageable": float(target.sum()), "asked": asked, "after the query": float(other.sum())}
    work: dict[str, Callable[[], Any]] = {
        "a copy from pinned memory": lambda: pinned.to("cuda", non_blocking=True),
        "a sum": other.sum,
        "a number": lambda: float(other[0]),
        "a list": lambda: other[:4].tolist(),
        "a copy to the host": other.cpu,
        "a mask": lambda: other[other > 0],
    }
    noticed: list[str] = []
    for name, run in work.items():
        before = runtime.counters(rank)["waits"]
        with runtime.waits_noticed(lambda name=name: noticed.append(name)):
            run()
        assert runtime.counters(rank)["waits"] - before == noticed.count(name), name
    return {**found, "waits": noticed}


def memory(rank: int) -> dict[str, Any]:
    """Counters, the limit and what cudaMemGetInfo says."""
    from host_cuda import report, runtime

    torch.cuda.empty_cache()
    runtime.reset_peak()
    free, total = torch.cuda.mem_get_info()
    before = runtime.counters()
    block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    found = {
        "total": total,
        "grown": runtime.counters()["allocated_bytes"] - before["allocated_bytes"],
        "less free": free - torch.cuda.mem_get_info()[0],
        "poison": int(block[12345]),
        "largest block": runtime.live_blocks()[-1],
    }
    half = block[: 1 << 20].clone()
    del block
    torch.cuda.empty_cache()
    found["fragmented"] = report.of_device(0)["fragmented_bytes"]
    del half
    torch.cuda.empty_cache()
    found["given back"] = runtime.counters()["allocated_bytes"] - before["allocated_bytes"]
    found["peak"] = runtime.counters()["peak_bytes"] - before["allocated_bytes"]
    found["out of memory"] = _raised(lambda: torch.empty(2 * total, dtype=torch.uint8, device="cuda"))
    found["goes on"] = float(torch.ones(3, device="cuda").sum())
    return found


def refusals(rank: int) -> dict[str, str]:
    """Calls that a GPU refuses."""
    cuda, cpu = torch.ones(4, device="cuda"), torch.ones(4)
    indexed = cuda.clone()
    number = cuda * torch.tensor(2.0)
    indexed[torch.tensor([0, 2])] = 5.0
    noncontiguous = torch.ones(4, 4, device="cuda").t()
    no_modes = torch.utils._python_dispatch._disable_current_modes

    def without_the_mode() -> None:
        with no_modes():
            torch.ones(4, device="cuda").sum()

    return {
        "mixed": _raised(lambda: cuda + cpu),
        "mixed by index": _raised(lambda: cuda.index_add(0, torch.tensor([1]), torch.ones(1, device="cuda"))),
        "out on the host": _raised(lambda: torch.add(cuda, cuda, out=cpu)),
        "number and index": f"{float(number.sum())} {float(indexed.sum())}",
        "kernel": _raised(without_the_mode),
        "nccl, not contiguous": _raised(lambda: torch.distributed.all_reduce(noncontiguous)),
    }


def random_numbers(rank: int) -> dict[str, bool]:
    """The CUDA generator's state can be saved and set, also inside a recomputed block."""
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first, second = torch.rand(8, device="cuda"), torch.rand(8, device="cuda")
    before = torch.get_rng_state()
    torch.cuda.set_rng_state(state)
    again = torch.rand(8, device="cuda")
    own = [torch.randn(4, device="cuda", generator=torch.Generator("cuda").manual_seed(5)) for _ in range(2)]
    return {
        "same": torch.equal(first, again),
        "differs": not torch.equal(first, second),
        "own": torch.equal(*own),
        "host's generator untouched": torch.equal(before, torch.get_rng_state()),
    }


def written_out_kernels(rank: int) -> dict[str, float]:
    """Largest difference of each written-out operation, forward and backward, from plain torch in fp64 on the host."""
    torch.manual_seed(0)
    found = {}

    def hold(name: str, on_device: Callable, on_host: Callable, *inputs: torch.Tensor) -> None:
        results = []
        for run, place in ((on_device, lambda x: x.cuda()), (on_host, lambda x: x.double())):
            leaves = [place(x).detach().requires_grad_() for x in inputs]
            out = run(*leaves)
            torch.manual_seed(1)
            (out * torch.randn(out.shape).to(out)).sum().backward()
            results.append([x.detach().cpu().double() for x in (out, *(leaf.grad for leaf in leaves))])
        found[name] = max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(*results))

    q, k, v = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)

    def plain(q, k, v):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = (q @ k.transpose(2, 3) / 4).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
        return scores.softmax(-1) @ v

    hold("attention", lambda *x: F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True), plain, q, k, v)
    weight = torch.randn(16)
    norm = lambda x, w: F.rms_norm(x, (16,), w, 1e-6)
    hold("rms norm", norm, norm, q, weight)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)

    def packed(q, k, v):
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(q, k, v, cu.cuda(), cu.cuda(), 5, 5, window_size=(-1, 0), enable_gqa=True)

    def one_by_one(q, k, v):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        outs = []
        for a, b in ((0, 4), (4, 9)):
            scores = torch.einsum("ihd,jhd->hij", q[a:b], k[a:b]) / 4
            p = scores.masked_fill(torch.ones(b - a, b - a).triu(1).bool(), -torch.inf).softmax(-1)
            outs.append(torch.einsum("hij,jhd->ihd", p, v[a:b]))
        return torch.cat(outs)

    half = [x[0].transpose(0, 1).contiguous().bfloat16().float() for x in (q, k, v)]
    hold("varlen attention, bf16", lambda *x: packed(*(y.bfloat16() for y in x)).float(), one_by_one, *half)
    a, b = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16()
    found["mm to fp32"] = float((torch.mm(a.cuda(), b.cuda(), out_dtype=torch.float32).cpu() - a.float() @ b.float()).abs().max())
    half_softmax = torch.softmax(a.cuda(), -1, dtype=torch.float32).cpu()
    found["softmax of bf16"] = float((half_softmax - torch.softmax(a.float(), -1)).abs().max())
    return found


def two_devices(rank: int) -> dict[str, Any]:
    """Peer copies go from one device to the other, and mixing the devices is refused."""
    a = torch.arange(4.0, device="cuda:0")
    b = a.to("cuda:1")
    return {"sum": float(b.sum()), "device": str(b.device), "mixed": _raised(lambda: a + b)}


def nccl_rules(rank: int) -> dict[str, str]:
    """Two ranks: what NCCL does not allow, or does later than gloo."""
    import torch.distributed as dist
    from host_cuda import runtime

    only = dist.new_group([0, 1], backend="nccl")
    x = torch.full((4,), float(rank + 1), device="cuda")
    found = {"backend": f"{dist.get_backend(only)} {only._device_types}"}
    found["cpu"] = _raised(lambda: dist.all_reduce(torch.ones(4), group=only))
    mean = x.clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=only)
    found["mean"] = str(mean.tolist())
    early = x.clone()
    work = dist.all_reduce(early, async_op=True)
    found["early"] = _raised(lambda: early + 1)
    with runtime.races_let_through():
        found["early numbers"] = str((early + 0).tolist())
    work.wait()
    found["in time"] = str(early.tolist())
    call = dist.all_reduce if rank else (lambda t: dist.broadcast(t, 0))
    found["order"] = _raised(lambda: call(x.clone()))
    found["shapes"] = _raised(lambda: dist.all_reduce(torch.ones(3 + rank, device="cuda")))
    received = torch.empty(4, device="cuda")
    for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]):
        request.wait()
    found["exchanged"] = str(received.tolist())
    return found


def late_rank(rank: int) -> str:
    """One rank comes later than its group's limit allows."""
    import time
    from datetime import timedelta

    import torch.distributed as dist

    group = dist.new_group([0, 1], backend="nccl", timeout=timedelta(seconds=2))
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x, group=group)
    if rank:
        time.sleep(5)
    return _raised(lambda: dist.all_reduce(x, group=group))
