"""Meetings of both halves of an asynchronous run that outlive the loss of replicas. Weights and responses go through a group of
all ranks that is used for nothing else. What a meeting did counts once each replica's first rank has said that it succeeded, and
training rank 0 that it counts; both say so in the job's store. Otherwise the ranks leave the group, which ends the waits of those
that are still in it, make another one without the lost replicas, and hold the meeting again. With one replica left there is nobody
to go on without, and its loss ends the run. A replica whose ranks were started again joins before a push, in a new group."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from megappo.config.errors import ConfigError
from megappo.config.run_sections import TimeoutsConfig
from megappo.parallel.consensus import any_rank, gathered, raised_by_all, tally, told_by, warn_once
from megappo.parallel.device import set_limit, world_group
from megappo.parallel.meeting import RankIsLate
from megappo.rollout.channel import Channel, GivenUp, HalfFailed
from megappo.rollout.event_log import Change
from megappo.rollout.hand_over import exchanged_by_rank
from megappo.rollout.subworld import SubWorld
from megappo.runtime.ending import Unavailable, Unrecoverable
from megappo.runtime.failure import ATTEMPT_DIR, SPARE_RANKS, end_of_lost, is_joining, note_joined, note_lost
from megappo.runtime.life import kill_with_children
from megappo.runtime.messages import name_ranks
from megappo.runtime.verdict import Member, raised_in_exchange

logger = logging.getLogger(__name__)

T = TypeVar("T")
_NAMES = 1 << 31  # of the groups, which are numbers; torch counts from 0
_LOOK_S = 0.25  # between looks at files, which may be on other machines
_MARGIN_S = 10.0  # more than `heartbeat_s`, until a loss is noticed
_ENDS = (RankIsLate, HalfFailed, Unrecoverable, Unavailable, ConfigError, RuntimeError)


class Watch(Protocol):
    """The part of the watchdog that is used here."""

    def go_on_with(self, ranks: Collection[int], spare: Mapping[int, Callable[[str], object]]) -> None: ...

    def take_in(self, members: Sequence[Member]) -> None: ...


@dataclass(frozen=True)
class Seats:
    """The ranks of a run. training: number of ranks that train; they are the first. tp: ranks of a replica."""

    training: int
    tp: int
    replicas: int

    def of(self, replica: int) -> range:
        first = self.training + replica * self.tp
        return range(first, first + self.tp)

    def ranks(self, live: Sequence[int]) -> list[int]:
        """Return the ranks that meet, in the order of their positions."""
        return [*range(self.training), *(rank for replica in live for rank in self.of(replica))]

    def engine_positions(self, live: Sequence[int]) -> tuple[int, ...]:
        return tuple(range(self.training, self.training + len(live) * self.tp))

    def leader_positions(self, live: Sequence[int]) -> dict[int, int]:
        """Return replica -> position of its first rank."""
        return {replica: self.training + place * self.tp for place, replica in enumerate(live)}


class Meetings:
    """One rank's part in the meetings. Construction is collective over the world, unless a replica joins that was lost. outside:
    context in which all ranks that were started together are the world, before `SubWorld.installed` of the training half."""

    def __init__(self, channel: Channel, seats: Seats, timeouts: TimeoutsConfig, watch: Watch, *, joins: bool = False) -> None:
        self.channel, self.seats, self._timeouts, self._watch = channel, seats, timeouts, watch
        self.outside: Callable[[], AbstractContextManager[None]] = nullcontext
        self._rank, self._group, self._world = channel.rank, None, None
        self._backend = dist.distributed_c10d._world.pg_map[world_group()][0]
        if seats.replicas > 1 and not joins:
            self.renew()

    @property
    def are_voted(self) -> bool:
        """True while a replica can be lost."""
        return len(self.channel.live) > 1

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make the ranks that meet the world; their ranks in it are positions."""
        with self.outside(), nullcontext() if self._world is None else self._world.entered():
            yield

    def renew(self) -> None:
        """Make the group of this generation. Collective over its ranks."""
        ranks, c10d = self.seats.ranks(self.channel.live), dist.distributed_c10d
        # Short, as another rank may be lost meanwhile.
        limit, name = 2 * self._timeouts.heartbeat_s + _MARGIN_S, str(_NAMES + self.channel.generation)
        with self.outside():
            # `new_group` is for all ranks of the world, of which some are gone.
            make: Any = c10d._new_process_group_helper
            about = {"group_name": name, "timeout": timedelta(seconds=limit), "group_desc": "halves"}
            place = ranks.index(self._rank)
            listed = [*ranks[:place], dist.get_rank(), *ranks[place + 1 :]]  # a replica that joins is a world of its own
            self._group, _ = make(len(ranks), place, listed, self._backend, self.channel.store_of_group(), **about)
            c10d._world.pg_group_ranks[self._group] = {rank: position for position, rank in enumerate(ranks)}
            self._world = SubWorld(self._group)
        set_limit(self._group, self._timeouts.start_s)

    def renew_with_new(self) -> None:
        """Make the group of a generation in which a replica joins, and watch its ranks. Collective over its ranks."""
        self.renew()
        with self.entered():
            self._watch.take_in(gathered(Member.of_process(self._rank, os.getpid())))

    def leave(self) -> None:
        """Leave the group: its connections end, and with them the waits of others for this rank. Not collective."""
        group, self._group, self._world = self._group, None, None
        if group is not None:
            with self.outside():
                dist.destroy_process_group(group)

    def attempt(self, action: Callable[[], T]) -> tuple[T | None, str | None]:
        """Run `action` in the group; return its result, or why the exchange failed."""
        fault = None
        try:
            with self.entered():
                return action(), None
        except RuntimeError as error:
            if not (raised_in_exchange(error) or isinstance(error, RankIsLate)):
                raise
            fault = " ".join(str(error).split())
        # Behind the handler: a traceback holds the group, and with it the connections.
        self.leave()
        return None, fault

    def go_on_with(self, live: Sequence[int]) -> None:
        """Let only these replicas take part."""
        self.leave()
        self.channel.go_on_with(live)
        self._watch_live()

    def _watch_live(self) -> None:
        live = self.channel.live
        giving_up = {rank: partial(self.channel.give_up, replica) for replica in live for rank in self.seats.of(replica)}
        self._watch.go_on_with(self.seats.ranks(live), giving_up if self.are_voted else {})


# ---------------------------------------------------------------------------------------------------------- the training half


class Hosts(Meetings):
    """The training half's part: it announces meetings and says who takes part. Methods are collective over the training half, which
    is the caller's world. changes: of a run that is repeated; None for another run."""

    def __init__(
        self, channel: Channel, seats: Seats, timeouts: TimeoutsConfig, watch: Watch, changes: Sequence[Change] | None = None
    ) -> None:
        super().__init__(channel, seats, timeouts, watch)
        self._script, self._at = None if changes is None else deque(changes), (-1, 0)
        self._undealt: list[int] = []  # lost, and their requests not yet dealt again
        self._folder = Path(os.environ[ATTEMPT_DIR]) if ATTEMPT_DIR in os.environ else None
        self._looked_at, self._has_begun = 0.0, False
        self._joining: int | None = None  # of which the launcher's notes are still those of its loss

    def hold(self, kind: str, action: Callable[[], T], **fields: Any) -> tuple[bool, T | None]:
        """Announce a meeting and take part; return whether it counts, and what `action` returned here. If it does not count a
        replica is lost (`drop_lost`). RuntimeError if an exchange fails and none is. fields: of the message; `joins`: a replica
        that is lost if the meeting fails."""
        self.channel.tell(kind, **fields)
        if not self.are_voted:
            with self.entered():
                found = action()
            self.channel.met()
            return True, found
        found, fault = self.attempt(action)
        failed = any_rank(fault is not None)
        mine = raised_by_all(lambda: self._decided(failed, fault, fields.get("joins")) if self._rank == 0 else True, *_ENDS)
        counts = not any_rank(not mine)
        self.channel.settle(counts)
        if not counts:
            self.leave()
        return counts, found

    def _decided(self, failed: bool, fault: str | None, joins: int | None) -> bool:
        if not failed and self.channel.voted():
            return True
        if joins is not None:
            self.channel.give_up(joins, "the meeting at which it was to join failed")
        until = time.monotonic() + self._timeouts.heartbeat_s + _MARGIN_S
        while not self.channel.sees_loss():
            self.channel.require_other_half()
            if time.monotonic() > until:
                raise RuntimeError(f"a meeting of the halves failed, and no replica is lost: {fault or 'on another rank'}")
            time.sleep(_LOOK_S / 10)
        return False

    def count(self, version: int | None = None) -> None:
        """Note that a push of this version, or a hand-over, counts. Weights of no step and those after them are as a hand-over."""
        self._at = (self._at[0], self._at[1] + 1) if version is None or version <= self._at[0] else (version, 0)

    def drop_lost(self, rebuild: Callable[[tuple[int, ...]], None], *, by_log: bool = True) -> bool:
        """Go on without the replicas that were lost since the last call; the others deal their requests again. Return whether some
        were. rebuild: the sender of the weights, for these positions of the engine. by_log: also without those that the run which
        is repeated had lost since its last push or hand-over; False where messages may follow that they still heard. HalfFailed if
        no replica is left."""
        if self.seats.replicas == 1:
            return False
        if not self._has_begun:  # before, all ranks build what they need together
            self._has_begun = True
            self._watch_live()
            self._write_spare()
            if self._rank == 0:
                self.channel.look = self._look
        generation = self.channel.generation
        while any_rank(bool(self._rank == 0 and by_log and self._scripted()) or self.channel.sees_loss()):
            lost = told_by(0, self._newly_lost() if self._rank == 0 else {})
            live = [replica for replica in self.channel.live if replica not in lost]
            self._undealt += lost
            ranks = [rank for replica in lost for rank in self.seats.of(replica)]
            why = "; ".join(dict.fromkeys(lost.values()))
            said = f"the rollout half has lost replica {', '.join(map(str, lost))} ({name_ranks(ranks)}: {why})"
            if not live:
                raise HalfFailed(f"{said}, and no replica is left")
            if self._script is not None and not why.startswith(_BY_LOG):
                raise HalfFailed(f"{said}, and a replay needs every replica of its run: start it again")
            warn_once(logger, "%s; %d of %d go on, and draw its requests", said, len(live), self.seats.replicas)
            if self._rank == 0 and self._folder is not None:
                for rank in ranks:
                    note_lost(self._folder, rank)
            self.go_on_with(live)
            self._write_spare()

            def renewed() -> None:
                self.renew()
                with self.entered():
                    rebuild(self.seats.engine_positions(self.channel.live))
                    for _ in self._undealt:
                        exchanged_by_rank({})

            if self.hold("regroup", renewed, lost=self._undealt, live=live, at=list(self._at))[0]:
                self._undealt = []
        return self.channel.generation != generation

    def take_in(self, rebuild: Callable[[tuple[int, ...]], None], begun: Mapping[int, Sequence[int]]) -> None:
        """Let replicas take part again that were lost, and whose ranks have been started again and are ready. Before a push, which
        brings them the weights. rebuild: as of `drop_lost`. begun: steps whose responses have begun -> rows; they have no part in
        those."""
        while len(self.channel.live) < self.seats.replicas:
            self.drop_lost(rebuild)
            found = raised_by_all(lambda: self._to_join() if self._rank == 0 else None, *_ENDS)
            if (replica := told_by(0, found)) is None:
                return
            if self._rank == 0:
                self.channel.welcome(replica)
            self._joining, live = replica, sorted([*self.channel.live, replica])
            self.go_on_with(live)

            def renewed() -> None:
                self.renew_with_new()
                with self.entered():
                    rebuild(self.seats.engine_positions(self.channel.live))
                    exchanged_by_rank({})

            steps = {str(step): list(rows) for step, rows in begun.items()}
            if not self.hold("join", renewed, joins=replica, live=live, at=list(self._at), steps=steps)[0]:
                continue
            ranks = self.seats.of(replica)
            if self._rank == 0 and self._folder is not None:
                note_joined(self._folder, ranks)
            self._joining = None
            self._write_spare()
            said = f"the rollout half has replica {replica} again ({name_ranks(ranks)})"
            warn_once(logger, "%s; %d of %d go on", said, len(live), self.seats.replicas)

    def _to_join(self) -> int | None:
        if self._script is not None:
            if not self._script or not self._script[0].joins or self._script[0].at != self._at:
                return None
            (replica,) = self._script.popleft().replicas
            self.channel.wait_until_ready(replica)
            return replica
        lost = [replica for replica in range(self.seats.replicas) if replica not in self.channel.live]
        for replica in filter(self.channel.is_ready, lost):  # of which one may have ended since
            if self._folder is None or all(is_joining(self._folder, rank) for rank in self.seats.of(replica)):
                return replica
        return None

    def _newly_lost(self) -> dict[int, str]:
        scripted = self._scripted()
        for replica in scripted:
            self.channel.give_up(replica, f"{_BY_LOG} of the run that is repeated")
        if scripted and self._script:
            self._script.popleft()
        found = self.channel.lost(self.channel.live)
        return {one: found[one] for one in [*scripted, *found]}

    def _scripted(self) -> Sequence[int]:
        """Return the replicas that the run which is repeated has lost here."""
        first = self._script[0] if self._script else None
        is_due = first is not None and not first.joins and first.at == self._at and set(first.replicas) <= set(self.channel.live)
        return first.replicas if first is not None and is_due else ()

    def _look(self) -> None:
        """Look for what the launcher has noted of ranks that were killed."""
        if self._folder is None or time.monotonic() - self._looked_at < _LOOK_S:
            return
        self._looked_at = time.monotonic()
        for replica in self.channel.live:
            for rank in () if replica == self._joining else self.seats.of(replica):
                if (how := end_of_lost(self._folder, rank)) is not None:
                    self.channel.give_up(replica, how)

    def close(self) -> None:
        """Leave the group at the end of the run."""
        self.leave()
        if self._rank == 0:
            self.channel.end()
        if self._rank == 0 and self._folder is not None:
            (self._folder / SPARE_RANKS).unlink(missing_ok=True)

    def _write_spare(self) -> None:
        """Tell the launchers which ranks may end: those of a line together. Ranks of a lost replica end one after the other."""
        if self._rank == 0 and self._folder is not None:
            kept = () if self.are_voted else self.channel.live
            spare = [" ".join(map(str, self.seats.of(one))) for one in range(self.seats.replicas) if one not in kept]
            with contextlib.suppress(OSError):  # a full disk: a loss then ends the run
                (self._folder / SPARE_RANKS).write_text("\n".join(spare), encoding="utf-8")


_BY_LOG = "by the log"


# ----------------------------------------------------------------------------------------------------------- the rollout half


class Guests(Meetings):
    """A rollout rank's part."""

    replica, group = 0, None

    def of(self, replica: int, group: dist.ProcessGroup | None) -> None:
        """Say which replica this rank is of; group: its ranks."""
        self.replica, self.group = replica, group
        if self.are_voted:
            self._watch_live()

    def wait_to_join(self, meanwhile: Callable[[], None]) -> bool:
        """Say that this replica, which was lost, is ready, and wait until it may take part. Collective over its ranks. False if the
        run is over first."""
        leads, name = self.group is None or self.group.rank() == 0, uuid.uuid4().hex
        if leads:
            self.channel.ask_to_join(self.replica, name)
        while True:
            meanwhile()
            answer = self.channel.answer(name) if leads else None
            answer = answer if self.group is None else gathered(answer, self.group)[0]
            if answer is not None:
                if answer:
                    self.channel.enter(answer)
                return bool(answer)
            time.sleep(_LOOK_S)

    def take_part(self, action: Callable[[], T], before_vote: Callable[[], None] = lambda: None) -> tuple[bool, T | None]:
        """Take part in the meeting that was heard last; return whether it counts, and what `action` returned here. before_vote:
        what must have been done if it counts, whatever becomes of this process then."""
        if not self.are_voted:
            with self.entered():
                found = action()
            before_vote()
            return True, found
        found, fault = self.attempt(action)
        try:
            failed = fault is not None if self.group is None else any_rank(fault is not None, self.group)
            before_vote()
            counts = given_up = False
            if self.group is None or self.group.rank() == 0:
                self.channel.vote(self.replica, not failed)
                try:
                    counts = self.channel.counts(self.replica)
                except GivenUp:
                    given_up = True
            if self.group is not None:
                counts, given_up = (votes > 0 for votes in tally([counts, given_up], self.group))
        except RuntimeError as error:
            self.end_if_lost(error)
            raise
        if given_up:
            self.channel.require_member(self.replica)
        if not counts:
            self.leave()
        return counts, found

    def end_if_lost(self, error: BaseException) -> None:
        """End this process if another rank of its replica is lost, of which `error` may be the first sign."""
        is_sign = self.are_voted and self.seats.tp > 1 and (raised_in_exchange(error) or isinstance(error, RankIsLate))
        until = time.monotonic() + (self._timeouts.heartbeat_s + _MARGIN_S) * is_sign
        while time.monotonic() < until:
            if why := self.channel.lost([self.replica]):
                logger.warning("rank %d: its replica %d is lost: %s; this rank ends", self._rank, *why.popitem())
                kill_with_children(os.getpid())  # the launchers take any other end of a rank for a failure of the run
            time.sleep(_LOOK_S)
