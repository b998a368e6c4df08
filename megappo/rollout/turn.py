"""Turns of the policy, of ids and of text, as environments see them, and how a process answers them. Imports no torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megappo.runtime.helper_process import FAILED, Answerer, CannotSend, packed
from megappo.runtime.user_code import OwnCode, OwnFunction, Use

if TYPE_CHECKING:
    from megappo.data.prompts import Prompt
    from megappo.data.tokenizers import Message
    from megappo.rollout.types import Ids


@dataclass(frozen=True, eq=False)
class Turn:
    """A turn of the policy, as the environment sees it. number, group: of the request. index: of the turn, from 0. tokens: int32
    ids that the policy sampled. context: ids before them in the sequence.

    seed: of the trajectory, 63 bits, the same after a resume. prompt: of the data; None if the request has none. memo: the
    trajectory's own, empty at its first turn: what the environment wants to find again at the next.
    """

    number: int
    group: int
    index: int
    tokens: Ids
    context: Ids
    seed: int = 0
    prompt: Prompt | None = None
    memo: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TextTurn:
    """A turn of the policy, as an environment of text sees it.

    response: its text, before the end-of-sequence token and the first of `rollout.stop`. messages: the question, all turns and
    observations so far, this turn the last. index: from 0. prompt, answer, record: of the data, as a reward sees them. seed: the
    trajectory's, the same after a resume. state: the trajectory's own, empty at its first turn. sample_id: name for messages.
    """

    response: str
    messages: Sequence[Message]
    index: int
    prompt: str
    answer: str
    record: Mapping[str, Any]
    seed: int
    state: dict[str, Any]
    sample_id: str


USE = Use("one turn", "an environment returns its observation")
_ANSWERED = "answered"


def state_of(turn: Turn | TextTurn) -> dict[str, Any]:
    """The trajectory's own dictionary, which its next turn finds again."""
    return turn.state if isinstance(turn, TextTurn) else turn.memo


def answer_turn(function: OwnFunction, turn: Turn | TextTurn) -> tuple[str, Any]:
    """(kind, result): the result of the function, or under FAILED a line on how it failed."""
    try:
        return _ANSWERED, function.call(turn)
    except (Exception, SystemExit) as error:  # any fault of the user's code: the rank names the turn, and stops the run
        return FAILED, f"raised {type(error).__name__}: {error}{function.place(error)}"


def answering(code: OwnCode) -> Answerer:
    """The function as a process answers turns: with what it returns and the state that it leaves. ValueError as `OwnCode.load`."""
    return functools.partial(_answer_with_state, code.load(USE))


def _answer_with_state(function: OwnFunction, turn: Turn | TextTurn) -> tuple[str, Any]:
    word, value = answer_turn(function, turn)
    if word == FAILED:
        return word, value
    state = state_of(turn)
    for what, sent in ((f"returned {type(value).__name__}", value), ("left a state", state)):
        try:
            packed(sent)
        except CannotSend as error:
            return FAILED, f"{what}, which cannot be sent to the rank: {error}"
    return word, (value, state)
