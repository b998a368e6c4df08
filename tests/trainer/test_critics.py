"""Several critics: stage 5 against loops in Python floats, the part of the samples that each learns from, and the entropy bonus."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megappo.config.role_sections import AnyCriticConfig, PolicyConfig
from megappo.config.schema import AlgorithmConfig, DataConfig, TrainConfig
from megappo.data.packing import PackedBatch, cu_seqlens_of
from megappo.parallel.shares import Shares
from megappo.trainer.advantages import add_advantages
from megappo.trainer.build_roles import Roles
from megappo.trainer.critics import BONUS, DISAGREEMENT
from megappo.trainer.experience.experience import Experience
from megappo.trainer.roles import Policy
from megappo.trainer.updates import Updates
from tests.trainer.test_advantages_and_updates import Recording

# (given, sampled) tokens of each turn of a response; the third has no sampled token.
TURNS = [[(2, 3), (2, 1)], [(1, 1)], [(3, 0)], [(1, 2), (1, 2), (2, 3)], [(2, 4)], [(1, 3)]]
SCORE = [1.0, -0.5, 0.25, 2.0, 0.0, 1.5]
GAMMA, LAM, LAM_VALUE = 0.9, 0.8, 0.6
ENDS = {"critic": "", "critic_b": ".b"}


def batch_of(*, alike: bool = False) -> PackedBatch:
    """Random values of two critics; alike: both have the same. NaN where no token was sampled, but for the values."""
    mask = torch.tensor([flag for turns in TURNS for given, sampled in turns for flag in [False] * given + [True] * sampled])
    generator = torch.Generator().manual_seed(7)
    logprob = torch.where(mask, -torch.rand(len(mask), generator=generator), torch.nan)
    fields = {end: torch.randn(len(mask), generator=generator) for end in ENDS.values()}
    ends = {end: torch.randn(len(TURNS), generator=generator) for end in ENDS.values()}
    if alike:
        fields[".b"] = fields[""]
    return PackedBatch(
        tokens=torch.arange(len(mask)),
        cu_seqlens=cu_seqlens_of([sum(map(sum, turns)) for turns in TURNS]),
        token_fields={"response_mask": mask, "logprob": logprob, **{f"value{end}": x for end, x in fields.items()}},
        sequence_fields={
            "truncated": torch.arange(len(TURNS)) % 2 == 1,
            **{f"bootstrap{end}": x for end, x in ends.items()},
        },
    )


def asked(**changes: Any) -> AlgorithmConfig:
    fixed = {"gamma": GAMMA, "lam": LAM, "lam_value": LAM_VALUE, "kl": {"placement": "none"}, "whiten_advantages": False}
    return AlgorithmConfig(**{**fixed, **changes})


def shaped(batch: PackedBatch, algorithm: AlgorithmConfig) -> tuple[PackedBatch, dict[str, float]]:
    result = add_advantages(Experience.of_whole(batch), torch.tensor(SCORE), 0.0, algorithm)
    return result.experience.batch, result.metrics


def places_of(batch: PackedBatch) -> list[list[int]]:
    """Sampled tokens of each response."""
    cuts = batch.cu_seqlens.tolist()
    return [[t for t in range(start, end) if batch["response_mask"][t]] for start, end in zip(cuts, cuts[1:])]


def gae_by_hand(batch: PackedBatch, value: Callable[[int], float], last: Callable[[int], float], lam: float) -> list[float]:
    """Advantages of all tokens from the values of tokens and of the ends of responses."""
    found = [0.0] * batch.num_tokens
    for b, places in enumerate(places_of(batch)):
        carried, following = 0.0, last(b)
        for t in reversed(places):
            reward = SCORE[b] if t == places[-1] else 0.0
            carried = reward + GAMMA * following - value(t) + GAMMA * lam * carried
            following, found[t] = value(t), carried
    return found


def close(one: Tensor, other: list[float]) -> bool:
    return all(abs(x - y) < 1e-5 for x, y in zip(one.tolist(), other, strict=True))


@pytest.mark.parametrize("bootstrap", [False, True], ids=["cut to 0", "bootstrapped"])
@pytest.mark.parametrize("how", ["mean", "min"])
def test_the_joint_value_makes_the_advantages_and_its_own_each_critics_returns(how: str, bootstrap: bool) -> None:
    batch = batch_of()
    found, metrics = shaped(batch, asked(value_of_critics=how, bootstrap_truncated=bootstrap))

    def joint(name: str, at: int) -> float:
        each = [float(batch[f"{name}{end}"][at]) for end in ENDS.values()]
        return min(each) if how == "min" else math.fsum(each) / len(each)

    def end_of(name: str, b: int, number: Callable[[str, int], float]) -> float:
        return number(name, b) if bootstrap and b % 2 else 0.0

    want = gae_by_hand(batch, lambda t: joint("value", t), lambda b: end_of("bootstrap", b, joint), LAM)
    assert close(found["advantage"], want)
    returns = {}
    for end in ENDS.values():

        def own(name: str, at: int, end: str = end) -> float:
            return float(batch[f"{name}{end}"][at])

        deltas = gae_by_hand(batch, lambda t: own("value", t), lambda b: end_of("bootstrap", b, own), LAM_VALUE)
        sampled = {t for places in places_of(batch) for t in places}
        returns[end] = [delta + own("value", t) if t in sampled else 0.0 for t, delta in enumerate(deltas)]
        assert close(found[f"returns{end}"], returns[end])
    assert not close(found["returns"], returns[".b"]), "the values of the wrong critic are noticed"
    gaps = [abs(float(batch["value"][t] - batch["value.b"][t])) / 2 for places in places_of(batch) for t in places]
    assert metrics["critics/disagreement"] == pytest.approx(math.fsum(gaps) / len(gaps), rel=1e-6)


def test_two_critics_that_agree_are_one() -> None:
    both = batch_of(alike=True)
    alone = PackedBatch(
        both.tokens,
        both.cu_seqlens,
        {name: both[name] for name in ("response_mask", "logprob", "value")},
        {name: both[name] for name in ("truncated", "bootstrap")},
    )
    one, figures = shaped(alone, asked(whiten_advantages=True))
    two, metrics = shaped(both, asked(whiten_advantages=True, disagreement_mask_ratio=0.9, disagreement_entropy_ratio=0.9))
    assert all(torch.equal(one[name], two[name]) for name in ("advantage", "returns", "reward"))
    assert torch.equal(two["returns"], two["returns.b"]) and DISAGREEMENT not in one and figures == {}
    zero = {"critics/disagreement": 0.0, "critics/masked_advantages": 0.0, "critics/filtered_entropy": 0.0}
    assert metrics == zero, "tokens that are all tied are neither the least nor the most disputed"


@pytest.mark.parametrize("ratio", [0.2, 0.5])
def test_tokens_that_critics_agree_on_teach_nothing_and_disputed_ones_have_no_bonus(ratio: float) -> None:
    batch = batch_of()
    plain, _ = shaped(batch, asked())
    found, metrics = shaped(batch, asked(disagreement_mask_ratio=ratio, disagreement_entropy_ratio=ratio))
    sampled = [t for places in places_of(batch) for t in places]
    by_gap = sorted(sampled, key=lambda t: abs(float(batch["value"][t]) - float(batch["value.b"][t])))
    count = int(ratio * len(sampled))
    assert 0 < count < len(sampled)
    masked, filtered = by_gap[:count], by_gap[-count:]
    want = plain["advantage"].clone()
    want[masked] = 0.0
    assert torch.equal(found["advantage"], want) and bool((plain["advantage"][masked] != 0).all())
    assert {t for t in sampled if found[BONUS][t] == 0} == set(filtered) and set(found[BONUS].tolist()) == {0.0, 1.0}
    share = pytest.approx(count / len(sampled))
    assert metrics["critics/masked_advantages"] == share and metrics["critics/filtered_entropy"] == share
    assert torch.equal(found["raw_advantage"], plain["raw_advantage"]) and torch.equal(found["returns"], plain["returns"])


# ---------------------------------------------------------------------------------------------------------------- updates


def test_critics_learn_from_disjoint_samples_that_share_every_prompt() -> None:
    """12 samples of three prompts, 4 of each in a row; the policy takes all in two mini-batches of 6, a critic half in two of 3."""
    lengths = [2 + b % 4 for b in range(12)]
    mask = torch.cat([torch.arange(n) > 0 for n in lengths])
    batch = PackedBatch(torch.arange(12).repeat_interleave(torch.tensor(lengths)), cu_seqlens_of(lengths), {"response_mask": mask})
    names = ("logprob", "advantage", "value", "returns", "value.b", "returns.b")
    batch = batch.with_fields(dict.fromkeys(names, torch.zeros(batch.num_tokens)), {"truncated": torch.zeros(12, dtype=torch.bool)})
    config = TrainConfig(
        policy=PolicyConfig(model="m"),
        critics={"b": AnyCriticConfig(ppo_epochs=2)},
        data=DataConfig(train="t"),
        algorithm=AlgorithmConfig(mini_batch_size=6),
    )
    models = {name: Recording() for name in ("policy", "critic", "critic_b")}
    roles = Roles(models, {}, tuple(models), dict.fromkeys(models, Shares.of_ranks([0])))
    assert roles.update_order == ("critic", "critic_b", "policy")
    updates = Updates(Experience.of_whole(batch), roles, tuple(models), config, 5)
    for name in roles.update_order:
        updates.run(name)
    seen = {name: [sorted(mini) for mini in model.seen] for name, model in models.items()}
    assert [len(mini) for mini in seen["critic"]] == [3, 3] and [len(mini) for mini in seen["critic_b"]] == [3] * 4
    first, second = sum(seen["critic"], []), sum(seen["critic_b"][:2], [])
    assert sorted(first) == list(range(0, 12, 2)) and sorted(second) == list(range(1, 12, 2))
    assert sorted(sum(seen["critic_b"][2:], [])) == sorted(second) and seen["critic_b"][:2] != seen["critic_b"][2:]
    assert sorted(sum(seen["policy"], [])) == list(range(12))
    per_prompt = [[len([b for b in part if b // 4 == prompt]) for prompt in range(3)] for part in (first, second)]
    assert per_prompt == [[2, 2, 2]] * 2, "every critic knows every prompt"


# ----------------------------------------------------------------------------------------------------------- entropy bonus


class Leaves:
    """A model's output whose log-probs and entropies are leaves. fused: the loss is called with them, as by the fused op."""

    def __init__(self, num_tokens: int, fused: bool) -> None:
        self.logprob = torch.full((num_tokens,), -1.0, requires_grad=True)
        self.entropy = torch.full((num_tokens,), 2.0, requires_grad=True)
        self.fused_loss = self._fused if fused else None

    def logprobs(self, query: Any) -> tuple[Tensor, Tensor]:
        return self.logprob, self.entropy

    def _fused(self, query: Any, token_loss: Any) -> Any:
        return token_loss(slice(None), self.logprob, self.entropy)


@pytest.mark.parametrize("fused", [False, True])
def test_tokens_without_bonus_have_no_gradient_of_their_entropy(fused: bool) -> None:
    algorithm = asked(entropy={"type": "bonus", "coef": 0.5}, disagreement_entropy_ratio=0.2)
    ones = torch.ones(5)
    bonus = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0])
    fields = {"logprob": -ones, "advantage": ones, "weight": torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]), BONUS: bonus}
    micro = PackedBatch(torch.arange(5), cu_seqlens_of([3, 2]), fields)
    output = Leaves(5, fused)
    Policy(None, 1.0, algorithm)._loss_of(output, micro).loss_sum.backward()  # type: ignore[arg-type,union-attr]
    # Row t - 1 of the output is about token t; the first tokens of both sequences are about none.
    assert output.entropy.grad is not None and output.entropy.grad.tolist() == [-0.5, 0.0, 0.0, 0.0, 0.0]
    assert output.logprob.grad is not None and (output.logprob.grad != 0).tolist() == [True, True, False, True, False]
