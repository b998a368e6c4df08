"""Losses with three matrix products against the same in two steps: log-prob first, then the loss, then their backward."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megappo.algo.losses import entropy_loss
from megappo.ops import linear_loss
from megappo.ops.losses import policy_loss
from tests.ops.linear_calls import linear_logprob, linear_token_loss
from tests.ops.test_linear_logprob import LargestTensor, problem
from tests.ops.test_top_k_ids import keep_some
from tests.ops.vocab_oracle import IGNORE

VOCAB = 50
WHERE = {"vocab_start": 0, "num_valid": VOCAB}
CLIP = {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 2.0}


def fields(target, seed=5):
    """old_logprob (near what the model gives), advantage, weight of each target."""
    g = torch.Generator().manual_seed(seed)
    n = target.shape[0]
    weight = torch.rand(n, generator=g) * (target != IGNORE) * (torch.rand(n, generator=g) < 0.8)
    return -4.0 + torch.randn(n, generator=g), torch.randn(n, generator=g), weight


def clipped_linear_loss(h, w, target, old, advantage, weight, group, *, entropy_coef=0.0, clip=CLIP, **where):
    """`linear_token_loss` of the clipped policy loss and an entropy bonus."""

    def token_loss(tokens, logprob, entropy):
        loss, metrics = policy_loss(logprob, old[tokens], advantage[tokens], weight[tokens], **clip)
        if entropy is None:
            return loss, metrics
        return loss + entropy_coef * entropy_loss(entropy, weight[tokens]), metrics

    return linear_token_loss(h, w, target, token_loss, group, want_entropy=entropy_coef != 0, **where)


def two_steps(h, w, target, old, advantage, weight, entropy_coef, **where):
    logprob, entropy = linear_logprob(h, w, target, None, want_entropy=entropy_coef != 0, **where)
    loss, metrics = policy_loss(logprob, old, advantage, weight, **CLIP)
    if entropy is not None:
        loss = loss + entropy_coef * entropy_loss(entropy, weight)
    return loss, logprob, entropy, metrics


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
@pytest.mark.parametrize("chunk_tokens", [1, 10, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_metrics_and_gradients_are_those_of_two_steps(monkeypatch, dtype, chunk_tokens, entropy_coef):
    h, w, target, _, _ = problem(dtype=dtype)
    old, advantage, weight = fields(target)
    where = {**WHERE, "temperature": 0.8, "chunk_tokens": chunk_tokens}
    loss, logprob, entropy, metrics = two_steps(h, w, target, old, advantage, weight, entropy_coef, **where)
    want = torch.autograd.grad(loss / 7.0, (h, w))
    got = clipped_linear_loss(h, w, target, old, advantage, weight, None, entropy_coef=entropy_coef, **where)
    grads = torch.autograd.grad(got.loss / 7.0, (h, w))

    torch.testing.assert_close(got.loss, loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.logprob, logprob.detach(), rtol=0, atol=2e-6)
    assert (got.entropy is None) == (entropy is None) and not got.logprob.requires_grad
    assert got.metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        torch.testing.assert_close(got.metrics[name], value, rtol=1e-6, atol=1e-6, msg=name)
    # of bf16 each path rounds dlogits, its partial sums and its result: a few units of the result's magnitude
    unit = 4 * 2**-8 if dtype == torch.bfloat16 else 1e-5
    for a, b in zip(grads, want):
        assert a.dtype == dtype and (a - b).abs().max() <= unit * b.abs().max()

    # on a GPU the weight's gradient is one product over all chunks
    monkeypatch.setattr(linear_loss._Chunks, "waits_for_all", lambda self: True)
    for into_main_grad in (False, True):
        w.main_grad = torch.ones(w.shape)
        got = clipped_linear_loss(
            h, w, target, old, advantage, weight, None, entropy_coef=entropy_coef, into_main_grad=into_main_grad, **where
        )
        dh, dw = torch.autograd.grad(got.loss / 7.0, (h, w))
        dw = w.main_grad - 1.0 if into_main_grad else dw
        assert torch.equal(dh, grads[0]) and dw.dtype == (torch.float32 if into_main_grad else dtype)
        assert (dw - want[1]).abs().max() <= unit * want[1].abs().max()


def test_the_comparison_sees_a_wrong_clip():
    h, w, target, _, _ = problem()
    old, advantage, weight = fields(target)
    want = torch.autograd.grad(two_steps(h, w, target, old, advantage, weight, 0.0, **WHERE)[0], h)[0]
    got = clipped_linear_loss(h, w, target, old, advantage, weight, None, clip=CLIP | {"clip_high": 10.0}, **WHERE)
    grad = torch.autograd.grad(got.loss, h)[0]
    assert (grad - want).abs().max() > 0.01 * want.abs().max()


@pytest.mark.parametrize("change", [{"logits_dtype": "bf16"}, {"kept": True}, {"temperature": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_options_of_the_log_prob_hold_here_too(change, dtype):
    h, w, target, _, _ = problem(dtype=dtype)
    old, advantage, weight = fields(target)
    where = dict(WHERE)
    if "kept" in change:
        where["kept"] = keep_some(target)
    elif "temperature" in change:
        where["temperature"] = 0.5 + torch.rand(target.shape, generator=torch.Generator().manual_seed(1))
    else:
        where |= change
    loss, logprob, _, _ = two_steps(h, w, target, old, advantage, weight, 0.01, **where)
    got = clipped_linear_loss(h, w, target, old, advantage, weight, None, entropy_coef=0.01, chunk_tokens=9, **where)
    torch.testing.assert_close(got.logprob, logprob.detach(), rtol=0, atol=2e-6)
    unit = 4 * 2**-8 if dtype == torch.bfloat16 else 1e-5
    for a, b in zip(torch.autograd.grad(got.loss, (h, w)), torch.autograd.grad(loss, (h, w))):
        assert (a - b).abs().max() <= unit * b.abs().max()


def test_gradcheck_in_fp64():
    h, w, target, _, _ = problem(7, 9, 5, padding=2, dtype=torch.float64)
    g = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def loss_of(h, w):
        def token_loss(tokens, logprob, entropy):
            return (logprob.exp() * g[0, tokens] + entropy.square() * g[1, tokens]).sum(), {}

        return 3.0 * linear_token_loss(h, w, target, token_loss, None, vocab_start=0, num_valid=9, chunk_tokens=3).loss

    assert torch.autograd.gradcheck(loss_of, (h, w))


def test_backward_twice_gives_the_same():
    h, w, target, _, _ = problem()
    loss = clipped_linear_loss(h, w, target, *fields(target), None, **WHERE).loss
    first = torch.autograd.grad(loss, (h, w), retain_graph=True)
    second = torch.autograd.grad(2.0 * loss, (h, w))
    for a, b in zip(first, second):
        torch.testing.assert_close(2.0 * a, b, rtol=1e-6, atol=0)


def test_without_gradients_only_the_loss_is_computed():
    h, w, target, _, _ = problem()
    want = clipped_linear_loss(h, w, target, *fields(target), None, **WHERE)
    with torch.no_grad():
        got = clipped_linear_loss(h, w, target, *fields(target), None, **WHERE)
    assert not got.loss.requires_grad and torch.equal(got.loss, want.loss.detach()) and torch.equal(got.logprob, want.logprob)


def test_no_more_logits_than_a_chunk():
    h, w, target, _, _ = problem(num_tokens=640, vocab=2000, hidden=8, padding=0)
    with LargestTensor() as seen:
        clipped_linear_loss(h, w, target, *fields(target), None, vocab_start=0, num_valid=2000, chunk_tokens=64).loss.backward()
    assert seen.largest == 64 * 2000


class WeightGradients(TorchDispatchMode):
    """Number of new tensors of a weight's shape, or of its transpose."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.count = weight.detach(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and sorted(out.shape) == sorted(self.weight.shape):
            self.count += out.untyped_storage().data_ptr() != self.weight.untyped_storage().data_ptr()
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_a_frozen_weight_costs_no_gradient(fused, dtype):
    h, w, target, g, _ = problem(dtype=dtype, padding=0)

    def backward():
        h.grad = None
        with WeightGradients(w) as seen:
            if fused:
                clipped_linear_loss(h, w, target, *fields(target), None, **WHERE).loss.backward()
            else:
                (linear_logprob(h, w, target, None, **WHERE)[0] * g).sum().backward()
        return h.grad.clone(), seen.count

    trained, made = backward()
    w.requires_grad_(False)
    frozen, left = backward()
    assert torch.equal(trained, frozen)
    if dtype == torch.float32:  # the CPU's products take weights of other types in fp32
        assert made > 0 and left == 0


def test_no_tokens():
    w = torch.randn(5, 3, requires_grad=True)
    none = torch.zeros(0)
    result = clipped_linear_loss(torch.zeros(0, 3), w, none.long(), none, none, none, None, vocab_start=0, num_valid=5)
    result.loss.backward()
    assert result.logprob.shape == (0,) and not w.grad.any() and float(result.metrics["tokens_sum"]) == 0


def test_a_field_of_another_length_is_named():
    h, w, target, _, _ = problem()
    old, advantage, weight = fields(target)
    with pytest.raises(ValueError, match=r"one value per token is wanted.* advantage \(36,\)"):
        clipped_linear_loss(h, w, target, old, advantage[1:], weight, None, **WHERE)
