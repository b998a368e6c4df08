"""Limits of waiting for a rank that generates late: the limits of the run reach the engine, and its ranks meet first."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.config.run_sections import TimeoutsConfig
from megappo.config.schema import RolloutConfig
from megappo.parallel.meeting import RankIsLate
from megappo.rollout import vllm_engine
from megappo.rollout.build import build_rollout
from megappo.rollout.types import Request, SamplingParams

TIMEOUTS = TimeoutsConfig(start_s=11, pass_s=5, meeting_s=7)


@pytest.mark.parametrize(
    "subworld, work",
    [
        (None, "generation"),
        (SimpleNamespace(ranks=(4, 6), entered=nullcontext), r"generation \(counted from 0 on ranks \[4, 6\]\)"),
    ],
)
def test_ranks_meet_before_a_generation(monkeypatch: pytest.MonkeyPatch, subworld: Any, work: str) -> None:
    """A rank that does not come is told by the meeting; nothing was asked of vLLM by then."""

    def meet(before: str, limit_s: float) -> None:
        raise RankIsLate(f"{before} {limit_s}")

    monkeypatch.setattr(vllm_engine, "meet", meet)
    engine = object.__new__(vllm_engine.VllmEngine)
    engine._version, engine._timeouts, engine._max_model_len, engine._subworld = 1, TIMEOUTS, 16, subworld
    engine._memory = SimpleNamespace(weights_asleep=False)
    with pytest.raises(RankIsLate, match=f"^{work} 7.0$"):
        engine.generate([Request((3, 4), 0)], SamplingParams(max_tokens=4))


def test_the_engine_has_the_limits_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Engine:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given.update(kwargs)

        def connect(self, *args: Any) -> None:
            pass

    monkeypatch.setattr(vllm_engine, "VllmEngine", Engine)
    policy: Any = None
    tokenizer: Any = SimpleNamespace(eos_ids=(2,), decode=str)
    build_rollout(
        RolloutConfig(),
        policy,
        model="",
        tokenizer=tokenizer,
        max_sequence_tokens=8 + RolloutConfig().max_response_tokens,
        policy_dtype="fp32",
        seed=0,
        device=torch.device("cpu"),
        timeouts=TIMEOUTS,
    )
    assert given["timeouts"] is TIMEOUTS
