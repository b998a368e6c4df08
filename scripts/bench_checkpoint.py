"""Benchmark saves and loads of a policy with its optimizer over gloo: `python scripts/bench_checkpoint.py [--dp 1,2,4,8]`.

For each number of data-parallel ranks: seconds, bytes written, and the rise of a rank's resident memory (the largest of all ranks).
The rise excludes memory that the process had before and reused; it includes a worker thread's buffers.

Then what an asynchronous save costs: its stall (`begin_save`, the first one, which plans and allocates, apart; and `drain` once its
files are written, at a later step) beside a synchronous save, beside a bare copy of as many bytes in memory (the limit: a snapshot
is a copy), and beside the stall of torch's own `async_save` of the same tensors, in turn. The trainer searches the state for NaN
before either kind of save, which has a line of its own. And, on rank 0 alone, the speed of the hash beside that of `cp` and of the
disk (write and fsync), of the same file.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.bench.model import Mistake

MIB = 1 << 20
STALL, COPYING, COMPLETION = "asynchronous save", "  the copy, begin_save", "  its completion, drain"
BARE_COPY, SEARCH = "bare copy of the tensors", "search for NaN"
_RANK = re.compile(r"__(\d+)_\d+\.distcp$")


class Cost(NamedTuple):
    """Measurement of one rank: seconds, and the rise of its resident memory in bytes."""

    seconds: float
    growth: int


class Row(NamedTuple):
    """written: bytes of every rank. save, load: of the slowest and of the largest rank. verify_s: of all files, before a load.

    stalls: seconds. speeds: bytes/s.
    """

    dp: int
    parameters: int
    written: list[int]
    save: Cost
    load: Cost
    verify_s: float
    stalls: dict[str, float]
    speeds: dict[str, float]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Mistake(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 2 for wrong arguments. A rank that fails raises."""
    parser = _Parser(prog="bench_checkpoint", description="Seconds, bytes and host memory of saves and loads over gloo.")
    parser.add_argument("--dp", default="1,2,4,8", help="numbers of data-parallel ranks, comma-separated")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the model, a multiple of 64")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3, help="saves and loads, of which the median counts")
    try:
        args = parser.parse_args(argv)
        sizes = _sizes(args.dp)
        if args.hidden < 64 or args.hidden % 64 or args.layers < 1 or args.repeats < 1:
            raise Mistake("--hidden is a multiple of 64, --layers and --repeats are at least 1")
    except Mistake as error:
        print(f"bench_checkpoint: {error}", file=sys.stderr)
        return 2
    rows = [measure(dp, args.hidden, args.layers, args.repeats) for dp in sizes]
    print(report(rows))
    return 0


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise Mistake(f"--dp {text}: numbers, comma-separated") from None
    if min(sizes) < 1:
        raise Mistake(f"--dp {text}: at least 1")
    return sizes


def measure(dp: int, hidden: int, layers: int, repeats: int) -> Row:
    """Start a world of `dp` processes, which save and load `repeats` times."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank_main, (dp, hidden, layers, repeats, folder), nprocs=dp, start_method="spawn")
        found = [torch.load(Path(folder, f"rank{rank}.pt"), weights_only=True) for rank in range(dp)]
    written = [entry["written"] for entry in found]
    save, load = (Cost(max(e[what][0] for e in found), max(e[what][1] for e in found)) for what in ("save", "load"))
    stalls = {name: max(entry["stalls"][name] for entry in found) for name in found[0]["stalls"]}
    verify_s = max(entry["verify"] for entry in found)
    return Row(dp, found[0]["parameters"], written, save, load, verify_s, stalls, found[0]["speeds"])


def _rank_main(rank: int, dp: int, hidden: int, layers: int, repeats: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dp), LOCAL_WORLD_SIZE=str(dp))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=dp)
    from megappo.checkpoint.finite import non_finite_tensors
    from megappo.checkpoint.store import CheckpointStore

    engine = _engine(hidden, layers)
    engine.save_state(with_optimizer=True)  # creates the moments
    store = CheckpointStore(Path(folder, "checkpoints"), keep_last=1)
    stalls = {"first asynchronous save": _seconds(lambda: store.begin_save(0, {"policy": engine}, {}, {}))}
    store.drain()
    peers_group = dist.new_group()
    saves, turns = [], []
    for step in range(1, 2 * repeats, 2):
        saves.append(_cost(lambda: store.save(step, {"policy": engine}, {}, {})))
        stall = _seconds(lambda: store.begin_save(step + 1, {"policy": engine}, {}, {}))
        assert (pending := store.pending) is not None
        writing, completion = _seconds(lambda: pending.writer.is_done(timeout_s=None)), _seconds(store.drain)
        search = _seconds(lambda: non_finite_tensors(engine, with_optimizer=True))
        peer = _peer(engine, Path(folder, f"peer{step}"), peers_group)
        turns.append((stall + completion, stall, completion, writing, _bare_copy(engine), search, *peer))
    names = (STALL, COPYING, COMPLETION, "  until it is written", BARE_COPY, SEARCH, "torch's async_save", "  until it is written ")
    stalls |= {name: statistics.median(values) for name, values in zip(names, zip(*turns))}
    mine = [path for path in Path(folder, "checkpoints").rglob("*.distcp") if int(_RANK.search(path.name)[1]) == rank]  # type: ignore[index]
    manifest = store.find_resumable({})
    loads = [_cost(lambda: store.restore(manifest, {"policy": engine}, {})) for _ in range(repeats)]
    verifications = [_seconds(lambda: store.find_resumable({})) for _ in range(repeats)]
    found = {
        "parameters": sum(parameter.numel() for parameter in engine.named_parameters().values()),
        "written": sum(path.stat().st_size for path in mine),
        "save": _median(saves),
        "load": _median(loads),
        "verify": statistics.median(verifications),
        "stalls": stalls,
        "speeds": _speeds(max(mine, key=lambda path: path.stat().st_size), repeats) if rank == 0 else {},
    }
    torch.save(found, Path(folder, f"rank{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def _engine(hidden: int, layers: int) -> Any:
    """Build a bf16 policy of random weights with the distributed optimizer, on all ranks of the world."""
    from megappo.platform import cpu

    cpu.install()
    from megappo.config.role_sections import OptimizerConfig
    from megappo.engine.megatron import MegatronEngine
    from megappo.engine.megatron_optimizer import Optimizer, wrap_with_ddp
    from megappo.models.arch import ModelArch, Rope
    from megappo.models.build import build_model
    from megappo.parallel.groups import build_groups
    from megappo.parallel.layout import ParallelLayout

    heads = hidden // 64
    arch = ModelArch("llama", "LlamaForCausalLM", layers, hidden, heads, heads, 64, 3 * hidden, 8192, 1024, False, 1e-6, Rope())
    groups = build_groups(ParallelLayout(dist.get_world_size()))
    wrapped = wrap_with_ddp(build_model(arch, groups, dtype=torch.bfloat16), groups, distributed_optimizer=True)
    optimizer = Optimizer(wrapped, groups, OptimizerConfig(), 1)
    return MegatronEngine("policy", wrapped, groups, device=torch.device("cpu"), micro_batch_tokens=64, optimizer=optimizer)


def _cost(action: Callable[[], object]) -> Cost:
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark of the resident memory
    before, started = _resident("VmRSS"), time.monotonic()
    action()
    return Cost(time.monotonic() - started, _resident("VmHWM") - before)


def _seconds(action: Callable[[], object]) -> float:
    dist.barrier()
    started = time.monotonic()
    action()
    return time.monotonic() - started


def _bare_copy(engine: Any) -> float:
    """Seconds to copy as many bytes as this rank's tensors have into memory that has been touched."""
    source = torch.ones(sum(tensor.nbytes for tensor in engine._optimizer.tensors()), dtype=torch.uint8)
    target = torch.zeros_like(source)
    return _seconds(lambda: target.copy_(source))


def _peer(engine: Any, folder: Path, group: dist.ProcessGroup) -> tuple[float, float]:
    """Stall of torch's own asynchronous save of the tensors that this rank writes, and the seconds until they are written.

    group: of its own. It talks in a thread, and on the group of the barriers below two threads have no order that all ranks share.
    """
    tensors = {f"{dist.get_rank()}.{number}": tensor for number, tensor in enumerate(engine._optimizer.tensors())}
    held: list[Any] = []
    stall = _seconds(lambda: held.append(dcp.async_save(tensors, checkpoint_id=folder, process_group=group)))
    return stall, _seconds(held[0].result)


def _speeds(path: Path, repeats: int) -> dict[str, float]:
    """Bytes/s of what can be done with a shard file, which is in the page cache; median of `repeats`, in turn."""
    from megappo.checkpoint.hashing import cores_of_rank, hash_in_chunks

    copy, content = path.with_suffix(".copy"), path.read_bytes()

    def write() -> None:
        with copy.open("wb") as file:
            file.write(content)
            os.fsync(file.fileno())

    cores = cores_of_rank()
    actions = {
        "hash, one thread": lambda: hash_in_chunks(path, 1),
        f"hash, {cores} threads of this rank": lambda: hash_in_chunks(path, cores),
        f"hash, {os.cpu_count()} threads": lambda: hash_in_chunks(path, os.cpu_count() or 1),
        "cp": lambda: subprocess.run(["cp", path, copy], check=True),
        "write and fsync": write,
    }
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            started = time.monotonic()
            action()
            seconds[name].append(time.monotonic() - started)
            copy.unlink(missing_ok=True)
    return {name: path.stat().st_size / statistics.median(values) for name, values in seconds.items()}


def _resident(what: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return 1024 * int(line.split()[1])


def _median(costs: Sequence[Cost]) -> list[float]:
    return [statistics.median(cost.seconds for cost in costs), int(statistics.median(cost.growth for cost in costs))]


def report(rows: Sequence[Row]) -> str:
    """Format a line for each world."""
    parameters = rows[0].parameters
    lines = [f"{parameters / 1e6:.1f} million parameters in bf16, {14 * parameters / MIB:.0f} MiB with the optimizer"]
    lines.append(
        f"{'dp':>3}{'save s':>9}{'MiB written by a rank':>24}{'rise MiB':>11}{'load s':>10}{'rise MiB':>11}{'verify s':>11}"
    )
    for row in rows:
        written = f"{min(row.written) / MIB:.1f} .. {max(row.written) / MIB:.1f}"
        lines.append(
            f"{row.dp:>3}{row.save.seconds:>9.2f}{written:>24}{row.save.growth / MIB:>11.1f}"
            f"{row.load.seconds:>10.2f}{row.load.growth / MIB:>11.1f}{row.verify_s:>11.2f}"
        )
    for row in rows:
        lines += ["", f"dp {row.dp}: stall of a save, seconds (share of a synchronous save of {row.save.seconds:.2f} s)"]
        lines += [f"  {name:<28}{seconds:>8.3f}{seconds / row.save.seconds:>8.1%}" for name, seconds in row.stalls.items()]
        lines += [f"  {name:<28}{speed / 1e9:>8.2f} GB/s" for name, speed in row.speeds.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
