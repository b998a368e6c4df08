"""Every key of every table leads to keys of megappo that exist, with values that they take; and every arithmetic is used."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from megappo.commands.convert.arithmetic import BY, CHOOSE, LATE
from megappo.commands.convert.conversion import class_of, rule_of
from megappo.commands.convert.sources import READ
from megappo.config.foreign.before_ppo import BEFORE_PPO
from megappo.config.foreign.rule import Outcome, Rule, take
from megappo.config.foreign.tables import TRAINERS
from megappo.config.keys import hint, value_keys
from megappo.config.schema import TrainConfig
from megappo.config.supervised import AnyConfig

FIELDS = dict(value_keys(TrainConfig))
ALL = (*TRAINERS, *BEFORE_PPO)
RULES = [(trainer, key, rule) for trainer in ALL for key, rule in trainer.rules.items()]
BY_TRAINER = pytest.mark.parametrize("trainer", ALL, ids=lambda trainer: f"{trainer.name} {trainer.kind}".strip())


def refused(field: Any, value: object) -> bool:
    """True if a key of ours does not take a value."""
    try:
        TypeAdapter(field.annotation).validate_python(value, strict=True)
    except ValidationError:
        return True
    return False


def faults(rule: Rule, cls: type[AnyConfig] = TrainConfig) -> list[str]:
    """Contradictions of one rule with the schema and with the arithmetic."""
    fields = dict(value_keys(cls))
    found = [f"no key {key}" for key in rule.keys if key not in fields]
    found += [f"no arithmetic {rule.by}" for _ in [0] if rule.by and rule.by not in BY]
    if rule.outcome is Outcome.TAKEN and not rule.keys:
        found.append("sets nothing")
    if rule.outcome is not Outcome.TAKEN and not rule.note:
        found.append("gives no reason")
    if not found and rule.values is not None:
        found += [f"{key} refuses {value}" for key in rule.keys for value in rule.values.values() if refused(fields[key], value)]
    return found


@BY_TRAINER
def test_every_key_leads_to_keys_that_exist(trainer):
    assert trainer.rules
    assert {key: found for key, rule in trainer.rules.items() if (found := faults(rule, class_of(trainer)))} == {}


def test_a_renamed_key_is_noticed():
    """Negative control."""
    assert faults(take("policy.parallel.tensor")) == ["no key policy.parallel.tensor"]
    assert faults(take("policy.recompute", values={True: "all"})) == ["policy.recompute refuses all"]
    assert faults(take("policy.recompute", by="nothing")) == ["no arithmetic nothing"]
    assert faults(replace(take("policy.recompute"), outcome=Outcome.MISSING)) == ["gives no reason"]


@BY_TRAINER
def test_defaults_sections_and_choices_have_their_rules(trainer):
    assert [key for key in trainer.defaults if rule_of(key, trainer) is None] == []
    assert [key for key in trainer.defaults if trainer.rules[key].outcome is not Outcome.TAKEN] == []
    assert [section for section in trainer.sections if section not in trainer.rules] == []
    assert set(trainer.chosen) <= set(dict(value_keys(class_of(trainer)))) and set(trainer.chosen.values()) <= set(CHOOSE)


def test_every_arithmetic_is_of_a_rule():
    assert {rule.by for _, _, rule in RULES if rule.by} == set(BY)
    assert {by for late in LATE for by in late} <= set(BY)
    assert {name for trainer in TRAINERS for name in trainer.chosen.values()} == set(CHOOSE)


def test_commands_start_one_trainer_each():
    commands = [command for trainer in READ for command in trainer.commands]
    assert len(set(commands)) == len(commands)


@pytest.mark.parametrize(
    "trainer",
    [trainer for trainer in TRAINERS if trainer.name in ("verl", "NeMo-RL", "OpenRLHF", "FlowMesh")],
    ids=lambda t: t.name,
)
def test_every_dotted_key_is_answered_by_its_own_rule(trainer):
    """The hint for a key written here in full, as a user does who moves one line."""
    for key, rule in trainer.rules.items():
        if "." not in key:
            continue
        said = hint(key, TrainConfig)
        # The first trainer wins where several know a name.
        if key in FIELDS or any(key in other.rules for other in TRAINERS[: TRAINERS.index(trainer)]):
            continue
        wanted = (
            f"did you mean {rule.keys[0]}?"
            if rule.outcome is Outcome.TAKEN
            else f"{trainer.name} has it; {rule.outcome.value} here: "
        )
        assert said.startswith(wanted), key
