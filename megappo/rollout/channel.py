"""Messages between the halves of an asynchronous run: what the training half wants goes through the job's store to the rollout
half, in one order, and what has finished comes back as a key. Messages are small; weights and responses meet in exchanges of all
ranks that a message announces. Every rank takes part in those in the order of the messages, so no two wait for each other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megappo.config.errors import ConfigError
from megappo.parallel.meeting import RankIsLate
from megappo.runtime.ending import Unavailable, Unrecoverable, is_fault
from megappo.runtime.messages import first_line, name_ranks

_LOOK_S = 0.004  # between looks at the store; one takes 0.1 ms
_FAILED, _STOP, _LOSSES, _OVER = "failed", "stop", "losses", "over"
_END = "the end of a meeting"


class HalfFailed(RuntimeError):
    """The other half of the run failed. The message names its first rank that did, the half and the error."""


class GivenUp(RuntimeError):
    """The other ranks go on without this one's replica."""


# Both halves end by errors of one exit code, whichever the launcher sees first.
_KINDS: dict[str, type[Exception]] = {
    "mistake": ConfigError,
    "unrecoverable": Unrecoverable,
    "unavailable": Unavailable,
    "fault": HalfFailed,
}


class Channel:
    """One rank's end. store: of all ranks, under a prefix of this start, on a connection that no other thread waits on. leaders:
    first rank of each replica. limit_s: of waiting (`run.timeouts.meeting_s`). live: replicas that take part; generation: how
    often others did."""

    def __init__(self, store: dist.Store, rank: int, leaders: Sequence[int], limit_s: float) -> None:
        self._store, self.rank, self.leaders, self._limit_s = store, rank, tuple(leaders), limit_s
        self.live, self.generation = list(range(len(leaders))), 0
        self._dropped = 0  # replicas so far that are lost and not counted as live any more
        self.look: Callable[[], None] = lambda: None  # for lost replicas, while this rank waits for others
        self._next = 0  # message that this rank tells, or hears, next
        self._old: list[str] = []  # keys that the next meeting leaves behind
        self._has_asked = False

    # ------------------------------------------------------------------------------------------------- the training half

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a message to every replica. All training ranks call it in the same order; rank 0 writes."""
        if self.rank == 0:
            self._store.set(f"m{self._next}", json.dumps({"kind": kind, **fields}))
        self._old.append(f"m{self._next}")
        self._next += 1

    def wait_for(self, key: str, what: str) -> None:
        """Wait until every replica has announced `key`, or one is lost. what: its words in the message. RankIsLate after the limit,
        naming the first ranks of the replicas that are late; HalfFailed if the rollout half ended by an error."""
        keys = {self.leaders[index]: self._done(key, index) for index in self.live}
        self._old += keys.values()
        self._await(keys, f"{what} of the rollout half", self.sees_loss)

    def met(self) -> None:
        """Drop the messages and announcements so far: all ranks have met since. All training ranks call it after a meeting."""
        if self.rank == 0:
            for key in self._old:
                self._store.delete_key(key)
        self._old.clear()

    def voted(self) -> bool:
        """Wait for the replicas' votes on the meeting that was told last; True if it has succeeded for all, False if not or if one
        is lost. RankIsLate and HalfFailed as `wait_for`. Rank 0 calls."""
        for index in self.live:
            if not self._await({self.leaders[index]: self._vote(index)}, _END, self.sees_loss, _LOOK_S / 4):
                return False
            if self._store.get(self._vote(index)) == b"0":
                return False
        return True

    def settle(self, counts: bool) -> None:
        """Say whether the meeting that was told last counts. All training ranks call it; rank 0 writes."""
        if counts:
            self.met()
        if self.rank == 0:
            self._store.set(self._verdict(), str(int(counts)))
        self._old += [self._verdict(), *map(self._vote, self.live)]  # read until the next meeting

    def wait_until_ready(self, replica: int) -> None:
        """Wait until a replica that was lost asks to take part again. Errors as of `wait_for`. Rank 0 calls."""
        self._await({self.leaders[replica]: self._ready(replica)}, f"replica {replica}, which is to join", lambda: False)

    def is_ready(self, replica: int) -> bool:
        """True if a replica that was lost asks to take part again."""
        return self._store.check([self._ready(replica)])

    def welcome(self, replica: int) -> None:
        """Let a replica that is ready hear from the next message on, which is told next. Rank 0 calls."""
        asked = self._store.get(self._ready(replica)).decode()
        for key in (self._ready(replica), f"lost/{replica}", f"losing/{replica}"):
            self._store.delete_key(key)
        about = {"next": self._next, "live": self.live, "generation": self.generation, "dropped": self._dropped}
        self._store.set(f"welcome/{asked}", json.dumps(about))

    def end(self) -> None:
        """Say that the run is over, to those who wait to take part. Rank 0 calls."""
        self._store.set(_OVER, "")

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
        self._store.set(self._done(key, replica), "")

    def vote(self, replica: int, succeeded: bool) -> None:
        """Say if the meeting that was heard last has succeeded on a replica. Its first rank calls."""
        self._store.set(self._vote(replica), str(int(succeeded)))

    def counts(self, replica: int) -> bool:
        """Wait until training rank 0 has said whether the meeting that was heard last counts. HalfFailed; GivenUp if this replica
        is."""

        def given_up() -> bool:
            self.require_member(replica)
            return False

        self._await({0: self._verdict()}, _END, given_up, _LOOK_S / 4)
        return self._store.get(self._verdict()) == b"1"

    def require_member(self, replica: int) -> None:
        """GivenUp if this replica was taken for lost."""
        if lost := self.lost([replica]):
            raise GivenUp(f"rank {self.rank}: its replica {replica} was given up: {lost[replica]}")

    def ask_to_join(self, replica: int, name: str) -> None:
        """Ask to take part again. name: of this wish alone. A replica's first rank calls."""
        self._store.set(self._ready(replica), name)

    def answer(self, name: str) -> Mapping[str, Any] | None:
        """Return the argument of `enter` once the training half lets the replica take part; {} if the run is over; None before.
        HalfFailed if the training half ended by an error."""
        self.require_other_half()
        if self._store.check([f"welcome/{name}"]):
            return json.loads(self._store.get(f"welcome/{name}"))
        return {} if self._store.check([_OVER]) else None

    def enter(self, about: Mapping[str, Any]) -> None:
        """Hear messages from here on. about: from `answer`. All ranks of the replica call it."""
        self._next, self.live = about["next"], list(about["live"])
        self.generation, self._dropped = about["generation"], about["dropped"]

    def ask_to_stop(self, signal: str) -> None:
        """Ask the training half to end the run with a checkpoint; only the first call tells it."""
        if not self._has_asked:
            self._store.set(_STOP, signal)
            self._has_asked = True

    # ---------------------------------------------------------------------------------------------------------- of both

    def _await(self, keys: Mapping[int, str], what: str, ends: Callable[[], bool], pause_s: float = _LOOK_S) -> bool:
        """Wait until all these keys, by the rank that sets them, are there; False if `ends` says to wait no longer. what: this rank
        waits for. RankIsLate after the limit, naming the ranks that are late; HalfFailed if the other half ended by an error."""
        until = time.monotonic() + self._limit_s
        for key in keys.values():
            while not self._store.check([key]):  # the store's own wait holds its connection, and writes of its time-out
                self.require_other_half()
                if ends():
                    return False
                if time.monotonic() >= until:
                    late = name_ranks([rank for rank, one in keys.items() if not self._store.check([one])])
                    waited = f"rank {self.rank} waited for {what}, {late}"
                    raise RankIsLate(f"{waited} (run.timeouts.meeting_s = {self._limit_s:g})")
                time.sleep(pause_s)
        return True

    def give_up(self, replica: int, why: str) -> None:
        """Take a replica for lost; the first reason counts. Any rank may call, from any thread."""
        if self._store.add(f"losing/{replica}", 1) == 1:
            self._store.set(f"lost/{replica}", why)
            self._store.add(_LOSSES, 1)

    def lost(self, replicas: Sequence[int]) -> dict[int, str]:
        """Return those of the replicas that are lost, and why."""
        return {one: self._store.get(f"lost/{one}").decode() for one in replicas if self._store.check([f"lost/{one}"])}

    def sees_loss(self) -> bool:
        """True if a replica is lost that still counts as live."""
        if len(self.leaders) == 1:
            return False
        self.look()
        return self._store.add(_LOSSES, 0) > self._dropped

    def go_on_with(self, live: Sequence[int]) -> None:
        """Count these replicas alone from here on."""
        self._dropped += len(set(self.live) - set(live))
        self.live, self.generation = list(live), self.generation + 1

    def store_of_group(self) -> dist.Store:
        """Return the store in which a group of all ranks of this generation is made, on a connection of its own."""
        store: Any = self._store  # the method is missing in torch's stub
        return dist.PrefixStore(f"group/{self.generation}", store.clone())

    def _done(self, key: str, replica: int) -> str:
        return f"done/{key}/{replica}/{self.generation}"

    def _ready(self, replica: int) -> str:
        return f"ready/{replica}"

    def _vote(self, replica: int) -> str:
        return f"vote/{self._next - 1}/{replica}"

    def _verdict(self) -> str:
        return f"verdict/{self._next - 1}"

    def fail(self, half: str, error: BaseException) -> None:
        """Leave this rank's error to the other half; the first one counts."""
        if isinstance(error, ValueError) and not is_fault(error):
            kind, text = "mistake", str(error)  # one line, which every rank prints alike
        else:
            kind = next((name for name in ("unrecoverable", "unavailable") if isinstance(error, _KINDS[name])), "fault")
            text = f"rank {self.rank} of the {half} half failed: {first_line(error, kind=True)}"
        self._store.compare_set(_FAILED, "", f"{kind} {text}")

    def require_other_half(self) -> None:
        """Raise the error that a rank has left, if any: HalfFailed, or the one with the exit code of the rank's own."""
        if self._store.check([_FAILED]):
            kind, _, text = self._store.get(_FAILED).decode().partition(" ")
            raise _KINDS[kind](text)
