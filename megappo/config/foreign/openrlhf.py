"""Flags of OpenRLHF's PPO (`openrlhf.cli.train_ppo_ray`), and those that LightRFT adds to them."""

from __future__ import annotations

from megappo.config.foreign.rule import (
    ALWAYS_PACKED,
    AS_VLLM,
    CHECKPOINTING,
    EAGER,
    KL_ESTIMATORS,
    NO_FP16,
    ONE_SCHEDULE,
    OWN_SAMPLING,
    RAY,
    SCHEDULES,
    Rule,
    Trainer,
    each,
    implied,
    missing,
    renamed,
    take,
    taken,
    unneeded,
)

SHARED = "all models share the ranks of the run"
ZERO = "ZeRO-1: optimizer states are sharded over data-parallel ranks, and models are cut by tp and pp"
BOTH_LAYOUTS = "policy and critic alike"

_RULES = {
    **taken(
        "pretrain=policy.model critic_pretrain=critic.model input_key=data.prompt_key label_key=data.answer_key",
        "apply_chat_template=data.chat_template rollout_batch_size=data.prompts_per_step",
        "n_samples_per_prompt=rollout.samples_per_prompt num_episodes=trainer.epochs generate_max_len=rollout.max_response_tokens",
        "actor_learning_rate=policy.optimizer.lr critic_learning_rate=critic.optimizer.lr dual_clip=algorithm.loss.dual_clip",
        "value_clip=critic.loss.clip lambd=algorithm.lam gamma=algorithm.gamma kl_horizon=algorithm.kl.controller.horizon",
        "entropy_loss_coef=algorithm.entropy.coef temperature=rollout.sampling.temperature top_p=rollout.sampling.top_p",
        "seed=run.seed vllm_tensor_parallel_size=rollout.tp vllm_gpu_memory_utilization=rollout.memory_share",
        "max_ckpt_num=checkpoint.keep_last disable_ds_ckpt=checkpoint.save_only_model",
    ),
    "reward_pretrain": take("reward_model.model", "critic.model", "critic.value_head", by="reward_model_and_critic"),
    "remote_rm_url": missing("scores come from rules", "reward.parts"),
    "agent_func_path": missing("one turn a prompt", "reward.parts"),
    "value_head_prefix": implied("`score` or `v_head` of the checkpoint, or zeros", "critic.value_head"),
    "prompt_data": take("data.train", by="files_of_text"),
    "prompt_data_probs": missing("sets follow each other; a field of the records may weigh them", "data.weight_key"),
    "prompt_split": implied("data.train names the split: NAME:SUBSET:SPLIT", "data.train", expects=("train",)),
    "eval_dataset": take("data.eval", by="files_of_text"),
    "eval_split": implied("data.eval names the split: NAME:SUBSET:SPLIT", "data.eval"),
    "eval_temperature": missing(OWN_SAMPLING, "trainer.eval_every", off=(None, 0, 0.0)),
    "eval_n_samples_per_prompt": missing(OWN_SAMPLING, "trainer.eval_every", off=(None, 1)),
    "input_template": missing("the chat template, or text after the question", "data.prompt_suffix"),
    "max_samples": missing("give a shorter file", "data.train", off=(None, 100000000)),
    "train_batch_size": take("algorithm.mini_batch_size", note="samples, as here"),
    "micro_train_batch_size": take(
        "policy.micro_batch_tokens", "critic.micro_batch_tokens", by="tokens_of_sequences", note="sequences to tokens"
    ),
    "micro_rollout_batch_size": unneeded("log-probs use the micro-batches of training", "policy.micro_batch_tokens"),
    "vllm_generate_batch_size": missing("every prompt of a step is answered once", "data.prompts_per_step"),
    "use_dynamic_batch": implied("micro-batches are always filled by tokens", "policy.micro_batch_tokens"),
    "train_max_tokens_per_gpu": take("policy.micro_batch_tokens", "critic.micro_batch_tokens"),
    "rollout_max_tokens_per_gpu": unneeded("log-probs use the micro-batches of training", "policy.micro_batch_tokens"),
    "packing_samples": implied(ALWAYS_PACKED, "policy.micro_batch_tokens"),
    "max_epochs": take("algorithm.ppo_epochs", note="passes over the responses of a step"),
    "prompt_max_len": take("data.max_prompt_tokens", note="longer prompts are left out, never cut"),
    "max_len": implied("prompt + response length", "rollout.max_response_tokens"),
    "max_norm": take("policy.optimizer.clip_grad", "critic.optimizer.clip_grad"),
    "l2": take("policy.optimizer.weight_decay", "critic.optimizer.weight_decay"),
    "lr_warmup_ratio": take("policy.optimizer.warmup_steps", "critic.optimizer.warmup_steps", by="warmup_ratio"),
    "lr_scheduler": take(
        "policy.optimizer.lr_schedule.type", "critic.optimizer.lr_schedule.type", values=SCHEDULES, otherwise=ONE_SCHEDULE
    ),
    "adam_betas": take("policy.optimizer.betas", "critic.optimizer.betas"),
    "pretrain_data": take("algorithm.ptx.data", "algorithm.ptx.coef", by="texts", note="set text_key, max_tokens and batch_size"),
    "pretrain_data_probs": missing("one set of texts", "algorithm.ptx.data"),
    "ptx_coef": unneeded("pretrain_data takes it over", "algorithm.ptx.coef"),
    "eps_clip": take("algorithm.loss.clip_low", "algorithm.loss.clip_high"),
    "eps_clip_low_high": take("algorithm.loss.clip_low", "algorithm.loss.clip_high", by="spread"),
    "advantage_estimator": take(
        "algorithm.estimator.type",
        by="estimator",
        values={
            "gae": "gae",
            "reinforce": "reinforce_plus_plus",
            "rloo": "rloo",
            "reinforce_baseline": "grpo",
            "group_norm": "grpo",
            "dr_grpo": "grpo",
        },
    ),
    "no_advantage_std_norm": missing("mean and standard deviation, or neither", "algorithm.whiten_advantages"),
    "normalize_reward": missing("advantages are normalised instead", "algorithm.whiten_advantages"),
    "reward_clip_range": missing("scores are not clipped", "reward.parts", off=(None, [-10, 10])),
    "overlong_buffer_len": take("reward.length_penalty.per_token", "reward.length_penalty.start", by="openrlhf_overlong"),
    "overlong_penalty_factor": unneeded("overlong_buffer_len takes it over", "reward.length_penalty.per_token"),
    "stop_properly_penalty_coef": missing("a penalty for cut responses", "reward.missing_eos_penalty", off=(None,)),
    "policy_loss_type": take("algorithm.loss.type", by="loss", values={"ppo": "ppo", "gspo": "gspo"}),
    "init_kl_coef": take("algorithm.kl.placement", "algorithm.kl.coef", by="openrlhf_kl"),
    "use_kl_loss": take("algorithm.kl.placement", by="openrlhf_kl"),
    "kl_estimator": take("algorithm.kl.estimator", values=KL_ESTIMATORS),
    "kl_target": take("algorithm.kl.controller.type", "algorithm.kl.controller.target", by="adaptive_kl"),
    "aux_loss_coef": take("policy.router_aux_coef", "critic.router_aux_coef"),
    "freezing_actor_steps": take("critic.warmup.steps", by="positive"),
    "dynamic_filtering": take("algorithm.dynamic_sampling.max_rounds", by="rounds", note="groups of equal scores are replaced"),
    "dynamic_filtering_reward_range": unneeded(
        "groups of equal scores are replaced, whatever the score", "algorithm.dynamic_sampling.metric"
    ),
    "full_determinism": missing("resume is bit for bit; kernels decide the rest", "run.seed"),
    "actor_num_nodes": take("run.num_ranks", by="openrlhf_ranks", note="times actor_num_gpus_per_node"),
    "actor_num_gpus_per_node": take("run.num_ranks", by="openrlhf_ranks", note="times actor_num_nodes"),
    **{
        f"{role}_num_{what}": unneeded(SHARED, "run.num_ranks")
        for role in ("critic", "ref", "reward")
        for what in ("nodes", "gpus_per_node")
    },
    "vllm_num_engines": implied("the ranks / rollout.tp", "rollout.tp"),
    "vllm_enable_sleep": take("rollout.sleep", values={True: "all", False: "none"}),
    "vllm_sync_backend": unneeded("weights stay inside the ranks", "rollout.engine"),
    "vllm_sync_with_ray": unneeded(RAY, "rollout.engine"),
    "enable_vllm_is_correction": take("algorithm.importance_sampling.type", by="openrlhf_correction"),
    "vllm_is_truncated_threshold": unneeded("the switch takes it over", "algorithm.importance_sampling.high"),
    "enable_prefix_caching": unneeded("vLLM's default", "rollout.engine"),
    "enforce_eager": take("rollout.vllm_args", values=EAGER),
    "rollout_tasks_per_gpu": unneeded(RAY, "rollout.max_num_seqs"),
    "async_train": missing("a step trains on its own responses"),
    "async_queue_size": unneeded("a step trains on its own responses"),
    **{name: implied(SHARED, "run.num_ranks") for name in ("colocate_actor_ref", "colocate_critic_reward", "colocate_all_models")},
    "eval_steps": take("trainer.eval_every", by="or_zero", note="-1 is 0: never"),
    "save_steps": take("checkpoint.save_every", by="or_zero", note="-1 is 0: at the end alone"),
    "logging_steps": implied("every step is logged", "telemetry.trackers"),
    "save_path": take("run.output_dir", by="run_folder", note="megappo adds run.name"),
    "ckpt_path": unneeded("checkpoints are in the run's directory", "run.output_dir"),
    "save_hf_ckpt": implied("export/ at the end; `megappo export` for any step", "checkpoint.export_at_end"),
    "max_ckpt_mem": unneeded("keep_last bounds them", "checkpoint.keep_last"),
    "load_checkpoint": implied("`megappo train CONFIG --resume` continues a run", "run.name"),
    "use_ds_universal_ckpt": implied("checkpoints are read in any layout", "checkpoint.save_every"),
    "save_value_network": implied("checkpoints hold the critic", "checkpoint.save_every"),
    "zero_stage": implied(ZERO, "policy.optimizer.distributed"),
    "zpg": unneeded(ZERO, "policy.optimizer.distributed"),
    "gradient_checkpointing": take("policy.recompute", "critic.recompute", values=CHECKPOINTING),
    "gradient_checkpointing_use_reentrant": unneeded("Megatron-core recomputes", "policy.recompute"),
    "bf16": implied("the default", "policy.dtype", expects=(True,)),
    "adam_offload": take("policy.offload", "critic.offload", by="offload_optimizer", note="between updates; AdamW runs on the GPU"),
    "deepspeed_enable_sleep": take("policy.offload", "critic.offload", by="offload_parameters"),
    "ref_reward_offload": take("reference.offload", by="offload_parameters"),
    "ds_tensor_parallel_size": take("policy.parallel.tp", "critic.parallel.tp", note=BOTH_LAYOUTS),
    "ring_attn_size": take("policy.parallel.cp", "critic.parallel.cp", note=BOTH_LAYOUTS),
    "ring_head_stride": unneeded("Megatron-core's context parallelism", "policy.parallel.cp"),
    "actor_init_on_gpu": unneeded("each rank reads its own shard", "policy.model"),
    **each(unneeded("kernels are chosen by model.impl", "model.impl"), "attn_implementation flash_attn"),
    **each(unneeded("kernels are chosen by kernels and model.impl", "kernels"), "use_liger_kernel deepcompile"),
    "grad_accum_dtype": implied("gradient sums are fp32", "policy.dtype"),
    "overlap_comm": unneeded("Megatron-core overlaps where it can", "policy.optimizer.distributed"),
    "disable_fast_tokenizer": unneeded("the checkpoint's tokenizer", "data.tokenizer"),
    "local_rank": unneeded("torchrun or srun says it", "run.num_ranks"),
    "enable_ema": take("policy.ema.decay", by="average_decay", note="averaged after each PPO step, there after each update"),
    "ema_beta": unneeded("enable_ema takes it over", "policy.ema.decay"),
    "load_in_4bit": missing("bf16 or fp32", "policy.dtype"),
    "lora_rank": take("policy.lora.rank", "critic.lora.rank", by="adapter_rank"),
    "lora_alpha": take("policy.lora.alpha", "critic.lora.alpha", by="with_adapters"),
    "lora_dropout": take("policy.lora.dropout", "critic.lora.dropout", by="with_adapters"),
    "target_modules": take("policy.lora.targets", "critic.lora.targets", by="with_adapters"),
    "use_tensorboard": take("telemetry.trackers", by="tracker_flags"),
    "use_wandb": take("telemetry.trackers", by="tracker_flags", note="the key of the account stays in the environment"),
    "wandb_org": unneeded("WANDB_ENTITY in the environment names it", "telemetry.trackers"),
    "wandb_group": unneeded("W&B reads WANDB_RUN_GROUP", "telemetry.trackers"),
    "wandb_project": take("telemetry.trackers", by="wandb_project"),
    "wandb_run_name": take("run.name", by="run_name"),
    "perf": implied("every step has the times of its stages", "telemetry.trackers"),
    "use_ms": missing("a directory or a name of the Hugging Face hub", "policy.model"),
}

_DEFAULTS = {
    "rollout_batch_size": 1024,
    "train_batch_size": 128,
    "prompt_max_len": 1024,
    "generate_max_len": 1024,
    "n_samples_per_prompt": 1,
    "value_clip": 0.5,
    "lambd": 1,
    "actor_learning_rate": 1e-6,
    "critic_learning_rate": 9e-6,
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": 0.03,
    "init_kl_coef": 0.01,
    "kl_estimator": "k1",
    "apply_chat_template": False,
    "input_key": "input",
    "seed": 42,
    "eval_steps": -1,
    "save_steps": -1,
    "max_ckpt_num": 3,
}

# Today's dotted names -> those before them, whose rules they have.
_RENAMED = {
    **renamed(
        "actor.",
        "model_name_or_path=pretrain adam.lr=actor_learning_rate lr_warmup_ratio eps_clip eps_clip_low_high dual_clip",
        "policy_loss_type entropy_coef=entropy_loss_coef aux_loss_coef gradient_checkpointing_enable=gradient_checkpointing",
        "gradient_checkpointing_reentrant=gradient_checkpointing_use_reentrant",
    ),
    **renamed(
        "critic.",
        "model_name_or_path=critic_pretrain adam.lr=critic_learning_rate lr_warmup_ratio value_clip",
        "freezing_steps=freezing_actor_steps save_value_network",
    ),
    "ref.offload": "ref_reward_offload",
    **renamed(
        "reward.",
        "model_name_or_path=reward_pretrain remote_url=remote_rm_url normalize_enable=normalize_reward",
        "clip_range=reward_clip_range overlong_buffer_len overlong_penalty_factor stop_properly_penalty_coef",
        "offload=ref_reward_offload",
    ),
    **renamed(
        "train.",
        "agent_func_path batch_size=train_batch_size micro_batch_size=micro_train_batch_size",
        "dynamic_batch_enable=use_dynamic_batch max_tokens_per_gpu=train_max_tokens_per_gpu num_episodes max_epochs seed",
        "full_determinism_enable=full_determinism enable_ema ema_beta async_enable=async_train async_queue_size colocate_actor_ref",
        "colocate_critic_reward colocate_all=colocate_all_models",
    ),
    **renamed(
        "data.",
        "prompt_dataset=prompt_data prompt_probs=prompt_data_probs prompt_split input_key label_key input_template",
        "apply_chat_template max_samples disable_fast_tokenizer",
    ),
    **renamed("eval.", "dataset=eval_dataset split=eval_split temperature=eval_temperature steps=eval_steps"),
    "eval.n_samples_per_prompt": "eval_n_samples_per_prompt",
    **renamed(
        "rollout.",
        "batch_size=rollout_batch_size n_samples_per_prompt micro_batch_size=micro_rollout_batch_size vllm_generate_batch_size",
        "max_tokens_per_gpu=rollout_max_tokens_per_gpu temperature top_p max_new_tokens=generate_max_len",
    ),
    **renamed(
        "algo.",
        "advantage.estimator=advantage_estimator advantage.lambd=lambd advantage.gamma=gamma",
        "advantage.no_std_norm=no_advantage_std_norm advantage.is_correction_enable=enable_vllm_is_correction",
        "advantage.is_correction_threshold=vllm_is_truncated_threshold kl.init_coef=init_kl_coef kl.use_loss=use_kl_loss",
        "kl.estimator=kl_estimator kl.target=kl_target kl.horizon=kl_horizon dynamic_filtering_enable=dynamic_filtering",
        "dynamic_filtering_range=dynamic_filtering_reward_range",
    ),
    **renamed(
        "logger.",
        "logging_steps wandb.key=use_wandb wandb.org=wandb_org wandb.group=wandb_group wandb.project=wandb_project",
        "wandb.run_name=wandb_run_name tensorboard_dir=use_tensorboard",
    ),
    **renamed(
        "ckpt.",
        "output_dir=save_path path=ckpt_path save_hf=save_hf_ckpt save_steps max_num=max_ckpt_num max_mem=max_ckpt_mem",
        "load_enable=load_checkpoint disable_ds=disable_ds_ckpt",
    ),
    **{
        f"{role}.num_{what}": f"{role}_num_{what}"
        for role in ("actor", "critic", "ref", "reward")
        for what in ("nodes", "gpus_per_node")
    },
    **renamed(
        "ds.",
        "value_head_prefix lora.rank=lora_rank lora.alpha=lora_alpha lora.dropout=lora_dropout lora.target_modules=target_modules",
        "enable_sleep=deepspeed_enable_sleep tensor_parallel_size=ds_tensor_parallel_size use_universal_ckpt=use_ds_universal_ckpt",
        "ring_attn_head_stride=ring_head_stride zero_stage zpg adam_offload attn_implementation use_liger_kernel grad_accum_dtype",
        "overlap_comm packing_samples load_in_4bit ring_attn_size deepcompile",
    ),
    **{
        f"vllm.{name}": f"vllm_{name}"
        for name in "num_engines tensor_parallel_size gpu_memory_utilization enable_sleep sync_backend sync_with_ray".split()
    },
    **renamed("vllm.", "enforce_eager enable_prefix_caching"),
}


def own_optimizer(prefix: str, role: str) -> dict[str, Rule]:
    """Keys of the dotted form for one model, behind a prefix that ends with a dot or is empty."""
    ours = f"{role}.optimizer"
    return {
        f"{prefix}optim": implied("AdamW", f"{ours}.lr", expects=("adam",), otherwise="AdamW is the only optimizer"),
        f"{prefix}muon": unneeded(f"of muon alone (see {prefix}optim)", f"{ours}.lr"),
        f"{prefix}adam.betas": take(f"{ours}.betas"),
        f"{prefix}adam.eps": take(f"{ours}.eps"),
        f"{prefix}adam.weight_decay": take(f"{ours}.weight_decay"),
        f"{prefix}lr_scheduler": take(f"{ours}.lr_schedule.type", values=SCHEDULES, otherwise=ONE_SCHEDULE),
        f"{prefix}lr_warmup_ratio": take(f"{ours}.warmup_steps", by="warmup_ratio", note="in optimizer steps"),
        f"{prefix}min_lr_ratio": take(f"{ours}.lr_schedule.min_ratio"),
        f"{prefix}max_norm": take(f"{ours}.clip_grad"),
    }


_TODAY = {
    **{new: _RULES[old] for new, old in _RENAMED.items()},
    **own_optimizer("actor.", "policy"),
    **own_optimizer("critic.", "critic"),
    "data.max_len": take(
        "data.max_prompt_tokens", "rollout.max_response_tokens", by="total_length", note="prompt and response share it there"
    ),
    "data.image_key": take("data.image_key", by="image_key"),
    "data.max_images_per_prompt": unneeded("vLLM is prepared for 16 images in a prompt", "data.image_key"),
    "data.dataloader_num_workers": unneeded("prompts are tokenized once, before the ranks start", "data.train"),
    "actor.freeze_visual_encoder": take("policy.freeze", by="frozen_tower"),
    "algo.advantage.is_correction_type": unneeded("is_correction_enable takes it over", "algorithm.importance_sampling.type"),
    "train.partial_rollout_enable": missing("set the tokens of a step by hand", "rollout.partial_rollout_tokens"),
    "ckpt.best_metric_key": missing("name one of megappo's metrics", "trainer.keep_best"),
    "ds.param_dtype": implied("the default", "policy.dtype", expects=("bf16",), otherwise=NO_FP16),
    "ds.experts_implementation": unneeded("kernels are chosen by model.impl", "model.impl"),
}

OPENRLHF = Trainer(
    "OpenRLHF",
    _RULES | _TODAY,
    commands=("openrlhf.cli.train_ppo_ray", "openrlhf/cli/train_ppo_ray.py", "openrlhf.cli.train_ppo"),
    defaults=_DEFAULTS | {"actor.min_lr_ratio": 0.1, "critic.min_lr_ratio": 0.1},
    sections=("actor.muon", "critic.muon"),
    renamed=_RENAMED,
    chosen=AS_VLLM,
)

LIGHTRFT = Trainer(
    "LightRFT",
    _RULES
    | {
        "nproc_per_node": take("run.num_ranks", by="torchrun_ranks", note="times nnodes"),
        "nnodes": take("run.num_ranks", by="torchrun_ranks", note="times nproc_per_node"),
        "fsdp": implied(ZERO, "policy.optimizer.distributed"),
        "fsdp_cpu_offload": take(
            "policy.offload", "critic.offload", by="offload_optimizer", note="between updates; AdamW runs on the GPU"
        ),
        "advantages_norm": take("algorithm.whiten_advantages"),
        "engine_type": take("rollout.engine", values={"vllm": "vllm"}, otherwise="vLLM generates, inside the ranks of training"),
        "engine_mem_util": take("rollout.memory_share"),
        "engine_tp_size": take("rollout.tp"),
        "enable_engine_sleep": take("rollout.sleep", values={True: "all", False: "none"}),
        "system_prompt": take("data.system_prompt"),
        "save_trajectories": implied("trajectories are written", "telemetry.trajectories_every"),
        "max_eval_samples": take("data.eval_prompts", by="positive"),
        "mixed_mm_data": implied("records without images are read beside others", "data.image_key"),
        "images_key": take("data.image_key", by="image_key"),
        "limit_mm_image_per_prompt": unneeded("vLLM is prepared for 16 images in a prompt", "data.image_key"),
        "freeze_prefix": missing("name parts of weights, such as [visual]", "policy.freeze"),
        **each(missing("a rule in megappo/rewards", "reward.parts"), "reward_fn reward_recipe"),
        "reward_fn_label_map": missing("one set of rules scores all prompts", "reward.parts"),
        "fp16": missing(NO_FP16, "policy.dtype"),
    },
    commands=("train_colocate.py", "lightrft"),
    defaults=_DEFAULTS,
    chosen=AS_VLLM,
)
