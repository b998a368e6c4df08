"""Flat ranges of sharded tensors as boxes of the global tensor, the form in which a checkpoint stores them.

A rank of the distributed optimizer keeps a range of each flattened parameter, and the ranks that hold copies of a weight write a
range of it each. A range of a tensor with several dimensions is not one box, but a few. A load reads the overlap of boxes, so
boxes of any cut serve any other. Nothing here communicates or copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import NamedTuple

from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ReplicaId, ShardedTensor
from torch import Tensor

Shard = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Key, offset and local shape; equal for all copies of a shard."""


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""


@cache  # layers repeat their shapes, optimizers their ranges, and saves all of them
def boxes(shape: tuple[int, ...], start: int, stop: int) -> Sequence[Box]:
    """Contiguous boxes, in order, that make up elements start..stop - 1 of a flattened tensor; at most 2 n - 1 in n dimensions."""
    return tuple(_boxes(shape, start, stop))


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    # The end of a row, whole rows, and the beginning of a row; partial rows are cut in the same way.
    if start >= stop:
        return
    if len(shape) == 0:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # all within one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    for offset, size in _boxes(shape[1:], start, stop):
        yield (index, *offset), (1, *size)


def cut(
    entry: ShardedTensor, start: int, values: Tensor, key: str | None = None, replica_id: ReplicaId | None = None
) -> list[ShardedTensor]:
    """Boxes of `values` [n], the elements start..start + n - 1 of the flattened local tensor of `entry`, sharing its memory.

    key, replica_id: of the boxes, None for the entry's.
    """
    # Prepended axes become axes of the boxes.
    shape = (1,) * entry.prepend_axis_num + tuple(entry.local_shape)
    found, at = [], 0
    for offset, size in boxes(shape, start, start + values.numel()):
        part = values[at : at + prod(size)].view(size)
        at += part.numel()
        found.append(
            ShardedTensor(
                entry.key if key is None else key,
                part,
                part.dtype,
                size,
                entry.global_shape,
                tuple(a + b for a, b in zip(entry.global_offset, offset)),
                axis_fragmentations=None,  # an irregular grid, in Megatron-core's terms
                replica_id=entry.replica_id if replica_id is None else replica_id,
                allow_shape_mismatch=entry.allow_shape_mismatch,
            )
        )
    return found


def sharded_box(
    key: str, values: Tensor, shape: Sequence[int], offset: Sequence[int], copy: int = 0, data_copy: int = 0
) -> ShardedTensor:
    """Box of a tensor of this shape that begins at `offset`; shares memory with `values`. copy: 0 for the main one of its copies on
    tp ranks, which alone is written. data_copy: number of a copy that is bitwise the same; each writes a part."""
    return ShardedTensor(
        key,
        values,
        values.dtype,
        tuple(values.shape),
        tuple(shape),
        tuple(offset),
        axis_fragmentations=None,
        replica_id=(0, copy, data_copy),
    )


def keep_own(values: Tensor) -> LocalNonpersistentObject:
    """Description of a tensor that the reader of a checkpoint gives back as it is."""
    return LocalNonpersistentObject(values)


Holders = dict[Shard, list[int]]
"""Ranks that hold a copy of a shard and write a part of it."""


def holders_of(everyone: Sequence[Sequence[ShardedTensor]]) -> Holders:
    """Holders of all shards. everyone: the shards of all ranks; their data is not needed."""
    holders: Holders = {}
    for holder, theirs in enumerate(everyone):
        for entry in theirs:
            if is_written(entry.replica_id):  # copies over tp (replicated weights) and pp (tied embeddings) are not written
                holders.setdefault(_shard(entry), []).append(holder)
    return holders


class Part(NamedTuple):
    """Box that a rank writes: that of consecutive elements of a flattened shard, from `start` on. source: number of the shard."""

    box: ShardedTensor
    source: int
    start: int


def parts_to_write(mine: Sequence[ShardedTensor], holders: Holders, rank: int) -> list[Part]:
    """Parts of `mine` that this rank writes.

    Ranks with copies of the same shards write equal parts of their concatenated bytes, so each border cuts at most one shard.
    """
    groups: dict[tuple[int, ...], list[tuple[int, ShardedTensor]]] = {}
    written = [(source, entry) for source, entry in enumerate(mine) if is_written(entry.replica_id)]
    for source, entry in sorted(written, key=lambda one: _shard(one[1])):
        groups.setdefault(tuple(holders[_shard(entry)]), []).append((source, entry))
    found: list[Part] = []
    for ranks, entries in groups.items():
        total, index, at = sum(_data(entry).nbytes for _, entry in entries), ranks.index(rank), 0
        begin, end = total * index // len(ranks), total * (index + 1) // len(ranks)
        for source, entry in entries:
            values = _data(entry).detach().contiguous().view(-1)
            # Both neighbours round the border to the same element.
            start, stop = (min(max(0, edge - at) // values.element_size(), values.numel()) for edge in (begin, end))
            for box in cut(entry, start, values[start:stop]):
                found.append(Part(box, source, start))
                start += _data(box).numel()
            at += values.nbytes
    return found


def is_written(replica_id: ReplicaId) -> bool:
    """True for the main copy and for those of other data-parallel ranks; Megatron-core's ids are (pp, tp, dp)."""
    return replica_id == 0 if isinstance(replica_id, int) else not any(replica_id[:-1])


def unreplicated_id(replica_id: ReplicaId) -> ReplicaId:
    """The id without its data-parallel part, as for a shard that only one data-parallel rank holds."""
    return replica_id if isinstance(replica_id, int) else (*replica_id[:-1], 0)


def _data(entry: ShardedTensor) -> Tensor:
    assert entry.data is not None, f"{entry.key} is a description without data"
    return entry.data


def _shard(entry: ShardedTensor) -> Shard:
    return entry.key, tuple(entry.global_offset), tuple(entry.local_shape)
