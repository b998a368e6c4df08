"""fp64 oracle of log-prob, entropy and gradients (autograd through log_softmax), and shards in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import megappo.ops.linear_stats
import megappo.ops.vocab_stats  # noqa: F401
from megappo.ops.implementations import interpreted

IGNORE = -100


def some(cases: list, *chosen: int) -> list:
    """The cases of a test; for an interpreted kernel those chosen by their place (modulo their number): a launch takes 0.1 s."""
    return [cases[index % len(cases)] for index in chosen] if interpreted() else cases


@dataclass
class Answer:
    """Of the oracle also: log_p [T, V] (-inf as 0), and by how much dlogits change with it."""

    logprob: Tensor
    entropy: Tensor
    dlogits: Tensor
    log_p: Tensor | None = None
    sensitivity: Tensor | None = None


def oracle(logits: Tensor, target: Tensor, temperature: float | Tensor, g_logprob: Tensor, g_entropy: Tensor | None) -> Answer:
    """logits: [T, V] of the real vocabulary, any dtype; everything after the cast is fp64."""
    x = logits.double().detach().requires_grad_()
    inverse = temperature.double().reciprocal()[:, None] if isinstance(temperature, Tensor) else 1.0 / temperature
    log_p = (x * inverse).log_softmax(1)
    kept = target != IGNORE
    logprob = torch.where(kept, log_p.gather(1, target.clamp(min=0)[:, None])[:, 0], 0.0)
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
    entropy = torch.where(kept, -(log_p.exp() * finite).sum(1), 0.0)
    loss = (logprob * g_logprob.double()).sum()
    if g_entropy is not None:
        loss = loss + (entropy * g_entropy.double()).sum()
    loss.backward()
    slope = g_logprob.double().abs()[:, None]
    if g_entropy is not None:
        slope = slope + g_entropy.double().abs()[:, None] * (finite.abs() + entropy[:, None] + 1.0)
    return Answer(logprob.detach(), entropy.detach(), x.grad, finite.detach(), (log_p.exp() * slope * inverse).detach())


@dataclass(frozen=True)
class Shard:
    start: int
    num_valid: int
    padding: int = 0


def cut(vocab: int, *sizes: int, padding: int = 0) -> list[Shard]:
    """Shards of these sizes, each with padding columns; the sizes sum to the vocabulary."""
    assert sum(sizes) == vocab
    return [Shard(sum(sizes[:r]), size, padding) for r, size in enumerate(sizes)]


def shard_columns(full: Tensor, shard: Shard, junk: float = 0.0) -> Tensor:
    own = full[:, shard.start : shard.start + shard.num_valid]
    return torch.cat((own, own.new_full((full.shape[0], shard.padding), junk)), 1)


def run_shards(
    logits: Tensor,
    target: Tensor,
    shards: list[Shard],
    temperature: float | Tensor,
    g_logprob: Tensor,
    g_entropy: Tensor | None,
    *,
    junk: float = 50.0,
    device: torch.device = torch.device("cpu"),
    stats: Callable = torch.ops.megappo.vocab_stats,
    merge: Callable = torch.ops.megappo.vocab_stats_merge,
    backward: Callable = torch.ops.megappo.vocab_logits_backward,
) -> Answer:
    """Results of the ranks of a tensor-parallel group on `device`, one after the other; padding columns hold `junk`."""
    if isinstance(temperature, Tensor):
        scale = (1.0, temperature.float().reciprocal().to(device))
    else:
        scale = (1.0 / temperature, None)
    columns = [shard_columns(logits, s, junk).to(device) for s in shards]
    target, g_logprob = target.to(device), g_logprob.to(device)
    g_entropy = None if g_entropy is None else g_entropy.to(device)
    gathered = torch.stack([stats(x, target, s.start, s.num_valid, *scale, IGNORE, True) for x, s in zip(columns, shards)])
    logprob, entropy, lse = merge(gathered, target, IGNORE)
    grads = []
    for x, s in zip(columns, shards):
        before = x.clone()
        grad = backward(x, target, lse, entropy, g_logprob, g_entropy, s.start, s.num_valid, *scale, IGNORE)
        assert torch.equal(bits(x), bits(before)), "the logits were overwritten"
        assert grad.dtype == x.dtype and not grad[:, s.num_valid :].any(), "padding columns have a gradient"
        grads.append(grad[:, : s.num_valid])
    return Answer(logprob.cpu(), entropy.cpu(), torch.cat(grads, 1).cpu())


def bits(x: Tensor) -> Tensor:
    """The memory of `x` as integers, so that NaN equals itself."""
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


def ulps(got: Tensor, want: Tensor) -> Tensor:
    """Numbers of got's half type between `got` and the rounded `want`."""
    ordered = [torch.where(b < 0, -32768 - b, b) for b in (bits(got).int(), bits(want.to(got.dtype)).int())]
    return (ordered[0] - ordered[1]).abs()


def forward_tolerance(logits: Tensor, temperature: float | Tensor) -> float:
    """4 roundings of the largest scaled logit, and 2e-6 for the sums."""
    scaled = logits.double().abs() / (temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature)
    finite = scaled[scaled.isfinite()]
    largest = float(finite.max()) if finite.numel() else 1.0
    return 4 * 2**-24 * max(1.0, largest) + 2e-6


def assert_matches(got: Answer, want: Answer, logits: Tensor, temperature: float | Tensor) -> None:
    tolerance = forward_tolerance(logits, temperature)
    torch.testing.assert_close(got.logprob.double(), want.logprob, rtol=0, atol=tolerance)
    # entropy is a sum of V terms p (x - lse); its error is that of lse plus roundings of |x - m| <= log V + 16 terms of weight
    torch.testing.assert_close(got.entropy.double(), want.entropy, rtol=4e-6, atol=8 * tolerance)
    # p = e^(x - lse): an error of lse multiplies it, and hardware that computes 2^(x log2 e) rounds that exponent. What is below
    # 1e-35 may be flushed to 0.
    error = (got.dlogits.double() - want.dlogits).abs()
    allowed = want.sensitivity * (2 * tolerance + 2**-23 * want.log_p.abs()) + 1e-35
    if got.dlogits.dtype == torch.float32:
        allowed += 2**-22 * want.dlogits.abs()
        assert (error <= allowed).all(), f"dlogits: error {float((error - allowed).max()):.3g} too large"
    else:
        wrong = (error > allowed) & (ulps(got.dlogits, want.dlogits) > 1)
        assert not wrong.any(), f"dlogits: {int(wrong.sum())} elements are more than one {got.dlogits.dtype} away"
