"""Stage 5, after the advantages: which tokens of a response the policy learns from, and how much. Surrogates are proportional to
the advantage (for factors >= 0), so it carries a token's loss weight. Denominators of the loss leave out only REJECTED."""

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
"""Field of sampled tokens that count nowhere in the policy's loss (`correction.count_rejected`)."""


def reweight(experience: Experience, algorithm: AlgorithmConfig) -> tuple[Experience, dict[str, float]]:
    """Reweight the field advantage as `algorithm` says; return the experience and metrics. Collective over the world.
    Nothing changes under the defaults. Reads response_mask; with a correction logprob and rollout_logprob; with a token ratio
    entropy or disagreement. Adds `critics.BONUS` if critics choose the tokens of the entropy bonus."""
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
    """Spread values [B] over the sampled tokens of each sequence: [T] fp32, 0 elsewhere."""
    return torch.where(batch["response_mask"], batch.of_tokens(values.float()), 0.0)


def _means_of_sequences(batch: PackedBatch) -> Tensor:
    """Return [T] fp32, the mean advantage of its sequence at every sampled token."""
    counts = tokens_per_sequence(batch["response_mask"], batch.cu_seqlens)
    # Sum each sequence by itself: a running sum would make its rounding depend on its neighbours on this rank.
    sums = torch.segment_reduce(batch["advantage"].double(), "sum", offsets=batch.cu_seqlens.long(), initial=0.0)
    return on_sampled(sums / counts.clamp(min=1), batch)


def _corrected(
    batch: PackedBatch, correction: TISConfig | MISConfig | IcePopConfig, drops: bool
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return (fields, figures over all ranks): advantage [T] times the correction's weights, and REJECTED [T] bool if it drops."""
    mask = batch["response_mask"]
    ratio = behaviour_ratio(batch["logprob"], batch["rollout_logprob"], mask, batch.cu_seqlens, correction.level)
    low = correction.low if correction.type == "icepop" else None
    found = importance_weights(ratio, mask, correction.type, low, correction.high)
    advantage = torch.where(mask, batch["advantage"] * found.weight, 0.0).float()
    fields = {"advantage": advantage} | ({REJECTED: found.cut} if drops else {})
    return fields, importance_figures(ratio, found, mask)


def importance_figures(ratio: Tensor, found: Correction, mask: Tensor) -> dict[str, float]:
    """Return the metrics of a correction's weights [T] over the sampled tokens of all ranks. Collective over the world."""
    sums = [x.sum(dtype=torch.float64) for x in (mask, found.weight, found.cut)]
    own = torch.stack([*sums, torch.cat((ratio, ratio.new_zeros(1))).amax()]).cpu()
    count, weights, cut = total(own[:3]).tolist()
    most = float(largest(own[3]))
    return {
        Metric.CORRECTION_MEAN.value: weights / max(count, 1.0),
        Metric.CORRECTION_CUT.value: cut / max(count, 1.0),
        Metric.CORRECTION_MAX.value: most,
    }


def _of_high_entropy(experience: Experience, ratio: float) -> tuple[Tensor, dict[str, float]]:
    """Keep the advantages [T] of this share of all ranks' sampled tokens, those with the highest entropy; others become 0.
    Wang et al. 2025, arXiv:2506.01939, eq. 6, whose threshold is per mini-batch. Ties are kept; bonus and KL loss cover all tokens.
    """
    batch, sampled = experience.batch, _num_sampled(experience)
    entropy = batch["entropy"]
    threshold = kth_largest(entropy[batch["response_mask"]], max(1, math.ceil(ratio * sampled)), total)
    return torch.where(entropy >= threshold, batch["advantage"], 0.0), {Metric.HIGH_ENTROPY.value: threshold}


def _where_critics_disagree(experience: Experience, ratio: float) -> tuple[Tensor, dict[str, float]]:
    """Set to 0 the advantages [T] of this share of all ranks' sampled tokens, those with the least disagreement.
    Liu et al. 2025, arXiv:2510.01656: states on which the critics agree are learned and teach little. Ties with the first kept
    token are kept, so critics that start alike mask nothing."""
    deviation, mask, sampled = experience.batch[DISAGREEMENT], experience.batch["response_mask"], _num_sampled(experience)
    threshold = kth_largest(deviation[mask], max(1, sampled - int(ratio * sampled)), total)
    kept = mask & (deviation >= threshold)
    advantage = torch.where(kept, experience.batch["advantage"], 0.0)
    return advantage, {Metric.DISAGREEMENT_MASKED.value: _share_without(kept, sampled)}


def _where_critics_agree(experience: Experience, ratio: float) -> tuple[Tensor, dict[str, float]]:
    """Return [T] fp32, 0 at this share of all ranks' sampled tokens, those with the most disagreement, 1 elsewhere; and its metric.
    Liu et al. 2025: states on which critics disagree are often noise, which the bonus would explore. Ties with the first are kept.
    """
    deviation, mask, sampled = experience.batch[DISAGREEMENT], experience.batch["response_mask"], _num_sampled(experience)
    kept = mask & (deviation <= kth_largest(deviation[mask], int(ratio * sampled) + 1, total))
    return kept.float(), {Metric.DISAGREEMENT_FILTERED.value: _share_without(kept, sampled)}


def _num_sampled(experience: Experience) -> int:
    return int(experience.table.sampled.sum())


def _share_without(kept: Tensor, sampled: int) -> float:
    """Return the share of all ranks' sampled tokens that are not in `kept`, this rank's mask."""
    return 1.0 - int(total(kept.sum().cpu())) / max(sampled, 1) if sampled else 0.0
