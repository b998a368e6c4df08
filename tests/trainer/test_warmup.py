"""The critic's warm-up: its steps, its lambda, its early end."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.config.layout_checks import only_pretrains, trained_sections
from megappo.config.loading import validated
from megappo.config.role_sections import CriticConfig, PolicyConfig
from megappo.config.run_sections import TrainerConfig
from megappo.config.schema import AlgorithmConfig, DataConfig, TrainConfig
from megappo.trainer import training_side
from megappo.trainer.run import Steps
from megappo.trainer.sampler_check import Agreement, SamplerMismatch
from megappo.trainer.state import TrainerState


def config_of(steps: int | None = 10, **critic: object) -> TrainConfig:
    return TrainConfig(
        policy=PolicyConfig(model="m"),
        critic=validated(critic, CriticConfig),
        data=DataConfig(train="t"),
        algorithm=AlgorithmConfig(lam=0.9, lam_value=0.8),
        trainer=TrainerConfig(steps=steps),
    )


def covered(warmup: Steps) -> list[int]:
    return [step for step in range(1, 11) if warmup.warm_up(step)]


def test_its_steps_are_the_first():
    assert covered(Steps(config_of(), TrainerState(), 10)) == []
    assert covered(Steps(config_of(warmup={"steps": 3}), TrainerState(), 10)) == [1, 2, 3]
    assert covered(Steps(config_of(warmup={"steps": 3}), TrainerState(warmup_ended=2), 10)) == [1, 2]


def test_its_lambda_is_of_the_critics_returns_alone():
    warmup = Steps(config_of(warmup={"steps": 3, "lam": 1.0}), TrainerState(), 10)
    assert [warmup.algorithm(step).lam_value for step in (1, 3, 4)] == [1.0, 1.0, 0.8]
    assert {warmup.algorithm(step).lam for step in (1, 4)} == {0.9}
    same = Steps(config_of(warmup={"steps": 3}), TrainerState(), 10)
    assert same.algorithm(1).lam_value == 0.8


@pytest.mark.parametrize("explained, ends", [(0.79, False), (0.8, True), (math.nan, False), (-3.0, False)])
def test_it_ends_once_the_values_explain_enough(explained, ends):
    state = TrainerState()
    warmup = Steps(config_of(warmup={"steps": 5, "explained_variance": 0.8}), state, 10)
    assert warmup.end_warm_up_if_fitted(2, explained) is ends and state.warmup_ended == 2 * ends
    assert covered(warmup) == ([1, 2] if ends else [1, 2, 3, 4, 5])
    assert not warmup.end_warm_up_if_fitted(6, 0.99), "later steps end nothing"


def test_a_run_that_is_warm_up_alone_ends_with_it():
    pretraining = config_of(steps=5, warmup={"steps": 5})
    assert only_pretrains(pretraining) and list(trained_sections(pretraining)) == ["critic"]
    assert Steps(pretraining, TrainerState(), 5).last == 5
    assert Steps(pretraining, TrainerState(warmup_ended=2), 5).last == 2
    longer = config_of(steps=6, warmup={"steps": 5})
    assert not only_pretrains(longer) and list(trained_sections(longer)) == ["policy", "critic"]
    assert Steps(longer, TrainerState(warmup_ended=2), 6).last == 6
    assert not only_pretrains(config_of(steps=None, warmup={"steps": 5})), "the number of steps depends on the data"


def test_until_the_policy_has_trained_its_sampler_is_judged_by_tokens_of_any_age(monkeypatch):
    """Of weights one step old, which differ from the newest from step 4 on, the second after the warm-up."""
    table: Any = SimpleNamespace(ages=lambda step: torch.tensor([1]))
    experience: Any = SimpleNamespace(to=lambda device: experience, table=table, batch=None)
    monkeypatch.setattr(training_side, "add_model_outputs", lambda given, roles: given)
    monkeypatch.setattr(training_side, "compare_with_sampler", lambda *_: Agreement(0.5, 0.5))
    monkeypatch.setattr(training_side, "num_not_finite", lambda given: 0)
    config = config_of(warmup={"steps": 2})
    side: Any = SimpleNamespace(_config=config, _steps=Steps(config, TrainerState(), 10), _device=None, roles=None, _sampling=None)

    def judge(step: int) -> None:
        record: Any = SimpleNamespace(step=step, rollout=SimpleNamespace(sampler="vllm"), experience=experience)
        training_side.TrainingSide.add_logprobs(side, record)

    for step in (2, 3):
        with pytest.raises(SamplerMismatch, match=f"step {step}: "):
            judge(step)
    judge(4)
