"""Benchmark saves and loads of a policy with its optimizer over gloo: `python benchmarks/bench_checkpoint.py [--dp 1,2,4,8]`.

For each number of data-parallel ranks: seconds, bytes written, and the rise of a rank's resident memory (the largest of all ranks).
The rise excludes memory that the process had before and reused; it includes a worker thread's buffers.

Then what an asynchronous save costs: its stall (`begin_save`, the first one, which plans and allocates, apart; and `drain` once its
files are written, at a later step) beside a synchronous save with hashes and fsync, beside a bare copy of as many bytes in memory
(of which a snapshot is one), and beside the stall of torch's own `async_save` of the same tensors, in turn: medians, and the
fastest of all, as what disturbs a save makes it slower, never faster. A thread makes the copy while the next step generates; an
update that comes before it is complete waits for it, so there is a line for the worst case, an update that follows at once.
Processor time is that of the training thread. The trainer
searches the state for NaN before either kind of save, which has a line of its own. And what verification adds to a resume, which
hashes the files while it builds the model: the same build and load without it, with it before the build, and with it meanwhile, in
turn, from the page cache and from the disk. And, on rank 0 alone, the speed of the hash beside that of `cp` and of the disk (write
and fsync), of the same file.

`--metrics runs/NAME/metrics.jsonl` measures nothing: it prints which share of that run's wall time its saves would hold training
for with `checkpoint.save_every: 50`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness.model import Mistake, Parser
from megappo.telemetry.metrics import Metric

MIB = 1 << 20
SYNCHRONOUS = "synchronous save"
STALL, BEGIN, COMPLETION = "asynchronous save", "  begin_save", "  its completion, drain"
WORST_STALL = "  if an update follows at once"
STALL_PROCESSOR, WRITTEN = "  processor time of both", "  until it is written"
BARE_COPY, BARE_COPY_PROCESSOR, SEARCH = "bare copy of its bytes", "  processor time", "search for NaN"
RESUMES: dict[str, bool | None] = {"build and load": None, "  verified before": True, "  verified meanwhile": False}
"""Name -> `wait` of `find_resumable`; None: without it."""
FROM = ("from the page cache", "from the disk")
INTERVAL = 50
"""Steps between saves for which a share of the wall time is promised (F15)."""


class Cost(NamedTuple):
    """Measurement of one rank: seconds, and the rise of its resident memory in bytes."""

    seconds: float
    growth: int


class Row(NamedTuple):
    """written: bytes of every rank. save, load: of the slowest and of the largest rank. verify_s: of all files, before a load.

    stalls, resumes: median seconds. fastest: the least of `stalls`, and of the save, each of the slowest rank. speeds: bytes/s.
    """

    dp: int
    parameters: int
    written: list[int]
    save: Cost
    load: Cost
    verify_s: float
    stalls: dict[str, float]
    fastest: dict[str, float]
    resumes: dict[str, float]
    speeds: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 2 for wrong arguments. A rank that fails raises."""
    parser = Parser(prog="bench_checkpoint", description="Seconds, bytes and host memory of saves and loads over gloo.")
    parser.add_argument("--dp", default="1,2,4,8", help="numbers of data-parallel ranks, comma-separated")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the model, a multiple of 64")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3, help="saves and loads, of which the median counts")
    parser.add_argument("--metrics", type=Path, help="metrics.jsonl of a run: print the share of its saves, and measure nothing")
    parser.add_argument("--save-every", type=int, default=INTERVAL, help="checkpoint.save_every of that run")
    try:
        args = parser.parse_args(argv)
        sizes = _sizes(args.dp)
        if args.hidden < 64 or args.hidden % 64 or args.layers < 1 or min(args.repeats, args.save_every) < 1:
            raise Mistake("--hidden is a multiple of 64, --layers, --repeats and --save-every are at least 1")
        if args.metrics is not None:
            print(share_of_run(args.metrics, args.save_every))
            return 0
    except Mistake as error:
        print(f"bench_checkpoint: {error}", file=sys.stderr)
        return 2
    rows = [measure(dp, args.hidden, args.layers, args.repeats) for dp in sizes]
    print(report(rows))
    return 0


def share_of_run(metrics: Path, save_every: int) -> str:
    """Share of a run's wall time that its saves would hold training for at one in `INTERVAL` steps; it made one in `save_every`."""
    try:
        steps = [json.loads(line) for line in metrics.read_text().splitlines()]
        held, durations = (sum(step.get(name) or 0.0 for step in steps) for name in (Metric.SAVE_SECONDS, Metric.STEP_SECONDS))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise Mistake(f"--metrics {metrics}: {error}") from None
    if len(steps) < 2 * save_every or not held:
        raise Mistake(f"--metrics {metrics}: {len(steps)} steps in which saves took {held} s; at least two saves are needed")
    of_save, step = held * save_every / len(steps), durations / len(steps)
    return (
        f"a save holds training for {1000 * of_save:.0f} ms, search for NaN included (mean of {len(steps) // save_every}), "
        f"a step takes {step:.2f} s: {of_save / (of_save + INTERVAL * step):.2%} of the time with a save every {INTERVAL} steps"
    )


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
    kinds = ("stalls", "fastest", "resumes")
    stalls, fastest, resumes = ({name: max(e[what][name] for e in found) for name in found[0][what]} for what in kinds)
    verify_s = max(entry["verify"] for entry in found)
    return Row(dp, found[0]["parameters"], written, save, load, verify_s, stalls, fastest, resumes, found[0]["speeds"])


def _rank_main(rank: int, dp: int, hidden: int, layers: int, repeats: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dp), LOCAL_WORLD_SIZE=str(dp))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=dp)
    from megappo.checkpoint.state import non_finite_tensors
    from megappo.checkpoint.store import CheckpointStore

    engine = _engine(hidden, layers)
    engine.save_state(with_optimizer=True)  # creates the moments
    store = CheckpointStore(Path(folder, "checkpoints"), keep_last=1)
    stalls = {"first asynchronous save": _seconds(lambda: store.begin_save(0, {"policy": engine}, {}, {}))}
    store.drain()
    peers_group = dist.new_group()

    def mine(step: int) -> list[Path]:
        shards = Path(folder, "checkpoints", f"step-{step}").rglob(f"models/policy/{rank:05d}.safetensors")
        return list(shards)

    saves, turns = [], []
    for step in range(1, 2 * repeats, 2):
        saves.append(_cost(lambda: store.save(step, {"policy": engine}, {}, {})))
        stall, stall_processor = _seconds_and_processor(lambda: store.begin_save(step + 1, {"policy": engine}, {}, {}))
        assert store.pending is not None
        copying = _seconds(store.pending.submitted.result)
        writing = _seconds(partial(store.pending.writer.is_done, timeout_s=None))
        completion, completion_processor = _seconds_and_processor(store.drain)
        processor = stall_processor + completion_processor
        search = _seconds(lambda: non_finite_tensors(engine, with_optimizer=True))
        peer = _peer(engine, Path(folder, f"peer{step}"), peers_group)
        stalls_of_both = (stall + completion, stall, completion, stall + copying + completion)
        turns.append((*stalls_of_both, processor, copying + writing, *_bare_copy(mine(step + 1)), search, *peer))
    names = (STALL, BEGIN, COMPLETION, WORST_STALL, STALL_PROCESSOR, WRITTEN, BARE_COPY, BARE_COPY_PROCESSOR, SEARCH)
    names += ("torch's async_save", "  until it is written ")
    stalls |= {name: statistics.median(values) for name, values in zip(names, zip(*turns))}
    fastest = {SYNCHRONOUS: min(cost.seconds for cost in saves)} | {name: min(values) for name, values in zip(names, zip(*turns))}
    manifest = store.find_resumable({})
    loads = [_cost(lambda: store.restore(manifest, {"policy": engine}, {})) for _ in range(repeats)]
    verifications = [_seconds(lambda: store.find_resumable({})) for _ in range(repeats)]
    found = {
        "parameters": sum(parameter.numel() for parameter in engine.named_parameters().values()),
        "written": sum(path.stat().st_size for path in mine(manifest.step)),
        "save": _median(saves),
        "load": _median(loads),
        "verify": statistics.median(verifications),
        "stalls": stalls,
        "fastest": fastest,
        "resumes": _resumes(store, lambda: _engine(hidden, layers, engine.groups), Path(folder, "checkpoints"), repeats),
        "speeds": _speeds(max(mine(manifest.step), key=lambda path: path.stat().st_size), repeats) if rank == 0 else {},
    }
    torch.save(found, Path(folder, f"rank{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def _resumes(store: Any, build: Callable[[], Any], place: Path, repeats: int) -> dict[str, float]:
    """Median seconds of a build and a load, by what there is of verification and where the files lie."""
    seconds: dict[str, list[float]] = {}
    manifest = store.find_resumable({})

    def resume(wait: bool | None) -> None:
        found = manifest if wait is None else store.find_resumable({}, wait=wait)
        store.restore(found, {"policy": build()}, {})

    for _ in range(repeats):
        for source in FROM:
            for name, wait in RESUMES.items():
                if source == FROM[1]:
                    dist.barrier()
                    _drop_from_cache(place)
                seconds.setdefault(f"{name}, {source}", []).append(_seconds(lambda: resume(wait)))
    return {name: statistics.median(values) for name, values in seconds.items()}


def _drop_from_cache(place: Path) -> None:
    """Let the system forget the pages of all files below, which are on the disk."""
    for path in place.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _engine(hidden: int, layers: int, groups: Any = None) -> Any:
    """Build a bf16 policy of random weights with the distributed optimizer, on all ranks of the world."""
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    from megappo.config.role_sections import OptimizerConfig
    from megappo.engine.megatron import MegatronEngine
    from megappo.engine.megatron_optimizer import Optimizer, wrap_with_ddp
    from megappo.engine.role_engine import EngineSettings
    from megappo.models.arch import ModelArch, Rope
    from megappo.models.build import build_model
    from megappo.parallel.groups import build_groups
    from megappo.parallel.layout import ParallelLayout

    heads = hidden // 64
    arch = ModelArch("llama", "LlamaForCausalLM", layers, hidden, heads, heads, 64, 3 * hidden, 8192, 1024, False, 1e-6, Rope())
    groups = groups or build_groups(ParallelLayout(dist.get_world_size()))
    wrapped = wrap_with_ddp(build_model(arch, groups, dtype=torch.bfloat16), groups, distributed_optimizer=True)
    optimizer = Optimizer(wrapped, groups, OptimizerConfig(), 1)
    return MegatronEngine("policy", wrapped, groups, EngineSettings(torch.device("cpu"), 64), optimizer=optimizer)


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


def _seconds_and_processor(action: Callable[[], object]) -> tuple[float, float]:
    """Wall time, and processor time of this thread."""
    dist.barrier()
    started, before = time.monotonic(), time.thread_time()
    action()
    return time.monotonic() - started, time.thread_time() - before


def _bare_copy(files: Sequence[Path]) -> tuple[float, float]:
    """Wall and processor seconds to copy as many bytes as these files have into memory that has been touched."""
    source = torch.ones(sum(path.stat().st_size for path in files), dtype=torch.uint8)
    target = torch.zeros_like(source)
    return _seconds_and_processor(lambda: target.copy_(source))


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
    from megappo.checkpoint.files import cores_of_rank, hash_file

    copy, content = path.with_suffix(".copy"), path.read_bytes()

    def write() -> None:
        with copy.open("wb") as file:
            file.write(content)
            os.fsync(file.fileno())

    cores = cores_of_rank()
    actions = {
        "hash, one thread": lambda: hash_file(path, 1),
        f"hash, {cores} threads of this rank": lambda: hash_file(path, cores),
        f"hash, {os.cpu_count()} threads": lambda: hash_file(path, os.cpu_count() or 1),
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
        least = row.fastest[SYNCHRONOUS]
        of_save = f"share of a synchronous save ({row.save.seconds:.2f} and {least:.2f} s)"
        lines += ["", f"dp {row.dp}: stall of a save, median and fastest, seconds and {of_save}"]
        for name, seconds in row.stalls.items():
            best = row.fastest.get(name, seconds)
            lines.append(f"  {name:<32}{seconds:>8.3f}{seconds / row.save.seconds:>8.1%}{best:>10.3f}{best / least:>8.1%}")
        lines += [f"  {name:<40}{seconds:>8.3f}" for name, seconds in row.resumes.items()]
        lines += [f"  {name:<28}{speed / 1e9:>8.2f} GB/s" for name, speed in row.speeds.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
