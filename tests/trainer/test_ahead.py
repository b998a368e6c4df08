"""Prompts that are drawn before their step: the loader's order, every one once, over any resume; and what the console says."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megappo.data.loader import PromptLoader
from megappo.telemetry.metrics import Metric
from megappo.trainer import ahead
from megappo.trainer.ahead import Accounts, AheadLoader


def loader_of(staleness: int, steps: int, *, n: int = 2, prompts: int = 3) -> AheadLoader:
    return AheadLoader(PromptLoader(7, prompts, shuffle=True, seed=5), staleness, n, steps)


def trained(loader: AheadLoader, steps: range) -> list[list[int]]:
    """Train on steps: rows of each."""
    found = []
    for step in steps:
        loader.admit(step)
        found.append(loader.rows.pop(step))
        loader.trained += loader.n * len(found[-1])
    return found


def test_steps_begin_in_order_at_most_staleness_ahead_and_every_resume_goes_on_with_them() -> None:
    for staleness, steps in itertools.product(range(5), range(1, 8)):
        plain, whole = PromptLoader(7, 3, shuffle=True, seed=5), loader_of(staleness, steps)
        for step in range(1, steps + 1):
            first, last = (min(step - 1 + more, steps) for more in (staleness if step > 1 else 0, staleness + 1))
            assert list(whole.admit(step)) == list(range(first + 1, last + 1))
            assert whole.rows.pop(step) == plain.next_step()
        for stopped in range(steps + 1):
            first, second = loader_of(staleness, steps), loader_of(staleness, steps)
            rows = trained(first, range(1, stopped + 1))
            second.load_state_dict(first.state_dict())
            rows += trained(second, range(stopped + 1, steps + 1))
            assert rows == trained(loader_of(0, steps), range(1, steps + 1))
            assert second.ledger() == f"samples: {6 * steps} asked for = {6 * steps} trained on + 0 left out + 0 in flight"


def test_a_resume_that_would_lose_what_has_begun_is_refused() -> None:
    begun = loader_of(2, 9)
    trained(begun, range(1, 4))
    state = begun.state_dict()
    assert begun.ledger() == "samples: 30 asked for = 18 trained on + 0 left out + 12 in flight"
    with pytest.raises(ValueError, match="rollout.max_staleness is null, and the responses of 2 steps have begun; set it to 2"):
        PromptLoader(7, 3, shuffle=True, seed=5).load_state_dict(state)
    for other, words in (
        (loader_of(1, 9), "rollout.max_staleness = 1, and the responses of 2 steps have begun; set it to 2"),
        (loader_of(2, 9, n=3), "rollout.samples_per_prompt changed"),
        (loader_of(2, 9, prompts=4), "data.prompts_per_step changed"),
    ):
        with pytest.raises(ValueError, match=f"cannot resume: {words}"):
            other.load_state_dict(state)
    begun.rows.pop(4)
    with pytest.raises(RuntimeError, match="lost or trained on twice: 30 asked for, 18 trained on [+] 0 left out [+] 6 in flight"):
        begun.ledger()
    with_nothing_begun = loader_of(0, 9)
    trained(with_nothing_begun, range(1, 4))
    PromptLoader(7, 3, shuffle=True, seed=5).load_state_dict(with_nothing_begun.state_dict())


def test_the_console_hears_once_which_half_waits_and_what_would_help() -> None:
    said: list[str] = []
    log: Any = SimpleNamespace(note=said.append)
    table = SimpleNamespace(ends=torch.ones(2, dtype=torch.bool))
    clock = itertools.count(step=1.0)
    with mock.patch.object(ahead.time, "monotonic", lambda: next(clock)):
        accounts, ten = Accounts(loader_of(1, 99), log), ahead.IDLE_STEPS

        def steps(waited: float, idle: float) -> None:
            for _ in range(ten):
                figures = {Metric.WAITED.value: waited, Metric.ROLLOUT_IDLE.value: idle}
                rollout = SimpleNamespace(left_out=None, figures=figures)
                record: Any = SimpleNamespace(rollout=rollout, experience=SimpleNamespace(table=table))
                accounts.after_log(record)

        steps(0.0, 0.019)  # of a second, in which there are ten steps
        assert said == []
        steps(0.03, 0.0)
        steps(0.04, 0.0)
        steps(0.0, 0.05)
        steps(0.0, 0.0)
        steps(0.03, 0.04)
    start = "half waits {} of the time for the other: {}"
    assert said == [
        "the training " + start.format("30%", "move ranks to rollout.ranks"),
        "the rollout " + start.format("50%", "move ranks from rollout.ranks"),
        "the rollout " + start.format("40%", "raise rollout.max_staleness"),
    ]
