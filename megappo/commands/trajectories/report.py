"""Figures of trajectories as tables for a terminal: a row per step, and the worst samples of each kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megappo.commands.trajectories.analyse import LEAST_REPEATS, NGRAM, Analysis, Sample
from megappo.telemetry.tables import plain, table

MOST_STEPS = 24  # rows of a table that fits a screen
EXCERPT = 60  # characters of a response
LEGEND = f"""\
cut: by the length limit. rep-{NGRAM}: repeated {NGRAM}-grams. KL: log pi - log pi_ref, summed over a response, nats.
loop: tokens/period of a block that ends a response {LEAST_REPEATS} times or more."""


def report(analysis: Analysis) -> list[str]:
    lines = _steps(analysis)
    for title, samples, from_end in (
        ("lowest score", analysis.worst.score, False),
        ("highest KL to the reference", analysis.worst.kl, False),
        ("most repetitive", analysis.worst.repetition, True),
    ):
        if samples:
            lines += ["", f"{title}:", *_samples(samples, from_end=from_end)]
    return lines


def _steps(analysis: Analysis) -> list[str]:
    shown = _spread(analysis.steps, MOST_STEPS)
    rows = [
        [
            str(one.step),
            str(one.samples),
            number(one.score),
            f"{one.length:.1f}",
            share(one.truncated),
            share(one.repetition),
            number(one.kl),
        ]
        for one in shown
    ]
    left_out = len(analysis.steps) - len(shown)
    note = f" ({left_out} steps in between are not shown; --steps A..B)" if left_out else ""
    return [f"by step{note}:", *table(["step", "samples", "score", "length", "cut", f"rep-{NGRAM}", "KL"], rows)]


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
