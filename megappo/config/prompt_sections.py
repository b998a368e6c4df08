"""Keys that choose the prompts of a run. The text under each field is its documentation (`schema.py`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megappo.config.section import Section


class CurriculumConfig(Section):
    """Passes over prompts that responses nearly always or nearly never pass. A prompt of pass rate p so far is visited at its turn
    with chance 4 p (1 - p), one that was not seen yet always (docs/algorithms.md)."""

    pass_score: float = 0.5
    """Least score of a response that passes."""
    min_chance: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Least chance of a prompt at its turn, so that its rate is measured again."""


class DynamicSamplingConfig(Section):
    metric: str | None = None
    """Label of the reward's part that is compared, such as an accuracy beside a length penalty; null: scores."""
    max_rounds: Annotated[int, Field(ge=2)] = 10
    """Rounds of a step, the first included; what the last one draws is trained on as it is (`rollout/equal_left`)."""
