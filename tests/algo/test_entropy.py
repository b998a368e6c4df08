"""The steered coefficient of the entropy bonus against the paper's rule, step by step."""

import pytest

from megappo.algo.objectives import steered

ENTROPIES = (0.5, 0.3, 0.19, 0.1, 0.1, 0.15, 0.2, 0.25, 0.1, 0.4, 0.4)
TARGET, STEP = 0.2, 0.005


def test_it_is_the_rule_of_the_paper():
    """alpha_k = c_k [e_k <= target]; c_k+1 = c_k + step if e_k < target, else c_k - step; here it is never below 0."""
    steps, c, coef = [], 0, 0.0
    for entropy in ENTROPIES:
        acting, coef = steered(coef, entropy, TARGET, STEP)
        assert acting == pytest.approx(c * STEP if entropy <= TARGET else 0.0)
        c = max(0, c + (1 if entropy < TARGET else -1))
        assert coef == pytest.approx(c * STEP)
        steps.append(c)
    assert max(steps) == 4 and steps[-1] == 1, "it rises and falls"


def test_it_does_not_fall_below_zero():
    assert steered(0.0, 1.0, TARGET, STEP) == (0.0, 0.0)
