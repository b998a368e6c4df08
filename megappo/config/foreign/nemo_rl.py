"""Keys of NeMo-RL's PPO recipes (`ppo_math_1B.yaml`; Megatron and DTensor backends)."""

from __future__ import annotations

from megappo.config.foreign.rule import (
    ALWAYS_PACKED,
    CHECKPOINTING,
    DTYPES,
    EAGER,
    ENGINES,
    KL_ESTIMATORS,
    NO_FP16,
    ONE_SCHEDULE,
    OTHER_FILE,
    OWN_SAMPLING,
    RAY,
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

SECTIONS_OF_ROLE = (
    "tokenizer",
    "scheduler",
    "hf_config_overrides",
    "reward_model_cfg",
    "megatron_cfg.distributed_data_parallel_config",
    "megatron_cfg.checkpoint",
    "megatron_cfg.fp8_cfg",
    "dtensor_cfg.lora_cfg",
    "sequence_packing",
    "dynamic_batching",
    "megatron_cfg.env_vars",
    "megatron_cfg.peft",
    "dtensor_cfg.env_vars",
    "dtensor_cfg.automodel_kwargs",
)
FUSED = "Megatron-core and TransformerEngine choose their fusions"


def role_rules(prefix: str, role: str) -> dict[str, Rule]:
    parallel, ours = f"{role}.parallel", f"{role}.optimizer"
    rules = {
        **taken("model_name=model sequence_packing.train_mb_tokens=micro_batch_tokens", theirs=f"{prefix}.", ours=f"{role}."),
        f"{prefix}.train_global_batch_size": take("algorithm.mini_batch_size"),
        f"{prefix}.train_micro_batch_size": take(
            f"{role}.micro_batch_tokens",
            by="sequences_of_total_length",
            note="sequences to tokens: times max_total_sequence_length",
        ),
        f"{prefix}.max_total_sequence_length": implied("prompt + response length", "rollout.max_response_tokens"),
        f"{prefix}.precision": take(f"{role}.dtype", values=DTYPES, otherwise=NO_FP16),
        f"{prefix}.max_grad_norm": take(f"{ours}.clip_grad"),
        f"{prefix}.make_sequence_length_divisible_by": unneeded("sequences are padded inside the model", f"{parallel}.tp"),
        f"{prefix}.sequence_packing.enabled": implied(ALWAYS_PACKED, f"{role}.micro_batch_tokens"),
        f"{prefix}.sequence_packing.logprob_mb_tokens": unneeded("log-probs use the micro-batches of training"),
        f"{prefix}.dynamic_batching.enabled": implied(ALWAYS_PACKED, f"{role}.micro_batch_tokens"),
        f"{prefix}.dynamic_batching.train_mb_tokens": unneeded(
            "sequence_packing.train_mb_tokens says it", f"{role}.micro_batch_tokens"
        ),
        f"{prefix}.dynamic_batching.logprob_mb_tokens": unneeded("log-probs use the micro-batches of training"),
        f"{prefix}.optimizer": unneeded("null with Megatron, whose optimizer has keys of its own", f"{ours}.lr"),
        f"{prefix}.sequence_packing": implied(ALWAYS_PACKED, f"{role}.micro_batch_tokens"),
        f"{prefix}.dynamic_batching": implied(ALWAYS_PACKED, f"{role}.micro_batch_tokens"),
        f"{prefix}.optimizer.name": implied("AdamW", expects=("torch.optim.AdamW",), otherwise="AdamW is the only optimizer"),
        f"{prefix}.optimizer.kwargs.lr": take(f"{ours}.lr", by="if_dtensor"),
        f"{prefix}.optimizer.kwargs.weight_decay": take(f"{ours}.weight_decay", by="if_dtensor"),
        f"{prefix}.optimizer.kwargs.betas": take(f"{ours}.betas", by="if_dtensor"),
        f"{prefix}.optimizer.kwargs.eps": take(f"{ours}.eps", by="if_dtensor"),
        **each(unneeded(FUSED), "optimizer.kwargs.foreach optimizer.kwargs.fused", theirs=f"{prefix}."),
        f"{prefix}.scheduler": take(
            *(f"{ours}.{key}" for key in ("lr_schedule.type", "lr_schedule.min_ratio", "warmup_steps")),
            by="torch_schedule",
            note="the warm-up starts from 0",
        ),
        f"{prefix}.hf_config_overrides": missing("the checkpoint's config.json holds", f"{role}.model", off=(None, {})),
        f"{prefix}.tokenizer": unneeded("the tokenizer of the policy's checkpoint is used", "data.tokenizer"),
        f"{prefix}.reward_model_cfg": unneeded("the critic has a value head", "critic.value_head"),
    }
    return rules | _megatron(f"{prefix}.megatron_cfg", role) | _dtensor(f"{prefix}.dtensor_cfg", role)


def _megatron(megatron: str, role: str) -> dict[str, Rule]:
    optimizer, parallel, ours = f"{megatron}.optimizer", f"{role}.parallel", f"{role}.optimizer"
    return {
        f"{megatron}.enabled": implied("Megatron-core is the engine", f"{parallel}.tp"),
        f"{megatron}.tensor_model_parallel_size": take(f"{parallel}.tp", by="if_megatron"),
        f"{megatron}.pipeline_model_parallel_size": take(f"{parallel}.pp", by="if_megatron"),
        f"{megatron}.context_parallel_size": take(f"{parallel}.cp", by="if_megatron"),
        f"{megatron}.expert_model_parallel_size": take(f"{parallel}.ep", by="if_megatron"),
        f"{megatron}.expert_tensor_parallel_size": take(f"{parallel}.etp", by="if_megatron"),
        f"{megatron}.sequence_parallel": take(f"{parallel}.sequence_parallel", by="if_megatron"),
        f"{megatron}.num_layers_in_first_pipeline_stage": missing("list every stage", f"{parallel}.layers_per_stage"),
        f"{megatron}.num_layers_in_last_pipeline_stage": missing("list every stage", f"{parallel}.layers_per_stage"),
        f"{megatron}.activation_checkpointing": take(f"{role}.recompute", values=CHECKPOINTING, by="if_megatron"),
        f"{megatron}.pipeline_dtype": implied("the role's dtype", f"{role}.dtype"),
        f"{megatron}.moe_router_load_balancing_type": implied(
            "router_aux_coef 0 leaves the balancing loss out", f"{role}.router_aux_coef", expects=("none",)
        ),
        f"{megatron}.freeze_moe_router": missing("routers are trained", off=(None, True, False)),
        f"{megatron}.empty_unused_memory_level": unneeded("set the parts to offload", f"{role}.offload"),
        f"{megatron}.converter_type": unneeded("the model's config.json names its family", f"{role}.model"),
        **each(unneeded(FUSED, "model.impl"), "apply_rope_fusion bias_activation_fusion", theirs=f"{megatron}."),
        f"{megatron}.defer_fp32_logits": unneeded("log-probs never hold all logits in fp32", "kernels"),
        f"{optimizer}.optimizer": implied("AdamW", expects=("adam", "adamw"), otherwise="AdamW is the only optimizer"),
        f"{optimizer}.lr": take(f"{ours}.lr", by="if_megatron"),
        f"{optimizer}.min_lr": take(f"{ours}.lr_schedule.min_ratio", by="min_lr_ratio", note="as a share of lr"),
        f"{optimizer}.weight_decay": take(f"{ours}.weight_decay", by="if_megatron"),
        f"{optimizer}.adam_beta1": take(f"{ours}.betas", by="beta1"),
        f"{optimizer}.adam_beta2": take(f"{ours}.betas", by="beta2"),
        f"{optimizer}.adam_eps": take(f"{ours}.eps", by="if_megatron"),
        **taken("clip_grad use_distributed_optimizer=distributed", theirs=f"{optimizer}.", ours=f"{ours}."),
        f"{optimizer}.bf16": implied("the role's dtype", f"{role}.dtype"),
        f"{optimizer}.fp16": missing(NO_FP16, f"{role}.dtype"),
        f"{optimizer}.params_dtype": implied("main parameters are fp32", f"{role}.dtype"),
        f"{optimizer}.use_precision_aware_optimizer": unneeded("main parameters and moments are fp32"),
        f"{optimizer}.optimizer_cpu_offload": take(
            f"{role}.offload", by="offload_optimizer", note="between updates; AdamW runs on the GPU"
        ),
        f"{optimizer}.sgd_momentum": unneeded("AdamW is the optimizer"),
        f"{optimizer}.optimizer_offload_fraction": unneeded("see optimizer_cpu_offload", f"{role}.offload"),
        f"{optimizer}.overlap_cpu_optimizer_d2h_h2d": unneeded("see optimizer_cpu_offload", f"{role}.offload"),
        f"{megatron}.scheduler.start_weight_decay": unneeded("weight decay is constant", f"{ours}.weight_decay"),
        f"{megatron}.scheduler.end_weight_decay": unneeded("weight decay is constant", f"{ours}.weight_decay"),
        f"{megatron}.fine_grained_activation_offloading": missing("set offload by hand under fsdp2", f"{role}.recompute"),
        f"{megatron}.offload_modules": unneeded("see fine_grained_activation_offloading", f"{role}.recompute"),
        f"{megatron}.moe_router_dtype": implied("routers compute in fp32", f"{role}.router_aux_coef"),
        f"{megatron}.moe_router_bias_update_rate": take(f"{role}.router_bias_rate", by="if_megatron"),
        **{
            f"{megatron}.{name}": unneeded(FUSED, "model.impl")
            for name in (
                *("moe_permute_fusion", "moe_enable_deepep", "moe_token_dispatcher_type", "moe_shared_expert_overlap"),
                *("gradient_accumulation_fusion", "use_fused_weighted_squared_relu"),
            )
        },
        f"{megatron}.moe_per_layer_logging": unneeded("metrics.jsonl has its own", "telemetry.trackers"),
        f"{megatron}.use_gloo_process_groups": unneeded("megappo makes its own groups", "run.num_ranks"),
        f"{megatron}.checkpoint": unneeded("checkpoints are megappo's own", "checkpoint.asynchronous"),
        f"{megatron}.fp8_cfg": unneeded("see fp8_cfg.enabled", f"{role}.dtype"),
        f"{megatron}.scheduler.lr_decay_style": take(
            f"{ours}.lr_schedule.type", values=SCHEDULES, by="if_megatron", otherwise=ONE_SCHEDULE
        ),
        f"{megatron}.scheduler.lr_warmup_iters": take(f"{ours}.warmup_steps", by="if_megatron"),
        f"{megatron}.scheduler.lr_warmup_init": missing("the warm-up starts from 0", off=(None, 0)),
        f"{megatron}.scheduler.lr_decay_iters": unneeded("schedules end with the run", f"{ours}.lr_schedule.type"),
        f"{megatron}.scheduler.weight_decay_incr_style": implied("weight decay is constant", expects=("constant",)),
        f"{megatron}.fp8_cfg.enabled": missing("bf16 or fp32", f"{role}.dtype"),
        f"{megatron}.distributed_data_parallel_config": unneeded("gradients are reduced in fp32, and overlap where they can"),
        f"{megatron}.env_vars": unneeded("set them in the environment"),
        f"{megatron}.peft.enabled": take(*_adapters(role), by="megatron_lora"),
        f"{megatron}.peft": unneeded("see peft.enabled", f"{role}.lora.rank"),
        f"{megatron}.force_reconvert_from_hf": unneeded("checkpoints are read as they are", f"{role}.model"),
        f"{megatron}.recompute_granularity": unneeded("see activation_checkpointing", f"{role}.recompute"),
        f"{megatron}.recompute_modules": unneeded("see activation_checkpointing", f"{role}.recompute"),
        **{
            f"{megatron}.{name}": unneeded(FUSED, "model.impl")
            for name in (
                *("use_fused_linear_logprobs", "fused_linear_logprobs_chunk_size", "cuda_graph_impl", "cuda_graph_modules"),
                "cuda_graph_warmup_steps",
            )
        },
    }


def _adapters(role: str) -> tuple[str, ...]:
    return tuple(f"{role}.lora.{name}" for name in ("rank", "alpha", "dropout", "targets"))


def _dtensor(dtensor: str, role: str) -> dict[str, Rule]:
    # The reference is the policy's model with its first weights.
    parallel, engines = f"{role}.parallel", [f"{role}.engine", *(["reference.engine"] if role == "policy" else [])]
    return {
        f"{dtensor}.enabled": take(*engines, by="fsdp2_if_on"),
        f"{dtensor}.env_vars": unneeded("set them in the environment"),
        f"{dtensor}.automodel_kwargs": unneeded("transformers' own classes", f"{role}.engine"),
        f"{dtensor}.dp_replicate_size": unneeded("sharded by layer over all data-parallel ranks", f"{role}.engine"),
        f"{dtensor}._v2": unneeded("one implementation", f"{role}.engine"),
        f"{dtensor}.custom_parallel_plan": missing("the plan of the model's family is used", f"{parallel}.tp"),
        f"{dtensor}.clear_cache_every_n_steps": unneeded("memory is returned where another role needs it"),
        f"{dtensor}.tensor_parallel_size": take(f"{parallel}.tp", by="if_dtensor"),
        f"{dtensor}.context_parallel_size": take(f"{parallel}.cp", by="if_dtensor"),
        f"{dtensor}.sequence_parallel": take(f"{parallel}.sequence_parallel", by="if_dtensor"),
        f"{dtensor}.activation_checkpointing": take(f"{role}.recompute", values=CHECKPOINTING, by="if_dtensor"),
        f"{dtensor}.cpu_offload": take(f"{role}.offload", by="offload_if_dtensor", note="between passes; AdamW runs on the GPU"),
        f"{dtensor}.lora_cfg.enabled": take(*_adapters(role), by="dtensor_lora"),
        f"{dtensor}.lora_cfg": unneeded("see lora_cfg.enabled", f"{role}.lora.rank"),
    }


_GENERATION = {
    "backend": take("rollout.engine", values=ENGINES | {"megatron": "megatron"}, otherwise="vLLM or the policy's own model"),
    **taken(
        "max_new_tokens=rollout.max_response_tokens temperature=rollout.sampling.temperature top_p=rollout.sampling.top_p",
        "vllm_cfg.tensor_parallel_size=rollout.tp vllm_cfg.gpu_memory_utilization=rollout.memory_share",
        "vllm_kwargs.max_num_seqs=rollout.max_num_seqs",
    ),
    "top_k": take("rollout.sampling.top_k", by="top_k"),
    "val_temperature": missing(OWN_SAMPLING, "trainer.eval_every", off=(None, 0, 0.0)),
    "val_top_p": missing(OWN_SAMPLING, "trainer.eval_every", off=(None, 1, 1.0)),
    "val_top_k": missing(OWN_SAMPLING, "trainer.eval_every"),
    "stop_strings": take("rollout.stop", by="strings"),
    "stop_token_ids": missing("name the strings", "rollout.stop"),
    "vllm_cfg.pipeline_parallel_size": missing("vLLM is cut by tp alone", "rollout.tp", off=(None, 1)),
    "vllm_cfg.expert_parallel_size": missing("vLLM is cut by tp alone", "rollout.tp", off=(None, 1)),
    "vllm_cfg.enforce_eager": take("rollout.vllm_args", values=EAGER),
    "vllm_cfg.precision": take("rollout.dtype", values=DTYPES, otherwise=NO_FP16),
    "vllm_cfg.max_model_len": implied("prompt + response length", "rollout.max_response_tokens"),
    "vllm_cfg.async_engine": implied("a step waits for all its responses", "rollout.engine"),
    "vllm_cfg.kv_cache_dtype": implied("the weights' type", "rollout.dtype", expects=("auto",)),
    **each(unneeded("vLLM's own arguments"), "vllm_kwargs vllm_cfg"),
    "mcore_generation_config": unneeded("megatron generates without arguments", "rollout.engine"),
    "colocated.enabled": implied(
        "sampler and trainer share the ranks", "rollout.engine", expects=(True,), otherwise="sampler and trainer share the ranks"
    ),
    "colocated.resources": unneeded("sampler and trainer share the ranks"),
}

_RUN = {
    **taken(
        "ppo.num_prompts_per_step=data.prompts_per_step ppo.num_generations_per_prompt=rollout.samples_per_prompt",
        "ppo.max_num_epochs=trainer.epochs ppo.max_num_steps=trainer.steps ppo.ppo_epochs=algorithm.ppo_epochs",
        "ppo.val_period=trainer.eval_every ppo.val_at_start=trainer.eval_before ppo.seed=run.seed",
        "ppo.overlong_filtering=algorithm.mask_truncated ppo.adv_estimator.gae_lambda=algorithm.lam",
        "ppo.adv_estimator.gae_gamma=algorithm.gamma ppo.adv_estimator.normalize_advantages=algorithm.whiten_advantages",
        "ppo.adv_estimator.gae_lambda_value=algorithm.lam_value ppo.adv_estimator.gae_lambda_policy=algorithm.lam",
        "loss_fn.ratio_clip_min=algorithm.loss.clip_low loss_fn.ratio_clip_max=algorithm.loss.clip_high",
        "loss_fn.ratio_clip_c=algorithm.loss.dual_clip value_loss_fn.cliprange=critic.loss.clip",
        "checkpointing.save_period=checkpoint.save_every data.max_input_seq_length=data.max_prompt_tokens data.shuffle",
        "data.train.data_path=data.train data.validation.data_path=data.eval",
    ),
    "ppo.critic_ppo_epochs": take("critic.ppo_epochs", by="unless_shared"),
    "ppo.policy_training_start_step": take("critic.warmup.steps", by="positive"),
    "ppo.warm_start_value_checkpoint": missing("megappo's own checkpoints", "critic.checkpoint"),
    "ppo.val_at_end": implied("the last step validates", "trainer.eval_every"),
    "ppo.max_val_samples": take("data.eval_prompts", by="positive"),
    "ppo.val_batch_size": unneeded("the sampler schedules the validation prompts", "rollout.max_num_seqs"),
    "ppo.max_rollout_turns": missing("one turn a prompt", off=(None, 1)),
    "ppo.use_dynamic_sampling": take("algorithm.dynamic_sampling.max_rounds", by="rounds"),
    "ppo.dynamic_sampling_max_gen_batches": unneeded(
        "rounds are smaller than its batches", "algorithm.dynamic_sampling.max_rounds"
    ),
    "ppo.batch_multiplier": missing("every prompt of a step counts", "data.prompts_per_step", off=(None, 1)),
    "ppo.skip_reference_policy_logprobs_calculation": implied("no reference is built without a KL", "algorithm.kl.placement"),
    "ppo.async_ppo.enabled": missing("a step trains on its own responses"),
    "ppo.async_ppo": unneeded("a step trains on its own responses"),
    "ppo.reward_shaping.enabled": take("reward.length_penalty.per_token", "reward.length_penalty.start", by="nemo_overlong"),
    "ppo.reward_shaping": unneeded("see reward_shaping.enabled", "reward.length_penalty.per_token"),
    "ppo.adv_estimator.name": take(
        "algorithm.estimator.type",
        by="estimator",
        values={"gae": "gae", "grpo": "grpo", "reinforce_plus_plus": "reinforce_plus_plus"},
    ),
    "ppo.adv_estimator.length_adaptive_alpha": take("algorithm.lam_length_alpha", by="positive"),
    "ppo.reward_scaling.enabled": take("reward.parts", by="reward_scale", note="as the weights of the parts"),
    "ppo.reward_scaling": unneeded("see reward_scaling.enabled", "reward.parts"),
    "ppo.seq_logprob_error_threshold": missing("a difference stops the run", "rollout.max_prob_diff"),
    "loss_fn.reference_policy_kl_penalty": take("algorithm.kl.placement", "algorithm.kl.coef", by="nemo_kl"),
    "loss_fn.use_kl_in_reward": take("algorithm.kl.placement", "algorithm.kl.coef", by="nemo_kl"),
    "loss_fn.reference_policy_kl_type": take("algorithm.kl.estimator", values=KL_ESTIMATORS),
    "loss_fn.kl_input_clamp_value": missing("the KL is not clamped", off=(None, 20, 20.0)),
    "loss_fn.kl_output_clamp_value": missing("the KL is not clamped", off=(None, 10, 10.0)),
    "loss_fn.token_level_loss": take(
        "algorithm.loss_aggregation", by="aggregation", values={True: "token-mean", False: "seq-mean-token-mean"}
    ),
    **each(missing("PPO's clipped loss", "algorithm.loss.type"), "loss_fn.disable_ppo_ratio loss_fn.force_on_policy_ratio"),
    "loss_fn.use_on_policy_kl_approximation": missing("the KL is over samples of the policy"),
    "loss_fn.use_importance_sampling_correction": take("algorithm.importance_sampling.type", by="nemo_correction"),
    **each(
        unneeded("the switch takes it over", "algorithm.importance_sampling.high"),
        "type ratio ratio_min",
        theirs="loss_fn.truncated_importance_sampling_",
    ),
    "loss_fn.sequence_level_importance_ratios": take("algorithm.loss.type", by="loss", values={True: "gspo", False: "ppo"}),
    "loss_fn.use_cispo": take("algorithm.loss.type", by="loss", values={True: "cispo", False: "ppo"}),
    "loss_fn.positive_example_nll_weight": take("algorithm.positive_nll.coef", by="positive"),
    "value_loss_fn.scale": implied("the critic has its own optimizer", "critic.optimizer.lr"),
    "checkpointing.enabled": implied("a run is saved", "checkpoint.save_every", expects=(True,)),
    "checkpointing.checkpoint_dir": take("run.output_dir", by="run_folder", note="megappo adds run.name"),
    "checkpointing.keep_top_k": take("checkpoint.keep_last", note="the last ones, not the best ones"),
    "checkpointing.metric_name": missing("the last checkpoints are kept", "checkpoint.keep_last"),
    "checkpointing.higher_is_better": unneeded("the last checkpoints are kept", "checkpoint.keep_last"),
    "checkpointing.save_optimizer": take("checkpoint.save_only_model", values={True: False, False: True}),
    "checkpointing.model_save_format": implied("safetensors", "checkpoint.export_at_end"),
    "checkpointing.save_consolidated": unneeded("export/ is whole", "checkpoint.export_at_end"),
    "checkpointing.checkpoint_must_save_by": missing("Slurm's signal saves", "checkpoint.save_every"),
    "policy.generation_batch_size": unneeded("the sampler schedules the prompts", "rollout.max_num_seqs"),
    "policy.logprob_batch_size": unneeded("log-probs use the micro-batches of training", "policy.micro_batch_tokens"),
    "policy.logprob_chunk_size": unneeded("log-probs never hold all logits in fp32", "kernels"),
    "policy.offload_optimizer_for_logprob": take("policy.offload", by="offload_optimizer"),
    "data.num_workers": unneeded("prompts are tokenized once, before the ranks start", "data.train"),
    "data.use_multiple_dataloader": missing("one set of prompts", "data.train"),
    "data.train.dataset_name": missing("a .jsonl or .parquet file, or a name of the hub", "data.train"),
    "data.train.split": implied("data.train names the split: NAME:SUBSET:SPLIT", "data.train"),
    "data.validation.split": implied("data.eval names the split: NAME:SUBSET:SPLIT", "data.eval"),
    "data.validation.dataset_name": missing("a .jsonl or .parquet file, or a name of the hub", "data.eval"),
    "data.default.prompt_file": missing("write it out", "data.prompt_suffix"),
    "data.default.system_prompt_file": missing("write it out", "data.system_prompt"),
    "data.default.processor": unneeded("records are read by their fields", "data.prompt_key"),
    "data.default.env_name": take("reward.parts", by="env_rules"),
    "env": unneeded("rules are functions", "reward.parts"),
    **each(take("telemetry.trackers", by="tracker_flags"), "logger.tensorboard_enabled logger.wandb_enabled logger.mlflow_enabled"),
    "logger.log_dir": unneeded("everything is in the run's directory", "run.output_dir"),
    "logger.num_val_samples_to_print": take("telemetry.trajectories_per_step", by="positive"),
    "logger.swanlab_enabled": missing("TensorBoard, W&B and MLflow", "telemetry.trackers"),
    "logger.wandb.project": take("telemetry.trackers", by="wandb_project"),
    "logger.wandb.name": take("run.name", by="run_name"),
    "logger": unneeded("metrics.jsonl is always written", "telemetry.trackers"),
    "cluster.gpus_per_node": take("run.num_ranks", by="nemo_ranks", note="times cluster.num_nodes"),
    "cluster.num_nodes": take("run.num_ranks", by="nemo_ranks", note="times cluster.gpus_per_node"),
    "cluster": unneeded(RAY, "run.num_ranks"),
    "defaults": Rule(Outcome.MISSING, note=OTHER_FILE, off=(None,), is_file=True),
    "--config": Rule(Outcome.MISSING, note=OTHER_FILE, off=(None,), is_file=True),
}

_RULES = _RUN | {f"policy.generation.{key}": rule for key, rule in _GENERATION.items()}
_RULES |= role_rules("policy", "policy") | role_rules("value", "critic")
_RULES["policy.tokenizer.chat_template_kwargs"] = take("data.template_args", by="template_args")

NEMO_RL = Trainer(
    "NeMo-RL",
    _RULES,
    commands=("run_ppo.py", "run_ppo_math.py"),
    defaults={"ppo.num_generations_per_prompt": 1},
    sections=(
        "policy.tokenizer.chat_template_kwargs",
        *("env", "logger", "cluster", "defaults", "ppo.async_ppo", "ppo.reward_shaping", "ppo.reward_scaling"),
        *(f"policy.generation.{key}" for key in ("vllm_kwargs", "vllm_cfg", "mcore_generation_config", "colocated.resources")),
        *(f"{role}.{key}" for role in ("policy", "value") for key in SECTIONS_OF_ROLE),
    ),
    chosen={"reward.parts": "rules_of_data"},
)
