"""Stage 3: the rewards of the sampled responses, computed once over all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from megappo.data.prompts import Prompt
from megappo.data.tokenizers import Tokenizer
from megappo.resilience.sections import Sections
from megappo.rewards.base import RewardError, RewardInput
from megappo.rewards.compose import Judged, Scored
from megappo.rewards.scorer import ROUND_S, Scorer
from megappo.rewards.verdict import Verdict
from megappo.rollout.types import Response

# Seconds of scoring before the console hears of it, and between two lines.
FIRST_NOTE_S, NOTE_EVERY_S = 5.0, 15.0


def score_responses(
    prompts: Sequence[Prompt],
    responses: Sequence[Response],
    tokenizer: Tokenizer,
    scorer: Scorer,
    stop: Sequence[str] = (),
) -> Scored:
    """Decode and score; prompts[i] belongs to responses[i]. Collective: each rank scores its share, all get all.

    stop: strings that end a response; rules see the text before them, training keeps their tokens.

    A part that fails anywhere raises the same RewardError on every rank, so none is left waiting in a collective.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = range(rank, len(responses), world_size)
    samples = [_reward_input(prompts[i], responses[i], tokenizer, stop, i) for i in mine]
    share: tuple[str, Any]
    try:
        share = ("scored", _score_in_rounds(scorer, samples))
    except RewardError as error:
        share = ("failed", f"rank {rank}: {error}")
    shares = _gather(share)
    if failures := [found for state, found in shares if state == "failed"]:
        raise RewardError(failures[0])
    judged = _interleave([found for _, found in shares], len(responses))
    return scorer.composition.compose(judged, _scored_by_model(scorer, prompts, judged))


def _scored_by_model(scorer: Scorer, prompts: Sequence[Prompt], judged: Sequence[Judged]) -> dict[str, dict[int, Verdict]]:
    """Part -> response -> verdict, for the parts that a model scores and the responses whose recipe has one. Collective."""
    names = scorer.names_of_model
    chosen = [i for i, one in enumerate(judged) if any(name in scorer.composition.recipes[one.label] for name in names)]
    if not chosen:
        return {}
    assert scorer.score_model is not None, f"nothing scores {names}"
    verdicts = dict(zip(chosen, scorer.score_model([prompts[i] for i in chosen], [judged[i] for i in chosen]), strict=True))
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
        rounds = _gather((*counts, failure is not None or scorer.has_failed))
        found, of = (sum(values) for values in list(zip(*rounds))[:2])
        scorer.on_progress(found, of)
        if any(failed for _, _, failed in rounds):
            break
        if found == of:
            return scorer.finish()
    if failure is None and scorer.has_failed:
        return scorer.finish()  # raises
    scorer.drop()
    if failure is not None:
        raise failure
    return []


def _gather(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


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


def response_text(response: Response, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> str:
    """The response without the end-of-sequence token, up to the first of the stop strings."""
    tokens = response.tokens.tolist()
    if tokens and tokens[-1] in tokenizer.eos_ids:
        tokens.pop()
    text = tokenizer.decode(tokens)
    ends = [end for string in stop if (end := text.find(string)) >= 0]
    return text[: min(ends)] if ends else text


def _reward_input(prompt: Prompt, response: Response, tokenizer: Tokenizer, stop: Sequence[str], index: int) -> RewardInput:
    tokens = response.tokens.tolist()
    return RewardInput(
        prompt=prompt.text,
        response=response_text(response, tokenizer, stop),
        answer=prompt.answer,
        truncated=response.finish == "length",
        num_tokens=len(tokens),
        record=prompt.record,
        sample_id=f"{prompt.id} (sample {index})",
        full_response=tokenizer.decode_all(tokens),
        tokens=tuple(tokens),
    )


def _interleave(shares: list[list], count: int) -> list:
    """Undo the split i -> rank i % world_size."""
    return [shares[i % len(shares)][i // len(shares)] for i in range(count)]
