"""Rules about runs that generate nothing: fine-tuning, reward models, preferences. Their signature is in `settings.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megappo.commands.convert import single_values
from megappo.commands.convert.settings import Settings, Values, implied, missing, number, same
from megappo.commands.convert.single_values import files_of_text, listed
from megappo.config.foreign.rule import Rule

OF_PEFT = {"rank": ("lora_r", 16), "alpha": ("lora_alpha", 32), "dropout": ("lora_dropout", 0.05)}  # TRL's defaults
OF_NEMO = {"dim": 8, "alpha": 32, "dropout": 0.0, "target_modules": [], "exclude_modules": [], "match_all_linear": False}
USUAL_TARGETS = ["q_proj", "v_proj"]  # PEFT's for Llama, Mistral and Qwen, where none are named


# --------------------------------------------------------------------------------------------------------- batches, lengths


def examples_of_step(rule: Rule, value: Any, settings: Settings) -> Values:
    """Multiply what a device takes by accumulation and processes, as transformers' trainer does."""
    each = settings.of_trl("per_device_train_batch_size", settings.of_trl("batch_size", 8))
    alone = settings.of_trl("allow_multi_gpu", True) is False  # FlowMesh's: one process, whatever GPUs there are
    processes = 1 if alone else settings.of_trl("world_size", settings.ours.get("run.num_ranks", 1))
    factors = (each, settings.of_trl("gradient_accumulation_steps", 1), processes)
    return same(rule.keys, int(number(factors[0])) * int(number(factors[1])) * int(number(factors[2])))


def tokens_of_examples(rule: Rule, value: Any, settings: Settings) -> Values:
    if settings.foreign.get("policy.sequence_packing.enabled"):
        raise implied("micro-batches are filled by tokens")
    return same(rule.keys, int(number(value)) * int(settings.ours.get("data.max_tokens", 1024)))


def tokens_of_pairs(rule: Rule, value: Any, settings: Settings) -> Values:
    return tokens_of_examples(rule, 2 * number(value), settings)


# ------------------------------------------------------------------------------------------------------------------ losses


def trl_loss(rule: Rule, value: Any, settings: Settings) -> Values:
    """Translate TRL's loss, or a sum of one and the chosen responses' negative log-likelihood (`sft`)."""
    names, weights = listed(value), settings.foreign.get("loss_weights")
    weights = [1.0] * len(names) if weights is None else listed(weights)
    kinds = {"sigmoid": {}, "ipo": {"loss.type": "ipo"}, "sigmoid_norm": {"loss.logprob": "mean"}}
    first, *others = map(str, names or [None])
    if first not in kinds or others not in ([], ["sft"]) or len(weights) != len(names):
        raise missing("there are sigmoid, sigmoid_norm and ipo, alone or with sft behind; kto, simpo and orpo are loss.type")
    if number(weights[0]) != 1:
        raise missing("the first weight is 1: scale the learning rate")
    found = {**kinds[first], **({"loss.nll_coef": weights[1]} if others else {})}
    if not found:
        raise implied("DPO")
    return found


def openrlhf_ipo(rule: Rule, value: Any, settings: Settings) -> Values:
    """Choose IPO, of sums of log-probs as OpenRLHF has it."""
    return {"loss.type": "ipo", "loss.logprob": "sum"}


def nemo_nll(rule: Rule, value: Any, settings: Settings) -> Values:
    """Take NeMo-RL's weight of the chosen responses' loss, if that is a mean per token."""
    if number(value) == 0:
        raise implied("off")
    if not settings.foreign.get("dpo.sft_average_log_probs", settings.foreign.get("dpo.preference_average_log_probs", False)):
        raise missing("a sum over a response there, a mean per token here: divide it by the usual length")
    return same(rule.keys, value)


# ---------------------------------------------------------------------------------------------------------- models, schedules


def peft(rule: Rule, value: Any, settings: Settings) -> Values:
    """Take TRL's switch of adapters, with their sizes."""
    if settings.of_trl("use_rslora", False):
        raise missing("rsLoRA: set the rank, and alpha = lora_alpha * sqrt(rank), by hand")
    section = rule.keys[0].rpartition(".")[0]
    targets = settings.of_trl("lora_target_modules", USUAL_TARGETS)
    targets = "all-linear" if targets in ("all-linear", ["all-linear"]) else listed(targets)
    found = {f"{section}.{ours}": settings.of_trl(name, default) for ours, (name, default) in OF_PEFT.items()}
    return found | {f"{section}.targets": targets}


def adapters(backend: str, section: str) -> Callable[[Rule, Any, Settings], Values]:
    """Make the rule of NeMo-RL's switch of adapters in one of its two backends."""

    def rule_of(rule: Rule, value: Any, settings: Settings) -> Values:
        (single_values.if_dtensor if backend == "dtensor_cfg" else single_values.if_megatron)(rule, value, settings)
        role = "value" if rule.keys[0].startswith("critic.") else "policy"
        of = {name: settings.foreign.get(f"{role}.{backend}.{section}.{name}", default) for name, default in OF_NEMO.items()}
        if (of["target_modules"] and not of["match_all_linear"]) or of["exclude_modules"]:
            raise missing("all linear layers have adapters, or set policy.lora by hand")
        return dict(zip(rule.keys, (of["dim"], of["alpha"], of["dropout"], "all-linear")))

    return rule_of


def torch_schedule(rule: Rule, value: Any, settings: Settings) -> Values:
    """Translate NeMo-RL's list of torch's schedules: LinearLR up to lr, and a constant or a cosine behind it."""
    single_values.if_dtensor(Rule(rule.outcome, rule.keys), value, settings)
    kinds, warmup, milestones = {}, 0, None
    for one in listed(value):
        if not isinstance(one, dict) or not isinstance(one.get("kwargs", {}), dict):
            raise missing("neither a schedule nor the milestones of several")
        milestones = one.get("milestones", milestones)
        kinds |= {str(one.get("name", "")).removeprefix("torch.optim.lr_scheduler."): one.get("kwargs", {})}
    kinds.pop("", None)
    if "LinearLR" in kinds and kinds["LinearLR"].get("end_factor", 1) == 1:
        warmup = int(number(kinds.pop("LinearLR").get("total_iters", 5)))
        if milestones not in (None, [warmup]):
            raise missing("the warm-up ends before, or behind, the first milestone")
    (ours,) = {key.rpartition(".lr_schedule.")[0] for key in rule.keys if ".lr_schedule." in key}
    found: Values = {f"{ours}.warmup_steps": warmup}
    if kinds.keys() <= {"ConstantLR"}:
        return found
    if kinds.keys() == {"CosineAnnealingLR"}:
        least = number(kinds["CosineAnnealingLR"].get("eta_min", 0)) / settings.ours.get(f"{ours}.lr", 1e-6)
        return found | {f"{ours}.lr_schedule.type": "cosine", f"{ours}.lr_schedule.min_ratio": round(least, 12)}
    raise missing("a linear warm-up, and a constant or a cosine behind it")


# -------------------------------------------------------------------------------------------------------------------- data


def trl_data(rule: Rule, value: Any, settings: Settings) -> Values:
    """Name TRL's data set with its configuration and split."""
    return same(rule.keys, _named(value, settings, "train"))


def trl_evaluation(rule: Rule, value: Any, settings: Settings) -> Values:
    """Take TRL's test split as held-out data where it evaluates at all."""
    if value in ("no", False):  # False: as YAML 1.1 reads a bare `no`
        raise implied("no held-out data")
    if value != "steps":
        raise missing("held-out data is passed every trainer.eval_every steps")
    name = settings.of_trl("dataset_name", None)
    if name is None:
        raise missing("name the data")
    return {"data.eval": _named(name, settings, "test")}


def _named(name: Any, settings: Settings, split: str) -> str:
    subset, split = settings.of_trl("dataset_config", ""), settings.of_trl(f"dataset_{split}_split", split)
    if not all(isinstance(one, str) for one in (name, subset, split)) or name.endswith((".jsonl", ".parquet")):
        raise missing("the name of a data set")
    return name if (subset, split) == ("", "train") else f"{name}:{subset}:{split}"


def flowmesh_data(rule: Rule, value: Any, settings: Settings) -> Values:
    """Name FlowMesh's data set with its configuration and split, of which it may take a part."""
    subset, split = (settings.foreign.get(f"spec.data.{name}") or "" for name in ("config_name", "split"))
    if "[" in str(split):
        raise missing(f"{split} is a part of a split: write its records into a file")
    return same(rule.keys, value if not subset and split in ("", "train") else f"{value}:{subset}:{split or 'train'}")


def openrlhf_data(rule: Rule, value: Any, settings: Settings) -> Values:
    """Take OpenRLHF's data sets, unless probabilities mix them."""
    if (
        isinstance(value, str)
        and "," in value
        and settings.foreign.get("dataset_probs", settings.foreign.get("data.dataset_probs"))
    ):
        raise missing("sets follow each other, without probabilities")
    return files_of_text(rule, value, settings)
