"""Reference of KL-shaped rewards, generalised advantage estimation (GAE, Schulman et al. 2016) and V-trace on packed sequences.
`ops/advantages.py` states shapes and errors and has the kernels. All sums are in fp64 and rounded once: an fp32 scan loses
1.5e-5 over 8192 tokens at gamma = lambda = 1."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megappo.algo.kl import kl_estimate
from megappo.algo.whitening import whitening_moments


class Rewards(NamedTuple):
    """Parts of the rewards of a batch of T tokens in B sequences."""

    logprob: Tensor
    """[T] aligned to their own token (`algo/alignment.py`); not read without ref_logprob."""
    ref_logprob: Tensor | None
    """[T]; -kl_coef times the KL against it is the reward of a sampled token, None means no KL."""
    score: Tensor
    """[B], added to the reward of the last sampled token; ignored for a sequence without sampled tokens."""
    token_reward: Tensor | None = None
    """[T] added to the reward of sampled tokens, None means 0."""
    kl_estimator: str = "k1"
    """A name in `algo.kl.ESTIMATORS`; kernels have KERNEL_ESTIMATORS only."""
    kl_coef: float = 0.0


class Lambdas(NamedTuple):
    """gamma, and one lambda for all sequences, or one for each if lam_*_each [B] fp64 is given. Advantages use lam_policy, returns
    = value + advantages under lam_value."""

    gamma: float
    lam_policy: float
    lam_value: float
    lam_policy_each: Tensor | None
    lam_value_each: Tensor | None

    def per_token(self, sequence: Tensor) -> Tensor:
        """Lambdas of policy and critic at every token, [2, T] fp64. sequence: [T] number of the token's sequence."""
        rows = [
            torch.full(sequence.shape, lam, dtype=torch.float64, device=sequence.device)
            if each is None
            else each.double()[sequence]
            for lam, each in ((self.lam_policy, self.lam_policy_each), (self.lam_value, self.lam_value_each))
        ]
        return torch.stack(rows)


class TimeSteps(NamedTuple):
    """Differences between sampled tokens."""

    steps: Tensor | None = None
    """[T] bool, which sampled tokens are time steps, None means all. Any other sampled token adds its reward, undecayed, to the
    step before it and has no value, advantage or return: gamma, lambdas, lengths and moments count steps."""
    weight: Tensor | None = None
    trace: Tensor | None = None
    """weight, trace: [T] w and c of V-trace at steps, None means 1; A = w (reward - value + x) and x <- gamma value + gamma lambda
    c A, where x is what follows."""


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """GAE lambda of each sequence: lambda_b = 1 - 1 / (alpha * length_b), [B] fp64; lengths [B] counts sampled tokens.
    Keeps the sum of the TD-error weights, about 1/(1 - lambda), proportional to the length (VAPO, Yue et al. 2025, eq. 7).
    Responses of at most 1/alpha tokens get 0. Raises ValueError unless alpha is positive."""
    if not alpha > 0:
        raise ValueError(f"lam_length_alpha must be positive, not {alpha}")
    return (1.0 - 1.0 / (alpha * lengths.double().clamp(min=1.0))).clamp(min=0.0)


def token_advantages(
    rewards: Rewards,
    value: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    bootstrap: Tensor | None,
    lambdas: Lambdas,
    times: TimeSteps,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute (reward [T], advantage [T], returns [T], moments [3]): the reference of `ops.advantages.token_advantages`.

    GAE is A_t = delta_t + gamma lambda A_next(t), where next(t) is the next *sampled* token of the sequence. A token that was not
    sampled (prompt, tool output, padding) is skipped: it has no TD error and no decay.
    """
    links = Links.of(response_mask, cu_seqlens)
    reward = token_rewards(rewards, response_mask, links)
    weights = None if all(one is None for one in times) else StepWeights.of(response_mask, *times)
    scanned = _scan(reward, value, response_mask, links, bootstrap, lambdas.per_token(links.sequence), lambdas.gamma, weights)
    reward, advantage, returns, moments = _nan_unless_sound(cu_seqlens, reward.float(), *scanned)
    return reward, advantage, returns, moments


def token_rewards(rewards: Rewards, response_mask: Tensor, links: Links) -> Tensor:
    """Reward of each token, [T] fp64: -kl_coef * KL, plus the token's own, plus the score [B] at the last sampled token; 0 outside
    the mask."""
    logprob, ref_logprob, score, token_reward, kl_estimator, kl_coef = rewards
    reward = torch.zeros(logprob.shape, dtype=torch.float64, device=logprob.device)
    if ref_logprob is not None and kl_coef != 0.0:
        reward = reward - kl_coef * kl_estimate(logprob.double(), ref_logprob.double(), kl_estimator)
    # an empty batch has no sequence to index
    at_end = score.double()[links.sequence] if score.numel() else reward
    reward = torch.where(response_mask, reward + torch.where(response_mask & links.after_last, at_end, 0.0), 0.0)
    return reward if token_reward is None else reward + torch.where(response_mask, token_reward.double(), 0.0)


def _first_after(flag: Tensor) -> Tensor:
    """Position of the first true entry of flag [T] after each position, [T]; T if there is none."""
    num_tokens = flag.numel()
    position = torch.arange(num_tokens + 1, device=flag.device)
    at = torch.where(torch.nn.functional.pad(flag, (0, 1)), position, num_tokens)
    return at.flip(0).cummin(0).values.flip(0)[1:]


class Links(NamedTuple):
    """Order of the sampled tokens of a packed batch, [T] each."""

    sequence: Tensor
    """Number of the token's sequence."""
    following: Tensor
    """Position of the next sampled token of the sequence, T if there is none."""
    after_last: Tensor
    """True if no sampled token follows, so that the bootstrap does."""

    @classmethod
    def of(cls, response_mask: Tensor, cu_seqlens: Tensor) -> Links:
        num_tokens = response_mask.numel()
        position = torch.arange(num_tokens, device=response_mask.device)
        # Search from the right: an empty sequence starts at the same token as the next one, and owns none.
        sequence = torch.searchsorted(cu_seqlens[1:].long(), position, right=True).clamp(max=max(cu_seqlens.numel() - 2, 0))
        following = _first_after(response_mask)
        after_last = following >= cu_seqlens.long()[sequence + 1]
        return cls(sequence, torch.where(after_last, num_tokens, following), after_last)


class StepWeights(NamedTuple):
    """Differences between sampled tokens, [T] each: turns as steps, and the weights and traces of V-trace.
    A sampled token that is no step adds its reward to the step before it, without decay."""

    steps: Tensor
    """bool, true at time steps."""
    weight: Tensor
    trace: Tensor
    """weight, trace: fp64, 1 at tokens that are no step."""

    @classmethod
    def of(cls, response_mask: Tensor, steps: Tensor | None, weight: Tensor | None, trace: Tensor | None) -> StepWeights:
        """Fill in what is None: every sampled token is a step, weights and traces are 1."""
        at = response_mask if steps is None else response_mask & steps
        one = torch.ones(at.shape, dtype=torch.float64, device=at.device)
        return cls(at, *(one if x is None else torch.where(at, x.double(), one) for x in (weight, trace)))

    def decay(self, decay: Tensor, following: Tensor) -> Tensor:
        """Factor [2, T] on what follows a token: `decay` [2, T] times weight and trace of the next sampled token, 1 at no step."""
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
    """Scan the batch. lams: [2, T], of policy and critic. weights None: all tokens are alike."""
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
    """TD errors [T] in fp64: reward + gamma * value of the next sampled token - value; 0 outside the mask."""
    value = torch.where(response_mask, value.double(), 0.0)
    reward = torch.where(response_mask, reward, 0.0)
    # Slot T means "no further sampled token": its value is 0.
    next_value = torch.cat((value, value.new_zeros(1)))[links.following]
    if bootstrap is not None and value.numel():
        next_value = torch.where(links.after_last, bootstrap.double()[links.sequence], next_value)
    return torch.where(response_mask, reward + gamma * next_value - value, 0.0)


def decayed_sums(terms: Tensor, decay: Tensor, following: Tensor) -> Tensor:
    """Solve total_t = term_t + decay_t total_following(t), [2, T] fp64, for each row of decay [2, T]. terms: [T]; following: of
    `Links`."""
    num_tokens = following.numel()
    # Slot T means "no further sampled token": sum 0, factor 0, and it links to itself.
    total = torch.nn.functional.pad(terms.expand(2, -1), (0, 1))
    factor = torch.nn.functional.pad(torch.where(following < num_tokens, decay, 0.0), (0, 1))
    link = torch.cat((following, following.new_full((1,), num_tokens)))
    # Pointer jumping: after k passes every token holds the sum over its next 2^k sampled tokens. log2(T) passes over [T], without a
    # loop over tokens, padding or a host sync.
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
    """V-trace (weight, trace) for `token_advantages`, [T] fp64 each. Its returns are then v_t and its advantages v_t - V_t.

    V-trace corrects for responses of another policy mu (Espeholt et al. 2018, arXiv:1802.01561, section 4.1). With w = pi(a_t) /
    mu(a_t), rho_t = min(rho_bar, w_t), c_t = lambda min(c_bar, w_t), delta_t the TD error and next the next sampled token:

        v_t = V_t + rho_t delta_t + gamma c_t (v_next - V_next)
        A_t = rho_t (r_t + gamma (lambda v_next + (1 - lambda) V_next) - V_t)

    With w = 1 and rho_bar, c_bar >= 1 this is GAE under every lambda; the paper's A_t, which has v_next alone, is that of lambda =
    1. ratio: [T], w of each sampled token.
    """
    following = Links.of(response_mask, cu_seqlens).following
    ratio = torch.where(response_mask, ratio.double(), 1.0)
    weight = ratio.clamp(max=rho_bar)
    # What follows a token reaches it as gamma V_next + gamma lambda k_t (v_next - V_next): k_t is the trace of the *next* token.
    # k of a ratio of 0 has no effect, as rho_t is 0 there.
    k = torch.where(weight > 0, ratio.clamp(max=c_bar) / weight, 1.0)
    # One entry more, for tokens that hand nothing on.
    trace = weight.new_ones(len(weight) + 1)
    trace.scatter_(0, torch.where(response_mask, following, len(weight)), k)
    return weight, trace[:-1]


def vtrace_advantages(
    correction: Tensor, weight: Tensor, trace: Tensor, response_mask: Tensor, cu_seqlens: Tensor, gamma: float, lam: float | Tensor
) -> Tensor:
    """Compute A_t of `vtrace_weights`, [T] fp32, 0 outside the mask: correction + rho_t (1 - k_t) gamma lambda correction_next.
    correction: [T], v_t - V_t under `lam`, a number or [B]; under equal bounds k is 1 and A_t is the correction. weight, trace:
    of `vtrace_weights`."""
    links = Links.of(response_mask, cu_seqlens)
    # A number is filled in, as a copy of it to a device would be waited for.
    each = lam.double() if isinstance(lam, Tensor) else links.sequence.new_full((), lam, dtype=torch.float64)
    of_sequences = each.expand(cu_seqlens.numel() - 1)
    k, following = pad(trace, (0, 1), value=1.0)[links.following], pad(correction.double(), (0, 1))[links.following]
    advantage = correction + weight * (1.0 - k) * gamma * of_sequences[links.sequence] * following
    return torch.where(response_mask, advantage, 0.0).float()
