"""Scores of the reward model for prompts and responses: text to its token ids, one packed pass, normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megappo.config.role_sections import RewardModelConfig
from megappo.config.schema import DataConfig
from megappo.data.packing import pack
from megappo.data.prompts import Prompt
from megappo.data.reward_text import RewardText
from megappo.parallel.shares import Shares
from megappo.parallel.totals import first_of_ranks, total
from megappo.rewards.base import RewardError
from megappo.rewards.compose import Judged
from megappo.rewards.verdict import Verdict
from megappo.trainer.experience.experience import Experience
from megappo.trainer.model_outputs import NonFiniteOutput, computing_ranks
from megappo.trainer.prepare.reward_model import prompts_read
from megappo.trainer.roles import RewardModel
from megappo.trainer.scoring import raised_as_one

ROLE = "reward_model"
RAW, CUT = "raw", "cut"
"""Numbers logged beside the score: RAW is the head's output; CUT is 1 if the front of the text was cut to the model's positions."""


@dataclass(frozen=True)
class ModelScorer:
    """The reward model of a run with its text format and the normalisation of its section.
    model: None on ranks where it does not live. shares: how it divides a batch."""

    model: RewardModel | None
    shares: Shares
    text: RewardText
    settings: RewardModelConfig

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[Judged]) -> list[Verdict]:
        """Score this rank's responses; prompts[i] belongs to responses[i]. Collective over the world.
        RewardError on every rank for a text that the model's template refuses; NonFiniteOutput for a NaN or infinite score."""
        texts = raised_as_one(lambda: self._encode(prompts, responses))
        read = [self.text.fitted(ids) for ids in texts]
        batch = pack(read)
        owned = Experience.of_own(batch)
        share = owned.for_role(self.shares, ())
        raw = {} if self.model is None else {RAW: self.model.scores(share.batch)}
        scored = owned.with_results(share, (), (RAW,), raw)
        self._require_finite(scored, responses)
        inner = [{RAW: value, CUT: float(len(ids) > self.text.max_tokens)} for value, ids in zip(scored.batch[RAW].tolist(), texts)]
        values = normalised(scored.batch[RAW], self.settings).tolist()
        return [Verdict(value, parts, num_tokens=len(ids)) for value, parts, ids in zip(values, inner, read)]

    def of_prompts(self, data: DataConfig) -> ModelScorer:
        """Return this scorer for prompts made with the keys of `data`."""
        text = replace(self.text, **prompts_read(data))
        return self if text == self.text else replace(self, text=text)

    def _encode(self, prompts: Sequence[Prompt], responses: Sequence[Judged]) -> list[list[int]]:
        """Return the ids of the texts; RewardError if one cannot be encoded."""
        texts: list[list[int]] = []
        for prompt, response in zip(prompts, responses, strict=True):
            try:
                texts.append(list(self.text.encode(prompt, response.text)))
            except ValueError as error:
                raise RewardError(f"{ROLE}: {error}; sample {response.sample_id}") from error
        return texts

    def _require_finite(self, scored: Experience, responses: Sequence[Judged]) -> None:
        """Raise NonFiniteOutput on every rank if a score of any rank is not finite. Collective over the world."""
        bad = (~scored.batch[RAW].isfinite()).nonzero().flatten().tolist()
        count, of = total(torch.tensor([len(bad), len(responses)])).tolist()
        if not count:
            return
        own = None
        if bad:
            computed_by = computing_ranks(scored, self.shares, int(scored.numbers[bad[0]]))
            own = f"sample {responses[bad[0]].sample_id}, computed by {computed_by}"
        raise NonFiniteOutput(
            f"score of the {ROLE} is NaN or infinite for {count} of {of} responses, the first {first_of_ranks(own)}; no update is "
            "made of it"
        )


def model_scorer(
    model: RewardModel | None, shares: Shares | None, text: RewardText | None, settings: RewardModelConfig
) -> ModelScorer | None:
    """Build the scorer of a run; None for a run without reward model. shares: how the model divides a batch."""
    if shares is None:
        return None
    assert text is not None, "a reward model without its text"
    return ModelScorer(model, shares, text, settings)


def normalised(raw: Tensor, settings: RewardModelConfig) -> Tensor:
    """Return (raw - center) / scale, clipped to +-clip."""
    values = (raw - settings.center) / settings.scale
    return values if settings.clip is None else values.clamp(-settings.clip, settings.clip)
