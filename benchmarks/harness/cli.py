"""Command line of all benchmarks: device, shapes, candidates, repetitions and output files."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.clock import Clock, Memory, set_freed_memory
from benchmarks.harness.harness import Prepared, Settings, measure, prepare
from benchmarks.harness.model import Benchmark, Mistake, Parser, Report
from benchmarks.harness.report import markdown, table, write_json, write_plot
from megappo.ops import dispatch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COPY_MIB = {"cpu": 256, "cuda": 1024}
QUICK_COPY_MIB = 32
# The most that a candidate's first call may take, compilation included.
FIRST_CALL_S, QUICK_FIRST_CALL_S = 240.0, 30.0
Bars = Callable[[Sequence[Report], str], Sequence[Any]]


def run(name: str, description: str, benchmarks: Sequence[Benchmark], argv: Sequence[str] | None, bars: Bars | None = None) -> int:
    """Run the benchmarks. Exit code: 0, 1 if one of our ops failed or --check found a wrong result, 2 for wrong arguments."""
    try:
        args = _parser(name, description, benchmarks).parse_args(argv)
        return _run(name, benchmarks, args, bars)
    except Mistake as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2


def _parser(name: str, description: str, benchmarks: Sequence[Benchmark]) -> argparse.ArgumentParser:
    forms = "; ".join(
        f"{b.name}: {b.shape_form}, by default {' '.join(b.shapes['cpu'])} (CPU), {' '.join(b.shapes['cuda'])} (GPU)"
        for b in benchmarks
    )
    parser = Parser(prog=name, description=description, epilog=f"Shapes: {forms}")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--shapes", help="comma-separated, instead of the defaults; NAME:SHAPE for one of several ops")
    parser.add_argument("--dtypes", help=f"comma-separated, of {', '.join(DTYPES)}; ops of per-token values are fp32 only")
    parser.add_argument("--only", help=f"comma-separated ops, of {', '.join(b.name for b in benchmarks)}")
    parser.add_argument("--without", default="", help="comma-separated candidates to leave out, by the start of their names")
    parser.add_argument("--repeats", type=int, default=20, help="timed repetitions of each candidate")
    parser.add_argument("--seconds", type=float, default=20.0, help="measuring time of a candidate, 3 repetitions at least")
    parser.add_argument("--best", action="store_true", help="show the best repetition, not the median (a busy machine)")
    parser.add_argument("--threads", type=int, help="threads of PyTorch and of our kernels on the CPU")
    parser.add_argument("--quick", action="store_true", help="5 repetitions, a small copy probe, and nothing that compiles")
    parser.add_argument("--check", action="store_true", help="compare every candidate with the fp64 oracle before timing it")
    parser.add_argument(
        "--system-malloc",
        action="store_true",
        help="leave freed memory to malloc (CPU): charges candidates the page faults of large blocks",
    )
    parser.add_argument("--json", type=Path, help="file for everything measured")
    parser.add_argument("--markdown", type=Path, help="file for the tables in Markdown")
    parser.add_argument("--plot", type=Path, help="PNG")
    return parser


def _run(name: str, benchmarks: Sequence[Benchmark], args: argparse.Namespace, bars: Bars | None) -> int:
    chosen = _chosen(benchmarks, args.only)
    device = _device(args.device)
    shapes = _shapes(chosen, args.shapes, device.type)
    dtypes = _dtypes(args.dtypes)
    if args.repeats < 1:
        raise Mistake(f"--repeats {args.repeats}: at least 1")
    if args.threads is not None:
        if args.threads < 1:
            raise Mistake(f"--threads {args.threads}: at least 1")
        torch.set_num_threads(args.threads)
    for path in (args.json, args.markdown, args.plot):
        if path is not None and not path.parent.is_dir():
            raise Mistake(f"{path}: there is no folder {path.parent}")
    for benchmark in chosen:
        for shape in shapes[benchmark.name]:
            benchmark.read(shape)

    settings = _settings(args)
    clock = Clock(device, (QUICK_COPY_MIB if args.quick else COPY_MIB[device.type]) * 2**20)
    freed = "usual" if args.system_malloc else "kept"
    machine = describe(device, freed, settings)
    print("\n".join(f"{key}: {value}" for key, value in machine.items()), flush=True)
    problems = [
        (benchmark, shape, dtype)
        for benchmark in chosen
        for shape in shapes[benchmark.name]
        for dtype in dtypes or benchmark.dtypes[device.type]
        if dtype in benchmark.dtypes["cpu"]
    ]
    reports: list[Report] = []
    prepared: list[Prepared] = []
    try:
        # all are weighed before any is timed: once freed memory is kept, the resident set no longer says what is alive
        set_freed_memory("returned")
        prepared += [_prepared(*problem, clock, settings) for problem in problems]
        set_freed_memory(freed)
        for problem in prepared:
            reports.append(measure(problem, clock, settings))
            print("\n" + table(reports[-1]), flush=True)
    finally:
        set_freed_memory("usual")
        for problem in prepared:
            problem.close()
    verdicts = list(bars(reports, device.type)) if bars else []
    if verdicts:
        print("\nbars:\n" + "\n".join(f"  {verdict}" for verdict in verdicts))
    if args.json:
        write_json(args.json, machine, reports, verdicts)
    if args.markdown:
        args.markdown.write_text(markdown(reports, verdicts), encoding="utf-8")
    if args.plot:
        write_plot(args.plot, f"{name}: {machine['machine']}, {machine['threads']} threads", reports)
    return _faults(name, reports)


def _prepared(benchmark: Benchmark, shape: str, dtype: torch.dtype, clock: Clock, settings: Settings) -> Prepared:
    started = time.perf_counter()
    made = prepare(benchmark, shape, dtype, clock, settings)
    done = "compiled, checked and weighed" if settings.check else "compiled and weighed"
    print(f"{benchmark.name} {shape} {dtype}: {done} in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return made


def _faults(name: str, reports: Sequence[Report]) -> int:
    """Print wrong results and failures of our own ops, one line each; returns 1 if there are any."""
    code = 0
    for report in reports:
        for line in report.lines:
            if line.status == "wrong" or (line.status == "failed" and line.kind == "ours"):
                print(
                    f"{name}: {report.benchmark} {report.shape} {report.dtype}: {line.candidate} {line.status}: {line.reason}",
                    file=sys.stderr,
                )
                code = 1
    return code


def _chosen(benchmarks: Sequence[Benchmark], only: str | None) -> list[Benchmark]:
    if only is None:
        return list(benchmarks)
    names = {benchmark.name: benchmark for benchmark in benchmarks}
    for wanted in only.split(","):
        if wanted not in names:
            raise Mistake(f"--only {wanted}: there are {', '.join(names)}")
    return [names[wanted] for wanted in only.split(",")]


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise Mistake("--device cuda: this torch sees no GPU; use --device cpu")
    kind = "cuda" if wanted == "auto" and torch.cuda.is_available() else wanted if wanted != "auto" else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _shapes(chosen: Sequence[Benchmark], text: str | None, kind: str) -> dict[str, list[str]]:
    if text is None:
        return {benchmark.name: list(benchmark.shapes[kind]) for benchmark in chosen}
    shapes: dict[str, list[str]] = {benchmark.name: [] for benchmark in chosen}
    for item in text.split(","):
        name, colon, shape = item.rpartition(":")
        if colon and name not in shapes:
            raise Mistake(f"--shapes {item}: {name} is not one of {', '.join(shapes)}")
        for target in [name] if colon else list(shapes):
            shapes[target].append(shape)
    return shapes


def _dtypes(text: str | None) -> list[torch.dtype]:
    if text is None:
        return []
    for name in text.split(","):
        if name not in DTYPES:
            raise Mistake(f"--dtypes {name}: use {', '.join(DTYPES)}")
    return [DTYPES[name] for name in text.split(",")]


def _settings(args: argparse.Namespace) -> Settings:
    leave_out = tuple(name.strip() for name in args.without.split(",") if name.strip())
    if args.quick:
        leave_out += ("torch.compile", "Megatron-core fused")
    return Settings(
        repeats=min(args.repeats, 5) if args.quick else args.repeats,
        warm_up=1 if args.quick else 3,
        seconds=args.seconds,
        first_call_s=QUICK_FIRST_CALL_S if args.quick else FIRST_CALL_S,
        check=args.check,
        leave_out=leave_out,
        show_best=args.best,
    )


def describe(device: torch.device, freed: str, settings: Settings) -> dict[str, Any]:
    """Facts of the machine and the settings, for comparisons of two runs."""
    return {
        "machine": _machine_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "memory": Memory(device).method or "not measured: this system cannot reset the peak of the resident set",
        "freed memory": freed if device.type == "cpu" else "kept by torch",
        "auto runs": _selected(device),
        "times": f"{'best' if settings.show_best else 'median'} of {settings.repeats} repetitions, quartiles' distance",
        "checked": "every candidate against the fp64 oracle" if settings.check else "no (--check)",
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()) if hasattr(os, "getloadavg") else "unknown",
    }


def _selected(device: torch.device) -> str:
    ops: dict[str, list[str]] = {}
    for name, chosen in dispatch.selected(device.type).items():
        ops.setdefault(chosen, []).append(name)
    return "; ".join(f"{chosen}: {', '.join(names)}" for chosen, names in ops.items())


def _machine_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if cpuinfo.exists()
        else []
    )
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
