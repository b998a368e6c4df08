"""Losses of preferences against TRL's own, recorded in trl_losses.json, with gradients; against loops in fp64; and padding."""

import json
import math

import pytest
import torch

from megappo.algo.preferences import (
    BINS,
    calibration_error,
    centring_loss,
    ipo_loss,
    kto_loss,
    odds_ratio_loss,
    pairs_of,
    ranking_loss,
    ranking_sums,
    sequence_logprobs,
    sigmoid_loss,
)
from tests.algo import trl_losses
from tests.algo.trl_losses import BETA, CENTRE, DESIRABLE, FIGURES, GAMMA, LABELS, SMOOTHING, UNDESIRABLE

RECORDED = json.loads(FIGURES.read_text())["figures"]


def packed(given, pad):
    """(log-probs [T] fp32 with gradient, those of a packed batch with a token of prompt before each response, mask, cu_seqlens).
    pad: a sequence of padding at the end."""
    leaf = given["logprob"].clone().requires_grad_()
    parts = [torch.nn.functional.pad(part, (1, 0), value=math.nan) for part in leaf.split(given["lengths"])]
    lengths = [*map(len, parts), *([3] if pad else [])]
    values = torch.cat([*parts, *([torch.full((3,), math.nan)] if pad else [])])
    mask = torch.cat([torch.arange(n) > 0 for n in lengths[:8]] + [torch.zeros(sum(lengths[8:]), dtype=torch.bool)])
    return leaf, values, mask, torch.tensor([0, *lengths]).cumsum(0).int()


def losses_of(name, given, pad):
    leaf, values, mask, cu_seqlens = packed(given, pad)
    if name.startswith("reward"):
        leaf = given["score"].clone().requires_grad_()
        score = torch.cat([leaf, torch.zeros(pad)])
        unit = torch.tensor([1, 1, 2, 2, 3, 3, 4, 4] + [0] * pad)
        place = torch.tensor([0, 1] * 4 + [0] * pad)
        margin = torch.zeros(8 + pad)
        if name == "reward_margin":
            margin[1:8:2] = given["margin"]
        return leaf, (ranking_loss(score, unit, place, margin) + CENTRE * centring_loss(score, unit)).sum() / 4
    padding = torch.zeros(pad)
    reference = torch.cat([given["reference"], padding])
    if name in ("simpo", "orpo", "sigmoid_norm", "ipo"):
        logprob = sequence_logprobs(values, mask, cu_seqlens, mean=True)
        reference = reference / torch.tensor([*given["lengths"], *[1] * pad])
    else:
        logprob = sequence_logprobs(values, mask, cu_seqlens, mean=False)
    chosen, rejected = pairs_of(logprob)
    if name == "simpo":
        return leaf, sigmoid_loss(chosen - rejected, BETA, SMOOTHING, GAMMA).sum() / 4
    if name == "orpo":
        nll = torch.cat([part.mean()[None] * len(part) for part in leaf.split(given["lengths"])[::2]]).sum()
        return leaf, BETA * odds_ratio_loss(chosen, rejected).sum() / 4 - nll / sum(given["lengths"][::2])
    ratio = logprob - reference
    if name == "kto":
        kl = max(0.0, float((given["mismatched"] - given["mismatched_reference"]).mean()))
        label = torch.tensor([*LABELS, *[0] * pad])
        weight = torch.where(label > 0, DESIRABLE, UNDESIRABLE)
        return leaf, (weight * kto_loss(ratio, label, kl, BETA)).sum() / 8
    chosen, rejected = pairs_of(ratio)
    if name == "ipo":
        return leaf, ipo_loss(chosen - rejected, BETA).sum() / 4
    loss = sigmoid_loss(chosen - rejected, BETA).sum() / 4
    if name == "rpo":
        loss = loss - 0.5 * torch.cat(leaf.split(given["lengths"])[::2]).mean()
    return leaf, loss


@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("name", RECORDED)
def test_loss_and_gradient_are_those_of_trl(name, pad):
    leaf, loss = losses_of(name, trl_losses.inputs(), pad)
    loss.backward()
    assert loss.item() == pytest.approx(RECORDED[name]["loss"], rel=1e-5)
    torch.testing.assert_close(leaf.grad, torch.tensor(RECORDED[name]["gradient"]), rtol=1e-5, atol=1e-7)


def test_a_fault_in_the_reference_or_the_order_is_seen():
    given = trl_losses.inputs()
    given["reference"][3] += 0.01
    assert losses_of("sigmoid", given, 0)[1].item() != pytest.approx(RECORDED["sigmoid"]["loss"], rel=1e-5)
    given = trl_losses.inputs()
    given["score"] = given["score"].flip(0)
    assert losses_of("reward", given, 0)[1].item() != pytest.approx(RECORDED["reward"]["loss"], rel=1e-3)


def test_conservative_dpo_is_the_expectation_over_wrong_labels():
    margin = torch.linspace(-40, 40, 17, dtype=torch.float64)
    expected = [
        -(1 - SMOOTHING) * math.log(1 / (1 + math.exp(-BETA * m))) - SMOOTHING * math.log(1 / (1 + math.exp(BETA * m)))
        for m in margin.tolist()
    ]
    torch.testing.assert_close(sigmoid_loss(margin, BETA, SMOOTHING), torch.tensor(expected, dtype=torch.float64))


SCORES = torch.randn(9, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3 + 50
UNITS, PLACES = torch.tensor([1, 1, 1, 1, 2, 2, 0, 3, 3]), torch.tensor([0, 1, 2, 3, 0, 1, 0, 0, 0])


def test_longer_lists_are_plackett_luce():
    loss = ranking_loss(SCORES, UNITS, PLACES, torch.zeros(9).double())
    expected = [math.log(sum(math.exp(s - SCORES[i].item()) for s in SCORES[i:4].tolist())) for i in range(4)]
    torch.testing.assert_close(loss[:4], torch.tensor(expected, dtype=torch.float64))
    assert loss[6] == 0 and loss[3] == 0 and loss[5] == 0


def test_ties_have_the_probability_of_rao_and_kupper():
    threshold = 0.4
    loss = ranking_loss(SCORES, UNITS, PLACES, torch.zeros(9).double(), threshold)
    theta, (a, b) = math.exp(threshold), torch.exp(SCORES[7:] - SCORES[7]).tolist()
    tie = (theta**2 - 1) * a * b / ((a + theta * b) * (theta * a + b))
    assert float(loss[7:].sum()) == pytest.approx(-math.log(tie), rel=1e-9)
    won, lost = a / (a + theta * b), b / (b + theta * a)
    assert tie + won + lost == pytest.approx(1.0)  # and a win of the same two is the rest
    as_win = ranking_loss(SCORES[7:], torch.tensor([1, 1]), torch.tensor([0, 1]), torch.zeros(2).double(), threshold)
    assert float(as_win.sum()) == pytest.approx(-math.log(won), rel=1e-9)


def test_calibration_error_and_accuracy_are_those_of_a_loop():
    generator = torch.Generator().manual_seed(5)
    score = torch.randn(400, generator=generator).double() * 2
    unit, place = torch.arange(400) // 2 + 1, torch.arange(400) % 2
    bins = [[] for _ in range(BINS)]
    for chosen, rejected in score.view(-1, 2).tolist():
        p = 1 / (1 + math.exp(-abs(chosen - rejected)))
        bins[min(BINS - 1, int((p - 0.5) * 2 * BINS))].append((p, chosen > rejected))
    expected = sum(abs(sum(p for p, _ in found) - sum(right for _, right in found)) for found in bins) / 200
    halves = [ranking_sums(score[part], unit[part], place[part]) for part in (slice(0, 130), slice(130, 400))]
    sums = {name: float(halves[0][name] + halves[1][name]) for name in halves[0]}
    assert calibration_error(sums) == pytest.approx(expected, rel=1e-9)
    assert sums["accuracy_sum"] / sums["pairs_sum"] == pytest.approx(sum(right for found in bins for _, right in found) / 200)
    assert math.isnan(calibration_error({**sums, "pairs_sum": 0.0}))
