"""Arithmetic of rules about the engine of a role: its name, and keys that count in only one backend. Signature: `settings.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megappo.commands.convert.settings import Otherwise, Settings, Values, implied, same, translated
from megappo.commands.convert.single_values import spread
from megappo.config.foreign.rule import Outcome, Rule


def if_megatron(rule: Rule, value: Any, settings: Settings) -> Values:
    return _of_backend(rule, value, settings, "megatron_cfg")


def if_dtensor(rule: Rule, value: Any, settings: Settings) -> Values:
    return _of_backend(rule, value, settings, "dtensor_cfg")


def betas_if_dtensor(rule: Rule, value: Any, settings: Settings) -> Values:
    _of_backend(rule, value, settings, "dtensor_cfg")
    return spread(rule, value, settings)


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
    return only_if_on(rule, value, settings)


def only_if_on(rule: Rule, value: Any, settings: Settings) -> Values:
    """Switch on several of our keys, each of which also has a switch of its own in the source."""
    if not value:
        raise Otherwise(Outcome.UNNEEDED, "off")
    return same(rule.keys, True)


def verl_engine(rule: Rule, value: Any, settings: Settings) -> Values:
    """Translate verl's strategy. The actor's also holds for the reference unless that has its own."""
    if value == "fsdp":
        raise implied("FSDP's first version: Megatron-core instead; strategy=fsdp2 is engine fsdp2")
    keys = rule.keys[:1] if "actor_rollout_ref.ref.strategy" in settings.written else rule.keys
    return same(keys, translated(replace(rule, values={"fsdp2": "fsdp2", "megatron": "megatron"}), value))
