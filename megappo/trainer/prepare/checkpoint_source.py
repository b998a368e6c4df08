"""Finds a checkpoint that a user names by a path: a run (`runs/NAME`: its newest checkpoint) or one checkpoint of it.
Reads manifests and file sizes, never weights; the load verifies contents (`checkpoint/store.py`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.errors import DamagedCheckpoint, RefusedCheckpoint
from megappo.checkpoint.manifest import Manifest, models_of
from megappo.config.errors import ConfigError, problem
from megappo.config.role_sections import key_of_role
from megappo.config.run_directory import CHECKPOINTS
from megappo.config.yaml_reader import parse_yaml
from megappo.models.arch import ModelArch
from megappo.models.role_arch import arch_for

_KEY = "CHECKPOINT"
_STEP = re.compile(r"step-(\d+)")
FORMS = "name a run directory (runs/NAME) or a checkpoint of it (runs/NAME/checkpoints/step-N)"


def find_checkpoint(key: str, text: str) -> tuple[CheckpointDirectory, Manifest]:
    """Find the named checkpoint, or the newest one of the named run. ConfigError, one line with `key`, if there is none."""
    try:
        return _find_readable(key, text)
    except RefusedCheckpoint as error:  # not known to be damaged: another step would be another model
        raise ConfigError(problem(key, text, str(error))) from None


def _find_readable(key: str, text: str) -> tuple[CheckpointDirectory, Manifest]:
    path = Path(text)
    if not path.is_dir():
        raise ConfigError(problem(key, text, f"is not a directory; {FORMS}"))
    if step := _STEP.fullmatch(path.name):
        directory = CheckpointDirectory(path.parent)
        try:
            return directory, directory.read(int(step[1]))
        except DamagedCheckpoint as error:
            raise ConfigError(problem(key, text, f"is damaged or incomplete: {error}; use another step")) from None
    directory = CheckpointDirectory(path / CHECKPOINTS)
    newest = directory.newest()
    if newest is None:
        raise ConfigError(problem(key, text, f"holds no complete checkpoint; {FORMS}"))
    return directory, newest


def other_architecture(text: str, manifest: Manifest, role: str, arch: ModelArch) -> tuple[str, str] | None:
    """Return (differences, model directory) if the run configured another architecture of `role`; None if none is found."""
    written, _ = parse_yaml(str(manifest.facts.get("config", "")), text)
    if not isinstance(written, dict):
        return None
    section = written
    for part in key_of_role(role).split("."):
        section = section.get(part) or {}
    model = section.get("model") or (written.get("policy") or {}).get("model")
    if model is None or not Path(model, "config.json").is_file():  # moved: the load compares shapes
        return None
    theirs = arch_for(model, section.get("engine", "megatron"))
    differing = [field.name for field in fields(arch) if getattr(theirs, field.name) != getattr(arch, field.name)]
    # A critic differs from a policy by its head; the layers below must agree, in the words of either engine.
    differing = [name for name in differing if name not in ("architecture", "tied_embeddings", "own", "head_rows")]
    if not differing:
        return None
    return ", ".join(f"{name} {getattr(theirs, name)} instead of {getattr(arch, name)}" for name in differing[:3]), model


@dataclass(frozen=True)
class PolicySource:
    """Weights of a policy: checkpoint `step` under `directory`, or the Hugging Face checkpoint `model`."""

    directory: Path | None
    step: int | None
    model: str | None

    @property
    def path(self) -> Path:
        """Directory of the checkpoint."""
        if self.directory is None:
            return Path(str(self.model))
        return CheckpointDirectory(self.directory).step_path(self.step or 0)

    def check_architecture(self, arch: ModelArch, text: str) -> None:
        """ConfigError if `policy.model`, of architecture `arch`, is not the model of this checkpoint."""
        if self.directory is None or self.step is None:
            return
        manifest = CheckpointDirectory(self.directory).read(self.step)
        if (other := other_architecture(text, manifest, "policy", arch)) is not None:
            what, model = other
            raise ConfigError(problem(_KEY, text, f"its policy is of another architecture ({what}); set policy.model={model}"))


def policy_source(text: str) -> PolicySource:
    """Find the policy weights that the argument CHECKPOINT names. ConfigError, one line, if it is no checkpoint with a policy."""
    path = Path(text)
    if (path / "config.json").is_file():
        return PolicySource(None, None, text)
    try:
        directory, manifest = find_checkpoint(_KEY, text)
    except ConfigError as error:
        # Fine-tuning saves no checkpoints, it exports at its end.
        there = path / "export"
        hint = f"; its model lies in {there}" if (there / "config.json").is_file() else ", or a Hugging Face checkpoint"
        raise ConfigError(f"{error}{hint}") from None
    if "policy" not in (held := sorted(models_of(manifest))):
        raise ConfigError(problem(_KEY, text, f"step-{manifest.step} holds no policy (it has: {', '.join(held) or 'no weights'})"))
    return PolicySource(directory.path, manifest.step, None)
