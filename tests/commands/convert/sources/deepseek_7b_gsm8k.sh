#!/bin/bash
# deepseek-llm-7b-chat on GSM8K with verl, on one node of 8 GPUs: the 39 keys of verl's public example.
set -x

MODEL=deepseek-ai/deepseek-llm-7b-chat
DATA=${DATA_DIR:-data}/gsm8k
LOGGER="['console']"

sizes=(
    data.train_batch_size=1024
    data.max_prompt_length=512      # tokens
    data.max_response_length=512
    actor_rollout_ref.actor.ppo_mini_batch_size=256
)
rollout="actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.4"

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae algorithm.use_kl_in_reward=False \
    data.train_files=$DATA/train.parquet \
    data.val_files="$DATA/test.parquet" \
    data.filter_overlong_prompts=True data.truncation='error' \
    "${sizes[@]}" \
    actor_rollout_ref.model.path="${MODEL}" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
    actor_rollout_ref.actor.use_kl_loss=False \
    $rollout \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    critic.model.path=$MODEL \
    critic.model.use_remove_padding=False \
    critic.model.enable_gradient_checkpointing=True \
    critic.model.fsdp_config.param_offload=False \
    critic.model.fsdp_config.optimizer_offload=False \
    critic.optim.lr=1e-5 \
    critic.ppo_micro_batch_size_per_gpu=32 \
    trainer.critic_warmup=0 \
    trainer.logger="$LOGGER" \
    trainer.project_name='verl_example_gsm8k' \
    trainer.experiment_name='deepseek_llm_7b_function_rm' \
    trainer.n_gpus_per_node=8 trainer.nnodes=1 \
    trainer.save_freq=20 trainer.test_freq=1 \
    trainer.use_legacy_worker_impl=disable \
    trainer.total_epochs=15 $@ 2>&1 | tee "gsm8k_$(date +%F).log"
