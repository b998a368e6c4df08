"""Stage 5, after the advantages: which tokens of a response the policy learns from, and how much from each.

Every surrogate is proportional to its advantage (for factors >= 0), so that a weight of a token's loss is one of its advantage, and
losses stay sums over tokens that the fused op computes. Denominators of the loss count all tokens but those of REJECTED.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megappo.algo.aggregation import tokens_per_sequence
from megappo.algo.correction import Correction, behaviour_ratio, correction_weights
from megappo.algo.selection import kth_largest
from megappo.config.schema import AlgorithmConfig, CorrectionConfig
from megappo.data.packing import PackedBatch
from megappo.experience.experience import Experience
from megappo.parallel.totals import largest, total
from megappo.telemetry.metrics import Metric

REJECTED = "rejected"
"""Field of the sampled tokens that count nowhere in the policy's loss (`correction.count_rejected`)."""


def reweight(experience: Experience, algorithm: AlgorithmConfig) -> tuple[Experience, dict[str, float]]:
    """The experience with its field advantage as `algorithm` wants it, and figures of that by metric. Collective over the world.

    Nothing changes under the defaults. Reads response_mask, with a correction logprob and rollout_logprob, with a ratio of tokens
    entropy.
    """
    metrics: dict[str, float] = {}
    if algorithm.sequence_advantages:
        experience = experience.with_fields({"advantage": _means_of_sequences(experience.batch)})
    if algorithm.correction.weighs:
        fields, figures = _corrected(experience.batch, algorithm.correction)
        experience, metrics = experience.with_fields(fields), metrics | figures
    if algorithm.high_entropy_token_ratio is not None:
        advantage, figures = _of_high_entropy(experience, algorithm.high_entropy_token_ratio)
        experience, metrics = experience.with_fields({"advantage": advantage}), metrics | figures
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


def _corrected(batch: PackedBatch, correction: CorrectionConfig) -> tuple[dict[str, Tensor], dict[str, float]]:
    """(fields, figures over all ranks): advantage [T] times the weights of the correction, and REJECTED [T] bool if it drops."""
    mask = batch["response_mask"]
    ratio = behaviour_ratio(batch["logprob"], batch["rollout_logprob"], mask, batch.cu_seqlens, correction.level)
    found = correction_weights(ratio, mask, correction.kind, correction.low, correction.high)
    advantage = torch.where(mask, batch["advantage"] * found.weight, 0.0).float()
    fields = {"advantage": advantage} | ({REJECTED: found.cut} if correction.drops else {})
    return fields, correction_figures(ratio, found, mask)


def correction_figures(ratio: Tensor, found: Correction, mask: Tensor) -> dict[str, float]:
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
    batch, sampled = experience.batch, int(experience.table.sampled.sum())
    entropy = batch["entropy"]
    threshold = kth_largest(entropy[batch["response_mask"]], max(1, math.ceil(ratio * sampled)), total)
    return torch.where(entropy >= threshold, batch["advantage"], 0.0), {Metric.HIGH_ENTROPY.value: threshold}
