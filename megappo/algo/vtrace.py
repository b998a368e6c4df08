"""V-trace: returns and advantages of one policy from responses of another (Espeholt et al. 2018, arXiv:1802.01561, section 4.1).

With w = pi(a_t) / mu(a_t), rho_t = min(rho_bar, w_t), c_t = lambda min(c_bar, w_t) and delta_t the TD error:

    v_t = V_t + rho_t delta_t + gamma c_t (v_next - V_next)
    A_t = rho_t (r_t + gamma (lambda v_next + (1 - lambda) V_next) - V_t)

next is the next sampled token, as in `gae.py`. With w = 1 and rho_bar, c_bar >= 1 this is GAE under every lambda: the paper's A_t,
which has v_next alone, is the one of lambda = 1.

v_t - V_t is the scan of `ops.advantages.token_advantages` with a weight rho_t and a trace: what follows a token reaches it as
gamma V_next + gamma lambda k_t (v_next - V_next), k_t = min(c_bar, w_t) / rho_t, which makes k_t the trace of the *next* token.
Under equal bounds k is 1 and A_t the same number.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from megappo.algo.gae import Links


def vtrace_weights(
    ratio: Tensor, response_mask: Tensor, cu_seqlens: Tensor, *, rho_bar: float, c_bar: float
) -> tuple[Tensor, Tensor]:
    """(weight, trace), [T] fp64 each, of `token_advantages` whose returns are v_t, and whose advantages are v_t - V_t.

    ratio: [T], w of each sampled token.
    """
    following = Links.of(response_mask, cu_seqlens).following
    ratio = torch.where(response_mask, ratio.double(), 1.0)
    weight = ratio.clamp(max=rho_bar)
    # A ratio of 0 is below both bounds: k is 1, of what is then multiplied by 0.
    k = torch.where(weight > 0, ratio.clamp(max=c_bar) / weight, 1.0)
    trace = torch.ones_like(weight)
    inner = response_mask & (following < following.numel())
    trace[following[inner]] = k[inner]
    return weight, trace


def vtrace_advantages(
    correction: Tensor,
    weight: Tensor,
    trace: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float | Tensor,
) -> Tensor:
    """A_t, [T] fp32 and 0 outside the mask: correction + rho_t (1 - k_t) gamma lambda correction_next, which is `correction` under
    equal bounds. correction: [T], v_t - V_t under `lam`, a number or [B]. weight, trace: of `vtrace_weights`."""
    links = Links.of(response_mask, cu_seqlens)
    of_sequences = torch.as_tensor(lam, dtype=torch.float64, device=cu_seqlens.device).expand(cu_seqlens.numel() - 1)
    k, following = pad(trace, (0, 1), value=1.0)[links.following], pad(correction.double(), (0, 1))[links.following]
    advantage = correction + weight * (1.0 - k) * gamma * of_sequences[links.sequence] * following
    return torch.where(response_mask, advantage, 0.0).float()
