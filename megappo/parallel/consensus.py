"""Collective wrappers of work that may fail on one rank, so that all ranks raise or none, and exchanges of Python objects. A rank
that raises alone leaves its peers waiting in the next collective until the timeout. All are collective over the world, or over the
given group; messages name world ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numpy
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from megappo.parallel.totals import place_in_world, total

T = TypeVar("T")

# Faults of reading and writing files: full disk, lost mount, broken file, state that does not serialise.
_FAULTS = (OSError, RuntimeError, ValueError, TypeError, LookupError, SafetensorError)


class RankFault(RuntimeError):
    """Failure on at least one rank, raised on all of them with the first failing rank's message."""


def gathered(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather the objects of all ranks, in rank order, on every rank; [own] without a world. Collective; pickled, so keep them
    small."""
    if group is None and place_in_world()[1] == 1:
        return [own]
    found: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def gathered_at(rank: int, own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather the objects of all ranks, in rank order, on this world rank; [] elsewhere. Collective as `gathered`."""
    if group is None and place_in_world()[1] == 1:
        return [own]
    found: list | None = [None] * dist.get_world_size(group) if dist.get_rank() == rank else None
    dist.gather_object(own, found, dst=rank, group=group)
    return found or []


def told_by(rank: int, own: T, group: dist.ProcessGroup | None = None) -> T:
    """Return this world rank's object on every rank; `own` counts there alone. Collective as `gathered`."""
    box = [own]
    if group is not None or place_in_world()[1] > 1:
        dist.broadcast_object_list(box, src=rank, group=group)
    return box[0]


def exchanged(sent: Sequence[bytes], all_to_all: Callable[[Tensor, Tensor, Sequence[int], Sequence[int]], object]) -> list[bytes]:
    """Send bytes to every rank; return what came from each, in their order. Collective over the ranks of `all_to_all`, which takes
    (received, sent, counts received, counts sent), as `dist.all_to_all_single` does."""
    lengths, ones = [len(one) for one in sent], [1] * len(sent)
    counts = torch.empty(len(sent), dtype=torch.long)
    all_to_all(counts, torch.tensor(lengths), ones, ones)
    received = counts.tolist()
    arrived = torch.empty(sum(received), dtype=torch.uint8)
    # Copied, as torch needs writable memory.
    flat = torch.from_numpy(numpy.frombuffer(bytearray(b"".join(sent)), numpy.uint8))
    all_to_all(arrived, flat, received, lengths)
    return [part.numpy().tobytes() for part in arrived.split(received)]


def on_every_rank(what: str, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `action` on every rank; return the results in rank order, on every rank. RankFault on all if one fails. Collective.
    `action` must not contain collectives. Results are gathered as pickled objects: keep them small."""
    result, fault, cause = None, None, None
    try:
        result = action()
    except _FAULTS as error:
        fault, cause = f"{type(error).__name__}: {error}", error
    outcomes = gathered((result, fault), group)
    faults = [f"rank {rank}: {text}" for rank, (_, text) in zip(dist.get_process_group_ranks(group), outcomes) if text is not None]
    if faults:
        # cause: this rank's own error, None on ranks that did not fail.
        raise RankFault(f"{what} failed on {len(faults)} of {len(outcomes)} ranks; {faults[0]}") from cause
    return [cast(T, value) for value, _ in outcomes]


def on_rank_zero(what: str, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only; return its result on every rank. RankFault on all ranks if it fails. Collective."""
    results = on_every_rank(what, lambda: action() if dist.get_rank() == 0 else None)
    return cast(T, results[0])


def tally(votes: Sequence[bool], group: dist.ProcessGroup | None = None) -> list[int]:
    """Count the ranks that vote yes, for each question. Collective, on the host: one small message."""
    counts = torch.tensor([int(vote) for vote in votes])
    dist.all_reduce(counts, group=group)
    return counts.tolist()


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """True on every rank if the flag is set on at least one. Collective, on the host."""
    return tally([flag], group)[0] > 0


def raised_by_all(action: Callable[[], T], *kinds: type[Exception], group: dist.ProcessGroup | None = None) -> T:
    """Run `action`, and raise its first rank's error of these kinds on all ranks. Collective, also if it raises. `action` may
    exchange among ranks that raise together, such as those of one role."""
    result, fault = None, None
    try:
        result = action()
    except kinds as error:
        fault = error
    raise_together(fault, *kinds, group=group)
    return cast(T, result)


def raise_together(fault: Exception | None, *kinds: type[Exception], group: dist.ProcessGroup | None = None) -> None:
    """Raise the first rank's fault on all ranks, if any has one. Collective: one small message without a fault. The first rank
    raises its own fault; others raise the first of `kinds` that matches it, with its text."""
    rank = place_in_world()[0]
    if not (any_rank(fault is not None, group) if group is not None else int(total(torch.tensor(int(fault is not None))))):
        return
    mine = None if fault is None else (rank, next(index for index, kind in enumerate(kinds) if isinstance(fault, kind)), str(fault))
    first, kind, text = next(outcome for outcome in gathered(mine, group) if outcome is not None)
    if fault is not None and first == rank:
        raise fault
    raise kinds[kind](text) from fault


def warn_once(logger: logging.Logger, text: str, *values: object) -> None:
    """Log, on rank 0 only, a warning of what all ranks know. Not collective."""
    if dist.get_rank() == 0:
        logger.warning(text, *values)
