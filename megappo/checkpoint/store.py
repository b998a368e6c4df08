"""Saves and restores a run: engines (sharded), components (JSON) and random generators, all or nothing.

A save is safe against a kill at any moment: all files, their hashes, a vote of all ranks, the manifest, one rename, LATEST, and
only then the removal of old checkpoints. An asynchronous save writes in the background and votes at a later step boundary. A load
verifies every file before it opens one.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from megappo.checkpoint.background import NICE, BackgroundWriter, SnapshotFile
from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.files import FileEntry, cores_of_rank, sync_parents, write_file
from megappo.checkpoint.identity import require_same_run
from megappo.checkpoint.image import FileImage, SharedBuffer, device_of
from megappo.checkpoint.manifest import (
    STATE,
    DamagedCheckpoint,
    Manifest,
    engine_folder,
    find_wrong_size,
    list_files,
    rng_file,
    write_manifest,
)
from megappo.checkpoint.remote import COPY_S, RemoteCopies
from megappo.checkpoint.rng import encode_rng, load_rng
from megappo.checkpoint.shards import Models, ShardFiles, load_engine, on_engines
from megappo.checkpoint.state import (
    StatefulComponent,
    StatefulModel,
    digests,
    encode_components,
    file_content,
    load_components,
    read_components,
    require_equal,
)
from megappo.checkpoint.verification import Verification, begin_with_newest, newest_verified, set_damaged_aside, verify
from megappo.parallel.consensus import RankFault, on_every_rank, on_rank_zero, warn_once

logger = logging.getLogger(__name__)

LOAD_FAULTS = (RankFault, ValueError)
"""Errors that all ranks of an engine raise together if its checkpoint does not fit."""


class SaveFailed(RuntimeError):
    """A checkpoint was not written; raised on all ranks. Nothing is left of it, and earlier ones are untouched."""


@dataclass(frozen=True)
class PendingSave:
    """A save in flight, which `CheckpointStore.drain` makes a checkpoint. submitted: done once all is copied and the writer has
    it."""

    step: int
    place: Path
    facts: Mapping[str, Any]
    writer: BackgroundWriter
    submitted: Future[None]

    def done(self) -> bool:
        """True if this rank's files are written, or cannot be: `drain` would not wait for this rank. Local, returns at once."""
        return self.submitted.done() and (self.submitted.exception() is not None or self.writer.is_done())

    def entries(self) -> dict[str, FileEntry]:
        """Wait for this rank's files; return their entries. Raises the error of the copy, or OSError of the write."""
        self.submitted.result()
        try:
            return self.writer.result()
        except FileNotFoundError:
            _require_shared(self.place)
            raise


_Copies = dict[str, tuple[list[SnapshotFile], Future[None]]]
"""Name of an engine, "" of everything else -> its files in a buffer; done once the copy is complete or has failed."""


class CheckpointStore:
    """Checkpoints of one run under `directory`, which all ranks share. Every method is collective unless it says otherwise.

    keep_last: complete checkpoints that stay. save_only_model: weights only, for export, not for resuming. owner: id of the run's
    lease, equal on every rank; without it nothing of other processes is renamed or removed. remote: URL for copies by rank 0
    (`remote.py`).

    To not wait for the disk, call `begin_save` where a save is due, and `drain` at the step boundary where `pending` is done on all
    ranks, and before the end; both on all ranks at the same point.
    """

    def __init__(
        self,
        directory: str | Path,
        keep_last: int,
        save_only_model: bool = False,
        owner: str | None = None,
        remote: str | None = None,
    ) -> None:
        if keep_last < 1:
            raise ValueError(f"checkpoint.keep_last = {keep_last}; at least 1 must be kept")
        self._directory = CheckpointDirectory(Path(directory), owner)
        self._keep_last = keep_last
        self._save_only_model = save_only_model
        self._files: dict[str, ShardFiles] = {}  # of every engine, by its name
        self._buffers: dict[str, SharedBuffer] = {}
        self._copier = ThreadPoolExecutor(1, "snapshot", initializer=_let_training_go_first)
        self._writer = BackgroundWriter()
        self._pending: PendingSave | None = None
        self._verification: Verification | None = None  # of what `restore` will load
        self._copies = RemoteCopies(remote) if remote is not None and dist.get_rank() == 0 else None

    # ------------------------------------------------------------------------------------------------------------ save

    def save(
        self,
        step: int,
        engines: Models,
        components: Mapping[str, StatefulComponent],
        facts: Mapping[str, Any],
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Path:
        """Write checkpoint `step`; return its directory. facts: JSON-compatible, see `identity.py`. files: further ones of this
        rank, by name. Writes in this process, without a copy in host memory. A save in flight is committed first. SaveFailed on
        every rank if one of them cannot write."""
        self.drain()
        entries: dict[str, FileEntry] = {}
        threads = cores_of_rank()
        with self._all_or_nothing(step), ThreadPoolExecutor(threads) as pool:
            place = on_rank_zero("preparing it", lambda: self._begin(step, engines))
            on_every_rank("looking for the checkpoint directory", lambda: _require_shared(place))

            def write(images: list[FileImage]) -> None:
                for image in images:
                    entries[image.name] = write_file(place / image.name, image.content(), pool, threads)
                sync_parents(place, entries)

            def write_all() -> tuple[Mapping[str, FileEntry], Mapping[str, bytes]]:
                for name, engine in engines.items():
                    if engine is not None:
                        with self._described(name, engine) as images:
                            write(images)
                encoded = self._encoded(components)
                write(self._small_files(encoded, files))
                return entries, digests(encoded)

            reports = on_every_rank("writing the checkpoint", write_all)
            require_equal([theirs for _, theirs in reports])
            manifest = self._publish(place, step, facts, [written for written, _ in reports])
        return self._retain(manifest)

    def begin_save(
        self,
        step: int,
        engines: Models,
        components: Mapping[str, StatefulComponent],
        facts: Mapping[str, Any],
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Copy the state of checkpoint `step` to host memory in a thread, and let each rank's writer process write it.

        On return everything may change, tensors by way of their engines, which first wait for the copy
        (`StatefulModel.release_state`): the checkpoint holds the state at the call, to the bit. `drain` completes it at a later
        step boundary. At most one save is in flight: an earlier one is committed first, and if that raises SaveFailed this one is
        not begun (it may be tried again). SaveFailed on every rank if one has no memory for a copy or cannot describe its state;
        later faults show in `drain`.

        Host memory of a rank: its share of the checkpoint, from the first call to `close`; later saves allocate more only if the
        state grew.
        """
        self.drain()
        copies: _Copies = {}
        with self._all_or_nothing(step):
            # One collective for all checks: on busy cores each costs as much as many tensors.
            parts = on_every_rank("copying the state", lambda: self._take(step, engines, components, files, copies))
            require_equal([components for _, components in parts])
        place, _ = parts[0]
        assert place is not None, "rank 0 made it"
        submitted = self._copier.submit(self._submit, place, copies)
        self._pending = PendingSave(step, place, copy.deepcopy(facts), self._writer, submitted)

    @property
    def pending(self) -> PendingSave | None:
        """The save in flight, if any. Not collective."""
        return self._pending

    def drain(self) -> Path | None:
        """Wait until all ranks have written the save in flight, if any, and make it a checkpoint; return its directory. SaveFailed
        on every rank if one could not write or its writer process was killed: nothing is left of the save, and the next one starts
        another process. A thread of rank 0 removes old files; the next save and `close` wait for it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        with self._all_or_nothing(pending.step):
            reports = on_every_rank("writing the checkpoint", pending.entries)
            manifest = self._publish(pending.place, pending.step, pending.facts, reports)
        return self._retain(manifest, wait=False)

    def steps(self) -> list[int]:
        """List the steps of all checkpoints, newest first, damaged ones included. Not collective."""
        return self._directory.steps()

    def finish_copies(self) -> None:
        """Wait for the copies in other storage, at most COPY_S seconds. Not collective: rank 0 makes them."""
        if self._copies is not None:
            self._copies.close(COPY_S)

    def close(self) -> None:
        """End the writer process and free its memory. Not collective; a save in flight is lost."""
        self._pending = None
        self._copier.shutdown()
        self._writer.close()
        self._buffers.clear()
        self._directory.finish_removal()

    @contextmanager
    def _all_or_nothing(self, step: int) -> Iterator[None]:
        """Raise SaveFailed for a fault of any rank, after removing what was written."""
        try:
            yield
        except RankFault as failure:
            on_rank_zero("removing the failed checkpoint", self._directory.remove_leftovers)
            raise SaveFailed(f"checkpoint of step {step} was not saved: {failure}") from failure

    def _begin(self, step: int, engines: Models) -> Path:
        place = self._directory.begin(step)
        for name in engines:
            (place / engine_folder(name)).mkdir(parents=True)
        return place

    def _take(
        self, step: int, engines: Models, components: Mapping[str, StatefulComponent], files: Mapping[str, bytes], copies: _Copies
    ) -> tuple[Path | None, Mapping[str, bytes]]:
        """Begin the copies of this rank's part of the state; return the directory, on rank 0, and the digests of the components'
        states. Not collective."""
        self._writer.start()
        place = self._begin(step, engines) if dist.get_rank() == 0 else None
        for name, engine in engines.items():
            if engine is not None:
                with self._described(
                    name, engine, lambda: partial(_wait_for, copies[name][1]) if name in copies else None
                ) as images:
                    copies[name] = self._copy(name, images)
        encoded = self._encoded(components)
        if small := self._small_files(encoded, files):
            copies[""] = self._copy("", small)
        return place, digests(encoded)

    @contextmanager
    def _described(
        self, name: str, engine: StatefulModel, read: Callable[[], Callable[[], None] | None] = lambda: None
    ) -> Iterator[list[FileImage]]:
        """Give this rank's files of an engine, whose state may not change inside. read: for `release_state`, called at the end."""
        try:
            files = self._files.setdefault(name, ShardFiles(engine_folder(name), engine.host_group))
            yield files.images(engine.save_state(with_optimizer=not self._save_only_model))
        finally:  # also after a failure: the state that it brought to the device can be offloaded again
            engine.release_state(read())

    def _encoded(self, components: Mapping[str, StatefulComponent]) -> dict[str, str]:
        return {} if self._save_only_model else encode_components(components)

    def _small_files(self, encoded: Mapping[str, str], files: Mapping[str, bytes]) -> list[FileImage]:
        if self._save_only_model:
            return []
        more = [FileImage(name, [content]) for name, content in files.items()]
        state = [FileImage(STATE, [file_content(encoded)])] if dist.get_rank() == 0 else []
        return [*state, *more, FileImage(rng_file(dist.get_rank()), [encode_rng()])]

    def _copy(self, key: str, images: list[FileImage]) -> tuple[list[SnapshotFile], Future[None]]:
        needed = sum(image.nbytes for image in images)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.nbytes < needed:
            self._buffers.pop(key, None)
            del buffer  # freed before the larger one is allocated
            buffer = self._buffers[key] = SharedBuffer(needed, device_of(images))
        starts = accumulate((image.nbytes for image in images), initial=0)
        files = [SnapshotFile(image.name, buffer, start, image.nbytes) for image, start in zip(images, starts)]
        return files, self._copier.submit(buffer.copy_of(images))

    def _submit(self, place: Path, copies: _Copies) -> None:
        for _, done in copies.values():
            done.result()
        self._writer.submit(place, [file for files, _ in copies.values() for file in files])

    def _publish(self, place: Path, step: int, facts: Mapping[str, Any], reports: Sequence[Mapping[str, FileEntry]]) -> Manifest:
        files = {name: entry for report in reports for name, entry in report.items()}
        manifest = Manifest(step, dist.get_world_size(), self._save_only_model, facts, files)
        on_rank_zero("committing the checkpoint", lambda: self._commit(place, manifest))
        return manifest

    def _retain(self, manifest: Manifest, *, wait: bool = True) -> Path:
        """Let rank 0 remove old checkpoints; return the new one's directory. wait: all ranks wait until the files are gone.
        Otherwise they exchange nothing, and no fault here fails the save."""
        if wait:
            on_rank_zero("removing old checkpoints", lambda: self._remove_old(manifest, wait))
        elif dist.get_rank() == 0:
            self._remove_old(manifest, wait)
        return self._directory.step_path(manifest.step)

    def _remove_old(self, manifest: Manifest, wait: bool) -> None:
        keep, removed = {manifest.step, manifest.best_step}, []
        if self._copies is not None:
            self._copies.submit(manifest.step, self._directory.step_path(manifest.step))
            keep |= self._copies.steps_needed
        try:
            removed = self._directory.retain(self._keep_last, keep, wait=wait)
        except (OSError, ValueError) as error:
            logger.warning("older checkpoints stay, beside step-%d: %s", manifest.step, error)
        size = f"{manifest.total_bytes / 1e6:.1f} MB"
        logger.info("saved step-%d (%s)%s", manifest.step, size, f", removed {removed}" if removed else "")

    def _commit(self, place: Path, manifest: Manifest) -> None:
        unreported = set(list_files(place)) ^ set(manifest.files)
        if unreported:
            raise ValueError(f"files that no rank reported: {sorted(unreported)}")
        # Contents are not read back, but a file whose size rank 0 sees differently is found before older checkpoints go.
        wrong = find_wrong_size(place, manifest)
        if wrong:
            raise ValueError(wrong)
        write_manifest(place, manifest)
        self._directory.publish(place, manifest.step)
        self._directory.point_best_to(manifest.best_step)

    # ------------------------------------------------------------------------------------------------------------ load

    def load(self, engines: Models, components: Mapping[str, StatefulComponent], facts: Mapping[str, Any]) -> int:
        return self.restore(self.find_resumable(facts), engines, components)

    def find_resumable(self, facts: Mapping[str, Any], skip: Collection[int] = (), *, wait: bool = True) -> Manifest:
        """Find the newest valid checkpoint, before anything is built. Under a lease, damaged ones are renamed to bad-step-N.

        skip: steps not to take; `restore` renames them. wait: until file contents are verified; otherwise a thread verifies them,
        and `restore` waits. ValueError if there is no valid checkpoint, it holds weights only, or facts that must match do not;
        RefusedCheckpoint if one cannot be read.
        """
        if wait:
            manifest, self._verification = newest_verified(self._directory, skip), None
        else:
            self._verification = begin_with_newest(self._directory, skip)
            manifest = self._verification.manifest
        source = self._directory.step_path(manifest.step)
        if manifest.model_only:
            raise ValueError(
                f"{source} holds weights only (checkpoint.save_only_model = true) and cannot be resumed; "
                "export it, or start a new run with policy.model pointing to the export"
            )
        require_same_run(manifest, facts, source.name)
        return manifest

    def restore(self, manifest: Manifest, engines: Models, components: Mapping[str, StatefulComponent]) -> int:
        """Load the checkpoint that `find_resumable` found; return its step.

        Weights and optimizer load in any layout, on any ranks, under any engine; random states only with the same number of ranks.
        Under a lease, newer checkpoints are then renamed to abandoned-step-N: the run will save their steps again.
        DamagedCheckpoint on every rank, before a file is opened, if a verification in a thread finds damage; under a lease the
        checkpoint is renamed, and the next `find_resumable` gives the one before.
        """
        self._finish_verification()
        source = self._directory.step_path(manifest.step)
        state = read_components(source, components)

        def load(name: str, engine: StatefulModel) -> None:
            load_engine(engine, source / engine_folder(name), with_optimizer=True)

        on_engines(engines, load, *LOAD_FAULTS)
        load_components(components, state, source)
        # Last: building and loading draw random numbers too.
        self._restore_rng(source, manifest)
        # After all that can fail: a refused resume must rename nothing that is valid.
        for step, path in on_rank_zero("setting newer checkpoints aside", lambda: self._abandon_newer(manifest)):
            warn_once(
                logger, "step-%d is newer than step-%d, from which the run goes on; renamed to %s", step, manifest.step, path.name
            )
        return manifest.step

    def _finish_verification(self) -> None:
        """Raise DamagedCheckpoint on every rank, after setting the checkpoint aside, if its content is not as in its manifest."""
        verification, self._verification = self._verification, None
        if verification is not None:
            try:
                verification.finish()
            except DamagedCheckpoint as damage:
                set_damaged_aside(self._directory, verification.manifest.step, damage)
                raise

    def _abandon_newer(self, manifest: Manifest) -> list[tuple[int, Path]]:
        if self._directory.owner is not None:
            self._directory.point_best_to(manifest.best_step)
        return self._directory.abandon_newer(manifest.step)

    def load_weights(self, name: str, engine: StatefulModel | None, step: int | None = None, *, with_head: bool = True) -> int:
        """Load the weights of one engine, without optimizer, from checkpoint `step` (None: the newest valid one); return the step.

        engine: None on ranks that it does not live on. Works for `save_only_model` checkpoints and in any layout. Without
        `with_head` the engine keeps its own head, and the checkpoint may have another one or none, so a critic can take a policy's
        layers. ValueError if there is no such valid checkpoint or engine.
        """
        manifest = newest_verified(self._directory) if step is None else self._verified(step)
        source = self._directory.step_path(manifest.step) / engine_folder(name)
        if not on_rank_zero("looking for the weights", source.is_dir):
            raise ValueError(f"{source} does not exist: the checkpoint holds no {name}")

        def load(_: str, engine: StatefulModel) -> None:
            load_engine(engine, source, with_optimizer=False, with_head=with_head)

        on_engines({name: engine}, load, *LOAD_FAULTS)
        return manifest.step

    def _verified(self, step: int) -> Manifest:
        path, there = self._directory.step_path(step), on_rank_zero("looking for checkpoints", self._directory.steps)
        if step not in there:
            raise ValueError(f"{path} does not exist; steps there: {there}")
        try:
            return verify(self._directory, step)
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{path}: {error}; steps there: {there}") from None

    def _restore_rng(self, source: Path, manifest: Manifest) -> None:
        if manifest.world_size == dist.get_world_size():
            on_every_rank("restoring random states", lambda: load_rng(source / rng_file(dist.get_rank())))
        else:
            warn_once(
                logger,
                "%s was written by %d ranks, this run has %d: random generators start from the seed",
                source.name,
                manifest.world_size,
                dist.get_world_size(),
            )


def _wait_for(copy: Future[None]) -> None:
    wait([copy])  # a failed one too, whose error `PendingSave.entries` raises


def _let_training_go_first() -> None:
    # As the writer process does; an idle core still copies at once
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _require_shared(place: Path) -> None:
    if not place.is_dir():
        raise ValueError(f"{place}, created by rank 0, is not visible here; the run directory must be on a shared file system")
