"""Targets of the kernels, and the comparison of a run's figures with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.harness.model import Line, Report
from benchmarks.harness.report import duration

MET, NOT_MET, NOT_MEASURED = "met", "not met", "not measured"
RECOMPUTED, WIDENED = "fwd+bwd, logits recomputed", "the same, products in fp32"
PYTHON_LOOP = "Python loop over numbers"
NAIVE = "torch eager, log_softmax"

# Targets on an H200: (op, shape, phase, implementation or None for any, most milliseconds).
GPU_TARGETS = (
    ("logprob", "8192x151936", "forward", None, 0.66),
    ("logprob", "8192x151936", "backward", None, 1.30),
    ("linear_logprob", "8192x4096x151936", "forward", "megappo cuda", 14.2),
    ("linear_logprob", "8192x4096x151936", "forward", "megappo triton", 18.0),
    ("linear_logprob", "8192x4096x151936", "backward", None, 42.5),
    ("linear_logprob", "8192x4096x151936", "backward", "megappo cuda, kept logits", 29.0),
    ("linear_loss", "8192x4096x151936", "both", None, 43.0),
    ("linear_loss", "8192x4096x151936", "both", "megappo cuda", 46.0),  # on an H100
    # 1.2 to 1.7 times the time of 21 bytes a token at 4.3 TB/s.
    ("gae", "512x4096", "forward", None, 0.017),
    ("gae", "4096x8192", "forward", None, 0.191),
    ("gae", "4Mi", "forward", None, 0.031),
)


@dataclass(frozen=True)
class Bar:
    name: str
    required: str
    measured: str
    verdict: str

    def __str__(self) -> str:
        return f"{self.name}: required {self.required}; measured {self.measured}: {self.verdict}"


def bars(reports: Sequence[Report], kind: str) -> list[Bar]:
    """Bars of the reports' kind of device ("cpu", "cuda")."""
    return list(_cpu_bars(reports) if kind == "cpu" else _gpu_bars(reports))


def _cpu_bars(reports: Sequence[Report]) -> Iterator[Bar]:
    for dtype in ("float32", "bfloat16"):
        yield _logprob(_find(reports, "logprob", "2048x32000", dtype), dtype)
        report = _find(reports, "linear_logprob", "1024x512x32000", dtype)
        yield _linear_time(report, dtype)
        if dtype == "bfloat16":
            yield _linear_time(report, dtype, "megappo cpp, bf16 logits")
        yield _linear_memory(report, dtype)
    report = _find(reports, "gae", "1Mi", "float32")
    yield _faster("GAE, packed 1 Mi tokens, over a Python loop", report, 100.0, [PYTHON_LOOP])
    plain = [line for line in report.lines if line.kind in ("torch", "compile")] if report else []
    others = [line.candidate for line in plain if not line.candidate.startswith("Python")]
    yield _faster("GAE, packed 1 Mi tokens, over the best vectorised PyTorch", report, 3.0, others)


def _gpu_bars(reports: Sequence[Report]) -> Iterator[Bar]:
    yield _beside_compile(_find(reports, "linear_logprob", "8192x4096x151936", "bfloat16"))
    for op, shape, phase, name, most_ms in GPU_TARGETS:
        report = _find(reports, op, shape, "float32" if op == "gae" else "bfloat16")
        line = _named(report, phase, name) if name else _ours(report, phase)
        title = f"{op} {shape} {phase}" + (f", {name}" if name else "")
        if line is None:
            yield Bar(title, f"<= {most_ms} ms", "nothing", NOT_MEASURED)
        else:
            milliseconds = 1e3 * line.times[phase].shown
            yield Bar(title, f"<= {most_ms} ms", f"{milliseconds:.3f} ms ({line.candidate})", _verdict(milliseconds <= most_ms))


def _beside_compile(report: Report | None) -> Bar:
    title, required = "linear_logprob 8192x4096x151936 both", "<= 1.15x torch.compile, <= 1.5 GB beyond outputs and gradients"
    line, best = _named(report, "both", "megappo cuda"), _best(report, "both", ("compile",))
    if line is None or best is None or line.workspace_bytes is None:
        return Bar(title, required, "nothing", NOT_MEASURED)
    ratio, gigabytes = line.times["both"].shown / best.times["both"].shown, line.workspace_bytes / 1e9
    return Bar(title, required, f"{ratio:.2f}x, {gigabytes:.2f} GB", _verdict(ratio <= 1.15 and gigabytes <= 1.5))


def _logprob(report: Report | None, dtype: str) -> Bar:
    title = f"log-prob and entropy fwd+bwd [2048 x 32000] {dtype}"
    required = ">= 2x the best of torch eager and torch.compile, or >= 70 % of copy bandwidth"
    line, best = _ours(report, "both"), _best(report, "both", ("torch", "compile"))
    if report is None or line is None or best is None:
        return Bar(title, required, "nothing", NOT_MEASURED)
    speedup, share = best.times["both"].shown / line.times["both"].shown, 1 / line.ratios["both"]
    measured = f"{speedup:.2f}x ({line.candidate} against {best.candidate}), {share:.0%} of copy bandwidth"
    if not _compiled(report) and share < 0.7:
        return Bar(title, required, measured + ", without torch.compile", NOT_MEASURED)
    return Bar(title, required, measured, _verdict(speedup >= 2 or share >= 0.7))


def _linear_time(report: Report | None, dtype: str, name: str | None = None) -> Bar:
    title = f"linear log-prob fwd+bwd [1024 x 512 x 32000] {dtype}, time" + (", logits rounded to bf16" if name else "")
    required = f"<= 1.15x bare products of {dtype} (4: the logits are computed twice)"
    line = _named(report, "both", name) if name else _ours(report, "both")
    if report is None or line is None:
        return Bar(title, required, "nothing", NOT_MEASURED)
    seconds = line.times["both"].shown
    ratio = seconds / report.floors[RECOMPUTED]
    measured = f"{ratio:.2f}x of {duration(report.floors[RECOMPUTED])} ({line.candidate})"
    if WIDENED in report.floors and name is None:
        # the CPU's products of bf16 cannot give logits in fp32
        measured += f", {seconds / report.floors[WIDENED]:.2f}x of products in fp32"
    return Bar(title, required, measured, _verdict(ratio <= 1.15))


def _linear_memory(report: Report | None, dtype: str) -> Bar:
    title = f"linear log-prob fwd+bwd [1024 x 512 x 32000] {dtype}, memory"
    required = "< 10 % of the naive peak, beyond inputs, outputs and gradients"
    line = _ours(report, "both")
    naive = next((line for line in report.lines if line.candidate == NAIVE), None) if report else None
    if line is None or naive is None or line.workspace_bytes is None or not naive.workspace_bytes:
        return Bar(title, required, "nothing", NOT_MEASURED)
    share = line.workspace_bytes / naive.workspace_bytes
    measured = f"{share:.1%} ({line.workspace_bytes / 2**20:.1f} of {naive.workspace_bytes / 2**20:.1f} MiB)"
    return Bar(title, required, measured, _verdict(share < 0.1))


def _faster(title: str, report: Report | None, factor: float, others: Sequence[str]) -> Bar:
    required = f">= {factor:.0f}x"
    line = _ours(report, "forward")
    found = [other for other in report.lines if other.candidate in others and other.times] if report else []
    if line is None or not found:
        return Bar(title, required, "nothing", NOT_MEASURED)
    best = min(found, key=lambda other: other.times["forward"].shown)
    speedup = best.times["forward"].shown / line.times["forward"].shown
    return Bar(title, required, f"{speedup:.1f}x ({line.candidate} against {best.candidate})", _verdict(speedup >= factor))


def _find(reports: Sequence[Report], benchmark: str, shape: str, dtype: str) -> Report | None:
    return next((r for r in reports if (r.benchmark, r.shape, r.dtype) == (benchmark, shape, dtype)), None)


def _ours(report: Report | None, phase: str) -> Line | None:
    """Our fastest implementation; the reference only if there is no other. Variants, which have a comma in their name, are left
    out."""
    timed = [line for line in report.lines if line.kind == "ours" and phase in line.times] if report else []
    lines = [line for line in timed if "," not in line.candidate]
    kernels = [line for line in lines if line.candidate != "megappo reference"] or lines
    return min(kernels, key=lambda line: line.times[phase].shown, default=None)


def _named(report: Report | None, phase: str, name: str) -> Line | None:
    lines = report.lines if report else []
    return next((line for line in lines if line.candidate == name and phase in line.times), None)


def _best(report: Report | None, phase: str, kinds: Sequence[str]) -> Line | None:
    lines = [line for line in report.lines if line.kind in kinds and phase in line.times] if report else []
    return min(lines, key=lambda line: line.times[phase].shown, default=None)


def _compiled(report: Report) -> bool:
    return any(line.kind == "compile" and line.times for line in report.lines)


def _verdict(reached: bool) -> str:
    return MET if reached else NOT_MET
