"""Flat ranges as boxes: what they are together, and who writes which of several copies."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megappo.checkpoint.ranges import boxes, cut, holders_of, parts_to_write

SHAPES = [(), (1,), (7,), (3, 4), (4, 1), (1, 5), (2, 3, 4), (1, 3, 5), (3, 1, 2), (2, 1, 1, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_are_the_range_in_order_and_few(shape):
    whole = torch.arange(prod(shape)).view(shape)
    for start, stop in product(range(whole.numel() + 1), repeat=2):
        found = list(boxes(shape, start, stop))
        parts = [box_of(whole, offset, size) for offset, size in found]
        assert all(part.is_contiguous() and part.numel() > 0 for part in parts)
        assert [value for part in parts for value in part.flatten().tolist()] == list(range(start, stop))
        assert len(found) <= max(1, 2 * len(shape) - 1)


def test_no_elements_are_no_box():
    assert list(boxes((3, 4), 5, 5)) == [] and list(boxes((0, 4), 0, 0)) == []


def box_of(whole, offset, size):
    return whole[tuple(slice(first, first + length) for first, length in zip(offset, size))]


def shard(key, data, offset=None, replica=(0, 0, 0), total=None, prepended=0):
    offset = offset or (0,) * (data.dim() + prepended)
    return ShardedTensor(
        key, data, data.dtype, tuple(data.shape), total or tuple(data.shape), offset, None, replica, prepend_axis_num=prepended
    )


def test_a_part_of_a_shard_lies_where_the_shard_does():
    """The second of two experts, of which this rank holds the lower half of the rows."""
    whole = torch.randn(2, 6, 5)
    mine = whole[1, 3:]
    parts = cut(shard("w", mine, (1, 3, 0), total=(2, 6, 5), prepended=1), 3, mine.reshape(-1)[3:13])
    for part in parts:
        assert torch.equal(box_of(whole, part.global_offset, part.local_shape), part.data)
        assert part.data.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr() and part.global_shape == (2, 6, 5)
    assert [tuple(part.local_shape) for part in parts] == [(1, 1, 2), (1, 1, 5), (1, 1, 3)]


def shards_of(rank, ranks=4):
    """Two weights of which all ranks hold copies, one in bf16; one that two ranks hold; a copy that is never written; an own
    part.
    """
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(9, 7, generator=generator), torch.randn(5, 3, generator=generator).bfloat16()]
    pair, own = torch.full((4, 4), float(rank // 2)), torch.full((3,), float(rank))
    found = [shard(f"weight {n}", data, replica=(0, 0, rank)) for n, data in enumerate(weights)]
    found.append(shard("experts", pair, (rank // 2 * 4, 0), (0, 0, rank % 2), (ranks // 2 * 4, 4)))
    found.append(shard("copy", torch.zeros(6), replica=(0, 1, rank)))
    found.append(shard("part", own, (3 * rank,), total=(3 * ranks,)))
    return found


def written(share):
    everyone = [shards_of(rank) for rank in range(4)]
    wholes, counts, sizes = {}, {}, []
    for rank, mine in enumerate(everyone):
        parts = share(mine, holders_of(everyone), rank)
        sizes.append(sum(part.data.nbytes for part in parts))
        for part in parts:
            whole = wholes.setdefault(part.key, torch.zeros(part.global_shape, dtype=part.dtype))
            count = counts.setdefault(part.key, torch.zeros(part.global_shape, dtype=torch.int))
            box_of(whole, part.global_offset, part.local_shape).copy_(part.data)
            box_of(count, part.global_offset, part.local_shape).add_(1)
    return wholes, counts, sizes


def boxes_to_write(mine, holders, rank):
    found = parts_to_write(mine, holders, rank)
    for box, source, start in found:
        values = mine[source].data.flatten()[start : start + box.data.numel()]
        assert torch.equal(values, box.data.flatten()), "where the box lies in its shard"
    return [part.box for part in found]


def test_copies_are_written_once_and_in_equal_parts():
    wholes, counts, sizes = written(boxes_to_write)
    assert set(wholes) == {"weight 0", "weight 1", "experts", "part"}
    assert all((count == 1).all() for count in counts.values())
    for entry in shards_of(0)[:2]:
        assert torch.equal(wholes[entry.key], entry.data)
    assert torch.equal(wholes["experts"], torch.tensor([0.0] * 4 + [1.0] * 4)[:, None].expand(8, 4))
    assert torch.equal(wholes["part"], torch.arange(4.0).repeat_interleave(3))
    assert max(sizes) - min(sizes) <= 8, "by less than an element at each border"


def test_the_comparison_notices_a_rank_that_writes_for_all():
    def mains(mine, holders, rank):
        return [entry for entry in mine if not any(entry.replica_id)]

    wholes, counts, sizes = written(mains)
    assert all((count == 1).all() for count in counts.values())
    assert max(sizes) > 4 * min(sizes)


def test_an_equal_number_for_all_is_no_condition():
    """More ranks than elements."""
    everyone = [[shard("w", torch.tensor([1.0, 2.0]), replica=(0, 0, rank))] for rank in range(5)]
    parts = [boxes_to_write(mine, holders_of(everyone), rank) for rank, mine in enumerate(everyone)]
    assert sorted(part.data.item() for theirs in parts for part in theirs) == [1.0, 2.0]
    assert parts_to_write([], holders_of([[], *everyone]), 0) == []
