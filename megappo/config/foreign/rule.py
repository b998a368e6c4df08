"""Translation of other trainers' keys: the rules behind `megappo convert` and the hints for foreign keys.

A table is data. A rule that needs other keys (samples = prompts x responses) names its arithmetic (`by`), which is in
`megappo/commands/convert/arithmetic.py`. Imports nothing of megappo.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any


class Outcome(Enum):
    TAKEN = "taken over"
    IMPLIED = "implied"
    UNNEEDED = "not needed"
    MISSING = "no equivalent"


@dataclass(frozen=True)
class Rule:
    """The fate of one foreign key."""

    outcome: Outcome
    keys: tuple[str, ...] = ()
    """megappo's keys that it sets or that say the same; the first is the hint."""
    note: str = ""
    """The change of unit, or the reason for an outcome without a key."""
    values: Mapping[Any, Any] | None = None
    """Foreign value -> ours; None copies the value."""
    by: str = ""
    """Name of the arithmetic that computes our values."""
    expects: tuple[Any, ...] = ()
    """Values for which the outcome holds (empty: all). Any other value has no equivalent (`otherwise` says why)."""
    otherwise: str = ""
    off: tuple[Any, ...] = (None, False, 0, -1, "", "null", "none")
    """Values that switch off a key without equivalent, so that nothing is lost by dropping it."""
    is_file: bool = False
    """True if the key names a file with more keys."""

    @property
    def changes_learning(self) -> bool:
        """True if a run without the key would learn something else."""
        return self.is_file or any(key.startswith(LEARNING) for key in self.keys)


# Our keys that say what a run learns, and not how fast or where it does.
LEARNING = (
    "algorithm.",
    "loss.",
    "reward.",
    "reward_model.engine",
    "reward_model.model",
    "reward_model.optimizer.",
    "critic.loss",
    "critic.warmup",
    "policy.lora.",
    "policy.optimizer.",
    "reward_model.lora.",
    "critic.optimizer.",
    "rollout.sampling.",
    "rollout.samples_per_prompt",
    "rollout.environment",
    "data.prompts_per_step",
    "data.tokenizer",
    "trainer.batch_size",
)
OTHER_FILE = "that file has more keys: convert it, or the merged configuration"


def take(*keys: str, note: str = "", values: Mapping[Any, Any] | None = None, by: str = "", otherwise: str = "") -> Rule:
    return Rule(Outcome.TAKEN, keys, note, values, by, otherwise=otherwise)


def implied(note: str, *keys: str, expects: tuple[Any, ...] = (), otherwise: str = "") -> Rule:
    return Rule(Outcome.IMPLIED, keys, note, expects=expects, otherwise=otherwise)


def each(rule: Rule, *names: str, theirs: str = "") -> dict[str, Rule]:
    """Give one rule to every key of these words, each behind the prefix `theirs`."""
    return {theirs + name: rule for line in names for name in line.split()}


def renamed(theirs: str, *pairs: str) -> dict[str, str]:
    """Read words `name=other`, or one name for both: name behind the prefix `theirs` -> other."""
    words = (word.partition("=") for line in pairs for word in line.split())
    return {theirs + name: other or name for name, _, other in words}


def taken(*pairs: str, theirs: str = "", ours: str = "") -> dict[str, Rule]:
    """Take over the keys of the words `their_key=our_key` without a change. theirs, ours: prefixes of these keys."""
    return {name: take(ours + own) for name, own in renamed(theirs, *pairs).items()}


def of_learner(rules: Mapping[str, Rule], role: str, names: Iterable[str]) -> dict[str, Rule]:
    """Rules of PPO's settings for a run in which one model trains: keys of the policy become those of `role`, other roles' go."""
    return {name: replace(rules[name], keys=_of_role(rules[name].keys, role)) for name in names}


def _of_role(keys: tuple[str, ...], role: str) -> tuple[str, ...]:
    kept = [key for key in keys if not key.startswith(("critic.", "reference.", "rollout.", "algorithm.", "reward."))]
    return tuple(re.sub(r"^policy\.", f"{role}.", key) for key in kept)


def unneeded(note: str, *keys: str) -> Rule:
    return Rule(Outcome.UNNEEDED, keys, note)


def missing(note: str, *keys: str, off: tuple[Any, ...] | None = None) -> Rule:
    return Rule(Outcome.MISSING, keys, note) if off is None else Rule(Outcome.MISSING, keys, note, off=off)


@dataclass(frozen=True)
class Trainer:
    """One trainer: its name, how to recognise its commands, and the rule of each key."""

    name: str
    rules: Mapping[str, Rule]
    commands: tuple[str, ...] = ()
    """Words of a command line that start it: module or script."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The trainer's defaults where megappo's may differ; they hold for keys that the source does not write."""
    ignored: tuple[str, ...] = ()
    """Endings of keys that hold no setting, such as `_target_`."""
    sections: tuple[str, ...] = ()
    """Keys whose value is a whole mapping and that one rule covers."""
    steps_of_ppo: bool = False
    """True if warm-up and schedule of the learning rate count PPO steps instead of optimizer steps."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Today's name of a key -> the older name under which the arithmetic asks for it."""
    kind: str = ""
    """Kind of supervised run that its settings become (`kind: dpo`); empty: PPO."""
    classes: tuple[str, ...] = ()
    """Names of the Python classes whose arguments they are."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """Our key -> name of the arithmetic that chooses a value, with its reason, where the source has none."""


SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32"}
CHECKPOINTING = {True: "full", False: "none"}
EAGER = {value: {"enforce_eager": value} for value in (True, False)}
ENGINES = {"vllm": "vllm"}
NO_FP16 = "megappo trains in bf16 or fp32, which need no loss scaling"
OWN_SAMPLING = "the set of data.eval is greedy, one answer a prompt; a set in evaluations has its own n, temperature and top_p"
ONE_SCHEDULE = "schedules are constant, linear and cosine"
FP32_MAIN = "main weights are fp32"
OLD_FSDP = "of FSDP's first version"
ALWAYS_PACKED = "batches are always packed, without padding"
RAY = "there is no Ray and no driver"
# Choices for sources that shard by FSDP: layouts cut as vLLM is.
AS_VLLM = {
    "policy.parallel.tp": "tp_of_rollout",
    "policy.parallel.sequence_parallel": "sequence_parallel_of_tp",
    "critic.parallel.tp": "tp_of_rollout",
    "critic.parallel.sequence_parallel": "sequence_parallel_of_tp",
    "reward.parts": "rules_of_data",
}
