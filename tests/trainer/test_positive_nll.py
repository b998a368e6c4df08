"""The negative log-likelihood of correct responses in the policy's loss: VAPO's formula in fp64, for every aggregation."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megappo.engine.base import Engine
from megappo.parallel.shares import Shares
from megappo.trainer.experience.experience import Experience
from megappo.trainer.roles import NLL_WEIGHT, Policy, policy_reads
from megappo.trainer.updates import Counting, mini_batches, order_of_epoch, positive_samples
from tests.trainer.test_estimators import algorithm, shared_schedule, whole_batch

COEF, SCORES = 0.3, (1.0, 0.9, 0.0, 1.0, 0.9, 0.0, 0.89)
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "fixed-length")


def asked(mode: str, coef: float = COEF) -> Any:
    return algorithm("rloo", loss_aggregation=mode, mini_batch_size=4, positive_nll={"coef": coef, "score": 0.9} if coef else None)


def minis_of(mode: str) -> tuple[list[Tensor], list[Any], Tensor]:
    """(numbers of the samples of each mini-batch, the mini-batches, [N] samples that are correct)."""
    experience = Experience.of_whole(whole_batch())
    positive = positive_samples(experience, torch.tensor(SCORES), asked(mode))
    assert positive is not None
    minis = list(
        mini_batches(experience, Shares.of_ranks([0]), None, shared_schedule(asked(mode)), 9, 7, Counting(positive=positive))
    )
    return list(order_of_epoch(experience.table.num_samples, 7).split(4)), minis, positive


def gradient(policy: Policy, fields: dict[str, Tensor], logprob: Tensor, denominator: float) -> Tensor:
    leaf = logprob.clone().requires_grad_()
    loss, _ = policy._token_loss(fields, leaf, None)
    (loss / denominator).backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("mode", MODES)
def test_it_adds_the_mean_over_the_tokens_of_correct_responses(mode: str) -> None:
    chosen, minis, positive = minis_of(mode)
    assert positive.tolist() == [score >= 0.9 for score in SCORES], "a score of 0.9 in fp32 is one of 0.9"
    found = 0
    for numbers, mini in zip(chosen, minis, strict=True):
        share, lengths = mini.share, mini.share.lengths
        logprob = share["logprob"] + 0.01 * torch.randn(share.num_tokens, generator=torch.Generator().manual_seed(1))
        advantage = torch.where(share["response_mask"], torch.randn(share.num_tokens), 0.0)
        fields = {name: share[name] for name in policy_reads(asked(mode)) if name != "advantage"} | {"advantage": advantage}
        engine = cast(Engine, None)
        with_nll = gradient(Policy(engine, 1.0, asked(mode)), fields, logprob, mini.denominator)
        plain = gradient(Policy(engine, 1.0, asked(mode, 0.0)), fields, logprob, mini.denominator)

        correct = share["response_mask"] & positive[numbers].repeat_interleave(lengths)
        exact = logprob.double().requires_grad_()
        (COEF * -(exact * correct).sum() / max(1, int(correct.sum()))).backward()
        assert exact.grad is not None
        torch.testing.assert_close((with_nll - plain).double(), exact.grad, rtol=1e-5, atol=1e-6)
        assert (share[NLL_WEIGHT] != 0).equal(correct)
        found += int(correct.sum())
    assert found > 0


def test_a_mini_batch_without_a_correct_response_is_as_if_it_were_off() -> None:
    experience = Experience.of_whole(whole_batch())
    none = torch.zeros(len(SCORES), dtype=torch.bool)
    for mini in mini_batches(
        experience, Shares.of_ranks([0]), None, shared_schedule(asked("token-mean")), 9, 7, Counting(positive=none)
    ):
        assert not mini.share[NLL_WEIGHT].any()
    assert positive_samples(experience, torch.tensor(SCORES), asked("token-mean", 0.0)) is None
