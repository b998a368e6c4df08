"""Lambdas by length, and the moments of whitening; the recurrence itself is held against an oracle in tests/ops/."""

import pytest
import torch

from megappo.algo.gae import length_adaptive_lambda
from megappo.algo.whitening import whiten_apply, whitening_moments


def test_length_adaptive_lambda():
    lam = length_adaptive_lambda(torch.tensor([0, 1, 20, 2000]), 0.05)
    assert lam.tolist() == pytest.approx([0.0, 0.0, 0.0, 0.99])
    # the sum of the weights lambda^k is proportional to the length
    assert 1 / (1 - length_adaptive_lambda(torch.tensor([400]), 0.05)) == pytest.approx(20.0)
    with pytest.raises(ValueError, match="lam_length_alpha"):
        length_adaptive_lambda(torch.tensor([1]), 0.0)


def test_moments_of_parts_whiten_as_the_whole():
    advantage = torch.randn(40, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(40) % 3 != 0
    advantage = torch.where(mask, advantage, 0.0)
    halves = [whitening_moments(a, m) for a, m in zip(advantage.chunk(2), mask.chunk(2))]
    got = torch.cat([whiten_apply(a, m, sum(halves)) for a, m in zip(advantage.chunk(2), mask.chunk(2))])
    kept = advantage[mask].double()
    torch.testing.assert_close(got[mask].double(), (kept - kept.mean()) / kept.std(), rtol=1e-6, atol=1e-6)
    own = torch.cat([whiten_apply(a, m, moments) for a, m, moments in zip(advantage.chunk(2), mask.chunk(2), halves)])
    assert (own - got).abs().max() > 1e-2, "each part by its own moments is another result"


@pytest.mark.parametrize("kept", [0, 1])
def test_fewer_than_two_tokens_are_whitened_to_0(kept):
    x, mask = torch.tensor([4.0, -2.0, 7.0]), torch.arange(3) < kept
    assert torch.equal(whiten_apply(x, mask, whitening_moments(torch.where(mask, x, 0.0), mask)), torch.zeros(3))


def test_constant_advantages_are_whitened_to_about_0():
    x, mask = torch.full((1000,), 1e3 + 0.1), torch.ones(1000, dtype=torch.bool)
    assert whiten_apply(x, mask, whitening_moments(x, mask)).abs().max() < 1e-3
