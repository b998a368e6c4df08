"""KL-shaped rewards, generalised advantage estimation and whitening moments over packed sequences.

    torch.ops.megappo.gae               reward, value      -> advantage, returns, moments
    torch.ops.megappo.token_advantages  log-probs, score, value -> reward, advantage, returns, moments

GAE (Schulman et al. 2016) over the sampled tokens is the affine recurrence A_t = delta_t + gamma lambda A_next(t), where next(t)
is the next *sampled* token of the sequence, so a token that the policy did not sample (prompt, tool output, padding) is the
identity: no TD error, no decay. csrc/advantages and ops/triton/advantages.py solve it in one reverse scan; the reference here by
pointer jumping: after k passes every token holds the sum over its next 2^k sampled tokens. That is log2(T) passes over [T], with
no loop over tokens, no padding and no host sync. All accumulate in fp64 and round once: an fp32 scan loses 1.5e-5 over 8192
tokens at gamma = lambda = 1. Not differentiable: advantages are data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.ops.dispatch import op

KL_KINDS = ("k1", "k2", "k3")
# exp(20) = 4.9e8: beyond this log-ratio k3 is capped, so that one token cannot turn the batch into inf
MAX_LOG_RATIO = 20.0


def token_advantages(
    logprob: Tensor,
    ref_logprob: Tensor | None,
    score: Tensor,
    value: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    bootstrap: Tensor | None = None,
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
    bool, true where the policy sampled. cu_seqlens: [B+1] int32 or int64, from 0 to T. bootstrap: [B] value after the last
    sampled token, None means 0. lam_*: number or [B]; the policy's advantages use lam_policy, returns = value + advantages under
    lam_value. kl_kind: k1, k2 or k3.

    Outputs are fp32 and exactly 0 where the mask is false, whatever stands there. moments: fp64 count, sum and sum of squares of
    the advantages over the mask; those of several ranks or batches add, `whiten_apply` uses the total. A NaN stays in its
    sequence (and reaches the moments).

    Raises ValueError for shapes, dtypes and devices, and on the CPU for cu_seqlens that does not go from 0 to T or falls. On a
    GPU that would stop the stream: there such cu_seqlens makes every output NaN.
    """
    if kl_kind not in KL_KINDS:
        raise ValueError(f"kl_kind {kl_kind!r} is not one of {', '.join(KL_KINDS)}")
    floats = {"logprob": logprob, "ref_logprob": ref_logprob, "value": value}
    _check(floats, {"response_mask": response_mask}, cu_seqlens, {"score": score, "bootstrap": bootstrap})
    policy, policy_each = _lambda("lam_policy", lam_policy, cu_seqlens)
    critic, critic_each = _lambda("lam_value", lam_value, cu_seqlens)
    return torch.ops.megappo.token_advantages(
        logprob,
        ref_logprob,
        score,
        value,
        response_mask,
        cu_seqlens,
        bootstrap,
        gamma,
        policy,
        critic,
        policy_each,
        critic_each,
        kl_kind,
        kl_coef,
    )


def gae(
    reward: Tensor,
    value: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor | None = None,
    bootstrap: Tensor | None = None,
    *,
    done: Tensor | None = None,
    gamma: float = 1.0,
    lam_policy: float | Tensor = 0.95,
    lam_value: float | Tensor = 0.95,
) -> tuple[Tensor, Tensor, Tensor]:
    """(advantage, returns, moments [3]) from a reward per token; everything else as `token_advantages`.

    Packed: reward, value, response_mask and done are [T], with cu_seqlens. Padded: they are [B, S] and cu_seqlens is None;
    padding is masked, on either side or between. advantage and returns have the shape of reward. Packing changes none of
    their bits in C++; where tiles meet (Triton, CUDA) it moves the last bit of an fp64 sum, which rounds to another fp32
    once in about 10^8 tokens.
    done: bool, an episode ends with this token, sampled or not (an environment may end it in its own turn; padding is False): no
    value, advantage or bootstrap passes from behind it to it or to tokens before it. None: an episode is a sequence.
    """
    if cu_seqlens is None:
        return _padded(reward, value, response_mask, bootstrap, done, gamma, lam_policy, lam_value)
    floats, bools = {"reward": reward, "value": value}, {"response_mask": response_mask, "done": done}
    _check(floats, bools, cu_seqlens, {"bootstrap": bootstrap})
    policy, policy_each = _lambda("lam_policy", lam_policy, cu_seqlens)
    critic, critic_each = _lambda("lam_value", lam_value, cu_seqlens)
    return torch.ops.megappo.gae(
        reward, value, response_mask, cu_seqlens, bootstrap, done, gamma, policy, critic, policy_each, critic_each
    )


def _padded(
    reward: Tensor,
    value: Tensor,
    response_mask: Tensor,
    bootstrap: Tensor | None,
    done: Tensor | None,
    gamma: float,
    lam_policy: float | Tensor,
    lam_value: float | Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows laid end to end are a packed batch."""
    if value.dim() != 2:
        raise ValueError(f"value {tuple(value.shape)} without cu_seqlens must be [batch, time]; packed [tokens] needs cu_seqlens")
    for name, tensor in (("reward", reward), ("response_mask", response_mask), ("done", done)):
        if tensor is not None and tensor.shape != value.shape:
            raise ValueError(f"{name} {tuple(tensor.shape)} has not the shape of value {tuple(value.shape)}")
    rows, length = value.shape
    cu_seqlens = torch.arange(rows + 1, device=value.device) * length
    advantage, returns, moments = gae(
        reward.reshape(-1),
        value.reshape(-1),
        response_mask.reshape(-1),
        cu_seqlens,
        bootstrap,
        done=None if done is None else done.reshape(-1),
        gamma=gamma,
        lam_policy=lam_policy,
        lam_value=lam_value,
    )
    return advantage.view(rows, length), returns.view(rows, length), moments


def _check(
    floats: dict[str, Tensor | None],
    bools: dict[str, Tensor | None],
    cu_seqlens: Tensor,
    per_sequence: dict[str, Tensor | None],
) -> None:
    value = floats["value"]
    if value.dim() != 1:
        raise ValueError(f"value {tuple(value.shape)} must be [tokens]")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens {tuple(cu_seqlens.shape)} {cu_seqlens.dtype} must be [sequences + 1] of int32 or int64")
    num_tokens, num_sequences = value.shape[0], cu_seqlens.shape[0] - 1
    for names, size, unit in ((floats | bools, num_tokens, "tokens"), (per_sequence, num_sequences, "sequences")):
        for name, tensor in names.items():
            if tensor is not None and tensor.shape != (size,):
                raise ValueError(f"{name} {tuple(tensor.shape)} is not one value for each of {size} {unit}")
    for name, tensor in (floats | per_sequence).items():
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating-point, not {tensor.dtype}")
    for name, tensor in bools.items():
        if tensor is not None and tensor.dtype != torch.bool:
            raise ValueError(f"{name} must be bool, not {tensor.dtype}")
    for name, tensor in (floats | bools | per_sequence | {"cu_seqlens": cu_seqlens}).items():
        if tensor is not None and tensor.device != value.device:
            raise ValueError(f"{name} is on {tensor.device}, value on {value.device}: move it there")
    if num_tokens and not num_sequences:
        raise ValueError(f"cu_seqlens names no sequence for {num_tokens} tokens")
    # Reading what stands on a GPU would wait for it, and a traced graph cannot depend on it; the C++ kernel looks again itself.
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_borders(cu_seqlens, num_tokens)


def _check_borders(cu_seqlens: Tensor, num_tokens: int) -> None:
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0 or last != num_tokens:
        raise ValueError(f"cu_seqlens goes from {first} to {last}, but must go from 0 to the {num_tokens} tokens")
    falls = cu_seqlens[1:] < cu_seqlens[:-1]
    if bool(falls.any()):
        at = int(falls.int().argmax())
        raise ValueError(f"cu_seqlens falls from {int(cu_seqlens[at])} to {int(cu_seqlens[at + 1])} after entry {at}")


def _lambda(name: str, lam: float | Tensor, cu_seqlens: Tensor) -> tuple[float, Tensor | None]:
    """(the number, None) or (nan, [B] fp64)."""
    if not isinstance(lam, Tensor):
        return float(lam), None
    num_sequences = cu_seqlens.shape[0] - 1
    if lam.shape not in ((), (num_sequences,)):
        raise ValueError(f"{name} {tuple(lam.shape)} is neither one number nor one lambda for each of {num_sequences} sequences")
    if lam.device != cu_seqlens.device:
        raise ValueError(f"{name} is on {lam.device}, cu_seqlens on {cu_seqlens.device}: move it there")
    return float("nan"), lam.double().expand(num_sequences)


@op
def _token_advantages(
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
    kl_kind: str,
    kl_coef: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sequence, following, after_last = _links(response_mask, cu_seqlens, None)
    last = response_mask & after_last
    reward = torch.zeros(logprob.shape, dtype=torch.float64, device=logprob.device)
    if ref_logprob is not None and kl_coef != 0.0:
        reward = reward - kl_coef * _kl(logprob.double() - ref_logprob.double(), kl_kind)
    # an empty batch has no sequence to index
    at_end = score.double()[sequence] if score.numel() else reward
    reward = torch.where(response_mask, reward + torch.where(last, at_end, 0.0), 0.0)
    lams = _per_token_lambdas(sequence, lam_policy, lam_value, lam_policy_each, lam_value_each)
    scanned = _scan(reward, value, response_mask, sequence, following, after_last, bootstrap, gamma * lams, gamma)
    return _nan_unless_sound(cu_seqlens, reward.float(), *scanned)


@_token_advantages.register_fake
def _(logprob, ref_logprob, score, value, *args):
    return *(value.new_empty(value.shape, dtype=torch.float32) for _ in range(3)), value.new_empty(3, dtype=torch.float64)


@op
def _gae(
    reward: Tensor,
    value: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    bootstrap: Tensor | None,
    done: Tensor | None,
    gamma: float,
    lam_policy: float,
    lam_value: float,
    lam_policy_each: Tensor | None,
    lam_value_each: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    sequence, following, after_last = _links(response_mask, cu_seqlens, done)
    lams = _per_token_lambdas(sequence, lam_policy, lam_value, lam_policy_each, lam_value_each)
    scanned = _scan(reward.double(), value, response_mask, sequence, following, after_last, bootstrap, gamma * lams, gamma)
    return _nan_unless_sound(cu_seqlens, *scanned)


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


def _per_token_lambdas(
    sequence: Tensor, lam_policy: float, lam_value: float, lam_policy_each: Tensor | None, lam_value_each: Tensor | None
) -> Tensor:
    """[2, T] fp64."""
    rows = [
        torch.full(sequence.shape, lam, dtype=torch.float64, device=sequence.device) if each is None else each.double()[sequence]
        for lam, each in ((lam_policy, lam_policy_each), (lam_value, lam_value_each))
    ]
    return torch.stack(rows)


def _first_at_or_after(flag: Tensor) -> Tensor:
    """[T + 1] position of the first true entry of flag [T] from each position on; T where there is none."""
    num_tokens = flag.numel()
    position = torch.arange(num_tokens + 1, device=flag.device)
    at = torch.where(torch.nn.functional.pad(flag, (0, 1)), position, num_tokens)
    return at.flip(0).cummin(0).values.flip(0)


def _links(response_mask: Tensor, cu_seqlens: Tensor, done: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(sequence [T], following [T], after_last [T]) of each token.

    following: position of the next sampled token of its episode, T where there is none. after_last: whether that is because its
    sequence has none, so that what comes is the bootstrap.
    """
    num_tokens = response_mask.numel()
    position = torch.arange(num_tokens, device=response_mask.device)
    # right: an empty sequence starts where the next one does, and owns nothing
    sequence = torch.searchsorted(cu_seqlens[1:].long(), position, right=True).clamp(max=max(cu_seqlens.numel() - 2, 0))
    following = _first_at_or_after(response_mask)[1:]
    end = cu_seqlens.long()[sequence + 1]
    after_last = following >= end
    ends_episode = after_last
    if done is not None:
        done_at = _first_at_or_after(done)[:-1]
        after_last = after_last & (done_at >= end)
        ends_episode = ends_episode | (done_at < following)
    return sequence, torch.where(ends_episode, num_tokens, following), after_last


def _scan(
    reward: Tensor,
    value: Tensor,
    response_mask: Tensor,
    sequence: Tensor,
    following: Tensor,
    after_last: Tensor,
    bootstrap: Tensor | None,
    decay: Tensor,
    gamma: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """decay: [2, T] gamma * lambda; the others as in `gae` and `_links`."""
    num_tokens = value.numel()
    value = torch.where(response_mask, value.double(), 0.0)
    reward = torch.where(response_mask, reward, 0.0)
    # slot T stands for "no further sampled token": value 0, advantage 0, factor 0, and it links to itself
    next_value = torch.cat((value, value.new_zeros(1)))[following]
    if bootstrap is not None and num_tokens:
        next_value = torch.where(after_last, bootstrap.double()[sequence], next_value)
    delta = torch.where(response_mask, reward + gamma * next_value - value, 0.0)

    total = torch.nn.functional.pad(delta.expand(2, -1), (0, 1))
    factor = torch.nn.functional.pad(torch.where(following < num_tokens, decay, 0.0), (0, 1))
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


def _nan_unless_sound(cu_seqlens: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
    num_tokens = outputs[0].numel()
    if num_tokens == 0:
        return outputs
    sound = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == num_tokens) & (cu_seqlens[1:] >= cu_seqlens[:-1]).all()
    return tuple(torch.where(sound, x, torch.nan) for x in outputs)
