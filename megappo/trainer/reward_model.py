"""Scores of the reward model for prompts and responses: text to its own token ids, one packed pass, normalisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
import torch.distributed as dist
from torch import Tensor

from megappo.config.schema import RewardModelConfig
from megappo.data.packing import PackedBatch, pack
from megappo.data.prompts import Prompt
from megappo.data.reward_text import RewardText
from megappo.rewards.base import RewardError
from megappo.trainer.finite_outputs import NonFiniteOutput
from megappo.trainer.roles import RewardModel

ScoreWithModel = Callable[[Sequence[Prompt], Sequence[str]], "ModelScores"]


@dataclass(frozen=True)
class ModelScores:
    """Scores of all samples, the same on every rank. values: [B], as composed; raw: [B], of the head; cut: [B], 1 for a text whose
    front was cut to the model's positions."""

    values: list[float]
    raw: list[float]
    cut: list[float]


@dataclass(frozen=True)
class ModelScorer:
    """The reward model of a run with the text that it reads and the normalisation of its section."""

    model: RewardModel
    text: RewardText
    settings: RewardModelConfig

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> ModelScores:
        """Score; prompts[i] belongs to responses[i], the text that rules see. Collective: every rank passes all of them.

        RewardError, on every rank, for a text that the model's template refuses; NonFiniteOutput for a NaN or infinite score.
        """
        texts = self._encode(prompts, responses)
        batch = pack([self.text.fitted(ids) for ids in texts])
        raw = self.model.scores(batch)
        self._require_finite(raw, batch, prompts)
        values = normalised(raw, self.settings)
        return ModelScores(values.tolist(), raw.tolist(), [float(len(ids) > self.text.max_tokens) for ids in texts])

    def _encode(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[list[int]]:
        """Ids of all texts, of which each rank encodes its share."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mine: list[numpy.ndarray] | str = []
        for index in range(rank, len(responses), world_size):
            try:
                # int32: all ranks send their share to all others.
                mine.append(numpy.array(self.text.encode(prompts[index], responses[index]), dtype=numpy.int32))
            except ValueError as error:
                mine = f"rank {rank}: {self.model.engine.name}: {error}; sample {prompts[index].id} (sample {index})"
                break
        shares: list = [None] * world_size
        dist.all_gather_object(shares, mine)
        failures = [share for share in shares if isinstance(share, str)]
        if failures:
            raise RewardError(failures[0])
        return [shares[index % world_size][index // world_size].tolist() for index in range(len(responses))]

    def _require_finite(self, raw: Tensor, batch: PackedBatch, prompts: Sequence[Prompt]) -> None:
        bad = (~raw.isfinite()).nonzero().flatten().tolist()
        if bad:
            engine, first = self.model.engine, bad[0]
            raise NonFiniteOutput(
                f"score of the {engine.name} is NaN or infinite for {len(bad)} of {len(prompts)} responses, the first to "
                f"{prompts[first].id} (sample {first}), computed by {engine.ranks_of(batch, first)}; no update is made of it"
            )


def normalised(raw: Tensor, settings: RewardModelConfig) -> Tensor:
    """(raw - center) / scale, clipped to +-clip."""
    values = (raw - settings.center) / settings.scale
    return values if settings.clip is None else values.clamp(-settings.clip, settings.clip)
