"""Finds a checkpoint that a user names by a path: a run (`runs/NAME`: its newest checkpoint) or one checkpoint of it; the
policy's, or the one that a critic starts from (`critic.checkpoint`). Reads manifests and file sizes, never weights; the load
verifies contents (`checkpoint/store.py`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.identity import adapter_facts, first_change, head_facts, head_of, identity_of_model
from megappo.checkpoint.manifest import DamagedCheckpoint, Manifest, RefusedCheckpoint, models_of
from megappo.config.errors import ConfigError, problem
from megappo.config.role_sections import AnyCriticConfig, key_of_role
from megappo.config.run_directory import CHECKPOINTS, EXPORTED
from megappo.config.schema import TrainConfig
from megappo.config.yaml_reader import parse_yaml
from megappo.models.arch import ModelArch
from megappo.models.hf_config import arch_for
from megappo.trainer.prepare.layouts import model_paths

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
    differing = [name for name in differing if name not in ("architecture", "tied_embeddings", "own", "head_rows", "scores_texts")]
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
        there = path / EXPORTED
        hint = f"; its model lies in {there}" if (there / "config.json").is_file() else ", or a Hugging Face checkpoint"
        raise ConfigError(f"{error}{hint}") from None
    if "policy" not in (held := sorted(models_of(manifest))):
        raise ConfigError(problem(_KEY, text, f"step-{manifest.step} holds no policy (it has: {', '.join(held) or 'no weights'})"))
    return PolicySource(directory.path, manifest.step, None)


@dataclass(frozen=True)
class CriticSource:
    """Weights of `role` in checkpoint `step` under `directory`, the `checkpoints` directory of a run."""

    directory: Path
    step: int
    role: str


def critic_source(critic: AnyCriticConfig, arch: ModelArch, model: str, name: str = "critic") -> CriticSource | None:
    """Find the source named by `critic.checkpoint`; None if it is not set. arch, model: of the critic to build. name: of its
    section. ConfigError, one line, if there is no directory, complete checkpoint or weights of the role, or if the architecture,
    adapters or value head differ."""
    key, text = f"{name}.checkpoint", critic.checkpoint
    if text is None:
        return None
    if (Path(text) / "config.json").is_file():
        raise ConfigError(problem(key, text, f"is a Hugging Face checkpoint; set {name}.model to it instead"))
    directory, manifest = find_checkpoint(key, text)
    source = CriticSource(directory.path, manifest.step, critic.checkpoint_role)
    if source.role not in (held := models_of(manifest)):
        there = directory.step_path(source.step)
        fix = f"{there} holds no {source.role} (it has: {', '.join(sorted(held)) or 'no weights'}); set {name}.checkpoint_role"
        raise ConfigError(problem(key, text, fix))
    if (change := _other_adapters(critic, model, source, manifest.facts.get("lora"), name)) is not None:
        raise ConfigError(problem(key, text, change))
    heads = [head_facts(name, one) for one in (head_of(manifest.facts, source.role), critic.head_facts)]
    if source.role != "policy" and (head := first_change(*heads)) is not None:
        raise ConfigError(problem(key, text, f"was written with {head}; make them the same, or start from its policy"))
    if (other := other_architecture(text, manifest, source.role, arch)) is not None:
        what, model = other
        fix = f"its {source.role} is of another architecture ({what}); set {name}.model to {model}"
        raise ConfigError(problem(key, text, fix))
    return source


def check_critic_sources(config: TrainConfig, archs: Mapping[str, ModelArch]) -> None:
    """ConfigError, as `critic_source`, if a critic has no source where its section names one. archs: by role."""
    for role, critic in config.critics_in_use.items():
        critic_source(critic, archs[role], model_paths(config)[role][1], key_of_role(role))


def _other_adapters(
    critic: AnyCriticConfig, model: str, source: CriticSource, saved: Mapping[str, Any] | None, name: str
) -> str | None:
    """Describe the difference if only one of checkpoint and critic has adapters, or if the adapters or their bases differ."""
    lora = None if critic.lora is None else critic.lora.model_dump(mode="json")
    theirs = (saved or {}).get(source.role)
    if (lora is None) != (theirs is None):
        what, mine = ("adapters", "is null: set it") if theirs is not None else ("all weights", "is set: remove it")
        return f"its {source.role} trained {what}, and {name}.lora {mine}, or export that {source.role} and name it in {name}.model"
    if lora is not None and theirs is not None:
        mine = {**lora, "base": identity_of_model(model)}
        if (change := first_change(adapter_facts(name, theirs), adapter_facts(name, mine))) is not None:
            return f"was written with {change}; make {name}.lora and {name}.model the same"
    return None
