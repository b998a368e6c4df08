"""Keys of verl's PPO (`verl.trainer.main_ppo`; FSDP and Megatron engines)."""

from __future__ import annotations

from megappo.config.foreign.rule import (
    ALWAYS_PACKED,
    AS_VLLM,
    CHECKPOINTING,
    DTYPES,
    EAGER,
    ENGINES,
    FP32_MAIN,
    KL_ESTIMATORS,
    NO_FP16,
    OLD_FSDP,
    ONE_SCHEDULE,
    OTHER_FILE,
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

SAMPLES = "verl counts prompts, megappo samples: times rollout.n"
SEQUENCES = "verl counts sequences, megappo tokens: times prompt + response length"
SAME_BUDGET = "log-probs and values are computed in the micro-batches of training", "policy.micro_batch_tokens"
AGGREGATIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum-norm": "fixed-length",
}
ESTIMATORS = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforce_plus_plus",
    # Group means, then the whole batch whitened.
    "reinforce_plus_plus_baseline": "grpo",
}
OTHER_ESTIMATOR = "there are gae, vtrace, grpo, rloo, reinforce_plus_plus and remax"
CORRECTION = tuple(f"algorithm.importance_sampling.{name}" for name in ("type", "level", "high"))
COMPILED = "kernels are chosen by `kernels` and `model.impl`"


def _optimizer(prefix: str, role: str) -> dict[str, Rule]:
    ours = f"{role}.optimizer"
    return {
        **taken("lr weight_decay betas clip_grad min_lr_ratio=lr_schedule.min_ratio", theirs=f"{prefix}.", ours=f"{ours}."),
        f"{prefix}.lr_warmup_steps": take(f"{ours}.warmup_steps", by="warmup_steps", note="in optimizer steps"),
        f"{prefix}.lr_warmup_steps_ratio": take(f"{ours}.warmup_steps", by="warmup_ratio", note="in optimizer steps"),
        f"{prefix}.warmup_style": take(f"{ours}.lr_schedule.type", values=SCHEDULES, otherwise=ONE_SCHEDULE),
        f"{prefix}.lr_scheduler_type": take(f"{ours}.lr_schedule.type", values=SCHEDULES, otherwise=ONE_SCHEDULE),
        f"{prefix}.lr_decay_style": take(f"{ours}.lr_schedule.type", values=SCHEDULES, otherwise=ONE_SCHEDULE),
        f"{prefix}.min_lr": take(f"{ours}.lr_schedule.min_ratio", by="min_lr_ratio", note="as a share of lr"),
        f"{prefix}.lr_decay_steps": unneeded("schedules end with the run"),
        f"{prefix}.total_training_steps": unneeded("the run's length is trainer.steps or trainer.epochs"),
        f"{prefix}.lr_warmup_init": missing("the warm-up starts from 0"),
        f"{prefix}.num_cycles": missing("cosine is half a period", off=(None, 0.5)),
        f"{prefix}.weight_decay_incr_style": implied("weight decay is constant", expects=("constant",)),
        f"{prefix}.optimizer": implied("AdamW", expects=("adam", "adamw", "AdamW"), otherwise="AdamW is the only optimizer"),
        f"{prefix}.optimizer_impl": unneeded("Megatron-core's optimizer is used"),
        f"{prefix}.override_optimizer_config.optimizer_cpu_offload": take(
            f"{role}.offload", by="offload_optimizer", note="between updates; AdamW runs on the GPU"
        ),
        f"{prefix}.override_optimizer_config": unneeded("Megatron-core's own arguments", f"{ours}.distributed"),
    }


def _megatron(prefix: str, role: str) -> dict[str, Rule]:
    parallel, trained = f"{role}.parallel", role != "reference"
    transformer = f"{prefix}.override_transformer_config"
    rules = {
        **taken(
            "tensor_model_parallel_size=tp pipeline_model_parallel_size=pp virtual_pipeline_model_parallel_size=vpp",
            "context_parallel_size=cp expert_model_parallel_size=ep expert_tensor_parallel_size=etp sequence_parallel",
            theirs=f"{prefix}.",
            ours=f"{parallel}.",
        ),
        f"{prefix}.param_offload": take(f"{role}.offload", by="offload_parameters"),
        f"{prefix}.dtype": take(f"{role}.dtype", values=DTYPES, otherwise=NO_FP16),
        f"{prefix}.use_dist_checkpointing": unneeded("models are read from Hugging Face checkpoints in any layout"),
        f"{prefix}.dist_checkpointing_path": unneeded("models are read from Hugging Face checkpoints in any layout"),
        f"{prefix}.use_mbridge": unneeded("models are read from Hugging Face checkpoints in any layout"),
        f"{prefix}.seed": unneeded("run.seed is the one seed", "run.seed"),
        f"{transformer}.num_layers_in_first_pipeline_stage": missing("list every stage", f"{parallel}.layers_per_stage"),
        f"{transformer}.num_layers_in_last_pipeline_stage": missing("list every stage", f"{parallel}.layers_per_stage"),
        f"{transformer}.attention_backend": unneeded(COMPILED, "model.impl"),
        f"{transformer}.account_for_embedding_in_pipeline_split": missing("list every stage", f"{parallel}.layers_per_stage"),
        f"{transformer}.account_for_loss_in_pipeline_split": missing("list every stage", f"{parallel}.layers_per_stage"),
        f"{transformer}.moe_router_dtype": implied("routers compute in fp32"),
        f"{transformer}.moe_z_loss_coeff": missing("the balancing loss alone", off=(None, 0)),
        **{
            f"{transformer}.{name}": unneeded(COMPILED, "model.impl")
            for name in (
                *("gradient_accumulation_fusion", "moe_permute_fusion", "moe_enable_deepep", "moe_token_dispatcher_type"),
                *("apply_rope_fusion", "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion"),
                *("persist_layer_norm", "moe_grouped_gemm", "moe_shared_expert_overlap", "deallocate_pipeline_outputs"),
            )
        },
        f"{prefix}.vanilla_mbridge": unneeded("models are read from Hugging Face checkpoints in any layout"),
    }
    if trained:
        rules |= {
            f"{prefix}.grad_offload": take(f"{role}.offload", by="offload_gradients"),
            f"{prefix}.optimizer_offload": take(f"{role}.offload", by="offload_optimizer"),
            f"{prefix}.use_distributed_optimizer": take(f"{role}.optimizer.distributed"),
            f"{transformer}.recompute_granularity": take(
                f"{role}.recompute", values={None: "none", "full": "full", "selective": "selective"}
            ),
            f"{transformer}.recompute_method": unneeded("full recomputes every layer", f"{role}.recompute"),
            f"{transformer}.recompute_num_layers": unneeded("full recomputes every layer", f"{role}.recompute"),
            f"{transformer}.recompute_modules": unneeded("selective recomputes core attention", f"{role}.recompute"),
            f"{transformer}.moe_aux_loss_coeff": take(f"{role}.router_aux_coef"),
            f"{transformer}.moe_router_load_balancing_type": implied(
                "the balancing loss is per sequence; router_aux_coef 0 leaves it out", f"{role}.router_aux_coef"
            ),
        }
    return rules


def _fsdp(prefix: str, role: str) -> dict[str, Rule]:
    parts = ("parameters",) if role == "reference" else ("parameters", "gradients", "optimizer")
    kinds = {"param_offload": "parameters", "grad_offload": "gradients", "optimizer_offload": "optimizer"}
    rules = {f"{prefix}.{key}": take(f"{role}.offload", by=f"offload_{part}") for key, part in kinds.items() if part in parts}
    return rules | {
        f"{prefix}.strategy": unneeded("actor.strategy and critic.strategy say it", f"{role}.engine"),
        f"{prefix}.fsdp_size": implied(
            "shards are over all data-parallel ranks", f"{role}.engine", expects=(-1,), otherwise="groups of ranks hold no copies"
        ),
        f"{prefix}.reshard_after_forward": implied(
            "a layer is gathered for its pass alone", f"{role}.engine", expects=(True,), otherwise="layers do not stay gathered"
        ),
        f"{prefix}.offload_policy": take(f"{role}.offload", by="offload_if_on", note="between passes"),
        **each(unneeded(OLD_FSDP), "forward_prefetch use_orig_params", theirs=f"{prefix}."),
        f"{prefix}.wrap_policy.min_num_params": unneeded("every layer is sharded by itself", f"{role}.engine"),
        f"{prefix}.model_dtype": implied(FP32_MAIN, f"{role}.dtype", expects=("fp32", "float32"), otherwise=FP32_MAIN),
        **each(take(f"{role}.dtype", values=DTYPES, otherwise=NO_FP16), "dtype mixed_precision.param_dtype", theirs=f"{prefix}."),
        f"{prefix}.mixed_precision.reduce_dtype": implied(
            "gradients are summed in fp32", expects=("fp32", "float32"), otherwise="gradients are summed in fp32"
        ),
        f"{prefix}.mixed_precision.buffer_dtype": unneeded("buffers keep the type that the model gives them"),
        f"{prefix}.ulysses_sequence_parallel_size": take(f"{role}.parallel.cp", note="context parallelism instead"),
        f"{prefix}.entropy_checkpointing": unneeded("entropy never holds all logits at once"),
        f"{prefix}.entropy_from_logits_with_chunking": unneeded("entropy never holds all logits at once"),
        f"{prefix}.use_torch_compile": unneeded(COMPILED, "kernels"),
        f"{prefix}.forward_only": unneeded("the reference has no optimizer", f"{role}.engine"),
        f"{prefix}.seed": unneeded("run.seed is the one seed", "run.seed"),
    }


def _micro_batches(prefix: str, role: str) -> dict[str, Rule]:
    budget = f"{role}.micro_batch_tokens"
    return {
        f"{prefix}.ppo_micro_batch_size_per_gpu": take(budget, by="tokens_of_sequences", note=SEQUENCES),
        f"{prefix}.ppo_micro_batch_size": missing("the sum over the GPUs, deprecated by verl; set the tokens", budget),
        f"{prefix}.ppo_max_token_len_per_gpu": take(
            budget, by="token_budget", note="of a data-parallel rank, its cp ranks share it"
        ),
        f"{prefix}.use_dynamic_bsz": implied("micro-batches are always filled by tokens", budget),
        f"{prefix}.shuffle": implied("samples of a step are not shuffled again", expects=(False,)),
        f"{prefix}.data_loader_seed": unneeded("run.seed is the one seed", "run.seed"),
    }


def _log_probs(prefix: str) -> dict[str, Rule]:
    names = ("log_prob_micro_batch_size_per_gpu", "log_prob_micro_batch_size", "log_prob_max_token_len_per_gpu")
    return {f"{prefix}.{name}": unneeded(*SAME_BUDGET) for name in (*names, "log_prob_use_dynamic_bsz")}


def _checkpoint(prefix: str) -> dict[str, Rule]:
    return {
        f"{prefix}.save_contents": take("checkpoint.save_only_model", by="save_contents"),
        f"{prefix}.contents": take("checkpoint.save_only_model", by="save_contents"),
        f"{prefix}.load_contents": unneeded("a resumed run reads everything"),
        f"{prefix}.async_save": take("checkpoint.asynchronous"),
    }


DATA = {
    "data.train_files": take("data.train", by="files"),
    "data.val_files": take("data.eval", "evaluations", by="validation_files"),
    **taken(
        "data.train_batch_size=data.prompts_per_step data.max_prompt_length=data.max_prompt_tokens",
        "data.max_response_length=rollout.max_response_tokens data.prompt_key data.tokenizer data.shuffle data.seed=run.seed",
    ),
    "data.val_batch_size": unneeded("the sampler schedules the validation prompts", "rollout.max_num_seqs"),
    "data.gen_batch_size": missing("every prompt of a step is answered once", "data.prompts_per_step"),
    "data.reward_fn_key": missing("one set of rules scores all prompts", "reward.parts", off=(None, "data_source")),
    "data.filter_overlong_prompts": take("data.overlong", by="overlong"),
    "data.filter_overlong_prompts_workers": unneeded("prompts are tokenized once, before the ranks start", "data.overlong"),
    "data.truncation": take("data.overlong", by="truncation", note="prompts are never truncated"),
    "data.train_max_samples": missing("give a shorter file", "data.train"),
    "data.val_max_samples": take("data.eval_prompts", by="positive"),
    "data.validation_shuffle": implied("the held-out prompts keep their order", expects=(False,)),
    **each(unneeded("rewards see text and ids"), "data.return_raw_input_ids data.return_raw_chat data.return_full_prompt"),
    "data.return_multi_modal_inputs": unneeded("tokens carry the images"),
    "data.image_key": take("data.image_key", by="image_key"),
    "data.video_key": missing("text and images alone", off=(None, "videos")),
    "data.apply_chat_template_kwargs": take("data.template_args", by="template_args"),
    **each(missing("prompts are shuffled, or visited in order", "data.shuffle"), "data.sampler.class_path data.sampler.class_name"),
    **each(missing("records are read from .jsonl, .parquet or the hub", "data.train"), "data.custom_cls.name data.custom_cls.path"),
    "data.image_patch_size": unneeded("the model's own"),
    "data.trust_remote_code": missing("no code of a model repository is run"),
    "data.dataloader_num_workers": unneeded("prompts are tokenized once, before the ranks start"),
    "data.use_shm": unneeded("files are read where they are"),
}

ACTOR = {
    "actor_rollout_ref.hybrid_engine": implied("sampler and trainer share the ranks", expects=(True,)),
    "actor_rollout_ref.nccl_timeout": take("run.timeouts.pass_s", note="a pass alone; the host waits run.timeouts.meeting_s"),
    **taken(
        "actor_rollout_ref.model.path=policy.model actor_rollout_ref.model.tokenizer_path=data.tokenizer",
        "actor_rollout_ref.actor.ppo_epochs=algorithm.ppo_epochs actor_rollout_ref.actor.grad_clip=policy.optimizer.clip_grad",
        "actor_rollout_ref.actor.clip_ratio_low=algorithm.loss.clip_low",
        "actor_rollout_ref.actor.clip_ratio_high=algorithm.loss.clip_high",
        "actor_rollout_ref.actor.entropy_coeff=algorithm.entropy.coef actor_rollout_ref.ref.model.path=reference.model",
    ),
    "actor_rollout_ref.model.use_remove_padding": implied(ALWAYS_PACKED),
    "actor_rollout_ref.model.enable_gradient_checkpointing": take("policy.recompute", values=CHECKPOINTING, by="verl_recompute"),
    "actor_rollout_ref.model.enable_activation_offload": missing("set offload by hand under fsdp2", "policy.recompute"),
    "actor_rollout_ref.model.external_lib": missing("no code of others is imported"),
    "actor_rollout_ref.model.trust_remote_code": missing("no code of a model repository is run"),
    "actor_rollout_ref.model.custom_chat_template": missing("the tokenizer's own template is used", "data.chat_template"),
    "actor_rollout_ref.model.use_fused_kernels": unneeded(COMPILED, "kernels"),
    "actor_rollout_ref.model.use_liger": unneeded(COMPILED, "kernels"),
    "actor_rollout_ref.model.use_shm": unneeded("files are read where they are"),
    "actor_rollout_ref.model.lora_rank": take("policy.lora.rank", by="adapter_rank"),
    "actor_rollout_ref.model.lora_alpha": take("policy.lora.alpha", by="with_adapters"),
    "actor_rollout_ref.model.target_modules": take("policy.lora.targets", by="with_adapters"),
    "actor_rollout_ref.model.exclude_modules": missing("name those with adapters", "policy.lora.targets"),
    "actor_rollout_ref.model.override_config": missing("the checkpoint's config.json holds", "policy.model", off=(None, {})),
    "actor_rollout_ref.model.mtp": missing("no further heads are trained", "policy.model", off=(None, False)),
    "actor_rollout_ref.model.torch_dtype": implied(FP32_MAIN, "policy.dtype"),
    "actor_rollout_ref.model.fused_kernel_options": unneeded(COMPILED, "kernels"),
    "actor_rollout_ref.model.lora_adapter_path": missing("merge the adapter into the checkpoint", "policy.model"),
    "actor_rollout_ref.model.lora": missing("set rank and alpha by hand", "policy.lora.rank"),
    # verl's default for the reference is the actor's.
    "actor_rollout_ref.actor.strategy": take("policy.engine", "reference.engine", by="verl_engine"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": take("algorithm.mini_batch_size", by="samples", note=SAMPLES),
    "actor_rollout_ref.actor.clip_ratio": take("algorithm.loss.clip_low", "algorithm.loss.clip_high", by="both_clips"),
    "actor_rollout_ref.actor.clip_ratio_c": take("algorithm.loss.dual_clip", by="verl_dual_clip"),
    "actor_rollout_ref.actor.loss_agg_mode": take("algorithm.loss_aggregation", values=AGGREGATIONS, by="aggregation"),
    "actor_rollout_ref.actor.loss_scale_factor": missing(
        "fixed-length divides by the response length", "algorithm.loss_aggregation"
    ),
    "actor_rollout_ref.actor.tis_imp_ratio_cap": take(
        "algorithm.importance_sampling.type", "algorithm.importance_sampling.high", by="tis_cap"
    ),
    "actor_rollout_ref.actor.freeze_vision_tower": take("policy.freeze", by="frozen_tower"),
    "actor_rollout_ref.actor.calculate_entropy": implied("entropy is a metric of every step", "algorithm.entropy.coef"),
    "actor_rollout_ref.actor.router_replay.mode": missing(
        "experts are chosen anew by the trainer", "rollout.engine", off=(None, "disabled")
    ),
    "actor_rollout_ref.actor.use_kl_loss": take("algorithm.kl.placement", by="kl_placement"),
    "actor_rollout_ref.actor.kl_loss_coef": take("algorithm.kl.coef", by="kl_in_loss"),
    "actor_rollout_ref.actor.kl_loss_type": take("algorithm.kl.estimator", values=KL_ESTIMATORS, by="kl_in_loss"),
    "actor_rollout_ref.actor.policy_loss.loss_mode": take(
        "algorithm.loss.type",
        by="loss",
        values={"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo"},
        otherwise="there are ppo, gspo, cispo and dis",
    ),
    "actor_rollout_ref.actor.use_torch_compile": unneeded(COMPILED, "kernels"),
    "actor_rollout_ref.actor.entropy_checkpointing": unneeded("entropy never holds all logits at once"),
    "actor_rollout_ref.actor.entropy_from_logits_with_chunking": unneeded("entropy never holds all logits at once"),
    "actor_rollout_ref.actor.use_fused_kernels": unneeded(COMPILED, "kernels"),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": take("policy.parallel.cp", note="context parallelism instead"),
    "actor_rollout_ref.actor.load_weight": implied("weights are read", "policy.model", expects=(True,)),
    "actor_rollout_ref.ref.entropy_checkpointing": unneeded("entropy never holds all logits at once"),
    "actor_rollout_ref.ref.entropy_from_logits_with_chunking": unneeded("entropy never holds all logits at once"),
    "actor_rollout_ref.ref.strategy": take("reference.engine", by="verl_engine"),
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": take("reference.parallel.cp", note="context parallelism instead"),
    "actor_rollout_ref.ref.use_torch_compile": unneeded(COMPILED, "kernels"),
    "actor_rollout_ref.ref.load_weight": implied("weights are read", "reference.model", expects=(True,)),
    **_optimizer("actor_rollout_ref.actor.optim", "policy"),
    **_micro_batches("actor_rollout_ref.actor", "policy"),
    **_megatron("actor_rollout_ref.actor.megatron", "policy"),
    **_megatron("actor_rollout_ref.ref.megatron", "reference"),
    **_fsdp("actor_rollout_ref.actor.fsdp_config", "policy"),
    **_fsdp("actor_rollout_ref.ref.fsdp_config", "reference"),
    **_checkpoint("actor_rollout_ref.actor.checkpoint"),
    **_log_probs("actor_rollout_ref.ref"),
}

ROLLOUT = {
    "name": take("rollout.engine", values=ENGINES, otherwise="vLLM generates, inside the ranks of training"),
    "mode": implied("vLLM generates inside the ranks; a step waits for all its responses", "rollout.engine"),
    **taken(
        "tensor_model_parallel_size=rollout.tp gpu_memory_utilization=rollout.memory_share max_num_seqs=rollout.max_num_seqs",
        "n=rollout.samples_per_prompt temperature=rollout.sampling.temperature top_p=rollout.sampling.top_p",
    ),
    **each(missing("vLLM is cut by tp alone", "rollout.tp", off=(None, 1)), "pipeline_model_parallel_size expert_parallel_size"),
    "data_parallel_size": implied("what rollout.tp leaves of the ranks", "rollout.tp"),
    "free_cache_engine": take("rollout.sleep", values={True: "all", False: "none"}),
    "enforce_eager": take("rollout.vllm_args", values=EAGER),
    "max_num_batched_tokens": unneeded("vLLM chooses it", "rollout.max_num_seqs"),
    "max_model_len": implied("prompt + response length", "rollout.max_response_tokens"),
    "dtype": take("rollout.dtype", values=DTYPES, otherwise=NO_FP16),
    "top_k": take("rollout.sampling.top_k", by="top_k"),
    "do_sample": implied("training responses are sampled", "rollout.sampling.temperature", expects=(True,)),
    "ignore_eos": missing("a response ends at its end-of-sequence token", "rollout.stop"),
    "prompt_length": implied("data.max_prompt_length", "data.max_prompt_tokens"),
    "response_length": implied("data.max_response_length", "rollout.max_response_tokens"),
    "load_format": unneeded("shards are pushed into vLLM and compared by checksums", "rollout.engine"),
    **each(unneeded("vLLM's default", "rollout.engine"), "enable_chunked_prefill enable_prefix_caching"),
    "disable_log_stats": unneeded("throughput is a metric of every step", "rollout.engine"),
    "calculate_log_probs": implied("sampler and trainer are compared at every step", "rollout.max_prob_diff"),
    "update_weights_bucket_megabytes": unneeded("shards are pushed one by one", "rollout.engine"),
    "layered_summon": unneeded("shards are pushed one by one", "rollout.engine"),
    "multi_turn.enable": missing("tools are not taken over; name an environment of your own", "rollout.environment.path"),
    "multi_turn.max_assistant_turns": missing("with an environment of your own", "rollout.environment.max_turns"),
    "multi_turn.max_tool_response_length": missing("with an environment of your own", "rollout.environment.observation_tokens"),
    "agent.num_workers": unneeded("the ranks that generate call the environment"),
    **each(
        take("evaluations", by="val_sampling", note="a set of its own beside data.eval"),
        "temperature top_p top_k n do_sample",
        theirs="val_kwargs.",
    ),
    "cudagraph_capture_sizes": unneeded("vLLM's default", "rollout.vllm_args"),
    "multi_stage_wake_up": unneeded("vLLM wakes in stages", "rollout.sleep"),
    "logprobs_mode": implied("log-probs are of the distribution sampled from", "rollout.engine", expects=("processed_logprobs",)),
    "enable_rollout_routing_replay": missing("experts are chosen anew by the trainer", "rollout.engine"),
    "engine_kwargs": unneeded("vLLM's own arguments", "rollout.vllm_args"),
    "checkpoint_engine.update_weights_bucket_megabytes": unneeded("shards are pushed one by one", "rollout.engine"),
    "checkpoint_engine.backend": unneeded("shards are pushed one by one", "rollout.engine"),
    "quantization": missing("weights are sampled from as they are trained", "rollout.dtype"),
    "skip_tokenizer_init": unneeded("vLLM is given ids", "rollout.engine"),
    "mtp": unneeded("no speculative decoding", "rollout.vllm_args"),
    "agent.default_agent_loop": implied("one turn a prompt", "rollout.environment.path", expects=("single_turn_agent",)),
    "multi_turn": unneeded("see multi_turn.enable", "rollout.environment.path"),
    "trace": unneeded("trajectories go to the run's directory", "telemetry.trajectories_every"),
    "prometheus": unneeded("metrics.jsonl is always written", "telemetry.trackers"),
}

CRITIC = {
    "critic.strategy": take("critic.engine", by="verl_engine"),
    "critic.enable": implied("PPO has a critic", "critic.model", expects=(True, None)),
    **taken("critic.model.path=critic.model critic.grad_clip=critic.optimizer.clip_grad critic.cliprange_value=critic.loss.clip"),
    "critic.model.tokenizer_path": implied("the policy's tokenizer", "data.tokenizer"),
    "critic.model.enable_gradient_checkpointing": take("critic.recompute", values=CHECKPOINTING, by="verl_recompute"),
    "critic.model.use_remove_padding": implied(ALWAYS_PACKED, "critic.micro_batch_tokens"),
    "critic.model.trust_remote_code": missing("no code of a model repository is run"),
    "critic.model.external_lib": missing("no code of others is imported"),
    "critic.model.lora_rank": take("critic.lora.rank", by="adapter_rank"),
    "critic.model.lora_alpha": take("critic.lora.alpha", by="with_adapters"),
    "critic.model.target_modules": take("critic.lora.targets", by="with_adapters"),
    "critic.rollout_n": implied("actor_rollout_ref.rollout.n", "rollout.samples_per_prompt"),
    "critic.ppo_mini_batch_size": take("critic.mini_batch_size", by="unless_shared", note=SAMPLES),
    "critic.ppo_epochs": take("critic.ppo_epochs", by="unless_shared"),
    "critic.loss_agg_mode": take("critic.loss_aggregation", by="unless_shared", values=AGGREGATIONS),
    "critic.forward_micro_batch_size_per_gpu": unneeded(SAME_BUDGET[0], "critic.micro_batch_tokens"),
    "critic.forward_micro_batch_size": unneeded(SAME_BUDGET[0], "critic.micro_batch_tokens"),
    "critic.forward_max_token_len_per_gpu": unneeded(SAME_BUDGET[0], "critic.micro_batch_tokens"),
    "critic.ulysses_sequence_parallel_size": take("critic.parallel.cp", note="context parallelism instead"),
    "critic.nccl_timeout": unneeded("run.timeouts holds for all roles", "run.timeouts.pass_s"),
    "critic.load_weight": implied("weights are read", "critic.model", expects=(True,)),
    **_optimizer("critic.optim", "critic"),
    **_micro_batches("critic", "critic"),
    **_megatron("critic.megatron", "critic"),
    **_fsdp("critic.model.fsdp_config", "critic"),
    **_fsdp("critic.fsdp_config", "critic"),
    **_checkpoint("critic.checkpoint"),
}

REST = {
    "algorithm.adv_estimator": take("algorithm.estimator.type", by="estimator", values=ESTIMATORS, otherwise=OTHER_ESTIMATOR),
    **taken(
        "algorithm.gamma algorithm.lam algorithm.kl_ctrl.type=algorithm.kl.controller.type",
        "algorithm.kl_ctrl.target_kl=algorithm.kl.controller.target algorithm.kl_ctrl.horizon=algorithm.kl.controller.horizon",
        "reward_model.forward_max_token_len_per_gpu=reward_model.micro_batch_tokens trainer.total_epochs=trainer.epochs",
        "trainer.total_training_steps=trainer.steps trainer.val_before_train=trainer.eval_before",
        "trainer.max_actor_ckpt_to_keep=checkpoint.keep_last",
    ),
    "algorithm.use_kl_in_reward": take("algorithm.kl.placement", by="kl_placement"),
    "algorithm.kl_penalty": take("algorithm.kl.estimator", values=KL_ESTIMATORS, by="kl_in_reward"),
    "algorithm.kl_ctrl.kl_coef": take("algorithm.kl.coef", by="kl_in_reward"),
    "algorithm.norm_adv_by_std_in_grpo": unneeded("adv_estimator takes it over", "algorithm.estimator.divide_by_group_std"),
    "algorithm.use_pf_ppo": missing("every sample has the same weight", "algorithm.estimator.type"),
    "algorithm.pf_ppo": unneeded("see use_pf_ppo", "algorithm.estimator.type"),
    "algorithm.filter_groups.enable": take("algorithm.dynamic_sampling.max_rounds", by="rounds"),
    "algorithm.filter_groups.metric": implied(
        "scores are compared",
        "algorithm.dynamic_sampling.metric",
        expects=("acc", "score", "seq_reward", "seq_final_reward"),
        otherwise="name the part of the reward that is compared",
    ),
    "algorithm.filter_groups.max_num_gen_batches": unneeded(
        "rounds are smaller than its batches", "algorithm.dynamic_sampling.max_rounds"
    ),
    "algorithm.rollout_correction.rollout_is": take(*CORRECTION, by="verl_correction"),
    "algorithm.rollout_correction.rollout_is_threshold": unneeded("rollout_is takes it over", CORRECTION[2]),
    "algorithm.rollout_correction.rollout_rs": take(CORRECTION[0], by="verl_rejection"),
    "algorithm.rollout_correction.rollout_rs_threshold": unneeded("see rollout_rs", CORRECTION[2]),
    "algorithm.rollout_correction.rollout_is_batch_normalize": missing("weights are not normalised", CORRECTION[0]),
    "algorithm.rollout_correction.bypass_mode": take("algorithm.loss.proximal", by="verl_bypass"),
    "algorithm.rollout_correction.loss_type": unneeded("bypass_mode takes it over", "algorithm.loss.type"),
    "algorithm.rollout_is": missing("an older form of the correction: see tis, mis and icepop", CORRECTION[0]),
    "algorithm.rollout_is_threshold": missing("an older form of the correction: see tis, mis and icepop", CORRECTION[2]),
    "algorithm.rollout_is_threshold_lower": missing("an older form of the correction: see icepop", CORRECTION[0]),
    "algorithm.rollout_is_level": unneeded("see rollout_is_threshold", CORRECTION[1]),
    "algorithm.rollout_is_mode": unneeded("see rollout_is_threshold", CORRECTION[0]),
    "algorithm.rollout_is_veto_threshold": missing("no veto", CORRECTION[0]),
    "reward_model.enable": implied("a reward model is a part of the reward", "reward_model.model"),
    "reward_model.model.path": take("reward_model.model", by="reward_model"),
    "reward_model.reward_manager": missing("scores come from rules", "reward.parts", off=(None, "naive", "dapo")),
    "reward_manager.name": missing("scores come from rules", "reward.parts", off=(None, "naive", "dapo")),
    "reward_model.sandbox_fusion.url": missing("see a part of kind code, which runs programs here", "reward.parts"),
    "reward_model.sandbox_fusion": unneeded("see sandbox_fusion.url", "reward.parts"),
    **{
        f"{prefix}.{name}": rule
        for prefix in ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg")
        for name, rule in {
            "enable": take("reward.length_penalty.per_token", "reward.length_penalty.start", by="verl_overlong"),
            "len": unneeded("enable takes it over", "reward.length_penalty.start"),
            "penalty_factor": unneeded("enable takes it over", "reward.length_penalty.per_token"),
            "log": unneeded("each part of the score is logged", "telemetry.trackers"),
        }.items()
    },
    "reward_model.reward_kwargs.max_resp_len": implied("data.max_response_length", "rollout.max_response_tokens"),
    "reward_model.max_length": unneeded("a response is scored whole", "reward_model.micro_batch_tokens"),
    "reward_model.use_reward_loop": unneeded("rewards are scored on the ranks", "reward.parts"),
    "reward_model.num_workers": unneeded("rewards are scored on the ranks", "reward.parts"),
    "reward_model.enable_resource_pool": unneeded("all models share the ranks of the run", "run.num_ranks"),
    "reward_model.n_gpus_per_node": unneeded("all models share the ranks of the run", "run.num_ranks"),
    "reward_model.nnodes": unneeded("all models share the ranks of the run", "run.num_ranks"),
    "reward_model.rollout": unneeded("the reward model is read, and not sampled from", "reward_model.model"),
    "reward_model.model.input_tokenizer": unneeded("text is handed over, and not ids", "reward_model.tokenizer"),
    "reward_model.model.trust_remote_code": missing("no code of a model repository is run"),
    "reward_model.model.use_remove_padding": implied(ALWAYS_PACKED, "reward_model.micro_batch_tokens"),
    "reward_model.model.fsdp_config": unneeded("see reward_model.engine", "reward_model.engine"),
    "reward_model.micro_batch_size": unneeded("micro-batches are bounded in tokens", "reward_model.micro_batch_tokens"),
    "reward_model.use_dynamic_bsz": implied("micro-batches are always filled by tokens", "reward_model.micro_batch_tokens"),
    "reward_model.launch_reward_fn_async": unneeded("rules are quick", "reward.parts"),
    "reward_model.micro_batch_size_per_gpu": unneeded("micro-batches are bounded in tokens", "reward_model.micro_batch_tokens"),
    "reward_model.strategy": take("reward_model.engine", by="verl_engine"),
    **{
        f"{prefix}custom_reward_function.{name}": rule
        for prefix in ("", "reward.")
        for name, rule in {
            "path": take("reward.parts", by="use_reward_file", note="behind the adapter below"),
            "name": unneeded("path takes it over", "reward.parts"),
            "reward_kwargs": unneeded("path takes them over", "reward.parts"),
        }.items()
    },
    "reward.num_cpus_per_worker": unneeded("rewards are scored on the ranks", "reward.parts"),
    "reward.reward_manager.source": missing("scores come from rules", "reward.parts", off=(None, "register")),
    "reward.reward_manager.module": unneeded("see reward_manager.source", "reward.parts"),
    "reward.compute_score_kwargs": missing(
        "rules have no arguments: gsm8k_flexible is one by itself", "reward.parts", off=(None, {})
    ),
    "trainer.test_freq": take("trainer.eval_every", by="or_zero", note="-1 is 0: never"),
    "trainer.val_only": missing("a run trains", off=(None, False)),
    "trainer.save_freq": take("checkpoint.save_every", by="or_zero", note="-1 is 0: at the end alone"),
    "trainer.critic_warmup": take("critic.warmup.steps", by="positive"),
    "trainer.logger": take("telemetry.trackers", by="trackers", note="lines on the console and metrics.jsonl are always written"),
    "trainer.project_name": take("run.output_dir", by="project", note="the folder of the project's runs"),
    "trainer.experiment_name": take("run.name", by="run_name"),
    "trainer.default_local_dir": take("run.output_dir", by="run_folder", note="megappo adds run.name"),
    "trainer.n_gpus_per_node": take("run.num_ranks", by="verl_ranks", note="times trainer.nnodes"),
    "trainer.nnodes": take("run.num_ranks", by="verl_ranks", note="times trainer.n_gpus_per_node"),
    "trainer.max_critic_ckpt_to_keep": take("checkpoint.keep_last", note="one checkpoint holds both models"),
    "trainer.resume_mode": implied("`megappo train CONFIG --resume` continues a run", "run.name"),
    "trainer.resume_from_path": missing("`megappo train CONFIG --resume` continues the run of this name", "run.name"),
    "trainer.log_val_generations": take("telemetry.trajectories_per_step", by="positive"),
    "trainer.rollout_data_dir": implied("trajectories go to the run's directory", "telemetry.trajectories_every"),
    "trainer.validation_data_dir": implied("trajectories go to the run's directory", "telemetry.trajectories_every"),
    "trainer.balance_batch": implied("sequences are spread over the ranks by their tokens", "policy.micro_batch_tokens"),
    "trainer.use_legacy_worker_impl": unneeded("each role names its engine", "policy.engine"),
    "trainer.device": take("run.device", values={"cuda": "cuda", "cpu": "cpu"}, otherwise="CUDA or CPU"),
    "trainer.default_hdfs_dir": missing("a directory that all ranks see", "run.output_dir"),
    "trainer.del_local_ckpt_after_load": unneeded("checkpoint.keep_last bounds them", "checkpoint.keep_last"),
    "trainer.ray_wait_register_center_timeout": unneeded(RAY, "run.timeouts.start_s"),
    "trainer.esi_redundant_time": unneeded("a signal stops a run with a checkpoint", "checkpoint.save_every"),
    **each(unneeded(RAY, "run.num_ranks"), "ray_kwargs.ray_init.num_cpus ray_init.num_cpus ray_kwargs"),
    "transfer_queue.enable": unneeded(RAY),
    "trainer.profile_steps": take("telemetry.profile_steps", by="strings"),
    "global_profiler.tool": missing("every step has the times of its stages"),
    **each(unneeded("see telemetry.profile_steps", "telemetry.profile_steps"), "global_profiler actor_rollout_ref.profiler"),
    **{
        f"{role}.profiler": unneeded("see telemetry.profile_steps", "telemetry.profile_steps")
        for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout", "critic", "reward_model")
    },
    "--config-name": Rule(
        Outcome.IMPLIED,
        note="verl's own defaults",
        expects=("ppo_trainer", "ppo_megatron_trainer", "ppo_trainer.yaml", "ppo_megatron_trainer.yaml"),
        otherwise=OTHER_FILE,
        is_file=True,
    ),
    **each(unneeded("see --config-name"), "--config-path --config-dir"),
    "defaults": unneeded("verl's own defaults"),
    "hydra": unneeded("the run's directory is named by run.output_dir", "run.output_dir"),
}

_OVERLONG = "reward_kwargs.overlong_buffer_cfg"
# verl moved what is about rewards below `reward`.
_RENAMED = {
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.reward_manager.name": "reward_manager.name",
    "reward.num_workers": "reward_model.num_workers",
    **{
        f"reward.reward_model.{key}": f"reward_model.{key}"
        for key in ("enable", "enable_resource_pool", "n_gpus_per_node", "nnodes", "rollout")
    },
    **{f"{place}sandbox_fusion{key}": f"reward_model.sandbox_fusion{key}" for place in ("", "reward.") for key in ("", ".url")},
    **{f"reward.{_OVERLONG}.{key}": f"reward_model.{_OVERLONG}.{key}" for key in ("enable", "len", "penalty_factor", "log")},
    "reward.reward_kwargs.max_resp_len": "reward_model.reward_kwargs.max_resp_len",
}

VERL = Trainer(
    "verl",
    DATA
    | ACTOR
    | {f"actor_rollout_ref.rollout.{key}": rule for key, rule in ROLLOUT.items()}
    | _log_probs("actor_rollout_ref.rollout")
    | CRITIC
    | REST
    | {new: REST[old] for new, old in _RENAMED.items()},
    commands=("verl.trainer.main_ppo", "main_ppo.py", "verl/trainer/main_ppo"),
    defaults={
        "actor_rollout_ref.model.lora_alpha": 16,
        "critic.model.lora_alpha": 16,
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "data.truncation": "error",
        "data.filter_overlong_prompts": False,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
        "actor_rollout_ref.actor.clip_ratio_c": 3.0,
        "actor_rollout_ref.actor.optim.weight_decay": 0.01,
        "actor_rollout_ref.actor.optim.betas": [0.9, 0.999],
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.actor.kl_loss_coef": 0.001,
        "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        "actor_rollout_ref.rollout.n": 1,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        "actor_rollout_ref.rollout.free_cache_engine": True,
        "critic.optim.lr": 1e-5,
        "critic.optim.weight_decay": 0.01,
        "critic.optim.betas": [0.9, 0.999],
        "critic.model.enable_gradient_checkpointing": True,
        "critic.cliprange_value": 0.5,
        "algorithm.lam": 1.0,
        "algorithm.use_kl_in_reward": False,
        "algorithm.kl_ctrl.kl_coef": 0.001,
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 8,
        "trainer.total_epochs": 30,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
    },
    ignored=("_target_",),
    sections=(
        *("algorithm.pf_ppo", "ray_kwargs", "global_profiler", "actor_rollout_ref.profiler", "defaults", "hydra"),
        *("data.apply_chat_template_kwargs", "custom_reward_function.reward_kwargs"),
        *(f"reward.{key}" for key in ("custom_reward_function.reward_kwargs", "compute_score_kwargs", "reward_manager.module")),
        *(f"reward_model.{key}" for key in ("sandbox_fusion", "rollout", "model.fsdp_config", "profiler")),
        *("reward.reward_model.rollout", "reward.sandbox_fusion", "sandbox_fusion"),
        *(f"actor_rollout_ref.{role}.profiler" for role in ("actor", "ref", "rollout")),
        *(f"actor_rollout_ref.rollout.{key}" for key in ("engine_kwargs", "mtp", "multi_turn", "trace", "prometheus")),
        *("actor_rollout_ref.actor.optim.override_optimizer_config", "critic.optim.override_optimizer_config", "critic.profiler"),
        *(f"actor_rollout_ref.model.{key}" for key in ("mtp", "lora", "fused_kernel_options", "override_config")),
    ),
    steps_of_ppo=True,
    renamed=_RENAMED,
    chosen={**AS_VLLM, "data.answer_key": "verl_answer_key"},
)
