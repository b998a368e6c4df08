"""Save and load the sharded state of one engine in one directory, in Megatron-core's dist_checkpointing format (torch_dist).

The files are Megatron's own, but written in this process (Megatron's writer starts a manager process and forks), by all ranks
that hold a copy, each a part of it, and read without unpickling. Model and optimizer load in any layout.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import (
    COMMON_STATE_FNAME,
    TorchCommonLoadStrategy,
    TorchCommonSaveStrategy,
)
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
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megappo.checkpoint.ranges import parts_to_write
from megappo.checkpoint.safe_load import load_index, load_tensors_and_plain_data
from megappo.parallel.consensus import RankFault, on_every_rank, on_rank_zero

OPTIMIZER = "optimizer."
"""Prefix of the optimizer's keys."""
_EXTRA_STATE = "._extra_state"


def save_sharded(state: dict[str, Any], directory: Path) -> None:
    """Write `state` (tensors wrapped in ShardedTensor, the rest plain and equal on all ranks) into an empty directory.

    Collective over the world. RankFault on every rank if one cannot write. A rank holds at most one tensor in host memory.
    """
    shards, common = save_preprocess(state, validate_access_integrity=False)
    assert isinstance(shards, dict), "as the state is"
    # Megatron's validation, done here because the shards of all ranks are needed below too.
    _, everyone = determine_global_metadata(shards)
    validate_sharding_integrity(everyone, common_state_dict=common)
    on_rank_zero(f"writing {COMMON_STATE_FNAME}", lambda: TorchCommonSaveStrategy("torch", 1).save_common(common, str(directory)))
    try:
        dcp.save(
            mcore_to_pyt_state_dict(_written_here(shards, everyone)),
            storage_writer=_TensorByTensorWriter(directory),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
    except CheckpointException as error:
        # torch gathers the faults of all ranks and raises on all, but as a BaseException.
        raise RankFault(f"writing shards failed on {_first_failure(error)}") from error
    # Last, as Megatron does it: a directory without this file is not a checkpoint.
    on_rank_zero("writing metadata.json", lambda: save_config(CheckpointingConfig("torch_dist", 1), str(directory)))


def _written_here(shards: dict[str, Any], everyone: Sequence[Sequence[ShardedBase]]) -> dict[str, list[ShardedBase]]:
    """Shards that this rank writes, by key. everyone: the shards of all ranks."""
    entries = list(nested_values(shards))
    by_key: dict[str, list[ShardedBase]] = {}
    for entry in entries:
        if isinstance(entry, ShardedObject) and is_main_replica(entry.replica_id):
            by_key.setdefault(entry.unique_key, []).append(entry)
    tensors = [[entry for entry in theirs if isinstance(entry, ShardedTensor)] for theirs in everyone]
    for part in parts_to_write([entry for entry in entries if isinstance(entry, ShardedTensor)], tensors, dist.get_rank()):
        by_key.setdefault(part.key, []).append(part)
    return by_key


class _TensorByTensorWriter(dcp.FileSystemWriter):
    """torch's writer, tensor by tensor."""

    # torch's own write_data keeps copies of all tensors until the file is complete, on a GPU in pinned memory, rounded up to powers
    # of two, which the process never returns.
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        with Path(self.path, name).open("wb") as file:
            results = [self._write(item, planner, file, name) for item in plan.items]
            file.flush()
            os.fsync(file.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def _write(self, item: WriteItem, planner: SavePlanner, file: Any, name: str) -> WriteResult:
        start, data = file.tell(), planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            file.write(data.getbuffer())
        else:
            assert isinstance(data, torch.Tensor)
            tensor = data.detach().cpu()
            # torch.save writes the whole storage behind a tensor, and most tensors are parts of a buffer.
            torch.save(tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor, file)
        length = file.tell() - start
        return WriteResult(item.index, length, _StorageInfo(name, start, length))


def load_sharded(state: dict[str, Any], directory: Path, *, passed_over: tuple[str, ...] = ()) -> dict[str, Any]:
    """Fill the sharded description `state` from a directory that `save_sharded` wrote, in any layout.

    Collective. ValueError if the model has other tensors or shapes than the checkpoint. passed_over: prefixes of keys that only
    the checkpoint may have; all other tensors must match. Extra state is loaded if both sides have it.
    """
    held = {entry.key for entry in _SafeShardedStrategy().load_sharded_metadata(directory).values()}
    # TransformerEngine's modules have extra state, which is empty without FP8; other modules have none.
    _keep_own_extra_state(state, held)
    _require_same_keys(state, held, directory, passed_over)
    try:
        loaded = dist_checkpointing.load(
            state, str(directory), sharded_strategy=_SafeShardedStrategy(), common_strategy=_SafeCommonStrategy()
        )
    except CheckpointingException as error:
        raise ValueError(f"{directory} does not fit the model: {' '.join(str(error).split())}") from None
    except CheckpointException as error:
        raise ValueError(f"{directory} does not fit the model: {_first_failure(error)}") from None
    assert isinstance(loaded, dict), "a report of missing keys was not asked for"
    return {name: value for name, value in loaded.items() if name in state}  # Megatron returns all plain values


def _keep_own_extra_state(state: dict[str, Any], held: set[str]) -> None:
    """Drop, in place, objects from `state` that the checkpoint does not hold."""

    def replace(entry: Any) -> Any:
        return LocalNonpersistentObject(entry.data) if isinstance(entry, ShardedObject) and entry.key not in held else entry

    dict_list_map_inplace(replace, state)


def _require_same_keys(state: dict[str, Any], held: set[str], directory: Path, passed_over: tuple[str, ...]) -> None:
    """ValueError on every rank alike if the keys differ."""
    # Megatron-core's own check raises only on the ranks that miss something, and the others hang.
    mine, ordered = {entry.key for entry in nested_values(state) if isinstance(entry, ShardedBase)}, sorted(held)
    # One byte per key of the checkpoint: the keys' text from every rank of a large world would be hundreds of megabytes.
    ranks = on_every_rank("describing the model", lambda: (sorted(mine - held), bytes(key in mine for key in ordered)))
    missing = {key for unknown, _ in ranks for key in unknown}
    unused = {key for index, key in enumerate(ordered) if not any(wanted[index] for _, wanted in ranks)}
    surplus = {key for key in unused if not key.startswith(passed_over) and not key.endswith(_EXTRA_STATE)}
    for where, keys in (("only the model", missing), ("only the checkpoint", surplus)):
        if keys:
            raise ValueError(f"{directory} does not fit the model: {where} has {min(keys)} ({len(keys)} such tensors)")


def _first_failure(error: CheckpointException) -> str:
    rank, (fault, _) = min(error.failures.items())
    return f"rank {rank}: {type(fault).__name__}: {fault}"


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
    """Megatron's torch_dist loading with the safe reader and planner, which it does not take as arguments."""

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> dict[str, Any]:
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
