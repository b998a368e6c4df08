"""Finds the megappo checkpoint that a critic starts from (`critic.checkpoint`). The importer handles `critic.model`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.checkpoint.identity import head_of, identity_of_model, other_adapters, other_head
from megappo.checkpoint.manifest import models_of
from megappo.config.errors import ConfigError, problem
from megappo.config.role_sections import AnyCriticConfig, key_of_role
from megappo.config.schema import TrainConfig
from megappo.models.arch import ModelArch
from megappo.trainer.prepare.checkpoint_source import find_checkpoint, other_architecture
from megappo.trainer.prepare.layouts import model_paths


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
    head = None if source.role == "policy" else other_head(head_of(manifest.facts, source.role), critic.head_facts, name)
    if head is not None:
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
        now = {source.role: {**lora, "base": identity_of_model(model)}}
        if (change := other_adapters({source.role: theirs}, now)) is not None:
            return f"was written with {change}; make {name}.lora and {name}.model the same"
    return None
