"""Scores of the reward model for prompts and responses: text to its own token ids, one packed pass, normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch.distributed as dist
from torch import Tensor

from megappo.config.role_sections import RewardModelConfig
from megappo.data.packing import PackedBatch, pack
from megappo.data.prompts import Prompt
from megappo.data.reward_text import RewardText
from megappo.rewards.base import RewardError
from megappo.rewards.compose import Judged
from megappo.rewards.verdict import Verdict
from megappo.trainer.finite_outputs import NonFiniteOutput
from megappo.trainer.roles import RewardModel

RAW, CUT = "raw", "cut"
"""Numbers beside the score: the head's own; 1 for a text whose front was cut to the model's positions, else 0."""


@dataclass(frozen=True)
class ModelScorer:
    """The reward model of a run with the text that it reads and the normalisation of its section."""

    model: RewardModel
    text: RewardText
    settings: RewardModelConfig

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[Judged]) -> list[Verdict]:
        """Score; prompts[i] belongs to responses[i], whose text rules see too. Collective: every rank passes all of them.

        RewardError, on every rank, for a text that the model's template refuses; NonFiniteOutput for a NaN or infinite score.
        """
        texts = self._encode(prompts, responses)
        batch = pack([self.text.fitted(ids) for ids in texts])
        raw = self.model.scores(batch)
        self._require_finite(raw, batch, responses)
        inner = [{RAW: value, CUT: float(len(ids) > self.text.max_tokens)} for value, ids in zip(raw.tolist(), texts)]
        return [Verdict(value, parts) for value, parts in zip(normalised(raw, self.settings).tolist(), inner)]

    def _encode(self, prompts: Sequence[Prompt], responses: Sequence[Judged]) -> list[list[int]]:
        """Ids of all texts, of which each rank encodes its share."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mine: list[numpy.ndarray] | str = []
        for prompt, response in list(zip(prompts, responses, strict=True))[rank::world_size]:
            try:
                # int32: all ranks send their share to all others.
                mine.append(numpy.array(self.text.encode(prompt, response.text), dtype=numpy.int32))
            except ValueError as error:
                mine = f"rank {rank}: {self.model.engine.name}: {error}; sample {response.sample_id}"
                break
        shares: list = [None] * world_size
        dist.all_gather_object(shares, mine)
        failures = [share for share in shares if isinstance(share, str)]
        if failures:
            raise RewardError(failures[0])
        return [shares[index % world_size][index // world_size].tolist() for index in range(len(responses))]

    def _require_finite(self, raw: Tensor, batch: PackedBatch, responses: Sequence[Judged]) -> None:
        bad = (~raw.isfinite()).nonzero().flatten().tolist()
        if bad:
            engine, first = self.model.engine, bad[0]
            raise NonFiniteOutput(
                f"score of the {engine.name} is NaN or infinite for {len(bad)} of {len(responses)} responses, the first sample "
                f"{responses[first].sample_id}, computed by {engine.ranks_of(batch, first)}; no update is made of it"
            )


def model_scorer(model: RewardModel | None, text: RewardText | None, settings: RewardModelConfig) -> ModelScorer | None:
    """The scorer of a run; None for a run without reward model."""
    if model is None:
        return None
    assert text is not None, "a reward model without its text"
    return ModelScorer(model, text, settings)


def normalised(raw: Tensor, settings: RewardModelConfig) -> Tensor:
    """(raw - center) / scale, clipped to +-clip."""
    values = (raw - settings.center) / settings.scale
    return values if settings.clip is None else values.clamp(-settings.clip, settings.clip)
