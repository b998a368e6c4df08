"""Arguments of Megatron-LM, which slime passes through, and slime's own. Only hints use them."""

from __future__ import annotations

from megappo.config.foreign.rule import Trainer, take

_KEYS = {
    "tensor_model_parallel_size": "policy.parallel.tp",
    "pipeline_model_parallel_size": "policy.parallel.pp",
    "sequence_parallel": "policy.parallel.sequence_parallel",
    "virtual_pipeline_model_parallel_size": "policy.parallel.vpp",
    "num_virtual_stages_per_pipeline_rank": "policy.parallel.vpp",
    "num_layers_per_virtual_pipeline_stage": "policy.parallel.vpp",
    "context_parallel_size": "policy.parallel.cp",
    "expert_model_parallel_size": "policy.parallel.ep",
    "expert_tensor_parallel_size": "policy.parallel.etp",
    "pipeline_model_parallel_layout": "policy.parallel.layers_per_stage",
    "decoder_first_pipeline_num_layers": "policy.parallel.layers_per_stage",
    "decoder_last_pipeline_num_layers": "policy.parallel.layers_per_stage",
    "moe_aux_loss_coeff": "policy.router_aux_coef",
    "router_aux_loss_coef": "policy.router_aux_coef",
    "critic_load": "critic.checkpoint",
    "max_tokens_per_gpu": "policy.micro_batch_tokens",
    "lr": "policy.optimizer.lr",
    "min_lr": "policy.optimizer.lr_schedule.min_ratio",
    "lr_decay_style": "policy.optimizer.lr_schedule.type",
    "lr_warmup_iters": "policy.optimizer.warmup_steps",
    "weight_decay": "policy.optimizer.weight_decay",
    "adam_beta1": "policy.optimizer.betas",
    "adam_beta2": "policy.optimizer.betas",
    "adam_eps": "policy.optimizer.eps",
    "clip_grad": "policy.optimizer.clip_grad",
    "use_distributed_optimizer": "policy.optimizer.distributed",
    "bf16": "policy.dtype",
    "recompute_granularity": "policy.recompute",
    "micro_batch_size": "policy.micro_batch_tokens",
    "global_batch_size": "data.prompts_per_step",
    "train_batch_size": "data.prompts_per_step",
    "train_iters": "trainer.steps",
    "eval_interval": "trainer.eval_every",
    "save": "run.output_dir",
    "save_interval": "checkpoint.save_every",
    "load": "policy.model",
    "data_path": "data.train",
    "tokenizer_model": "data.tokenizer",
    "seed": "run.seed",
    "tensorboard_dir": "telemetry.trackers",
}

MEGATRON = Trainer("Megatron-LM", {name: take(key) for name, key in _KEYS.items()})
