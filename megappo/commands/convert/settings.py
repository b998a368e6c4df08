"""State of a conversion, and how the function of a rule says that there is no value. Such a function takes the rule, the foreign
value and the settings, and returns our values by key. It raises Otherwise if the value has no equivalent or is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megappo.config.foreign.rule import Outcome, Rule
from megappo.config.yaml_reader import LARGEST_NUMBER

Values = dict[str, Any]


class Otherwise(Exception):
    """Another outcome than the rule's, and the reason for it."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


@dataclass
class Settings:
    """The foreign keys, with the trainer's defaults, and our keys as far as they are known."""

    foreign: Mapping[str, Any]
    written: frozenset[str]  # foreign keys that the source writes
    steps_of_ppo: bool
    ours: Values = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)  # for the end of the report
    lost: list[str] = field(default_factory=list)  # parts of keys that are not taken over although the rest is

    def of_trl(self, name: str, default: Any) -> Any:
        """TRL's key, alone or in a FlowMesh workflow."""
        value = self.foreign.get(name, self.foreign.get(f"spec.training.{name}", default))
        return default if value is None else value

    def samples(self) -> int:
        """Responses per step."""
        return int(self.ours.get("data.prompts_per_step", 256)) * int(self.ours.get("rollout.samples_per_prompt", 1))

    def sequence_tokens(self) -> int:
        """Tokens of the longest prompt and response."""
        return int(self.ours.get("data.max_prompt_tokens", 512)) + int(self.ours.get("rollout.max_response_tokens", 512))

    def updates(self, role: str) -> int:
        """Optimizer steps of a role per PPO step."""

        def of(name: str, default: int) -> int:
            own = self.ours.get(f"critic.{name}") if role == "critic" else None
            return int(self.ours.get(f"algorithm.{name}", default) if own is None else own)

        return max(1, self.samples() // of("mini_batch_size", 256)) * of("ppo_epochs", 1)


def same(keys: tuple[str, ...], value: Any) -> Values:
    return dict.fromkeys(keys, value)


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST_NUMBER:
        raise Otherwise(Outcome.MISSING, "not a number that can be counted with")
    return value


def translated(rule: Rule, value: Any) -> Any:
    """Translate a value by the rule's table; without a table it stays as it is. Raises Otherwise for a value not in the table."""
    if rule.values is None:
        return value
    if isinstance(value, list | dict) or value not in rule.values:
        raise missing(rule.otherwise or f"one of {', '.join(str(key) for key in rule.values)}")
    return rule.values[value]


def missing(reason: str) -> Otherwise:
    return Otherwise(Outcome.MISSING, reason)


def implied(reason: str) -> Otherwise:
    return Otherwise(Outcome.IMPLIED, reason)


def unneeded(reason: str = "off") -> Otherwise:
    return Otherwise(Outcome.UNNEEDED, reason)
