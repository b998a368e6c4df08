"""Stage 5, after the advantages: which tokens of a response the policy learns from, and how much from each.

Every surrogate is proportional to its advantage (for factors >= 0), so that a weight of a token's loss is one of its advantage, and
losses stay sums over tokens that the fused op computes. Denominators of the loss count all tokens but those of REJECTED.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megappo.algo.aggregation import tokens_per_sequence
from megappo.algo.importance_sampling import Correction, behaviour_ratio, importance_weights, kth_largest
from megappo.config.schema import AlgorithmConfig, IcePopConfig, MISConfig, TISConfig
from megappo.data.packing import PackedBatch
from megappo.parallel.totals import largest, total
from megappo.telemetry.metrics import Metric
from megappo.trainer.critics import BONUS, DISAGREEMENT
from megappo.trainer.experience.experience import Experience

REJECTED = "rejected"
"""Field of the sampled tokens that count nowhere in the policy's loss (`correction.count_rejected`)."""


def reweight(experience: Experience, algorithm: AlgorithmConfig) -> tuple[Experience, dict[str, float]]:
    """The experience with its field advantage as `algorithm` wants it, and figures of that by metric. Collective over the world.

    Nothing changes under the defaults. Reads response_mask, with a correction logprob and rollout_logprob, with a ratio of tokens
    entropy or disagreement. Adds `critics.BONUS` if critics choose the tokens of the entropy bonus.
    """
    metrics: dict[str, float] = {}
    if algorithm.sequence_advantages:
        experience = experience.with_fields({"advantage": _means_of_sequences(experience.batch)})
    if algorithm.importance_sampling.type != "none":
        fields, figures = _corrected(experience.batch, algorithm.importance_sampling, algorithm.drops_rejected)
        experience, metrics = experience.with_fields(fields), metrics | figures
    if algorithm.high_entropy_token_ratio is not None:
        advantage, figures = _of_high_entropy(experience, algorithm.high_entropy_token_ratio)
        experience, metrics = experience.with_fields({"advantage": advantage}), metrics | figures
    if algorithm.disagreement_mask_ratio is not None:
        advantage, figures = _where_critics_disagree(experience, algorithm.disagreement_mask_ratio)
        experience, metrics = experience.with_fields({"advantage": advantage}), metrics | figures
    if algorithm.disagreement_entropy_ratio is not None:
        bonus, figures = _where_critics_agree(experience, algorithm.disagreement_entropy_ratio)
        experience, metrics = experience.with_fields({BONUS: bonus}), metrics | figures
    return experience, metrics


def on_sampled(values: Tensor, batch: PackedBatch) -> Tensor:
    """[T] fp32: of values [B] that of its sequence at every sampled token, 0 elsewhere."""
    spread = values.float().repeat_interleave(batch.lengths, output_size=batch.num_tokens)
    return torch.where(batch["response_mask"], spread, 0.0)


def _means_of_sequences(batch: PackedBatch) -> Tensor:
    """[T] fp32, at every sampled token the mean advantage of its sequence."""
    counts = tokens_per_sequence(batch["response_mask"], batch.cu_seqlens)
    # Its tokens alone: a running sum would round each sequence by its neighbours on this rank.
    sums = torch.segment_reduce(batch["advantage"].double(), "sum", offsets=batch.cu_seqlens.long(), initial=0.0)
    return on_sampled(sums / counts.clamp(min=1), batch)


def _corrected(
    batch: PackedBatch, correction: TISConfig | MISConfig | IcePopConfig, drops: bool
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """(fields, figures over all ranks): advantage [T] times the weights of the correction, and REJECTED [T] bool if it drops."""
    mask = batch["response_mask"]
    ratio = behaviour_ratio(batch["logprob"], batch["rollout_logprob"], mask, batch.cu_seqlens, correction.level)
    low = correction.low if correction.type == "icepop" else None
    found = importance_weights(ratio, mask, correction.type, low, correction.high)
    advantage = torch.where(mask, batch["advantage"] * found.weight, 0.0).float()
    fields = {"advantage": advantage} | ({REJECTED: found.cut} if drops else {})
    return fields, importance_figures(ratio, found, mask)


def importance_figures(ratio: Tensor, found: Correction, mask: Tensor) -> dict[str, float]:
    """Figures of the weights of a correction [T] over the sampled tokens of all ranks. Collective over the world."""
    count, weights, cut = total(torch.stack([x.sum(dtype=torch.float64) for x in (mask, found.weight, found.cut)])).tolist()
    most = float(largest(torch.cat((ratio, ratio.new_zeros(1))).amax()))
    return {
        Metric.CORRECTION_MEAN.value: weights / max(count, 1.0),
        Metric.CORRECTION_CUT.value: cut / max(count, 1.0),
        Metric.CORRECTION_MAX.value: most,
    }


def _of_high_entropy(experience: Experience, ratio: float) -> tuple[Tensor, dict[str, float]]:
    """(advantages [T], 0 but at this share of the sampled tokens of all ranks, those with the highest entropy; its figures).

    Wang et al. 2025, arXiv:2506.01939, eq. 6, whose threshold is of a mini-batch; tokens tied with the last one count too. Entropy
    bonus and KL term of the loss are of all tokens.
    """
    batch, sampled = experience.batch, _num_sampled(experience)
    entropy = batch["entropy"]
    threshold = kth_largest(entropy[batch["response_mask"]], max(1, math.ceil(ratio * sampled)), total)
    return torch.where(entropy >= threshold, batch["advantage"], 0.0), {Metric.HIGH_ENTROPY.value: threshold}


def _where_critics_disagree(experience: Experience, ratio: float) -> tuple[Tensor, dict[str, float]]:
    """(advantages [T], 0 at this share of the sampled tokens of all ranks, those with the least disagreement; its figures).

    Liu et al. 2025, arXiv:2510.01656: critics that agree have learned such a state, and it teaches little more. Tokens
    tied with the first that counts keep their advantages: critics that start alike mask nothing before they differ.
    """
    deviation, mask, sampled = experience.batch[DISAGREEMENT], experience.batch["response_mask"], _num_sampled(experience)
    threshold = kth_largest(deviation[mask], max(1, sampled - int(ratio * sampled)), total)
    kept = mask & (deviation >= threshold)
    advantage = torch.where(kept, experience.batch["advantage"], 0.0)
    return advantage, {Metric.DISAGREEMENT_MASKED.value: _share_without(kept, sampled)}


def _where_critics_agree(experience: Experience, ratio: float) -> tuple[Tensor, dict[str, float]]:
    """([T] fp32, 0 at this share of the sampled tokens of all ranks, those with the most disagreement, 1 at others; its figures).

    The same paper: states that critics value apart are often noise, which an entropy bonus would explore. Tokens tied with the
    first that counts stay.
    """
    deviation, mask, sampled = experience.batch[DISAGREEMENT], experience.batch["response_mask"], _num_sampled(experience)
    kept = mask & (deviation <= kth_largest(deviation[mask], int(ratio * sampled) + 1, total))
    return kept.float(), {Metric.DISAGREEMENT_FILTERED.value: _share_without(kept, sampled)}


def _num_sampled(experience: Experience) -> int:
    return int(experience.table.sampled.sum())


def _share_without(kept: Tensor, sampled: int) -> float:
    """Share of the sampled tokens of all ranks that are not in `kept`, this rank's mask."""
    return 1.0 - int(total(kept.sum())) / max(sampled, 1) if sampled else 0.0
