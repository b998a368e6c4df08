import pytest
import torch
from torch.library import opcheck

from megappo.ops.whiten import whiten_apply


def moments_of(advantage, mask):
    kept = advantage[mask].double()
    return torch.stack((kept.new_tensor(float(kept.numel())), kept.sum(), kept.square().sum()))


@pytest.mark.parametrize("mean,std", [(0.0, 1.0), (3.0, 0.01), (1e4, 1.0), (-5.0, 100.0)])
def test_result_has_mean_zero_and_unit_deviation(kernels, mean, std):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * std + mean
    mask = torch.arange(5000) % 3 != 0
    white = whiten_apply(*(a.to(kernels) for a in (x, mask, moments_of(x, mask)))).cpu()
    want = (x.double() - x[mask].double().mean()) / x[mask].double().std()
    # variance of fp64 moments: mean^2 / var of the 1e-16 is lost; epsilon 1e-8 shifts the deviation by 1e-8 / (2 var)
    torch.testing.assert_close(white[mask].double(), want[mask], rtol=1e-6 + 1e-8 / std**2, atol=1e-6)
    assert not white[~mask].any()


@pytest.mark.parametrize("value", [0.0, 0.1, 1e4])
def test_constant_advantages_become_zero(kernels, value):
    x = torch.full((1000,), value, device=kernels)
    mask = torch.ones(1000, dtype=torch.bool, device=kernels)
    assert whiten_apply(x, mask, moments_of(x, mask)).abs().max() < 1e-3


@pytest.mark.parametrize("num_valid", [0, 1])
def test_nothing_to_normalise_gives_zero(kernels, num_valid):
    x = torch.tensor([3.0, torch.nan, torch.inf], device=kernels)
    mask = torch.arange(3, device=kernels) < num_valid
    assert torch.equal(whiten_apply(x, mask, moments_of(x, mask)).cpu(), torch.zeros(3))


def test_strided_and_empty_inputs(kernels):
    x, mask = torch.randn(20, device=kernels), torch.arange(20, device=kernels) % 4 < 3
    moments = moments_of(x[::2], mask[::2])
    dense = whiten_apply(x[::2].contiguous(), mask[::2].contiguous(), moments)
    assert torch.equal(whiten_apply(x[::2], mask[::2], moments), dense)
    assert whiten_apply(x[:0], mask[:0], moments).shape == (0,)


def whitened_in_parts(x, mask, moments):
    return torch.cat([whiten_apply(a, m, moments(a, m)) for a, m in zip(x.chunk(2), mask.chunk(2))])


def test_moments_of_all_ranks_not_of_one():
    x = torch.cat((torch.randn(50, generator=torch.Generator().manual_seed(1)), torch.full((50,), 7.0)))
    mask = torch.ones(100, dtype=torch.bool)
    whole = whiten_apply(x, mask, moments_of(x, mask))
    total = sum(moments_of(a, m) for a, m in zip(x.chunk(2), mask.chunk(2)))
    torch.testing.assert_close(whitened_in_parts(x, mask, lambda *_: total), whole, rtol=0, atol=1e-6)
    with pytest.raises(AssertionError):  # each rank its own: the fault this guards against
        torch.testing.assert_close(whitened_in_parts(x, mask, moments_of), whole, rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    "name, wrong, message",
    [
        ("advantage", torch.zeros(2, 2), r"advantage is \(2, 2\) torch.float32: one floating value for each token is wanted"),
        ("advantage", torch.zeros(4, dtype=torch.int64), r"advantage is \(4,\) torch.int64"),
        ("mask", torch.ones(4), r"mask is \(4,\) torch.float32: \(4,\) torch.bool is wanted"),
        ("mask", torch.ones(3, dtype=torch.bool), r"mask is \(3,\) torch.bool: \(4,\) torch.bool is wanted"),
        ("mask", torch.ones(4, dtype=torch.bool, device="meta"), "mask is on meta and advantage on cpu"),
        ("moments", torch.zeros(3), r"moments is \(3,\) torch.float32: \(3,\) torch.float64 is wanted"),
        ("moments", torch.zeros(2, dtype=torch.float64), r"moments is \(2,\) torch.float64"),
    ],
)
def test_an_unfit_tensor_is_named(name, wrong, message):
    right = {"advantage": torch.zeros(4), "mask": torch.ones(4, dtype=torch.bool), "moments": torch.zeros(3, dtype=torch.float64)}
    with pytest.raises(ValueError, match=message):
        whiten_apply(**{**right, name: wrong})


def test_op_is_functional_and_has_a_fake_kernel():
    mask = torch.tensor([True, False, True])
    opcheck(torch.ops.megappo.whiten_apply, (torch.randn(3), mask, moments_of(torch.randn(3), mask)))


def test_half_precision_is_whitened_in_fp64(kernels):
    x, mask = torch.randn(70, generator=torch.Generator().manual_seed(2)).bfloat16(), torch.arange(70) % 2 == 0
    moments = moments_of(x, mask)
    got = whiten_apply(x.to(kernels), mask.to(kernels), moments.to(kernels)).cpu()
    torch.testing.assert_close(got, whiten_apply(x.double(), mask, moments), rtol=1e-6, atol=1e-6)
