"""Stage 3: the rewards of the sampled responses, each on the rank that owns the sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from megappo.data.prompts import Prompt
from megappo.data.tokenizers import Tokenizer
from megappo.experience.experience import Experience
from megappo.parallel.totals import first_of_ranks, names_of_ranks, place_in_world, total
from megappo.resilience.sections import Sections
from megappo.rewards.base import RewardError, RewardInput
from megappo.rewards.compose import Judged, Scored
from megappo.rewards.scorer import ROUND_S, Scorer
from megappo.rewards.verdict import Verdict

Result = TypeVar("Result")

# Seconds of scoring before the console hears of it, and between two lines.
FIRST_NOTE_S, NOTE_EVERY_S = 5.0, 15.0


def score_responses(
    experience: Experience, prompt_of: Callable[[int], Prompt], tokenizer: Tokenizer, scorer: Scorer, stop: Sequence[str] = ()
) -> Scored:
    """Decode and score the samples of this rank, in the order of its batch. Collective over the world.

    prompt_of: prompt of a sample's number. stop: strings that end a response; rules see the text before them, training keeps their
    tokens.

    A part that fails anywhere raises the same RewardError on every rank, so none is left waiting in a collective.
    """
    samples = [_reward_input(sample, prompt_of(sample.number), tokenizer, stop) for sample in samples_of(experience)]
    judged, failure = _tried(lambda: _score_in_rounds(scorer, samples))
    raise_together(failure)
    by_model = _scored_by_model(scorer, experience, prompt_of, judged or [])
    scored, failure = _tried(lambda: scorer.composition.compose(judged or [], by_model))
    raise_together(failure)
    assert scored is not None, "it has not failed"
    # A rule may name numbers of its own; ranks that have no such sample know them too.
    return scored.with_parts(names_of_ranks(list(scored.parts)))


def _tried(action: Callable[[], Result]) -> tuple[Result | None, RewardError | None]:
    try:
        return action(), None
    except RewardError as error:
        return None, error


def raise_together(failure: RewardError | None) -> None:
    """Raise the first rank's failure on every rank, if there is one. Collective over the world."""
    if int(total(torch.tensor(int(failure is not None)))):
        said = first_of_ranks(None if failure is None else f"rank {place_in_world()[0]}: {failure}")
        raise RewardError(said) from failure


def _scored_by_model(
    scorer: Scorer, experience: Experience, prompt_of: Callable[[int], Prompt], judged: Sequence[Judged]
) -> dict[str, dict[int, Verdict]]:
    """Part -> place among this rank's samples -> verdict, for the parts that a model scores and the responses whose recipe has one.
    Collective over the world."""
    names = scorer.names_of_model
    if not names:
        return {}
    chosen = [i for i, one in enumerate(judged) if any(name in scorer.composition.recipes[one.label] for name in names)]
    if not int(total(torch.tensor(len(chosen)))):
        return {}
    assert scorer.score_model is not None, f"nothing scores {names}"
    numbers = experience.numbers.tolist()
    prompts = [prompt_of(numbers[i]) for i in chosen]
    verdicts = dict(zip(chosen, scorer.score_model(prompts, [judged[i] for i in chosen]), strict=True))
    return dict.fromkeys(names, verdicts)


def _score_in_rounds(scorer: Scorer, samples: Sequence[RewardInput]) -> list[Judged]:
    """Verdicts of this rank's samples, once all ranks have theirs. Collective, also if it raises.

    The ranks meet every `ROUND_S` seconds: none waits for a slow one longer than an exchange may take, all know that the work goes
    on, and all stop soon after a failure. Empty if another rank has failed.
    """
    failure: RewardError | None = None
    try:
        scorer.submit(samples)
    except RewardError as error:
        failure = error
    while True:
        counts = (0, 0) if failure is not None else scorer.work(ROUND_S)
        found, of, failed = total(torch.tensor([*counts, int(failure is not None or scorer.has_failed)])).tolist()
        scorer.on_progress(found, of)
        if failed:
            break
        if found == of:
            return scorer.finish()
    if failure is None and scorer.has_failed:
        return scorer.finish()  # raises
    scorer.drop()
    if failure is not None:
        raise failure
    return []


class ScoringProgress:
    """`Scorer.on_progress` of a run: tells the watchdog that the work goes on, and the console how far it is if it takes long."""

    def __init__(self, note: Callable[[str], None], sections: Sections, clock: Callable[[], float] = time.monotonic) -> None:
        self._note, self._sections, self._clock = note, sections, clock
        self._found = self._of = 0
        self._begun = self._told = clock()

    def __call__(self, found: int, of: int) -> None:
        now = self._clock()
        if self._found >= self._of or found < self._found:  # the last one had ended: this is another
            self._found, self._begun, self._told = 0, now, now + FIRST_NOTE_S - NOTE_EVERY_S
        if found > self._found:
            self._sections.advance()
        self._found, self._of = found, of
        if found < of and now - self._told >= NOTE_EVERY_S:
            self._told = now
            self._note(f"score: {found:,}/{of:,} rewards after {now - self._begun:.0f} s")


@dataclass(frozen=True)
class Sample:
    """A sample of this rank. tokens: ids of its response. num_sampled: those of them that the policy sampled."""

    number: int
    tokens: list[int]
    num_sampled: int
    truncated: bool


def samples_of(experience: Experience) -> Iterator[Sample]:
    """The samples of this rank, in the order of its batch."""
    batch, numbers = experience.batch, experience.numbers
    rows = experience.table.rows(numbers)
    starts, ends = batch.cu_seqlens[:-1] + rows.prompt, batch.cu_seqlens[1:]
    columns = (numbers, starts, ends, rows.sampled, rows.truncated)
    for number, start, end, num_sampled, truncated in zip(*(column.tolist() for column in columns)):
        yield Sample(number, batch.tokens[start:end].tolist(), num_sampled, bool(truncated))


def response_text(tokens: Sequence[int], tokenizer: Tokenizer, stop: Sequence[str] = ()) -> str:
    """The response without the end-of-sequence token, up to the first of the stop strings."""
    ids = list(tokens)
    if ids and ids[-1] in tokenizer.eos_ids:
        ids.pop()
    text = tokenizer.decode(ids)
    ends = [end for string in stop if (end := text.find(string)) >= 0]
    return text[: min(ends)] if ends else text


def _reward_input(sample: Sample, prompt: Prompt, tokenizer: Tokenizer, stop: Sequence[str]) -> RewardInput:
    return RewardInput(
        prompt=prompt.text,
        response=response_text(sample.tokens, tokenizer, stop),
        answer=prompt.answer,
        truncated=sample.truncated,
        num_tokens=sample.num_sampled,
        record=prompt.record,
        sample_id=f"{prompt.id} (sample {sample.number})",
        full_response=tokenizer.decode_all(sample.tokens),
        tokens=tuple(sample.tokens),
    )
