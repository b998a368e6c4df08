"""Watchdog of a rank: ends a run that hangs, and says who holds it up. Imports no torch.

Two daemon threads per rank. One talks to the job's store over its own connection: every beat it writes a sign of life, reads the
next rank's (N requests for N ranks) and asks for a verdict. The other waits for nobody: it watches the present section's time, the
next rank's signs and the store, and ends this process.

    stopped or dead rank, interpreter blocked by C code    its signs of life stop for heartbeat_s: noticed by the rank before it
    a section that takes too long                          by the rank itself
    no rank works in sections that are new (start_s)       by every rank, as each counts those that do in the store
    an exchange that takes too long (pass_s, meeting_s)    by the ranks that give up waiting and raise
    the store's process stopped or dead                    by every rank for itself
    the same of all ranks at once, or of the only one      by the launcher on this machine, if it is ours (`life.py`)

After a verdict all ranks write their stacks and places, and one prints the report. SIGKILL ends them, as no exception reaches a
main thread that waits in C code; a rank that cannot do this itself is ended by others on its host.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Protocol

from megappo.config.run_sections import TimeoutsConfig
from megappo.runtime.life import DUMP_SIGNAL, SignOfLife, Store, WorkMeter, dump_stacks_of, kill_with_children
from megappo.runtime.messages import first_line
from megappo.runtime.sections import AwakeClock, SectionFile, Sections, Where
from megappo.runtime.verdict import (
    REPORTS,
    SIGHTINGS,
    VERDICT,
    VERDICTS,
    Member,
    Report,
    Sighting,
    Verdict,
    encode,
    innermost_frame,
    judge,
    main_thread_place,
    place_of,
    raised_in_exchange,
    record_verdict,
)

# Seconds for the exchange after a verdict: ranks answer within a beat, the store within milliseconds.
EXCHANGE_S, ANSWERS_S = 6.0, 2.0
# Head start of rank 0 as the one that prints the report.
CLAIM_S = 0.5
REPORT_READ_S = 0.3
_VERDICT, _REPORTER, _REPORT = "verdict", "reporter", "report"
_DONE = "done"
_WORK = "work"  # key of the store: how often a rank was found at work
LOOKS = 10  # at the work of all ranks, in `start_s`


class SharedStore(Store, Protocol):
    """The methods of `torch.distributed.Store` that the watchdog uses. `compare_set` sets a missing key if "" is expected."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...


class _Stillness:
    """Seconds for which no rank was at work. Called from one thread."""

    def __init__(self, limit_s: float, sections: Sections, clock: AwakeClock) -> None:
        self._limit_s, self._sections, self._clock = limit_s, sections, clock
        self._meter = WorkMeter(limit_s / LOOKS, clock)
        self.count, self._since = 0, clock.now()

    def works(self) -> bool:
        """True if this rank works, or its hang would be found by a limit that it has learned."""
        is_new = self._sections.now().seconds < self._limit_s / LOOKS  # also a section that goes on, as scoring does
        return self._meter.has_worked() or is_new or not self._sections.may_stand_still()

    def note(self, count: int) -> None:
        """Take the number of times that any rank was found at work."""
        if count != self.count:
            self.count, self._since = count, self._clock.now()

    def suspicion(self, rank: int) -> Verdict | None:
        still_s = self._clock.now() - self._since
        if still_s <= self._limit_s:
            return None
        where = self._sections.now().section
        return Verdict.now(rank, f"no rank works for {still_s:.0f} s in {where} (run.timeouts.start_s = {self._limit_s:g})", rank)


class Watchdog:
    """Watches this rank and the next one while it is entered; the run marks its work in `sections`. members: all ranks. store: a
    connection that nobody else uses; None in a world of one rank. folder: exists; gets `rank-N.stacks`, `rank-N.late.stacks` (if
    the rank's own watchdog is blocked), `rank-N.section` and the verdict. sign: to the launcher, if it listens."""

    def __init__(
        self,
        rank: int,
        members: Sequence[Member],
        store: SharedStore | None,
        timeouts: TimeoutsConfig,
        folder: Path,
        sign: SignOfLife | None = None,
    ) -> None:
        self._rank, self._members, self._folder, self._sign = rank, members, folder, sign
        self._heartbeat_s = timeouts.heartbeat_s
        self._interval_s = min(1.0, timeouts.heartbeat_s / 10)
        self._clock = AwakeClock(self._interval_s)
        self._section_file = SectionFile(folder, rank)
        self.sections = Sections(timeouts, self._clock, self._section_file)
        self.stillness = _Stillness(timeouts.start_s, self.sections, self._clock)
        self._pulse = None if store is None else _Pulse(self, store)
        self._stop = threading.Event()
        self._raised_at: TracebackType | None = None
        self._spare: Mapping[int, Callable[[str], object]] = {}
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._stacks = (self._folder / f"rank-{self._rank}.stacks").open("w", encoding="utf-8")
        # A stopped rank that continues is asked for its stacks and is late at once: in one file the two would mix.
        self._late_stacks = (self._folder / f"rank-{self._rank}.late.stacks").open("w", encoding="utf-8")
        if self._rank == 0:
            (self._folder / VERDICT).unlink(missing_ok=True)  # of an earlier start in this directory
        faulthandler.register(DUMP_SIGNAL, file=self._stacks, all_threads=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {DUMP_SIGNAL})  # a launcher of ours blocks it until here
        self._thread.start()
        if self._pulse is not None:
            self._pulse.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        # A reward's own request may time out too
        gave_up = error is not None and "timed out" in str(error).lower() and raised_in_exchange(error)
        if self._pulse is not None and error is not None and trace is not None and gave_up:
            # The rank that gave up waiting is not the one that is late: let all ranks say where they are.
            self._raised_at = trace
            why = f"rank {self._rank} gave up waiting: {first_line(error)[:300]}"
            self._pulse.propose(Verdict.now(self._rank, why, self._rank))
            self._pulse.over.wait(EXCHANGE_S)
        elif self._pulse is not None and self._pulse.verdict is not None:
            time.sleep(2 * EXCHANGE_S)  # an error that follows from the end of another rank, or the end itself: SIGKILL comes
        self._stop.set()
        if self._pulse is not None:
            self._pulse.join()
        self._thread.join()
        if self._sign is not None:
            self._sign.end()
        self._section_file.remove()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(DUMP_SIGNAL)
        for stacks in (self._stacks, self._late_stacks):
            stacks.close()
            path = Path(stacks.name)
            if path.stat().st_size == 0:
                path.unlink()

    def of_step(self, step: int) -> Sections:
        """Return the observer of a step's stages."""
        return self.sections.of_step(step)

    def section(self, name: str) -> AbstractContextManager[None]:
        return self.sections.section(name)

    def go_on_with(self, ranks: Collection[int], spare: Mapping[int, Callable[[str], object]]) -> None:
        """Watch these ranks alone from here on. spare: rank -> called once, from another thread, with the reason, if it is silent,
        as the run goes on without it."""
        self._members = [member for member in self._members if member.rank in ranks]
        self._spare = spare

    def take_in(self, members: Sequence[Member]) -> None:
        """Watch these from here on, some of which are new."""
        self._members = list(members)
        if self._pulse is not None:
            self._pulse.take_in([member.rank for member in members])

    # ------------------------------------------------------------------------------------------------------ own thread

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._clock.tick()
            if self._sign is not None:
                self._sign.give(self.sections.now())
            # If this thread is blocked, C code writes the stacks without the interpreter; each tick postpones that.
            faulthandler.dump_traceback_later(self._heartbeat_s, file=self._late_stacks)
            if self._pulse is not None and not self._pulse.answers(self._heartbeat_s):
                why = f"the job's store (rank 0's process, or the launcher) did not answer for {self._heartbeat_s:g} s"
                self._end_alone(Verdict.now(0, why, self._rank))
            verdict = self._suspicion()
            if verdict is not None and self._pulse is not None:
                self._pulse.propose(verdict)
            elif verdict is not None:
                self._end_alone(verdict)
            if self._pulse is not None and self._pulse.verdict is not None:
                self._wait_for_the_report(self._pulse)
                self._end(self._pulse.report)
                return

    def _wait_for_the_report(self, pulse: _Pulse) -> None:
        until = time.monotonic() + EXCHANGE_S
        while not pulse.over.wait(self._interval_s) and time.monotonic() < until:
            if self._sign is not None:  # or the launcher would take all ranks for silent
                self._sign.give(self.sections.now())

    def _suspicion(self) -> Verdict | None:
        where = self.sections.now()
        if where.seconds > where.limit_s:
            why = f"{where.section} takes {where.seconds:.0f} s, its limit is {where.limit_s:.0f} s"
            return Verdict.now(self._rank, why, self._rank)
        if self._pulse is None:
            self.stillness.note(self.stillness.count + int(self.stillness.works()))
        silence = None if self._pulse is None else self._pulse.silence(self._heartbeat_s)
        return silence or self.stillness.suspicion(self._rank)

    def _end_alone(self, verdict: Verdict) -> None:
        here = {self._rank: self.dump_and_look()}
        alone = [member for member in self._members if member.rank == self._rank]
        report = judge(verdict, alone, here, self._folder) if self._pulse is None else _without_store(verdict, here[self._rank])
        sys.stderr.write(report.text)
        with contextlib.suppress(OSError):  # a full disk must not keep this rank alive
            record_verdict(self._folder, report, verdict, self._members)
        self._end(report)

    def dump_and_look(self) -> Sighting:
        """Write the stacks of all threads of this process to its file; return where it is."""
        faulthandler.dump_traceback(file=self._stacks, all_threads=True)
        if self._raised_at is None:
            return Sighting(self.sections.now(), main_thread_place())
        return Sighting(self.sections.raised_in or self.sections.now(), place_of(innermost_frame(self._raised_at)))

    def _end(self, report: Report | None) -> None:
        """Kill the silent ranks on this host, then this process, each with what it started. A rank that has raised ends by its
        exception."""
        sys.stderr.flush()
        self._end_here([] if report is None else report.silent)
        if self._raised_at is None:
            kill_with_children(os.getpid())

    def _end_here(self, ranks: Collection[int]) -> None:
        for member in self._members:
            if member.rank in ranks and member.is_here() and member.rank != self._rank:
                dump_stacks_of(member.pid)
                kill_with_children(member.pid)


class _Pulse:
    """The thread that talks to the store. `verdict` is set once; `over` when the exchange after it has ended."""

    def __init__(self, owner: Watchdog, store: SharedStore) -> None:
        self._owner, self._store = owner, store
        self._rank, self._left_out = owner._rank, set[int]()
        self._next = self._after(self._rank)
        self._beats, self._heard, self._answered_at = 0, b"", owner._clock.now()
        self._heard_at = self._answered_at
        self._proposal: Verdict | None = None
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog-pulse", daemon=True)
        self.verdict: Verdict | None = None
        self.report: Report | None = None
        self.over = threading.Event()

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._wake.set()
        self._thread.join(timeout=ANSWERS_S)  # it may wait for a store that is gone

    def propose(self, verdict: Verdict) -> None:
        self._proposal = verdict
        self._wake.set()

    def answers(self, within_s: float) -> bool:
        return self._owner._clock.now() - self._answered_at <= within_s

    def silence(self, limit_s: float) -> Verdict | None:
        """Suspect the next rank if its sign of life has not changed for `limit_s`, counted up to the store's last answer."""
        if (why := self._why_silent(limit_s)) is None or self._next in self._owner._spare:
            return None
        return Verdict.now(self._next, why, self._rank)

    def _why_silent(self, limit_s: float) -> str | None:
        silent_s = self._answered_at - self._heard_at
        if silent_s <= limit_s or self._heard == _DONE.encode():
            return None
        return f"no sign of life of rank {self._next} for {silent_s:.0f} s"

    def _after(self, rank: int) -> int:
        """Return the rank that this one watches if `rank` is the last that it does not."""
        others = sorted({member.rank for member in self._owner._members} - self._left_out | {self._rank})
        return next((one for one in others if one > rank), others[0])

    def take_in(self, ranks: Collection[int]) -> None:
        self._left_out.difference_update(ranks)
        self._next, self._heard, self._heard_at = self._after(self._rank), b"", self._owner._clock.now()

    def _pass_over(self) -> None:
        """Watch the rank after the next one, which is lost or was left out."""
        if (why := self._why_silent(self._owner._heartbeat_s)) is not None and self._next in self._owner._spare:
            self._owner._spare[self._next](why)
            self._left_out.add(self._next)
            self._owner._end_here([self._next])  # it may only be stopped
        if self._next in self._left_out or all(member.rank != self._next for member in self._owner._members):
            self._next = self._after(self._next)
            self._heard, self._heard_at = b"", self._owner._clock.now()

    def _run(self) -> None:
        while not self._owner._stop.is_set():
            try:
                self._beat()
            except Exception:  # DistStoreError, or of the socket: the other thread notices that no answer comes
                pass
            if self.verdict is not None:
                try:
                    self._exchange(self.verdict)
                except Exception as error:
                    sys.stderr.write(f"megappo: rank {self._rank}: the report is incomplete: {error}\n")
                self.over.set()
                return
            self._wake.wait(self._owner._interval_s)
            self._wake.clear()
        with contextlib.suppress(Exception):  # the store may be gone already
            self._store.set(self._beat_key(self._rank), _DONE)

    def _beat(self) -> None:
        self._beats += 1
        life = {"beat": self._beats, "where": vars(self._owner.sections.now())}
        self._store.set(self._beat_key(self._rank), json.dumps(life))
        self._pass_over()
        key = self._beat_key(self._next)
        heard = self._store.get(key) if self._heard or self._store.check([key]) else b""
        now = self._owner._clock.now()
        if heard != self._heard:
            self._heard, self._heard_at = heard, now
        proposal = encode(self._proposal) if self._proposal is not None else ""
        verdict = self._store.compare_set(_VERDICT, "", proposal)  # "" asks only
        self._answered_at = now
        if verdict:
            self.verdict = VERDICTS.validate_json(verdict)
        else:
            self._owner.stillness.note(self._store.add(_WORK, int(self._owner.stillness.works())))

    def _exchange(self, verdict: Verdict) -> None:
        """Tell the others where this rank is; one of them judges, all print."""
        self._store.set(f"at/{self._rank}", encode(self._owner.dump_and_look()))
        if self._rank != 0:
            self._wait_for(_REPORT, CLAIM_S)
        if int(self._store.compare_set(_REPORTER, "", str(self._rank))) == self._rank:
            sightings, members = self._sightings(), self._owner._members
            last = {member.rank: self._last_seen(member.rank) for member in members if member.rank not in sightings}
            heard = {rank: where for rank, where in last.items() if where is not None}
            self.report = judge(verdict, members, sightings, self._owner._folder, heard)
            sys.stderr.write(self.report.text)
            record_verdict(self._owner._folder, self.report, verdict, members)
            self._store.set(_REPORT, encode(self.report))
            time.sleep(REPORT_READ_S)  # the store may live in this process
        elif self._wait_for(_REPORT, ANSWERS_S + 1):
            self.report = REPORTS.validate_json(self._store.get(_REPORT))
            sys.stderr.write(f"megappo: rank {self._rank} ends: {self.report.line}\n")

    def _sightings(self) -> dict[int, Sighting]:
        waiting = [member.rank for member in self._owner._members]
        found: dict[int, Sighting] = {}
        deadline = time.monotonic() + ANSWERS_S
        while waiting and time.monotonic() < deadline:
            for rank in list(waiting):
                if self._store.check([f"at/{rank}"]):
                    found[rank] = SIGHTINGS.validate_json(self._store.get(f"at/{rank}"))
                    waiting.remove(rank)
            time.sleep(0.05)
        return found

    def _last_seen(self, rank: int) -> Where | None:
        key = self._beat_key(rank)
        life = self._store.get(key) if self._store.check([key]) else b""
        return Where(**json.loads(life)["where"]) if life not in (b"", _DONE.encode()) else None

    def _wait_for(self, key: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _beat_key(self, rank: int) -> str:
        return f"beat/{rank}"


def _without_store(verdict: Verdict, here: Sighting) -> Report:
    line = f"rank {verdict.by} ends, and cannot ask the others: {verdict.why}"
    return Report((verdict.rank,), (verdict.rank,), line, f"megappo: {line}\n  rank {verdict.by}: {here.place} ({here.where})\n")
