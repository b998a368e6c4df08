"""Binned probability ratios: counts against a plain loop, additive over any split, and free of tokens without weight."""

import math

import numpy
import pytest
import torch

from megappo.algo.losses import policy_loss
from megappo.algo.summaries import LARGEST, LOG_EDGES, NAMES, SMALLEST, ratio_counts, ratio_histogram


def tokens(seed=0, count=500):
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (torch.rand(count, generator=generator) * 8 - 7)  # 1e-7 to 10
    old = -torch.rand(count, generator=generator) * 5
    new = old + scale * torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0)
    weight = (torch.rand(count, generator=generator) < 0.8).float() * 0.3
    return new, old, weight


def totals(parts):
    return {name: sum(float(part[name]) for part in parts) for name in NAMES}


def test_counts_are_those_of_a_histogram():
    new, old, weight = tokens()
    new[:4] = old[:4] + torch.tensor([-1e3, 1e3, 0.0, math.inf])
    weight[:4] = 1.0
    log_ratio = (new.double() - old.double())[weight != 0].numpy()
    edges = numpy.array([-math.inf, *LOG_EDGES[1:-1], math.inf])
    wanted, _ = numpy.histogram(log_ratio, edges)
    found = ratio_counts(new, old, weight)
    assert [int(found[name]) for name in NAMES] == wanted.tolist() and sum(wanted) == int((weight != 0).sum())
    assert LOG_EDGES[0] == pytest.approx(-LARGEST) and LOG_EDGES[-1] == pytest.approx(LARGEST)


def test_counts_add_over_any_split_and_leave_out_what_has_no_weight():
    new, old, weight = tokens()
    new[weight == 0] = math.nan
    whole = totals([ratio_counts(new, old, weight)])
    assert totals([ratio_counts(*part) for part in zip(new.split(37), old.split(37), weight.split(37))]) == whole
    assert totals([ratio_counts(new[:0], old[:0], weight[:0])]) == dict.fromkeys(NAMES, 0.0)
    assert sum(whole.values()) == int((weight != 0).sum())
    assert sum(totals([ratio_counts(new.nan_to_num(), old, torch.ones_like(old))]).values()) > sum(whole.values()), "control"


def test_the_histogram_keeps_what_is_filled():
    assert ratio_histogram({}) is None
    old = torch.tensor([-1.0, -1.0, -1.0])
    counts, edges = ratio_histogram(totals([ratio_counts(old + torch.tensor([0.0, 0.12, 0.12]), old, torch.ones(3))]))
    assert counts[0] == 1 and counts[-1] == 2 and sum(counts) == 3 and len(edges) == len(counts) + 1
    assert edges[0] == pytest.approx(math.exp(-SMALLEST)) and edges[-2] < math.exp(0.12) < edges[-1]


def test_counting_is_without_gradient():
    new, old, weight = tokens()
    new.requires_grad_()
    assert not any(count.requires_grad for count in ratio_counts(new, old, weight).values())
    loss = policy_loss(new, old, torch.ones_like(old), weight, 0.2, 0.2, None)[0]
    assert loss.requires_grad
