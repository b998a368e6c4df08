"""Safe reader of the one pickle that we read, the index (`.metadata`) of a torch distributed checkpoint: an allow-list of classes.

torch reads that file with `pickle.load`, which runs any code in it. Here a name outside the table is refused before it is
imported, and a file that is no index is refused whatever it makes the unpickler do. torch reads the shard files themselves with
`weights_only=True`.
"""

from __future__ import annotations

import importlib
import io
import pickle
import pickletools
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megappo.checkpoint.errors import UnsafeCheckpoint

# Data classes without behaviour on construction, and two functions of torch that turn a string into a constant.
_ALLOWED = frozenset(
    {
        ("builtins", "dict"),
        ("builtins", "list"),
        ("builtins", "set"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    }
)


def _enum_member(*arguments: Any) -> Enum:
    """Stand-in for builtins.getattr that returns members of one enum and nothing else."""
    # Early releases of Python 3.11 (3.11.2, not 3.11.7) pickle an enum member as getattr of class and name.
    owner, name = arguments if len(arguments) == 2 else (None, None)
    if owner is not _MEM_FORMAT_ENCODING or not isinstance(name, str) or name not in _MEM_FORMAT_ENCODING.__members__:
        raise UnsafeCheckpoint(f"checkpoint index asks for builtins.getattr of {arguments!r}; the file is not from megappo")
    return _MEM_FORMAT_ENCODING[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if (module, name) in _ALLOWED:
            return getattr(importlib.import_module(module), name)
        constant = getattr(torch, name, None) if module == "torch" else None
        if isinstance(constant, torch.dtype):
            return constant
        raise UnsafeCheckpoint(f"checkpoint index names {module}.{name}, which no index contains; the file is not from megappo")


def load_index(content: bytes) -> Metadata:
    """Parse `.metadata` of a torch distributed checkpoint. UnsafeCheckpoint if it names anything but data, or is no index."""
    try:
        _require_bounded(content)
        index = _IndexUnpickler(io.BytesIO(content)).load()
        _require_structure(index)
    except (UnsafeCheckpoint, MemoryError):
        raise
    except Exception as error:  # wrong opcodes call constructors with anything, which raise anything
        raise UnsafeCheckpoint(f"checkpoint index is not readable ({type(error).__name__}); the file is not from megappo") from None
    return index


def _require_bounded(content: bytes) -> None:
    """ValueError if an opcode asks for more memory than its file has bytes: a memo slot of a huge number, a huge buffer."""
    # pickle's C code makes a table as long as the largest slot, 64 GiB for 5 bytes of file. pickletools reads every length from
    # the file and raises where bytes are missing.
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in _MEMO_SLOTS and isinstance(argument, int) and argument > len(content):
            raise ValueError("memo slot")


_MEMO_SLOTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})


def _require_structure(index: Any) -> None:
    """UnsafeCheckpoint unless the object has the classes of an index wherever the reader looks."""
    if type(index) is not Metadata or not isinstance(index.storage_data, dict) or not isinstance(index.state_dict_metadata, dict):
        raise UnsafeCheckpoint("checkpoint index does not describe a torch distributed checkpoint")
    for key, entry in index.state_dict_metadata.items():
        if type(key) is not str or not _is_entry(entry):
            raise UnsafeCheckpoint(f"checkpoint index describes {str(key)!r:.100} with other things than shapes and types")
    for key, place in index.storage_data.items():
        if type(key) is not MetadataIndex or type(place) is not _StorageInfo or not _is_place(place):
            raise UnsafeCheckpoint("checkpoint index says nothing of where a tensor lies")
        path = PurePosixPath(place.relative_path)
        if len(path.parts) != 1 or path.name in ("", ".", "..") or "\0" in path.name:  # `../../other/file`
            raise UnsafeCheckpoint(f"checkpoint index points to {place.relative_path!r}, outside its directory")
        if getattr(place, "transform_descriptors", None):
            raise UnsafeCheckpoint(f"checkpoint index asks for the transforms {place.transform_descriptors}; none are known")
    if not isinstance(index.planner_data, Mapping | None):
        raise UnsafeCheckpoint("checkpoint index has no table of names")


def _is_entry(entry: Any) -> bool:
    if type(entry) is BytesStorageMetadata:
        return True
    return (
        type(entry) is TensorStorageMetadata
        and type(entry.size) is torch.Size
        and type(entry.properties) is TensorProperties
        and isinstance(entry.properties.dtype, torch.dtype)
        and type(entry.chunks) is list
        and all(
            type(chunk) is ChunkStorageMetadata and type(chunk.offsets) is torch.Size and type(chunk.sizes) is torch.Size
            for chunk in entry.chunks
        )
    )


def _is_place(place: _StorageInfo) -> bool:
    numbers = type(place.offset) is int and type(place.length) is int and place.offset >= 0 and place.length >= 0
    return type(place.relative_path) is str and numbers


def load_tensors_and_plain_data(source: Any, what: str) -> Any:
    """torch.load of tensors and plain data only, onto the CPU. source: path or binary stream. what: its name for the message."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        # torch's own message advises to lift the restriction.
        raise UnsafeCheckpoint(f"{what} holds more than tensors and plain data; the file is not from megappo") from None
    except (OSError, MemoryError):
        raise
    except Exception as error:  # as for the index
        raise UnsafeCheckpoint(f"{what} is not readable ({type(error).__name__}); the file is not from megappo") from None
