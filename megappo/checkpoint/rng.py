"""Save and load the random generators of one rank: python, numpy, torch CPU, CUDA, Megatron's tracker of named states."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

_TRACKER = "megatron."


def save_rng(path: Path) -> None:
    """Write the state of every generator of this process (safetensors: no pickle)."""
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
    numbers = {
        "python": [version, gauss_next],
        "numpy": [int(position), int(has_gauss), float(gauss)],
    }
    save_file(tensors, path, metadata={"numbers": json.dumps(numbers)})


def load_rng(path: Path) -> None:
    """Restore every generator. ValueError if CUDA is used and the file has no state of it."""
    with safe_open(path, framework="pt", device="cpu") as file:
        numbers = json.loads(file.metadata()["numbers"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    if torch.cuda.is_available() and "cuda" not in tensors:
        raise ValueError(f"{path.name} was written without CUDA; resume where no GPU is visible (CUDA_VISIBLE_DEVICES=)")
    version, gauss_next = numbers["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss_next))
    position, has_gauss, gauss = numbers["numpy"]
    numpy.random.set_state(("MT19937", tensors["numpy"].numpy().astype(numpy.uint32), position, has_gauss, gauss))
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    _tracker().set_states({name.removeprefix(_TRACKER): state for name, state in tensors.items() if name.startswith(_TRACKER)})


def _tracker() -> CudaRNGStatesTracker:
    tracker = get_cuda_rng_tracker()
    assert tracker is not None, "Megatron-core makes it when it is asked for"
    return tracker
