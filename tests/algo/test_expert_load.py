"""Figures about expert load, against numbers worked out by hand."""

import pytest
import torch

from megappo.algo.expert_load import expert_load


def test_even_load_has_no_violation_and_nothing_idle() -> None:
    assert expert_load(torch.full((2, 4), 5.0)) == (0.0, 0.0)


def test_busiest_expert_is_compared_with_the_even_share_of_its_own_layer() -> None:
    load = expert_load(torch.tensor([[4.0, 4.0, 4.0, 4.0], [0.0, 0.0, 0.0, 0.0], [0.0, 2.0, 2.0, 4.0]]))
    assert load.max_violation == pytest.approx(1.0)  # 4 against 8 / 4
    assert load.idle == pytest.approx(1 / 8)  # of two sparse layers; the row of zeros is a dense one
