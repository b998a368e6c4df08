"""Rules about several keys, checked once before anything is built. Each rule is one function that returns a message or None.

Ranges of single keys: `schema.py`. Parallel sizes and ranks: `layout_checks.py`. Rules that need the model, the tokenizer or the
data: `megappo/prepare`. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from megappo.config.algorithm_checks import (
    correction_problem,
    critics_problem,
    dynamic_sampling_problem,
    group_problem,
    ptx_problem,
    sequence_loss_problem,
    vtrace_problem,
)
from megappo.config.batch import nearest_divisors, step_arithmetic, update_schedule
from megappo.config.dead_keys import dead_keys
from megappo.config.engine_checks import engine_problems
from megappo.config.errors import ConfigError, problem
from megappo.config.evaluations import config_of_set, evaluation_problem, evaluation_sets
from megappo.config.keys import value_at
from megappo.config.layout_checks import only_pretrains, world_problems
from megappo.config.reward_checks import reward_problem
from megappo.config.reward_sections import RewardConfig
from megappo.config.role_checks import average_problem, freeze_problems, refresh_problem, value_bins_problem
from megappo.config.role_sections import OptimizerConfig
from megappo.config.rollout_checks import environment_problem, push_problem, push_steps_problem, window_problem
from megappo.config.run_sections import RunConfig
from megappo.config.schema import CRITICS, SftConfig, TrainConfig

Device = Literal["cpu", "cuda"]
# Ids recorded for a sampled token: 4 bytes each in the experience, and about 90 in vLLM's Python lists while it generates.
MAX_REPLAYED_TOP_K = 128
MAX_VLLM_RANK = 512  # vLLM 0.32, MaxLoRARanks
MAX_ADAPTIVE_STEP = 0.2  # clip of the error in the adaptive KL controller (Ziegler et al. 2019, section 2.2)


def check_config(config: TrainConfig | SftConfig, explicit: frozenset[str], world_size: int, device: Device) -> list[str]:
    """Raise ConfigError with the first problem; otherwise return notes on written keys that this device does not need.

    `explicit`: the keys that the user wrote (`loading.explicit_keys`). `world_size`: ranks of the run.
    """
    for message in problems(config, explicit, world_size):
        raise ConfigError(message)
    return device_notes(config, explicit, device)


def problems(config: TrainConfig | SftConfig, explicit: frozenset[str], world_size: int) -> Iterator[str]:
    """Every problem, the ones about the world first."""
    yield from world_problems(config, world_size)
    yield from rule_problems(config, explicit)


def rule_problems(config: TrainConfig | SftConfig, explicit: frozenset[str]) -> Iterator[str]:
    """Problems that do not depend on the world."""
    yield from timeout_problems(config.run)
    yield from engine_problems(config)
    yield from freeze_problems(config)
    if isinstance(config, TrainConfig):
        found = (rule(config) for rule in TRAIN_RULES)
    else:
        found = (rule(config) for rule in SFT_RULES)
    yield from (message for message in found if message is not None)
    yield from dead_key_problems(config, explicit)


def timeout_problems(run: RunConfig) -> Iterator[str]:
    """Timeouts that would end a healthy run."""
    limits = run.timeouts
    # The first passes are the slowest (start_s); a rank that waits on the host may wait for a whole pass of another (meeting_s).
    for name, value in (("start_s", limits.start_s), ("meeting_s", limits.meeting_s)):
        if value < limits.pass_s:
            yield problem(
                f"run.timeouts.{name}", value, f"is below run.timeouts.pass_s = {limits.pass_s:g}; raise it, or lower pass_s"
            )
    # A rank that waits in a meeting gives signs of life: the watchdog must be the first to notice one that does not.
    if limits.heartbeat_s >= limits.meeting_s:
        fix = f"is not below run.timeouts.meeting_s = {limits.meeting_s:g}; lower it, or raise meeting_s"
        yield problem("run.timeouts.heartbeat_s", limits.heartbeat_s, fix)


def step_problems(config: TrainConfig, total_steps: int) -> Iterator[str]:
    """Problems of the run's length, once the data has set the number of steps in `trainer.epochs`."""
    counted = config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": total_steps})})
    found = (rule(counted) for rule in (_critic_warmup, _policy_lr_warmup, _critic_lr_warmup, push_steps_problem, _profile_steps))
    yield from (message for message in found if message is not None)


def dead_key_problems(config: TrainConfig | SftConfig, explicit: frozenset[str]) -> Iterator[str]:
    """Keys that the user wrote and that have no effect."""
    for name, because in dead_keys(config).items():
        value = value_at(config, name)
        if name in explicit and value is not None:  # a key written as null states no intent
            yield problem(name, value, f"has no effect: {because}")


# ------------------------------------------------------------------------------------------------------------------ train


def _mini_batches(config: TrainConfig) -> str | None:
    return _mini_batch_divides("algorithm.mini_batch_size", config.algorithm.mini_batch_size, config)


def _critic_mini_batches(config: TrainConfig) -> str | None:
    for role, critic in config.critics.items():
        if critic.mini_batch_size is not None:
            parts = update_schedule(config, role).part.count
            if (message := _mini_batch_divides(f"{role}.mini_batch_size", critic.mini_batch_size, config, parts)) is not None:
                return message
    return None


def _mini_batch_divides(key: str, size: int, config: TrainConfig, parts: int = 1) -> str | None:
    """Problem of a mini-batch of a role that trains on one of `parts` equal parts of the samples."""
    samples = step_arithmetic(config).samples // parts
    if samples % size == 0:
        return None
    product = (
        f"data.prompts_per_step {config.data.prompts_per_step} x rollout.samples_per_prompt {config.rollout.samples_per_prompt}"
        + (f" / {parts} critics" if parts > 1 else "")
    )
    left = f"{samples % size} would be dropped" if size < samples else "not one mini-batch would be full"
    nearest = " or ".join(str(d) for d in nearest_divisors(samples, size))
    return problem(key, size, f"must divide the {samples} samples of a step ({product}): {left}; use {nearest}")


def _greedy_training(config: TrainConfig) -> str | None:
    if config.rollout.sampling.temperature == 0:
        return problem(
            "rollout.sampling.temperature",
            0.0,
            "greedy responses have no probability to train on; use a value > 0 (evaluation is always greedy)",
        )
    return None


def _top_k_zero(config: TrainConfig) -> str | None:
    return (
        problem("rollout.sampling.top_k", 0, "must be >= 1, or -1 for all tokens") if config.rollout.sampling.top_k == 0 else None
    )


def _kept_tokens(config: TrainConfig) -> str | None:
    sampling = config.rollout.sampling
    if not (sampling.replay_kept_tokens and sampling.truncates):
        return None
    without = "or rollout.sampling.replay_kept_tokens: false to train on log-probs of the whole vocabulary"
    if sampling.top_k < 1:  # top_p alone: the nucleus of a flat distribution is most of the vocabulary
        return problem(
            "rollout.sampling.top_p",
            sampling.top_p,
            f"may leave too many tokens to record for replay; set top_k too (1 to {MAX_REPLAYED_TOP_K}), {without}",
        )
    if sampling.top_k > MAX_REPLAYED_TOP_K:
        return problem(
            "rollout.sampling.top_k",
            sampling.top_k,
            f"recording so many ids of every sampled token costs too much; use at most {MAX_REPLAYED_TOP_K}, {without}",
        )
    return None


def _bf16_logits(config: TrainConfig) -> str | None:
    if config.policy.logits_dtype == "fp32" or config.rollout.engine == "megatron":
        return None
    sampler = config.policy.dtype if config.rollout.dtype == "auto" else config.rollout.dtype
    if sampler == "fp32":  # it does not round: rounding on this side alone would add a difference instead of removing one
        return problem(
            "policy.logits_dtype", "bf16", "the logits of vLLM are fp32 (rollout.dtype, policy.dtype); use fp32, or sample in bf16"
        )
    return None


def _separate_adapter(config: TrainConfig) -> str | None:
    lora = config.policy.lora
    if config.rollout.adapter == "merged" or config.rollout.engine == "megatron" or lora is None:
        return None
    if lora.rank > MAX_VLLM_RANK:
        fix = f"vLLM applies adapters up to rank {MAX_VLLM_RANK}; lower it, or set rollout.adapter to merged"
        return problem("policy.lora.rank", lora.rank, fix)
    if config.rollout.sleep == "all":
        return problem("rollout.sleep", "all", "vLLM would lose the frozen weights, which rollout.adapter pushes once; use cache")
    if lora.base_bits is not None:
        fix = "policy.lora.base_bits keeps the frozen weights in 8 bits, which are pushed with the adapters alone; use merged"
        return problem("rollout.adapter", "separate", fix)
    return None


def _seed(config: TrainConfig) -> str | None:
    if config.rollout.engine == "vllm" and config.run.seed >= 1 << 32:  # vLLM seeds numpy, which raises
        return problem("run.seed", config.run.seed, f"vLLM takes seeds up to {(1 << 32) - 1}; use a smaller one")
    return None


def _empty_stop(config: TrainConfig) -> str | None:
    if "" in config.rollout.stop:
        return problem("rollout.stop", list(config.rollout.stop), "an empty string would end every response at once; remove it")
    return None


def _adaptive_placement(config: TrainConfig) -> str | None:
    kl = config.algorithm.kl
    if kl.controller == "adaptive" and kl.placement == "loss":
        return problem(
            "algorithm.kl.controller", "adaptive", "steers the KL in the reward; set placement: reward, or controller: fixed"
        )
    return None


def _adaptive_from_zero(config: TrainConfig) -> str | None:
    kl = config.algorithm.kl
    if kl.placement == "reward" and kl.controller == "adaptive" and kl.coef == 0:
        return problem(
            "algorithm.kl.coef", 0.0, "the adaptive controller multiplies it and 0 stays 0; use a start value such as 0.001"
        )
    return None


def _adaptive_horizon(config: TrainConfig) -> str | None:
    kl, samples = config.algorithm.kl, step_arithmetic(config).samples
    # The controller multiplies by 1 + error * samples / horizon, with the error clipped to +-MAX_ADAPTIVE_STEP.
    least = int(samples * MAX_ADAPTIVE_STEP) + 1
    if kl.placement == "reward" and kl.controller == "adaptive" and kl.horizon < least:
        return problem(
            "algorithm.kl.horizon",
            kl.horizon,
            f"with {samples} samples per step the KL factor could fall to 0 or below; use at least {least}",
        )
    return None


def _k1_in_loss(config: TrainConfig) -> str | None:
    kl = config.algorithm.kl
    # The gradient of log(pi / ref) is that of log pi, whose mean over samples of pi is 0.
    if kl.placement == "loss" and kl.estimator == "k1":
        return problem(
            "algorithm.kl.estimator",
            "k1",
            "its gradient does not depend on the reference, so it does nothing in the loss; use k2 or k3",
        )
    return None


def _critic_head(config: TrainConfig) -> str | None:
    for role, critic in config.critics.items():
        key, value = f"{role}.value_head", critic.value_head
        if value != "checkpoint":
            continue
        if critic.checkpoint is not None and critic.checkpoint_role == "policy":
            return problem(key, value, f"the policy of {role}.checkpoint has no head; use zero or normal")
        if critic.model is None and critic.checkpoint is None:
            return problem(
                key, value, f"needs {role}.model, a reward or critic checkpoint that holds the head; set it, or use zero"
            )
    return None


def _critic_warmup(config: TrainConfig) -> str | None:
    warmup, steps = config.critic.warmup_steps, config.trainer.steps
    if steps is not None and warmup > steps:
        return problem(
            "critic.warmup_steps", warmup, f"is longer than the run of {steps} steps, so the policy would never train; lower it"
        )
    return None


def _warmup_fits(key: str, optimizer: OptimizerConfig, total: int) -> str | None:
    if optimizer.warmup_steps and optimizer.warmup_steps >= total:
        return problem(key, optimizer.warmup_steps, f"the run has {total} optimizer steps and would never reach lr; lower it")
    return None


def _policy_lr_warmup(config: TrainConfig) -> str | None:
    if config.trainer.steps is None or only_pretrains(config):
        return None
    steps = max(0, config.trainer.steps - config.critic.warmup_steps)  # the critic's warm-up does not update the policy
    total = steps * update_schedule(config, "policy").optimizer_steps(step_arithmetic(config).samples)
    return _warmup_fits("policy.optimizer.warmup_steps", config.policy.optimizer, total)


def _critic_lr_warmup(config: TrainConfig) -> str | None:
    if config.trainer.steps is None:
        return None
    for role, critic in config.critics.items():
        total = config.trainer.steps * update_schedule(config, role).optimizer_steps(step_arithmetic(config).samples)
        if (message := _warmup_fits(f"{role}.optimizer.warmup_steps", critic.optimizer, total)) is not None:
            return message
    return None


def _rewards_of_evaluations(config: TrainConfig) -> str | None:
    """Rewards of the sets of `evaluations`, by the rules of the training's."""
    for name, one in config.evaluations.items():
        if one.reward is not None:
            view = config_of_set(config, evaluation_sets(config)[name])
            if (message := _rewards(view) or _length_penalty(view)) is not None:
                return f"evaluations.{name}.{message}"
    return None


def _rewards(config: TrainConfig) -> str | None:
    return reward_problem(config.reward)


def _reward_model(config: TrainConfig) -> str | None:
    """Problem of the part without the section; the section without a part is a key without effect."""
    for key, part in config.reward.all_parts.values():
        if part.model is not None and config.reward_model.model is None:
            return problem(f"{key}.model", part.model, f"{part.model}.model is not set; name its directory there")
    return None


def _length_penalty(config: TrainConfig) -> str | None:
    reward: RewardConfig = config.reward
    longest = config.rollout.max_response_tokens
    if reward.length_penalty > 0 and reward.length_penalty_start >= longest:
        return problem(
            "reward.length_penalty_start",
            reward.length_penalty_start,
            f"no response is longer than rollout.max_response_tokens {longest}; lower it",
        )
    return None


def _weights(config: TrainConfig) -> str | None:
    data = config.data
    if data.weight_key is not None and not data.shuffle:
        fix = "weights draw at random, and the prompts come in the order of the data; set data.shuffle to true, or remove it"
        return problem("data.weight_key", data.weight_key, fix)
    return None


def _trajectories(config: TrainConfig) -> str | None:
    wanted, samples = config.telemetry.trajectories_per_step, step_arithmetic(config).samples
    # The default may exceed a small batch; only a written number is a mistake.
    explicit = "trajectories_per_step" in config.telemetry.model_fields_set
    if explicit and config.telemetry.trajectories_every and wanted > samples:
        return problem("telemetry.trajectories_per_step", wanted, f"a step has {samples} samples; lower it")
    return None


def _trackers(config: TrainConfig) -> str | None:
    named = config.telemetry.trackers
    twice = sorted({name for name in named if named.count(name) > 1})
    return problem("telemetry.trackers", list(named), f"{twice[0]} is there twice; keep one") if twice else None


def _profile_steps(config: TrainConfig) -> str | None:
    asked, steps = config.telemetry.profile_steps, config.trainer.steps
    if len(set(asked)) < len(asked):
        return problem("telemetry.profile_steps", list(asked), "names a step twice; once is enough")
    if steps is not None and asked and max(asked) > steps:
        return problem("telemetry.profile_steps", list(asked), f"the run ends with step {steps}; name earlier ones")
    return None


TrainRule = Callable[[TrainConfig], str | None]

TRAIN_RULES: tuple[TrainRule, ...] = (
    _mini_batches,
    critics_problem,
    _critic_mini_batches,
    group_problem,
    sequence_loss_problem,
    value_bins_problem,
    correction_problem,
    ptx_problem,
    push_steps_problem,
    push_problem,
    average_problem,
    vtrace_problem,
    refresh_problem,
    dynamic_sampling_problem,
    environment_problem,
    window_problem,
    _greedy_training,
    _top_k_zero,
    _kept_tokens,
    _bf16_logits,
    _separate_adapter,
    _seed,
    _empty_stop,
    _adaptive_placement,
    _adaptive_from_zero,
    _adaptive_horizon,
    _k1_in_loss,
    _critic_head,
    _critic_warmup,
    _policy_lr_warmup,
    _critic_lr_warmup,
    _rewards,
    _reward_model,
    _length_penalty,
    _rewards_of_evaluations,
    _weights,
    _trajectories,
    _trackers,
    _profile_steps,
    evaluation_problem,
)


# -------------------------------------------------------------------------------------------------------------------- sft


def _sft_lr_warmup(config: SftConfig) -> str | None:
    return _warmup_fits("policy.optimizer.warmup_steps", config.policy.optimizer, config.trainer.steps)


SFT_RULES: tuple[Callable[[SftConfig], str | None], ...] = (_sft_lr_warmup,)


# ----------------------------------------------------------------------------------------------------------------- device

# Keys that only a GPU needs. One file serves both devices, so on the CPU they are named in a note and not refused.
GPU_KEYS = (
    "rollout.memory_share",
    "rollout.enforce_eager",
    "rollout.model_runner",
    "rollout.async_scheduling",
    "policy.offload.parameters",
    "policy.offload.optimizer",
    "policy.offload_activations",
    *(f"{role}.{key}" for role in CRITICS for key in ("offload.parameters", "offload.optimizer", "offload_activations")),
    "reference.offload.parameters",
    "reward_model.offload.parameters",
)


def device_notes(config: TrainConfig | SftConfig, explicit: frozenset[str], device: Device) -> list[str]:
    """One line per written key without effect on this device."""
    if device == "cuda":
        return []
    return [problem(name, value_at(config, name), "for GPUs, no effect on the CPU") for name in GPU_KEYS if name in explicit]


# ---------------------------------------------------------------------------------------------------------- run directory


LAUNCHES = "launch"
"""Folder of a run directory that `megappo launch` fills before the run itself starts."""
LEASE = "lease.json"
"""File of a run directory that says which process has the run (`resilience/lease.py`)."""


def run_dir_of(run: RunConfig) -> Path:
    """Directory of a run: `output_dir/name`. Raises ConfigError if a link leads out of output_dir."""
    path = Path(run.output_dir) / run.name
    if not path.resolve().is_relative_to(Path(run.output_dir).resolve()):
        raise ConfigError(problem("run.name", run.name, f"{path} is a link that leads out of run.output_dir; choose another name"))
    return path


def check_run_dir(run: RunConfig, resume: bool) -> Path:
    """Check the directory of a run without touching it, and return it.

    A new run needs an absent or empty directory, a resumed run one that holds a run. Raises ConfigError.
    """
    path = run_dir_of(run)
    base = Path(run.output_dir)
    # The nearest directory that exists: the run creates the others.
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise ConfigError(problem("run.output_dir", run.output_dir, f"{existing} is a file; name a directory"))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            problem("run.output_dir", run.output_dir, f"no permission to write in {existing}; choose another directory")
        )
    occupied = holds_run(path)
    if occupied and not resume:
        fix = f"{path} holds another run; use run.name={_free_name(base, run.name)} for a new one, or continue it with --resume"
        raise ConfigError(problem("run.name", run.name, fix))
    if resume and not occupied:
        runs = sorted(entry.name for entry in base.iterdir() if entry.is_dir())[:8] if base.is_dir() else []
        there = f"runs there: {', '.join(runs)}" if runs else "there are no runs there"
        raise ConfigError(
            problem("run.name", run.name, f"{path} holds no run to resume ({there}); leave --resume out or name one of them")
        )
    return path


def holds_run(run_dir: Path) -> bool:
    """True if a run has left anything in its directory."""
    # `megappo launch` writes its folder before the run starts, and the process that starts the ranks its lease.
    return run_dir.is_dir() and any(entry.name != LAUNCHES and not is_lease(entry.name) for entry in run_dir.iterdir())


def is_lease(name: str) -> bool:
    """True of the names that a lease gives to files of a run directory."""
    return name == LEASE or name.startswith(f".{LEASE}.")


def _free_name(base: Path, name: str) -> str:
    return next(f"{name}-{n}" for n in range(2, 10_000) if not (base / f"{name}-{n}").exists())
