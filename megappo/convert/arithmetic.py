"""Arithmetic of the rules that name one (`Rule.by`, `Trainer.chosen`): values that depend on other keys.

Each function takes the foreign value and the settings, and returns our values by key; or raises Otherwise, where the value has no
equivalent or nothing is left to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megappo.config.foreign.rule import Outcome, Rule
from megappo.config.yaml_reader import LARGEST_NUMBER

Values = dict[str, Any]


class Otherwise(Exception):
    """Another outcome than the rule's, and the reason."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


@dataclass
class Settings:
    """Both sides as far as they are known: foreign keys with the trainer's defaults, and our keys."""

    foreign: Mapping[str, Any]
    written: frozenset[str]
    """Foreign keys that the source writes."""
    steps_of_ppo: bool
    ours: Values = field(default_factory=dict)

    def samples(self) -> int:
        """Responses of a step."""
        return int(self.ours.get("data.prompts_per_step", 256)) * int(self.ours.get("rollout.samples_per_prompt", 1))

    def sequence_tokens(self) -> int:
        """Longest prompt and response, in tokens."""
        return int(self.ours.get("data.max_prompt_tokens", 512)) + int(self.ours.get("rollout.max_response_tokens", 512))

    def updates(self) -> int:
        """Optimizer steps of a PPO step."""
        mini_batch = int(self.ours.get("algorithm.mini_batch_size", 256))
        return max(1, self.samples() // mini_batch) * int(self.ours.get("algorithm.ppo_epochs", 1))


def _same(keys: tuple[str, ...], value: Any) -> Values:
    return dict.fromkeys(keys, value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST_NUMBER:
        raise Otherwise(Outcome.MISSING, "not a number that can be counted with")
    return value


def translated(rule: Rule, value: Any) -> Any:
    """Our value by the rule's table; the value itself if it has none."""
    if rule.values is None:
        return value
    if isinstance(value, list | dict) or value not in rule.values:
        raise _missing(rule.otherwise or f"one of {', '.join(str(key) for key in rule.values)}")
    return rule.values[value]


def _missing(reason: str) -> Otherwise:
    return Otherwise(Outcome.MISSING, reason)


def _implied(reason: str) -> Otherwise:
    return Otherwise(Outcome.IMPLIED, reason)


# ---------------------------------------------------------------------------------------------------------------- batches


def spread(rule: Rule, value: Any, settings: Settings) -> Values:
    """A list over the keys; a shorter one repeats (betas of policy and critic)."""
    if not isinstance(value, list) or not value or len(rule.keys) % len(value):
        raise _missing("not a list of that many numbers")
    return {key: value[place % len(value)] for place, key in enumerate(rule.keys)}


def samples(rule: Rule, value: Any, settings: Settings) -> Values:
    return _same(rule.keys, int(_number(value)) * int(settings.ours.get("rollout.samples_per_prompt", 1)))


def tokens_of_sequences(rule: Rule, value: Any, settings: Settings) -> Values:
    if any(settings.foreign.get(key) for key in settings.written if key.endswith("use_dynamic_bsz") or key == "use_dynamic_batch"):
        raise _implied("micro-batches are filled by tokens")
    return _same(rule.keys, int(_number(value)) * settings.sequence_tokens())


def sequences_of_total_length(rule: Rule, value: Any, settings: Settings) -> Values:
    prefix = "value" if rule.keys[0].startswith("critic") else "policy"
    return _same(rule.keys, int(_number(value)) * int(_number(settings.foreign.get(f"{prefix}.max_total_sequence_length"))))


def token_budget(rule: Rule, value: Any, settings: Settings) -> Values:
    role = "critic" if rule.keys[0].startswith("critic") else "actor_rollout_ref.actor"
    if not settings.foreign.get(f"{role}.use_dynamic_bsz", settings.foreign.get("actor_rollout_ref.actor.use_dynamic_bsz")):
        raise Otherwise(Outcome.UNNEEDED, "use_dynamic_bsz is off, so the number of sequences counts")
    return _same(rule.keys, int(_number(value)) * int(settings.ours.get(f"{rule.keys[0].split('.')[0]}.parallel.cp", 1)))


def warmup_steps(rule: Rule, value: Any, settings: Settings) -> Values:
    if _number(value) < 0:
        raise _implied("negative: the ratio counts")
    return _same(rule.keys, int(value) * (settings.updates() if settings.steps_of_ppo else 1))


def warmup_ratio(rule: Rule, value: Any, settings: Settings) -> Values:
    if _number(value) == 0:
        return _same(rule.keys, 0)
    steps = settings.ours.get("trainer.steps")
    if steps is None:
        raise _missing(f"the number of steps depends on the data: set {rule.keys[0]}")
    return _same(rule.keys, int(value * steps * settings.updates()))


def min_lr_ratio(rule: Rule, value: Any, settings: Settings) -> Values:
    lr = settings.ours.get(rule.keys[0].replace("min_lr_ratio", "lr"), 1e-6)
    return _same(rule.keys, round(_number(value) / lr, 12))


# ------------------------------------------------------------------------------------------------------------------ ranks


def _ranks(nodes: str, each: str) -> Callable[[Rule, Any, Settings], Values]:
    def ranks(rule: Rule, value: Any, settings: Settings) -> Values:
        return _same(rule.keys, int(_number(settings.foreign.get(nodes, 1))) * int(_number(settings.foreign.get(each, 8))))

    return ranks


def tp_of_rollout(key: str, settings: Settings) -> tuple[Any, str] | None:
    tp = settings.ours.get("rollout.tp", 1)
    if tp == 1 or any(".megatron." in name for name in settings.written):
        return None
    return tp, "no FSDP here: cut as vLLM is, so that no slice crosses a rank when weights are pushed"


def sequence_parallel_of_tp(key: str, settings: Settings) -> tuple[Any, str] | None:
    tp = settings.ours.get(key.replace("sequence_parallel", "tp"), 1)
    return (True, "with tp: activations outside the matrix products are cut too") if tp > 1 else None


def if_megatron(rule: Rule, value: Any, settings: Settings) -> Values:
    return _of_backend(rule, value, settings, "megatron_cfg")


def if_dtensor(rule: Rule, value: Any, settings: Settings) -> Values:
    return _of_backend(rule, value, settings, "dtensor_cfg")


def betas_if_dtensor(rule: Rule, value: Any, settings: Settings) -> Values:
    _of_backend(rule, value, settings, "dtensor_cfg")
    return spread(rule, value, settings)


def _of_backend(rule: Rule, value: Any, settings: Settings, backend: str) -> Values:
    """NeMo-RL writes both backends and enables one."""
    role = "value" if rule.keys[0].startswith("critic") else "policy"
    other = {"megatron_cfg": "dtensor_cfg", "dtensor_cfg": "megatron_cfg"}[backend]
    enabled = settings.foreign.get(f"{role}.{backend}.enabled", not settings.foreign.get(f"{role}.{other}.enabled", False))
    if not enabled:
        raise Otherwise(Outcome.UNNEEDED, f"{backend} is not enabled")
    return _same(rule.keys, translated(rule, value))


# -------------------------------------------------------------------------------------------------------------- algorithm


def both_clips(rule: Rule, value: Any, settings: Settings) -> Values:
    """verl's clip_ratio holds where clip_ratio_low and clip_ratio_high are not written."""
    own = {"algorithm.clip_low": "clip_ratio_low", "algorithm.clip_high": "clip_ratio_high"}
    return {key: value for key in rule.keys if f"actor_rollout_ref.actor.{own[key]}" not in settings.written}


def kl_placement(rule: Rule, value: Any, settings: Settings) -> Values:
    in_reward = settings.foreign.get("algorithm.use_kl_in_reward", False)
    in_loss = settings.foreign.get("actor_rollout_ref.actor.use_kl_loss", False)
    if in_reward and in_loss:
        if rule.keys and value and settings.ours.get("algorithm.kl.placement") == "reward":
            raise _missing("KL is in the reward or in the loss, not in both: it is in the reward")
        return {"algorithm.kl.placement": "reward"}
    return {"algorithm.kl.placement": "reward" if in_reward else "loss" if in_loss else "none"}


def kl_in_reward(rule: Rule, value: Any, settings: Settings) -> Values:
    if not settings.foreign.get("algorithm.use_kl_in_reward", False):
        raise _implied("no KL in the reward (use_kl_in_reward is off)")
    return _same(rule.keys, translated(rule, value))


def kl_in_loss(rule: Rule, value: Any, settings: Settings) -> Values:
    if not settings.foreign.get("actor_rollout_ref.actor.use_kl_loss", False):
        raise _implied("no KL in the loss (use_kl_loss is off)")
    if settings.foreign.get("algorithm.use_kl_in_reward", False):
        raise _missing("KL is in the reward or in the loss, not in both: it is in the reward")
    return _same(rule.keys, translated(rule, value))


def nemo_kl(rule: Rule, value: Any, settings: Settings) -> Values:
    coef = settings.foreign.get("loss_fn.reference_policy_kl_penalty", 0)
    if not coef:
        return {"algorithm.kl.placement": "none"}
    in_reward = settings.foreign.get("loss_fn.use_kl_in_reward", False)
    return {"algorithm.kl.placement": "reward" if in_reward else "loss", "algorithm.kl.coef": coef}


def openrlhf_kl(rule: Rule, value: Any, settings: Settings) -> Values:
    coef = settings.foreign.get("init_kl_coef", 0.01)
    if not coef:
        return {"algorithm.kl.placement": "none"}
    return {"algorithm.kl.placement": "loss" if settings.foreign.get("use_kl_loss") else "reward", "algorithm.kl.coef": coef}


def adaptive_kl(rule: Rule, value: Any, settings: Settings) -> Values:
    return {"algorithm.kl.controller": "adaptive", "algorithm.kl.target": _number(value)}


def early_stopping(rule: Rule, value: Any, settings: Settings) -> Values:
    limit = next((value for key, value in settings.foreign.items() if key.endswith("target_kl")), None)
    wanted = next((value for key, value in settings.foreign.items() if key.endswith("early_stopping")), False)
    if not wanted:
        raise _implied("early_stopping is off")
    return _same(rule.keys, 1.0 if limit is None else limit)


# -------------------------------------------------------------------------------------------------------------- TRL's own


def _trl(settings: Settings, name: str, default: Any) -> Any:
    """Value of TRL's key, alone or in a workflow of FlowMesh."""
    value = settings.foreign.get(name, settings.foreign.get(f"spec.training.{name}", default))
    return default if value is None else value


def _trl_batch(settings: Settings) -> int:
    if "batch_size" in settings.written or "spec.training.batch_size" in settings.written:
        return max(1, int(_number(_trl(settings, "batch_size", 256))))
    processes = int(_number(_trl(settings, "world_size", settings.ours.get("run.num_ranks", 1))))
    each = int(_number(_trl(settings, "per_device_train_batch_size", 8)))
    return max(1, each * int(_number(_trl(settings, "gradient_accumulation_steps", 1))) * processes)


def trl_batch(rule: Rule, value: Any, settings: Settings) -> Values:
    if "batch_size" in settings.written or "spec.training.batch_size" in settings.written:
        raise Otherwise(Outcome.UNNEEDED, "batch_size says it")
    return _same(rule.keys, _trl_batch(settings))


def trl_mini_batch(rule: Rule, value: Any, settings: Settings) -> Values:
    if "mini_batch_size" in settings.written or "spec.training.mini_batch_size" in settings.written:
        raise Otherwise(Outcome.UNNEEDED, "mini_batch_size says it")
    return _same(rule.keys, max(1, _trl_batch(settings) // max(1, int(_number(value)))))


def old_mini_batch(rule: Rule, value: Any, settings: Settings) -> Values:
    return _same(rule.keys, int(_number(value)) * int(_number(_trl(settings, "gradient_accumulation_steps", 1))))


def trl_steps(rule: Rule, value: Any, settings: Settings) -> Values:
    return _same(rule.keys, max(1, -(-int(_number(value)) // _trl_batch(settings))))


def whole_epochs(rule: Rule, value: Any, settings: Settings) -> Values:
    if _number(value) != int(value):
        raise _missing("epochs are whole; trainer.steps counts steps")
    return _same(rule.keys, int(value))


def whole_steps(rule: Rule, value: Any, settings: Settings) -> Values:
    if _number(value) < 1:
        raise _missing("a share of the run; name the steps")
    return _same(rule.keys, int(value))


def save_strategy(rule: Rule, value: Any, settings: Settings) -> Values:
    if value is False:  # as YAML 1.1 reads a bare `no`
        return _same(rule.keys, "no")
    if value not in ("no", "steps", "epoch"):
        raise _missing("checkpoints are made after steps or epochs")
    return _same(rule.keys, value)


# ------------------------------------------------------------------------------------------------------- single values


def or_zero(rule: Rule, value: Any, settings: Settings) -> Values:
    return _same(rule.keys, max(0, int(_number(value))))


def positive(rule: Rule, value: Any, settings: Settings) -> Values:
    if _number(value) <= 0:
        raise _implied("off")
    return _same(rule.keys, value)


def top_k(rule: Rule, value: Any, settings: Settings) -> Values:
    return _same(rule.keys, -1 if value in (None, 0) else value)


def strings(rule: Rule, value: Any, settings: Settings) -> Values:
    return _same(rule.keys, value if isinstance(value, list) else [value])


def trackers(rule: Rule, value: Any, settings: Settings) -> Values:
    named = value if isinstance(value, list) else [value]
    ours = [tracker for tracker in ("tensorboard", "wandb", "mlflow") if tracker in named]
    return _same(rule.keys, ["tensorboard"] if "all" in named else ours)


TRACKER_FLAGS = {
    "use_tensorboard": "tensorboard",
    "use_wandb": "wandb",
    "logger.tensorboard_enabled": "tensorboard",
    "logger.wandb_enabled": "wandb",
    "logger.mlflow_enabled": "mlflow",
}


def tracker_flags(rule: Rule, value: Any, settings: Settings) -> Values:
    """The trackers of all flags together. A key of an account, known only when the script runs, is set."""
    on = [key for key in TRACKER_FLAGS if key in settings.written and settings.foreign.get(key, True) not in (None, "", False)]
    return _same(rule.keys, [TRACKER_FLAGS[key] for key in on])


def one_file(rule: Rule, value: Any, settings: Settings) -> Values:
    files = value if isinstance(value, list) else [value]
    if len(files) != 1:
        raise _missing(f"one file: join the {len(files)}")
    return _same(rule.keys, files[0])


def overlong(rule: Rule, value: Any, settings: Settings) -> Values:
    return _same(rule.keys, "filter" if value else "error")


def truncation(rule: Rule, value: Any, settings: Settings) -> Values:
    filtered = settings.foreign.get("data.filter_overlong_prompts", False)
    if value == "error":
        return _same(rule.keys, "filter" if filtered else "error")
    if filtered:
        raise _implied("longer prompts are left out, so none is cut")
    raise _missing("prompts are never truncated")


def policy_recompute(rule: Rule, value: Any, settings: Settings) -> Values:
    """verl's key is the policy's; under Megatron it stands beside recompute_granularity, which says more."""
    if "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity" in settings.written:
        raise _implied("recompute_granularity says it")
    return _same(rule.keys, translated(rule, value))


def save_contents(rule: Rule, value: Any, settings: Settings) -> Values:
    return _same(rule.keys, isinstance(value, list) and "optimizer" not in value)


def run_name(rule: Rule, value: Any, settings: Settings) -> Values:
    """Letters, digits and . _ - are the characters of a run's name."""
    return _same(rule.keys, re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-.")[:64] or "run")


def project(rule: Rule, value: Any, settings: Settings) -> Values:
    if any(key in settings.written for key in ("trainer.default_local_dir", "output_dir")):
        raise Otherwise(Outcome.UNNEEDED, "the folder of the runs is named")
    return _same(rule.keys, "runs/" + run_name(rule, value, settings)[rule.keys[0]])


def run_folder(rule: Rule, value: Any, settings: Settings) -> Values:
    return _same(rule.keys, str(value))


def env_rules(rule: Rule, value: Any, settings: Settings) -> Values:
    if value != "math":
        raise _missing("rules are named in reward.parts")
    return _same(rule.keys, [{"name": "math_verify"}])


def verl_answer_key(key: str, settings: Settings) -> tuple[Any, str] | None:
    return "reward_model.ground_truth", "verl's files hold the answer there"


def reward_model(rule: Rule, value: Any, settings: Settings) -> Values:
    """The section of a reward model, and the part that is its score."""
    if not isinstance(value, str) or "," in value:
        raise Otherwise(Outcome.MISSING, "one reward model; the others may be parts of the user's own")
    if settings.foreign.get("reward_model.enable") is False:  # verl's
        raise Otherwise(Outcome.UNNEEDED, "reward_model.enable is false")
    return {"reward_model.model": value, "reward.parts": [{"model": "reward_model"}]}


def rules_of_data(key: str, settings: Settings) -> tuple[Any, str] | None:
    """Rule for data that their name tells."""
    if "reward.parts" in settings.ours:
        return None
    name = str(settings.ours.get("data.train", "")).lower()
    if "gsm8k" in name:
        return [{"name": "gsm8k_strict"}], 'the number after "####", by the name of the data'
    if "math" in name:
        return [{"name": "math_verify"}], "by the name of the data"
    return [{"name": "exact_match"}], "CHOOSE: nothing in the source tells the reward; `megappo doctor` lists the rules"


BY: Mapping[str, Callable[[Rule, Any, Settings], Values]] = {
    function.__name__: function
    for function in (
        spread,
        samples,
        tokens_of_sequences,
        sequences_of_total_length,
        token_budget,
        warmup_steps,
        warmup_ratio,
        min_lr_ratio,
        if_megatron,
        reward_model,
        if_dtensor,
        betas_if_dtensor,
        both_clips,
        kl_placement,
        kl_in_reward,
        kl_in_loss,
        nemo_kl,
        openrlhf_kl,
        adaptive_kl,
        early_stopping,
        trl_batch,
        trl_mini_batch,
        old_mini_batch,
        trl_steps,
        whole_epochs,
        whole_steps,
        save_strategy,
        or_zero,
        positive,
        top_k,
        strings,
        trackers,
        tracker_flags,
        one_file,
        overlong,
        truncation,
        policy_recompute,
        save_contents,
        run_name,
        project,
        run_folder,
        env_rules,
    )
} | {
    "verl_ranks": _ranks("trainer.nnodes", "trainer.n_gpus_per_node"),
    "nemo_ranks": _ranks("cluster.num_nodes", "cluster.gpus_per_node"),
    "torchrun_ranks": _ranks("nnodes", "nproc_per_node"),
    "openrlhf_ranks": _ranks("actor_num_nodes", "actor_num_gpus_per_node"),
}

# Computed after the others, whose results they count with.
LATE = ("warmup_steps", "warmup_ratio", "min_lr_ratio")

# Values where the source has none, chosen from the others; None leaves megappo's default.
CHOOSE: Mapping[str, Callable[[str, Settings], tuple[Any, str] | None]] = {
    function.__name__: function for function in (tp_of_rollout, sequence_parallel_of_tp, verl_answer_key, rules_of_data)
}
