"""Seconds of an asynchronous step in the tuner, held against a simulation of the rule by which steps begin and are trained on."""

from __future__ import annotations

import heapq
import random

import pytest

from megappo.commands.tune import generation
from megappo.commands.tune.generation import Overlap

STEPS, SAMPLES = 60, 256


def simulated(max_staleness, training_s, slots, lengths):
    """Seconds of a step once the pipeline is full. lengths: step -> seconds of each of its responses."""
    free, trained = [0.0] * slots, [0.0]  # when a slot is free; when the update after each step has ended
    for step in range(1, STEPS + 1):
        admitted, ends = trained[max(0, step - 1 - max_staleness)], []
        for seconds in lengths(step):
            ends.append(max(admitted, heapq.heappop(free)) + seconds)
            heapq.heappush(free, ends[-1])
        trained.append(max(trained[-1], *ends) + training_s)
    counted = STEPS // 2 // (max_staleness + 1) * (max_staleness + 1)  # steps come in bursts of max_staleness + 1
    return (trained[-1] - trained[-1 - counted]) / counted


@pytest.mark.parametrize("training_s, slots", [(60.0, 512), (20.0, 512), (60.0, 32), (10.0, 64)])
def test_the_formula_is_within_5_percent_of_the_simulated_rule(training_s, slots):
    def lengths(step):
        chance = random.Random(step)
        return [min(160.0, chance.lognormvariate(2.5, 1.0)) for _ in range(SAMPLES - 1)] + [160.0]

    sampling_s = sum(sum(lengths(step)) for step in range(1, STEPS + 1)) / STEPS / slots
    waits_s = sampling_s * max(0.0, 1 - slots / SAMPLES)
    overlap = Overlap(training_s, sampling_s, 160.0 + waits_s)
    for max_staleness in range(9):
        found = simulated(max_staleness, training_s, slots, lengths)
        assert 0.95 < found / overlap.step_s(max_staleness) < 1.05, f"max_staleness {max_staleness}: {found:.1f} s"
    enough = overlap.enough()
    assert overlap.step_s(enough) == pytest.approx(overlap.floor_s), "the smallest that reaches the floor"
    assert enough == 0 or overlap.step_s(enough - 1) > overlap.floor_s


@pytest.mark.parametrize("training_s, places", [(60.0, 512), (60.0, SAMPLES), (10.0, 64)])
def test_a_step_waits_for_places_that_other_steps_have(training_s, places):
    """By another simulation, whose responses differ from step to step. With room for one step two stand in each other's way."""

    def lengths(step):
        chance = random.Random(step)
        found = [min(160.0, chance.lognormvariate(4.2, 0.8)) for _ in range(SAMPLES - 1)] + [160.0]
        return chance.sample(found, len(found))

    sampling_s = sum(lengths(1)) / places
    waits_s = sampling_s * max(0.0, 1 - places / SAMPLES)
    overlap = Overlap(training_s, sampling_s, 160.0 + waits_s, places, tuple(lengths(1)))
    for max_staleness in (0, 1, 2, 4):
        found = simulated(max_staleness, training_s, places, lengths)
        assert overlap.step_s(max_staleness) == pytest.approx(found, rel=0.08), f"max_staleness {max_staleness}"
    if places == SAMPLES:
        assert overlap.least_s(1) < 0.92 * simulated(1, training_s, places, lengths), "negative control: without waiting"
    enough = overlap.enough()
    assert overlap.step_s(enough) <= generation.REACHED * overlap.floor_s
    assert overlap.step_s(enough - 1) > overlap.floor_s


@pytest.mark.parametrize("training_s, places", [(60.0, 512), (10.0, 64)])
def test_responses_are_as_old_as_in_a_run_that_counts_pushes(training_s, places):
    """By the times of all events of another simulation, whose responses differ from step to step."""
    chance = random.Random(1)
    step_of = [min(160.0, chance.lognormvariate(2.5, 1.0)) for _ in range(SAMPLES - 1)] + [160.0]
    for max_staleness in (0, 1, 4):
        free, trained, begins = [0.0] * places, [0.0], []
        for step in range(1, STEPS + 1):
            lengths, ends = random.Random(step).sample(step_of, len(step_of)), []
            for seconds in lengths:
                begin = max(trained[max(0, step - 1 - max_staleness)], heapq.heappop(free))
                begins.append((step, begin))
                ends.append(begin + seconds)
                heapq.heappush(free, ends[-1])
            trained.append(max(trained[-1], *ends) + training_s)
        ages = [step - 1 - sum(one <= begin for one in trained[1:step]) for step, begin in begins if 2 * step > STEPS]
        _, found = generation.simulated(max_staleness, training_s, places, tuple(step_of))
        assert found == pytest.approx(sum(ages) / len(ages), abs=0.15), f"max_staleness {max_staleness}"
        assert 0 <= found <= max_staleness
        assert found == 1 or (max_staleness, places) != (1, 512), "nothing waits for a place: all are as old as allowed"
