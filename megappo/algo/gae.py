"""Rewards shaped by the KL, and generalised advantage estimation over packed sequences (Schulman et al. 2016).

GAE over the sampled tokens is the affine recurrence A_t = delta_t + gamma lambda A_next(t), where next(t) is the next *sampled*
token of the sequence, so a token that the policy did not sample (prompt, tool output, padding) is the identity: no TD error, no
decay. Solved by pointer jumping: after k passes every token holds the sum over its next 2^k sampled tokens. That is log2(T) passes
over [T], with no loop over tokens, no padding and no host sync. All accumulate in fp64 and round once: an fp32 scan loses 1.5e-5
over 8192 tokens at gamma = lambda = 1. `ops/advantages.py` states shapes and errors and has the kernels.

Tokens may differ (`StepWeights`): only some of the sampled ones are time steps (turns as steps), and steps have weights and traces
(V-trace). Then a sampled token that is no step adds its reward to the step before it, without decay.

V-trace: returns and advantages of one policy from responses of another (Espeholt et al. 2018, arXiv:1802.01561, section 4.1).

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

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megappo.algo.kl import kl_estimate
from megappo.algo.whitening import whitening_moments


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """GAE lambda of each sequence: lambda_b = 1 - 1 / (alpha * length_b), [B] fp64; lengths [B] counts sampled tokens.

    Keeps the sum of the TD-error weights, about 1/(1 - lambda), proportional to the length (VAPO, Yue et al. 2025, eq. 7).
    Responses of at most 1/alpha tokens get 0.
    """
    if not alpha > 0:
        raise ValueError(f"lam_length_alpha must be positive, not {alpha}")
    return (1.0 - 1.0 / (alpha * lengths.double().clamp(min=1.0))).clamp(min=0.0)


def token_advantages(
    logprob: Tensor,
    ref_logprob: Tensor | None,
    score: Tensor,
    value: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    bootstrap: Tensor | None,
    gamma: float,
    lam_policy: float,
    lam_value: float,
    lam_policy_each: Tensor | None,
    lam_value_each: Tensor | None,
    kl_estimator: str,
    kl_coef: float,
    token_reward: Tensor | None,
    steps: Tensor | None,
    weight: Tensor | None,
    trace: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(reward [T], advantage [T], returns [T], moments [3]): the reference of `ops.advantages.token_advantages`.

    A lambda is one number, or one per sequence if lam_*_each [B] is given.
    """
    links = Links.of(response_mask, cu_seqlens)
    reward = token_rewards(logprob, ref_logprob, score, response_mask, cu_seqlens, kl_estimator, kl_coef)
    if token_reward is not None:
        reward = reward + torch.where(response_mask, token_reward.double(), 0.0)
    lams = _per_token_lambdas(links.sequence, lam_policy, lam_value, lam_policy_each, lam_value_each)
    weights = None if steps is None and weight is None and trace is None else StepWeights.of(response_mask, steps, weight, trace)
    scanned = _scan(reward, value, response_mask, links, bootstrap, lams, gamma, weights)
    reward, advantage, returns, moments = _nan_unless_sound(cu_seqlens, reward.float(), *scanned)
    return reward, advantage, returns, moments


def token_rewards(
    logprob: Tensor,
    ref_logprob: Tensor | None,
    score: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    kl_estimator: str,
    kl_coef: float,
) -> Tensor:
    """Reward of each token, [T] fp64: -kl_coef * KL, and the score [B] at the last sampled token; 0 outside the mask."""
    sequence, _, after_last = Links.of(response_mask, cu_seqlens)
    reward = torch.zeros(logprob.shape, dtype=torch.float64, device=logprob.device)
    if ref_logprob is not None and kl_coef != 0.0:
        reward = reward - kl_coef * kl_estimate(logprob.double(), ref_logprob.double(), kl_estimator)
    # an empty batch has no sequence to index
    at_end = score.double()[sequence] if score.numel() else reward
    return torch.where(response_mask, reward + torch.where(response_mask & after_last, at_end, 0.0), 0.0)


def _per_token_lambdas(
    sequence: Tensor, lam_policy: float, lam_value: float, lam_policy_each: Tensor | None, lam_value_each: Tensor | None
) -> Tensor:
    """[2, T] fp64."""
    rows = [
        torch.full(sequence.shape, lam, dtype=torch.float64, device=sequence.device) if each is None else each.double()[sequence]
        for lam, each in ((lam_policy, lam_policy_each), (lam_value, lam_value_each))
    ]
    return torch.stack(rows)


def _first_after(flag: Tensor) -> Tensor:
    """[T] position of the first true entry of flag [T] after each position; T if there is none."""
    num_tokens = flag.numel()
    position = torch.arange(num_tokens + 1, device=flag.device)
    at = torch.where(torch.nn.functional.pad(flag, (0, 1)), position, num_tokens)
    return at.flip(0).cummin(0).values.flip(0)[1:]


class Links(NamedTuple):
    """Order of the sampled tokens of a packed batch, [T] each.

    sequence: that the token is in. following: position of the next sampled token of the sequence, T if there is none. after_last:
    true if there is none, so that the bootstrap follows.
    """

    sequence: Tensor
    following: Tensor
    after_last: Tensor

    @classmethod
    def of(cls, response_mask: Tensor, cu_seqlens: Tensor) -> Links:
        """Arguments as in `token_advantages`."""
        num_tokens = response_mask.numel()
        position = torch.arange(num_tokens, device=response_mask.device)
        # Search from the right: an empty sequence starts at the same token as the next one, and owns none.
        sequence = torch.searchsorted(cu_seqlens[1:].long(), position, right=True).clamp(max=max(cu_seqlens.numel() - 2, 0))
        following = _first_after(response_mask)
        after_last = following >= cu_seqlens.long()[sequence + 1]
        return cls(sequence, torch.where(after_last, num_tokens, following), after_last)


class StepWeights(NamedTuple):
    """Differences between sampled tokens, [T] each. steps: bool, true at time steps. weight, trace: fp64, 1 at other tokens."""

    steps: Tensor
    weight: Tensor
    trace: Tensor

    @classmethod
    def of(cls, response_mask: Tensor, steps: Tensor | None, weight: Tensor | None, trace: Tensor | None) -> StepWeights:
        """None: all sampled tokens are steps; 1."""
        at = response_mask if steps is None else response_mask & steps
        one = torch.ones(at.shape, dtype=torch.float64, device=at.device)
        return cls(at, *(one if x is None else torch.where(at, x.double(), one) for x in (weight, trace)))

    def decay(self, decay: Tensor, following: Tensor) -> Tensor:
        """[2, T] factor of what follows a token: that of the next sampled token, which is 1 if it is no step, else `decay` [2, T]
        times its weight and trace. following: of `Links`."""
        of_following = torch.where(self.steps, decay * (self.weight * self.trace), 1.0)
        return torch.nn.functional.pad(of_following, (0, 1))[:, following]


def _scan(
    reward: Tensor,
    value: Tensor,
    response_mask: Tensor,
    links: Links,
    bootstrap: Tensor | None,
    lams: Tensor,
    gamma: float,
    weights: StepWeights | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """lams: [2, T], of policy and critic; the others as in `token_advantages`. weights: None if tokens do not differ."""
    steps, decay = response_mask, gamma * lams
    if weights is not None:
        # A token that is no step has no value: it hands on what follows, and its reward.
        steps, decay, value = weights.steps, weights.decay(decay, links.following), torch.where(weights.steps, value.double(), 0.0)
    delta = td_errors(reward, value, response_mask, links, bootstrap, gamma)
    total = decayed_sums(delta, decay, links.following)
    if weights is not None:
        total = weights.weight * total
    advantage = torch.where(steps, total[0], 0.0).float()
    returns = torch.where(steps, total[1] + value.double(), 0.0).float()
    return advantage, returns, whitening_moments(advantage, steps)


def td_errors(reward: Tensor, value: Tensor, response_mask: Tensor, links: Links, bootstrap: Tensor | None, gamma: float) -> Tensor:
    """reward + gamma * value of the next sampled token - value, [T] fp64; 0 outside the mask. Arguments as in `_scan`."""
    value = torch.where(response_mask, value.double(), 0.0)
    reward = torch.where(response_mask, reward, 0.0)
    # Slot T means "no further sampled token": its value is 0.
    next_value = torch.cat((value, value.new_zeros(1)))[links.following]
    if bootstrap is not None and value.numel():
        next_value = torch.where(links.after_last, bootstrap.double()[links.sequence], next_value)
    return torch.where(response_mask, reward + gamma * next_value - value, 0.0)


def decayed_sums(terms: Tensor, decay: Tensor, following: Tensor) -> Tensor:
    """[2, T] fp64, total_t = term_t + decay_t total_following(t): two recurrences over the same terms [T].

    decay: [2, T], one row for each. following: [T], of `Links`.
    """
    num_tokens = following.numel()
    # Slot T means "no further sampled token": sum 0, factor 0, and it links to itself.
    total = torch.nn.functional.pad(terms.expand(2, -1), (0, 1))
    factor = torch.nn.functional.pad(torch.where(following < num_tokens, decay, 0.0), (0, 1))
    link = torch.cat((following, following.new_full((1,), num_tokens)))
    for _ in range(num_tokens.bit_length()):
        # torch.where, not only the factor 0: the sum of another sequence may be NaN, and 0 * NaN is NaN.
        total = total + torch.where(link < num_tokens, factor * total[:, link], 0.0)
        factor = factor * factor[:, link]
        link = link[link]
    return total[:, :num_tokens]


def _nan_unless_sound(cu_seqlens: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
    num_tokens = outputs[0].numel()
    if num_tokens == 0:
        return outputs
    sound = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == num_tokens) & (cu_seqlens[1:] >= cu_seqlens[:-1]).all()
    return tuple(torch.where(sound, x, torch.nan) for x in outputs)


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
