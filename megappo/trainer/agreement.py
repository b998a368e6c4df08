"""Does the sampler compute the same policy as the trainer? Compared on every sampled token of every step.

Rounding makes small differences; stale weights, a wrong temperature, token ids that went through text or a broken reshard make
large ones, and PPO on them degrades without any error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megappo.data.packing import PackedBatch


class SamplerMismatch(RuntimeError):
    """The rollout engine samples from another distribution than the trainer believes."""


@dataclass(frozen=True)
class Agreement:
    """|difference| of the probabilities of sampled tokens between sampler and trainer."""

    mean: float
    max: float


def compare_with_sampler(batch: PackedBatch, *, truncated_sampling: bool) -> Agreement:
    """batch has logprob (trainer) and rollout_logprob (sampler), [T].

    With top-p or top-k the sampler renormalises over fewer tokens, so its probabilities are rightly larger: then only the amounts by
    which they are smaller count.
    """
    mask = batch["response_mask"]
    difference = batch["logprob"][mask].double().exp() - batch["rollout_logprob"][mask].double().exp()
    difference = difference.clamp(min=0) if truncated_sampling else difference.abs()
    if difference.numel() == 0:
        return Agreement(0.0, 0.0)
    return Agreement(float(difference.mean()), float(difference.max()))


def require_agreement(agreement: Agreement, limit: float, step: int, engine: str) -> None:
    """Raises SamplerMismatch above the limit (`rollout.max_prob_diff`)."""
    # A NaN must not pass as "not greater".
    if not agreement.mean <= limit or not torch.isfinite(torch.tensor(agreement.max)):
        raise SamplerMismatch(
            f"step {step}: {engine} and the trainer disagree on sampled tokens: mean |probability difference| {agreement.mean:.4f} "
            f"(max {agreement.max:.4f}) is above rollout.max_prob_diff = {limit}. Usual causes: weights not pushed or pushed wrongly, "
            "another dtype (rollout.dtype), a rope or norm setting that one side ignores, a stale prefix cache"
        )
