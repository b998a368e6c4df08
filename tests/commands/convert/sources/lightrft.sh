N_SAMPLES=2
TBS=128
EXPERIMENT="lightrft-gsm8k-ppo"
torchrun --nnodes 1 --nproc-per-node 8 examples/gsm8k_geo3k/train_colocate.py \
    --pretrain "/models/qwen" --critic_pretrain "/models/qwen" --fsdp --zero_stage 3 --bf16 \
    --save_path "results/${EXPERIMENT}" --train_batch_size ${TBS} --rollout_batch_size $((TBS * 2)) \
    --micro_train_batch_size 4 --advantage_estimator "gae" --max_epochs 1 --num_episodes 30 \
    --n_samples_per_prompt $N_SAMPLES --prompt_max_len 1024 --generate_max_len 2048 \
    --actor_learning_rate 1e-6 --critic_learning_rate 9e-6 --init_kl_coef 0.01 --kl_estimator "k1" \
    --eps_clip 0.2 --value_clip 0.2 --gamma 1.0 --lambd 0.95 --advantages_norm --l2 1.0e-2 \
    --prompt_data "/data/gsm8k" --input_key prompt --label_key label --pretrain_data /data/pile.jsonl --ptx_coef 0.1 --apply_chat_template \
    --system_prompt 'Think in <think></think>, then \boxed{the answer}. It costs $5.' \
    --engine_type sglang --engine_mem_util 0.6 --engine_tp_size 2 --enable_engine_sleep --save_steps 20 2>&1 | tee log
