"""Environments of `rollout.environment`: the user's function of text or ids, called in the rank or in worker processes. What the
function raises or wrongly returns becomes an `EnvironmentFault` with its name and line, the turn and the sample."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from megappo.config.environment_sections import CompactionConfig, EnvironmentConfig
from megappo.config.evaluations import longest_sequence_tokens
from megappo.config.schema import TrainConfig
from megappo.data.images import PromptImages
from megappo.data.prompts import Prompt
from megappo.data.token_texts import response_text
from megappo.data.tokenizers import Message, Tokenizer
from megappo.rollout.turn import TextTurn, Turn, answering, state_of
from megappo.rollout.turns import Answer, Asked, Compaction, Left, TurnsRollout
from megappo.rollout.types import EnvironmentFault, RolloutEngine
from megappo.runtime.helper_process import FAILED, CannotSend, HelperDied, HelperProcess
from megappo.runtime.user_code import DIED, NO_VERDICT, UNDECIDED, NoVerdict, OwnCode, OwnFunction, answer_of
from megappo.runtime.worker_pool import Timed, WorkerPool

_QUESTION: Message = {"role": "user", "content": "?"}
_ANSWER: Message = {"role": "assistant", "content": "."}


class Conversation:
    """Format of the messages after a turn: the chat template's, or the bare text.
    Turns are never encoded again: a sampled response need not be the ids that its text has. Raises ValueError, one line, for a
    template that does not end an answer by an id that ends a response."""

    def __init__(self, tokenizer: Tokenizer, chat_template: bool) -> None:
        self._tokenizer, self._chat = tokenizer, chat_template
        if chat_template:
            self._begin = tokenizer.chat([_QUESTION])
            self.follow(_QUESTION, ended=True)

    def follow(self, message: Message, *, ended: bool) -> list[int]:
        """Ids of a message that follows a turn, and of the start of the next one.
        ended: the turn's last token ends a response; if not, as after a stop string, the template's end of an answer comes
        first. Raises ValueError, one line, for a message that the template refuses."""
        if not self._chat:
            return self._tokenizer.encode(message["content"])
        ids = self._tokenizer.chat([_QUESTION, _ANSWER, message])
        end = self._end_of_answer(ids)
        return ids[end + 1 :] if ended else ids[end:]

    def ended(self, turn: list[int]) -> list[int]:
        """Ids of a turn, with the template's end of an answer if it was cut before one."""
        if not self._chat or (turn and turn[-1] in self._tokenizer.eos_ids):
            return turn
        ids = self._tokenizer.chat([_QUESTION, _ANSWER, _QUESTION])
        return [*turn, ids[self._end_of_answer(ids)]]

    def cut(self, text: str, max_tokens: int | None) -> str:
        """Cut the text after so many tokens; None cuts nothing."""
        ids = [] if max_tokens is None else self._tokenizer.encode(text)
        if max_tokens is None or len(ids) <= max_tokens:
            return text
        return self._tokenizer.decode(ids[:max_tokens]).rstrip("\ufffd")  # the cut may lie in a character

    def _end_of_answer(self, ids: list[int]) -> int:
        # A template may begin a new answer in another way than it shows an earlier one, for example with an open thought.
        same = next((i for i, (a, b) in enumerate(zip(self._begin, ids)) if a != b), len(self._begin))
        end = next((i for i in range(same, len(ids)) if ids[i] in self._tokenizer.eos_ids), None)
        if end is None:
            raise ValueError(
                f"the chat template of {self._tokenizer.path} ends no answer by one of the ids that end a response "
                f"({', '.join(map(str, self._tokenizer.eos_ids))}); add its id to eos_token_id of generation_config.json"
            )
        return end


logger = logging.getLogger(__name__)

IMAGES = "images"
"""Key of a message with those that it shows."""
SHOWN_CHARACTERS = 200  # of a turn in messages, as of a response in those of rewards


@dataclass(frozen=True)
class PreparedEnvironment:
    """The user's environment, loaded and checked before a model is built."""

    settings: EnvironmentConfig
    function: OwnFunction
    code: OwnCode
    """Source of `function`, from which worker processes load it too."""
    conversation: Conversation
    """Turns observations into ids."""
    images: PromptImages | None = None
    """Of the run; None if observations show none."""


def with_environment(
    engine: RolloutEngine, prepared: PreparedEnvironment, config: TrainConfig, tokenizer: Tokenizer
) -> TurnsRollout:
    """Wrap the engine so that its responses are trajectories in this environment."""
    environment, limits = environment_of(prepared, tokenizer, config.rollout.stop), limits_of(prepared, config, tokenizer)
    pictures = None if prepared.images is None else prepared.images.store.pictures
    return TurnsRollout(engine, environment, **limits, together=prepared.settings.join == "together", pictures=pictures)


def limits_of(prepared: PreparedEnvironment, config: TrainConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the keyword arguments of `Trajectories`."""
    settings = prepared.settings
    return {
        "max_turns": settings.max_turns,
        "turn_tokens": settings.turn_tokens or longest_sequence_tokens(config),  # more than any sequence has room for
        "max_prompt_tokens": config.data.max_prompt_tokens,
        "compaction": None if settings.compaction is None else _compaction(settings.compaction, prepared, config, tokenizer),
    }


def environment_of(
    prepared: PreparedEnvironment, tokenizer: Tokenizer, stop: Sequence[str] = ()
) -> InRankEnvironment | WorkersEnvironment:
    """Return the user's function as an environment of ids. stop: strings that end a turn."""
    questions = _Questions(prepared, tokenizer, stop)
    return WorkersEnvironment(questions) if prepared.settings.workers else InRankEnvironment(questions)


class InRankEnvironment:
    """Environment that calls the user's function in the rank, one turn after another."""

    def __init__(self, questions: _Questions) -> None:
        self._questions = questions

    def __call__(self, turn: Turn) -> list[int] | None:
        """Return the ids of the observation, or None at the end. NoVerdict if the function raises it, EnvironmentFault if it
        fails."""
        question = self._questions.ask(turn)
        word, value = answer_of(self._questions.function, question.argument)
        return question.take(word, value)


class WorkersEnvironment:
    """Environment whose worker processes answer several turns at once; each imports the user's code itself."""

    def __init__(self, questions: _Questions) -> None:
        self._questions, settings = questions, questions.settings
        # Count the answers over the time limit, and the deaths, of all workers of the rank.
        self._num_late, self._num_died = itertools.count(1), itertools.count(1)
        make = functools.partial(answering, questions.prepared.code)
        process = functools.partial(HelperProcess, "environment", make, settings.timeout_s)
        self._pool = WorkerPool("environment", process, settings.workers)

    def start(self, turn: Turn) -> Asked:
        question = self._questions.ask(turn)
        future = self._pool.submit(question.argument)
        return Asked(future, functools.partial(self._take, question, future))

    def close(self) -> None:
        self._pool.close()

    def _take(self, question: _Question, future: Future[Timed]) -> Answer:
        limit_s = self._questions.settings.timeout_s
        try:
            found = future.result()
        except TimeoutError:
            assert limit_s is not None, "a process without a limit waits for its answer"
            late = question.named(f"gave no answer within {limit_s:g} s")
            logger.warning("%s; its trajectory has no score (%d so far on this rank)", late, next(self._num_late))
            return Answer(None, limit_s, is_late=True, no_verdict=UNDECIDED)
        except HelperDied as died:
            lost = question.named(f"lost its process, which {died}")
            logger.warning("%s; its trajectory has no score (%d so far on this rank)", lost, next(self._num_died))
            return Answer(None, no_verdict=DIED)
        except CannotSend as error:
            raise EnvironmentFault(question.named(f"cannot be asked in a process: {error}")) from error
        word, value = found.result
        if word == NO_VERDICT:
            return Answer(None, found.seconds, no_verdict=value)
        if word != FAILED:
            value, state = value
            question.update(state)
        return Answer(question.take(word, value), found.seconds)


@dataclass(frozen=True)
class _Questions:
    """Builds the user's argument for a turn. stop: strings that end a turn."""

    prepared: PreparedEnvironment
    tokenizer: Tokenizer
    stop: Sequence[str]

    @property
    def settings(self) -> EnvironmentConfig:
        return self.prepared.settings

    @property
    def function(self) -> OwnFunction:
        return self.prepared.function

    def ask(self, turn: Turn) -> _Question:
        if self.settings.interface == "ids":
            return _Question(self, turn, turn)
        prompt, memo = _prompt(turn), turn.memo
        text = self.text(turn)
        messages: list[Message] = memo.setdefault("messages", [{"role": "user", "content": prompt.text}])
        messages.append({"role": "assistant", "content": text})
        state = memo.setdefault("state", {})
        told = prompt.text, prompt.answer, prompt.record, turn.seed, state, _sample_id(turn)
        return _Question(self, turn, TextTurn(text, list(messages), turn.index, *told))

    def text(self, turn: Turn) -> str:
        return response_text(turn.tokens.tolist(), self.tokenizer, self.stop)


@dataclass(frozen=True)
class _Question:
    """One turn and the argument that the user's function gets for it."""

    questions: _Questions
    turn: Turn
    argument: Turn | TextTurn

    def update(self, state: dict[str, Any]) -> None:
        # The worker process had a copy of the state.
        mine = state_of(self.argument)
        mine.clear()
        mine.update(state)

    def take(self, word: str, value: Any) -> list[int] | None:
        """Return the ids of the observation, or None at the end of the trajectory. NoVerdict if the function raised it,
        EnvironmentFault for anything else."""
        if word == FAILED:
            raise EnvironmentFault(self.named(value))
        if word == NO_VERDICT:
            raise NoVerdict(value)
        if value is None:
            return None
        return self._of_ids(value) if self.questions.settings.interface == "ids" else self._of_text(value)

    def named(self, what: str) -> str:
        text = self.argument.response if isinstance(self.argument, TextTurn) else self.questions.text(self.turn)
        where = f"turn {self.turn.index} of sample {_sample_id(self.turn)}, {text[:SHOWN_CHARACTERS]!r}"
        return f"environment {self.questions.function.origin} {what}; {where}"

    def _of_text(self, found: Any) -> list[int]:
        said: Message | None = {"role": "user", "content": found} if isinstance(found, str) else _message(found)
        if said is None or not said["content"]:
            what = "no text, no message {role, content}, and not None, which ends the trajectory"
            raise EnvironmentFault(self.named(f"returned {_short(found)}: {what}"))
        conversation, settings = self.questions.prepared.conversation, self.questions.settings
        said = {**said, "content": conversation.cut(said["content"], settings.observation_tokens)}
        self.turn.memo["messages"].append(said)
        follow = functools.partial(conversation.follow, ended=int(self.turn.tokens[-1]) in self.questions.tokenizer.eos_ids)
        try:
            numbers, images = self._shown(found), self.questions.prepared.images
            return follow(said) if images is None else images.encoded([said], numbers, lambda marked: follow(marked[0]))
        except (OSError, SyntaxError, ValueError) as error:  # the template refuses the role, or an image cannot be used
            raise EnvironmentFault(self.named(f"returned {_short(found)}: {error}")) from error

    def _shown(self, found: Any) -> list[int]:
        """Add the images of a message to those of the step; return their numbers. ValueError for one that cannot be used."""
        given = found.get(IMAGES) if isinstance(found, Mapping) else None
        values = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
        images, most, shown = self.questions.prepared.images, self.questions.settings.images, self.turn.memo.setdefault(IMAGES, [])
        if len(shown) + len(values) > most:
            raise ValueError(f"images 1 to {len(shown) + len(values)} of a trajectory, more than rollout.environment.images {most}")
        numbers = []
        for value in values:
            assert images is not None
            numbers.append(images.store.pictures.show(images.picture(value), self.turn.number, len(shown)))
            shown.append(numbers[-1])
        return numbers

    def _of_ids(self, found: Any) -> list[int]:
        size = self.questions.tokenizer.vocab_size
        try:
            ids = [int(one) for one in found]
        except (TypeError, ValueError):
            ids = []
        if not ids or isinstance(found, str) or min(ids) < 0 or max(ids) >= size:
            what = f"no ids of the vocabulary (0 to {size - 1}), and not None, which ends the trajectory"
            raise EnvironmentFault(self.named(f"returned {_short(found)}: {what}"))
        return ids[: self.questions.settings.observation_tokens]


def _prompt(turn: Turn) -> Prompt:
    assert turn.prompt is not None, "requests of a run know their prompts"
    return turn.prompt


def _sample_id(turn: Turn) -> str:
    return f"{_prompt(turn).id} (sample {turn.number})"


def _message(found: Any) -> Message | None:
    if not isinstance(found, Mapping) or set(found) - {IMAGES} != {"role", "content"}:
        return None
    said = {"role": found["role"], "content": found["content"]}
    return said if all(isinstance(one, str) for one in said.values()) else None


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
    """Split context and observation into first and last ids; none is in both."""
    assert settings.keep_last is not None, "`environment_problem` has refused it"
    ids = [*left.context.tolist(), *left.observation.tolist()]
    first = len(left.prompt) if settings.keep_first is None else settings.keep_first
    return ids[:first], ids[max(first, len(ids) - settings.keep_last) :]
