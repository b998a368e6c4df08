"""Safe reader of the one pickle that we read, the index (`.metadata`) of a torch distributed checkpoint: an allow-list of classes.

torch reads that file with `pickle.load`, which runs any code in it. Here a name outside the table is refused before it is
imported. torch reads the shard files themselves with `weights_only=True`.
"""

from __future__ import annotations

import importlib
import io
import pickle
from enum import Enum
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

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


class UnsafeCheckpoint(ValueError):
    """The checkpoint contains something that megappo never writes. Nothing of it was run."""


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
    """Parse `.metadata` of a torch distributed checkpoint. UnsafeCheckpoint if it names anything but data."""
    try:
        index = _IndexUnpickler(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError, ImportError) as error:
        raise UnsafeCheckpoint(f"checkpoint index is not readable: {error}") from None
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise UnsafeCheckpoint("checkpoint index does not describe a torch distributed checkpoint")
    for place in index.storage_data.values():
        path = PurePosixPath(place.relative_path)
        if len(path.parts) != 1 or path.name in ("", ".", ".."):  # `../../other/file`
            raise UnsafeCheckpoint(f"checkpoint index points to {place.relative_path!r}, outside its directory")
        if place.transform_descriptors:
            raise UnsafeCheckpoint(f"checkpoint index asks for the transforms {place.transform_descriptors}; none are known")
    return index


def load_tensors_and_plain_data(source: Any, what: str) -> Any:
    """torch.load of tensors and plain data only, onto the CPU. source: path or binary stream. what: its name for the message."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        # torch's own message advises to lift the restriction.
        raise UnsafeCheckpoint(f"{what} holds more than tensors and plain data; the file is not from megappo") from None
