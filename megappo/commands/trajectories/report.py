"""Figures of trajectories as tables for a terminal, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megappo.commands.trajectories.analyse import Analysis, Correlation, Sample
from megappo.commands.trajectories.repetition import LEAST_REPEATS, NGRAM
from megappo.telemetry.metrics import finite_or_none
from megappo.telemetry.tables import plain, table

MOST_STEPS = 24  # rows of a table that fits a screen
EXCERPT = 60  # characters of a response
LEGEND = f"""\
cut: by the length limit. rep-{NGRAM}: repeated {NGRAM}-grams. dist-2: different 2-grams of a step.
loop: tokens/period of a block that ends a response {LEAST_REPEATS} times or more. equal: to an earlier answer to the same prompt.
KL: log pi - log pi_ref, summed over a response or per token, nats. bias, rms error: of value - return."""


def report(analysis: Analysis) -> list[str]:
    """Lines of all tables."""
    lines = [*_steps(analysis), "", *_lengths(analysis), "", *_positions(analysis)]
    for title, samples, from_end in (
        ("lowest score", analysis.worst.score, False),
        ("highest KL to the reference", analysis.worst.kl, False),
        ("most repetitive", analysis.worst.repetition, True),
    ):
        if samples:
            lines += ["", f"{title}:", *_samples(samples, from_end=from_end)]
    return lines


def as_json(analysis: Analysis) -> dict[str, Any]:
    """All figures, JSON-compatible; numbers that do not exist are null."""
    figures = {
        "steps": [asdict(one) for one in analysis.steps],
        "lengths": [asdict(one) for one in analysis.lengths],
        "correlation": asdict(analysis.correlation),
        "correlation_whole": asdict(analysis.correlation_whole),
        "positions": [asdict(one) for one in analysis.positions],
        "worst": {kind: [_facts(sample) for sample in samples] for kind, samples in vars(analysis.worst).items()},
        "samples": [_facts(sample) for sample in analysis.samples],
    }
    return finite_or_none(figures)


def _facts(sample: Sample) -> dict[str, Any]:
    trajectory = sample.trajectory
    return {
        "step": trajectory.step,
        "sample": trajectory.sample,
        "id": trajectory.id,
        "score": trajectory.score,
        "length": sample.length,
        "finish": trajectory.finish,
        "repetition": sample.repetition,
        "loop": None if sample.loop is None else asdict(sample.loop),
        "kl": sample.kl,
        "entropy": sample.entropy,
    }


def _steps(analysis: Analysis) -> list[str]:
    shown = _spread(analysis.steps, MOST_STEPS)
    header = ["step", "samples", "prompts", "score", "length", "cut", f"rep-{NGRAM}", "loops", "dist-2", "equal", "entropy", "KL"]
    rows = [
        [
            str(one.step),
            str(one.samples),
            str(one.prompts),
            number(one.score),
            f"{one.length:.1f}",
            share(one.truncated),
            share(one.repetition),
            share(one.loops),
            number(one.distinct),
            share(one.duplicates),
            number(one.entropy),
            number(one.kl),
        ]
        for one in shown
    ]
    left_out = len(analysis.steps) - len(shown)
    note = f" ({left_out} steps in between are not shown; --steps A..B or --json)" if left_out else ""
    return [f"by step{note}:", *table(header, rows)]


def _lengths(analysis: Analysis) -> list[str]:
    rows = [
        [
            str(one.shortest) if one.shortest == one.longest else f"{one.shortest}-{one.longest}",
            str(one.samples),
            number(one.score),
            share(one.truncated),
            share(one.repetition),
        ]
        for one in analysis.lengths
    ]
    return [
        f"score against length: {_correlation_text(analysis.correlation)}; of those not cut: "
        f"{_correlation_text(analysis.correlation_whole)}",
        *table(["tokens", "samples", "score", "cut", f"rep-{NGRAM}"], rows),
    ]


def _correlation_text(one: Correlation) -> str:
    if math.isnan(one.pearson):
        return "no correlation (one of them does not vary)"
    return f"Pearson {one.pearson:+.2f}, Spearman {one.spearman:+.2f}"


def _positions(analysis: Analysis) -> list[str]:
    rows = [
        [
            one.position,
            str(one.tokens),
            number(one.logprob),
            number(one.entropy),
            number(one.kl),
            number(one.value),
            number(one.returns),
            number(one.value_bias),
            number(one.value_error),
        ]
        for one in analysis.positions
    ]
    header = [
        "token" if analysis.by_token else "part",
        "tokens",
        "logprob",
        "entropy",
        "KL",
        "value",
        "return",
        "bias",
        "rms error",
    ]
    return ["by position in the response, means per token:", *table(header, rows)]


def _samples(samples: Sequence[Sample], *, from_end: bool) -> list[str]:
    rows = []
    for sample in samples:
        trajectory = sample.trajectory
        loop = "-" if sample.loop is None else f"{sample.loop.tokens}/{sample.loop.period}"
        rows.append(
            [
                str(trajectory.step),
                str(trajectory.sample),
                number(trajectory.score),
                str(sample.length),
                trajectory.finish,
                number(sample.kl),
                share(sample.repetition),
                loop,
            ]
        )
    lines = table(["step", "sample", "score", "tokens", "end", "KL", f"rep-{NGRAM}", "loop"], rows)
    texts = ["prompt and response", *(_excerpt(sample, from_end=from_end) for sample in samples)]
    width = max(map(len, lines))
    return [f"{line.ljust(width)}  {text}" for line, text in zip(lines, texts)]


def _excerpt(sample: Sample, *, from_end: bool) -> str:
    trajectory = sample.trajectory
    text = plain(trajectory.response, longest=10 * EXCERPT)
    if len(text) > EXCERPT:
        text = "..." + plain(trajectory.response[-EXCERPT:]) if from_end else plain(text, EXCERPT)
    return f"{plain(trajectory.prompt, EXCERPT // 2)} -> {text}"


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def number(value: float) -> str:
    if math.isnan(value):
        return "-"
    text = f"{value:.4f}" if abs(value) < 100 else f"{value:.1f}"
    return text.lstrip("-") if float(text) == 0 else text  # no -0.0000


def share(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f} %" if 0 < value < 1 else f"{100 * value:.0f} %"
