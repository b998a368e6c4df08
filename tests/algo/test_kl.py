import math
import re
from pathlib import Path
from typing import get_args

import pytest
import torch

from megappo.algo import losses
from megappo.algo.aggregation import AGGREGATIONS
from megappo.algo.kl import ESTIMATORS, MAX_LOG_RATIO, AdaptiveKL, FixedKL, kl_estimate, kl_loss
from megappo.algo.losses import POLICY_SUMS
from megappo.config.schema import AlgorithmConfig, RewardKLConfig
from megappo.ops.advantages import Rewards, token_advantages


def expectation(kind, logits, ref_logits):
    """E over the policy's own distribution of the estimate, exactly, with the log-probs differentiable."""
    lp, ref = logits.log_softmax(0), ref_logits.log_softmax(0)
    return (lp.exp().detach() * kl_estimate(lp, ref, kind)).sum()


def distributions():
    p, q = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (0.3 * p).requires_grad_(), 0.3 * q


def true_kl(logits, ref_logits):
    lp, ref = logits.log_softmax(0), ref_logits.log_softmax(0)
    return (lp.exp() * (lp - ref)).sum()


@pytest.mark.parametrize("kind,unbiased", [("k1", True), ("k2", False), ("k3", True)])
def test_value_of_the_estimators(kind, unbiased):
    p, q = distributions()
    value, kl = float(expectation(kind, p, q).detach()), float(true_kl(p, q).detach())
    assert value == pytest.approx(kl, rel=1e-9 if unbiased else 0.2)
    assert unbiased or value != pytest.approx(kl, rel=1e-6)


def test_gradients_are_what_the_docstring_says():
    p, q = distributions()
    k1, k2, k3 = (torch.autograd.grad(expectation(kind, p, q), p)[0] for kind in ("k1", "k2", "k3"))
    torch.testing.assert_close(k1, torch.zeros_like(k1))
    torch.testing.assert_close(k2, torch.autograd.grad(true_kl(p, q), p)[0])
    torch.testing.assert_close(k3, torch.autograd.grad(true_kl(q, p), p)[0])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_reward_op_uses_the_same_estimators(kind):
    lp, ref = -torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) * 5
    rewards = Rewards(lp, ref, torch.zeros(1), kl_estimator=kind, kl_coef=0.5)
    reward, *_ = token_advantages(rewards, torch.zeros(9), torch.ones(9, dtype=torch.bool), torch.tensor([0, 9]))
    torch.testing.assert_close(reward, -0.5 * kl_estimate(lp.double(), ref.double(), kind).float())


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_loss_ignores_masked_garbage(kind):
    lp = torch.tensor([-1.0, torch.nan, -2.0, -torch.inf], requires_grad=True)
    ref = torch.tensor([-1.5, -1.0, torch.inf, -torch.inf])
    loss, metrics = kl_loss(lp, ref, torch.tensor([0.5, 0.0, 0.0, 0.0]), kind)
    loss.backward()
    loss = loss.detach()
    assert float(loss) == pytest.approx(0.5 * float(kl_estimate(torch.tensor(-1.0), torch.tensor(-1.5), kind)))
    assert lp.grad.isfinite().all() and float(metrics["kl_loss_sum"]) == pytest.approx(2 * float(loss))


def test_k3_of_extreme_ratios_is_finite():
    assert kl_estimate(torch.tensor([-1e4, 1e4]), torch.zeros(2), "k3").isfinite().all()


def test_the_compiled_kernels_cap_where_the_formulas_do():
    """C++ has its own formulas; the constant in them is this one, in one header."""
    sources = [path.read_text() for path in (Path(__file__).parents[2] / "csrc").rglob("*.*") if path.suffix != ".pyc"]
    found = [number for source in sources for number in re.findall(r"kMaxLogRatio = ([0-9.]+)f?;", source)]
    assert [float(number) for number in found] == [MAX_LOG_RATIO]


def test_the_cap_is_the_same_for_the_ratio_of_the_policy_loss():
    zero, one = torch.zeros(1), torch.ones(1)
    _, _, sums, (ratio,) = losses.policy_loss(100.0 * one, zero, one, one, 0.2, 0.2, None)
    assert float(ratio) == pytest.approx(math.exp(MAX_LOG_RATIO))
    approx_kl = sums[POLICY_SUMS.index("approx_kl_sum")]
    assert float(approx_kl) == float(kl_estimate(zero.double(), MAX_LOG_RATIO * one.double(), "k3"))


def test_the_configuration_offers_these_estimators_and_aggregations():
    """The schema imports nothing, so it names them again."""
    assert get_args(RewardKLConfig.model_fields["estimator"].annotation) == tuple(ESTIMATORS)
    assert get_args(AlgorithmConfig.model_fields["loss_aggregation"].annotation) == AGGREGATIONS


def test_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k5")


def test_adaptive_controller_steers_to_the_target():
    controller = AdaptiveKL(coef=0.1, target=6.0, horizon=1000)
    controller.update(12.0, 100)
    assert controller.coef == pytest.approx(0.1 * (1 + 0.2 * 0.1))  # the error of +1 is clipped to 0.2
    controller.update(6.0, 100)
    assert controller.coef == pytest.approx(0.102)
    controller.update(0.0, 100)
    assert controller.coef == pytest.approx(0.102 * 0.98)


def test_adaptive_controller_resumes_and_the_fixed_one_keeps_the_configuration():
    adaptive, resumed = AdaptiveKL(0.1, 6.0, 1000), AdaptiveKL(0.5, 6.0, 1000)
    adaptive.update(9.0, 50)
    resumed.load_state_dict(adaptive.state_dict())
    assert resumed == adaptive
    fixed = FixedKL(0.3)
    fixed.update(100.0, 10)
    fixed.load_state_dict({"coef": 9.0})
    assert fixed.state_dict() == {"coef": 0.3}
