"""Format of a run's trajectories: RUN/trajectories/step_000010.jsonl, one JSON object per sample; keys in docs/telemetry.md.
`trainer/trajectories.py` writes it, `read.py` reads it."""

from __future__ import annotations

from collections.abc import Iterable

FORMAT = 1
FOLDER = "trajectories"  # below the run's directory
# Lists with one number per response token, null where the policy did not sample it. Runs without a reference lack ref_logprob.
TOKEN_FIELDS = ("logprob", "rollout_logprob", "ref_logprob", "entropy", "value", "reward", "advantage", "returns")
# About half of fp32's digits are noise between two layouts, and a response of 1,000 tokens has 8,000 numbers.
DIGITS = 5


def rounded(numbers: Iterable[float]) -> list[float]:
    """Round numbers to DIGITS significant digits; NaN and infinities stay."""
    return [float(f"{number:.{DIGITS}g}") for number in numbers]
