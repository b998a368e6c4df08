"""Weight gradients that go straight into Megatron's fp32 accumulator, and the hook of its DistributedDataParallel."""

import pytest
import torch

from tests.ops.linear_calls import linear_logprob
from tests.ops.test_linear_logprob import problem
from tests.ops.test_linear_loss import clipped_linear_loss, fields
from tests.worlds import spawn_world

WHERE = {"vocab_start": 0, "num_valid": 50}
WAYS = ("two steps", "kept logits", "fused")


def loss_of(way, h, w, target, **options):
    if way == "fused":
        return clipped_linear_loss(h, w, target, *fields(target), None, chunk_tokens=16, **WHERE, **options).loss
    logprob, _ = linear_logprob(h, w, target, None, chunk_tokens=16, keep_logits=way == "kept logits", **WHERE, **options)
    return (logprob * fields(target)[1]).sum()


def under_ddp(weight):
    """`weight` with the accumulator of Megatron's DDP and the hook of its `_make_backward_post_hook`."""
    weight = torch.nn.Parameter(weight.detach().clone())
    weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32)
    weight.grad_added_to_main_grad = False

    def hook(*_):
        assert weight.grad is not None, "with overlapped reduction DDP refuses a parameter without gradient"
        if not weight.grad_added_to_main_grad or getattr(weight, "zero_out_wgrad", False):
            weight.main_grad.add_(weight.grad.data)
        weight.grad = None

    weight.register_post_accumulate_grad_hook(hook)
    return weight


def micro_batches(dtype):
    return [problem(num_tokens, dtype=dtype, seed=seed) for seed, num_tokens in enumerate((37, 5, 64))]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_micro_batches_add_up_in_fp32(way, dtype):
    _, w, *_ = problem(dtype=dtype)
    weight = under_ddp(w)
    exact = torch.zeros(w.shape, dtype=torch.float64)
    rounded = torch.zeros(w.shape, dtype=torch.float32)
    for h, _, target, *_ in micro_batches(dtype):
        (loss_of(way, h, weight, target, into_main_grad=True) / 3.0).backward()
        assert weight.grad is None and weight.grad_added_to_main_grad
        w64, w_ = w.detach().double().requires_grad_(), w.detach().requires_grad_()
        exact += torch.autograd.grad(loss_of(way, h.detach().double(), w64, target) / 3.0, w64)[0]
        rounded += torch.autograd.grad(loss_of(way, h.detach(), w_, target) / 3.0, w_)[0].float()
    errors = [float((x.double() - exact).norm() / exact.norm()) for x in (weight.main_grad, rounded)]
    assert not weight.main_grad[50:].any()
    assert errors[0] < (3e-3 if dtype == torch.bfloat16 else 2e-6)
    if dtype == torch.bfloat16:
        assert errors[0] < 0.9 * errors[1]  # what autograd would have rounded to bf16 first


@pytest.mark.parametrize("way", WAYS)
def test_tied_embeddings_get_both_gradients(way):
    _, w, *_ = problem()
    ids = torch.arange(37) % 50

    def losses(weight, **options):
        for h, _, target, *_ in micro_batches(torch.float32)[:1] * 2:
            yield loss_of(way, torch.nn.functional.embedding(ids, weight) + h.detach(), weight, target, **options)

    plain = w.detach().clone().requires_grad_()
    for loss in losses(plain):
        loss.backward()
    tied = under_ddp(w)
    tied.zero_out_wgrad = True  # as LanguageModule.setup_embeddings_and_output_layer sets it
    for loss in losses(tied, into_main_grad=True):
        loss.backward()
    torch.testing.assert_close(tied.main_grad, plain.grad, rtol=1e-5, atol=1e-6)

    forgotten = under_ddp(w)  # without zero_out_wgrad the hook drops what the embedding returned
    for loss in losses(forgotten, into_main_grad=True):
        loss.backward()
    assert (forgotten.main_grad - plain.grad).abs().max() > 1e-2


@pytest.mark.parametrize("way", WAYS)
def test_gradient_of_the_hidden_states_is_the_same(way):
    h, w, target, *_ = problem()
    want = torch.autograd.grad(loss_of(way, h, w, target), h)[0]
    assert torch.equal(torch.autograd.grad(loss_of(way, h, under_ddp(w), target, into_main_grad=True), h)[0], want)


@pytest.mark.parametrize("accumulator", [None, torch.zeros(56, 24, dtype=torch.bfloat16), torch.zeros(3, 24)])
def test_a_weight_without_a_fitting_accumulator_is_refused(accumulator):
    h, w, target, *_ = problem()
    w.main_grad = accumulator
    with pytest.raises(ValueError, match=r"weight \(56, 24\) has no fp32 main_grad"):
        linear_logprob(h, w, target, None, into_main_grad=True, **WHERE)


class Tied(torch.nn.Module):
    """One matrix that is embedding and output projection."""

    def __init__(self, weight):
        super().__init__()
        from megatron.core.transformer import TransformerConfig

        self.config = TransformerConfig(num_layers=1, hidden_size=24, num_attention_heads=1)
        self.weight = torch.nn.Parameter(weight.detach().clone())
        self.weight.zero_out_wgrad = True

    def forward(self, ids):
        return torch.nn.functional.embedding(ids, self.weight)


def gradients_under_megatron(rank):
    from megappo.engine.megatron_optimizer import wrap_with_ddp
    from megappo.parallel import cpu_patches
    from megappo.parallel.groups import build_groups
    from megappo.parallel.layout import ParallelLayout

    cpu_patches.install()
    _, w, target, *_ = problem()
    ids = torch.arange(37) % 50
    groups = build_groups(ParallelLayout(1))
    found = []
    for into_main_grad in (False, True):
        (module,) = wrap_with_ddp([Tied(w)], groups, distributed_optimizer=False)
        module.zero_grad_buffer()
        for way in WAYS:
            weight = module.module.weight
            loss_of(way, module(ids), weight, target, into_main_grad=into_main_grad).backward()
            assert weight.grad_added_to_main_grad == into_main_grad and weight.grad is None
        found.append(weight.main_grad.clone())
    return found


def test_megatrons_own_data_parallel_wrapper_gets_both_gradients_of_tied_embeddings():
    plain, direct = spawn_world(gradients_under_megatron, 1, timeout_s=120.0)[0]
    assert plain.abs().max() > 0.1
    torch.testing.assert_close(direct, plain, rtol=1e-5, atol=1e-6)
