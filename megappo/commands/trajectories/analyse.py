"""Figures of trajectories: per sample, per step, by position in the response, and the worst samples of each kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from megappo.telemetry.tables import plain, table_of
from megappo.telemetry.trajectories.read import Trajectory

NGRAM = 4  # shorter ones repeat in any text, longer ones only in copies
POSITIONS = 10  # deciles; responses of at most as many tokens are shown token by token


def repeated_share(tokens: Sequence[int], n: int = NGRAM) -> float:
    """Share of the n-grams that occurred before in the same response (rep-n of Welleck et al. 2020); 0 without n-grams."""
    ngrams = list(zip(*(tokens[start:] for start in range(n))))
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


class Sample(NamedTuple):
    """One trajectory with its figures."""

    trajectory: Trajectory
    length: int
    repetition: float  # share of repeated 4-grams
    kl: float  # sum over the response, nats; NaN without a reference
    entropy: float  # mean over its tokens, nats


class StepFigures(NamedTuple):
    """Means over the samples of a step."""

    step: int
    samples: int
    score: float
    length: float
    truncated: float  # share cut by the length limit
    repetition: float
    kl: float


class PositionFigures(NamedTuple):
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


class Analysis(NamedTuple):
    samples: list[Sample]
    steps: list[StepFigures]
    positions: list[PositionFigures]
    by_token: bool  # positions are tokens, not tenths of the response
    worst: Mapping[str, list[Sample]]  # kind -> samples, the worst one first


def analyse(trajectories: Sequence[Trajectory], worst: int) -> Analysis:
    """Analyse trajectories in the order of their steps; `worst` samples of each kind."""
    samples = [_sample(trajectory) for trajectory in trajectories]
    steps = [_step(step, list(members)) for step, members in groupby(samples, key=lambda sample: sample.trajectory.step)]
    kinds = {
        "lowest score": _first(samples, worst, lambda sample: -sample.trajectory.score),
        "highest KL": _first([sample for sample in samples if sample.kl > 0], worst, lambda sample: sample.kl),
        "most repetitive": _first([sample for sample in samples if sample.repetition > 0], worst, lambda sample: sample.repetition),
    }
    return Analysis(samples, steps, *_by_position(trajectories), kinds)


def _mean(values: Sequence[float] | np.ndarray) -> float:
    array = np.asarray(values, dtype=np.float64)
    array = array[~np.isnan(array)]
    return float(array.mean()) if array.size else math.nan


def _sample(trajectory: Trajectory) -> Sample:
    tokens = trajectory.tokens[trajectory.mask].tolist()
    kl, entropy = trajectory.kl, trajectory.fields.get("entropy")
    return Sample(
        trajectory,
        length=len(tokens),
        repetition=repeated_share(tokens[:-1] if tokens and tokens[-1] in trajectory.special else tokens),
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
    place = np.concatenate(
        [np.arange(length) if by_token else np.arange(length) * POSITIONS // length for length in lengths if length] or [[]]
    )
    of = {name: _tokens_of(trajectories, name) for name in ("logprob", "ref_logprob", "entropy", "value", "returns")}
    error = of["value"] - of["returns"]
    of |= {"kl": of["logprob"] - of.pop("ref_logprob"), "value_bias": error, "value_error": error**2}
    figures = []
    for number in np.unique(place):
        means = {name: _mean(numbers[place == number]) for name, numbers in of.items()}
        means["value_error"] = math.sqrt(means["value_error"])
        position = str(number + 1) if by_token else f"{number * 100 // POSITIONS}-{(number + 1) * 100 // POSITIONS} %"
        figures.append(PositionFigures(position, int((place == number).sum()), **means))
    return figures, by_token


def _tokens_of(trajectories: Sequence[Trajectory], field: str) -> np.ndarray:
    """One field of all sampled tokens, concatenated; NaN for trajectories without it."""
    lists = [one.fields[field][one.mask] if field in one.fields else np.full(one.length, np.nan) for one in trajectories]
    return np.concatenate(lists) if lists else np.zeros(0)


def _first(samples: Sequence[Sample], count: int, badness: Callable[[Sample], float]) -> list[Sample]:
    """The `count` samples with the largest badness, NaN first; of equal ones the latest, which the newest weights wrote."""

    def key(indexed: tuple[int, Sample]) -> tuple[float, int]:
        value = badness(indexed[1])
        return (math.inf if math.isnan(value) else value, indexed[0])

    found: dict[tuple[int, str, bytes], Sample] = {}
    for _, sample in sorted(enumerate(samples), key=key, reverse=True):
        trajectory = sample.trajectory
        # Samples of a prompt may be the same response, which is listed once.
        found.setdefault((trajectory.step, trajectory.id, trajectory.tokens.tobytes()), sample)
    return list(found.values())[:count]


# ------------------------------------------------------------------------------------------------------------------ report

MOST_STEPS = 24  # rows of a table that fits a screen
EXCERPT = 60  # characters of a response
LEGEND = f"cut: by the length limit. rep-{NGRAM}: repeated {NGRAM}-grams. KL: log pi - log pi_ref, summed over a response, nats."


def report(analysis: Analysis) -> list[str]:
    lines = _steps(analysis.steps)
    for kind, samples in analysis.worst.items():
        if samples:
            lines += ["", f"{kind}:", *_samples(samples, from_end=kind == "most repetitive")]
    return lines


def _steps(steps: Sequence[StepFigures]) -> list[str]:
    shown, note = steps, ""
    if len(steps) > MOST_STEPS:
        shown = [steps[round(i * (len(steps) - 1) / (MOST_STEPS - 1))] for i in range(MOST_STEPS)]
        note = f" ({len(steps) - MOST_STEPS} steps in between are not shown; --steps A..B)"
    rows = [
        {
            "step": str(one.step),
            "samples": str(one.samples),
            "score": number(one.score),
            "length": f"{one.length:.1f}",
            "cut": share(one.truncated),
            f"rep-{NGRAM}": share(one.repetition),
            "KL": number(one.kl),
        }
        for one in shown
    ]
    return [f"by step{note}:", *table_of(rows)]


def _samples(samples: Sequence[Sample], *, from_end: bool) -> list[str]:
    rows = [
        {
            "step": str(one.trajectory.step),
            "sample": str(one.trajectory.sample),
            "score": number(one.trajectory.score),
            "tokens": str(one.length),
            "end": one.trajectory.finish,
            "KL": number(one.kl),
            f"rep-{NGRAM}": share(one.repetition),
            "prompt and response": _excerpt(one, from_end=from_end),
        }
        for one in samples
    ]
    return table_of(rows, left=("step", "prompt and response"))


def _excerpt(sample: Sample, *, from_end: bool) -> str:
    trajectory = sample.trajectory
    text = plain(trajectory.response, longest=10 * EXCERPT)
    if len(text) > EXCERPT:
        text = "..." + plain(trajectory.response[-EXCERPT:]) if from_end else plain(text, EXCERPT)
    return f"{plain(trajectory.prompt, EXCERPT // 2)} -> {text}"


def number(value: float) -> str:
    if math.isnan(value):
        return "-"
    text = f"{value:.4f}" if abs(value) < 100 else f"{value:.1f}"
    return text.lstrip("-") if float(text) == 0 else text  # no -0.0000


def share(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f} %" if 0 < value < 1 else f"{100 * value:.0f} %"
