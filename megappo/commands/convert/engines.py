"""Arithmetic of rules about the engine of a role: its name, and keys that count in only one backend. Signature: `settings.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

from megappo.commands.convert.settings import Otherwise, Settings, Values, implied, missing, same, translated
from megappo.config.foreign.rule import Outcome, Rule
from megappo.config.role_sections import Offload

PARTS: tuple[str, ...] = get_args(Offload)


def if_megatron(rule: Rule, value: Any, settings: Settings) -> Values:
    return _of_backend(rule, value, settings, "megatron_cfg")


def if_dtensor(rule: Rule, value: Any, settings: Settings) -> Values:
    return _of_backend(rule, value, settings, "dtensor_cfg")


def _of_backend(rule: Rule, value: Any, settings: Settings, backend: str) -> Values:
    # NeMo-RL writes both backends and enables one.
    role = "value" if rule.keys[0].startswith("critic") else "policy"
    other = {"megatron_cfg": "dtensor_cfg", "dtensor_cfg": "megatron_cfg"}[backend]
    enabled = settings.foreign.get(f"{role}.{backend}.enabled", not settings.foreign.get(f"{role}.{other}.enabled", False))
    if not enabled:
        raise Otherwise(Outcome.UNNEEDED, f"{backend} is not enabled")
    return same(rule.keys, translated(rule, value))


def fsdp2_if_on(rule: Rule, value: Any, settings: Settings) -> Values:
    """Choose fsdp2 for NeMo-RL's DTensor backend: transformers' classes under FSDP2."""
    if not value:
        raise Otherwise(Outcome.UNNEEDED, "off")
    return _of_backend(replace(rule, values={True: "fsdp2"}), value, settings, "dtensor_cfg")


def offload_if_dtensor(rule: Rule, value: Any, settings: Settings) -> Values:
    _of_backend(rule, value, settings, "dtensor_cfg")
    return offload_if_on(rule, value, settings)


def offload_if_on(rule: Rule, value: Any, settings: Settings) -> Values:
    """Offload all of a role for one switch; the parts also have switches of their own in the source."""
    if not value:
        raise Otherwise(Outcome.UNNEEDED, "off")
    (key,) = rule.keys
    return {key: _words(("parameters",) if key.startswith("reference.") else PARTS)}


def offload_of(part: str) -> Callable[[Rule, Any, Settings], Values]:
    """Make the rule of a switch of one part, which joins what other switches of the role say (`JOINED`)."""

    def offload(rule: Rule, value: Any, settings: Settings) -> Values:
        if not isinstance(value, bool):
            raise missing("neither true nor false")
        return {key: _words([*settings.ours.get(key, []), *[part] * value]) for key in rule.keys}

    return offload


def _words(parts: Sequence[str]) -> list[str]:
    return [part for part in PARTS if part in parts]


def verl_engine(rule: Rule, value: Any, settings: Settings) -> Values:
    """Translate verl's strategy. The actor's also holds for the reference unless that has its own."""
    if value == "fsdp":
        raise implied("FSDP's first version: Megatron-core instead; strategy=fsdp2 is engine fsdp2")
    keys = rule.keys[:1] if "actor_rollout_ref.ref.strategy" in settings.written else rule.keys
    return same(keys, translated(replace(rule, values={"fsdp2": "fsdp2", "megatron": "megatron"}), value))
