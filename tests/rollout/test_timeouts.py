"""Limits of waiting for a rank that generates late: the limits of the run reach the engine, and its ranks meet first."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.config.role_sections import PolicyConfig
from megappo.config.run_sections import RunConfig, TimeoutsConfig
from megappo.config.schema import RolloutConfig, TrainConfig
from megappo.parallel.meeting import RankIsLate
from megappo.rollout import generation, vllm_engine
from megappo.rollout.build import build_rollout
from megappo.rollout.megatron_engine import MegatronRollout
from megappo.rollout.types import Replica, SamplingParams

TIMEOUTS = TimeoutsConfig(start_s=11, pass_s=5, meeting_s=7)


def test_ranks_meet_before_a_generation() -> None:
    """A rank that does not come is told by the meeting; no request was made or submitted by then."""

    def meet(before: str) -> None:
        raise RankIsLate(before)

    class Requests(list):
        def __getitem__(self, number: Any) -> Any:
            raise AssertionError("a request was read")

    engine: Any = SimpleNamespace(replica=Replica(0, 2, None, 4), meet=meet, serving=contextlib.nullcontext)
    with pytest.raises(RankIsLate, match="^generation$"):
        generation.generate(engine, Requests([None] * 3), SamplingParams(max_tokens=4))


@pytest.mark.parametrize("name", ["vllm", "megatron"])
def test_engines_that_hold_requests_of_a_failed_generation_refuse_another(name: str) -> None:
    engine: Any = object.__new__({"vllm": vllm_engine.VllmEngine, "megatron": MegatronRollout}[name])
    engine._version, engine._memory, engine._asked = 1, SimpleNamespace(weights_asleep=False), {"3": None}
    engine._growing = [None]
    with pytest.raises(RuntimeError, match="holds 1 requests of a generation that failed"), engine.serving():
        pass


def test_the_engine_has_the_limits_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Engine:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given.update(kwargs)

        def connect(self, *args: Any) -> None:
            pass

    monkeypatch.setattr(vllm_engine, "VllmEngine", Engine)
    policy: Any = SimpleNamespace(arch=None)
    tokenizer: Any = SimpleNamespace(eos_ids=(2,), decode=str)
    build_rollout(
        TrainConfig.model_construct(rollout=RolloutConfig(), policy=PolicyConfig(model="model"), run=RunConfig(timeouts=TIMEOUTS)),
        policy,
        tokenizer=tokenizer,
        max_sequence_tokens=8 + RolloutConfig().max_response_tokens,
        device=torch.device("cpu"),
    )
    assert given["timeouts"] == TIMEOUTS != TimeoutsConfig()
