"""Turns of the policy, as ids and as text, and how a process answers them. Imports no torch, so worker processes start fast."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megappo.runtime.helper_process import FAILED, Answerer, CannotSend, packed
from megappo.runtime.user_code import ANSWERED, OwnCode, OwnFunction, Use, answer_of

if TYPE_CHECKING:
    from megappo.data.prompts import Prompt
    from megappo.data.tokenizers import Message
    from megappo.rollout.types import Ids


@dataclass(frozen=True, eq=False)
class Turn:
    """A turn of the policy, as an environment of ids sees it."""

    number: int
    """Number of the request; `group` is its prompt's."""
    group: int
    index: int
    """Turn of the trajectory, from 0."""
    tokens: Ids
    """int32 ids that the policy sampled."""
    context: Ids
    """int32 ids before them in the sequence."""
    seed: int = 0
    """63 bits, one per trajectory, the same after a resume."""
    prompt: Prompt | None = None
    memo: dict[str, Any] = field(default_factory=dict)
    """The trajectory's own dictionary, empty at its first turn; the environment finds it again at the next."""


@dataclass(frozen=True)
class TextTurn:
    """A turn of the policy, as an environment of text sees it. index: from 0. prompt, answer, record: of the data, as rewards see
    them."""

    response: str
    """Text before the end-of-sequence token and the first of `rollout.stop`."""
    messages: Sequence[Message]
    """The question, then all turns and observations; this turn is the last."""
    index: int
    prompt: str
    answer: str
    record: Mapping[str, Any]
    seed: int
    """63 bits, one per trajectory, the same after a resume."""
    state: dict[str, Any]
    """The trajectory's own dictionary, empty at its first turn."""
    sample_id: str
    """Name of the sample in messages."""


USE = Use("one turn", "an environment returns its observation")


def state_of(turn: Turn | TextTurn) -> dict[str, Any]:
    """Return the trajectory's own dictionary, which its next turn finds again."""
    return turn.state if isinstance(turn, TextTurn) else turn.memo


def answering(code: OwnCode) -> Answerer:
    """Return what a worker process calls for each turn: it gives the function's result and the state left. ValueError as
    `OwnCode.load`."""
    return functools.partial(_answer_with_state, code.load(USE))


def _answer_with_state(function: OwnFunction, turn: Turn | TextTurn) -> tuple[str, Any]:
    word, value = answer_of(function, turn)
    if word != ANSWERED:
        return word, value
    state = state_of(turn)
    for what, sent in ((f"returned {type(value).__name__}", value), ("left a state", state)):
        try:
            packed(sent)
        except CannotSend as error:
            return FAILED, f"{what}, which cannot be sent to the rank: {error}"
    return word, (value, state)
