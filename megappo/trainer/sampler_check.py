"""Compares the sampler's policy with the trainer's on every sampled token of every step. Rounding makes small differences; stale
weights, a wrong temperature or a broken reshard make large ones, on which PPO degrades without an error (docs/agreement.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.algo.aggregation import in_chunks, true_positions
from megappo.data.packing import PackedBatch
from megappo.parallel.totals import total_and_largest
from megappo.rollout.types import SamplingParams
from megappo.trainer.experience.table import SampleTable


class SamplerMismatch(RuntimeError):
    """The rollout engine samples from another distribution than the trainer computes."""


@dataclass(frozen=True)
class Agreement:
    """Absolute difference of the sampled tokens' probabilities between sampler and trainer.
    kept: summary of the recorded ids, if sampling was restricted to them. num_bad: sum of the ranks' own numbers."""

    mean: float
    max: float
    kept: KeptSummary | None = None
    num_bad: int = 0


@dataclass(frozen=True)
class KeptSummary:
    """Recorded ids of a step. ids: mean ids per sampled token. overflow: share of tokens with the maximum of recorded ids; ids tied
    with the last one may be missing, and the trainer leaves those out."""

    ids: float
    overflow: float


def average_version(step: int) -> int:
    """Return the version of the policy's average after `step` in the sampler: negative, unlike a step's."""
    return -1 - step


def require_version(table: SampleTable, step: int, oldest_weights: int, engine: str) -> None:
    """Raise SamplerMismatch on every rank unless all responses of `step` were sampled with weights of the `oldest_weights` steps
    before it. Other versions are the policy's average, or weights left by a missing push."""
    newest, oldest = step - 1, max(0, step - oldest_weights)
    wrong = [version for version in (int(table.oldest.min()), int(table.newest.max())) if not oldest <= version <= newest]
    if wrong:
        whose = f"the average after step {-1 - wrong[0]}" if wrong[0] < 0 else f"step {wrong[0]}"
        raise SamplerMismatch(f"step {step}: {engine} sampled with the weights of {whose}, not with the policy's of step {newest}")


@torch.inference_mode()
def compare_with_sampler(batch: PackedBatch, sampling: SamplingParams, num_bad: Tensor | int = 0) -> Agreement:
    """Compare logprob (trainer) and rollout_logprob (sampler), [T] each, over all ranks' samples. Collective over the world.
    With `kept` the trainer's are of the truncated distribution. num_bad: a number of this rank, summed in the same exchange. On a
    device the host waits for the number of sampled tokens and for the sums."""
    mask, is_kept = batch["response_mask"], "kept" in batch
    # With top-p or top-k the sampler renormalises over fewer tokens. Without `kept` the trainer does not, so larger probabilities
    # of the sampler are right and only smaller ones count.
    one_sided = sampling.truncates and not is_kept
    columns = in_chunks(mask, batch["logprob"], batch["rollout_logprob"])
    parts = [_of_chunk(where, logprob, drawn, one_sided) for where, logprob, drawn in columns]
    of_tokens = torch.stack([sums for sums, _ in parts]).sum(0)
    most = torch.stack([largest_of_chunk for _, largest_of_chunk in parts]).amax()
    num_bad = torch.as_tensor(num_bad, dtype=torch.float64, device=most.device)
    count, difference, most, num_bad = torch.cat([of_tokens, most[None], num_bad[None]]).cpu()
    # Only tokens that were sampled have ids.
    counts = batch.ragged("kept").counts if is_kept else torch.zeros(0, dtype=torch.int32)
    overflow = (counts >= sampling.top_k_width).sum()
    # A maximum over ranks may lose NaN; the sum keeps it.
    own = torch.stack([count, difference, counts.sum(), overflow, num_bad])
    sums, highest = total_and_largest(own, most[None])
    count, differences, kept, overflows, bad = sums.tolist()
    if count == 0:
        return Agreement(0.0, 0.0, num_bad=int(bad))
    summary = KeptSummary(kept / count, overflows / count) if is_kept else None
    return Agreement(differences / count, float(highest), summary, int(bad))


def _of_chunk(mask: Tensor, logprob: Tensor, drawn: Tensor, one_sided: bool) -> tuple[Tensor, Tensor]:
    """Return count and sum [2], and maximum [], of the differences of sampled tokens, fp64."""
    sampled = true_positions(mask)  # once for both: index_select is several times faster than [mask]
    difference, theirs = (x.index_select(0, sampled).double().exp_() for x in (logprob, drawn))
    difference.sub_(theirs)
    difference = difference.clamp_(min=0) if one_sided else difference.abs_()
    most = difference.amax() if len(sampled) else difference.new_zeros(())
    return torch.stack([difference.new_full((), len(sampled)), difference.sum()]), most


def require_agreement(agreement: Agreement, limit: float, step: int, engine: str, age: int = 0, which: str = "") -> None:
    """Raise SamplerMismatch above the limit (`rollout.max_prob_diff`).
    age: steps since the weights of the oldest sample; older weights may differ, so then only a non-finite value raises.
    which: the sequences, if they are not the step's."""
    # NaN compares false with any number and must not pass.
    too_far = age == 0 and not agreement.mean <= limit
    if too_far or not (math.isfinite(agreement.mean) and math.isfinite(agreement.max)):
        raise SamplerMismatch(
            f"step {step}: {engine} and the trainer disagree on sampled tokens{which}: "
            f"mean |probability difference| {agreement.mean:.4f} (max {agreement.max:.4f}) is above "
            f"rollout.max_prob_diff = {limit}. Usual causes: weights not pushed or pushed wrongly, another dtype (rollout.dtype, "
            "policy.logits_dtype), a rope or norm one side ignores, a stale prefix cache"
        )
