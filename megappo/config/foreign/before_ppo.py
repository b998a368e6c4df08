"""Settings of other trainers' fine-tuning, reward models and preferences: TRL's `DPOConfig` and `RewardConfig`, OpenRLHF's
`train_dpo` and `train_rm`, NeMo-RL's dpo, rm and sft, FlowMesh's dpo. Each table is that trainer's PPO table for the keys that they
share, and the keys of its own."""

from __future__ import annotations

from collections.abc import Mapping

from megappo.config.foreign.nemo_rl import NEMO_RL, SECTIONS_OF_ROLE, role_rules
from megappo.config.foreign.openrlhf import OPENRLHF, own_optimizer
from megappo.config.foreign.rule import (
    ALWAYS_PACKED,
    FP32_MAIN,
    Rule,
    Trainer,
    each,
    implied,
    missing,
    of_learner,
    renamed,
    take,
    taken,
    unneeded,
)
from megappo.config.foreign.trl import ARGUMENTS, FLOWMESH, SECTIONS, TRL

ONE_BOUND = "one bound for the whole sequence"
NEVER_CUT = "longer ones are left out, never cut"
OF_THE_FOLDER = "the tokenizer's folder holds it: name one with it"
NO_SUCH_LOSS = "there are sigmoid, ipo, kto, simpo and orpo"
ONCE = "the reference's log-probs are computed once and kept"


def _without(rules: Mapping[str, Rule], *prefixes: str) -> list[str]:
    return [name for name in rules if not name.startswith(prefixes)]


# --------------------------------------------------------------------------------------------------------------------- TRL

_BATCH = "per device x accumulation x processes (1 where the source names none)"
_OF_TRL = (
    *("exp_name", "run_name", "output_dir", "seed", "data_seed", "lr_scheduler_type", "warmup_steps", "warmup_ratio"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "optim", "world_size", "num_processes"),
    *("nproc_per_node", "nnodes", "num_train_epochs", "bf16", "fp16", "gradient_checkpointing", "gradient_checkpointing_kwargs"),
    *("deepspeed", "fsdp", "dataset_num_proc", "dataloader_num_workers", "logging_steps", "logging_dir", "report_to", "eval_steps"),
    *("save_steps", "save_strategy", "save_total_limit", "save_only_model", "push_to_hub", "trust_remote_code"),
    *("remove_unused_columns", *ARGUMENTS),
)


def _trl(role: str) -> dict[str, Rule]:
    """Arguments of transformers' trainer, of TRL's ModelConfig and ScriptArguments, and those that its trainers share."""
    optimizer, lora = f"{role}.optimizer", f"{role}.lora"
    adapters = {
        name: unneeded("use_peft takes it over", f"{lora}.rank")
        for name in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_task_type", "use_rslora")
    }
    return of_learner(TRL.rules, role, _OF_TRL) | {
        "learning_rate": take(f"{optimizer}.lr"),
        "per_device_train_batch_size": take("trainer.batch_size", by="examples_of_step", note=_BATCH),
        "gradient_accumulation_steps": take("trainer.batch_size", by="examples_of_step", note=_BATCH),
        "max_steps": take("trainer.steps", by="positive"),
        "eval_strategy": take("data.eval", by="trl_evaluation", note="the data set's test split"),
        "per_device_eval_batch_size": unneeded("micro-batches are filled by tokens", f"{role}.micro_batch_tokens"),
        "max_length": take("data.max_tokens", note=NEVER_CUT),
        **each(unneeded(ALWAYS_PACKED, f"{role}.micro_batch_tokens"), "pad_to_multiple_of pad_token"),
        "disable_dropout": implied("models have no dropout", f"{role}.model"),
        "model_init_kwargs": unneeded("each rank reads its own shard", f"{role}.model"),
        "activation_offloading": missing("recompute=offload, under fsdp2", f"{role}.recompute"),
        **taken("router_aux_loss_coef=router_aux_coef model_name_or_path=model", ours=f"{role}."),
        "model_revision": missing("name it in the model: owner/name@revision", f"{role}.model", off=(None, "main")),
        **each(implied(FP32_MAIN, f"{role}.dtype"), "dtype torch_dtype"),
        "attn_implementation": unneeded("kernels are chosen by model.impl", "model.impl"),
        "use_peft": take(*(f"{lora}.{name}" for name in ("rank", "alpha", "dropout", "targets")), by="peft"),
        "load_in_8bit": missing("set it by hand, with use_peft", f"{lora}.base_bits"),
        **each(
            missing("low-rank adapters of linear layers", f"{lora}.rank"),
            "use_dora load_in_4bit lora_modules_to_save lora_target_parameters",
        ),
        **each(
            unneeded("of load_in_4bit alone", f"{lora}.rank"), "bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage"
        ),
        "dataset_name": take("data.train", by="trl_data", note="NAME:SUBSET:SPLIT"),
        **each(unneeded("dataset_name takes it over", "data.train"), "dataset_config dataset_train_split"),
        "dataset_test_split": unneeded("eval_strategy takes it over", "data.eval"),
        "dataset_streaming": unneeded("records are read once, before the ranks start", "data.train"),
        "ignore_bias_buffers": unneeded("no DistributedDataParallel of torch", f"{role}.engine"),
        "datasets": missing("a list of names", "data.train"),
        "config": TRL.rules["config"],
        **adapters,
    }


_TRL_DPO = _trl("policy") | {
    **taken("beta=loss.beta rpo_alpha=loss.nll_coef"),
    "loss_type": take("loss.type", "loss.logprob", "loss.nll_coef", by="trl_loss"),
    "loss_weights": unneeded("loss_type takes them over", "loss.nll_coef"),
    "label_smoothing": take("loss.label_smoothing", note="conservative DPO; TRL 1 has it in its loss robust alone"),
    "ld_alpha": missing(NO_SUCH_LOSS, "loss.type", off=(None, 1, 1.0)),
    "f_divergence_type": implied("reverse KL", "loss.type", expects=("reverse_kl",), otherwise=NO_SUCH_LOSS),
    "f_alpha_divergence_coef": unneeded("see f_divergence_type", "loss.type"),
    "use_weighting": missing(NO_SUCH_LOSS, "loss.type"),
    "discopop_tau": unneeded("of the loss discopop alone", "loss.type"),
    "sync_ref_model": missing("the reference stays as it is", "loss.type"),
    **each(unneeded("see sync_ref_model", "reference.model"), "ref_model_mixup_alpha ref_model_sync_steps"),
    "reference_free": missing("simpo and orpo have no reference", "loss.type"),
    "precompute_ref_log_probs": implied(ONCE, "reference.every_step"),
    "precompute_ref_batch_size": unneeded("micro-batches are filled by tokens", "policy.micro_batch_tokens"),
    "truncation_mode": implied("nothing is cut", "data.overlong"),
    "padding_free": implied(ALWAYS_PACKED, "policy.micro_batch_tokens"),
    **each(missing(ONE_BOUND, "data.max_tokens"), "max_prompt_length max_completion_length"),
    "generate_during_eval": missing("`megappo generate` reads the export", "trainer.eval_every"),
    "is_encoder_decoder": missing("decoders alone", "policy.model"),
}

_TRL_REWARD = _trl("reward_model") | {
    "center_rewards_coefficient": take("loss.centring"),
    "chat_template_path": missing(OF_THE_FOLDER, "data.tokenizer"),
    "eos_token": missing(OF_THE_FOLDER, "data.tokenizer"),
}

_TRL_DEFAULTS = {
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3.0,
    "gradient_checkpointing": True,
    "adam_beta2": 0.999,
    "lr_scheduler_type": "linear",
    "seed": 42,
}
_TRL_SECTIONS = ("model_init_kwargs", "datasets", "gradient_checkpointing_kwargs", "deepspeed", *SECTIONS)

TRL_DPO = Trainer(
    "TRL",
    _TRL_DPO,
    kind="dpo",
    commands=("trl dpo", "dpo.py"),
    classes=("DPOConfig",),
    defaults={**_TRL_DEFAULTS, "learning_rate": 1e-6},
    sections=_TRL_SECTIONS,
)

TRL_REWARD = Trainer(
    "TRL",
    _TRL_REWARD,
    kind="reward_model",
    commands=("trl reward", "reward_modeling.py", "scripts/reward.py"),
    classes=("RewardConfig",),
    defaults={**_TRL_DEFAULTS, "learning_rate": 1e-4},
    sections=_TRL_SECTIONS,
)

# ---------------------------------------------------------------------------------------------------------------- FlowMesh

_SPEC_TRAINING = "spec.training."

FLOWMESH_DPO = Trainer(
    "FlowMesh",
    of_learner(
        FLOWMESH.rules, "policy", _without(FLOWMESH.rules, _SPEC_TRAINING, "spec.reward_model", "spec.generation", "spec.data")
    )
    | {
        "spec.taskType": implied("DPO", expects=("dpo",), otherwise="kinds are dpo and ppo"),
        "spec.data.preferences": missing('a file with one {"prompt": ..., "chosen": ..., "rejected": ...} a line', "data.train"),
        "spec.data.dataset_name": take("data.train", by="flowmesh_data", note="NAME:SUBSET:SPLIT"),
        **each(unneeded("dataset_name takes it over", "data.train"), "spec.data.config_name spec.data.split"),
        "spec.data.revision": missing("the newest one is read", "data.train", off=(None, "main")),
        "spec.data.max_samples": missing("give a shorter file", "data.train"),
        **taken("spec.data.jsonl_path=data.train spec.data.jsonl.path=data.train"),
        "spec.data.jsonl": missing("a file on this machine", "data.train"),
        **{
            f"spec.data.{prefix}{name}_{word}": take(f"data.{name}_key")
            for name in ("prompt", "chosen", "rejected")
            for prefix, word in (("", "column"), ("", "field"), ("jsonl.", "field"))
        },
        **{_SPEC_TRAINING + name: rule for name, rule in _TRL_DPO.items() if name not in ("output_dir", "dataset_name", "config")},
        _SPEC_TRAINING + "batch_size": take("trainer.batch_size", by="examples_of_step", note="pairs: " + _BATCH),
        **{
            _SPEC_TRAINING + name: FLOWMESH.rules[_SPEC_TRAINING + name]
            for name in ("allow_multi_gpu", "padding_side", "save_freq", "save_model")
        },
        _SPEC_TRAINING + "visible_devices": unneeded("run.num_ranks says it", "run.num_ranks"),
    },
    kind="dpo",
    defaults={
        _SPEC_TRAINING + name: value
        for name, value in {
            **_TRL_DEFAULTS,
            "learning_rate": 5e-7,
            "num_train_epochs": 1,
            "batch_size": 4,
            "gradient_accumulation_steps": 1,
        }.items()
        if name != "per_device_train_batch_size"
    },
    sections=(
        *("metadata", "spec.resources", "spec.output", "spec.data.preferences", "spec.data.jsonl"),
        *(_SPEC_TRAINING + name for name in _TRL_SECTIONS if name in _TRL_DPO),
    ),
)

# ---------------------------------------------------------------------------------------------------------------- OpenRLHF

_OPENRLHF_RENAMED = {
    **renamed(
        "model.",
        "model_name_or_path=pretrain gradient_checkpointing_enable=gradient_checkpointing aux_loss_coef beta ipo_enable=ipo",
        "gradient_checkpointing_reentrant=gradient_checkpointing_use_reentrant label_smoothing nll_loss_coef loss_type=loss",
        "compute_fp32_loss_enable=compute_fp32_loss margin_loss_enable=margin_loss",
    ),
    **renamed("ref.", "model_name_or_path=ref_pretrain offload=ref_offload"),
    **renamed("data.", "dataset dataset_probs dataset_split prompt_key chosen_key rejected_key tokenizer_chat_template max_len"),
    **renamed("adam.", "lr=learning_rate betas=adam_betas weight_decay=l2"),
}
# What train_dpo and train_rm share with PPO's command, by the names before the dots.
_OF_OPENRLHF = (
    *("pretrain", "eval_dataset", "eval_split", "input_template", "apply_chat_template", "max_samples", "disable_fast_tokenizer"),
    *("packing_samples", "max_norm", "l2", "adam_betas", "lr_warmup_ratio", "lr_scheduler", "aux_loss_coef", "seed"),
    *("full_determinism", "eval_steps", "save_steps", "logging_steps", "save_path", "ckpt_path", "save_hf_ckpt", "max_ckpt_num"),
    *("max_ckpt_mem", "load_checkpoint", "disable_ds_ckpt", "use_ds_universal_ckpt", "zero_stage", "zpg"),
    *("gradient_checkpointing", "gradient_checkpointing_use_reentrant", "bf16", "adam_offload", "ds_tensor_parallel_size"),
    *("ring_attn_size", "ring_head_stride", "attn_implementation", "flash_attn", "use_liger_kernel", "deepcompile"),
    *("grad_accum_dtype", "overlap_comm", "local_rank", "load_in_4bit", "lora_rank", "lora_alpha", "lora_dropout"),
    *("target_modules", "use_tensorboard", "use_wandb", "wandb_org", "wandb_group", "wandb_project", "wandb_run_name", "use_ms"),
)
_OF_OPENRLHF_TODAY = ("ds.param_dtype", "ds.experts_implementation", "data.dataloader_num_workers", "ckpt.best_metric_key")


def _openrlhf(role: str, own: Mapping[str, Rule]) -> tuple[dict[str, Rule], dict[str, str]]:
    """Rules of one of its commands by the names before the dots and since, and the renamed ones of them."""
    optimizer = f"{role}.optimizer"
    rules = of_learner(OPENRLHF.rules, role, _OF_OPENRLHF) | {
        **taken("learning_rate=lr min_lr_ratio=lr_schedule.min_ratio", ours=f"{optimizer}."),
        "dataset": take("data.train", by="openrlhf_data"),
        "dataset_probs": missing("sets follow each other, without probabilities", "data.train"),
        "dataset_split": implied("data.train names the split: NAME:SUBSET:SPLIT", "data.train", expects=("train",)),
        "tokenizer_chat_template": missing(OF_THE_FOLDER, "data.tokenizer"),
        "max_samples": missing("give a shorter file", "data.train", off=(None, 1000000, 100000000)),
        "max_len": take("data.max_tokens", note=NEVER_CUT),
        **taken("train_batch_size=trainer.batch_size max_epochs=trainer.epochs"),
        "micro_train_batch_size": take(f"{role}.micro_batch_tokens", by="tokens_of_pairs", note="pairs to tokens: 2 x max_len"),
        **{f"{name}_key": take(f"data.{name}_key") for name in ("prompt", "chosen", "rejected")},
        "param_dtype": of_learner(OPENRLHF.rules, role, ["ds.param_dtype"])["ds.param_dtype"],
        **own,
    }
    renamed = {**OPENRLHF.renamed, **_OPENRLHF_RENAMED, "train.micro_batch_size": "micro_train_batch_size"}
    renamed = {new: old for new, old in renamed.items() if old in rules and not new.startswith(("actor.", "critic.", "rollout."))}
    today = own_optimizer("", role) | of_learner(OPENRLHF.rules, role, _OF_OPENRLHF_TODAY)
    return rules | today | {new: rules[old] for new, old in renamed.items()}, renamed


_OPENRLHF_DEFAULTS = {
    "max_len": 512,
    "train_batch_size": 128,
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": 0.03,
    "min_lr_ratio": 0.1,
    "apply_chat_template": False,
    "seed": 42,
    "eval_steps": -1,
    "save_steps": -1,
    "max_ckpt_num": 3,
}


def _openrlhf_trainer(kind: str, role: str, lr: float, own: Mapping[str, Rule]) -> Trainer:
    rules, renamed = _openrlhf(role, own)
    command = {"dpo": "train_dpo", "reward_model": "train_rm"}[kind]
    return Trainer(
        "OpenRLHF",
        rules,
        kind=kind,
        commands=(f"openrlhf.cli.{command}", f"openrlhf/cli/{command}.py"),
        defaults={**_OPENRLHF_DEFAULTS, "learning_rate": lr},
        sections=("muon",),
        renamed=renamed,
    )


OPENRLHF_DPO = _openrlhf_trainer(
    "dpo",
    "policy",
    1e-5,
    {
        "ref_pretrain": take("reference.model"),
        "ref_offload": take("reference.offload", by="offload_parameters"),
        "beta": take("loss.beta"),
        "ipo": take("loss.type", "loss.logprob", by="openrlhf_ipo", note="of sums"),
        "label_smoothing": take("loss.label_smoothing"),
        "nll_loss_coef": take("loss.nll_coef", note="a mean over all tokens, there over the responses' means"),
    },
)
OPENRLHF_RM = _openrlhf_trainer(
    "reward_model",
    "reward_model",
    9e-6,
    {
        "compute_fp32_loss": implied("scores are fp32", "reward_model.dtype"),
        "margin_loss": take("data.margin_key", by="margin_field"),
        "loss": implied("Bradley and Terry's, of which sigmoid and logexp are two spellings", "loss.centring"),
        "value_head_prefix": implied("`score` or `v_head` of the checkpoint, or zeros", "reward_model.value_head"),
    },
)

# ----------------------------------------------------------------------------------------------------------------- NeMo-RL

_OF_NEMO = _without(NEMO_RL.rules, "ppo.", "policy.", "value.", "value_loss_fn.", "loss_fn.", "env", "data.")


def _nemo(name: str, role: str, own: Mapping[str, Rule], micro: str) -> dict[str, Rule]:
    layers = {key: rule for key, rule in role_rules("policy", role).items() if key != "policy.dtensor_cfg.enabled"}
    return (
        of_learner(NEMO_RL.rules, role, _OF_NEMO)
        | layers
        | {
            "policy.dtensor_cfg.enabled": take(f"{role}.engine", by="fsdp2_if_on"),
            **taken("policy.train_global_batch_size=trainer.batch_size data.shuffle"),
            "policy.train_micro_batch_size": take(f"{role}.micro_batch_tokens", by=micro, note="examples to tokens"),
            "policy.max_total_sequence_length": take("data.max_tokens", note=NEVER_CUT),
            "policy.reward_model_cfg": unneeded("see reward_model_cfg.reward_model_type", f"{role}.model"),
            "policy.reward_model_cfg.reward_model_type": implied(
                "Bradley and Terry's", f"{role}.model", expects=("bradley_terry",), otherwise="of pairs, or of ranked lists"
            ),
            "policy.activation_checkpointing_enabled": unneeded("the backend's key counts", f"{role}.recompute"),
            "policy.offload_optimizer_for_logprob": unneeded("nothing is generated", f"{role}.offload"),
            "policy.logprob_batch_size": unneeded("micro-batches are filled by tokens", f"{role}.micro_batch_tokens"),
            "policy.tokenizer.chat_template": missing(OF_THE_FOLDER, "data.tokenizer", off=(None, "default")),
            "policy.tokenizer.chat_template_kwargs": NEMO_RL.rules["policy.tokenizer.chat_template_kwargs"],
            f"{name}.max_num_epochs": take("trainer.epochs"),
            f"{name}.max_num_steps": take("trainer.steps", by="positive", note="there the smaller of it and the epochs"),
            f"{name}.val_period": take("trainer.eval_every"),
            f"{name}.val_batches": missing("held-out data is passed whole", "data.eval"),
            f"{name}.val_global_batch_size": unneeded("micro-batches are filled by tokens", f"{role}.micro_batch_tokens"),
            f"{name}.val_micro_batch_size": unneeded("micro-batches are filled by tokens", f"{role}.micro_batch_tokens"),
            f"{name}.val_at_start": take("trainer.eval_before"),
            f"{name}.val_at_end": implied("the last step validates", "trainer.eval_every"),
            f"{name}.seed": take("run.seed"),
            "data.max_input_seq_length": unneeded("policy.max_total_sequence_length says it", "data.max_tokens"),
            "data.num_workers": unneeded("records are read once, before the ranks start", "data.train"),
            "data.val_data_paths": missing("name them", "evaluations"),
            **{
                f"data.{place}.{key}": rule
                for place, ours in (("train", "data.train"), ("validation", "data.eval"))
                for key, rule in _nemo_data(ours).items()
            },
            "logger.num_val_samples_to_print": unneeded("nothing is generated", "telemetry.trackers"),
            **each(unneeded("records are read by their fields", "data.train"), "data.default.dataset_name data.default.processor"),
            "data.default.prompt_file": NEMO_RL.rules["data.default.prompt_file"],
            "data.default.system_prompt_file": NEMO_RL.rules["data.default.system_prompt_file"],
            **own,
        }
    )


def _nemo_data(ours: str) -> dict[str, Rule]:
    """Keys of one of its data sets."""
    return {
        "dataset_name": missing(
            "a .jsonl or .parquet file, or a name of the hub", ours, off=("PreferenceDataset", "ResponseDataset")
        ),
        "data_path": take(ours),
        "split": implied(f"{ours} names the split: NAME:SUBSET:SPLIT", ours),
        "subset": implied(f"{ours} names the subset: NAME:SUBSET:SPLIT", ours),
    }


def _nemo_fields(fields: Mapping[str, str]) -> dict[str, Rule]:
    """Fields of the records, which its sections train and default name."""
    return {f"data.{place}.{theirs}": take(f"data.{ours}") for theirs, ours in fields.items() for place in ("train", "default")}


_PAIR_FIELDS = {f"{name}_key": f"{name}_key" for name in ("prompt", "chosen", "rejected")}
_NEMO_DPO = {
    "dpo.reference_policy_kl_penalty": take("loss.beta"),
    "dpo.preference_average_log_probs": take("loss.logprob", values={True: "mean", False: "sum"}),
    "dpo.preference_loss": take("loss.type", values={"dpo": "sigmoid", "ipo": "ipo"}, otherwise=NO_SUCH_LOSS),
    "dpo.preference_loss_weight": implied("1", "loss.nll_coef", expects=(1, 1.0), otherwise="scale the learning rate"),
    "dpo.sft_loss_weight": take("loss.nll_coef", by="nemo_nll"),
    "dpo.sft_average_log_probs": unneeded("sft_loss_weight takes it over", "loss.nll_coef"),
    **_nemo_fields(_PAIR_FIELDS),
}
_NEMO_SFT = {
    "sft.only_unmask_final": take("data.turns", values={True: "last", False: "all"}),
    "data.add_bos": implied("as the tokenizer does", "data.tokenizer", expects=(True,), otherwise="as the tokenizer does"),
    "data.add_eos": implied(
        "a response ends with the end-of-sequence token", "data.tokenizer", expects=(True,), otherwise="it is learned"
    ),
    "data.add_generation_prompt": unneeded("a prompt is encoded as a rollout would", "data.chat_template"),
    **_nemo_fields({"input_key": "prompt_key", "output_key": "response_key", "chat_key": "messages_key", "tool_key": "tools_key"}),
}


def _nemo_trainer(kind: str, name: str, role: str, own: Mapping[str, Rule], defaults: Mapping[str, object]) -> Trainer:
    micro = "tokens_of_examples" if kind == "sft" else "tokens_of_pairs"
    return Trainer(
        "NeMo-RL",
        _nemo(name, role, own, micro),
        kind=kind,
        commands=(f"run_{name}.py",),
        defaults=defaults,
        sections=(
            *("policy.tokenizer.chat_template_kwargs", "logger", "cluster", "defaults", "data.val_data_paths"),
            *(f"policy.{key}" for key in SECTIONS_OF_ROLE),
        ),
    )


NEMO_DPO = _nemo_trainer("dpo", "dpo", "policy", _NEMO_DPO, {})
NEMO_RM = _nemo_trainer("reward_model", "rm", "reward_model", _nemo_fields(_PAIR_FIELDS), {})
NEMO_SFT = _nemo_trainer("sft", "sft", "policy", _NEMO_SFT, {})

BEFORE_PPO = (TRL_DPO, TRL_REWARD, FLOWMESH_DPO, OPENRLHF_DPO, OPENRLHF_RM, NEMO_DPO, NEMO_RM, NEMO_SFT)
