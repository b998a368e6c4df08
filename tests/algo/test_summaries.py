"""Figures of a step, against torch over the same tokens and numbers worked out by hand."""

import math

import pytest
import torch

from megappo.algo.summaries import expert_load, explained_variance, masked_moments, summarise


def data(n=50):
    x, y = torch.randn(2, n, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(n) % 3 != 0
    return torch.where(mask, x, torch.nan), torch.where(mask, x + 0.5 * y + 3, torch.inf), mask


def explained(parts):
    """Explained variance of values, returns and masks of several parts together."""
    of_returns = sum(masked_moments(returns, mask).sums for _, returns, mask in parts)
    return explained_variance(
        of_returns, sum(masked_moments(returns.double() - value, mask).sums for value, returns, mask in parts)
    )


def test_summary_of_masked_values_adds_over_parts():
    x, _, mask = data()
    parts = [masked_moments(a, m) for a, m in zip((x[:7], x[7:8], x[8:8], x[8:]), (mask[:7], mask[7:8], mask[8:8], mask[8:]))]
    got = summarise(sum(s for s, _ in parts), torch.stack([m for _, m in parts]).amax(0))
    kept = x[mask].double()
    want = (kept.mean(), kept.std(unbiased=False), kept.min(), kept.max())
    assert got == pytest.approx(tuple(map(float, want)), rel=1e-9)


def test_chunks_of_tokens_change_no_figure(monkeypatch):
    x, _, mask = data()
    whole = masked_moments(x, mask)
    monkeypatch.setattr("megappo.algo.aggregation.TOKENS", 7)
    sums, maxima = masked_moments(x, mask)
    assert torch.equal(maxima, whole.maxima) and torch.allclose(sums, whole.sums, rtol=1e-14, atol=0)


def test_summary_of_nothing_is_nan():
    assert all(math.isnan(v) for v in summarise(*masked_moments(torch.ones(3), torch.zeros(3, dtype=torch.bool))))


def test_explained_variance_adds_over_parts():
    value, returns, mask = data()
    parts = list(zip(value.chunk(4), returns.chunk(4), mask.chunk(4)))
    got = explained(parts)
    v, r = value[mask].double(), returns[mask].double()
    assert got == pytest.approx(1 - float((r - v).var() / r.var()), rel=1e-9)
    means = [explained([part]) for part in parts]
    assert sum(means) / 4 != pytest.approx(got, rel=1e-3)  # averaging the parts' figures is another number


@pytest.mark.parametrize("level", [0.0, 0.1, 1e4])
def test_constant_returns_explain_nothing(level):
    mask = torch.ones(9, dtype=torch.bool)
    assert math.isnan(explained([(torch.randn(9), torch.full((9,), level), mask)]))


def test_perfect_and_useless_critics():
    r, mask = torch.randn(100), torch.ones(100, dtype=torch.bool)
    assert explained([(r, r, mask)]) == 1.0
    assert explained([(torch.zeros(100), r, mask)]) == pytest.approx(0.0, abs=1e-9)


def test_rounding_of_log_probs_is_not_explained():
    """A batch where nothing scores: returns of 1e-7 and values of 1e-2 gave an explained variance of -1e13."""
    mask = torch.ones(100, dtype=torch.bool)
    returns = torch.randn(100, generator=torch.Generator().manual_seed(0)) * 1e-7
    assert math.isnan(explained([(torch.full((100,), 0.01), returns, mask)]))
    assert explained([(returns * 1e4, returns * 1e4, mask)]) == 1.0


def test_even_load_has_no_violation_and_nothing_idle() -> None:
    assert expert_load(torch.full((2, 4), 5.0)) == (0.0, 0.0)


def test_busiest_expert_is_compared_with_the_even_share_of_its_own_layer() -> None:
    load = expert_load(torch.tensor([[4.0, 4.0, 4.0, 4.0], [0.0, 0.0, 0.0, 0.0], [0.0, 2.0, 2.0, 4.0]]))
    assert load.max_violation == pytest.approx(1.0)  # 4 against 8 / 4
    assert load.idle == pytest.approx(1 / 8)  # of two sparse layers; the row of zeros is a dense one
