"""Stage 3: rewards of the sampled responses, each on the rank that owns the sample. Streaming parts start in stage 2 on the rank
that drew a sample; its owner collects their results and starts the rest, so no sample waits for the few ranks that drew many."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

import torch

from megappo.data.prompts import Prompt
from megappo.data.token_texts import response_text
from megappo.data.tokenizers import Tokenizer
from megappo.parallel.consensus import exchanged, raised_by_all
from megappo.parallel.totals import names_of_ranks, place_in_world, total
from megappo.rewards.base import RewardError, RewardInput
from megappo.rewards.compose import Judged, Scored
from megappo.rewards.scorer import ROUND_S, Found, Scorer
from megappo.rewards.verdict import Verdict
from megappo.rollout.generation import OnFinished
from megappo.rollout.types import BATCH, Request, Response
from megappo.runtime.sections import Sections
from megappo.trainer.experience.collect import LOST
from megappo.trainer.experience.experience import Experience
from megappo.trainer.token_scans import whole_responses

Parcel = TypeVar("Parcel")


def to_owners(experience: Experience, parcels: Mapping[int, Parcel]) -> dict[int, Parcel]:
    """Send parcels to the owners of the samples; return those of this rank's samples. Collective over the wire of the experience.
    parcels: sample number -> small picklable object. Each sample has one sender."""
    owners, ranks, places = experience.owners, experience.wire.ranks, experience.wire.places
    bags: list[dict[int, Parcel]] = [{} for _ in ranks]
    for number, parcel in parcels.items():
        bags[int(places[owners.shares.reporters[int(owners.share[number])]])][number] = parcel
    found: dict[int, Parcel] = {}
    for one in exchanged([pickle.dumps(bag) if bag else b"" for bag in bags], experience.wire.all_to_all):
        if one:
            found |= pickle.loads(one)
    return found


T = TypeVar("T")

# Seconds of scoring before the console hears of it, and between two lines.
FIRST_NOTE_S, NOTE_EVERY_S = 5.0, 15.0


def begin_rewards(
    prompt_of: Callable[[int], Prompt],
    tokenizer: Tokenizer,
    scorer: Scorer,
    stop: Sequence[str] = (),
    requests: Sequence[Request] | None = None,
) -> OnFinished | None:
    """Return a callback for `rollout.generation.generate` that starts the rewards of finished responses; None if no part streams.
    requests: of the batch, if responses span several steps. A part that cannot start raises later, in `score_responses`."""
    if not scorer.streams:
        return None

    def begin(responses: list[Response]) -> None:
        whole = responses if requests is None else [requests[one.number].whole(one) for one in responses]
        _give_early(scorer, {one.number: one.verdicts for one in responses if one.verdicts is not None})
        samples = [_sample_of(one) for one in whole if one is not None and one.verdicts is None]
        scorer.submit_early({one.number: _reward_input(one, prompt_of(one.number), tokenizer, stop) for one in samples})

    return begin


class RewardsBeside:
    """Rewards that stream, started as `begin_rewards` does, on the first rank of a replica of the rollout half
    (`rollout.server.Rewards`). The training ranks begin with their verdicts, and compute the rest."""

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._scorer, self._tokenizer, self._stop = scorer, tokenizer, stop
        self._retries: Counter[str] = Counter()

    def start(self, number: int, response: Response, prompt: Prompt) -> None:
        sample = _sample_of(replace(response, number=number % BATCH))
        self._scorer.submit_early({number: _reward_input(sample, prompt, self._tokenizer, self._stop)})

    def take(self) -> dict[int, dict[str, list[Any]]]:
        if not (found := self._scorer.take_early()):
            return {}
        self._retries.update(self._scorer.take_retries())
        return {
            number: {name: [self._retries.pop(name, 0), *vars(one).values()] for name, one in parts.items()}
            for number, parts in found.items()
        }

    def close(self) -> None:
        self._scorer.close()


def _give_early(scorer: Scorer, found: Mapping[int, Mapping[str, Sequence[Any]]]) -> None:
    """Give the scorer what `RewardsBeside.take` has returned: response -> part -> retries since the last one, and its verdict."""
    verdicts: dict[int, dict[str, Verdict]] = {number: {} for number in found}
    retries: Counter[str] = Counter()
    for number, parts in found.items():
        for name, (again, score, numbers, per_token, *rest) in parts.items():
            retries[name] += again
            verdicts[number][name] = Verdict(score, numbers, None if per_token is None else tuple(per_token), *rest)
    scorer.give_early(verdicts, retries)


def score_responses(
    experience: Experience, prompt_of: Callable[[int], Prompt], tokenizer: Tokenizer, scorer: Scorer, stop: Sequence[str] = ()
) -> Scored:
    """Decode and score the samples of this rank, in the order of its batch. Collective over the world.
    prompt_of: sample number -> prompt. stop: strings that end a response; rules see the text before them, training keeps their
    tokens. A response that continues in a later step has score 0 and no parts, one without a verdict of its environment no score.
    RewardError on every rank if a part fails on any."""
    ends = experience.table.ends[experience.numbers]
    numbers = experience.numbers[ends].tolist()
    finished = [sample for sample, is_last in zip(samples_of(experience), ends.tolist(), strict=True) if is_last]
    samples = [_reward_input(sample, prompt_of(sample.number), tokenizer, stop) for sample in finished]
    judged, early_s = _judge(experience, scorer, samples, numbers)
    by_model = _scored_by_model(scorer, prompt_of, judged, numbers)
    scored = raised_as_one(lambda: scorer.composition.compose(judged, by_model))
    # A rule may name numbers of its own; ranks that have no such sample know them too.
    named = scored.with_parts(names_of_ranks(list(scored.parts))).among(ends.tolist())
    fields = experience.batch.sequence_fields
    lost = {name.removeprefix(LOST): x.nonzero().flatten().tolist() for name, x in fields.items() if name.startswith(LOST)}
    named = named.without({i: reason for reason, places in lost.items() for i in places})
    return replace(named, early_s=early_s, retries=scorer.take_retries())


def _judge(
    experience: Experience, scorer: Scorer, samples: Sequence[RewardInput], numbers: Sequence[int]
) -> tuple[list[Judged], float | None]:
    """Return the verdicts of this rank's samples, and the seconds of generation with streamed scoring (None if no part streams).
    Collective over the world."""
    if not scorer.streams:
        return raised_as_one(lambda: _score_in_rounds(scorer, samples))[0], None
    handed_over, early_s = scorer.hand_over()
    there = to_owners(experience, handed_over)
    found = [there.get(number, {}) for number in numbers]
    judged, early = raised_as_one(lambda: _score_in_rounds(scorer, samples, found))
    late = to_owners(experience, early)
    return [replace(one, verdicts={**one.verdicts, **late.get(n, {})}) for n, one in zip(numbers, judged, strict=True)], early_s


def raised_as_one(action: Callable[[], T]) -> T:
    """Run `action`; if a rank fails, RewardError on every rank names the first that failed. Collective over the world."""

    def named() -> T:
        try:
            return action()
        except RewardError as error:
            raise RewardError(f"rank {place_in_world()[0]}: {error}") from error

    return raised_by_all(named, RewardError)


def _scored_by_model(
    scorer: Scorer, prompt_of: Callable[[int], Prompt], judged: Sequence[Judged], numbers: Sequence[int]
) -> dict[str, dict[int, Verdict]]:
    """Return part -> index of the judged sample -> verdict, for the parts and responses that the reward model scores.
    numbers: of these samples. Collective over the world."""
    names = scorer.names_of_model
    if not names:
        return {}
    chosen = [i for i, one in enumerate(judged) if any(name in scorer.composition.recipes[one.label] for name in names)]
    if not int(total(torch.tensor(len(chosen)))):
        return {}
    assert scorer.score_model is not None, f"nothing scores {names}"
    prompts = [prompt_of(numbers[i]) for i in chosen]
    verdicts = dict(zip(chosen, scorer.score_model(prompts, [judged[i] for i in chosen]), strict=True))
    return dict.fromkeys(names, verdicts)


def _score_in_rounds(
    scorer: Scorer, samples: Sequence[RewardInput], found_elsewhere: Sequence[Found] | None = None
) -> tuple[list[Judged], dict[int, dict[str, Verdict]]]:
    """Score this rank's samples; return their verdicts except those in progress elsewhere, and by number those in progress here for
    others. Empty if another rank failed. Collective over the world, also if it raises."""
    failure: RewardError | None = None
    try:
        scorer.submit(samples, found_elsewhere)
    except RewardError as error:
        failure = error
    # The ranks meet every `ROUND_S` seconds, so no exchange times out on a slow rank, and all stop soon after a failure.
    while True:
        counts = (0, 0) if failure is not None else scorer.work(ROUND_S)
        found, of, failed = total(torch.tensor([*counts, int(failure is not None or scorer.has_failed)])).tolist()
        scorer.on_progress(found, of)
        if failed:
            break
        if found == of:
            early = scorer.finish_early()
            return scorer.finish(), early
    if failure is None and scorer.has_failed:
        scorer.finish()  # raises
    scorer.drop()
    if failure is not None:
        raise failure
    return [], {}


class ScoringProgress:
    """`Scorer.on_progress` of a run: tells the watchdog that scoring advances, and the console how far it is if it takes long."""

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
    """A sample of this rank. tokens: ids of its response so far. num_sampled: tokens sampled by the policy. turns: runs of sampled
    ids between observations."""

    number: int
    tokens: list[int]
    num_sampled: int
    truncated: bool
    turns: list[list[int]]


def samples_of(experience: Experience) -> Iterator[Sample]:
    """Yield the samples of this rank, in the order of its batch."""
    batch, numbers = experience.batch, experience.numbers
    rows = experience.table.rows(numbers)
    starts, ends = batch.cu_seqlens[:-1] + rows.prompt - rows.earlier, batch.cu_seqlens[1:]
    columns = (numbers, starts, ends, rows.response, rows.truncated)
    mask = whole_responses(batch)["response_mask"]
    for number, start, end, num_sampled, truncated in zip(*(column.tolist() for column in columns)):
        tokens = batch.tokens[start:end].tolist()
        turns = [tokens] if num_sampled == len(tokens) else _turns(tokens, mask[start:end].tolist())
        yield Sample(number, tokens, num_sampled, bool(truncated), turns)


def _sample_of(response: Response) -> Sample:
    tokens = response.tokens.tolist()
    turns = [tokens] if response.num_sampled == len(tokens) else _turns(tokens, response.sampled.tolist())
    return Sample(response.number, tokens, response.num_sampled, response.finish == "length", turns)


def _turns(tokens: list[int], sampled: list[bool]) -> list[list[int]]:
    runs = groupby(zip(tokens, sampled, strict=True), key=itemgetter(1))
    return [[token for token, _ in run] for is_sampled, run in runs if is_sampled]


def _reward_input(sample: Sample, prompt: Prompt, tokenizer: Tokenizer, stop: Sequence[str]) -> RewardInput:
    turns = tuple(response_text(turn, tokenizer, stop) for turn in sample.turns)
    is_one = sample.num_sampled == len(sample.tokens)
    return RewardInput(
        prompt=prompt.text,
        response=turns[0] if is_one else _text_of_turns(sample, tokenizer, turns),
        answer=prompt.answer,
        truncated=sample.truncated,
        num_tokens=sample.num_sampled,
        record=prompt.record,
        sample_id=f"{prompt.id} (sample {sample.number})",
        full_response=tokenizer.decode_all(sample.tokens),
        tokens=tuple(token for turn in sample.turns for token in turn),
        turns=turns,
    )


def _text_of_turns(sample: Sample, tokenizer: Tokenizer, turns: Sequence[str]) -> str:
    """Return the text of turns and observations, with the stop string cut from the last turn only."""
    text = response_text(sample.tokens, tokenizer)
    if not sample.turns:
        return text
    whole = response_text(sample.turns[-1], tokenizer)
    return text[: len(text) - (len(whole) - len(turns[-1]))]
