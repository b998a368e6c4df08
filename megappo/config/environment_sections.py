"""Keys of an environment, which answers the policy's turns. The text under each field is its documentation (`schema.py`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megappo.config.paths import FilePath
from megappo.config.section import NonNegative, Positive, PositiveFloat, Section


class CompactionConfig(Section):
    max_tokens: Positive
    """Tokens of a sequence with the next observation, above which the trajectory goes on in a new, shorter sequence. More than
    `data.max_prompt_tokens`, which bounds what the new one begins with."""
    keep_first: NonNegative | None = None
    """Tokens from the start of the sequence that the new one begins with; null keeps the prompt. Without `ask`."""
    keep_last: Positive | None = None
    """Tokens from its end, the observation included, that follow them. Without `ask`."""
    ask: str | None = None
    """Message that asks the policy for a summary (CompactionRL, arXiv:2607.05378), which it is trained to write as any turn. The
    new sequence is the prompt, the summary and the observation; where they are too long, the start of the summary is left out."""


class EnvironmentConfig(Section):
    """An environment of your own that answers each turn of the policy (docs/environments.md)."""

    path: FilePath | None = None
    """Python file with the environment, relative to the working directory. It runs in the ranks with your rights."""
    function: str | None = None
    """Function of that file: a turn in, the observation that follows it out, or null at the end of the trajectory."""
    entry_point: str | None = None
    """In place of a file: the environment of an installed package, by its entry point in the group `megappo.environments`."""
    interface: Literal["text", "ids"] = "text"
    """Turns as messages and text, or as token ids; the observation likewise."""
    args: dict[str, Any] = {}
    """Keyword arguments for the function."""
    workers: NonNegative = 0
    """Processes that answer turns of different samples at once, while others are generated, on each rank that asks; each imports
    your code itself. 0: the rank calls your function, for one turn after another, and generates nothing meanwhile."""
    timeout_s: PositiveFloat | None = None
    """Seconds that one call of your function may take; then its process is ended, and the trajectory ends, cut. Needs `workers`."""
    join: Literal["together", "each"] = "together"
    """When samples go on that `workers` have answered: together, once all are answered, so that a run repeats itself to the
    bit; or each at once, where last bits of the sampler's log-probs may differ."""
    max_turns: Annotated[int, Field(ge=2)] = 8
    """Most turns of a trajectory, which ends after the last without an observation."""
    turn_tokens: Positive | None = None
    """Most tokens of a turn; one that reaches them ends the trajectory, cut. null: those that `rollout.max_response_tokens`
    leaves, which bounds all turns and observations of a sequence together."""
    observation_tokens: Positive | None = None
    """Most tokens of an observation, without those of the chat template; a longer one is cut at its end. null cuts none."""
    compaction: CompactionConfig | None = None
    """Compaction of sequences that grow too long; null: a trajectory that reaches `rollout.max_response_tokens` ends, cut."""
