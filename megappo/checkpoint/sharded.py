"""Save and load the sharded state of one engine in one directory, in Megatron-core's dist_checkpointing format (torch_dist).

The files are Megatron's own, but described here and written by `files.py` (Megatron's writer starts a manager process and forks),
by all ranks that hold a copy, each a part of it, and read without unpickling. Model and optimizer load in any layout, on any
ranks: everything here is collective over those that the engine lives on. Megatron-core validates over the default group, which is
theirs meanwhile (`as_world`); torch's descriptions of shards hold ranks of the world and are made outside of that.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from pathlib import Path
from pickle import dumps
from typing import Any, NamedTuple

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
from megappo.checkpoint.ranges import holders_of, parts_to_write
from megappo.checkpoint.safe_load import load_index, load_tensors_and_plain_data
from megappo.parallel.consensus import RankFault, on_every_rank
from megappo.parallel.device import as_world

OPTIMIZER = "optimizer."
"""Prefix of the optimizer's keys."""
_EXTRA_STATE = "._extra_state"


class _Box(NamedTuple):
    """Consecutive elements of a flattened tensor of the state, from `start` on. source: number of the tensor."""

    source: int
    start: int
    shape: tuple[int, ...]


class _Described(NamedTuple):
    """State of one rank as a checkpoint takes it: shards of tensors and objects, the objects it writes, and plain values."""

    shards: dict[str, Any]
    tensors: Sequence[ShardedTensor]
    objects: Mapping[str, bytes]
    common: dict[str, Any]

    def facts(self) -> list[Any]:
        """Everything that the layout depends on: all but the values."""
        entries = [{**vars(entry), "data": None} for entry in nested_values(self.shards)]
        return [*entries, *((key, len(value)) for key, value in self.objects.items())]


@dataclass(frozen=True)
class _Layout:
    """Places of the tensors of one state in the files of all ranks.

    facts: of the state that it was planned for, on this rank. items: of this rank's file, in order; an object is its key. index:
    content of `.metadata`, on the group's first rank.
    """

    facts: list[Any]
    items: Sequence[_Box | str]
    index: bytes | None


class ShardedFiles:
    """Files of the sharded state of one engine, below `folder`: described as images, which others write.

    The layout is planned at the first save, by all ranks of `group` together, on which the engine lives, and used again while every
    rank's state is described alike.
    """

    def __init__(self, folder: str, group: dist.ProcessGroup) -> None:
        self._folder, self._group = folder, group
        self._layout: _Layout | None = None

    def images(self, state: dict[str, Any]) -> list[FileImage] | None:
        """This rank's files of `state` (tensors wrapped in ShardedTensor, the rest plain and equal on all ranks).

        None if the layout was planned for another state, or not yet. The images share memory with the state. Not collective: the
        files of all ranks fit together only if no rank has None.
        """
        return self._images(_describe(state))

    def plan(self, state: dict[str, Any]) -> list[FileImage]:
        """Agree with all ranks on the layout of `state`; returns this rank's files. Collective.

        RankFault on every rank if one cannot describe its state.
        """
        self._layout = None  # a rank that fails must not go on with an older one than the others
        described = _describe(state)
        self._layout = _plan(described, self._group)
        images = self._images(described)
        assert images is not None, "it was planned for this state"
        return images

    def _images(self, described: _Described) -> list[FileImage] | None:
        layout = self._layout
        if layout is None or layout.facts != described.facts():
            return None
        flat: dict[int, torch.Tensor] = {}  # one copy of a tensor that is not contiguous, whatever number of boxes it has
        pieces: list[bytes | torch.Tensor] = []
        for item in layout.items:
            if isinstance(item, str):
                pieces.append(described.objects[item])
            else:
                if item.source not in flat:
                    flat[item.source] = _data(described.tensors[item.source]).detach().contiguous().view(-1)
                values = flat[item.source][item.start : item.start + prod(item.shape)]
                pieces += archive(values.view(item.shape))
        images = [self._image(_shard_file(dist.get_rank()), pieces)]
        if layout.index is not None:
            images.append(self._image(".metadata", [layout.index]))
        if self._group.rank() == 0:
            images.append(self._image(COMMON_STATE_FNAME, [_saved(described.common)]))
            images.append(self._image(CONFIG_FNAME, [json.dumps(asdict(CheckpointingConfig("torch_dist", 1))).encode()]))
        return images

    def _image(self, name: str, pieces: Sequence[bytes | torch.Tensor]) -> FileImage:
        return FileImage(f"{self._folder}/{name}", pieces)


def _shard_file(rank: int) -> str:
    return f"__{rank}_0{DEFAULT_SUFFIX}"


def _describe(state: dict[str, Any]) -> _Described:
    shards, common = save_preprocess(state, validate_access_integrity=False)
    assert isinstance(shards, dict), "as the state is"
    entries = list(nested_values(shards))
    tensors = [entry for entry in entries if isinstance(entry, ShardedTensor)]
    return _Described(shards, tensors, _encoded_objects(entries), common)


def _saved(data: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(data, buffer)
    return buffer.getvalue()


@cache  # what layers have without FP8, each of them; torch takes 30 us for one
def _saved_nothing(count: int) -> bytes:
    return _saved([None] * count)


def _encoded_objects(entries: Sequence[ShardedBase]) -> dict[str, bytes]:
    """Objects (layers' extra state) that this rank writes, by their unique key, as Megatron encodes them."""
    by_key: dict[str, list[Any]] = {}
    for entry in entries:
        if isinstance(entry, ShardedObject) and is_main_replica(entry.replica_id):
            by_key.setdefault(entry.unique_key, []).append(entry.data)
    return {
        key: _saved_nothing(len(values)) if all(value is None for value in values) else _saved(values)
        for key, values in by_key.items()
    }


def _data(entry: ShardedTensor) -> torch.Tensor:
    assert entry.data is not None, f"{entry.key} is a description without data"
    return entry.data


def _plan(described: _Described, group: dist.ProcessGroup) -> _Layout:
    """Agree with all ranks of the group on the layout. Collective."""
    planned, planner = _PlanOnly(dist.get_rank()), MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    with as_world(group):
        # Megatron's validation, done here because the shards of all ranks are needed below too.
        _, everyone = determine_global_metadata(described.shards)
        validate_sharding_integrity(everyone, common_state_dict=described.common)
    holders = holders_of([[entry for entry in theirs if isinstance(entry, ShardedTensor)] for theirs in everyone])
    parts = parts_to_write(described.tensors, holders, group.rank())
    by_key: dict[str, list[ShardedBase]] = {}
    for part in parts:
        by_key.setdefault(part.box.key, []).append(part.box)
    content = {**mcore_to_pyt_state_dict(by_key), **{key: io.BytesIO(value) for key, value in described.objects.items()}}
    try:
        dcp.save(content, storage_writer=planned, planner=planner, process_group=group)
    except CheckpointException as error:
        # torch gathers the faults of all ranks and raises on all, but as a BaseException.
        raise RankFault(f"planning the shards failed on {_first_failure(error, group)}") from error
    places = {
        (part.box.key, tuple(part.box.global_offset)): _Box(part.source, part.start, tuple(_data(part.box).shape)) for part in parts
    }
    items = [key if offset is None else places[key, offset] for key, offset in planned.items]
    return _Layout(described.facts(), items, planned.index)


class _PlanOnly(dcp.StorageWriter):
    """Storage for torch's planner that writes nothing: it notes the order of a rank's items and the index of all files.

    rank: of the world, for the file's name. items: key, and offset of a tensor, None of an object. index: see `_Layout`.
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
