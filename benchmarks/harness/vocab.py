"""Common parts of the two benchmarks of log-probs: plain PyTorch formulations, the fp64 oracle, the reading of shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.model import Mistake

# rows of logits that the oracle holds at a time, in fp64
ORACLE_BYTES = 2**28


def log_softmax_logprob(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The textbook formulation: two [T, V] tensors in fp32 besides the logits."""
    log_p = F.log_softmax(logits.float(), dim=-1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def logsumexp_logprob(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """As verl and TRL write it: entropy from softmax and logsumexp, which keeps no log-probs of the whole vocabulary."""
    x = logits.float()
    lse = x.logsumexp(1)
    return x.gather(1, target[:, None])[:, 0] - lse, lse - (x.softmax(1) * x).sum(1)


def oracle_rows(x: Tensor, target: Tensor, g_logprob: Tensor, g_entropy: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob, entropy, dlogits) of fp64 logits [R, V] by autograd through log_softmax. g_entropy None: the log-prob alone."""
    x = x.detach().requires_grad_()
    log_p = x.log_softmax(1)
    logprob = log_p.gather(1, target[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(1)
    loss = (logprob * g_logprob.double()).sum()
    if g_entropy is not None:
        loss = loss + (entropy * g_entropy.double()).sum()
    (dlogits,) = torch.autograd.grad(loss, x)
    return logprob.detach(), entropy.detach(), dlogits


def row_chunks(num_rows: int, vocab: int) -> list[slice]:
    step = max(ORACLE_BYTES // (8 * vocab), 1)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def numbers(text: str, separator: str, count: int, form: str) -> list[int]:
    """ "2048x32000" -> [2048, 32000], all positive."""
    parts = text.split(separator)
    if len(parts) != count or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise Mistake(f"shape {text!r}: want {form}")
    return [int(part) for part in parts]
