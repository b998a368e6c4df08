"""The prompt loader's order: every prompt once per epoch, nothing dropped, and a resumed run goes on as if never stopped."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.data.loader import PromptLoader

sizes = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


class DropsRemainder(PromptLoader):
    """Broken on purpose: what is left of an epoch is skipped, as a loader with drop_last would."""

    def next_step(self) -> list[int]:
        if self.num_prompts - self.index < self.prompts_per_step:
            self.index = self.num_prompts
        return super().next_step()


class ForgetsEpoch(PromptLoader):
    """Broken on purpose: resumes at the right index of the wrong permutation."""

    def load_state_dict(self, state) -> None:
        super().load_state_dict({**state, "epoch": 0})


def walk(loader: PromptLoader, steps: int) -> list[list[int]]:
    return [loader.next_step() for _ in range(steps)]


def visits_every_prompt_once_per_epoch(loader: PromptLoader, epochs: int) -> bool:
    visited = [i for step in walk(loader, loader.num_steps(epochs)) for i in step]
    n = loader.num_prompts
    return all(sorted(visited[e * n : (e + 1) * n]) == list(range(n)) for e in range(epochs))


def resumed_equals_uninterrupted(make, before: int, after: int) -> bool:
    whole, first, second = make(), make(), make()
    expected = walk(whole, before + after)
    walk(first, before)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    return walk(second, after) == expected[before:]


@settings(max_examples=100, deadline=None)
@given(sizes, st.booleans(), st.integers(0, 5), st.integers(1, 4))
def test_every_prompt_is_visited_once_per_epoch(size: tuple[int, int], shuffle: bool, seed: int, epochs: int) -> None:
    assert visits_every_prompt_once_per_epoch(PromptLoader(*size, shuffle, seed), epochs)


@settings(max_examples=100, deadline=None)
@given(sizes, st.booleans(), st.integers(0, 5), st.integers(0, 20), st.integers(1, 20))
def test_a_resumed_run_takes_the_same_prompts(size: tuple[int, int], shuffle: bool, seed: int, before: int, after: int) -> None:
    assert resumed_equals_uninterrupted(lambda: PromptLoader(*size, shuffle, seed), before, after)


def test_the_checks_see_broken_loaders() -> None:
    assert not visits_every_prompt_once_per_epoch(DropsRemainder(10, 4, True, 0), 2)
    assert not resumed_equals_uninterrupted(lambda: ForgetsEpoch(10, 4, True, 0), before=3, after=2)


@given(sizes, st.integers(1, 4))
def test_steps_are_the_fewest_that_visit_every_prompt(size: tuple[int, int], epochs: int) -> None:
    loader = PromptLoader(*size, shuffle=True, seed=0)

    def least_visits(steps: int) -> int:
        counts = Counter(i for step in walk(PromptLoader(*size, shuffle=True, seed=0), steps) for i in step)
        return min(counts[i] for i in range(size[0]))

    steps = loader.num_steps(epochs)
    assert least_visits(steps) >= epochs > least_visits(steps - 1)


@pytest.mark.parametrize("prompts, per_step, steps", [(7473, 256, 30), (7473, 1024, 8), (7168, 1024, 7), (5, 5, 1)])
def test_steps_per_epoch_of_known_sizes(prompts: int, per_step: int, steps: int) -> None:
    assert PromptLoader(prompts, per_step, True, 0).steps_per_epoch == steps


def test_orders_differ_between_epochs_and_seeds_and_not_between_runs() -> None:
    first = walk(PromptLoader(30, 30, True, 0), 3)
    assert first == walk(PromptLoader(30, 30, True, 0), 3)
    assert first[0] != first[1] != first[2]
    assert first[0] != walk(PromptLoader(30, 30, True, 1), 1)[0]
    assert walk(PromptLoader(4, 2, False, 0), 3) == [[0, 1], [2, 3], [0, 1]]


def test_a_prompt_alone_is_visited_for_ever() -> None:
    loader = PromptLoader(1, 1, True, 0)
    assert walk(loader, 3) == [[0], [0], [0]] and (loader.epoch, loader.index) == (2, 1) and loader.num_steps(5) == 5


def test_the_order_is_pinned() -> None:
    """A change of the permutation would make old checkpoints resume in another order."""
    assert PromptLoader(8, 8, True, 0).next_step() == [7, 1, 3, 6, 4, 0, 2, 5]


def test_another_batch_size_may_resume() -> None:
    small, large = PromptLoader(10, 2, True, 3), PromptLoader(10, 5, True, 3)
    walk(small, 2)
    large.load_state_dict(small.state_dict())
    whole = [i for step in walk(PromptLoader(10, 1, True, 3), 9) for i in step]
    assert large.next_step() == whole[4:9]


@pytest.mark.parametrize(
    "other, says",
    [
        ((11, 2, True, 0), "data.train changed (num_prompts was 10, is 11)"),
        ((10, 2, False, 0), "data.shuffle changed (shuffle was 1, is 0)"),
        ((10, 2, True, 7), "run.seed changed (seed was 0, is 7)"),
    ],
)
def test_resuming_over_other_data_is_refused(other: tuple, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        PromptLoader(*other).load_state_dict(PromptLoader(10, 2, True, 0).state_dict())
    assert says in str(caught.value)


def test_more_prompts_per_step_than_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="data.prompts_per_step=8 is more than the 7 prompts: lower it or add data"):
        PromptLoader(7, 8, True, 0)


def test_the_order_is_that_of_a_shuffled_list() -> None:
    """Golden runs and checkpoints depend on it."""
    expected = []
    for epoch in range(2):
        order = list(range(2000))
        random.Random(f"prompts 5 {epoch}").shuffle(order)
        expected += order
    steps = walk(PromptLoader(2000, 500, True, 5), 8)
    assert [i for step in steps for i in step] == expected
    assert all(type(i) is int for i in steps[0])
    assert PromptLoader(2000, 500, True, 6).next_step() != expected[:500]
