"""Predicted lengths of responses: means of the last ones to the same prompt."""

from __future__ import annotations

import torch

from megappo.trainer.experience.table import SampleTable
from megappo.trainer.prompt_source import MOST_PROMPTS, ResponseLengths


def table(sampled, group, earlier=0):
    columns = {name: torch.zeros(len(sampled), dtype=torch.int32) for name in SampleTable.__dataclass_fields__}
    columns |= {"sampled": torch.tensor(sampled, dtype=torch.int32), "group": torch.tensor(group, dtype=torch.int32)}
    return SampleTable(**columns | {"earlier": torch.full((len(sampled),), earlier, dtype=torch.int32)})


def test_nothing_is_predicted_before_a_prompt_of_the_round_was_seen():
    lengths = ResponseLengths(10)
    assert lengths.predict([3, 4], 2) is None
    lengths.observe([5], table([7, 9], [0, 0]))
    assert lengths.predict([3, 4], 2) is None


def test_the_last_responses_count_and_others_get_the_mean():
    lengths = ResponseLengths(10)
    lengths.observe([8, 3], table([10, 20, 1, 2], [0, 0, 1, 1]))
    assert lengths.predict([3, 5, 8], 2) == [1.5, 1.5, 8.25, 8.25, 15.0, 15.0]
    lengths.observe([8], table([30, 50], [0, 0], earlier=2))
    assert lengths.predict([8], 1) == [42.0]


def test_a_prompt_without_samples_and_samples_without_a_prompt_teach_nothing():
    lengths = ResponseLengths(10)
    lengths.observe([1, 2], table([4, 100], [1, -1]))
    assert lengths.predict([2], 1) == [4.0] and lengths.predict([1], 1) is None


def test_memory_does_not_grow_with_the_data():
    """Two prompts of the same place: the last one is known, and neither is taken for the other."""
    lengths = ResponseLengths(10_000_000)
    assert sum(value.nbytes for value in vars(lengths).values() if hasattr(value, "nbytes")) == 2 << 20
    lengths.observe([5, 7], table([10, 30], [0, 1]))
    lengths.observe([5 + MOST_PROMPTS], table([20], [0]))
    assert lengths.predict([5, 7, 5 + MOST_PROMPTS], 1) == [25.0, 30.0, 20.0]
