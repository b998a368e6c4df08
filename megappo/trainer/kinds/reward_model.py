"""Reward models: the likelihood of rankings by the scores of whole texts, pairs (Bradley and Terry) and longer lists."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megappo.algo.preferences import calibration_error, centring_loss, ranking_loss, ranking_sums
from megappo.config.supervised import RewardTrainingConfig
from megappo.data.packing import PackedBatch
from megappo.data.preferences import num_preferences
from megappo.engine.losses import LossOutput
from megappo.telemetry.metrics import Metric, figures
from megappo.trainer.kinds.kind import Kind


def scores_at_ends(output: Tensor, micro: PackedBatch) -> Tensor:
    """Return the head's output at the last token of each sequence, [B]; any number for a sequence of padding. output: [T]."""
    # Not the end of the padded sequence: context parallel fills it up.
    last = micro.cu_seqlens[:-1].long() + micro["length"] - 1
    return output[last.clamp(min=0)]


class RewardTraining(Kind[RewardTrainingConfig]):
    """Training of a reward model on rankings."""

    reads = ("unit", "place", "margin", "length")
    columns = ("loss", "accuracy", "grad_norm", "lr")

    def count(self, batch: PackedBatch) -> float:
        return float(num_preferences(batch))

    def loss(self, output: Tensor, micro: PackedBatch) -> LossOutput:
        settings, unit, place = self.config.loss, micro["unit"], micro["place"]
        score = scores_at_ends(output, micro)
        loss = ranking_loss(score, unit, place, micro["margin"], settings.tie_margin).sum()
        summed = loss + settings.centring * centring_loss(score, unit).sum()
        return LossOutput(loss_sum=summed, sums={"loss_sum": loss, **ranking_sums(score, unit, place)})

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        pairs, sequences = max(sums["pairs_sum"], 1.0), max(sums["sequences_sum"], 1.0)
        mean = sums["score_sum"] / sequences
        return figures(
            {
                Metric.REWARD_MODEL_LOSS: sums["loss_sum"] / count,
                Metric.REWARD_MODEL_ACCURACY: sums["accuracy_sum"] / pairs,
                Metric.REWARD_MODEL_MARGIN: sums["margin_sum"] / pairs,
                Metric.REWARD_MODEL_CALIBRATION: calibration_error(sums),
                Metric.REWARD_MODEL_MEAN: mean,
                Metric.REWARD_MODEL_STD: max(0.0, sums["score_squared_sum"] / sequences - mean**2) ** 0.5,
            }
        )
