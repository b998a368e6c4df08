"""Environments of the configuration (`rollout.environment`): the user's function of text or ids, as `turns.py` asks for one.

What the function raises or returns wrongly becomes an `EnvironmentFault`, which names it, its line, the turn and the sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megappo.config.environment_sections import CompactionConfig, EnvironmentConfig
from megappo.config.evaluations import longest_sequence_tokens
from megappo.config.schema import TrainConfig
from megappo.data.conversation import Conversation
from megappo.data.prompts import Prompt
from megappo.data.token_texts import response_text
from megappo.data.tokenizers import Message, Tokenizer
from megappo.own_code import OwnFunction
from megappo.rollout.turns import Compaction, Environment, Left, Turn, TurnsRollout
from megappo.rollout.types import EnvironmentFault, RolloutEngine

SHOWN_CHARACTERS = 200  # of a turn in messages, as of a response in those of rewards


@dataclass(frozen=True)
class PreparedEnvironment:
    """An environment that was loaded and checked before a model was built. function: of the user. conversation: how observations
    become ids."""

    settings: EnvironmentConfig
    function: OwnFunction
    conversation: Conversation


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


def with_environment(
    engine: RolloutEngine, prepared: PreparedEnvironment, config: TrainConfig, tokenizer: Tokenizer
) -> TurnsRollout:
    """The engine with the trajectories of this environment."""
    settings, rollout = prepared.settings, config.rollout
    return TurnsRollout(
        engine,
        environment_of(prepared, tokenizer, rollout.stop),
        max_turns=settings.max_turns,
        turn_tokens=settings.turn_tokens or longest_sequence_tokens(config),  # more than any sequence has room for
        max_prompt_tokens=config.data.max_prompt_tokens,
        compaction=None if settings.compaction is None else _compaction(settings.compaction, prepared, config, tokenizer),
    )


def environment_of(prepared: PreparedEnvironment, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> Environment:
    """The user's function as an environment of ids. stop: strings that end a turn."""
    answer = _of_text if prepared.settings.interface == "text" else _of_ids
    return functools.partial(answer, prepared, tokenizer, stop)


def _of_text(prepared: PreparedEnvironment, tokenizer: Tokenizer, stop: Sequence[str], turn: Turn) -> list[int] | None:
    prompt, memo = _prompt(turn), turn.memo
    text = response_text(turn.tokens.tolist(), tokenizer, stop)
    messages: list[Message] = memo.setdefault("messages", [{"role": "user", "content": prompt.text}])
    messages.append({"role": "assistant", "content": text})
    seen = TextTurn(
        text,
        list(messages),
        turn.index,
        prompt.text,
        prompt.answer,
        prompt.record,
        turn.seed,
        memo.setdefault("state", {}),
        _sample_id(turn),
    )
    found = _call(prepared.function, seen, turn, text)
    if found is None:
        return None
    said: Message | None = {"role": "user", "content": found} if isinstance(found, str) else _message(found)
    if said is None or not said["content"]:
        what = "no text, no message {role, content}, and not None, which ends the trajectory"
        raise EnvironmentFault(_fault(prepared.function, f"returned {_short(found)}: {what}", turn, text))
    conversation = prepared.conversation
    said = {**said, "content": conversation.cut(said["content"], prepared.settings.observation_tokens)}
    messages.append(said)
    try:
        return conversation.follow(said, ended=int(turn.tokens[-1]) in tokenizer.eos_ids)
    except ValueError as error:  # the template refuses the role
        raise EnvironmentFault(_fault(prepared.function, f"returned {_short(found)}: {error}", turn, text)) from error


def _of_ids(prepared: PreparedEnvironment, tokenizer: Tokenizer, stop: Sequence[str], turn: Turn) -> list[int] | None:
    text = functools.partial(response_text, turn.tokens.tolist(), tokenizer, stop)
    found = _call(prepared.function, turn, turn, text)
    if found is None:
        return None
    try:
        ids = [int(one) for one in found]
    except (TypeError, ValueError):
        ids = []
    if not ids or isinstance(found, str) or min(ids) < 0 or max(ids) >= tokenizer.vocab_size:
        what = f"no ids of the vocabulary (0 to {tokenizer.vocab_size - 1}), and not None, which ends the trajectory"
        raise EnvironmentFault(_fault(prepared.function, f"returned {_short(found)}: {what}", turn, text()))
    return ids[: prepared.settings.observation_tokens]


def _call(function: OwnFunction, argument: Any, turn: Turn, text: str | Callable[[], str]) -> Any:
    try:
        return function.call(argument)
    except (Exception, SystemExit) as error:  # any fault of the user's code: named here, then it stops the run
        shown = text if isinstance(text, str) else text()
        what = f"raised {type(error).__name__}: {error}{function.place(error)}"
        raise EnvironmentFault(_fault(function, what, turn, shown)) from error


def _prompt(turn: Turn) -> Prompt:
    assert turn.prompt is not None, "requests of a run know their prompts"
    return turn.prompt


def _sample_id(turn: Turn) -> str:
    return f"{_prompt(turn).id} (sample {turn.number})"


def _fault(function: OwnFunction, what: str, turn: Turn, text: str) -> str:
    where = f"turn {turn.index} of sample {_sample_id(turn)}, {text[:SHOWN_CHARACTERS]!r}"
    return f"environment {function.origin} {what}; {where}"


def _message(found: Any) -> Message | None:
    """The message {role, content}, or None if it is none."""
    if not isinstance(found, Mapping) or set(found) != {"role", "content"}:
        return None
    return {"role": found["role"], "content": found["content"]} if all(isinstance(one, str) for one in found.values()) else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


# ------------------------------------------------------------------------------------------------------------- compaction


def _compaction(settings: CompactionConfig, prepared: PreparedEnvironment, config: TrainConfig, tokenizer: Tokenizer) -> Compaction:
    asked = () if settings.ask is None else prepared.conversation.follow({"role": "user", "content": settings.ask}, ended=True)
    longest = config.data.max_prompt_tokens

    def prompt(left: Left) -> list[int]:
        if settings.ask is not None:
            first, tail = left.prompt.tolist(), [*prepared.conversation.ended(left.summary.tolist()), *left.observation.tolist()]
        else:
            first, tail = _ends(left, settings)
        return [*first, *tail[max(0, len(tail) - (longest - len(first))) :]]

    return Compaction(settings.max_tokens, prompt, tuple(asked))


def _ends(left: Left, settings: CompactionConfig) -> tuple[list[int], list[int]]:
    """The first and the last ids of what is left, the observation included; none twice."""
    assert settings.keep_last is not None, "`environment_problem` has refused it"
    ids = [*left.context.tolist(), *left.observation.tolist()]
    first = len(left.prompt) if settings.keep_first is None else settings.keep_first
    return ids[:first], ids[max(first, len(ids) - settings.keep_last) :]
