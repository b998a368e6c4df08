"""The differentiable layer on one rank: gradients, chunks, memory, arguments."""

import math

import pytest
import torch
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.linear_calls import linear_logprob
from tests.ops.vocab_oracle import IGNORE, forward_tolerance, oracle


def problem(num_tokens=37, vocab=50, hidden=24, padding=6, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(num_tokens, hidden, generator=generator).to(dtype).requires_grad_()
    w = (torch.randn(vocab + padding, hidden, generator=generator) / 3).to(dtype).requires_grad_()
    target = torch.randint(0, vocab, (num_tokens,), generator=generator)
    target[::6] = IGNORE
    g = torch.randn(2, num_tokens, generator=generator)
    return h, w, target, g[0], g[1]


def linear_oracle(h, w, target, vocab, temperature, g_lp, g_h):
    h64, w64 = h.detach().double(), w.detach().double()
    answer = oracle(h64 @ w64[:vocab].t(), target, temperature, g_lp, g_h)
    dw = torch.zeros_like(w64)
    dw[:vocab] = answer.dlogits.t() @ h64
    return answer, answer.dlogits @ w64[:vocab], dw


@pytest.mark.parametrize("which", ["logprob", "entropy", "both"])
def test_gradcheck_of_each_output(which):
    h, w, target, _, _ = problem(7, 9, 5, padding=2, dtype=torch.float64)
    pick = {"logprob": lambda out: out[0], "entropy": lambda out: out[1], "both": lambda out: out}[which]
    where = {"vocab_start": 0, "num_valid": 9, "temperature": 0.7}
    assert torch.autograd.gradcheck(lambda h, w: pick(linear_logprob(h, w, target, None, chunk_tokens=3, **where)), (h, w))


@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_matches_the_oracle_for_every_chunk(chunk_tokens, dtype):
    h, w, target, g_lp, g_h = problem(dtype=dtype)
    logprob, entropy = linear_logprob(h, w, target, None, vocab_start=0, num_valid=50, temperature=0.8, chunk_tokens=chunk_tokens)
    (logprob * g_lp + entropy * g_h).sum().backward()
    want, dh, dw = linear_oracle(h, w, target, 50, 0.8, g_lp, g_h)

    # three times what an fp32 GEMM of this length loses in a logit, and the row operations
    gemm = 3 * 24**0.5 * 2**-24 * float((h.detach().abs().double() @ w.detach().abs().double().t()).max()) / 0.8
    tolerance = gemm + forward_tolerance(h.detach() @ w.detach().t(), 0.8)
    torch.testing.assert_close(logprob.detach().double(), want.logprob, rtol=0, atol=tolerance)
    torch.testing.assert_close(entropy.detach().double(), want.entropy, rtol=4e-6, atol=8 * tolerance)
    assert h.grad.dtype == w.grad.dtype == dtype
    # bf16 rounds dlogits once and the result once: each contributes at most half an ulp of every term
    unit = 2**-8 if dtype == torch.bfloat16 else 2**-22
    for got, exact, terms in (
        (h.grad, dh, want.dlogits.abs() @ w.detach().abs().double()[:50]),
        (w.grad[:50], dw[:50], want.dlogits.abs().t() @ h.detach().abs().double()),
    ):
        assert ((got.double() - exact).abs() <= unit * (terms + exact.abs()) + 16 * tolerance).all()
    assert not w.grad[50:].any() and not h.grad[::6].any()


def test_dweight_of_many_bf16_chunks_is_summed_in_fp32():
    h, w, target, g_lp, _ = problem(num_tokens=512, dtype=torch.bfloat16)
    grads = []
    for chunk_tokens in (8, 512):
        logprob, _ = linear_logprob(h, w, target, None, vocab_start=0, num_valid=50, chunk_tokens=chunk_tokens)
        grads.append(torch.autograd.grad((logprob * g_lp).sum(), w)[0].double())
    _, _, dw = linear_oracle(h, w, target, 50, 1.0, g_lp, None)
    many, one = ((g - dw).norm() / dw.norm() for g in grads)
    assert many < 1.1 * one

    in_bf16 = torch.zeros_like(w)
    for s in (slice(i, i + 8) for i in range(0, 512, 8)):
        logprob, _ = linear_logprob(h[s], w, target[s], None, vocab_start=0, num_valid=50)
        in_bf16 += torch.autograd.grad((logprob * g_lp[s]).sum(), w)[0]
    assert (in_bf16.double() - dw).norm() / dw.norm() > 1.5 * one  # the fault this guards against is visible at this size


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor made by any operation, inside custom ops too."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return out


def test_linear_never_holds_more_than_a_chunk_of_logits():
    import megappo.ops.linear_stats as linear

    h, w, target, g_lp, g_h = (x.detach() for x in problem(num_tokens=640, vocab=2000, hidden=8, padding=0))
    lse, given = torch.full((640,), 9.0), (h, w, target, 0, 2000, 1.0, None, IGNORE, None, False, False)
    with LargestTensor() as seen:
        linear.linear_stats._init_fn(*given, True, False, 64)
        linear.linear_backward._init_fn(*given, lse, lse, g_lp, g_h, None, 64)
    assert seen.largest == 64 * 2000
    with LargestTensor() as seen:
        linear.linear_stats._init_fn(*given, True, False, 640)
    assert seen.largest == 640 * 2000


def test_without_entropy():
    h, w, target, g_lp, _ = problem()
    both = linear_logprob(h, w, target, None, vocab_start=0, num_valid=50)
    alone = linear_logprob(h, w, target, None, vocab_start=0, num_valid=50, want_entropy=False)
    assert alone[1] is None and torch.equal(alone[0], both[0])
    grads = [torch.autograd.grad((out[0] * g_lp).sum(), (h, w)) for out in (both, alone)]
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


def test_splitting_the_tokens_changes_nothing_but_rounding():
    h, w, target, _, _ = problem(num_tokens=96)
    where = {"vocab_start": 0, "num_valid": 50}
    whole = linear_logprob(h, w, target, None, **where)[0]
    parts = torch.cat([linear_logprob(h[s], w, target[s], None, **where)[0] for s in (slice(0, 1), slice(1, 40), slice(40, 96))])
    torch.testing.assert_close(parts, whole, rtol=0, atol=4e-6)


def test_compiles_as_one_graph():
    h, w, target, g_lp, g_h = problem()

    def loss(h, w):
        logprob, entropy = linear_logprob(h, w, target, None, vocab_start=0, num_valid=50, temperature=0.7)
        return (logprob * g_lp + entropy * g_h).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(h, w), (h, w)), torch.autograd.grad(loss(h, w), (h, w))):
        torch.testing.assert_close(a, b)


def test_linear_ops_are_functional_and_have_fake_kernels():
    h, w, target, g_lp, g_h = problem(6)
    tail = (0, 50, 1.0, None, IGNORE)
    h, w = h.detach(), w.detach()
    opcheck(torch.ops.megappo.linear_stats, (h, w, target, *tail, None, False, False, True, True, 4))
    lse = torch.full((6,), 4.0)
    opcheck(torch.ops.megappo.linear_backward, (h, w, target, *tail, None, False, False, lse, lse, g_lp, g_h, None, 4))


def test_no_tokens():
    w = torch.randn(5, 3, requires_grad=True)
    logprob, _ = linear_logprob(torch.zeros(0, 3), w, torch.zeros(0, dtype=torch.long), None, vocab_start=0, num_valid=5)
    logprob.sum().backward()
    assert logprob.shape == (0,) and not w.grad.any()


@pytest.mark.parametrize(
    "change,text",
    [
        ({"target": torch.tensor([1, 50, 0])}, "target 50 of token 1 is outside the vocabulary"),
        ({"target": torch.tensor([1, -1, 0])}, "target -1 of token 1"),
        ({"target": torch.zeros(4, dtype=torch.long)}, "target \\(4,\\)"),
        ({"temperature": 0.0}, "positive temperature"),
        ({"temperature": math.nan}, "positive temperature"),
        ({"temperature": torch.ones(4)}, "one value for each of 3 tokens"),
        ({"num_valid": 99}, "num_valid 99"),
    ],
)
def test_wrong_arguments_are_named(change, text):
    h, w, target, _, _ = problem(3)
    arguments = {"target": torch.tensor([1, 2, 3]), "vocab_start": 0, "num_valid": 50} | change
    with pytest.raises(ValueError, match=text):
        linear_logprob(h, w, arguments.pop("target"), None, **arguments)
