"""The description of a state that is kept for the next save: it is that of now, or it is made anew."""

from __future__ import annotations

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megappo.checkpoint.ranges import sharded_box
from megappo.engine.megatron import LastState


def kept(tensors, **plain):
    state = {"0": sharded_box("a", tensors[0], tensors[0].shape, (0, 0)), **plain}
    last = LastState()
    last.keep(state, tensors, with_optimizer=True)
    return last, state


def test_the_same_tensors_have_the_description_that_was_made_also_after_offload():
    tensors = [torch.ones(2, 3), torch.ones(4)]
    last, state = kept(tensors)
    storage, nbytes = tensors[0].untyped_storage(), tensors[0].nbytes
    storage.resize_(0)
    torch.ones(2, 3)  # may take the memory that was freed
    storage.resize_(nbytes)
    tensors[0].fill_(7.0)
    assert last.get(tensors, with_optimizer=True) is state
    assert torch.equal(state["0"].data, torch.full((2, 3), 7.0))


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
def test_other_tensors_have_none(change):
    tensors = [torch.ones(2, 3), torch.ones(4)]
    last, _ = kept(tensors)
    assert last.get(change(*tensors), with_optimizer=True) is None


def test_a_parameter_whose_data_was_replaced_is_described_anew():
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    last, _ = kept([parameter])
    parameter.data = torch.zeros(2, 3)
    assert last.get([parameter], with_optimizer=True) is None


def test_with_and_without_optimizer_are_two_descriptions():
    tensors = [torch.ones(2, 3)]
    last, _ = kept(tensors)
    assert last.get(tensors, with_optimizer=False) is None


@pytest.mark.parametrize(("extra", "is_kept"), [(None, True), (torch.empty(0, dtype=torch.uint8), True), (torch.ones(1), False)])
def test_what_has_extra_state_is_described_at_every_save(extra, is_kept):
    tensors = [torch.ones(2, 3)]
    last, _ = kept(tensors, extra=ShardedObject("extra", extra, (1,), (0,)))
    assert (last.get(tensors, with_optimizer=True) is not None) is is_kept
