"""Messages between the halves of an asynchronous run: what the training half wants goes through the job's store to the rollout
half, in one order, and what has finished comes back as a key. Messages are small; weights and responses meet in exchanges of all
ranks that a message announces. Every rank takes part in those in the order of the messages, so no two wait for each other."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megappo.config.errors import ConfigError
from megappo.parallel.meeting import RankIsLate
from megappo.runtime.ending import Unavailable, Unrecoverable, is_fault
from megappo.runtime.messages import first_line, name_ranks

_LOOK_S = 0.004  # between looks at the store; one takes 0.1 ms
_FAILED, _STOP = "failed", "stop"


class HalfFailed(RuntimeError):
    """The other half of the run failed. The message names its first rank that did, the half and the error."""


# Both halves end by errors of one exit code, whichever the launcher sees first.
_KINDS: dict[str, type[Exception]] = {
    "mistake": ConfigError,
    "unrecoverable": Unrecoverable,
    "unavailable": Unavailable,
    "fault": HalfFailed,
}


class Channel:
    """One rank's end. store: of all ranks, under a prefix of this start, on a connection that no other thread waits on. leaders:
    first rank of each replica. limit_s: of waiting (`run.timeouts.meeting_s`)."""

    def __init__(self, store: dist.Store, rank: int, leaders: Sequence[int], limit_s: float) -> None:
        self._store, self._rank, self.leaders, self._limit_s = store, rank, tuple(leaders), limit_s
        self._next = 0  # message that this rank tells, or hears, next
        self._old: list[str] = []  # keys that the next meeting leaves behind
        self._has_asked = False

    # ------------------------------------------------------------------------------------------------- the training half

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a message to every replica. All training ranks call it in the same order; rank 0 writes."""
        if self._rank == 0:
            self._store.set(f"m{self._next}", json.dumps({"kind": kind, **fields}))
        self._old.append(f"m{self._next}")
        self._next += 1

    def wait_for(self, key: str, what: str) -> None:
        """Wait until every replica has announced `key`. what: its words in the message. RankIsLate after the limit, naming the
        first ranks of the replicas that are late; HalfFailed if the rollout half ended by an error."""
        keys = {leader: f"done/{key}/{index}" for index, leader in enumerate(self.leaders)}
        self._old += keys.values()
        until = time.monotonic() + self._limit_s
        for one in keys.values():
            while not self._store.check([one]):  # the store's own wait holds its connection, and writes of its time-out
                self.require_other_half()
                if time.monotonic() >= until:
                    late = [leader for leader, done in keys.items() if not self._store.check([done])]
                    waited = f"rank {self._rank} waited for {what} of the rollout half, {name_ranks(late)}"
                    raise RankIsLate(f"{waited} (run.timeouts.meeting_s = {self._limit_s:g})")
                time.sleep(_LOOK_S)

    def met(self) -> None:
        """Drop the messages and announcements so far: all ranks have met since. All training ranks call it after a meeting."""
        if self._rank == 0:
            for key in self._old:
                self._store.delete_key(key)
        self._old.clear()

    def asked_to_stop(self) -> str | None:
        """Return the signal that asked a rollout rank to stop, such as `SIGTERM`; None if none was asked."""
        return self._store.get(_STOP).decode() if self._store.check([_STOP]) else None

    # -------------------------------------------------------------------------------------------------- the rollout half

    def num_new(self) -> int:
        """Count the messages that have come. A replica's first rank asks and tells the others, so that all hear the same number
        before the same engine step. HalfFailed, where none has come, if the training half ended by an error."""
        count = 0
        while self._store.check([f"m{self._next + count}"]):
            count += 1
        if count == 0:
            self.require_other_half()
        return count

    def hear(self) -> Mapping[str, Any]:
        """Return the next message, which has come."""
        message = json.loads(self._store.get(f"m{self._next}"))
        self._next += 1
        return message

    def announce(self, key: str, replica: int) -> None:
        """Say that a replica has finished `key`. Its first rank calls."""
        self._store.set(f"done/{key}/{replica}", "")

    def ask_to_stop(self, signal: str) -> None:
        """Ask the training half to end the run with a checkpoint; only the first call tells it."""
        if not self._has_asked:
            self._store.set(_STOP, signal)
            self._has_asked = True

    # ---------------------------------------------------------------------------------------------------------- of both

    def fail(self, half: str, error: BaseException) -> None:
        """Leave this rank's error to the other half; the first one counts."""
        if isinstance(error, ValueError) and not is_fault(error):
            kind, text = "mistake", str(error)  # one line, which every rank prints alike
        else:
            kind = next((name for name in ("unrecoverable", "unavailable") if isinstance(error, _KINDS[name])), "fault")
            text = f"rank {self._rank} of the {half} half failed: {first_line(error, kind=True)}"
        self._store.compare_set(_FAILED, "", f"{kind} {text}")

    def require_other_half(self) -> None:
        """Raise the error that a rank has left, if any: HalfFailed, or the one with the exit code of the rank's own."""
        if self._store.check([_FAILED]):
            kind, _, text = self._store.get(_FAILED).decode().partition(" ")
            raise _KINDS[kind](text)
