"""KL-shaped rewards, generalised advantage estimation and whitening moments over packed sequences.

    torch.ops.megappo.token_advantages  log-probs, rewards, value -> reward, advantage, returns, moments

`algo/gae.py` is the reference; csrc/advantages and ops/triton/advantages.py are one reverse scan. All accumulate in fp64 and round
once. Not differentiable: advantages are data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megappo.algo import gae as reference
from megappo.algo.gae import Lambdas, Rewards, TimeSteps
from megappo.algo.kl import ESTIMATORS
from megappo.ops.dispatch import is_reference, op

KERNEL_ESTIMATORS = ("k1", "k2", "k3")
"""Estimators that kernels have, numbered from 1 in this order: Kl in csrc/advantages, KIND in ops/triton/advantages.py."""


class Discount(NamedTuple):
    """gamma and lambdas; a lambda is one number or [B]. Advantages use lam_policy, returns = value + advantages under lam_value."""

    gamma: float = 1.0
    lam_policy: float | Tensor = 0.95
    lam_value: float | Tensor = 0.95


def token_advantages(
    rewards: Rewards,
    value: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    bootstrap: Tensor | None = None,
    discount: Discount = Discount(),
    times: TimeSteps = TimeSteps(),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute (reward [T], advantage [T], returns [T], moments [3]) of a packed batch.

    value: [T] aligned to their own token. response_mask: [T] bool, true where the policy sampled. cu_seqlens: [B+1] int32 or int64,
    from 0 to T. bootstrap: [B] value after the last sampled token, None means 0.

    For GAE of given rewards: ref_logprob None, score 0, token_reward the rewards. Padded rows [B, S] laid end to end are sequences
    of S with masked padding; an episode that ends inside a sequence is a sequence of its own. In C++ a sequence has the same bits
    in any batch; where tiles meet (Triton, CUDA) the last bit of an fp64 sum may move, which rounds to another fp32 once in about
    10^8 tokens.

    Outputs are fp32 and exactly 0 where the mask is false, even if the inputs there are NaN. moments: fp64 count, sum and sum of
    squares of the advantages over the mask; add those of all ranks and batches for `whiten_apply`. A NaN stays in its sequence (and
    reaches the moments).

    Raises ValueError for an estimator that is unknown or that the selected kernel lacks (kernels=reference has all), for shapes,
    dtypes and devices, and on the CPU for cu_seqlens that falls or does not go from 0 to T. On a GPU that check would stop the
    stream: there such cu_seqlens makes every output NaN.
    """
    logprob, ref_logprob, score, token_reward, kl_estimator, kl_coef = rewards
    if kl_estimator not in ESTIMATORS:
        raise ValueError(f"kl_estimator {kl_estimator!r} is not one of {', '.join(ESTIMATORS)}")
    # A kernel picks its formula by number: without this check it would be asked for a number that it does not have.
    if kl_estimator not in KERNEL_ESTIMATORS and not is_reference("token_advantages", (value,)):
        raise ValueError(
            f"kl_estimator {kl_estimator!r} has no kernel (those have {', '.join(KERNEL_ESTIMATORS)}): use kernels=reference"
        )
    of_v_trace = {"weight": times.weight, "trace": times.trace}
    floats = {"logprob": logprob, "ref_logprob": ref_logprob, "token_reward": token_reward, **of_v_trace}
    bools = {"response_mask": response_mask, "steps": times.steps}
    _check(value, floats, bools, cu_seqlens, {"score": score, "bootstrap": bootstrap})
    policy, policy_each = _lambda("lam_policy", discount.lam_policy, cu_seqlens)
    critic, critic_each = _lambda("lam_value", discount.lam_value, cu_seqlens)
    return torch.ops.megappo.token_advantages(
        logprob,
        ref_logprob,
        score,
        value,
        response_mask,
        cu_seqlens,
        bootstrap,
        discount.gamma,
        policy,
        critic,
        policy_each,
        critic_each,
        kl_estimator,
        kl_coef,
        token_reward,
        times.steps,
        # fp64: a trace is a product of as many numbers as there are steps
        *(None if x is None else x.double() for x in (times.weight, times.trace)),
    )


def _check(
    value: Tensor,
    floats: Mapping[str, Tensor | None],
    bools: Mapping[str, Tensor | None],
    cu_seqlens: Tensor,
    per_sequence: Mapping[str, Tensor | None],
) -> None:
    floats = {"value": value, **floats}
    if value.dim() != 1:
        raise ValueError(f"value {tuple(value.shape)} must be [tokens]")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens {tuple(cu_seqlens.shape)} {cu_seqlens.dtype} must be [sequences + 1] of int32 or int64")
    num_tokens, num_sequences = value.shape[0], cu_seqlens.shape[0] - 1
    for names, size, unit in (({**floats, **bools}, num_tokens, "tokens"), (per_sequence, num_sequences, "sequences")):
        for name, tensor in names.items():
            if tensor is not None and tensor.shape != (size,):
                raise ValueError(f"{name} {tuple(tensor.shape)} is not one value for each of {size} {unit}")
    for name, tensor in {**floats, **per_sequence}.items():
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating-point, not {tensor.dtype}")
    for name, tensor in bools.items():
        if tensor is not None and tensor.dtype != torch.bool:
            raise ValueError(f"{name} must be bool, not {tensor.dtype}")
    for name, tensor in {**floats, **bools, **per_sequence, "cu_seqlens": cu_seqlens}.items():
        if tensor is not None and tensor.device != value.device:
            raise ValueError(f"{name} is on {tensor.device}, value on {value.device}: move it there")
    if num_tokens and not num_sequences:
        raise ValueError(f"cu_seqlens names no sequence for {num_tokens} tokens")
    # Reading values on a GPU would synchronise, and a traced graph cannot branch on them; the C++ kernel checks them itself.
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
    # One lambda is (number, None); lambdas per sequence are (nan, [B] fp64).
    if not isinstance(lam, Tensor):
        return float(lam), None
    num_sequences = cu_seqlens.shape[0] - 1
    if lam.shape not in ((), (num_sequences,)):
        raise ValueError(f"{name} {tuple(lam.shape)} is neither one number nor one lambda for each of {num_sequences} sequences")
    if lam.device != cu_seqlens.device:
        raise ValueError(f"{name} is on {lam.device}, cu_seqlens on {cu_seqlens.device}: move it there")
    return float("nan"), lam.double().expand(num_sequences)  # nan: a kernel that reads the number all the same is found out


# In the order of csrc/advantages/binding.cpp.
_SCHEMA = (
    *("logprob", "ref_logprob", "score", "value", "response_mask", "cu_seqlens", "bootstrap", *Lambdas._fields),
    *("kl_estimator", "kl_coef", "token_reward", *TimeSteps._fields),
)
_token_advantages = op(reference.token_advantages, file=__name__, order=_SCHEMA)


@_token_advantages.register_fake
def _(logprob, ref_logprob, score, value, *args):
    return *(value.new_empty(value.shape, dtype=torch.float32) for _ in range(3)), value.new_empty(3, dtype=torch.float64)
