"""Values of several critics against loops in Python floats."""

import math

import pytest
import torch

from megappo.algo.whitening import aggregate, disagreement


@pytest.mark.parametrize("num", [2, 3, 5])
def test_aggregate_and_disagreement_are_those_of_the_loops(num: int) -> None:
    generator = torch.Generator().manual_seed(num)
    values = [torch.randn(50, generator=generator) for _ in range(num)]
    mean, least, deviation = aggregate(values, "mean"), aggregate(values, "min"), disagreement(values)
    assert mean.dtype == least.dtype == deviation.dtype == torch.float32
    for t in range(50):
        each = [float(one[t]) for one in values]
        middle = math.fsum(each) / num
        assert float(mean[t]) == pytest.approx(middle, rel=1e-7, abs=1e-9) and float(least[t]) == min(each)
        assert float(deviation[t]) == pytest.approx(math.sqrt(math.fsum((x - middle) ** 2 for x in each) / num), rel=1e-6)


def test_one_critic_is_itself_to_the_bit() -> None:
    value = torch.randn(20, generator=torch.Generator().manual_seed(0))
    assert aggregate([value], "mean") is value and aggregate([value], "min") is value


def test_the_order_of_the_critics_changes_no_bit() -> None:
    values = list(torch.randn(3, 1000, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(aggregate(values, "mean"), aggregate(values[::-1], "mean"))
    assert torch.equal(disagreement([values[0]] * 3), torch.zeros(1000)), "critics that agree do not differ by rounding"
