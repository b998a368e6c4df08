"""Collective wrappers of work that may fail on one rank: every rank learns of the failure, and all raise or none.

They are collective over the world, or over the group that they are given. Messages name ranks of the world.
A rank that raises alone leaves its peers waiting in the next collective until the timeout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from megappo.parallel.totals import place_in_world, total

Result = TypeVar("Result")

# Faults of reading and writing files: full disk, lost mount, broken file, state that does not serialise.
_FAULTS = (OSError, RuntimeError, ValueError, TypeError, LookupError, SafetensorError)


class RankFault(RuntimeError):
    """Failure on at least one rank, raised on all of them with the first failing rank's message."""


def on_every_rank(what: str, action: Callable[[], Result], group: dist.ProcessGroup | None = None) -> list[Result]:
    """Run `action` on every rank; returns the results in rank order, on every rank. RankFault on all if one fails.

    `action` must not contain collectives. Results are gathered as pickled objects: keep them small.
    """
    result, fault, cause = None, None, None
    try:
        result = action()
    except _FAULTS as error:
        fault, cause = f"{type(error).__name__}: {error}", error
    ranks = dist.get_process_group_ranks(group)
    outcomes: list = [None] * len(ranks)
    dist.all_gather_object(outcomes, (result, fault), group=group)
    faults = [f"rank {rank}: {text}" for rank, (_, text) in zip(ranks, outcomes) if text is not None]
    if faults:
        # cause: this rank's own error, None on ranks that did not fail.
        raise RankFault(f"{what} failed on {len(faults)} of {len(outcomes)} ranks; {faults[0]}") from cause
    return [value for value, _ in outcomes]


def on_rank_zero(what: str, action: Callable[[], Result]) -> Result:
    """Run `action` on rank 0 only; returns its result on every rank. RankFault on all ranks if it fails."""
    results = on_every_rank(what, lambda: action() if dist.get_rank() == 0 else None)
    return cast(Result, results[0])


def tally(votes: Sequence[bool], group: dist.ProcessGroup | None = None) -> list[int]:
    """Number of ranks that vote yes, for each question. Collective, on the host: one small message."""
    counts = torch.tensor([int(vote) for vote in votes])
    dist.all_reduce(counts, group=group)
    return counts.tolist()


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """True on every rank if the flag is set on at least one. Collective, on the host."""
    return tally([flag], group)[0] > 0


def raised_by_all(action: Callable[[], Result], *kinds: type[Exception]) -> Result:
    """Run `action`, and raise its first rank's error of these kinds on all ranks of the world. Collective, also if it raises.

    For work of which each rank, or each role's ranks, do a part: `action` may exchange among ranks that raise together.
    """
    result, fault = None, None
    try:
        result = action()
    except kinds as error:
        fault = error
    raise_together(fault, *kinds)
    return cast(Result, result)


def raise_together(fault: Exception | None, *kinds: type[Exception]) -> None:
    """Raise the first rank's fault on all ranks of the world, if any has one. Collective: one small message without a fault.

    The first rank raises its own; others raise the first of `kinds` that it is, with its text.
    """
    rank, world_size = place_in_world()
    if not int(total(torch.tensor(int(fault is not None)))):
        return
    mine = None if fault is None else (rank, next(index for index, kind in enumerate(kinds) if isinstance(fault, kind)), str(fault))
    outcomes: list = [mine]
    if world_size > 1:
        outcomes = [None] * world_size
        dist.all_gather_object(outcomes, mine)
    first, kind, text = next(outcome for outcome in outcomes if outcome is not None)
    if fault is not None and first == rank:
        raise fault
    raise kinds[kind](text) from fault


def warn_once(logger: logging.Logger, text: str, *values: object) -> None:
    """Log a warning of what all ranks know on rank 0 only. Not collective."""
    if dist.get_rank() == 0:
        logger.warning(text, *values)
