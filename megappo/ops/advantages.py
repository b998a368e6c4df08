"""KL-shaped rewards, generalised advantage estimation and whitening moments over packed sequences.

    torch.ops.megappo.gae               reward, value      -> advantage, returns, moments
    torch.ops.megappo.token_advantages  log-probs, score, value -> reward, advantage, returns, moments

GAE (Schulman et al. 2016) over the sampled tokens is the affine recurrence A_t = delta_t + gamma lambda A_next(t), where next(t)
is the next *sampled* token of the sequence, so a token that the policy did not sample (prompt, tool output, padding) is the
identity: no TD error, no decay. The reference solves it by pointer jumping: after k passes every token holds the sum over its
next 2^k sampled tokens. That is log2(T) passes over [T] in fp64, with no loop over tokens, no padding and no host sync. Not
differentiable: advantages are data.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

KL_KINDS = ("k1", "k2", "k3")
# exp(20) = 4.9e8: beyond this log-ratio k3 is capped, so that one token cannot turn the batch into inf
MAX_LOG_RATIO = 20.0


def token_advantages(
    logprob: Tensor,
    ref_logprob: Optional[Tensor],
    score: Tensor,
    value: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    bootstrap: Optional[Tensor] = None,
    *,
    gamma: float = 1.0,
    lam_policy: float | Tensor = 0.95,
    lam_value: float | Tensor = 0.95,
    kl_kind: str = "k1",
    kl_coef: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(reward [T], advantage [T], returns [T], moments [3]) of a packed batch.

    logprob, ref_logprob, value: [T] aligned to their own token (`algo/alignment.py`); ref_logprob None means no KL. score: [B],
    added to the reward of the last sampled token; a sequence without sampled tokens has nowhere to put it. response_mask: [T]
    bool, true where the policy sampled. cu_seqlens: [B+1]. bootstrap: [B] value after the last sampled token, None means 0.
    lam_*: a number or [B]; the policy's advantages use lam_policy, returns = value + advantages under lam_value. kl_kind: k1, k2
    or k3.

    Outputs are fp32 and exactly 0 where the mask is false, whatever stands there. moments: fp64 count, sum and sum of squares of
    the advantages over the mask; those of several ranks or batches add, `whiten_apply` uses the total. Raises ValueError for
    shapes.
    """
    if kl_kind not in KL_KINDS:
        raise ValueError(f"kl_kind {kl_kind!r} is not one of {', '.join(KL_KINDS)}")
    _check(cu_seqlens, {"logprob": logprob, "ref_logprob": ref_logprob, "value": value, "response_mask": response_mask},
           {"score": score, "bootstrap": bootstrap})
    lam_policy, lam_value = _lambda(lam_policy, cu_seqlens), _lambda(lam_value, cu_seqlens)
    return torch.ops.megappo.token_advantages(
        logprob, ref_logprob, score, value, response_mask, cu_seqlens, bootstrap, gamma, lam_policy, lam_value, kl_kind, kl_coef
    )


def gae(
    reward: Tensor,
    value: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    bootstrap: Optional[Tensor] = None,
    *,
    gamma: float = 1.0,
    lam_policy: float | Tensor = 0.95,
    lam_value: float | Tensor = 0.95,
) -> tuple[Tensor, Tensor, Tensor]:
    """(advantage [T], returns [T], moments [3]) from per-token rewards [T]; everything else as `token_advantages`."""
    _check(cu_seqlens, {"reward": reward, "value": value, "response_mask": response_mask}, {"bootstrap": bootstrap})
    lam_policy, lam_value = _lambda(lam_policy, cu_seqlens), _lambda(lam_value, cu_seqlens)
    return torch.ops.megappo.gae(reward, value, response_mask, cu_seqlens, bootstrap, gamma, lam_policy, lam_value)


def _check(cu_seqlens: Tensor, per_token: dict[str, Optional[Tensor]], per_sequence: dict[str, Optional[Tensor]]) -> None:
    num_tokens = per_token["value"].shape[0]
    num_sequences = cu_seqlens.numel() - 1
    for name, tensor in per_token.items():
        if tensor is not None and tensor.shape != (num_tokens,):
            raise ValueError(f"{name} {tuple(tensor.shape)} is not one value for each of {num_tokens} tokens")
    for name, tensor in per_sequence.items():
        if tensor is not None and tensor.shape != (num_sequences,):
            raise ValueError(f"{name} {tuple(tensor.shape)} is not one value for each of {num_sequences} sequences")
    if per_token["response_mask"].dtype != torch.bool:
        raise ValueError(f"response_mask must be bool, not {per_token['response_mask'].dtype}")


def _lambda(lam: float | Tensor, cu_seqlens: Tensor) -> Tensor:
    """[B] fp64."""
    num_sequences = cu_seqlens.numel() - 1
    if not isinstance(lam, Tensor):
        return torch.full((num_sequences,), lam, dtype=torch.float64, device=cu_seqlens.device)
    if lam.shape not in ((), (num_sequences,)):
        raise ValueError(f"lambda {tuple(lam.shape)} is neither one number nor one for each of {num_sequences} sequences")
    return lam.double().expand(num_sequences)


@torch.library.custom_op("megappo::token_advantages", mutates_args=())
def _token_advantages(
    logprob: Tensor,
    ref_logprob: Optional[Tensor],
    score: Tensor,
    value: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    bootstrap: Optional[Tensor],
    gamma: float,
    lam_policy: Tensor,
    lam_value: Tensor,
    kl_kind: str,
    kl_coef: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sequence, following = _links(response_mask, cu_seqlens)
    last = response_mask & (following == response_mask.numel())
    reward = torch.zeros(logprob.shape, dtype=torch.float64, device=logprob.device)
    if ref_logprob is not None and kl_coef != 0.0:
        reward = reward - kl_coef * _kl(logprob.double() - ref_logprob.double(), kl_kind)
    # an empty batch has no sequence to index
    at_end = score.double()[sequence] if score.numel() else reward
    reward = torch.where(response_mask, reward + torch.where(last, at_end, 0.0), 0.0)
    scanned = _scan(reward, value, response_mask, sequence, following, bootstrap, gamma, lam_policy, lam_value)
    return reward.float(), *scanned


@_token_advantages.register_fake
def _(logprob, ref_logprob, score, value, *args):
    return *(value.new_empty(value.shape, dtype=torch.float32) for _ in range(3)), value.new_empty(3, dtype=torch.float64)


@torch.library.custom_op("megappo::gae", mutates_args=())
def _gae(
    reward: Tensor,
    value: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    bootstrap: Optional[Tensor],
    gamma: float,
    lam_policy: Tensor,
    lam_value: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    sequence, following = _links(response_mask, cu_seqlens)
    return _scan(reward.double(), value, response_mask, sequence, following, bootstrap, gamma, lam_policy, lam_value)


@_gae.register_fake
def _(reward, value, *args):
    return *(value.new_empty(value.shape, dtype=torch.float32) for _ in range(2)), value.new_empty(3, dtype=torch.float64)


def _kl(log_ratio: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from log pi - log pi_ref (Schulman, "Approximating KL divergence", 2020)."""
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1((-log_ratio).clamp(max=MAX_LOG_RATIO)) + log_ratio


def _links(response_mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """(sequence [T] of each token, following [T]: position of the next sampled token of its sequence, T where there is none)."""
    num_tokens = response_mask.numel()
    position = torch.arange(num_tokens, device=response_mask.device)
    # right: an empty sequence starts where the next one does, and owns nothing
    sequence = torch.searchsorted(cu_seqlens[1:].long(), position, right=True)
    sampled_at = torch.where(response_mask, position, num_tokens)
    at_or_after = sampled_at.flip(0).cummin(0).values.flip(0) if num_tokens else sampled_at
    following = torch.cat((at_or_after[1:], at_or_after.new_full((min(num_tokens, 1),), num_tokens)))
    end = cu_seqlens.long()[sequence + 1]
    return sequence, torch.where(following < end, following, num_tokens)


def _scan(
    reward: Tensor,
    value: Tensor,
    response_mask: Tensor,
    sequence: Tensor,
    following: Tensor,
    bootstrap: Optional[Tensor],
    gamma: float,
    lam_policy: Tensor,
    lam_value: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens = value.numel()
    value = torch.where(response_mask, value.double(), 0.0)
    reward = torch.where(response_mask, reward, 0.0)
    # slot T stands for "no further sampled token": value 0, advantage 0, factor 0, and it links to itself
    next_value = torch.cat((value, value.new_zeros(1)))[following]
    if bootstrap is not None and num_tokens:
        next_value = torch.where(following == num_tokens, bootstrap.double()[sequence], next_value)
    delta = torch.where(response_mask, reward + gamma * next_value - value, 0.0)
    lam = torch.stack((lam_policy, lam_value)).double()[:, sequence]

    total = torch.nn.functional.pad(delta.expand(2, -1), (0, 1))
    factor = torch.nn.functional.pad(torch.where(following < num_tokens, gamma * lam, 0.0), (0, 1))
    link = torch.cat((following, following.new_full((1,), num_tokens)))
    for _ in range(num_tokens.bit_length()):
        # where, not the factor 0 alone: the sum of another sequence may be NaN, and 0 * NaN is NaN
        total = total + torch.where(link < num_tokens, factor * total[:, link], 0.0)
        factor = factor * factor[:, link]
        link = link[link]

    advantage = torch.where(response_mask, total[0, :num_tokens], 0.0).float()
    returns = torch.where(response_mask, total[1, :num_tokens] + value, 0.0).float()
    exact = advantage.double()
    moments = torch.stack((response_mask.sum().double(), exact.sum(), exact.square().sum()))
    return advantage, returns, moments
