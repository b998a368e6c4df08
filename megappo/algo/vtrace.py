"""V-trace: returns and advantages of one policy from responses of another (Espeholt et al. 2018, arXiv:1802.01561, section 4.1).

With w = pi(a_t) / mu(a_t), rho_t = min(rho_bar, w_t), c_t = lambda min(c_bar, w_t) and delta_t the TD error:

    v_t = V_t + rho_t delta_t + gamma c_t (v_next - V_next)
    A_t = rho_t (r_t + gamma (lambda v_next + (1 - lambda) V_next) - V_t)

next is the next sampled token, as in `gae.py`. With w = 1 and rho_bar, c_bar >= 1 this is GAE under every lambda: the paper's A_t,
which has v_next alone, is the one of lambda = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.algo.gae import Links, decayed_sums, td_errors


def vtrace(
    reward: Tensor,
    value: Tensor,
    ratio: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    bootstrap: Tensor | None,
    *,
    rho_bar: float,
    c_bar: float,
    gamma: float,
    lam_policy: float | Tensor,
    lam_value: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """(advantage [T], returns [T]), fp32 and 0 outside the mask.

    ratio: [T], w of each sampled token. lam_*: number, or [B] of each sequence, of the advantages and of the returns v_t. The other
    tensors as in `ops.advantages.gae`. Accumulates in fp64.
    """
    links = Links.of(response_mask, cu_seqlens)
    lams = torch.stack([_of_sequences(lam, cu_seqlens)[links.sequence] for lam in (lam_policy, lam_value)])
    ratio = torch.where(response_mask, ratio.double(), 0.0)
    rho = ratio.clamp(max=rho_bar)
    delta = td_errors(reward.double(), value, response_mask, links, bootstrap, gamma)
    corrections = decayed_sums(rho * delta, gamma * lams * ratio.clamp(max=c_bar), links.following)  # v_t - V_t
    next_correction = torch.nn.functional.pad(corrections[0], (0, 1))[links.following]
    advantage = torch.where(response_mask, rho * (delta + gamma * lams[0] * next_correction), 0.0)
    returns = torch.where(response_mask, value.double() + corrections[1], 0.0)
    return advantage.float(), returns.float()


def _of_sequences(lam: float | Tensor, cu_seqlens: Tensor) -> Tensor:
    """[B] fp64."""
    return torch.as_tensor(lam, dtype=torch.float64, device=cu_seqlens.device).expand(cu_seqlens.numel() - 1)
