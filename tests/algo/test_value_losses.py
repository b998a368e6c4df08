"""Huber's and the categorical value losses against loops over tokens in fp64, with gradients; masks have gaps or no token."""

import math

import pytest
import torch

from megappo.algo import value_losses
from megappo.algo.losses import VALUE_MAXIMA, VALUE_SUMS
from megappo.algo.value_losses import ValueBins, categorical_loss, huber_loss

CLIP, DELTA = 0.3, 0.5
BINS = [ValueBins(kind, num, -1.0, 2.0) for kind in ("hl_gauss", "two_hot") for num in (2, 3, 11)]
# Turns of (prompt or tool output, response) of the sequences of a rank; a response of 0 tokens was cut before its first, a rank may
# have no sequence, and one none that trains.
RANKS = [[[(3, 4)], [(2, 1), (2, 5), (1, 3)], [(4, 0)]], [], [[(5, 0)]], [[(1, 12)], [(2, 2), (3, 1)]]]


def rank_batch(turns, seed):
    """(value or logits' rows, old value, returns, weight) in fp64 of one rank: NaN at tokens without weight."""
    generator = torch.Generator().manual_seed(seed)
    mask = [trains for sequence in turns for before, after in sequence for trains in [False] * before + [True] * after]
    weight = torch.tensor(mask, dtype=torch.float64)
    weight *= (torch.rand(len(mask), generator=generator) > 0.2) * (0.2 + torch.rand(len(mask), generator=generator).double())
    fields = [torch.randn(len(mask), generator=generator, dtype=torch.float64) * 1.5 for _ in range(3)]
    for field in fields:
        field[weight == 0] = math.nan
    return *fields, weight


def rows_of(num_tokens, weight, num, seed):
    rows = torch.randn(num_tokens, num, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows[weight == 0] = math.nan
    return rows


def h(error):
    return 0.5 * error * error if abs(error) <= DELTA else DELTA * (abs(error) - 0.5 * DELTA)


def slope(error):
    return max(-DELTA, min(DELTA, error))


def huber_loop(value, old, returns, weight, clip):
    """(loss, gradient, metrics), token by token."""
    loss, gradient, metrics = 0.0, [], dict.fromkeys([*VALUE_SUMS, *VALUE_MAXIMA], 0.0)
    for v, o, r, w in zip(*(x.tolist() for x in (value, old, returns, weight))):
        if w == 0:
            gradient.append(0.0)
            continue
        plain, cut = h(v - r), 0.0
        if clip is not None:
            cut = max(cut, h(min(max(v, o - clip), o + clip) - r))
        is_cut = cut > plain and abs(v - o) > clip
        loss += w * max(plain, cut)
        gradient.append(0.0 if is_cut else w * slope(v - r))
        _count(metrics, v, r)
        metrics["value_clip_sum"] += is_cut
    return loss, gradient, metrics


def _count(metrics, value, returns):
    error = value - returns
    metrics["tokens_sum"] += 1
    metrics["value_error_sum"] += error
    metrics["value_squared_error_sum"] += error * error
    metrics["value_sum"] += value
    metrics["value_error_max"] = max(metrics["value_error_max"], abs(error))


def normal(x):
    return 0.5 * math.erfc(-x / math.sqrt(2))


def shares_of(bins, returns):
    """(probabilities of the bins for one return, their centres), from the papers' formulas."""
    inside = min(max(returns, bins.low), bins.high)
    if bins.kind == "hl_gauss":
        width = (bins.high - bins.low) / bins.num
        edges = [bins.low + i * width for i in range(bins.num + 1)]
        below = [normal((edge - inside) / (0.75 * width)) for edge in edges]
        whole = below[-1] - below[0]
        return [(b - a) / whole for a, b in zip(below, below[1:])], [edge + width / 2 for edge in edges[:-1]]
    centres = [bins.low + i * (bins.high - bins.low) / (bins.num - 1) for i in range(bins.num)]
    lower = max(i for i in range(bins.num - 1) if centres[i] <= inside)
    upper = (inside - centres[lower]) / (centres[lower + 1] - centres[lower])
    return [1 - upper if i == lower else upper if i == lower + 1 else 0.0 for i in range(bins.num)], centres


def categorical_loop(rows, returns, weight, bins):
    names = [*(name for name in VALUE_SUMS if name != "value_clip_sum"), *VALUE_MAXIMA, "return_outside_sum"]
    loss, gradient, metrics = 0.0, [], dict.fromkeys(names, 0.0)
    for row, r, w in zip(*(x.tolist() for x in (rows, returns, weight))):
        if w == 0:
            gradient.append([0.0] * bins.num)
            continue
        shares, centres = shares_of(bins, r)
        exps = [math.exp(one) for one in row]
        probabilities = [one / sum(exps) for one in exps]
        loss -= w * sum(share * math.log(p) for share, p in zip(shares, probabilities))
        gradient.append([w * (p - share) for share, p in zip(shares, probabilities)])
        _count(metrics, sum(p * c for p, c in zip(probabilities, centres)), r)
        metrics["return_outside_sum"] += not bins.low <= r <= bins.high
    return loss, gradient, metrics


def check_huber(clip):
    for seed, turns in enumerate(RANKS):
        value, old, returns, weight = rank_batch(turns, seed)
        value.requires_grad_()
        loss, metrics = huber_loss(value, old, returns, weight, clip, DELTA)
        wanted, gradient, counted = huber_loop(value.detach(), old, returns, weight, clip)
        assert float(loss.detach()) == pytest.approx(wanted, abs=1e-12)
        assert {name: float(one) for name, one in metrics.items()} == pytest.approx(counted, abs=1e-12)
        (found,) = torch.autograd.grad(loss, value)
        assert found.tolist() == pytest.approx(gradient, abs=1e-12)
        if seed == 0 and clip is not None:
            assert 0 < counted["value_clip_sum"] < counted["tokens_sum"], "the case has tokens on both sides of the clip"


def check_categorical(bins):
    for seed, turns in enumerate(RANKS):
        _, _, returns, weight = rank_batch(turns, seed)
        rows = rows_of(len(returns), weight, bins.num, seed).requires_grad_()
        loss, metrics = categorical_loss(rows, returns, weight, bins)
        wanted, gradient, counted = categorical_loop(rows.detach(), returns, weight, bins)
        assert float(loss.detach()) == pytest.approx(wanted, abs=1e-12)
        assert {name: float(one) for name, one in metrics.items()} == pytest.approx(counted, abs=1e-12)
        (found,) = torch.autograd.grad(loss, rows)
        assert torch.allclose(found, torch.tensor(gradient, dtype=torch.float64).view_as(found), atol=1e-12, rtol=0)
        if seed == 3:
            assert 0 < counted["return_outside_sum"] < counted["tokens_sum"]


@pytest.mark.parametrize("clip", [None, CLIP])
def test_huber_is_the_loop_over_tokens(clip):
    check_huber(clip)


@pytest.mark.parametrize("bins", BINS, ids=str)
def test_cross_entropy_is_the_loop_over_tokens(bins):
    check_categorical(bins)


def test_a_huber_loss_without_its_straight_part_is_noticed(monkeypatch):
    monkeypatch.setattr(value_losses, "_huber", lambda error, delta: 0.5 * error.square())
    with pytest.raises(AssertionError):
        check_huber(CLIP)


def test_another_smoothing_is_noticed(monkeypatch):
    monkeypatch.setattr(value_losses, "SMOOTHING", 0.76)
    check_categorical(BINS[4])  # two-hot has none
    with pytest.raises(AssertionError):
        check_categorical(BINS[1])


def test_a_wide_huber_loss_is_half_the_squared_error():
    value, old, returns, weight = rank_batch(RANKS[0], 0)
    kept = weight != 0
    loss, _ = huber_loss(value, old, returns, weight, None, 1e6)
    assert float(loss) == pytest.approx(float((0.5 * weight * (value - returns).square())[kept].sum()), rel=1e-12)


@pytest.mark.parametrize("num", [2, 5, 51])
def test_two_hot_keeps_the_return_as_its_mean(num):
    bins, returns = ValueBins("two_hot", num, -1.0, 2.0), torch.linspace(-1, 2, 97, dtype=torch.float64)
    shares = bins.project(returns)
    assert torch.allclose(shares.sum(-1), torch.ones(97, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(shares @ bins.centres(returns), returns, atol=1e-12)
    assert int((shares > 1e-9).sum(-1).max()) <= 2


def test_hl_gauss_keeps_the_return_away_from_the_ends():
    """Two standard deviations and more inside; at the ends the distribution is cut off, and its mean lies inside."""
    bins, returns = ValueBins("hl_gauss", 51, -1.0, 2.0), torch.linspace(-0.8, 1.8, 97, dtype=torch.float64)
    assert torch.allclose(bins.project(returns) @ bins.centres(returns), returns, atol=0.02 * bins.width)
    end = bins.project(torch.tensor([-1.0], dtype=torch.float64)) @ bins.centres(returns)
    assert -1.0 + 0.5 * bins.width < float(end) < -1.0 + bins.width


@pytest.mark.parametrize("bins", [BINS[2], BINS[5]], ids=str)
def test_a_head_of_projected_returns_gives_them_as_values_in_fp32(bins):
    returns = torch.linspace(-0.2, 1.2, 33)
    values = bins.expectation(bins.project(returns).log().clamp(min=-1e4))
    assert values.dtype == torch.float32 and torch.allclose(values, returns, atol=0.02 * bins.width)


@pytest.mark.parametrize("bins", [BINS[2], BINS[5]], ids=str)
def test_a_nan_of_a_token_with_weight_reaches_loss_and_gradient(bins):
    rows = torch.zeros(3, bins.num, requires_grad=True)
    loss, _ = categorical_loss(rows, torch.tensor([0.5, math.nan, 0.5]), torch.ones(3), bins)
    (gradient,) = torch.autograd.grad(loss, rows)
    assert loss.isnan() and gradient.isnan().any(-1).tolist() == [False, True, False]
    value = torch.zeros(3, requires_grad=True)
    assert huber_loss(value, torch.tensor([0.0, math.nan, 0.0]), torch.ones(3), torch.ones(3), CLIP, DELTA)[0].isnan()


def test_rows_that_do_not_fit_the_bins_are_refused():
    with pytest.raises(ValueError, match=r"logits \(3, 5\) are wanted as \[3, 11\]"):
        categorical_loss(torch.zeros(3, 5), torch.zeros(3), torch.ones(3), BINS[2])
