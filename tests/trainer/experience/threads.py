"""A world of threads: every rank runs the same function, and a wire carries tensors between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megappo.trainer.experience.route import Wire, places_of


class ThreadWire(Wire):
    """An all-to-all over shared memory. bytes_sent: of this rank so far, to others."""

    def __init__(
        self, place: int, ranks: Sequence[int], barrier: threading.Barrier, letters: dict[tuple[int, int], Tensor]
    ) -> None:
        self.ranks, self.places = ranks, places_of(ranks)
        self._place, self._barrier, self._letters = place, barrier, letters
        self.bytes_sent = 0

    def all_to_all(self, received: Tensor, sent: Tensor, received_counts: Sequence[int], sent_counts: Sequence[int]) -> None:
        for place, part in enumerate(sent.split(list(sent_counts))):
            self._letters[self._place, place] = part
            self.bytes_sent += 0 if place == self._place else part.nbytes
        self._barrier.wait(timeout=20)
        parts = [self._letters[place, self._place] for place in range(len(self.ranks))]
        assert [len(part) for part in parts] == list(received_counts), "both ends count alike"
        assert {part.dtype for part in parts} == {received.dtype}, "both ends exchange the same field"
        if parts:
            received.copy_(torch.cat(parts))
        self._barrier.wait(timeout=20)


def world_of_threads(ranks: Sequence[int], work: Callable[[int, ThreadWire], Any]) -> list[Any]:
    """Run `work(rank, wire)` for every rank; returns their results. The first error of any rank is raised."""
    barrier, letters = threading.Barrier(len(ranks)), {}
    found: list[Any] = [None] * len(ranks)
    errors: list[BaseException] = []

    def run(place: int) -> None:
        try:
            found[place] = work(ranks[place], ThreadWire(place, ranks, barrier, letters))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return found
