set -x
RUN=llama3-8b
read -r -d '' arguments <<EOT
ignored
EOT
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \
   --ref_num_nodes 1 --ref_num_gpus_per_node 8 \
   --actor_num_nodes 1 \
   --actor_num_gpus_per_node 8 \
   --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --vllm_gpu_memory_utilization 0.5 \
   --colocate_all_models \
   --pretrain OpenRLHF/Llama-3-8b-sft-mixture \
   --reward_pretrain OpenRLHF/Llama-3-8b-rm-700k \
   --save_path /data/$RUN \
   --micro_train_batch_size 8 --train_batch_size 128 --rollout_batch_size=1024 \
   --n_samples_per_prompt 1 --max_epochs 2 --num_episodes 1 --max_samples 100000 \
   --prompt_max_len 1024 --generate_max_len 1024 \
   --zero_stage 3 --bf16 --adam_offload --gradient_checkpointing --packing_samples \
   --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --adam_betas 0.9 0.95 \
   --init_kl_coef 0.01 --kl_estimator k1 --eps_clip_low_high 0.2 0.28 \
   --prompt_data OpenRLHF/prompt-collection-v0.1 --input_key context_messages --apply_chat_template \
   --save_steps -1 --use_wandb $WANDB_TOKEN_OF_NOBODY --wandb_run_name "$RUN at $(date)" \
   --vllm_sync_backend nccl --no_such_flag 3
