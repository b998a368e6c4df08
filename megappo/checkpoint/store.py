"""Save and restore a run: engines (sharded), components (JSON) and random generators, all or nothing.

The order of a save makes it safe against a kill at any moment: all files, their hashes, a vote of all ranks, the manifest, one
rename, LATEST, and only then the removal of old checkpoints. A load verifies every file before it opens one. Knows nothing of the
trainer.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.identity import require_same_run
from megappo.checkpoint.manifest import (
    FileEntry,
    Manifest,
    find_wrong_content,
    fingerprint_file,
    list_files,
    write_manifest,
    write_synced,
)
from megappo.checkpoint.rng import load_rng, save_rng
from megappo.checkpoint.sharded import OPTIMIZER, load_sharded, save_sharded
from megappo.checkpoint.state import StatefulComponent, StatefulModel
from megappo.parallel.consensus import RankFault, on_every_rank, on_rank_zero

logger = logging.getLogger(__name__)

_STATE = "state.json"
# Writer of a file by its name: __3_0.distcp and rng-00003.safetensors are rank 3's, all other files rank 0's.
_WRITER = re.compile(r"(?:__|rng-0*)(\d+)[_.][^/]*$")


class SaveFailed(RuntimeError):
    """A checkpoint was not written; raised on all ranks. Nothing is left of it, and earlier ones are untouched."""


class CheckpointStore:
    """Checkpoints of one run under `directory`, which all ranks share. Every method is collective.

    keep_last: complete checkpoints that stay. save_only_model: weights only, for export, not for resuming.
    """

    def __init__(self, directory: str | Path, keep_last: int, save_only_model: bool = False) -> None:
        if keep_last < 1:
            raise ValueError(f"checkpoint.keep_last = {keep_last}; at least 1 must be kept")
        self._directory = CheckpointDirectory(Path(directory))
        self._keep_last = keep_last
        self._save_only_model = save_only_model

    # ------------------------------------------------------------------------------------------------------------ save

    def save(
        self,
        step: int,
        engines: Mapping[str, StatefulModel],
        components: Mapping[str, StatefulComponent],
        facts: Mapping[str, Any],
    ) -> Path:
        """Write checkpoint `step`; returns its directory. facts: JSON-compatible, see `identity.py`.

        SaveFailed on every rank if one of them cannot write.
        """
        try:
            place = on_rank_zero("preparing it", lambda: self._directory.begin(step, secrets.token_hex(4)))
            self._write(place, engines, components)
            files = self._fingerprint(place)
            manifest = Manifest(step, dist.get_world_size(), self._save_only_model, facts, files)
            on_rank_zero("committing the checkpoint", lambda: self._commit(place, manifest))
        except RankFault as failure:
            on_rank_zero("removing the failed checkpoint", self._directory.remove_leftovers)
            raise SaveFailed(f"checkpoint of step {step} was not saved: {failure}") from failure
        removed = on_rank_zero("removing old checkpoints", lambda: self._directory.retain(self._keep_last, step))
        if dist.get_rank() == 0:
            logger.info("saved step-%d (%.1f MB)%s", step, manifest.total_bytes / 1e6, f", removed {removed}" if removed else "")
        return self._directory.step_path(step)

    def _write(self, place: Path, engines: Mapping[str, StatefulModel], components: Mapping[str, StatefulComponent]) -> None:
        on_every_rank("looking for the checkpoint directory", lambda: _require_shared(place))
        for name, engine in engines.items():
            target = place / "megatron" / name
            on_rank_zero(f"creating {target.name}", lambda: target.mkdir(parents=True))
            try:
                save_sharded(engine.save_state(with_optimizer=not self._save_only_model), target)
            finally:  # also after a failure: the state that it brought to the device can be offloaded again
                engine.release_state()
        if self._save_only_model:
            return
        state = _as_json(components)
        on_rank_zero("writing the trainer's state", lambda: write_synced(place / _STATE, state))
        on_every_rank("writing random states", lambda: save_rng(place / _rng_file(dist.get_rank())))

    def _fingerprint(self, place: Path) -> dict[str, FileEntry]:
        """Hash and sync every file, on the rank that wrote it; returns all entries."""
        rank = dist.get_rank()
        # Each rank reads its own files, so a torn write is found by its writer. `_commit` requires every file to be reported.
        reports = on_every_rank(
            "reading the checkpoint back",
            lambda: {name: fingerprint_file(place / name, sync=True) for name in list_files(place) if _writer(name) == rank},
        )
        return {name: entry for report in reports for name, entry in report.items()}

    def _commit(self, place: Path, manifest: Manifest) -> None:
        unreported = set(list_files(place)) ^ set(manifest.files)
        if unreported:
            raise ValueError(f"files that no rank reported: {sorted(unreported)}")
        write_manifest(place, manifest)
        self._directory.publish(place, manifest.step)

    # ------------------------------------------------------------------------------------------------------------ load

    def load(
        self,
        engines: Mapping[str, StatefulModel],
        components: Mapping[str, StatefulComponent],
        facts: Mapping[str, Any],
    ) -> int:
        """Restore the newest valid checkpoint and return its step: `find_resumable`, then `restore`."""
        return self.restore(self.find_resumable(facts), engines, components)

    def find_resumable(self, facts: Mapping[str, Any]) -> Manifest:
        """Find the newest valid checkpoint, before anything is built. Damaged ones are renamed to bad-step-N.

        ValueError if there is no valid checkpoint, it holds weights only, or facts that must match do not.
        """
        manifest = self._newest_verified()
        source = self._directory.step_path(manifest.step)
        if manifest.model_only:
            raise ValueError(
                f"{source} holds weights only (checkpoint.save_only_model = true) and cannot be resumed; "
                "export it, or start a new run with policy.model pointing to the export"
            )
        require_same_run(manifest, facts, source.name)
        return manifest

    def restore(self, manifest: Manifest, engines: Mapping[str, StatefulModel], components: Mapping[str, StatefulComponent]) -> int:
        """Load the checkpoint that `find_resumable` verified; returns its step.

        Weights and optimizer load in any layout; random states only with the same number of ranks.
        """
        source = self._directory.step_path(manifest.step)
        state = _read_state(source, components)
        for name, engine in engines.items():
            engine.load_state(load_sharded(engine.state_to_load(with_optimizer=True), source / "megatron" / name))
        for name, component in components.items():
            component.load_state_dict(state[name])
        # Last: building and loading draw random numbers too.
        self._restore_rng(source, manifest)
        return manifest.step

    def load_weights(self, name: str, engine: StatefulModel, step: int | None = None, *, with_head: bool = True) -> int:
        """Load the weights of one engine, without optimizer, from checkpoint `step` (None: the newest valid one); returns the step.

        Works for `save_only_model` checkpoints and in any layout. Without `with_head` the engine keeps its own head, and the
        checkpoint may have another one or none: a critic takes a policy's layers. ValueError if there is no such valid checkpoint
        or engine.
        """
        manifest = self._newest_verified() if step is None else self._verified(step)
        source = self._directory.step_path(manifest.step) / "megatron" / name
        if not on_rank_zero("looking for the weights", source.is_dir):
            raise ValueError(f"{source} does not exist: the checkpoint holds no {name}")
        state = engine.state_to_load(with_optimizer=False, with_head=with_head)
        passed_over = (OPTIMIZER,) if with_head else (OPTIMIZER, *engine.head_names)
        engine.load_state(load_sharded(state, source, passed_over=passed_over))
        return manifest.step

    def _verified(self, step: int) -> Manifest:
        manifest, fault = self._verify(step)
        if manifest is None:
            raise ValueError(
                f"{self._directory.step_path(step)}: {fault}; steps there: {on_rank_zero('listing', self._directory.steps)}"
            )
        return manifest

    def _newest_verified(self) -> Manifest:
        steps = on_rank_zero("looking for checkpoints", self._tidy_steps)
        for step in steps:
            manifest, fault = self._verify(step)
            if manifest is not None:
                return manifest
            aside = on_rank_zero("setting a damaged checkpoint aside", lambda: self._directory.set_aside(step))
            _warn("step-%d is damaged (%s); renamed to %s, trying the next older one", step, fault, aside.name)
        found = f"{len(steps)} damaged checkpoints and no valid one" if steps else "no checkpoint"
        raise ValueError(f"{self._directory.path} holds {found}; start without --resume")

    def _tidy_steps(self) -> list[int]:
        self._directory.remove_leftovers()
        return self._directory.steps()

    def _verify(self, step: int) -> tuple[Manifest | None, str]:
        """Check manifest, sizes and all hashes, with the files divided among the ranks. The same result on every rank."""
        manifest, fault = on_rank_zero("reading the manifest", lambda: _attempt_read(self._directory, step))
        if manifest is None:
            return None, fault
        # Any rank can hash any file: the directory is shared.
        mine = sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()]
        place = self._directory.step_path(step)
        faults = on_every_rank("verifying the checkpoint", lambda: find_wrong_content(place, manifest, mine))
        found = [fault for fault in faults if fault is not None]
        return (None, found[0]) if found else (manifest, "")

    def _restore_rng(self, source: Path, manifest: Manifest) -> None:
        if manifest.world_size == dist.get_world_size():
            on_every_rank("restoring random states", lambda: load_rng(source / _rng_file(dist.get_rank())))
        else:
            _warn(
                "%s was written by %d ranks, this run has %d: random generators start from the seed",
                source.name,
                manifest.world_size,
                dist.get_world_size(),
            )


def _warn(text: str, *values: Any) -> None:
    """Log a warning once, not on every rank."""
    if dist.get_rank() == 0:
        logger.warning(text, *values)


def _attempt_read(directory: CheckpointDirectory, step: int) -> tuple[Manifest | None, str]:
    try:
        return directory.read(step), ""
    except ValueError as error:
        return None, str(error)


def _require_shared(place: Path) -> None:
    if not place.is_dir():
        raise ValueError(f"{place}, created by rank 0, is not visible here; the run directory must be on a shared file system")


def _writer(name: str) -> int:
    match = _WRITER.search(name)
    return int(match[1]) if match else 0


def _rng_file(rank: int) -> str:
    return f"rng-{rank:05d}.safetensors"


def _as_json(components: Mapping[str, StatefulComponent]) -> str:
    """Encode the state of all components. RankFault if it is not plain data or differs between ranks."""
    encoded = on_every_rank(
        "encoding the trainer's state",
        lambda: {name: _encode(name, component.state_dict()) for name, component in components.items()},
    )
    for name, text in encoded[0].items():  # only rank 0's is written, so the others must equal it
        differing = [rank for rank, theirs in enumerate(encoded) if theirs.get(name) != text]
        if differing:
            raise RankFault(f"state of {name} on ranks {differing} differs from rank 0's")
    return json.dumps({name: json.loads(text) for name, text in encoded[0].items()}, indent=1)


def _encode(name: str, state: dict[str, Any]) -> str:
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"state of {name} is not plain data: {error}") from None
    if json.loads(text) != state:
        raise ValueError(f"state of {name} changes on the way through JSON (tuples, or keys that are not strings)")
    return text


def _read_state(source: Path, components: Mapping[str, StatefulComponent]) -> dict[str, Any]:
    state = json.loads((source / _STATE).read_text(encoding="utf-8"))
    if state.keys() != components.keys():
        raise ValueError(
            f"{source.name} holds the state of {sorted(state)}, this run has {sorted(components)}; resume with the same megappo"
        )
    return state
