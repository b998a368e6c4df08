"""Keys of an environment, which answers the policy's turns. The text under each field is its documentation (`schema.py`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megappo.config.paths import FilePath
from megappo.config.section import NonNegative, Positive, PositiveFloat, Section


class CompactionConfig(Section):
    max_tokens: Positive
    """Tokens of a sequence with the next observation, above which a new, shorter one begins; more than
    `data.max_prompt_tokens`, which bounds its start."""
    keep_first: NonNegative | None = None
    """Tokens from its start that the new sequence begins with; null keeps the prompt. Without `ask`."""
    keep_last: Positive | None = None
    """Tokens from its end, observation included, that follow. Without `ask`."""
    ask: str | None = None
    """Message that asks the policy for a summary, a turn that trains like any (CompactionRL, arXiv:2607.05378). The new
    sequence is prompt, summary, observation; a summary that is too long loses its start."""


class EnvironmentConfig(Section):
    """An environment of your own that answers each turn of the policy (docs/environments.md)."""

    path: FilePath | None = None
    """Python file with the environment, relative to the working directory; it runs in the ranks with your rights."""
    function: str | None = None
    """Function of that file: a turn in, the next observation out, or null at the end."""
    entry_point: str | None = None
    """In place of a file: an installed package's entry point in the group `megappo.environments`."""
    interface: Literal["text", "ids"] = "text"
    """Turns and observations as messages and text, or as token ids."""
    args: dict[str, Any] = {}
    """Keyword arguments for the function."""
    workers: NonNegative = 0
    """Processes on each rank that answer turns while others are generated, each with its own import; 0: the rank calls your
    function for one turn after another, and generates nothing meanwhile."""
    timeout_s: PositiveFloat | None = None
    """Seconds for one call of your function, after which its process is ended and the trajectory has no score. Needs
    `workers`."""
    join: Literal["together", "each"] = "together"
    """Answered samples go on together, so that a run repeats itself to the bit, or each at once (docs/environments.md)."""
    max_turns: Annotated[int, Field(ge=2)] = 8
    """Most turns of a trajectory."""
    turn_tokens: Positive | None = None
    """Most tokens of a turn; one that reaches them ends the trajectory, cut. null: what `rollout.max_response_tokens`
    leaves."""
    observation_tokens: Positive | None = None
    """Most tokens of an observation, without the chat template's; a longer one loses its end."""
    images: NonNegative = 0
    """Most images that the environment shows in a trajectory (docs/environments.md); 0: it answers in text alone."""
    compaction: CompactionConfig | None = None
    """New, shorter sequences for a trajectory that grows too long; null: it ends, cut, at `rollout.max_response_tokens`."""
