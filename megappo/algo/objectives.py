"""Objectives of the policy beside PPO's clipped one (`losses.py`): sequence ratio, CISPO, DIS, and a steered entropy bonus.
`weight` [T] as in `losses.py`: a token with weight 0 is ignored, even if NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.algo.kl import MAX_LOG_RATIO, kl_of_log_ratio


def steered(coef: float, entropy: float, target: float, step: float) -> tuple[float, float]:
    """Steer the entropy bonus to a target: (coefficient of this step's updates, `coef` for the next step).

    entropy, target: per token, in nats; entropy is the step's before its updates. The bonus acts only while the entropy is at most
    the target. The coefficient rises by `step` below the target and falls by it otherwise (Skywork-OR1, He et al. 2025,
    arXiv:2505.22312, "Adaptive Entropy Control"). It is never below 0, where the paper sets no bound.
    """
    acting = coef if entropy <= target else 0.0
    return acting, max(0.0, coef + (step if entropy < target else -step))


def sequence_log_ratio(logprob: Tensor, old_logprob: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mean log-ratio of the sequence at each of its tokens, [T] fp32, without gradient; 0 at tokens with weight 0.
    This is the log of GSPO's ratio, the geometric mean of the tokens' ratios (Zheng et al. 2025, arXiv:2507.18071, eq. 7).
    cu_seqlens: [B+1], of whole sequences."""
    valid = weight != 0
    log_ratio = torch.where(valid, logprob.detach().double() - old_logprob.double(), 0.0)
    ends = cu_seqlens.long()
    # One sum per sequence: a running sum over the batch would round each by its neighbours.
    sums = torch.segment_reduce(torch.stack((log_ratio, valid.double()), 1), "sum", offsets=ends, initial=0.0, unsafe=True)
    mean = sums[:, 0] / sums[:, 1].clamp(min=1.0)
    spread = mean.repeat_interleave(ends.diff(), output_size=log_ratio.numel())
    return torch.where(valid, spread, 0.0).float()


def token_kl_sum(logprob: Tensor, old_logprob: Tensor, weight: Tensor) -> Tensor:
    """Sum of the k3 estimate of KL(old || new) over tokens with weight, fp64, without gradient: `approx_kl_sum` of `losses.py`."""
    log_ratio = torch.where(weight != 0, logprob.detach().double() - old_logprob.double(), 0.0)
    return kl_of_log_ratio(-log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), "k3").sum()


def cispo_loss(
    logprob: Tensor, old_logprob: Tensor, advantage: Tensor, weight: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute (sum of weight * l, metrics), l = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi, r = exp(logprob - old_logprob).

    CISPO is REINFORCE with a clipped importance weight: no token loses its gradient (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5).
    All tensors [T]; differentiable by `logprob`. clip_low >= 1 leaves the weight unbounded below, as in the paper. Metrics:
    POLICY_SUMS and POLICY_MAXIMA of `losses.py`; clip_low and clip_high count tokens with a clipped weight.
    """
    ratio = _ratio(logprob, old_logprob, weight)
    low, high = 1.0 - clip_low, 1.0 + clip_high
    return _weighed(logprob, old_logprob, advantage, weight, ratio, ratio.clamp(low, high), ratio < low, ratio > high)


def dis_loss(
    logprob: Tensor, rollout_logprob: Tensor, advantage: Tensor, weight: Tensor, low: float, high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute (sum of weight * l, metrics), l = -sg(f(r)) A log pi, f(r) = r if low < r < high, else 0.

    r = exp(logprob - rollout_logprob). Direct double-sided importance sampling: the ratio is against the policy that sampled, and
    tokens out of bounds have no gradient, whatever the sign of A (GLM-5, arXiv:2602.15763, section 4.1.2; SAO, arXiv:2607.07508,
    section 3.1, low = 1 - eps_l, high = 1 + eps_h). The papers leave open if f(r) has a gradient; here it has none, so the gradient
    is the importance-weighted f(r) A grad log pi. low < 1 < high. Shapes and metrics as in `cispo_loss`; clip_low and clip_high
    count tokens left out.
    """
    ratio = _ratio(logprob, rollout_logprob, weight)
    below, above = ratio <= low, ratio >= high
    kept = torch.where(below | above, 0.0, ratio)
    return _weighed(logprob, rollout_logprob, advantage, weight, ratio, kept, below, above)


def _ratio(logprob: Tensor, old_logprob: Tensor, weight: Tensor) -> Tensor:
    log_ratio = torch.where(weight != 0, logprob.detach() - old_logprob, 0.0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # 1 at tokens with weight 0


def _weighed(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    weight: Tensor,
    ratio: Tensor,
    factor: Tensor,
    low: Tensor,
    high: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute (minus the sum of weight * factor * A log pi, metrics). low, high: [T] bool, tokens whose ratio is out of bounds."""
    valid = weight != 0
    scale = weight * factor * torch.where(valid, advantage, 0.0)
    # where, not only the weight 0: 0 * NaN is NaN, in the gradient too.
    loss = -(scale * torch.where(valid, logprob, 0.0)).sum(dtype=torch.float64).to(logprob.dtype)
    counted = torch.where(valid, ratio, 0.0).double()
    metrics = {
        "tokens_sum": valid.sum(dtype=torch.float64),
        "clip_low_sum": low.sum(dtype=torch.float64),
        "clip_high_sum": high.sum(dtype=torch.float64),
        "dual_clip_sum": counted.new_zeros(()),
        "approx_kl_sum": token_kl_sum(logprob, old_logprob, weight),
        "ratio_sum": counted.sum(),
        "ratio_max": torch.cat((counted, counted.new_zeros(1))).amax(),
    }
    return loss, metrics
