"""Operations that torch has for CUDA only, or whose CPU kernel refuses what the CUDA one takes, written out with fp32 inside."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """y = x rstd weight over the last dimensions `shape`."""
    normed = x.float() * rstd
    scaled = grad.float() * (weight.float() if weight is not None else 1.0)
    dims = list(range(x.dim() - len(shape), x.dim()))
    dx = rstd * (scaled - normed * (scaled * normed).sum(dims, keepdim=True) / math.prod(shape))
    others = list(range(x.dim() - len(shape)))
    product = grad.float() * normed
    dw = (product.sum(others) if others else product).to(weight.dtype) if weight is not None and mask[1] else None
    return dx.to(x.dtype) if mask[0] else None, dw


class PackedSequence:
    """One packed sequence of a varlen attention: rows of queries and keys, operands [heads, T, D] in fp32, KV heads repeated."""

    def __init__(self, q, k, v, rows: slice, cols: slice, causal: bool, scale: float, window: tuple[int, int]) -> None:
        self.rows, self.cols, self.scale = rows, cols, scale
        self.q, keys, values = (x[part].float().transpose(0, 1) for x, part in ((q, rows), (k, cols), (v, cols)))
        self.groups = self.q.shape[0] // keys.shape[0]
        self.k, self.v = keys.repeat_interleave(self.groups, 0), values.repeat_interleave(self.groups, 0)
        left, right = window
        i = torch.arange(self.q.shape[1])[:, None] + self.k.shape[1] - self.q.shape[1]
        j = torch.arange(self.k.shape[1])[None]
        hidden = torch.zeros(i.shape[0], j.shape[1], dtype=torch.bool)
        if causal or right >= 0:
            hidden |= j > i + (0 if causal else right)
        if left >= 0:
            hidden |= j < i - left
        self.scores = (self.q @ self.k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)

    def folded(self, x: Tensor) -> Tensor:
        """[heads, T, D] -> [T, KV heads, D], summed over the query heads that share one."""
        return x.reshape(x.shape[0] // self.groups, self.groups, *x.shape[1:]).sum(1).transpose(0, 1)


def _sequences(q, k, v, cu_q, cu_k, causal, scale, left, right) -> Iterator[PackedSequence]:
    starts, key_starts = cu_q.tolist(), (cu_q if cu_k is None else cu_k).tolist()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    window = (-1 if left is None else left, -1 if right is None else right)
    for i in range(len(starts) - 1):
        rows, cols = slice(starts[i], starts[i + 1]), slice(key_starts[i], key_starts[i + 1])
        yield PackedSequence(q, k, v, rows, cols, causal, scale, window)


def packed_attention(
    q,
    k,
    v,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
):
    """q: [T, heads, D]. Returns (out, log of the sum of exponents [heads, T], states of a dropout that is not there)."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if cu_q is None or dropout_p or any(x is not None for x in (seqused_k, alibi_slopes, block_table)):
        raise NotImplementedError("flash attention on the host's CUDA device: packed, without dropout or paged keys")
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])
    for s in _sequences(q, k, v, cu_q, cu_k, is_causal, scale, window_size_left, window_size_right):
        out[s.rows] = (s.scores.softmax(-1) @ s.v).transpose(0, 1).to(q.dtype)
        lse[:, s.rows] = s.scores.logsumexp(-1)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros(0), torch.zeros(0, dtype=q.dtype)


def packed_attention_backward(
    grad,
    q,
    k,
    v,
    out,
    lse,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for s in _sequences(q, k, v, cu_q, cu_k, is_causal, scale, window_size_left, window_size_right):
        p, g = s.scores.softmax(-1), grad[s.rows].float().transpose(0, 1)
        dp = g @ s.v.transpose(1, 2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * s.scale
        dq[s.rows] = (ds @ s.k).transpose(0, 1).to(q.dtype)
        dk[s.cols] = s.folded(ds.transpose(1, 2) @ s.q).to(k.dtype)
        dv[s.cols] = s.folded(p.transpose(1, 2) @ g).to(v.dtype)
    return dq, dk, dv


def mm(a, b, dtype):
    return (a.float() @ b.float()).to(dtype)


def mm_out(a, b, dtype, *, out):
    return out.copy_(a.float() @ b.float())


def addmm(c, a, b, dtype, *, beta=1, alpha=1):
    return (beta * c.float() + alpha * (a.float() @ b.float())).to(dtype)


def addmm_out(c, a, b, dtype, *, beta=1, alpha=1, out):
    return out.copy_(beta * c.float() + alpha * (a.float() @ b.float()))


def softmax(x, dim, half_to_float):
    return torch.ops.aten._softmax(x.float() if half_to_float else x, dim, False)


def log_softmax(x, dim, half_to_float):
    return torch.ops.aten._log_softmax(x.float() if half_to_float else x, dim, False)


def softmax_backward(grad, output, dim, input_dtype):
    return torch.ops.aten._softmax_backward_data(grad, output, dim, grad.dtype).to(input_dtype)


def log_softmax_backward(grad, output, dim, input_dtype):
    return torch.ops.aten._log_softmax_backward_data(grad, output, dim, grad.dtype).to(input_dtype)


def _for_cpu(q, k, v):
    """[B, heads, T, D] with the KV heads repeated, as torch's CPU kernel wants them; and how many share one."""
    groups = q.shape[1] // k.shape[1]
    return k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), groups


def efficient_attention(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    keys, values, _ = _for_cpu(q, k, v)
    bias = None if attn_bias is None else attn_bias.to(q.dtype)
    out, lse = _forward(q, keys, values, dropout_p, is_causal, attn_mask=bias, scale=scale)
    return out, lse, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def efficient_attention_backward(
    grad, q, k, v, attn_bias, out, lse, seed, offset, dropout_p, grad_input_mask, is_causal=False, *, scale=None
):
    if grad_input_mask[3]:
        raise NotImplementedError("gradient of an attention bias on the host's CUDA device")
    bias = None if attn_bias is None else attn_bias.to(q.dtype)
    return *_backward(grad, q, k, v, out, lse, dropout_p, is_causal, attn_mask=bias, scale=scale), None


def flash_attention(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    keys, values, _ = _for_cpu(q, k, v)
    out, lse = _forward(q, keys, values, dropout_p, is_causal, scale=scale)
    none = torch.zeros((), dtype=torch.int64)
    return out, lse, None, None, q.shape[2], k.shape[2], torch.zeros(2, dtype=torch.uint64), none, torch.zeros(0, dtype=q.dtype)


def flash_attention_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None):
    return _backward(grad, q, k, v, out, lse, dropout_p, is_causal, scale=scale)


def _forward(*args, **kwargs):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, **kwargs)


def _backward(grad, q, k, v, *args, **kwargs):
    keys, values, groups = _for_cpu(q, k, v)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, keys, values, *args, **kwargs)
    folded = (x.reshape(x.shape[0], -1, groups, *x.shape[2:]).sum(2) for x in (dk, dv))
    return dq, *folded


# Name, with the overload where others exist on the CPU -> function.
WRITTEN_OUT = {
    "mm.dtype": mm,
    "mm.dtype_out": mm_out,
    "bmm.dtype": mm,
    "bmm.dtype_out": mm_out,
    "addmm.dtype": addmm,
    "addmm.dtype_out": addmm_out,
    "baddbmm.dtype": addmm,
    "baddbmm.dtype_out": addmm_out,
    "_flash_attention_forward": packed_attention,
    "_flash_attention_backward": packed_attention_backward,
    "_fused_rms_norm_backward": rms_norm_backward,
    "_softmax.": softmax,
    "_log_softmax.": log_softmax,
    "_softmax_backward_data.": softmax_backward,
    "_log_softmax_backward_data.": log_softmax_backward,
    "_scaled_dot_product_efficient_attention": efficient_attention,
    "_scaled_dot_product_efficient_attention_backward": efficient_attention_backward,
    "_scaled_dot_product_flash_attention": flash_attention,
    "_scaled_dot_product_flash_attention_backward": flash_attention_backward,
}
