"""Figures of trajectories: per sample, per step, by position in the response, and the worst samples of each kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from megappo.telemetry.tables import plain, table
from megappo.telemetry.trajectories.read import Trajectory

NGRAM = 4  # shorter ones repeat in any text, longer ones only in copies
LEAST_REPEATS = 3  # repeats that make a block at the end a loop
SHORTEST_LOOP = 8  # tokens in all: the digits of 1000 are no loop


@dataclass(frozen=True)
class Loop:
    """A response's end that repeats one block."""

    tokens: int  # covered by all repeats
    period: int  # tokens of the block


def ngrams(tokens: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return list(zip(*(tokens[start:] for start in range(n))))


def repeated_share(tokens: Sequence[int], n: int = NGRAM) -> float:
    """Share of the n-grams that occurred before in the same response (rep-n of Welleck et al. 2020); 0 without n-grams."""
    all_of_them = ngrams(tokens, n)
    return 1 - len(set(all_of_them)) / len(all_of_them) if all_of_them else 0.0


def tail_loop(tokens: Sequence[int]) -> Loop | None:
    """Find the longest loop at the end of the response, by its shortest block; None without one."""
    backwards = list(reversed(tokens))
    best: Loop | None = None
    for period, same in enumerate(_prefix_matches(backwards)):
        covered = period + same
        if period and covered >= max(LEAST_REPEATS * period, SHORTEST_LOOP) and (best is None or covered > best.tokens):
            best = Loop(covered, period)
    return best


def _prefix_matches(items: Sequence[int]) -> list[int]:
    """For every i the length of the longest common prefix of items and items[i:] (the Z function), in linear time."""
    count = len(items)
    matches = [0] * count
    left = right = 0
    for i in range(1, count):
        length = min(right - i, matches[i - left]) if i < right else 0
        while i + length < count and items[length] == items[i + length]:
            length += 1
        matches[i] = length
        if i + length > right:
            left, right = i, i + length
    return matches


POSITIONS = 10  # deciles; responses of at most as many tokens are shown token by token


@dataclass(frozen=True)
class Sample:
    """One trajectory with its figures."""

    trajectory: Trajectory
    length: int
    repetition: float  # share of repeated 4-grams
    loop: Loop | None
    kl: float  # sum over the response, nats; NaN without a reference
    entropy: float  # mean over its tokens, nats


@dataclass(frozen=True)
class StepFigures:
    """Means over the samples of a step."""

    step: int
    samples: int
    score: float
    length: float
    truncated: float  # share cut by the length limit
    repetition: float
    kl: float


@dataclass(frozen=True)
class PositionFigures:
    """Means over the tokens at one position of the responses."""

    position: str
    tokens: int
    logprob: float
    entropy: float
    kl: float  # log pi - log pi_ref, nats
    value: float
    returns: float
    value_bias: float  # mean of value - return
    value_error: float  # root mean square of value - return


@dataclass(frozen=True)
class Worst:
    """The worst samples of each kind, the worst one first."""

    score: list[Sample]
    kl: list[Sample]
    repetition: list[Sample]


@dataclass(frozen=True)
class Analysis:
    samples: list[Sample]
    steps: list[StepFigures]
    positions: list[PositionFigures]
    by_token: bool  # positions are tokens, not tenths of the response
    worst: Worst


def analyse(trajectories: Sequence[Trajectory], worst: int) -> Analysis:
    """Analyse trajectories in the order of their steps; `worst` samples of each kind."""
    samples = [_sample(trajectory) for trajectory in trajectories]
    by_step = groupby(samples, key=lambda sample: sample.trajectory.step)
    positions, by_token = _by_position(trajectories)
    return Analysis(
        samples=samples,
        steps=[_step(step, list(members)) for step, members in by_step],
        positions=positions,
        by_token=by_token,
        worst=Worst(
            score=_first(samples, worst, lambda sample: -sample.trajectory.score),
            kl=_first([sample for sample in samples if sample.kl > 0], worst, lambda sample: sample.kl),
            repetition=_first(
                [sample for sample in samples if sample.repetition > 0],
                worst,
                lambda sample: (sample.loop.tokens if sample.loop else 0) + sample.repetition,
            ),
        ),
    )


def _mean(values: Sequence[float] | np.ndarray) -> float:
    array = np.asarray(values, dtype=np.float64)
    array = array[~np.isnan(array)]
    return float(array.mean()) if array.size else math.nan


def _sample(trajectory: Trajectory) -> Sample:
    tokens = trajectory.tokens[trajectory.mask].tolist()
    written = tokens[:-1] if tokens and tokens[-1] in trajectory.special else tokens  # the end token follows the loop
    repetition = repeated_share(written)
    kl, entropy = trajectory.kl, trajectory.fields.get("entropy")
    return Sample(
        trajectory,
        length=len(tokens),
        repetition=repetition,
        loop=tail_loop(written) if repetition else None,  # every loop repeats a 4-gram
        kl=math.nan if kl is None else float(kl[trajectory.mask].sum()),
        entropy=math.nan if entropy is None else _mean(entropy),
    )


def _step(step: int, samples: Sequence[Sample]) -> StepFigures:
    return StepFigures(
        step=step,
        samples=len(samples),
        score=_mean([sample.trajectory.score for sample in samples]),
        length=_mean([sample.length for sample in samples]),
        truncated=_mean([sample.trajectory.is_truncated for sample in samples]),
        repetition=_mean([sample.repetition for sample in samples]),
        kl=_mean([sample.kl for sample in samples]),
    )


def _by_position(trajectories: Sequence[Trajectory]) -> tuple[list[PositionFigures], bool]:
    """Figures of the sampled tokens by position, and True if positions are tokens."""
    lengths = [trajectory.length for trajectory in trajectories]
    by_token = max(lengths, default=0) <= POSITIONS
    places = [np.arange(length) if by_token else np.arange(length) * POSITIONS // length for length in lengths if length]
    place = np.concatenate(places) if places else np.zeros(0, int)
    columns = {name: _tokens_of(trajectories, name) for name in ("logprob", "ref_logprob", "entropy", "value", "returns")}
    kl, error = columns["logprob"] - columns["ref_logprob"], columns["value"] - columns["returns"]
    figures = []
    for number in range(POSITIONS):
        here = place == number
        if here.any():
            figures.append(
                PositionFigures(
                    position=str(number + 1) if by_token else f"{number * 100 // POSITIONS}-{(number + 1) * 100 // POSITIONS} %",
                    tokens=int(here.sum()),
                    logprob=_mean(columns["logprob"][here]),
                    entropy=_mean(columns["entropy"][here]),
                    kl=_mean(kl[here]),
                    value=_mean(columns["value"][here]),
                    returns=_mean(columns["returns"][here]),
                    value_bias=_mean(error[here]),
                    value_error=math.sqrt(_mean(error[here] ** 2)),
                )
            )
    return figures, by_token


def _tokens_of(trajectories: Sequence[Trajectory], field: str) -> np.ndarray:
    """One field of all sampled tokens, concatenated; NaN for trajectories without it."""
    missing = np.full(1, np.nan)
    lists = [
        trajectory.fields[field][trajectory.mask] if field in trajectory.fields else missing.repeat(trajectory.length)
        for trajectory in trajectories
    ]
    return np.concatenate(lists) if lists else np.zeros(0)


def _first(samples: Sequence[Sample], count: int, badness: Callable[[Sample], float]) -> list[Sample]:
    """The `count` samples with the largest badness, NaN first; of equal ones the latest, which the newest weights wrote."""

    def key(indexed: tuple[int, Sample]) -> tuple[float, int]:
        value = badness(indexed[1])
        return (math.inf if math.isnan(value) else value, indexed[0])

    found: dict[tuple[int, str, bytes], Sample] = {}
    for _, sample in sorted(enumerate(samples), key=key, reverse=True):
        if len(found) == count:
            break
        trajectory = sample.trajectory
        # Samples of a prompt may be the same response, which is listed once.
        found.setdefault((trajectory.step, trajectory.id, trajectory.tokens.tobytes()), sample)
    return list(found.values())


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
