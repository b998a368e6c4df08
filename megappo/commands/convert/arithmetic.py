"""Functions of the rules that name an arithmetic (`Rule.by`, `Trainer.chosen`), and the tables that find them by name.
`settings.py` defines their signature. Those about engines and about one value are in `single_values.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from types import FunctionType
from typing import Any

from megappo.commands.convert import learning, single_values, supervised
from megappo.commands.convert.settings import Settings, Values, implied, missing, number, same, translated, unneeded
from megappo.commands.convert.single_values import above_zero, listed
from megappo.config.foreign.rule import Outcome, Rule
from megappo.config.role_sections import OptimizerConfig

# ---------------------------------------------------------------------------------------------------------------- batches


def samples(rule: Rule, value: Any, settings: Settings) -> Values:
    return same(rule.keys, int(number(value)) * int(settings.ours.get("rollout.samples_per_prompt", 1)))


def unless_shared(rule: Rule, value: Any, settings: Settings) -> Values:
    """Set a key of the critic's own schedule, unless the key of `algorithm`, which holds for both models, has the same value."""
    (key,) = rule.keys
    found = samples(rule, value, settings)[key] if key == "critic.mini_batch_size" else translated(rule, value)
    shared = key.replace("critic.", "algorithm.")
    if found == settings.ours.get(shared):
        raise unneeded(f"{shared} says it")
    return same(rule.keys, found)


def tokens_of_sequences(rule: Rule, value: Any, settings: Settings) -> Values:
    if any(settings.foreign.get(key) for key in settings.written if key.endswith("use_dynamic_bsz") or key == "use_dynamic_batch"):
        raise implied("micro-batches are filled by tokens")
    return same(rule.keys, int(number(value)) * settings.sequence_tokens())


def sequences_of_total_length(rule: Rule, value: Any, settings: Settings) -> Values:
    prefix = "value" if rule.keys[0].startswith("critic") else "policy"
    return same(rule.keys, int(number(value)) * int(number(settings.foreign.get(f"{prefix}.max_total_sequence_length"))))


def token_budget(rule: Rule, value: Any, settings: Settings) -> Values:
    role = "critic" if rule.keys[0].startswith("critic") else "actor_rollout_ref.actor"
    if not settings.foreign.get(f"{role}.use_dynamic_bsz", settings.foreign.get("actor_rollout_ref.actor.use_dynamic_bsz")):
        raise unneeded("use_dynamic_bsz is off, so the number of sequences counts")
    return same(rule.keys, int(number(value)) * int(settings.ours.get(f"{rule.keys[0].split('.')[0]}.parallel.cp", 1)))


def warmup_steps(rule: Rule, value: Any, settings: Settings) -> Values:
    if number(value) < 0:
        raise implied("negative: the ratio counts")
    if 0 < number(value) < 1:  # transformers 5 has the ratio here
        return warmup_ratio(rule, value, settings)
    return same(rule.keys, int(value) * (settings.updates(rule.keys[0].split(".")[0]) if settings.steps_of_ppo else 1))


def warmup_ratio(rule: Rule, value: Any, settings: Settings) -> Values:
    if number(value) == 0:
        return same(rule.keys, 0)
    steps = settings.ours.get("trainer.steps")
    if steps is None:
        raise missing(f"the number of steps depends on the data: set {rule.keys[0]}")
    return same(rule.keys, int(value * steps * settings.updates(rule.keys[0].split(".")[0])))


def min_lr_ratio(rule: Rule, value: Any, settings: Settings) -> Values:
    lr = settings.ours.get(rule.keys[0].replace("lr_schedule.min_ratio", "lr"), 1e-6)
    return same(rule.keys, round(number(value) / lr, 12))


def _beta(place: int) -> Callable[[Rule, Any, Settings], Values]:
    """Make the rule of one of AdamW's two decays, which keeps the other (`JOINED`)."""

    def beta(rule: Rule, value: Any, settings: Settings) -> Values:
        single_values.if_megatron(rule, value, settings)  # NeMo-RL's other backend has a list; trainers without backends pass
        found = {key: list(settings.ours.get(key, OptimizerConfig().betas)) for key in rule.keys}
        for betas in found.values():
            betas[place] = value
        return found

    return beta


# ------------------------------------------------------------------------------------------------------------------ ranks


def _ranks(nodes: str, each: str) -> Callable[[Rule, Any, Settings], Values]:
    def ranks(rule: Rule, value: Any, settings: Settings) -> Values:
        return same(rule.keys, int(number(settings.foreign.get(nodes, 1))) * int(number(settings.foreign.get(each, 8))))

    return ranks


def tp_of_rollout(key: str, settings: Settings) -> tuple[Any, str] | None:
    """Choose tp for a source that shards by FSDP; None if the source names its layout or the role's engine is fsdp2."""
    tp = settings.ours.get("rollout.tp", 1)
    is_fsdp2 = settings.ours.get(f"{key.split('.')[0]}.engine") == "fsdp2"
    if tp == 1 or is_fsdp2 or any(".megatron." in name for name in settings.written):
        return None
    return tp, "instead of FSDP: cut as vLLM is, so that no slice crosses a rank when weights are pushed"


def sequence_parallel_of_tp(key: str, settings: Settings) -> tuple[Any, str] | None:
    tp = settings.ours.get(key.replace("sequence_parallel", "tp"), 1)
    return (True, "with tp: activations outside the matrix products are cut too") if tp > 1 else None


# -------------------------------------------------------------------------------------------------------------- algorithm


def both_clips(rule: Rule, value: Any, settings: Settings) -> Values:
    """Set the bounds from verl's clip_ratio where clip_ratio_low or clip_ratio_high is not written."""
    own = {"algorithm.loss.clip_low": "clip_ratio_low", "algorithm.loss.clip_high": "clip_ratio_high"}
    return {key: value for key in rule.keys if f"actor_rollout_ref.actor.{own[key]}" not in settings.written}


def kl_placement(rule: Rule, value: Any, settings: Settings) -> Values:
    in_reward = settings.foreign.get("algorithm.use_kl_in_reward", False)
    in_loss = settings.foreign.get("actor_rollout_ref.actor.use_kl_loss", False)
    if in_reward and in_loss:
        if rule.keys and value and settings.ours.get("algorithm.kl.placement") == "reward":
            raise missing("KL is in the reward or in the loss, not in both: it is in the reward")
        return {"algorithm.kl.placement": "reward"}
    return {"algorithm.kl.placement": "reward" if in_reward else "loss" if in_loss else "none"}


def kl_in_reward(rule: Rule, value: Any, settings: Settings) -> Values:
    if not settings.foreign.get("algorithm.use_kl_in_reward", False):
        raise implied("no KL in the reward (use_kl_in_reward is off)")
    return same(rule.keys, translated(rule, value))


def kl_in_loss(rule: Rule, value: Any, settings: Settings) -> Values:
    if not settings.foreign.get("actor_rollout_ref.actor.use_kl_loss", False):
        raise implied("no KL in the loss (use_kl_loss is off)")
    if settings.foreign.get("algorithm.use_kl_in_reward", False):
        raise missing("KL is in the reward or in the loss, not in both: it is in the reward")
    return same(rule.keys, translated(rule, value))


def _kl(coefficient: str, default: float, switch: str, on: str, off: str) -> Callable[[Rule, Any, Settings], Values]:
    """Make the rule of a factor of the KL with a switch beside it that says where the KL is: `on` or `off`."""

    def kl(rule: Rule, value: Any, settings: Settings) -> Values:
        coef = settings.foreign.get(coefficient, default)
        if not coef:
            return {"algorithm.kl.placement": "none"}
        return {"algorithm.kl.placement": on if settings.foreign.get(switch) else off, "algorithm.kl.coef": coef}

    return kl


def adaptive_kl(rule: Rule, value: Any, settings: Settings) -> Values:
    return {"algorithm.kl.controller.type": "adaptive", "algorithm.kl.controller.target": number(value)}


def early_stopping(rule: Rule, value: Any, settings: Settings) -> Values:
    limit = next((value for key, value in settings.foreign.items() if key.endswith("target_kl")), None)
    wanted = next((value for key, value in settings.foreign.items() if key.endswith("early_stopping")), False)
    if not wanted:
        raise implied("early_stopping is off")
    return same(rule.keys, 1.0 if limit is None else limit)


# -------------------------------------------------------------------------------------------------------------- TRL's own


def _trl_batch(settings: Settings) -> int:
    if "batch_size" in settings.written or "spec.training.batch_size" in settings.written:
        return max(1, int(number(settings.of_trl("batch_size", 256))))
    processes = int(number(settings.of_trl("world_size", settings.ours.get("run.num_ranks", 1))))
    each = int(number(settings.of_trl("per_device_train_batch_size", 8)))
    return max(1, each * int(number(settings.of_trl("gradient_accumulation_steps", 1))) * processes)


def trl_batch(rule: Rule, value: Any, settings: Settings) -> Values:
    if "batch_size" in settings.written or "spec.training.batch_size" in settings.written:
        raise unneeded("batch_size says it")
    return same(rule.keys, _trl_batch(settings))


def trl_mini_batch(rule: Rule, value: Any, settings: Settings) -> Values:
    if "mini_batch_size" in settings.written or "spec.training.mini_batch_size" in settings.written:
        raise unneeded("mini_batch_size says it")
    return same(rule.keys, max(1, _trl_batch(settings) // max(1, int(number(value)))))


def old_mini_batch(rule: Rule, value: Any, settings: Settings) -> Values:
    return same(rule.keys, int(number(value)) * int(number(settings.of_trl("gradient_accumulation_steps", 1))))


def trl_steps(rule: Rule, value: Any, settings: Settings) -> Values:
    return same(rule.keys, max(1, -(-int(number(value)) // _trl_batch(settings))))


def whole_epochs(rule: Rule, value: Any, settings: Settings) -> Values:
    if number(value) != int(value):
        raise missing("epochs are whole; trainer.steps counts steps")
    return same(rule.keys, int(value))


def trl_tokenizer(rule: Rule, value: Any, settings: Settings) -> Values:
    """TRL's policy and reference start from sft_model_path; this model lends its tokenizer alone, if both are named."""
    model, tokenizer = rule.keys
    if "sft_model_path" not in settings.written:
        return {model: value}
    if value == settings.foreign.get("sft_model_path"):
        raise unneeded("sft_model_path says it")
    return {tokenizer: value}


def total_length(rule: Rule, value: Any, settings: Settings) -> Values:
    """Divide OpenRLHF's bound of prompt and response together: the response's own bound, or half, and the rest for the prompt."""
    prompt, response = rule.keys
    own = settings.foreign.get("generate_max_len")
    tokens = int(number(value)) // 2 if own is None else int(number(own))
    return {prompt: max(1, int(number(value)) - tokens), response: tokens}


def save_steps(rule: Rule, value: Any, settings: Settings) -> Values:
    if settings.of_trl("save_strategy", "steps") != "steps":
        raise unneeded("save_strategy says it")
    if 0 < number(value) < 1:
        raise missing("a share of the run; name the steps")
    return same(rule.keys, max(0, int(value)))


def save_strategy(rule: Rule, value: Any, settings: Settings) -> Values:
    if value == "steps":
        raise unneeded("checkpoint.save_every counts steps")
    if value not in ("no", False, "epoch"):  # False: as YAML 1.1 reads a bare `no`
        raise missing("checkpoints are made after steps or epochs")
    return same(rule.keys, "epoch" if value == "epoch" else "never")


def _taking(*parameters: str) -> dict[str, Callable[..., Any]]:
    """The functions of this module, `learning.py`, `supervised.py` and `single_values.py` with exactly these arguments, by name."""
    named = {**vars(single_values), **vars(learning), **vars(supervised), **globals()}.items()
    return {name: one for name, one in named if isinstance(one, FunctionType) and tuple(signature(one).parameters) == parameters}


def _value(ours: Callable[[Any], Any]) -> Callable[[Rule, Any, Settings], Values]:
    """Make the rule of a value that depends on no other."""
    return lambda rule, value, settings: same(rule.keys, ours(value))


def _named_trackers(value: Any) -> list[str]:
    named = listed(value)
    return ["tensorboard"] if "all" in named else [one for one in ("tensorboard", "wandb", "mlflow") if one in named]


BY: Mapping[str, Callable[[Rule, Any, Settings], Values]] = _taking("rule", "value", "settings") | {
    "nemo_kl": _kl("loss_fn.reference_policy_kl_penalty", 0, "loss_fn.use_kl_in_reward", "reward", "loss"),
    "openrlhf_kl": _kl("init_kl_coef", 0.01, "use_kl_loss", "loss", "reward"),
    "rounds": _value(lambda value: 10),  # the default number
    "margin_field": _value(lambda value: "margin"),
    "or_zero": _value(lambda value: max(0, int(number(value)))),
    "positive": _value(lambda value: above_zero(value, "off")),
    "adapter_rank": _value(lambda value: int(above_zero(value, "off: all weights are trained"))),
    "top_k": _value(lambda value: -1 if value in (None, 0) else value),
    "strings": _value(listed),
    "trackers": _value(_named_trackers),
    "overlong": _value(lambda value: "filter" if value else "error"),
    "frozen_tower": _value(lambda value: ["visual"] if value else []),
    "save_contents": _value(lambda value: isinstance(value, list) and "optimizer" not in value),
    "run_folder": _value(str),
    "beta1": _beta(0),
    "beta2": _beta(1),
    "dtensor_lora": supervised.adapters("dtensor_cfg", "lora_cfg"),
    "megatron_lora": supervised.adapters("megatron_cfg", "peft"),
    **{f"offload_{part}": single_values.offload_of(part) for part in single_values.PARTS},
    "verl_ranks": _ranks("trainer.nnodes", "trainer.n_gpus_per_node"),
    "nemo_ranks": _ranks("cluster.num_nodes", "cluster.gpus_per_node"),
    "torchrun_ranks": _ranks("nnodes", "nproc_per_node"),
    "openrlhf_ranks": _ranks("actor_num_nodes", "actor_num_gpus_per_node"),
}

# Computed after the others and in this order, since they read their results.
LATE = (
    ("unless_shared", "openrlhf_overlong", "reward_scale", "val_sampling", "image_key"),
    ("warmup_steps", "warmup_ratio", "min_lr_ratio", "torch_schedule", "tokens_of_pairs", "tokens_of_examples"),
)

# Rules of which several give one list of ours: a later one returns the list with its own part in it.
JOINED = (
    "beta1",
    "beta2",
    "reward_scale",
    "offload_if_on",
    "offload_if_dtensor",
    *(f"offload_{part}" for part in single_values.PARTS),
)

# Rules of switches, and what it means that one is off.
OFF: Mapping[str, tuple[Outcome, str]] = {
    **dict.fromkeys(("verl_overlong", "nemo_overlong", "openrlhf_overlong", "reward_scale"), (Outcome.UNNEEDED, "off")),
    **dict.fromkeys(("openrlhf_correction", "nemo_correction", "fsdp2_if_on", "margin_field"), (Outcome.UNNEEDED, "off")),
    **dict.fromkeys(("peft", "dtensor_lora", "megatron_lora"), (Outcome.IMPLIED, "off: all weights are trained")),
    "rounds": (Outcome.IMPLIED, "dynamic sampling is off"),
    "openrlhf_ipo": (Outcome.IMPLIED, "off: DPO"),
    "average_decay": (Outcome.IMPLIED, "off: no average is kept"),
    "texts": (Outcome.IMPLIED, "off: PPO's loss alone"),
}

# Values where the source has none, chosen from the others; None leaves megappo's default.
CHOOSE: Mapping[str, Callable[[str, Settings], tuple[Any, str] | None]] = _taking("key", "settings")
