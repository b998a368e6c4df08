"""Log-prob and entropy from vocab-parallel logits: a statistic per token and shard, their merge, and the shard's backward.

    torch.ops.megappo.vocab_stats            logits[T, Vl]    -> stats[T, 4]: m, s, t, z_y
    torch.ops.megappo.vocab_stats_merge      gathered[R, T, 4] -> logprob[T], entropy[T], lse[T]
    torch.ops.megappo.vocab_logits_backward  ...              -> dlogits[T, Vl]
    torch.ops.megappo.vocab_logits_backward_ ...              the same, written over the logits
    torch.ops.megappo.vocab_logits_backward_into ...          the same, written to a tensor of the logits' or of a half type

With x = logits * inv_temp of one shard: m = max x, s = sum e^(x-m), t = sum e^(x-m) (x-m), z_y = x at the target (-inf where
another shard owns it). entropy = log s - t/s, which unlike log s + m - sum(e^x x)/s stays precise under a common offset of the
logits. Everything is fp32, or fp64 for fp64 logits (gradient checks). Kernels are in csrc/vocab_stats/ and triton/vocab_stats.py.

Rows without effect are ignored, even if NaN: the statistic of an ignored target is that of an empty shard, and a row whose upstream
gradients are 0 has gradient 0. The bits of a row depend neither on the rows around it nor on the number of threads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megappo.ops.dispatch import mutating_op, op, op_around

# e^-120 is 0 in fp32, so the bound changes no sum; it turns e^d * d of a -inf column into 0 * -120 instead of 0 * -inf
EXPONENT_FLOOR = -120.0


class Upstream(NamedTuple):
    """Numbers of each row that `vocab_logits_backward` reads: [T] merged statistics of all shards, and gradients of the loss."""

    lse: Tensor
    entropy: Tensor
    g_logprob: Tensor
    g_entropy: Tensor | None

    def at(self, tokens: slice) -> Upstream:
        lse, entropy, g_logprob, g_entropy = self
        return Upstream(lse[tokens], entropy[tokens], g_logprob[tokens], None if g_entropy is None else g_entropy[tokens])


class Softmax(NamedTuple):
    """Columns of a shard, their temperature, and the rows without a target."""

    vocab_start: int
    """Id, in the whole vocabulary, of the first column."""
    num_valid: int
    """Columns that are vocabulary entries, from the first; the rest is padding."""
    inv_temp: float
    """1/temperature of all rows, replaced by row_inv_temp [T] if given."""
    row_inv_temp: Tensor | None
    ignore_index: int
    """Target of a row without one."""

    def scaled(self, logits: Tensor) -> Tensor:
        """Scale logits to x [T, num_valid] in the compute type. May be a view of `logits`, so callers never write into it."""
        x = logits[:, : self.num_valid].to(compute_dtype(logits.dtype))
        if self.row_inv_temp is not None:
            return x * self.row_inv_temp.to(x.dtype)[:, None]
        return x if self.inv_temp == 1.0 else x * self.inv_temp

    def columns_of(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Find (owned [T] bool, column [T] int64) of targets, columns clamped so that a gather stays in bounds."""
        local = target - self.vocab_start
        owned = (local >= 0) & (local < self.num_valid) & (target != self.ignore_index)
        return owned, local.clamp(0, max(self.num_valid - 1, 0))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)  # fp32 for half types and fp32, fp64 for fp64


def check_arguments(logits: Tensor, target: Tensor, softmax: Softmax, **per_token: Tensor | None) -> None:
    """Raise ValueError for arguments with which the kernels would read out of bounds or misread a type."""
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} and target {tuple(target.shape)}: want [T, vocabulary] and [T]")
    if not logits.is_floating_point():
        raise ValueError(f"logits are {logits.dtype}: want fp32, bf16 or fp16")
    if target.dtype != torch.int64:
        raise ValueError(f"target is {target.dtype}: want int64, as target.long() gives")
    if not 0 <= softmax.num_valid <= logits.shape[1]:
        raise ValueError(f"num_valid {softmax.num_valid} is not within the {logits.shape[1]} columns of this shard")
    for name, x in {"target": target, "row_inv_temp": softmax.row_inv_temp, **per_token}.items():
        if x is not None and x.shape != target.shape:
            raise ValueError(f"{name} {tuple(x.shape)} is not one value for each of {target.numel()} tokens")
        if x is not None and x.device != logits.device:
            raise ValueError(f"{name} is on {x.device} and logits are on {logits.device}: move one of them")


def check_gathered(gathered: Tensor, target: Tensor) -> None:
    """Raise ValueError for statistics that are not [R, T, 4] for the T targets."""
    if gathered.dim() != 3 or gathered.shape[0] == 0 or gathered.shape[2] != 4 or target.shape != gathered.shape[1:2]:
        raise ValueError(f"gathered {tuple(gathered.shape)} and target {tuple(target.shape)}: want [R, T, 4] and [T]")


def check_overwritable(logits: Tensor) -> None:
    """Raise ValueError for a matrix whose elements share memory or whose columns are not adjacent."""
    num_tokens, num_columns = logits.shape
    if (num_columns > 1 and logits.stride(1) != 1) or (num_tokens > 1 and logits.stride(0) < num_columns):
        raise ValueError(f"logits with strides {logits.stride()} cannot be overwritten: pass logits.contiguous()")


def check_out(logits: Tensor, out: Tensor) -> None:
    """Raise ValueError for an `out` that `vocab_logits_backward_into` cannot write for these logits."""
    if out.shape != logits.shape or (out.dtype != logits.dtype and (logits.dtype != torch.float32 or out.dtype.itemsize != 2)):
        raise ValueError(f"out is {tuple(out.shape)} {out.dtype} and logits are {tuple(logits.shape)} {logits.dtype}")
    check_overwritable(out)


@op
def vocab_stats(logits: Tensor, target: Tensor, softmax: Softmax, want_entropy: bool) -> Tensor:
    """Compute the statistic [T, 4] (m, s, t, z_y) of one vocabulary shard.

    logits: [T, Vl]. target: [T] int64, ids of the whole vocabulary. want_entropy: False leaves t at 0. An empty or all -inf shard
    and an ignored target have m = z_y = -inf, s = t = 0.
    """
    check_arguments(logits, target, softmax)
    stats = torch.zeros(logits.shape[0], 4, dtype=compute_dtype(logits.dtype), device=logits.device)
    if softmax.num_valid == 0:
        stats[:, 0::3] = -torch.inf
        return stats
    x = softmax.scaled(logits)
    m = x.amax(1)
    # m = -inf if all columns are -inf: subtract 0 then, as -inf - -inf is NaN
    shift = x - m.masked_fill(m == -torch.inf, 0.0)[:, None]
    shift.clamp_(min=EXPONENT_FLOOR)
    e = shift.exp()
    stats[:, 0] = m
    # s of a shard whose columns are all -inf: every term is below the smallest fp32 number, but in fp64 it is 1e-52 and not 0
    stats[:, 1] = e.sum(1).masked_fill(m == -torch.inf, 0.0)
    if want_entropy:
        stats[:, 2] = e.mul_(shift).sum(1).masked_fill(m == -torch.inf, 0.0)
    owned, column = softmax.columns_of(target)
    stats[:, 3] = x.gather(1, column[:, None]).squeeze(1).masked_fill(~owned, -torch.inf)
    ignored = (target == softmax.ignore_index)[:, None]
    stats[:, 0::3].masked_fill_(ignored, -torch.inf)
    stats[:, 1:3].masked_fill_(ignored, 0.0)
    return stats


@vocab_stats.register_fake
def _(logits, *_):
    return logits.new_empty((logits.shape[0], 4), dtype=compute_dtype(logits.dtype))


@op
def vocab_stats_merge(gathered: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the shards' statistics [R, T, 4], in rank order, to (logprob, entropy, lse), each [T].
    The same bits give the same bits on every rank. Ignored targets have logprob = entropy = 0; a target that no shard owns has
    logprob -inf."""
    check_gathered(gathered, target)
    m_r, s_r, t_r, z_r = gathered.unbind(2)
    m = m_r.amax(0)
    shift = (m_r - m.masked_fill(m == -torch.inf, 0.0)).clamp(min=EXPONENT_FLOOR)
    weight = shift.exp()
    empty = s_r == 0  # m = -inf: its term would be 0 * -inf
    s = (weight * s_r).sum(0)
    t = (weight * (t_r + shift * s_r)).masked_fill(empty, 0.0).sum(0)
    log_s = s.log()
    ignored = target == ignore_index
    lse = m + log_s
    logprob = (z_r.amax(0) - lse).masked_fill(ignored, 0.0)
    entropy = (log_s - t / s).masked_fill(ignored, 0.0)
    return logprob, entropy, lse


@vocab_stats_merge.register_fake
def _(gathered, target, ignore_index):
    return tuple(gathered.new_empty(gathered.shape[1]) for _ in range(3))


def _vocab_logits_backward(logits: Tensor, target: Tensor, upstream: Upstream, softmax: Softmax) -> Tensor:
    """Gradient of this shard's logits, [T, Vl] in their dtype. Needs no collective.
    dlogits_v = inv_temp [ g_lp (1[v=y] - p_v) - g_H p_v (x_v - lse + H) ], p_v = e^(x_v - lse). Padding columns, ignored
    rows and rows without an upstream gradient are exactly 0."""
    lse, entropy, g_logprob, g_entropy = upstream
    check_arguments(logits, target, softmax, **upstream._asdict())
    num_valid, row_inv_temp = softmax.num_valid, softmax.row_inv_temp
    if num_valid == 0:
        return torch.zeros_like(logits, memory_format=torch.contiguous_format)
    log_p = softmax.scaled(logits) - lse[:, None]
    if g_entropy is not None:  # a -inf column: p * (log p + H) must be 0, not 0 * -inf
        log_p.clamp_(min=EXPONENT_FLOOR)
    scale = softmax.inv_temp if row_inv_temp is None else row_inv_temp.to(log_p.dtype)
    g = (g_logprob.to(log_p.dtype) * scale)[:, None]
    owned, column = softmax.columns_of(target)
    column = column[:, None]
    log_p_y = log_p.gather(1, column)
    at_target = -g * log_p_y.expm1()  # 1 - p: rounding p first loses 20 % at p = 0.99 in bf16

    p = log_p.exp()
    if g_entropy is None:
        grad = p.mul_(-g)
    else:
        g_h = (g_entropy.to(log_p.dtype) * scale)[:, None]
        h = entropy[:, None]
        at_target -= g_h * log_p_y.exp() * (log_p_y + h)
        grad = p.mul_(log_p.add_(h).mul_(g_h).add_(g)).neg_()
    # A column that another shard owns was clamped to one of ours, which keeps its value.
    grad.scatter_(1, column, torch.where(owned[:, None], at_target, grad.gather(1, column)))
    unused = g_logprob == 0 if g_entropy is None else (g_logprob == 0) & (g_entropy == 0)
    grad.masked_fill_((unused | (target == softmax.ignore_index))[:, None], 0.0)
    if num_valid == logits.shape[1]:
        return grad.to(logits.dtype)
    out = torch.zeros_like(logits, memory_format=torch.contiguous_format)
    out[:, :num_valid] = grad
    return out


vocab_logits_backward = op(_vocab_logits_backward)


@vocab_logits_backward.register_fake
def _(logits, *_):
    return logits.new_empty(logits.shape)


@mutating_op("logits")
def vocab_logits_backward_(logits: Tensor, target: Tensor, upstream: Upstream, softmax: Softmax) -> None:
    """Compute `vocab_logits_backward` in place over `logits`, which the caller owns and no longer needs; same bits.
    The columns must be adjacent (logits.stride(1) == 1) and the rows must not overlap, else ValueError."""
    check_overwritable(logits)
    logits.copy_(_vocab_logits_backward(logits, target, upstream, softmax))


@vocab_logits_backward_.register_fake
def _(*_):
    return None


@op_around("vocab_logits_backward", "out")
def vocab_logits_backward_into(logits: Tensor, target: Tensor, upstream: Upstream, softmax: Softmax, out: Tensor) -> None:
    """Compute `vocab_logits_backward` into `out` [T, Vl], rounded to its type: that of the logits or, where they are fp32, a half
    type, so that the gradient in fp32 never goes through memory. ValueError for an `out` of another shape, type or with columns
    that are not adjacent."""
    check_out(logits, out)
    out.copy_(torch.ops.megappo.vocab_logits_backward(logits, target, *upstream, *softmax))


@vocab_logits_backward_into.register_fake
def _(*_):
    return None
