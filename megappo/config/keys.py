"""The keys of a configuration class as a flat table, and the nearest known key to one that does not exist.

Walks the pydantic models so that suggestions, documentation and dumps follow `schema.py` without a second list of the keys.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

# Other trainers' names of our keys (Megatron-LM's arguments first, then verl, NeMo-RL and TRL), dashes as underscores.
OTHER_NAMES: Mapping[str, str] = {
    "tensor_model_parallel_size": "policy.parallel.tp",
    "pipeline_model_parallel_size": "policy.parallel.pp",
    "sequence_parallel": "policy.parallel.sequence_parallel",
    "virtual_pipeline_model_parallel_size": "policy.parallel.vpp",
    "num_virtual_stages_per_pipeline_rank": "policy.parallel.vpp",
    "num_layers_per_virtual_pipeline_stage": "policy.parallel.vpp",
    "context_parallel_size": "policy.parallel.cp",
    "ulysses_sequence_parallel_size": "policy.parallel.cp",
    "expert_model_parallel_size": "policy.parallel.ep",
    "expert_tensor_parallel_size": "policy.parallel.etp",
    "pipeline_model_parallel_layout": "policy.parallel.layers_per_stage",
    "decoder_first_pipeline_num_layers": "policy.parallel.layers_per_stage",
    "decoder_last_pipeline_num_layers": "policy.parallel.layers_per_stage",
    "num_layers_in_first_pipeline_stage": "policy.parallel.layers_per_stage",
    "num_layers_in_last_pipeline_stage": "policy.parallel.layers_per_stage",
    "moe_aux_loss_coeff": "policy.router_aux_coef",
    "router_aux_loss_coef": "policy.router_aux_coef",
    "critic_load": "critic.checkpoint",
    "max_tokens_per_gpu": "policy.micro_batch_tokens",
    "lr": "policy.optimizer.lr",
    "learning_rate": "policy.optimizer.lr",
    "min_lr": "policy.optimizer.min_lr_ratio",
    "lr_decay_style": "policy.optimizer.lr_schedule",
    "lr_scheduler_type": "policy.optimizer.lr_schedule",
    "lr_warmup_iters": "policy.optimizer.warmup_steps",
    "weight_decay": "policy.optimizer.weight_decay",
    "adam_beta1": "policy.optimizer.beta1",
    "adam_beta2": "policy.optimizer.beta2",
    "adam_eps": "policy.optimizer.eps",
    "clip_grad": "policy.optimizer.clip_grad",
    "max_grad_norm": "policy.optimizer.clip_grad",
    "use_distributed_optimizer": "policy.optimizer.distributed",
    "bf16": "policy.dtype",
    "recompute_granularity": "policy.recompute",
    "enable_gradient_checkpointing": "policy.recompute",
    "micro_batch_size": "policy.micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "policy.micro_batch_tokens",
    "global_batch_size": "data.prompts_per_step",
    "train_batch_size": "data.prompts_per_step",
    "ppo_mini_batch_size": "algorithm.mini_batch_size",
    "train_iters": "trainer.steps",
    "total_training_steps": "trainer.steps",
    "total_epochs": "trainer.epochs",
    "num_train_epochs": "trainer.epochs",
    "eval_interval": "trainer.eval_every",
    "test_freq": "trainer.eval_every",
    "save": "run.output_dir",
    "save_interval": "checkpoint.save_every",
    "save_freq": "checkpoint.save_every",
    "load": "policy.model",
    "model_name_or_path": "policy.model",
    "data_path": "data.train",
    "train_files": "data.train",
    "val_files": "data.eval",
    "tokenizer_model": "data.tokenizer",
    "seed": "run.seed",
    "gpu_memory_utilization": "rollout.memory_share",
    "tensor_parallel_size": "rollout.tp",
    "init_kl_coef": "algorithm.kl.coef",
    "kl_coef": "algorithm.kl.coef",
    "cliprange": "algorithm.clip_high",
    "clip_ratio": "algorithm.clip_high",
    "cliprange_value": "algorithm.value_clip",
    "tensorboard_dir": "telemetry.tensorboard",
}


def section_class(field: FieldInfo) -> type[BaseModel] | None:
    """Class of a field that is a section; None if the field is a value."""
    kind = field.annotation  # no section of the schema is optional, so its class stands here bare
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def item_class(field: FieldInfo) -> type[BaseModel] | None:
    """Class of the items of a field that is a list of sections (`reward.parts`); None otherwise."""
    items = get_args(field.annotation)
    return items[0] if items and isinstance(items[0], type) and issubclass(items[0], BaseModel) else None


def value_keys(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted name, field) of every key that holds a value, in the order of the schema."""
    for name, field in cls.model_fields.items():
        section = section_class(field)
        if section is None:
            yield prefix + name, field
        else:
            yield from value_keys(section, f"{prefix}{name}.")


def sections(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted name, class) of every section below `cls`, in the order of the schema."""
    for name, field in cls.model_fields.items():
        section = section_class(field)
        if section is not None:
            yield prefix + name, section
            yield from sections(section, f"{prefix}{name}.")


def written_keys(data: Mapping[str, Any], cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every key that `data` sets, including keys unknown to the schema."""
    for name, value in data.items():
        field = cls.model_fields.get(name)
        section = section_class(field) if field is not None else None
        if section is not None and isinstance(value, Mapping):
            yield from written_keys(value, section, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def value_at(config: BaseModel, dotted: str) -> Any:
    """Value of a dotted key of a configuration."""
    value: Any = config
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def nearest_key(name: str, cls: type[BaseModel]) -> str | None:
    """Known key that `name` most likely means; None if nothing is near.

    In this order: the name another trainer uses; a key whose last part is the same (`policy.tp` -> `policy.parallel.tp`); the
    nearest dotted name; the nearest last part.
    """
    known = [key for key, _ in value_keys(cls)] + [key for key, _ in sections(cls)]
    wanted = name.lstrip("-").replace("-", "_")
    last = wanted.rsplit(".", 1)[-1]

    def likeness(key: str) -> float:
        return difflib.SequenceMatcher(None, wanted, key).ratio()

    other = OTHER_NAMES.get(last)
    same_last = [key for key in known if key.rsplit(".", 1)[-1] == last]
    if other in known and ("." not in wanted or not same_last):  # `other` may be a key of the other command (train, sft)
        return other
    if same_last:
        return max(same_last, key=likeness)
    # difflib's ratio from 0 to 1: a close full name first, then a close last part, then a loose full name.
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.75)
    if near:
        return near[0]
    last_parts = {key.rsplit(".", 1)[-1] for key in known}
    near_last = difflib.get_close_matches(last, last_parts, n=1, cutoff=0.7)
    if near_last:
        return max((key for key in known if key.rsplit(".", 1)[-1] == near_last[0]), key=likeness)
    return next(iter(difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)), None)
