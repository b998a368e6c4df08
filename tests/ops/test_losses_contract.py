"""Promises of the losses beside their values: masks, NaN, layouts of inputs, autograd, compilation, determinism, errors."""

import pytest
import torch
from torch.library import opcheck

from megappo.algo.losses import entropy_loss
from megappo.ops import dispatch, implementations
from megappo.ops.losses import policy_loss, value_loss

LOSSES = {
    "policy": lambda a, b, c, w: policy_loss(a, b, c, w, clip_low=0.2, clip_high=0.3, dual_clip=3.0),
    "value": lambda a, b, c, w: value_loss(a, b, c, w, clip=0.2),
    "entropy": lambda a, b, c, w: (entropy_loss(a, w), {}),
}
NUM_TOKENS = 1100


@pytest.fixture(params=["policy", "value"])
def loss_fn(request):
    return LOSSES[request.param]


@pytest.fixture
def batch(kernels):
    """logprob or value, old, advantage or return, weight; a third of the tokens has weight 0."""
    generator = torch.Generator().manual_seed(0)
    fields = torch.randn(3, NUM_TOKENS, generator=generator)
    weight = torch.rand(NUM_TOKENS, generator=generator) * (torch.arange(NUM_TOKENS) % 3 != 0)
    return [*(x.to(kernels) for x in fields), weight.to(kernels)]


def with_gradient(loss_fn, a, b, c, w):
    a = a.detach().requires_grad_()
    loss, metrics = loss_fn(a, b, c, w)
    loss.backward()
    return loss.detach(), a.grad, metrics


def assert_same_bits(got, want):
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]) and got[2] == want[2]


@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_do_nothing_whatever_stands_there(batch, name):
    for junk in [torch.inf, -torch.inf, torch.nan]:
        clean = with_gradient(LOSSES[name], *batch)
        assert not clean[1][batch[3] == 0].any()
        fields = [torch.where(batch[3] != 0, x, junk) for x in batch[:3]]
        assert_same_bits(with_gradient(LOSSES[name], *fields, batch[3]), clean)


def test_nan_of_a_valid_token_reaches_loss_and_gradient(batch, loss_fn):
    for spoiled in range(4):
        clean = with_gradient(loss_fn, *batch)
        at = 1030
        assert batch[3][at] != 0
        batch[spoiled][at] = torch.nan
        loss, gradient, metrics = with_gradient(loss_fn, *batch)
        assert loss.isnan() and gradient[at].isnan()
        others = torch.arange(NUM_TOKENS, device=loss.device) != at
        assert torch.equal(gradient[others], clean[1][others])
        assert metrics["tokens_sum"] == clean[2]["tokens_sum"]
        if loss_fn is LOSSES["policy"] and spoiled < 2:
            assert all(metrics[name].isnan() for name in ("ratio_sum", "ratio_max", "approx_kl_sum"))
        if loss_fn is LOSSES["value"] and spoiled < 3:
            assert metrics["value_error_sum"].isnan() and metrics["value_error_max"].isnan()


def test_without_a_clip_the_old_value_is_not_read(batch):
    value, _, returns, weight = batch
    want = with_gradient(lambda *x: value_loss(*x), value, value, returns, weight)
    assert_same_bits(with_gradient(lambda *x: value_loss(*x), value, torch.full_like(value, torch.nan), returns, weight), want)


def test_layout_of_the_inputs_changes_no_bit(batch, loss_fn):
    want = with_gradient(loss_fn, *batch)
    for shift in (1, 3):  # contiguous, but at an address that is no multiple of 16 bytes
        moved = [torch.cat((x[:shift], x))[shift:] for x in batch]
        assert_same_bits(with_gradient(loss_fn, *moved), want)
    strided = [torch.stack((x, x + 1), dim=1)[:, 0] for x in batch]
    assert_same_bits(with_gradient(loss_fn, *strided), want)
    expanded = [x[:1].expand(NUM_TOKENS) for x in batch[2:]]
    dense = [x.clone() for x in expanded]
    assert_same_bits(with_gradient(loss_fn, *batch[:2], *expanded), with_gradient(loss_fn, *batch[:2], *dense))


def test_inputs_stay_as_they_are_and_results_repeat(batch, loss_fn):
    before = [x.clone() for x in batch]
    first = with_gradient(loss_fn, *batch)
    assert_same_bits(with_gradient(loss_fn, *batch), first)
    assert all(torch.equal(x, y) for x, y in zip(batch, before))


def test_gradient_is_scaled_and_kept_for_a_second_backward(batch, loss_fn):
    a = batch[0].detach().requires_grad_()
    loss, _ = loss_fn(a, *batch[1:])
    loss.backward(retain_graph=True)
    once = a.grad.clone()
    (3.0 * loss).backward()
    torch.testing.assert_close(a.grad, 4.0 * once)


def test_the_number_of_threads_changes_no_bit(loss_fn):
    """The C++ kernels: 100,000 tokens are 25 blocks."""
    generator = torch.Generator().manual_seed(0)
    fields = [*torch.randn(3, 100_000, generator=generator), torch.rand(100_000, generator=generator)]
    threads, results = torch.get_num_threads(), []
    try:
        with dispatch.using("cpp"):
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                results.append(with_gradient(loss_fn, *fields))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_no_graph_break_under_compile(batch, loss_fn):
    compiled = torch.compile(loss_fn, fullgraph=True, backend="aot_eager")
    assert_same_bits(with_gradient(compiled, *batch), with_gradient(loss_fn, *batch))


def test_ops_are_functional_and_have_fake_kernels(kernels):
    a, b, c = torch.randn(3, 9, device=kernels)
    a.requires_grad_()
    weight = torch.ones(9, device=kernels)
    opcheck(torch.ops.megappo.policy_loss, (a, b, c, weight, 0.2, 0.2, None))
    opcheck(torch.ops.megappo.policy_loss, (a, b, c, weight, 0.2, 0.2, 3.0))
    opcheck(torch.ops.megappo.value_loss, (a, b, c, weight, 0.2))
    opcheck(torch.ops.megappo.value_loss, (a[:0], b[:0], c[:0], weight[:0], None))


def test_gradients_match_finite_differences():
    generator = torch.Generator().manual_seed(3)
    a, b, c = torch.randn(3, 20, dtype=torch.float64, generator=generator)
    weight = torch.rand(20, dtype=torch.float64, generator=generator) * (torch.arange(20) % 4 != 0)
    a.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, b, c, weight, dual_clip=2.0)[0], (a,))
    assert torch.autograd.gradcheck(lambda x: value_loss(x, b, c, weight, clip=0.2)[0], (a,))
    assert torch.autograd.gradcheck(lambda x: entropy_loss(x, weight), (a,))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (torch.zeros(4), r"one value per token is wanted, got .*(advantage|returns) \(4,\)"),
        (torch.zeros(3, 1), r"one value per token is wanted, got .*(advantage|returns) \(3, 1\)"),
        (torch.zeros(3, device="meta"), "one device is wanted, got .*(advantage|returns) on meta"),
        (torch.zeros(3, dtype=torch.int64), r"(advantage|returns) is torch.int64: give it a floating type"),
    ],
)
def test_an_unfit_tensor_is_named(loss_fn, wrong, message):
    with pytest.raises(ValueError, match=message):
        loss_fn(torch.zeros(3), torch.zeros(3), wrong, torch.zeros(3))


def test_tensors_without_a_token_axis_are_refused(loss_fn):
    with pytest.raises(ValueError, match="one value per token is wanted"):
        loss_fn(*(torch.zeros(2, 3) for _ in range(4)))


def test_the_native_op_refuses_what_python_would_have(loss_fn):
    """It can be called directly, so it must not read beyond an input."""
    assert implementations.missing("cpp", "cpu") is None
    short, long = torch.zeros(3), torch.zeros(9)
    with dispatch.using("cpp"):
        loss_fn(long, long, long, long)  # loads the library
    with pytest.raises(RuntimeError, match="weight must have one value for each of 9"):
        torch.ops.megappo_native.policy_loss(long, long, long, short, 0.2, 0.2, None)
    with pytest.raises(RuntimeError, match="returns must have one value for each of 9"):
        torch.ops.megappo_native.value_loss(long, long, short, long, None)
