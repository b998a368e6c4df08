"""Source of a critic that starts from a megappo checkpoint: `critic.checkpoint` as a directory, a step and a role.

Reads manifests and file sizes, never weights; the load verifies contents (`checkpoint/store.py`). Critics that start from a
Hugging Face checkpoint (`critic.model`) are left to the importer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from megappo.checkpoint.directory import CHECKPOINTS, CheckpointDirectory
from megappo.checkpoint.errors import DamagedCheckpoint, RefusedCheckpoint
from megappo.checkpoint.manifest import Manifest
from megappo.config.errors import ConfigError, problem
from megappo.config.schema import CriticConfig
from megappo.config.yaml_reader import parse_yaml
from megappo.models.arch import ModelArch
from megappo.models.hf_config import read_arch

_KEY = "critic.checkpoint"
_STEP = re.compile(r"step-(\d+)")
_FORMS = "name a run directory (runs/NAME) or a checkpoint of it (runs/NAME/checkpoints/step-N)"


@dataclass(frozen=True)
class CriticSource:
    """Weights of `role` in checkpoint `step` under `directory`, the `checkpoints` directory of a run."""

    directory: Path
    step: int
    role: Literal["critic", "policy"]


def critic_source(critic: CriticConfig, arch: ModelArch) -> CriticSource | None:
    """Find the source that `critic.checkpoint` names; None if it is not set. arch: of the critic to build.

    ConfigError, one line: no directory, no complete checkpoint, weights of that role missing, another architecture.
    """
    if critic.checkpoint is None:
        return None
    directory, manifest = _find(critic.checkpoint)
    source = CriticSource(directory.path, manifest.step, critic.checkpoint_role)
    held = sorted({name.split("/")[1] for name in manifest.files if name.startswith("megatron/")})
    if source.role not in held:
        there = directory.step_path(source.step)
        fix = f"{there} holds no {source.role} (it has: {', '.join(held) or 'no weights'}); set critic.checkpoint_role"
        raise ConfigError(problem(_KEY, critic.checkpoint, fix))
    _check_architecture(critic.checkpoint, manifest, source.role, arch)
    return source


def _find(text: str) -> tuple[CheckpointDirectory, Manifest]:
    """Newest checkpoint of a run, or the named one."""
    try:
        return _find_readable(text)
    except RefusedCheckpoint as error:  # not known to be damaged: another step would be another critic
        raise ConfigError(problem(_KEY, text, str(error))) from None


def _find_readable(text: str) -> tuple[CheckpointDirectory, Manifest]:
    path = Path(text)
    if not path.is_dir():
        raise ConfigError(problem(_KEY, text, f"is not a directory; {_FORMS}"))
    if step := _STEP.fullmatch(path.name):
        directory = CheckpointDirectory(path.parent)
        try:
            return directory, directory.read(int(step[1]))
        except DamagedCheckpoint as error:
            raise ConfigError(problem(_KEY, text, f"is damaged or incomplete: {error}; use another step")) from None
    if (path / "config.json").is_file():
        raise ConfigError(problem(_KEY, text, "is a Hugging Face checkpoint; set critic.model to it instead"))
    directory = CheckpointDirectory(path / CHECKPOINTS)
    newest = directory.newest()
    if newest is None:
        raise ConfigError(problem(_KEY, text, f"holds no complete checkpoint; {_FORMS}"))
    return directory, newest


def _check_architecture(text: str, manifest: Manifest, role: str, arch: ModelArch) -> None:
    """Compare with the model that the run was configured with."""
    written, _ = parse_yaml(str(manifest.facts.get("config", "")), text)
    if not isinstance(written, dict):
        return
    models = {name: (written.get(name) or {}).get("model") for name in ("policy", "critic")}
    model = models[role] or models["policy"]
    if model is None or not Path(model, "config.json").is_file():  # moved: the load compares shapes
        return
    theirs = read_arch(model)
    differing = [field.name for field in fields(arch) if getattr(theirs, field.name) != getattr(arch, field.name)]
    # A critic differs from a policy by its head; the layers below must agree.
    differing = [name for name in differing if name not in ("architecture", "tied_embeddings")]
    if differing:
        what = ", ".join(f"{name} {getattr(theirs, name)} instead of {getattr(arch, name)}" for name in differing[:3])
        fix = f"its {role} is of another architecture ({what}); set critic.model to {model}"
        raise ConfigError(problem(_KEY, text, fix))
