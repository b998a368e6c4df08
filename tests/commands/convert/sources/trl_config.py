"""A run of TRL's PPO; `megappo convert` reads it and never imports it."""

from trl.experimental.ppo import PPOConfig, PPOTrainer

raise SystemExit("executed")

MODEL = "EleutherAI/pythia-1b-deduped"
EPISODES = 10_000
extra = dict(kl_coef=0.05, kl_estimator="k3")
training_args = PPOConfig(
    output_dir="models/minimal/ppo",
    sft_model_path=MODEL,
    reward_model_path=MODEL,
    per_device_train_batch_size=64,
    gradient_accumulation_steps=2,
    num_mini_batches=4,
    num_ppo_epochs=1,
    total_episodes=EPISODES,
    learning_rate=3e-6,
    response_length=53,
    temperature=0.7,
    missing_eos_penalty=1.0,
    stop_token="eos",
    whiten_rewards=False,
    run_name=f"ppo-{MODEL}",
    logging_steps=10,
    report_to="tensorboard",
    seeds=1,
    **extra,
)
trainer = PPOTrainer(training_args)
