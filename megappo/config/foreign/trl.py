"""Arguments of TRL's PPO: `PPOConfig` of `trl.experimental.ppo`, and of trl before 0.12 (`batch_size`, `adap_kl_ctrl`). Keys of a
FlowMesh workflow of type ppo (`apiVersion: flowmesh/v1`), which runs the older one."""

from __future__ import annotations

from megappo.config.foreign.rule import (
    ALWAYS_PACKED,
    CHECKPOINTING,
    KL_ESTIMATORS,
    NO_FP16,
    ONE_SCHEDULE,
    OTHER_FILE,
    SCHEDULES,
    Outcome,
    Rule,
    Trainer,
    each,
    implied,
    missing,
    take,
    taken,
    unneeded,
)

BATCH = "prompts: per device x accumulation x processes (1 where the source names none)"
BOTH = "policy and critic alike: TRL has one optimizer"
HUB = "export/ holds the Hugging Face checkpoint"


def _both(name: str) -> tuple[str, str]:
    return f"policy.optimizer.{name}", f"critic.optimizer.{name}"


OLD: dict[str, Rule] = {
    **taken(
        "model_name=policy.model query_dataset=data.train steps=trainer.steps init_kl_coef=algorithm.kl.coef",
        "target=algorithm.kl.controller.target horizon=algorithm.kl.controller.horizon ppo_epochs=algorithm.ppo_epochs",
        "batch_size=data.prompts_per_step",
    ),
    "reward_model": take("reward_model.model", by="reward_model"),
    "adap_kl_ctrl": take("algorithm.kl.controller.type", values={True: "adaptive", False: "fixed"}),
    "kl_penalty": take("algorithm.kl.estimator", values=KL_ESTIMATORS),
    "mini_batch_size": take("algorithm.mini_batch_size", by="old_mini_batch", note="samples: times gradient_accumulation_steps"),
    "forward_batch_size": unneeded("deprecated by TRL", "policy.micro_batch_tokens"),
    **each(take("algorithm.target_kl", by="early_stopping"), "early_stopping target_kl"),
    "ratio_threshold": missing("the ratio is clipped", "algorithm.loss.dual_clip", off=(None, 10.0)),
    **each(missing("advantages are normalised instead", "algorithm.whiten_advantages"), "use_score_scaling use_score_norm"),
    "score_clip": missing("scores are not clipped", "reward.parts"),
    "compare_steps": unneeded("every step is logged", "telemetry.trackers"),
    **each(unneeded("memory is planned (`megappo plan`)", "rollout.memory_share"), "optimize_cuda_cache optimize_device_cache"),
    "log_with": take("telemetry.trackers", by="trackers", note="metrics.jsonl is always written"),
    "tracker_project_name": take("run.output_dir", by="project", note="the folder of the project's runs"),
    "task_name": unneeded("run.name names the run", "run.name"),
    "tracker_kwargs": unneeded("metrics.jsonl is always written", "telemetry.trackers"),
    "remove_unused_columns": unneeded("records keep all their fields", "data.train"),
}

# transformers' arguments that no trainer of TRL has for itself.
_UNNEEDED: dict[str, tuple[str, ...]] = {
    "there is one epoch's order, and each example in it": ("dataloader_drop_last", "dataloader_in_order", "ignore_data_skip"),
    "records are tokenized once, before the ranks start": (
        *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
        *("dataloader_multiprocessing_context", "length_column_name", "label_names"),
    ),
    "every step is logged": (
        *("logging_strategy", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen"),
        *("log_level", "log_level_replica", "disable_tqdm", "skip_memory_metrics", "debug", "trackio_space_id"),
        *("trackio_bucket_id", "trackio_static_space_id"),
    ),
    "see trainer.eval_every": (
        *("eval_delay", "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"),
        *("include_for_metrics", "batch_eval_metrics", "bf16_full_eval", "fp16_full_eval", "do_train", "do_eval", "do_predict"),
    ),
    "checkpoints are megappo's own": (
        *("save_on_each_node", "enable_jit_checkpoint", "restore_callback_states_from_checkpoint", "save_safetensors"),
        *("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
    ),
    "kernels are chosen by kernels and model.impl": (
        *("tf32", "torch_compile", "torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "liger_kernel_config"),
        *("use_cache", "torch_empty_cache_steps"),
    ),
    "megappo's groups, and its engines": (
        *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend"),
        *("ddp_timeout", "fsdp_config", "accelerator_config", "parallelism_config", "local_rank", "auto_find_batch_size"),
    ),
}
SECTIONS = ("fsdp_config", "accelerator_config", "parallelism_config", "lr_scheduler_kwargs", "liger_kernel_config")
ARGUMENTS: dict[str, Rule] = {
    **{name: unneeded(why, "run.name") for why, names in _UNNEEDED.items() for name in names},
    "lr_scheduler_kwargs": missing(ONE_SCHEDULE, *_both("lr_schedule.type"), off=(None, {})),
    "lr_scheduler_kwargs.min_lr_rate": take(*_both("lr_schedule.min_ratio")),
    "lr_scheduler_kwargs.min_lr": take(*_both("lr_schedule.min_ratio"), by="min_lr_ratio", note="as a share of lr"),
    "optim_args": missing("AdamW has its own keys", *_both("betas")),
    "optim_target_modules": missing("AdamW is the only optimizer", *_both("lr")),
    "average_tokens_across_devices": implied("the count is that of the whole batch", "run.num_ranks"),
    "label_smoothing_factor": missing("targets are not smoothed", *_both("lr"), off=(None, 0, 0.0)),
    "neftune_noise_alpha": missing("embeddings have no noise", *_both("lr")),
    "train_sampling_strategy": implied(
        "data.shuffle", "data.shuffle", expects=("random",), otherwise="set data.shuffle; lengths group nothing"
    ),
    "eval_on_start": take("trainer.eval_before"),
    "load_best_model_at_end": missing("name one of megappo's metrics", "trainer.keep_best"),
    **each(unneeded("see load_best_model_at_end", "trainer.keep_best"), "metric_for_best_model greater_is_better"),
    "full_determinism": missing("resume is bit for bit; kernels decide the rest", "run.seed"),
    "use_cpu": take("run.device", values={True: "cpu", False: "cuda"}),
    "project": unneeded("W&B reads WANDB_PROJECT", "telemetry.trackers"),
    "resume_from_checkpoint": implied("`--resume` continues a run", "run.name", expects=(None, True, False)),
    "config": Rule(Outcome.MISSING, note=OTHER_FILE, off=(None,), is_file=True),
}

_NEW: dict[str, Rule] = {
    **taken(
        "sft_model_path=policy.model seed=run.seed world_size=run.num_ranks num_processes=run.num_ranks",
        "num_ppo_epochs=algorithm.ppo_epochs response_length=rollout.max_response_tokens temperature=rollout.sampling.temperature",
        "missing_eos_penalty=reward.missing_eos_penalty kl_coef=algorithm.kl.coef cliprange_value=critic.loss.clip",
        "gamma=algorithm.gamma lam=algorithm.lam dataset_name=data.train eval_steps=trainer.eval_every",
        "save_total_limit=checkpoint.keep_last save_only_model=checkpoint.save_only_model",
    ),
    "reward_model_path": take(
        "reward_model.model", "critic.model", "critic.value_head", by="reward_model_and_critic", note="TRL's critic starts from it"
    ),
    **each(take("run.name", by="run_name"), "exp_name run_name"),
    "output_dir": take("run.output_dir", by="run_folder", note="megappo adds run.name"),
    "data_seed": unneeded("run.seed is the one seed", "run.seed"),
    "learning_rate": take(*_both("lr"), note=BOTH),
    "lr_scheduler_type": take(*_both("lr_schedule.type"), values=SCHEDULES, otherwise=ONE_SCHEDULE),
    "warmup_steps": take(*_both("warmup_steps"), by="warmup_steps", note="in optimizer steps"),
    "warmup_ratio": take(*_both("warmup_steps"), by="warmup_ratio", note="in optimizer steps"),
    "weight_decay": take(*_both("weight_decay")),
    "adam_beta1": take(*_both("betas"), by="beta1"),
    "adam_beta2": take(*_both("betas"), by="beta2"),
    "adam_epsilon": take(*_both("eps")),
    "max_grad_norm": take(*_both("clip_grad")),
    "optim": implied(
        "AdamW", *_both("lr"), expects=("adamw_torch", "adamw_torch_fused", "adamw_hf"), otherwise="AdamW is the only optimizer"
    ),
    **each(take("data.prompts_per_step", by="trl_batch", note=BATCH), "per_device_train_batch_size gradient_accumulation_steps"),
    "nproc_per_node": take("run.num_ranks", by="torchrun_ranks", note="times nnodes"),
    "nnodes": take("run.num_ranks", by="torchrun_ranks", note="times nproc_per_node"),
    "num_mini_batches": take("algorithm.mini_batch_size", by="trl_mini_batch", note="samples: the batch / num_mini_batches"),
    "total_episodes": take("trainer.steps", by="trl_steps", note="steps: total_episodes / batch"),
    "num_train_epochs": take("trainer.epochs", by="whole_epochs"),
    "num_total_batches": unneeded("the number of steps follows", "trainer.steps"),
    "max_steps": missing("total_episodes says it", "trainer.steps"),
    "per_device_eval_batch_size": unneeded("the sampler schedules the validation prompts", "rollout.max_num_seqs"),
    "local_rollout_forward_batch_size": unneeded("the sampler schedules the prompts", "rollout.max_num_seqs"),
    "stop_token": implied("the end-of-sequence token ends a response", "rollout.stop", expects=("eos",)),
    "stop_token_id": missing("name the strings", "rollout.stop"),
    "whiten_rewards": missing("advantages are normalised instead", "algorithm.whiten_advantages"),
    "kl_estimator": take("algorithm.kl.estimator", values=KL_ESTIMATORS),
    "cliprange": take("algorithm.loss.clip_low", "algorithm.loss.clip_high"),
    "vf_coef": implied("the critic has its own optimizer", "critic.optimizer.lr"),
    "bf16": implied("the default", "policy.dtype", expects=(True,)),
    "fp16": missing(NO_FP16, "policy.dtype"),
    "gradient_checkpointing": take("policy.recompute", "critic.recompute", values=CHECKPOINTING),
    "gradient_checkpointing_kwargs": unneeded("Megatron-core recomputes", "policy.recompute"),
    "ds3_gather_for_generation": unneeded("vLLM has its own shards", "rollout.engine"),
    **each(missing("models are cut by tp and pp", "policy.parallel.tp"), "deepspeed fsdp"),
    **each(unneeded("prompts are tokenized once, before the ranks start", "data.train"), "dataset_num_proc dataloader_num_workers"),
    "dataset_train_split": implied("data.train names the split: NAME:SUBSET:SPLIT", "data.train"),
    "dataset_test_split": implied("data.eval names the split: NAME:SUBSET:SPLIT", "data.eval"),
    "model_name_or_path": take("policy.model", "data.tokenizer", by="trl_tokenizer"),
    "num_sample_generations": missing("trajectories every few steps", "telemetry.trajectories_every"),
    "logging_steps": implied("every step is logged", "telemetry.trackers"),
    "logging_dir": unneeded("everything is in the run's directory", "run.output_dir"),
    "report_to": take("telemetry.trackers", by="trackers", note="metrics.jsonl is always written"),
    "eval_strategy": implied("trainer.eval_every says it", "trainer.eval_every"),
    "save_steps": take("checkpoint.save_every", by="save_steps"),
    "save_strategy": take("checkpoint.save_every", by="save_strategy"),
    "push_to_hub": missing(HUB, "checkpoint.export_at_end"),
    "use_rslora": missing("alpha / sqrt(rank) is policy.lora.alpha = lora_alpha * sqrt(rank)", "policy.lora.alpha"),
    **each(missing("set the rank by hand", "policy.lora.rank"), "use_peft model_adapter_name ref_adapter_name"),
    "trust_remote_code": missing("no code of a model repository is run"),
    **each(
        missing("a penalty a token beyond a length", "reward.length_penalty.per_token"),
        "enable_length enable_repetition length_coef repetition_coef",
        theirs="reward_shaping_",
    ),
    "reward_shaping_enable_eos": missing("a penalty for cut responses", "reward.missing_eos_penalty"),
    "reward_shaping_eos_missing_penalty": missing("a penalty for cut responses", "reward.missing_eos_penalty"),
    "local_batch_size": unneeded("it follows from the others", "data.prompts_per_step"),
    "micro_batch_size": unneeded("it follows from the others", "policy.micro_batch_tokens"),
    "local_mini_batch_size": unneeded("it follows from the others", "algorithm.mini_batch_size"),
}

TRL = Trainer(
    "TRL",
    # The older version's keys first: where both know a key, the newer one's meaning holds.
    OLD | ARGUMENTS | _NEW,
    classes=("PPOConfig",),
    commands=("ppo.py", "ppo_tldr.py", "trl.experimental.ppo"),
    defaults={
        "learning_rate": 3e-6,
        "temperature": 0.7,
        "response_length": 53,
        "num_ppo_epochs": 4,
        "num_mini_batches": 1,
        "kl_coef": 0.05,
        "gradient_checkpointing": True,
        "adam_beta2": 0.999,
        "lr_scheduler_type": "linear",
        "seed": 42,
    },
    sections=("tracker_kwargs", "gradient_checkpointing_kwargs", "deepspeed", *SECTIONS),
    chosen={"reward.parts": "rules_of_data"},
)

# ---------------------------------------------------------------------------------------------------------------- FlowMesh

OWN_CLASSIFIER = "decoders with one label score (docs/rewards.md), other classifiers do not"
ORCHESTRATOR = "for the orchestrator: `megappo launch` submits to Slurm"

_TRAINING = {name: rule for name, rule in TRL.rules.items() if name not in ("output_dir", "dataset_name")}

FLOWMESH = Trainer(
    "FlowMesh",
    {
        **each(unneeded(ORCHESTRATOR), "apiVersion kind metadata spec.resources"),
        "metadata.name": take("run.name", by="run_name"),
        "spec.taskType": implied("PPO", expects=("ppo",), otherwise="ppo and dpo are read"),
        **taken(
            "spec.resources.hardware.gpu.count=run.num_ranks spec.model.source.identifier=policy.model",
            "spec.data.dataset_name=data.train spec.data.prompt_column=data.prompt_key",
            "spec.generation.max_new_tokens=rollout.max_response_tokens spec.generation.temperature=rollout.sampling.temperature",
            "spec.generation.top_p=rollout.sampling.top_p spec.training.save_model=checkpoint.export_at_end",
        ),
        "spec.model.source.type": implied("a directory or a name of the hub", "policy.model"),
        "spec.model.source.revision": missing("name it in the model: owner/name@revision", "policy.model", off=(None, "main")),
        "spec.model.source.trust_remote_code": missing("no code of a model repository is run"),
        **each(missing(OWN_CLASSIFIER, "reward_model.model"), "spec.reward_model.identifier spec.reward_model"),
        "spec.data.prompts": missing('a file with one {"prompt": ...} a line', "data.train"),
        "spec.data.split": implied("data.train names the split: NAME:SUBSET:SPLIT", "data.train"),
        "spec.data.max_samples": missing("give a shorter file", "data.train"),
        "spec.generation.top_k": take("rollout.sampling.top_k", by="top_k"),
        "spec.generation.do_sample": implied("training responses are sampled", "rollout.sampling.temperature", expects=(True,)),
        "spec.output": unneeded("everything is in the run's directory", "run.output_dir"),
        **{f"spec.training.{name}": rule for name, rule in (_TRAINING | OLD).items()},
        "spec.training.allow_multi_gpu": unneeded("run.num_ranks says it", "run.num_ranks"),
        "spec.training.padding_side": implied(ALWAYS_PACKED, "policy.micro_batch_tokens"),
        "spec.training.save_freq": take("checkpoint.save_every", by="save_steps"),
        "spec.training.save_strategy": take("checkpoint.save_every", by="save_strategy"),
    },
    defaults={"spec.training.ppo_epochs": 4, "spec.training.gradient_accumulation_steps": 1},
    sections=(
        "metadata",
        "spec.resources",
        "spec.reward_model",
        "spec.output",
        "spec.data.prompts",
        "spec.training.tracker_kwargs",
    ),
    chosen={"reward.parts": "rules_of_data"},
)
