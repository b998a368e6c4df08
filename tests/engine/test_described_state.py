"""The description of a state that is kept for the next save: it is that of now, or it is made anew."""

from __future__ import annotations

import pytest
import torch

from megappo.engine.role_engine import places_of


def test_the_same_tensors_have_the_same_places_also_after_offload():
    tensors = [torch.ones(2, 3), torch.ones(4)]
    before = places_of(tensors)
    storage, nbytes = tensors[0].untyped_storage(), tensors[0].nbytes
    storage.resize_(0)
    torch.ones(2, 3)  # may take the memory that was freed
    storage.resize_(nbytes)
    tensors[0].fill_(7.0)
    assert places_of(tensors) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b: [torch.ones(2, 3), b],
        lambda a, b: [a.data.view(3, 2), b],
        lambda a, b: [a.T, b],
        lambda a, b: [a.view(torch.int32), b],
        lambda a, b: [b, a],
        lambda a, b: [a, b, torch.ones(1)],
        lambda a, b: [a, b[:2]],
    ],
    ids=["another tensor", "shape", "strides", "type", "order", "one more", "a part"],
)
def test_other_tensors_have_others(change):
    tensors = [torch.ones(2, 3), torch.ones(4)]
    assert places_of(change(*tensors)) != places_of(tensors)


def test_a_parameter_whose_data_was_replaced_is_described_anew():
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    before, old = places_of([parameter]), parameter.data
    parameter.data = torch.zeros(2, 3)
    assert places_of([parameter]) != before
    assert places_of([old]) == before
