"""Prompts that are drawn before their step: the loader's order, every one once, over any resume; and what the console says."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megappo.data.ahead import AheadLoader
from megappo.data.loader import PassRates, PromptLoader
from megappo.telemetry.metrics import Metric
from megappo.trainer import ahead
from megappo.trainer.ahead import Accounts, AheadSource
from megappo.trainer.prompt_source import PromptSource


def loader_of(staleness: int, *, n: int = 2, prompts: int = 3) -> AheadLoader:
    return AheadLoader(7, prompts, shuffle=True, seed=5, staleness=staleness, n=n)


def trained(loader: AheadLoader, steps: range, last: int) -> list[list[int]]:
    """Train on steps: rows of each. last: step of the run."""
    found = []
    for step in steps:
        loader.admit(step, last)
        found.append(loader.rows.pop(step))
        loader.trained += loader.n * len(found[-1])
    return found


def test_steps_begin_in_order_at_most_staleness_ahead_and_every_resume_goes_on_with_them() -> None:
    for staleness, steps in itertools.product(range(5), range(1, 8)):
        plain, whole = PromptLoader(7, 3, shuffle=True, seed=5), loader_of(staleness)
        for step in range(1, steps + 1):
            first, last = (min(step - 1 + more, steps) for more in (staleness if step > 1 else 0, staleness + 1))
            assert list(whole.admit(step, steps)) == list(range(first + 1, last + 1))
            assert whole.rows.pop(step) == plain.next_step()
        for stopped in range(steps + 1):
            first, second = loader_of(staleness), loader_of(staleness)
            rows = trained(first, range(1, stopped + 1), steps)
            second.load_state_dict(first.state_dict())
            rows += trained(second, range(stopped + 1, steps + 1), steps)
            assert rows == trained(loader_of(0), range(1, steps + 1), steps)
            assert second.ledger() == f"samples: {6 * steps} asked for = {6 * steps} trained on + 0 left out + 0 in flight"


def test_a_resume_that_would_lose_what_has_begun_is_refused() -> None:
    begun = loader_of(2)
    trained(begun, range(1, 4), 9)
    state = begun.state_dict()
    assert begun.ledger() == "samples: 30 asked for = 18 trained on + 0 left out + 12 in flight"
    with pytest.raises(ValueError, match="rollout.max_staleness is null, and the responses of 2 steps have begun; set it to 2"):
        PromptLoader(7, 3, shuffle=True, seed=5).load_state_dict(state)
    for other, words in (
        (loader_of(1), "rollout.max_staleness = 1, and the responses of 2 steps have begun; set it to 2"),
        (loader_of(2, n=3), "rollout.samples_per_prompt changed"),
        (loader_of(2, prompts=4), "data.prompts_per_step changed"),
    ):
        with pytest.raises(ValueError, match=f"cannot resume: {words}"):
            other.load_state_dict(state)
    begun.rows.pop(4)
    with pytest.raises(RuntimeError, match="lost or trained on twice: 30 asked for, 18 trained on [+] 0 left out [+] 6 in flight"):
        begun.ledger()
    begun.rows[4] = begun.next_step()
    with pytest.raises(RuntimeError, match="lost or trained on twice: 36 asked for"):
        begun.ledger()
    begun.left_out["no spread"] += 6
    assert begun.ledger() == "samples: 36 asked for = 18 trained on + 6 left out (6 no spread) + 12 in flight"
    with_nothing_begun = loader_of(0)
    trained(with_nothing_begun, range(1, 4), 9)
    PromptLoader(7, 3, shuffle=True, seed=5).load_state_dict(with_nothing_begun.state_dict())


# ------------------------------------------------------------------------------------- prompts that are chosen by scores

PROMPTS, PLACES, SAMPLES, ROUNDS, STEPS = 12, 4, 2, 3, 9
Score = Callable[[int, int, int], float]
Choice = tuple[int, int, list[int]]
"""Step, samples before, rows."""


def score(step: int, row: int, sample: int) -> float:
    """Some prompts nearly always pass, some nearly never."""
    return float(random.Random(f"{step} {row} {sample}").random() < (row + 0.5) / PROMPTS)


def changed_in(changed: int) -> Score:
    return lambda step, row, sample: score(step + STEPS * (step == changed), row, sample)


def by_rates() -> dict[str, Any]:
    return {"shuffle": True, "seed": 5, "pass_rates": PassRates(PROMPTS, 0.5, 0.1, 5)}


def ahead_source(staleness: int) -> AheadSource:
    config: Any = SimpleNamespace(
        run=SimpleNamespace(seed=1), algorithm=SimpleNamespace(dynamic_sampling=None, estimator=SimpleNamespace(type="gae"))
    )
    loader = AheadLoader(PROMPTS, PLACES, staleness=staleness, n=SAMPLES, **by_rates())
    half: Any = mock.Mock()
    return AheadSource(config, range(PROMPTS), loader, STEPS, half, half)  # pyright: ignore[reportArgumentType]  rows serve


def choices(draw: Callable[[int, int, int], Sequence[int]], rates: PassRates | None, of: Score, steps: range) -> list[Choice]:
    """Take steps as `RolloutSide` does, with rounds for prompts whose samples score alike."""
    assert rates is not None
    found: list[Choice] = []
    for step in steps:
        left, before = PLACES, 0
        for _ in range(ROUNDS):
            if left:
                rows = list(draw(step, left, before))
                found.append((step, before, rows))
                scores = [[of(step, row, before + sample) for sample in range(SAMPLES)] for row in rows]
                rates.observe(rows, scores)
                left, before = sum(len(set(one)) == 1 for one in scores), before + SAMPLES * len(rows)
    return found


def chosen(source: PromptSource, of: Score = score, steps: range = range(1, STEPS + 1)) -> list[Choice]:
    return choices(lambda *asked: source.draw(*asked)[0], source.loader.pass_rates, of, steps)


def late_choices(staleness: int) -> list[Choice]:
    """Oracle: the synchronous loader, whose choices are used `staleness` steps later; what is replaced comes when it is found."""
    plain = PromptLoader(PROMPTS, PLACES, **by_rates())
    begun = [plain.next_step() for _ in range(staleness)]

    def draw(step: int, count: int, before: int) -> list[int]:
        if before:
            return plain.next_step(count)
        if step + staleness <= STEPS:
            begun.append(plain.next_step())
        return begun.pop(0)

    return choices(draw, plain.pass_rates, score, range(1, STEPS + 1))


def test_prompts_are_chosen_by_the_synchronous_rule_with_scores_that_come_as_many_steps_later() -> None:
    prompts: Any = range(PROMPTS)
    synchronous = chosen(PromptSource(prompts, PromptLoader(PROMPTS, PLACES, **by_rates()), SAMPLES, 1))
    assert max(before for _, before, _ in synchronous) > PLACES, "some steps have three rounds"
    assert chosen(ahead_source(0)) == synchronous
    for staleness in range(5):
        assert chosen(ahead_source(staleness)) == late_choices(staleness)
    assert chosen(ahead_source(1)) != synchronous


def test_a_choice_depends_on_no_score_of_later_steps_than_the_bound_allows() -> None:
    """A score of step s may change what replaces prompts of s, and first rounds from step s + 1 + staleness on; some do."""
    for staleness in range(4):
        reached = set()
        before = chosen(ahead_source(staleness))
        for changed in range(1, STEPS + 1):
            after = chosen(ahead_source(staleness), changed_in(changed))
            steps = {step for step, drawn, rows in {*map(_hashed, before)} ^ {*map(_hashed, after)} if not drawn}
            assert all(step > changed + staleness for step in steps)
            assert [one for one in before if one[0] < changed] == [one for one in after if one[0] < changed]
            reached |= {step - changed for step in steps}
        assert min(reached) == staleness + 1


def _hashed(choice: Choice) -> tuple[int, int, tuple[int, ...]]:
    return choice[0], choice[1], tuple(choice[2])


def test_a_resume_chooses_as_the_uninterrupted_run_and_one_without_the_pass_rates_does_not() -> None:
    forgotten = set()
    for staleness, stopped in itertools.product(range(4), range(1, STEPS)):
        expected, rest = chosen(ahead_source(staleness)), range(stopped + 1, STEPS + 1)
        first, second, forgetful = (ahead_source(staleness) for _ in range(3))
        begun = chosen(first, steps=range(1, stopped + 1))
        state = json.loads(json.dumps(first.loader.state_dict()))
        second.loader.load_state_dict(state)
        assert begun + chosen(second, steps=rest) == expected
        forgetful.loader.load_state_dict({name: value for name, value in state.items() if name != "pass_rates"})
        if begun + chosen(forgetful, steps=rest) != expected:
            forgotten.add(staleness)
    assert forgotten == set(range(4))


def test_the_console_hears_once_which_half_waits_and_what_would_help() -> None:
    said: list[str] = []
    log: Any = SimpleNamespace(note=said.append)
    table = SimpleNamespace(ends=torch.ones(2, dtype=torch.bool))
    clock = itertools.count(step=1.0)
    with mock.patch.object(ahead.time, "monotonic", lambda: next(clock)):
        accounts, ten = Accounts(loader_of(1), log), ahead.IDLE_STEPS

        def steps(waited: float, idle: float) -> None:
            for _ in range(ten):
                figures = {Metric.WAITED.value: waited, Metric.ROLLOUT_IDLE.value: idle}
                rollout = SimpleNamespace(left_out=None, rounds=None, redrawn=0, figures=figures)
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
