"""Rules that read one value of the source and little else: switches, lists, names, files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

from megappo.commands.convert.settings import Otherwise, Settings, Values, implied, missing, number, same, translated, unneeded
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
        raise unneeded(f"{backend} is not enabled")
    return same(rule.keys, translated(rule, value))


def fsdp2_if_on(rule: Rule, value: Any, settings: Settings) -> Values:
    """Choose fsdp2 for NeMo-RL's DTensor backend: transformers' classes under FSDP2."""
    return _of_backend(replace(rule, values={True: "fsdp2"}), value, settings, "dtensor_cfg")


def offload_if_dtensor(rule: Rule, value: Any, settings: Settings) -> Values:
    _of_backend(rule, value, settings, "dtensor_cfg")
    return offload_if_on(rule, value, settings)


def offload_if_on(rule: Rule, value: Any, settings: Settings) -> Values:
    """Offload all of a role for one switch; the parts also have switches of their own in the source."""
    if not value:
        raise unneeded()
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


def spread(rule: Rule, value: Any, settings: Settings) -> Values:
    """Spread a list over the keys."""
    if not isinstance(value, list) or len(rule.keys) != len(value):
        raise missing("not a list of that many numbers")
    return dict(zip(rule.keys, value))


def with_adapters(rule: Rule, value: Any, settings: Settings) -> Values:
    """Take a setting of adapters, which has a meaning only beside a rank for the same role."""
    critics = rule.keys[0].startswith("critic.")
    ranks = [
        key for key in settings.foreign if key.endswith("lora_rank") and ("." not in key or key.startswith("critic.") == critics)
    ]
    if not any(number(settings.foreign[key] or 0) > 0 for key in ranks):
        raise implied("off: all weights are trained")
    return same(rule.keys, value)


def above_zero(value: Any, otherwise: str) -> Any:
    """Return a number above zero. Raises Otherwise, with this reason, for a setting that is off."""
    if number(value) <= 0:
        raise implied(otherwise)
    return value


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def average_decay(rule: Rule, value: Any, settings: Settings) -> Values:
    """Take the decay of a moving average that is switched on; the default is OpenRLHF's."""
    return same(rule.keys, number(settings.foreign.get("ema_beta", 0.992)))


def texts(rule: Rule, value: Any, settings: Settings) -> Values:
    """Take a second data set and the factor of its loss; OpenRLHF's default factor acts only with the data."""
    data, coef = rule.keys
    return {data: value, coef: number(settings.foreign.get("ptx_coef", 0.05))}


TRACKER_FLAGS = {
    "use_tensorboard": "tensorboard",
    "use_wandb": "wandb",
    "logger.tensorboard_enabled": "tensorboard",
    "logger.wandb_enabled": "wandb",
    "logger.mlflow_enabled": "mlflow",
}


def tracker_flags(rule: Rule, value: Any, settings: Settings) -> Values:
    """Combine the trackers of all flags."""
    # An account's key that is known only when the script runs counts as set.
    on = [key for key in TRACKER_FLAGS if key in settings.written and settings.foreign.get(key, True) not in (None, "", False)]
    return same(rule.keys, [TRACKER_FLAGS[key] for key in on])


def files(rule: Rule, value: Any, settings: Settings) -> Values:
    return same(rule.keys, value[0] if isinstance(value, list) and len(value) == 1 else value)


def files_of_text(rule: Rule, value: Any, settings: Settings) -> Values:
    """Take files with commas between them, which follow each other where no probabilities are given."""
    return files(rule, [one.strip() for one in value.split(",")] if isinstance(value, str) else value, settings)


def template_args(rule: Rule, value: Any, settings: Settings) -> Values:
    """Take the variables of the chat template, each a key of its own or all a mapping."""
    prefix = next(key for key in TEMPLATE_ARGS if any(one == key or one.startswith(f"{key}.") for one in settings.written))
    whole = settings.foreign.get(prefix)
    own = {key.removeprefix(f"{prefix}."): one for key, one in settings.foreign.items() if key.startswith(f"{prefix}.")}
    if whole is not None and not isinstance(whole, dict):
        raise missing("a mapping of variables")
    found = (whole or {}) | own
    if not found:
        raise implied("no variables")
    return same(rule.keys, found)


TEMPLATE_ARGS = ("data.apply_chat_template_kwargs", "policy.tokenizer.chat_template_kwargs")


def image_key(rule: Rule, value: Any, settings: Settings) -> Values:
    """Take the field of images if the model's name says that it reads images, or if the field is not the trainer's own default:
    trainers name it for models of text too."""
    if value in ("images", "image") and not _VISION.search(str(settings.ours.get("policy.model", ""))):
        raise unneeded(f"nothing says that the model reads images; {rule.keys[0]}={value} for one that does")
    return same(rule.keys, value)


_VISION = re.compile(r"(?<![A-Za-z])VL(?![A-Za-z])", re.IGNORECASE)


def truncation(rule: Rule, value: Any, settings: Settings) -> Values:
    filtered = settings.foreign.get("data.filter_overlong_prompts", False)
    if value == "error":
        return same(rule.keys, "filter" if filtered else "error")
    if filtered:
        raise implied("longer prompts are left out, so none is cut")
    raise missing("prompts are never truncated")


def verl_recompute(rule: Rule, value: Any, settings: Settings) -> Values:
    """Take verl's key of FSDP. In its Megatron engine recompute_granularity alone counts, which is null by default."""
    role = "critic" if rule.keys[0].startswith("critic.") else "actor_rollout_ref.actor"
    named = settings.foreign.get(f"{role}.strategy", "megatron" if "megatron" in str(settings.foreign.get("--config-name")) else "")
    if named == "megatron" or any(key.startswith(f"{role}.megatron.") for key in settings.written):
        raise implied("recompute_granularity alone counts with Megatron")
    return same(rule.keys, translated(rule, value))


def run_name(rule: Rule, value: Any, settings: Settings) -> Values:
    return same(rule.keys, re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-.")[:64] or "run")


def wandb_project(rule: Rule, value: Any, settings: Settings) -> Values:
    """Say how W&B learns its project, which is no key of ours."""
    if value:
        settings.lines.append(f"export WANDB_PROJECT={shlex.quote(str(value))}")
    raise unneeded("W&B reads WANDB_PROJECT")


def project(rule: Rule, value: Any, settings: Settings) -> Values:
    if any("wandb" in str(settings.foreign.get(key, "")) for key in ("trainer.logger", "log_with")):
        settings.lines.append(f"export WANDB_PROJECT={shlex.quote(str(value))}")
    if any(key in settings.written for key in ("trainer.default_local_dir", "output_dir")):
        raise unneeded("the folder of the runs is named")
    return same(rule.keys, "runs/" + run_name(rule, value, settings)[rule.keys[0]])


def env_rules(rule: Rule, value: Any, settings: Settings) -> Values:
    if value != "math":
        raise missing("rules are named in reward.parts")
    return same(rule.keys, [{"name": "math_verify"}])


def verl_answer_key(key: str, settings: Settings) -> tuple[Any, str] | None:
    return "reward_model.ground_truth", "verl's files hold the answer there"


def reward_model(rule: Rule, value: Any, settings: Settings) -> Values:
    """Set the section of the reward model, and the part that is its score."""
    if not isinstance(value, str) or "," in value:
        raise Otherwise(Outcome.MISSING, "one reward model; the others may be parts of the user's own")
    if settings.foreign.get("reward_model.enable") is False:  # verl's
        raise unneeded("reward_model.enable is false")
    return {"reward_model.model": value, "reward.parts": [{"model": "reward_model"}]}


def reward_model_and_critic(rule: Rule, value: Any, settings: Settings) -> Values:
    """Set the reward model, and the critic that starts from its weights and its head, as TRL's does."""
    found = reward_model(rule, value, settings)
    if "critic_pretrain" in settings.written:  # OpenRLHF's critic has a model of its own
        return found
    return found | {"critic.model": value, "critic.value_head": "checkpoint"}


def rules_of_data(key: str, settings: Settings) -> tuple[Any, str] | None:
    """Choose a reward rule by the name of the data."""
    if "reward.parts" in settings.ours:
        return None
    name = str(settings.ours.get("data.train", "")).lower()
    if "gsm8k" in name:
        return [{"name": "gsm8k_strict"}], 'the number after "####", by the name of the data'
    if "math" in name:
        return [{"name": "math_verify"}], "by the name of the data"
    return [{"name": "exact_match"}], "CHOOSE: nothing in the source tells the reward; `megappo doctor` lists the rules"
