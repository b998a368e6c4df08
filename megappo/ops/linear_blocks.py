"""Logits of hidden @ weight.T in blocks of tokens and columns, so that [T, Vl] logits never exist.
`LinearLogits` computes a block's logits, statistics and gradient; `linear_stats.py` and `linear_loss.py` loop over the blocks.
Logits are fp32 for weights of any type. bf16_logits rounds them to bf16 first, as an inference engine with a bf16 output layer
does; the gradient passes straight through the rounding.

`kept` [T, K] int32 or int64 restricts them to the ids that a sampler with top-k or top-p could choose, the distribution that the
tokens were drawn from: per target the ids of the whole vocabulary that the sampler kept; -1 is no entry, and a row of only -1 is
not restricted. Every other logit is -inf: probability 0, gradient 0."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megappo.ops.gemm import mm_wide, operand
from megappo.ops.vocab_stats import Upstream, compute_dtype

# Logits of a block. CPU: 8 MB of fp32 stay near the cores between the product and the row operation (products of [1024 x 512 x
# 2000] also run faster than of [1024 x 512 x 32000]). GPU: 256 MB, products large enough for full speed.
BLOCK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 26}
# GPU: the weight's gradient over one block of tokens is one product; a second one would add to 4 bytes a weight in memory.
BLOCK_TOKENS = {"cpu": 1024, "cuda": 8192}
# Weights of a block on the CPU, where half types are widened for the product: 16 MB of fp32.
BLOCK_WEIGHTS = 1 << 22
# Rows of every product in invariant mode; fewer tokens are padded with zeros.
INVARIANT_TOKENS = {"cpu": 128, "cuda": 1024}
NO_ENTRY = -1


def logits_dtype_of(weight: Tensor, bf16_logits: bool) -> torch.dtype:
    # Logits rounded to bf16 of fp32 weights stay in fp32: their gradient is written over them.
    return torch.bfloat16 if bf16_logits and weight.dtype == torch.bfloat16 else compute_dtype(weight.dtype)


def cut(size: int, step: int) -> list[slice]:
    """Split 0 .. size into slices of `step`; the last one may be shorter."""
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def _cut_evenly(size: int, limit: int) -> list[slice]:
    """Split into slices of about equal length, multiples of 64, of about `limit` at most."""
    # Equal, so that the last product is not a few columns wide.
    count = max(-(-size // limit), 1)
    return cut(size, max(-(-size // (count * 64)) * 64, 1))


def _rows(tensor: Tensor | None, tokens: slice) -> Tensor | None:
    return None if tensor is None else tensor[tokens]


def check_top_k_ids(kept: Tensor | None, target: Tensor) -> None:
    """Raise ValueError unless `kept` has a row of ids for each target."""
    if kept is None:
        return
    if kept.dim() != 2 or kept.shape[0] != target.shape[0] or kept.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"kept {tuple(kept.shape)} {kept.dtype}: want int32 or int64 ids [{target.shape[0]}, K], a row for each target"
        )


def restrict_(logits: Tensor, kept: Tensor, vocab_start: int) -> Tensor:
    """Set logits [T, V] to -inf, in place, at each column whose id (vocab_start + column) a restricted row does not list."""
    num_columns = logits.shape[1]
    if kept.shape[1] == 0 or num_columns == 0:
        return logits
    restricted = (kept != NO_ENTRY).any(1)
    column = kept.long() - vocab_start
    here = (column >= 0) & (column < num_columns)
    # In bounds for gather and scatter; what was clamped is written as -inf, which changes no column.
    column = column.clamp(0, num_columns - 1)
    listed = logits.gather(1, column).masked_fill_(~here, -torch.inf)
    logits.masked_fill_(restricted[:, None], -torch.inf)
    # amax: an id of another shard, or none, writes -inf, which changes nothing; no [T, V] mask, no synchronisation with a GPU
    return logits.scatter_reduce_(1, column, listed, "amax")


class LinearLogits(NamedTuple):
    """Logits of hidden @ weight[:num_valid].T, and what is computed of them. Fields that are not named below: see `vocab_stats`."""

    hidden: Tensor
    """[T, H]."""
    weight: Tensor
    """[Vl, H] of hidden's dtype; rows from `num_valid` on are padding."""
    target: Tensor
    vocab_start: int
    num_valid: int
    inv_temp: float
    row_inv_temp: Tensor | None
    ignore_index: int
    kept: Tensor | None
    """[T, K] ids that each row is restricted to, if any."""
    bf16_logits: bool
    invariant: bool = False
    """The bits of a row do not depend on the other rows or on T."""

    def at(self, tokens: slice) -> LinearLogits:
        """The same of these tokens alone."""
        rows = {"hidden": self.hidden[tokens], "target": self.target[tokens], "kept": _rows(self.kept, tokens)}
        return self._replace(**rows, row_inv_temp=_rows(self.row_inv_temp, tokens))

    @property
    def num_tokens(self) -> int:
        return self.hidden.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return logits_dtype_of(self.weight, self.bf16_logits)

    def blocks(self, chunk_tokens: int) -> tuple[list[slice], list[slice]]:
        """Choose (token slices, column slices) to loop over. chunk_tokens: most tokens in a block, 0 for the device's default."""
        device = self.hidden.device.type
        if self.invariant:  # every product has one shape for any batch, fixed by the device and the vocabulary
            tokens = self._invariant_rows
        else:
            tokens = max(min(chunk_tokens or BLOCK_TOKENS[device], self.num_tokens), 1)
        columns = max(BLOCK_LOGITS[device] // tokens, 256)
        if device == "cpu":
            columns = min(columns, max(BLOCK_WEIGHTS // max(self.hidden.shape[1], 1), 256))
        return cut(self.num_tokens, tokens), _cut_evenly(self.num_valid, columns)

    @property
    def _invariant_rows(self) -> int:
        return INVARIANT_TOKENS[self.hidden.device.type]

    def operand(self, x: Tensor) -> Tensor:
        # bf16: the CPU rounds a bf16 product, and bf16_logits asks for exactly that rounding.
        return x if self.dtype == torch.bfloat16 else operand(x)

    def logits(self, hidden: Tensor, weight: Tensor, tokens: slice, columns: slice) -> Tensor:
        """Compute a block's logits [t, c] in a new tensor. hidden, weight: the block's rows of each, converted by `operand`."""
        num_tokens = hidden.shape[0]
        # A library chooses its algorithm by the product's shape, and another algorithm adds in another order.
        if self.invariant and num_tokens < self._invariant_rows:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, self._invariant_rows - num_tokens))
        if self.dtype == torch.bfloat16:
            logits = hidden @ weight.t()
        else:
            logits = mm_wide(hidden, weight.t())
            if self.bf16_logits:
                logits = logits.bfloat16().to(logits.dtype)
        logits = logits[:num_tokens]
        return logits if self.kept is None else restrict_(logits, self.kept[tokens], self.vocab_start + columns.start)

    def stats(self, logits: Tensor, tokens: slice, columns: slice, want_entropy: bool) -> Tensor:
        """Statistics [t, 4] of a block, as in `vocab_stats`."""
        return torch.ops.megappo.vocab_stats(
            logits,
            self.target[tokens],
            self.vocab_start + columns.start,
            logits.shape[1],
            self.inv_temp,
            _rows(self.row_inv_temp, tokens),
            self.ignore_index,
            want_entropy,
        )

    def dlogits(
        self, logits: Tensor, tokens: slice, columns: slice, upstream: Upstream, *, own: bool, out: Tensor | None = None
    ) -> Tensor:
        """Gradient [t, c] of a block's logits in the weight's dtype, in `out` if given. upstream: [t], of the block. own: may
        overwrite `logits`."""
        arguments = (
            logits,
            self.target[tokens],
            *upstream,
            self.vocab_start + columns.start,
            logits.shape[1],
            self.inv_temp,
            _rows(self.row_inv_temp, tokens),
            self.ignore_index,
        )
        # The CPU widens and rounds in its caches; a GPU would pass the gradient in fp32 through memory three times.
        if out is None and (not logits.is_cuda or (own and logits.dtype == self.weight.dtype)):
            if own:
                torch.ops.megappo.vocab_logits_backward_(*arguments)
            else:
                logits = torch.ops.megappo.vocab_logits_backward(*arguments)
            return logits.to(self.weight.dtype)
        out = logits.new_empty(logits.shape, dtype=self.weight.dtype) if out is None else out
        torch.ops.megappo.vocab_logits_backward_into(*arguments, out)
        return out


def merge_blocks(stats: Tensor) -> Tensor:
    """Merge statistics [B, T, 4] of blocks of columns into those of all columns, [T, 4], in a fixed order."""
    m_b, s_b, t_b, z_b = stats.unbind(2)
    m = m_b.amax(0)
    # A row without a finite logit has m = -inf: 0 is subtracted, since -inf - -inf is NaN.
    shift = m_b - m.masked_fill(m == -torch.inf, 0.0)
    weight = shift.exp()
    # a block whose logits are all -inf has shift -inf and weight 0: its term is 0, not 0 * -inf = NaN
    t = (weight * (t_b + shift * s_b)).masked_fill(weight == 0, 0.0)
    return torch.stack((m, (weight * s_b).sum(0), t.sum(0), z_b.amax(0)), 1)
