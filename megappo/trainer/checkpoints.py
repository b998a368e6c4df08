"""When a run makes checkpoints, what it does after failed saves and fatal errors, and where it resumes; `checkpoint/` has the
files. Public methods are collective over the world unless they say otherwise: all ranks call them, and all raise or none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch.distributed as dist

from megappo.checkpoint.interval import expected_mtbf_hours
from megappo.checkpoint.manifest import BEST, DamagedCheckpoint, Manifest, models_of
from megappo.checkpoint.rng import read_rng, set_rng
from megappo.checkpoint.state import StatefulComponent, StatefulModel, non_finite_tensors
from megappo.checkpoint.store import CheckpointStore, SaveFailed
from megappo.config.run_sections import CheckpointConfig
from megappo.engine.base import Engine
from megappo.parallel.consensus import RankFault, on_every_rank, on_rank_zero, tally, warn_once
from megappo.parallel.layout import ParallelLayout
from megappo.rewards.compose import RewardError
from megappo.rollout.types import EnvironmentFault
from megappo.runtime.ending import StopRequest, Unrecoverable
from megappo.runtime.sections import CHECKPOINT, Sections
from megappo.telemetry.metrics import Metric
from megappo.telemetry.runlog import RunLog
from megappo.trainer.model_outputs import NonFiniteOutput
from megappo.trainer.sampler_check import SamplerMismatch
from megappo.trainer.save_schedule import BestCheckpoint, SaveSchedule
from megappo.trainer.state import TrainerState

logger = logging.getLogger(__name__)

MAX_FAILED_SAVES = 3
"""Failed saves in a row that end a run: it would lose its work anyway."""
SAVE_S = "save_s"
"""Fact of a checkpoint: seconds that a save of its run blocked training, 0 for the first save."""
RAISED_BY_ALL = (RewardError, EnvironmentFault, NonFiniteOutput, SamplerMismatch)
"""Errors that every rank raises at the same point of a step, so the ranks can still save together."""


class NonFiniteWeights(Unrecoverable):
    """A weight or optimizer state is NaN or infinite. The message names role, rank, stage and tensor."""


@dataclass(frozen=True)
class Contents:
    """State of a run. models: trained role -> engine, None on ranks where it does not live. components: small state beside `state`.
    extras: more models with state of their own, which a checkpoint may lack. layouts: of all models, for messages. in_flight: makes
    further files of this rank, by name; collective over the world."""

    models: Mapping[str, Engine | None]
    state: TrainerState
    components: Mapping[str, StatefulComponent]
    layouts: Mapping[str, ParallelLayout]
    extras: Mapping[str, StatefulModel | None] = field(default_factory=dict)
    in_flight: Callable[[], Mapping[str, bytes]] = dict


class RunAround(NamedTuple):
    """Parts of the run that its checkpoints use. epochs_done: whole passes over the prompts so far, for `save_every: epoch`."""

    stop: StopRequest
    log: RunLog
    sections: Sections
    epochs_done: Callable[[], int]


class Checkpoints:
    """Checkpoints of one run, written during training unless `checkpoint.asynchronous` is false. The run waits for the last."""

    def __init__(
        self,
        store: CheckpointStore,
        settings: CheckpointConfig,
        facts: Mapping[str, Any],
        contents: Contents,
        run: RunAround,
        *,
        best: BestCheckpoint | None = None,
    ) -> None:
        self._store, self._asynchronous, self._facts = store, settings.asynchronous, facts
        self._models: dict[str, StatefulModel | None] = {**contents.models, **contents.extras}
        self._extras, self._state, self._layouts = contents.extras, contents.state, contents.layouts
        self._components = {"trainer": contents.state, **contents.components}
        self._in_flight = dict if settings.save_only_model else contents.in_flight
        self._with_optimizer = not settings.save_only_model
        self._stop, self._log, self._sections, self._epochs_done = run
        self._best = best or BestCheckpoint(None, "max", contents.state)
        self._best_of_save: dict[int, dict[str, Any] | None] = {}  # step -> best of the state that the save holds
        self._mtbf_hours = expected_mtbf_hours(dist.get_world_size())
        self._schedule = SaveSchedule(settings, self._mtbf_hours)
        self._chooses = settings.save_every == "auto"
        self._saves_end = settings.save_every != "never"
        self._announced = False
        self._saved_step = 0
        self._updating, self._awaits_push = False, False
        self._failed_in_a_row = 0
        self._held_s = 0.0
        self.failed_saves = 0

    # ---------------------------------------------------------------------------------------------------------- one step

    @contextmanager
    def guard_step(self) -> Iterator[None]:
        """Wrap one step: on an error that all ranks raise, save the last good state and re-raise."""
        states = {name: component.state_dict() for name, component in self._components.items()}
        before, rng, self._updating = self._state.step, read_rng(), False
        try:
            yield
        except RAISED_BY_ALL as error:
            if not self._updating:  # the weights are those of before the step; so become the cursor and the generators
                for name, component in self._components.items():
                    component.load_state_dict(states[name])
                set_rng(rng)
            with self._sections.section(CHECKPOINT):
                error.add_note(self._save_emergency(error, is_whole=not self._updating or self._state.step > before))
            raise
        except Unrecoverable as error:  # raised by all ranks too
            with self._sections.section(CHECKPOINT):
                error.add_note(f"no emergency checkpoint is made of such a state; {self._drained()}")
            raise

    def begin_updates(self) -> None:
        """Mark the start of the step's updates, until whose end the state cannot be saved. Not collective."""
        self._updating = True

    def end_of_step(
        self, step: int, *, is_last: bool, evaluated: Mapping[str, float] = MappingProxyType({}), is_pushed: bool = True
    ) -> bool:
        """Make the checkpoint that is due after `step`; return True if the run must stop because a rank was asked to.
        evaluated: metrics of the evaluations after this step, equal on all ranks; a new best causes a checkpoint.
        is_pushed: the sampler holds this step's weights.
        SaveFailed if the last checkpoint of the run cannot be written, or after MAX_FAILED_SAVES failures in a row.
        NonFiniteWeights if the state is not finite."""
        self._held_s = 0.0
        pending = self._store.pending
        writing = pending is not None and not pending.done()
        is_best = self._best.observe(step, evaluated)
        # A due checkpoint waits for the next push. A resumed run pushes first, and must sample from the same weights as this run.
        self._awaits_push |= self._schedule.is_due(step, self._epochs_done()) and not (self._chooses and pending is not None)
        is_due = is_best or (self._awaits_push and is_pushed)
        self._awaits_push &= not is_pushed
        votes = (self._stop.received is not None, writing, is_due and dist.get_rank() == 0)  # due by rank 0's clock
        asked, still_writing, due = tally(votes)
        stopped = asked > 0 and not is_last
        with self._sections.section(CHECKPOINT):
            if stopped or (is_last and self._saves_end):
                self._save_last(step)
            elif due:
                self._attempt(lambda: self._save_due(step))
            elif pending is not None and not still_writing:
                self._attempt(self._drain)
        return stopped

    def metrics(self) -> dict[str, float]:
        """Return the figures of saving, logged with the step after a save. Not collective."""
        return {Metric.FAILED_SAVES.value: self.failed_saves, Metric.SAVE_SECONDS.value: self._held_s}

    @property
    def way_on(self) -> str:
        """Way to continue from a checkpoint of this run, for messages. Not collective."""
        if self._with_optimizer:
            return "--resume goes on from there"
        return "it holds weights only (checkpoint.save_only_model), so --resume cannot go on from there"

    # -------------------------------------------------------------------------------------------------------------- saves

    def _attempt(self, save: Callable[[], None]) -> None:
        """Run `save`; if it fails, the run goes on. SaveFailed after MAX_FAILED_SAVES in a row."""
        started = time.monotonic()
        try:
            save()
        except (SaveFailed, RankFault) as error:
            self._count_failure()
            self._best.forget_unsaved()
            if self._failed_in_a_row >= MAX_FAILED_SAVES:
                raise SaveFailed(f"{self._failed_in_a_row} saves in a row failed, the last one so: {error}") from error
            warn_once(logger, "%s; training goes on, failure %d of %d in a row", error, self._failed_in_a_row, MAX_FAILED_SAVES)
        finally:
            self._held_s = time.monotonic() - started
            self._schedule.worked(self._held_s)
        self._announce()

    def _save_due(self, step: int) -> None:
        self._drain()
        self._require_finite(step)
        self._best_of_save[step] = self._state.best
        if self._asynchronous:
            self._store.begin_save(step, self._models, self._components, self._facts_now(), self._in_flight())
        else:
            self._save(step)

    def _drain(self) -> None:
        pending = self._store.pending
        if pending is not None:
            self._store.drain()
            self._count_success(pending.step)

    def _drained(self) -> str:
        """Complete the pending save and return a line of a message that names the newest checkpoint."""
        try:
            self._drain()
        except (SaveFailed, RankFault) as failure:
            return f"{failure}; {self._newest()}"
        return self._newest()

    def _save_last(self, step: int) -> None:
        try:
            self._save_and_wait(step)
        # There is no later save to make up for this one.
        except (SaveFailed, RankFault) as error:
            self._count_failure()
            warn_once(logger, "%s; it is the run's last checkpoint and is tried once more", error)
            self._save_and_wait(step)

    def _save_and_wait(self, step: int) -> None:
        self._drain()
        self._require_finite(step)
        self._save(step)

    def _save(self, step: int, **facts: str) -> None:
        self._best_of_save[step] = self._state.best
        self._store.save(step, self._models, self._components, {**self._facts_now(), **facts}, self._in_flight())
        self._count_success(step)

    def _facts_now(self) -> dict[str, Any]:
        best = {} if self._state.best is None else {BEST: self._state.best}
        return {**self._facts, SAVE_S: round(self._schedule.save_s, 3), **best}

    def _save_emergency(self, error: Exception, *, is_whole: bool) -> str:
        """Save the state after the last whole step unless it is saved; return the outcome as a line of the error's message."""
        step = self._state.step
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        newest = self._drained()
        if not is_whole:
            return f"no emergency checkpoint: the error came between the updates of step {step + 1}; {newest}"
        if step == self._saved_step:
            return f"no emergency checkpoint is needed; {newest}"
        try:
            self._require_finite(step)
            self._save(step, emergency=reason)
        except (SaveFailed, RankFault, NonFiniteWeights) as failure:
            return f"no emergency checkpoint: {failure}; {newest}"
        return f"emergency checkpoint: the state after step {step} is saved; {self.way_on}"

    def _count_success(self, step: int) -> None:
        self._saved_step, self._failed_in_a_row = step, 0
        self._best.saved(step, self._best_of_save.pop(step, None))
        self._schedule.saved()

    def _count_failure(self) -> None:
        self.failed_saves += 1
        self._failed_in_a_row += 1
        self._schedule.failed()

    def _announce(self) -> None:
        if self._chooses and not self._announced and self._schedule.save_s:
            self._announced = True
            minutes = self._schedule.interval_s / 60
            self._log.note(
                f"checkpoint.save_every is auto: a save holds training for {self._schedule.save_s:.2f} s and a failure is expected "
                f"every {self._mtbf_hours:.3g} h, so there is a checkpoint about every {minutes:.3g} min"
            )

    def _newest(self) -> str:
        return f"the newest checkpoint is step-{self._saved_step}" if self._saved_step else "this run has no checkpoint"

    # ------------------------------------------------------------------------------------------------------------- resume

    def resume(self, manifest: Manifest, skip: Collection[int] = ()) -> list[str]:
        """Restore the checkpoint of `CheckpointStore.find_resumable`, or the next older one if it is damaged or not finite.
        skip: steps to pass over. Returns the names of the extra models that the checkpoint lacks; they stay as they are.
        NonFiniteWeights if no other checkpoint is left; ValueError if all are damaged."""
        not_finite: list[int] = []
        while (fault := self._restore(manifest)) is not None:
            step = manifest.step
            if isinstance(fault, NonFiniteWeights):  # one that is damaged has been set aside
                not_finite.append(step)
                warn_once(logger, "step-%d is no state to go on from (%s); trying the next older checkpoint", step, fault)
            try:
                manifest = self._store.find_resumable(self._facts, (*skip, *not_finite))
            except ValueError as error:
                if isinstance(fault, NonFiniteWeights):
                    raise NonFiniteWeights(f"no checkpoint to go on from: {fault} in step-{step}; {error}") from error
                raise type(error)(f"step-{step} is damaged ({fault}), and {error}") from error
        self._saved_step = manifest.step
        if line := self._best.resume(on_rank_zero("looking for checkpoints", self._store.steps)):
            warn_once(logger, "%s", line)
        self._schedule.expect(manifest.facts.get(SAVE_S, 0.0), self._epochs_done())
        self._log.resume_after(manifest.step)
        self._log.note(f"resumed after step {manifest.step}")
        return sorted(self._models.keys() - self._held_in(manifest).keys())

    def _restore(self, manifest: Manifest) -> DamagedCheckpoint | NonFiniteWeights | None:
        try:
            self._store.restore(manifest, self._held_in(manifest), self._components)
        except DamagedCheckpoint as damage:  # found by the hashes, which were made while the models were built; nothing was loaded
            return damage
        fault = self._non_finite()
        return NonFiniteWeights(fault) if fault else None

    def _held_in(self, manifest: Manifest) -> dict[str, StatefulModel | None]:
        there = models_of(manifest)
        return {name: model for name, model in self._models.items() if name in there or name not in self._extras}

    # ------------------------------------------------------------------------------------------------------------- finite

    def _require_finite(self, step: int) -> None:
        fault = self._non_finite()
        if fault:
            raise NonFiniteWeights(f"the state after step {step} is not saved: {fault}")

    def _non_finite(self) -> str:
        """Describe the first NaN or infinite value on any rank, the same text on all ranks; empty if there is none."""
        here = {role: model for role, model in self._models.items() if model is not None}
        mine = {role: non_finite_tensors(model, with_optimizer=self._with_optimizer) for role, model in here.items()}
        faults = [self._describe(role, here[role], tensors) for role, tensors in mine.items() if tensors]
        everyone = on_every_rank("looking for NaN", lambda: faults[:1])
        return next((fault for theirs in everyone for fault in theirs), "")

    def _describe(self, role: str, engine: StatefulModel, tensors: list[str]) -> str:
        rank = dist.get_rank()
        at = self._layouts[role].coordinates(engine.placement.position_of(rank))
        others = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        return f"{tensors[0]}{others} of the {role} is NaN or infinite on rank {rank} (stage {at.pp}, tp {at.tp})"
