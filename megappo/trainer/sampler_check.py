"""Comparison of the sampler's policy with the trainer's, on every sampled token of every step.

Rounding makes small differences; stale weights, a wrong temperature, token ids that went through text or a broken reshard make
large ones, and PPO on them degrades without any error. docs/agreement.md defines the log-probs of both sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.algo.chunks import in_chunks, true_positions
from megappo.data.packing import PackedBatch
from megappo.parallel.totals import total_and_largest
from megappo.rollout.types import SamplingParams
from megappo.trainer.experience.table import SampleTable


class SamplerMismatch(RuntimeError):
    """The rollout engine samples from another distribution than the trainer computes."""


@dataclass(frozen=True)
class Agreement:
    """|difference| of the probabilities of sampled tokens between sampler and trainer.

    kept: summary of the recorded ids (field `kept`), if sampling was restricted to them. num_bad: sum of the ranks' own numbers.
    """

    mean: float
    max: float
    kept: KeptSummary | None = None
    num_bad: int = 0


@dataclass(frozen=True)
class KeptSummary:
    """Recorded ids of a step. ids: mean number of ids that a token was drawn from. overflow: share of tokens with the most ids that
    are recorded; more may have tied with the last one, and the trainer leaves those out."""

    ids: float
    overflow: float


def average_version(step: int) -> int:
    """Version of the policy's average after `step` in the sampler: below 0, and so no step's."""
    return -1 - step


def require_version(table: SampleTable, step: int, push_every: int, engine: str) -> None:
    """Raise SamplerMismatch on every rank if a response of `step` was sampled by other weights than the policy's after one of the
    `push_every` steps before it: by the average, or by weights that a missing push left there."""
    newest, oldest = step - 1, max(0, step - push_every)
    wrong = [version for version in (int(table.oldest.min()), int(table.newest.max())) if not oldest <= version <= newest]
    if wrong:
        whose = f"the average after step {-1 - wrong[0]}" if wrong[0] < 0 else f"step {wrong[0]}"
        raise SamplerMismatch(f"step {step}: {engine} sampled with the weights of {whose}, not with the policy's of step {newest}")


@torch.inference_mode()
def compare_with_sampler(batch: PackedBatch, sampling: SamplingParams, num_bad: int = 0) -> Agreement:
    """Compare logprob (trainer) and rollout_logprob (sampler), both [T], of all ranks' samples; `batch` has this rank's. With
    `kept` the trainer's are of the truncated distribution. Collective over the world. num_bad: a number of this rank that goes
    along: an exchange of its own would cost 0.4 ms of processor time on 8 ranks.

    With top-p or top-k the sampler renormalises over fewer tokens. Without `kept` the trainer does not, so the sampler's
    probabilities are rightly larger: then only amounts by which they are smaller count.
    """
    mask, is_kept = batch["response_mask"], "kept" in batch
    one_sided = sampling.truncates and not is_kept
    columns = in_chunks(mask, batch["logprob"], batch["rollout_logprob"])
    parts = [_of_chunk(where, logprob, drawn, one_sided) for where, logprob, drawn in columns]
    count, difference = torch.stack([sums for sums, _ in parts]).sum(0)
    most = torch.stack([largest_of_chunk for _, largest_of_chunk in parts]).amax()
    # Only tokens that were sampled have ids.
    counts = batch.ragged("kept").counts if is_kept else torch.zeros(0, dtype=torch.int32)
    overflow = (counts >= sampling.top_k_width).sum()
    # NaN, which a maximum over ranks may lose, is in the sum.
    own = torch.stack([count, difference, counts.sum(), overflow, count.new_tensor(num_bad)])
    sums, highest = total_and_largest(own, most[None])
    count, differences, kept, overflows, bad = sums.tolist()
    if count == 0:
        return Agreement(0.0, 0.0, num_bad=int(bad))
    summary = KeptSummary(kept / count, overflows / count) if is_kept else None
    return Agreement(differences / count, float(highest), summary, int(bad))


def _of_chunk(mask: Tensor, logprob: Tensor, drawn: Tensor, one_sided: bool) -> tuple[Tensor, Tensor]:
    """(count and sum [2], maximum []) of the differences of sampled tokens, fp64."""
    sampled = true_positions(mask)  # once for both: index_select is several times faster than [mask]
    difference, theirs = (x.index_select(0, sampled).double().exp_() for x in (logprob, drawn))
    difference.sub_(theirs)
    difference = difference.clamp_(min=0) if one_sided else difference.abs_()
    most = difference.amax() if len(sampled) else difference.new_zeros(())
    return torch.stack([difference.new_tensor(len(sampled)), difference.sum()]), most


def require_agreement(agreement: Agreement, limit: float, step: int, engine: str, age: int = 0) -> None:
    """Raise SamplerMismatch above the limit (`rollout.max_prob_diff`).

    age: steps since the weights of the oldest sample. Older weights rightly differ: then only a value that is not finite raises.
    """
    # NaN compares false with any number and must not pass.
    too_far = age == 0 and not agreement.mean <= limit
    if too_far or not (math.isfinite(agreement.mean) and math.isfinite(agreement.max)):
        raise SamplerMismatch(
            f"step {step}: {engine} and the trainer disagree on sampled tokens: mean |probability difference| {agreement.mean:.4f} "
            f"(max {agreement.max:.4f}) is above rollout.max_prob_diff = {limit}. Usual causes: weights not pushed or pushed "
            "wrongly, another dtype (rollout.dtype, policy.logits_dtype), a rope or norm one side ignores, a stale prefix cache"
        )
