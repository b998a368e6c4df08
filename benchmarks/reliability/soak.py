"""A run under a seeded list of faults: draw the list, put the faults in one after the other, measure what the run makes of each."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reliability.faults import FATAL, KINDS, MEANING, OF_TRAINING, NotInjected, Target, is_ready, survivors
from benchmarks.reliability.live import LiveRun, Row, kill
from megappo.config.errors import ConfigError

RESTARTING = "; restart "  # in the launcher's line that announces one
# Most seconds from a fault to its restart, over the watchdog's own limit, and from a restart to its first step.
RESTART_LIMIT_S, FIRST_STEP_LIMIT_S = 120.0, 300.0
STEP_LIMIT_S = 600.0


@dataclass(frozen=True)
class Injection:
    """One fault of the list. step: it comes after this step was logged. phase: share of a step's time that is waited then."""

    kind: str
    step: int
    rank: int
    phase: float
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What a run made of a fault. at: last step before it. detected_s, recovered_s: from the fault to the announced restart, and to
    the end of the first new step. lost: steps done twice. wrong: why the fault was not survived, empty if it was.
    """

    injection: Injection
    at: int
    detected_s: float | None
    recovered_s: float | None
    lost: int
    said: str
    wrong: str = ""

    def cells(self) -> list[str]:
        """Row of a table under HEADING."""
        detected, recovered = ("-" if s is None else f"{s:.1f}" for s in (self.detected_s, self.recovered_s))
        end = self.wrong or ("went on" if self.detected_s is None else "restarted")
        return [MEANING[self.injection.kind], str(self.at), detected, recovered, str(self.lost), end]


def draw(
    kinds: Sequence[str], number: int, seed: int, *, steps: int, save_every: int, ranks: int, training_ranks: int
) -> list[Injection]:
    """Draw `number` faults, every kind in turn in a random order, evenly over the run's steps. training_ranks: the first, if others
    only generate.

    ConfigError if the run is too short: between two faults a checkpoint must be written, or the guard against restarts without
    progress would end the run.
    """
    first, last = save_every, steps - 2 * save_every - 2
    needed = first + number * (save_every + 1) + 2 * save_every + 2
    if steps < needed:
        raise ConfigError(
            f"trainer.steps = {steps}: {number} faults need at least {needed} steps with checkpoint.save_every = {save_every}"
        )
    chosen, order = random.Random(seed), list(kinds)
    injections, apart = [], (last - first) / number
    slack = min(save_every, int(apart) - save_every - 1)  # so much later, lest all faults meet the same moment between two saves
    for index in range(number):
        if index % len(order) == 0:
            chosen.shuffle(order)
        # The writer of the metrics is rank 0: the disk of another one fills up, or their rows would be lost with it.
        lowest = 1 if order[index % len(order)] == "full" else 0
        above = training_ranks if order[index % len(order)] in OF_TRAINING else ranks
        rank, phase = chosen.randrange(lowest, above), chosen.random()
        step = int(first + (index + 0.5) * apart) + chosen.randint(0, slack)
        injections.append(Injection(order[index % len(order)], min(step, last), rank, phase, chosen.randrange(2**32)))
    return injections


HEADING = ("fault", "at step", "detected after s", "first new step after s", "lost steps", "outcome")


class NotSurvived(RuntimeError):
    """The run did not make of a fault what it has to."""


class Soak:
    """Puts faults into a live run. by_hand: no launcher restarts it; this process does, with --resume, as a supervisor would."""

    def __init__(self, live: LiveRun, notes: Path, save_every: int, heartbeat_s: float, *, by_hand: bool) -> None:
        self.live, self.notes, self.save_every, self.heartbeat_s, self.by_hand = live, notes, save_every, heartbeat_s, by_hand

    def run(self, injections: Sequence[Injection], tell: Callable[[Outcome], None]) -> tuple[list[Outcome], int]:
        """Run to the end; returns what became of every fault, and the exit code of the command."""
        self.live.start()
        outcomes = []
        for injection in injections:
            outcomes.append(self.inject(injection))
            tell(outcomes[-1])
        while (code := self.live.watch(lambda: self.live.exit_code, STEP_LIMIT_S)) is None:
            if not self._advances():
                break
        return outcomes, -1 if code is None else code

    def inject(self, injection: Injection) -> Outcome:
        live, kind = self.live, injection.kind
        ready = live.watch(lambda: live.exit_code is not None or self._is_due(injection), STEP_LIMIT_S)
        if ready is None or live.exit_code is not None:
            why = f"the run never came to step {injection.step}" if ready is None else f"the run had ended with {live.exit_code}"
            return Outcome(injection, live.step, None, None, 0, "", wrong=f"not put in: {why}")
        if kind != "nan":  # that one counts steps
            time.sleep(injection.phase * self._step_s())
        live.poll()
        ranks = live.ranks()
        if injection.rank not in ranks:
            return Outcome(injection, live.step, None, None, 0, "", wrong=f"not put in: rank {injection.rank} does not run")
        target = Target(live, ranks, injection.rank, self.save_every, self.heartbeat_s, self.notes, random.Random(injection.seed))
        at, start = live.step, time.time()
        try:
            said = KINDS[kind](target)
        except NotInjected as error:
            return Outcome(injection, at, None, None, 0, "", wrong=str(error))
        if kind == "nan":  # put in long before the kill at its end
            at, start = live.step, time.time()
        return (self._after_fatal if kind in FATAL else self._after_harmless)(injection, target, at, start, said)

    def _is_due(self, injection: Injection) -> bool:
        return self.live.step >= injection.step and is_ready(injection.kind, self.live, self.save_every)

    def _after_fatal(self, injection: Injection, target: Target, at: int, start: float, said: str) -> Outcome:
        live, by_hand = self.live, self.by_hand or injection.kind == "launcher"
        restart = None
        try:
            restart = self._restart_by_hand(target) if by_hand else self._restart(target, start)
            row = self._next_row(restart, FIRST_STEP_LIMIT_S)
            if left := survivors(target.ranks):
                raise NotSurvived(f"old ranks {left} still run")
            if injection.kind == "corrupt" and not any(live.checkpoints.path.glob("bad-step-*")):
                raise NotSurvived("the damaged checkpoint was not set aside")
        except NotSurvived as error:
            return Outcome(injection, at, restart and restart - start, None, 0, said, wrong=str(error))
        reached = max((one.step for one in live.rows if one.time < restart), default=0)
        return Outcome(injection, at, restart - start, row.time - start, reached - row.step + 1, said)

    def _restart(self, target: Target, start: float) -> float:
        """Time at which the launcher announced the restart of all ranks."""
        live = self.live
        live.watch(
            lambda: live.exit_code is not None or live.first_line_after(start, RESTARTING), self.heartbeat_s + RESTART_LIMIT_S
        )
        announced = live.first_line_after(start, RESTARTING)
        if announced is None:
            for process in target.ranks.values():  # a stopped one would stay for ever
                kill(process)
            code = live.exit_code
            raise NotSurvived("no restart" if code is None else f"the command ended with exit code {code}")
        return announced

    def _restart_by_hand(self, target: Target) -> float:
        """Start the command again as soon as it and all its ranks have ended."""
        live = self.live
        if not live.watch(lambda: live.exit_code is not None and not survivors(target.ranks), self.heartbeat_s + RESTART_LIMIT_S):
            raise NotSurvived(f"ranks {survivors(target.ranks)} outlive the command")
        if live.exit_code == 0:
            raise NotSurvived("the command ended with exit code 0")
        return live.start(resume=True)

    def _after_harmless(self, injection: Injection, target: Target, at: int, start: float, said: str) -> Outcome:
        end = time.time()
        try:
            row = self._next_row(end, STEP_LIMIT_S)
            if self.live.ranks() != target.ranks:
                raise NotSurvived("the ranks were restarted")
        except NotSurvived as error:
            return Outcome(injection, at, None, None, 0, said, wrong=str(error))
        return Outcome(injection, at, None, row.time - start, 0, said)

    def _next_row(self, moment: float, limit_s: float) -> Row:
        live = self.live
        live.watch(lambda: live.exit_code is not None or live.first_row_after(moment), limit_s)
        row = live.first_row_after(moment)
        if row is None:
            code = live.exit_code
            raise NotSurvived("no step afterwards" if code is None else f"the command ended with exit code {code}")
        return row

    def _advances(self) -> bool:
        """True if a step was logged in the last STEP_LIMIT_S seconds."""
        return bool(self.live.rows) and time.time() - self.live.rows[-1].time < STEP_LIMIT_S

    def _step_s(self) -> float:
        """Median seconds from a step to the next, saves included."""
        rows = self.live.rows[-20:]
        apart = [later.time - row.time for row, later in zip(rows, rows[1:]) if later.step == row.step + 1]
        return statistics.median(apart) if apart else (rows[-1].seconds if rows else 0.0)


def wall_s(rows: Sequence[Row]) -> float:
    """Seconds from the beginning of the first step to the end of the last one."""
    return rows[-1].time - (rows[0].time - rows[0].seconds)


def productive_s(rows: Sequence[Row]) -> float:
    """Seconds of `wall_s` in steps that count, and between them: not steps done twice, nor from a fault to its first new step."""
    kept = list({row.step: row for row in rows}.values())  # of a step that was repeated the last row, in the place of the first
    kept.sort(key=lambda row: row.step)
    order = {row: index for index, row in enumerate(rows)}
    after = [False, *(order[row] == order[before] + 1 for before, row in zip(kept, kept[1:]))]
    return sum(row.time - before.time if follows else row.seconds for before, row, follows in zip([kept[0], *kept], kept, after))
