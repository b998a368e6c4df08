"""Save and load the sharded state of one engine in one directory, in Megatron-core's dist_checkpointing format (torch_dist).

The files are Megatron's own, but described here and written by `files.py` (Megatron's writer starts a manager process and forks),
by all ranks that hold a copy, each a part of it, and read without unpickling. Model and optimizer load in any layout, on any
ranks: everything here is collective over those that the engine lives on. Megatron-core validates over the default group, which is
theirs meanwhile (`as_world`); torch's descriptions of shards hold ranks of the world and are made outside of that.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import dumps
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megappo.checkpoint.image import FileImage, archive, archive_bytes
from megappo.checkpoint.ranges import Holders, holders_of, parts_to_write
from megappo.checkpoint.safe_load import load_index, load_tensors_and_plain_data
from megappo.parallel.consensus import RankFault, on_every_rank
from megappo.platform.device import as_world

OPTIMIZER = "optimizer."
"""Prefix of the optimizer's keys."""
_EXTRA_STATE = "._extra_state"


@dataclass(frozen=True)
class _Layout:
    """Places of the tensors of one state in the files of all ranks.

    holders: see `ranges.py`; by position in the group. items: of this rank's file, in order; key, and offset of a tensor, None of
    an object. index: content of `.metadata`, on the group's first rank.
    """

    fingerprint: bytes
    holders: Holders
    items: Sequence[tuple[str, tuple[int, ...] | None]]
    index: bytes | None


class ShardedFiles:
    """Files of the sharded state of one engine, below `folder`: described as images, which others write.

    The layout is planned at the first save, by all ranks of `group` together, on which the engine lives, and used again while every
    rank's state is described alike.
    """

    def __init__(self, folder: str, group: dist.ProcessGroup) -> None:
        self._folder, self._group = folder, group
        self._layout: _Layout | None = None

    def images(self, state: dict[str, Any]) -> list[FileImage]:
        """This rank's files of `state` (tensors wrapped in ShardedTensor, the rest plain and equal on all ranks).

        The images share memory with the state. RankFault on every rank if one cannot describe its state.
        """
        shards, common = save_preprocess(state, validate_access_integrity=False)
        assert isinstance(shards, dict), "as the state is"
        entries = list(nested_values(shards))
        objects = _encoded_objects(entries)
        fingerprint = _fingerprint(entries, objects)
        is_planned = self._layout is not None and self._layout.fingerprint == fingerprint
        # One agreement instead of a plan, for which every rank describes everything to all others.
        if not all(on_every_rank("comparing the layout of the checkpoint", lambda: is_planned, self._group)):
            self._layout = _plan(shards, common, objects, fingerprint, self._group)
        layout = self._layout
        assert layout is not None
        parts = _parts(entries, layout.holders, self._group)
        tensors = {(part.key, tuple(part.global_offset)): part.data for part in parts if part.data is not None}
        contents = [archive(tensors[key, offset]) if offset is not None else [objects[key]] for key, offset in layout.items]
        images = [self._image(_shard_file(dist.get_rank()), [piece for content in contents for piece in content])]
        if layout.index is not None:
            images.append(self._image(".metadata", [layout.index]))
        if self._group.rank() == 0:
            images.append(self._image(COMMON_STATE_FNAME, [_saved(common)]))
            images.append(self._image(CONFIG_FNAME, [json.dumps(asdict(CheckpointingConfig("torch_dist", 1))).encode()]))
        return images

    def _image(self, name: str, pieces: Sequence[bytes | torch.Tensor]) -> FileImage:
        return FileImage(f"{self._folder}/{name}", pieces)


def _shard_file(rank: int) -> str:
    return f"__{rank}_0{DEFAULT_SUFFIX}"


def _saved(data: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(data, buffer)
    return buffer.getvalue()


def _encoded_objects(entries: Sequence[ShardedBase]) -> dict[str, bytes]:
    """Objects (layers' extra state) that this rank writes, by their unique key, as Megatron encodes them."""
    by_key: dict[str, list[Any]] = {}
    for entry in entries:
        if isinstance(entry, ShardedObject) and is_main_replica(entry.replica_id):
            by_key.setdefault(entry.unique_key, []).append(entry.data)
    return {key: _saved(values) for key, values in by_key.items()}


def _fingerprint(entries: Sequence[ShardedBase], objects: dict[str, bytes]) -> bytes:
    """Digest of everything that the layout depends on: all but the values."""
    described = [repr(entry.without_data()) for entry in entries]
    return hashlib.sha256(repr((described, [(key, len(value)) for key, value in objects.items()])).encode()).digest()


def _plan(
    shards: dict[str, Any], common: dict[str, Any], objects: dict[str, bytes], fingerprint: bytes, group: dist.ProcessGroup
) -> _Layout:
    """Agree with all ranks of the group on the layout. Collective."""
    planned, planner = _PlanOnly(dist.get_rank()), MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    with as_world(group):
        # Megatron's validation, done here because the shards of all ranks are needed below too.
        _, everyone = determine_global_metadata(shards)
        validate_sharding_integrity(everyone, common_state_dict=common)
    holders = holders_of([[entry for entry in theirs if isinstance(entry, ShardedTensor)] for theirs in everyone])
    by_key: dict[str, list[ShardedBase]] = {}
    for part in _parts(list(nested_values(shards)), holders, group):
        by_key.setdefault(part.key, []).append(part)
    described = {**mcore_to_pyt_state_dict(by_key), **{key: io.BytesIO(value) for key, value in objects.items()}}
    try:
        dcp.save(described, storage_writer=planned, planner=planner, process_group=group)
    except CheckpointException as error:
        # torch gathers the faults of all ranks and raises on all, but as a BaseException.
        raise RankFault(f"planning the shards failed on {_first_failure(error, group)}") from error
    return _Layout(fingerprint, holders, planned.items, planned.index)


def _parts(entries: Sequence[ShardedBase], holders: Holders, group: dist.ProcessGroup) -> list[ShardedTensor]:
    """Tensors, or parts of them, that this rank writes."""
    return parts_to_write([entry for entry in entries if isinstance(entry, ShardedTensor)], holders, group.rank())


class _PlanOnly(dcp.StorageWriter):
    """Storage for torch's planner that writes nothing: it notes the order of a rank's items and the index of all files.

    rank: of the world, for the file's name. items, index: see `_Layout`.
    """

    def __init__(self, rank: int) -> None:
        self._file = _shard_file(rank)
        self.items: list[tuple[str, tuple[int, ...] | None]] = []
        self.index: bytes | None = None

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name, start, results = self._file, 0, []
        for item in plan.items:
            data = planner.resolve_data(item)
            length = archive_bytes(data) if isinstance(data, torch.Tensor) else len(data.getbuffer())
            results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            start += length
            self.items.append((item.index.fqn, None if item.index.offset is None else tuple(item.index.offset)))
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for theirs in results for result in theirs}
        self.index = dumps(metadata)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def load_sharded(
    state: dict[str, Any], directory: Path, group: dist.ProcessGroup, *, passed_over: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Fill the sharded description `state` from a directory that `ShardedFiles` described, in any layout.

    Collective over `group`, the ranks of the model. ValueError if the model has other tensors or shapes than the checkpoint.
    passed_over: prefixes of keys that only the checkpoint may have; all other tensors must match. Extra state is loaded if both
    sides have it.
    """
    strategy = _SafeShardedStrategy(group)
    held = {entry.key for entry in strategy.load_sharded_metadata(directory).values()}
    # TransformerEngine's modules have extra state, which is empty without FP8; other modules have none.
    _keep_own_extra_state(state, held)
    _require_same_keys(state, held, directory, passed_over, group)
    strategies = {"sharded_strategy": strategy, "common_strategy": _SafeCommonStrategy()}
    try:
        # The strategy validates, over the group.
        loaded = dist_checkpointing.load(state, str(directory), **strategies, validate_access_integrity=False)
    except CheckpointingException as error:
        raise ValueError(f"{directory} does not fit the model: {' '.join(str(error).split())}") from None
    except CheckpointException as error:
        raise ValueError(f"{directory} does not fit the model: {_first_failure(error, group)}") from None
    assert isinstance(loaded, dict), "a report of missing keys was not asked for"
    return {name: value for name, value in loaded.items() if name in state}  # Megatron returns all plain values


def _keep_own_extra_state(state: dict[str, Any], held: set[str]) -> None:
    """Drop, in place, objects from `state` that the checkpoint does not hold."""

    def replace(entry: Any) -> Any:
        return LocalNonpersistentObject(entry.data) if isinstance(entry, ShardedObject) and entry.key not in held else entry

    dict_list_map_inplace(replace, state)


def _require_same_keys(
    state: dict[str, Any], held: set[str], directory: Path, passed_over: tuple[str, ...], group: dist.ProcessGroup
) -> None:
    """ValueError on every rank of the group alike if the keys differ."""
    # Megatron-core's own check raises only on the ranks that miss something, and the others hang.
    mine, ordered = {entry.key for entry in nested_values(state) if isinstance(entry, ShardedBase)}, sorted(held)
    # One byte per key of the checkpoint: the keys' text from every rank of a large world would be hundreds of megabytes.
    ranks = on_every_rank("describing the model", lambda: (sorted(mine - held), bytes(key in mine for key in ordered)), group)
    missing = {key for unknown, _ in ranks for key in unknown}
    unused = {key for index, key in enumerate(ordered) if not any(wanted[index] for _, wanted in ranks)}
    surplus = {key for key in unused if not key.startswith(passed_over) and not key.endswith(_EXTRA_STATE)}
    for where, keys in (("only the model", missing), ("only the checkpoint", surplus)):
        if keys:
            fix = "use the architecture and the role's engine that wrote it"
            raise ValueError(f"{directory} does not fit the model: {where} has {min(keys)} ({len(keys)} such tensors); {fix}")


def _first_failure(error: CheckpointException, group: dist.ProcessGroup) -> str:
    position, (fault, _) = min(error.failures.items())
    return f"rank {dist.get_process_group_ranks(group)[position]}: {type(fault).__name__}: {fault}"


class _SafeCommonStrategy(TorchCommonLoadStrategy):
    def load_common(self, checkpoint_dir: str | Path) -> Any:
        path = Path(checkpoint_dir, COMMON_STATE_FNAME)
        return load_tensors_and_plain_data(path, str(path))


class _SafeReader(dcp.FileSystemReader):
    """torch's reader, with the index read through the allow-list."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index = load_index(Path(self.path, ".metadata").read_bytes())
        index.storage_meta = StorageMeta(load_id=self.load_id)
        return index


class _SafePlanner(MCoreLoadPlanner):
    """Megatron's planner, with objects (layers' extra state) restricted to plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # torch's version unpickles them.
        name = read_item.dest_index.fqn
        self.original_state_dict[name] = load_tensors_and_plain_data(value, name)


class _SafeShardedStrategy(TorchDistLoadShardedStrategy):
    """Megatron's torch_dist loading on the ranks of `group`, with the safe reader and planner, which it does not take as
    arguments."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> dict[str, Any]:
        with as_world(self._group):
            validate_sharding_integrity(determine_global_metadata(sharded_state_dict)[1])
        tensors = [value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)]
        by_key, flat_mapping, rename_mapping = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        filled = mcore_to_pyt_state_dict(by_key, is_loading=True)
        dcp.load(
            filled,
            storage_reader=_SafeReader(checkpoint_dir),
            planner=_SafePlanner(
                shapes_validation_sharded_tensors=[tensor for tensor in tensors if not tensor.allow_shape_mismatch],
                allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
                flatten_state_dict=False,
            ),
            process_group=self._group,
        )
        unwrapped: dict[str, Any] = {key: _unwrap_pyt_sharded_tensor(value) for key, value in filled.items()}
        state = _replace_sharded_keys_with_state_dict_keys(unwrapped, flat_mapping, rename_mapping)
        _restore_dict_types(state, sharded_state_dict)
        return state

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Names and shapes of the checkpoint's tensors and objects."""
        index = _SafeReader(checkpoint_dir).read_metadata()
        held = self.load_tensors_metadata(Path(checkpoint_dir), index)
        for key, entry in index.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                held[key] = ShardedObject.empty_from_unique_key(key)
        return held
