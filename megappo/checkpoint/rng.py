"""State of one rank's random generators, in memory or in a file: python, numpy, torch CPU, CUDA, Megatron's named states."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

_TRACKER = "megatron."


@dataclass(frozen=True)
class RngState:
    """State of every generator of this process at one moment. numbers: what is no tensor, JSON-compatible."""

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Any]


def read_rng() -> RngState:
    """Copy the state of every generator; takes well below a millisecond."""
    version, python_words, gauss_next = random.getstate()
    numpy_state = numpy.random.get_state(legacy=True)
    assert isinstance(numpy_state, tuple)
    _, numpy_words, position, has_gauss, gauss = numpy_state
    tensors: dict[str, Tensor] = {
        "python": torch.tensor(python_words, dtype=torch.int64),
        "numpy": torch.from_numpy(numpy_words.astype(numpy.int64)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    for name, state in _tracker().get_states().items():
        tensors[_TRACKER + name] = state.clone()
    numbers = {"python": [version, gauss_next], "numpy": [int(position), int(has_gauss), float(gauss)]}
    return RngState(tensors, numbers)


def set_rng(state: RngState) -> None:
    """Restore every generator."""
    tensors, numbers = state.tensors, state.numbers
    version, gauss_next = numbers["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss_next))
    position, has_gauss, gauss = numbers["numpy"]
    numpy.random.set_state(("MT19937", tensors["numpy"].numpy().astype(numpy.uint32), position, has_gauss, gauss))
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    _tracker().set_states({name.removeprefix(_TRACKER): state for name, state in tensors.items() if name.startswith(_TRACKER)})


def encode_rng() -> bytes:
    """Encode the state of every generator of this process as a file's content (safetensors: no pickle)."""
    state = read_rng()
    return save(dict(state.tensors), metadata={"numbers": json.dumps(state.numbers)})


def load_rng(path: Path) -> None:
    """Restore every generator from a file. ValueError if CUDA is used and the file has no CUDA state."""
    with safe_open(path, framework="pt", device="cpu") as file:
        state = RngState({name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["numbers"]))
    if torch.cuda.is_available() and "cuda" not in state.tensors:
        raise ValueError(f"{path.name} was written without CUDA; resume where no GPU is visible (CUDA_VISIBLE_DEVICES=)")
    set_rng(state)


def _tracker() -> CudaRNGStatesTracker:
    tracker = get_cuda_rng_tracker()
    assert tracker is not None, "Megatron-core makes it when it is asked for"
    return tracker
