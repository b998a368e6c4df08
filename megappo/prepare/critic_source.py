"""Source of a critic that starts from a megappo checkpoint: `critic.checkpoint` as a directory, a step and a role.

Critics that start from a Hugging Face checkpoint (`critic.model`) are left to the importer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megappo.checkpoint.identity import identity_of_model, other_adapters, other_head
from megappo.config.errors import ConfigError, problem
from megappo.config.role_sections import CriticConfig
from megappo.models.arch import ModelArch
from megappo.prepare.checkpoint_source import find_checkpoint, other_architecture, roles_of

_KEY = "critic.checkpoint"


@dataclass(frozen=True)
class CriticSource:
    """Weights of `role` in checkpoint `step` under `directory`, the `checkpoints` directory of a run."""

    directory: Path
    step: int
    role: Literal["critic", "policy"]


def critic_source(critic: CriticConfig, arch: ModelArch, model: str) -> CriticSource | None:
    """Find the source that `critic.checkpoint` names; None if it is not set. arch, model: of the critic to build, its directory.

    ConfigError, one line: no directory, no complete checkpoint, weights of that role missing, another architecture, other adapters,
    another value head.
    """
    text = critic.checkpoint
    if text is None:
        return None
    if (Path(text) / "config.json").is_file():
        raise ConfigError(problem(_KEY, text, "is a Hugging Face checkpoint; set critic.model to it instead"))
    directory, manifest = find_checkpoint(_KEY, text)
    source = CriticSource(directory.path, manifest.step, critic.checkpoint_role)
    if source.role not in (held := roles_of(manifest)):
        there = directory.step_path(source.step)
        fix = f"{there} holds no {source.role} (it has: {', '.join(held) or 'no weights'}); set critic.checkpoint_role"
        raise ConfigError(problem(_KEY, text, fix))
    _check_adapters(critic, model, source, manifest.facts.get("lora"), text)
    if source.role == "critic" and (change := other_head(manifest.facts.get("value_head"), critic.head_facts)) is not None:
        raise ConfigError(problem(_KEY, text, f"was written with {change}; make them the same, or start from its policy"))
    if (other := other_architecture(text, manifest, source.role, arch)) is not None:
        what, model = other
        fix = f"its {source.role} is of another architecture ({what}); set critic.model to {model}"
        raise ConfigError(problem(_KEY, text, fix))
    return source


def _check_adapters(critic: CriticConfig, model: str, source: CriticSource, saved: Mapping[str, Any] | None, text: str) -> None:
    """ConfigError if one of checkpoint and critic has adapters and the other all weights, or if they or their bases differ."""
    lora = None if critic.lora is None else critic.lora.model_dump(mode="json")
    theirs = (saved or {}).get(source.role)
    if (lora is None) != (theirs is None):
        what, mine = ("adapters", "is null: set it") if theirs is not None else ("all weights", "is set: remove it")
        fix = f"its {source.role} trained {what}, and critic.lora {mine}, or export that {source.role} and name it in critic.model"
        raise ConfigError(problem(_KEY, text, fix))
    if lora is not None and theirs is not None:
        now = {source.role: {**lora, "base": identity_of_model(model)}}
        if (change := other_adapters({source.role: theirs}, now)) is not None:
            raise ConfigError(problem(_KEY, text, f"was written with {change}; make critic.lora and critic.model the same"))
