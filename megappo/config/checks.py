"""Rules about several keys, checked once before anything is built.

A rule returns a message or None and stands in the file of its section (`*_checks.py`). Ranges of single keys are in `schema.py`,
keys without effect in `dead_keys.py`, rules about the model, tokenizer or data in `megappo/trainer/prepare`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from megappo.config import algorithm_checks, reward_checks, role_checks, rollout_checks
from megappo.config.batch import step_arithmetic
from megappo.config.dead_keys import dead_keys
from megappo.config.engine_checks import engine_problems
from megappo.config.errors import ConfigErrors, problem, show
from megappo.config.evaluations import evaluation_problem, generated_problem, held_out_problem
from megappo.config.keys import value_at, value_keys
from megappo.config.layout_checks import role_sections, world_problems
from megappo.config.role_sections import key_of_role
from megappo.config.run_sections import RunConfig
from megappo.config.schema import TrainConfig
from megappo.config.supervised import AnyConfig, SupervisedConfig
from megappo.config.supervised_step import sampling_config
from megappo.config.vllm_args import vllm_args_problem, vllm_temperature_problem

Device = Literal["cpu", "cuda"]
TrainRule = Callable[[TrainConfig], str | None]


def timeout_problems(run: RunConfig) -> Iterator[str]:
    """Yield problems of timeouts that would end a healthy run."""
    limits = run.timeouts
    # The first passes are the slowest (start_s); a rank that waits on the host may wait for a whole pass of another (meeting_s).
    for name, value in (("start_s", limits.start_s), ("meeting_s", limits.meeting_s)):
        if value < limits.pass_s:
            yield problem(
                f"run.timeouts.{name}", value, f"is below run.timeouts.pass_s = {limits.pass_s:g}; raise it, or lower pass_s"
            )
    # A waiting rank still sends heartbeats: the watchdog must catch a dead one before the meeting times out.
    if limits.heartbeat_s >= limits.meeting_s:
        fix = f"is not below run.timeouts.meeting_s = {limits.meeting_s:g}; lower it, or raise meeting_s"
        yield problem("run.timeouts.heartbeat_s", limits.heartbeat_s, fix)


def weight_problem(config: TrainConfig) -> str | None:
    data = config.data
    if data.weight_key is not None and not data.shuffle:
        fix = "weights draw at random, and the prompts come in the order of the data; set data.shuffle to true, or remove it"
        return problem("data.weight_key", data.weight_key, fix)
    return None


def trajectory_problem(config: TrainConfig) -> str | None:
    wanted, samples = config.telemetry.trajectories_per_step, step_arithmetic(config).samples
    # The default may exceed a small batch; only a written number is a mistake.
    explicit = "trajectories_per_step" in config.telemetry.model_fields_set
    if explicit and config.telemetry.trajectories_every and wanted > samples:
        return problem("telemetry.trajectories_per_step", wanted, f"a step has {samples} samples; lower it")
    return None


def tracker_names_problem(config: AnyConfig) -> str | None:
    named = config.telemetry.trackers
    twice = sorted({name for name in named if named.count(name) > 1})
    return problem("telemetry.trackers", list(named), f"{twice[0]} is there twice; keep one") if twice else None


def profile_problem(config: AnyConfig) -> str | None:
    """Refuse profiled steps that are named twice or come after the end, if `trainer.steps` is set."""
    asked, steps = config.telemetry.profile_steps, config.trainer.steps
    if len(set(asked)) < len(asked):
        return problem("telemetry.profile_steps", list(asked), "names a step twice; once is enough")
    if steps is not None and asked and max(asked) > steps:
        return problem("telemetry.profile_steps", list(asked), f"the run ends with step {steps}; name earlier ones")
    return None


TRAIN_RULES: tuple[TrainRule, ...] = (
    algorithm_checks.mini_batch_problem,
    algorithm_checks.critics_problem,
    algorithm_checks.critic_mini_batch_problem,
    algorithm_checks.group_problem,
    algorithm_checks.distillation_problem,
    algorithm_checks.sequence_loss_problem,
    role_checks.value_bins_problem,
    algorithm_checks.importance_sampling_problem,
    rollout_checks.push_steps_problem,
    rollout_checks.push_problem,
    role_checks.average_problem,
    algorithm_checks.vtrace_problem,
    role_checks.refresh_problem,
    algorithm_checks.dynamic_sampling_problem,
    rollout_checks.environment_problem,
    rollout_checks.partial_rollout_problem,
    rollout_checks.staleness_problem,
    rollout_checks.greedy_problem,
    rollout_checks.top_k_problem,
    rollout_checks.top_k_ids_problem,
    rollout_checks.replay_problem,
    rollout_checks.logits_problem,
    rollout_checks.adapter_problem,
    rollout_checks.seed_problem,
    rollout_checks.stop_problem,
    vllm_args_problem,
    vllm_temperature_problem,
    algorithm_checks.adaptive_kl_problem,
    role_checks.critic_head_problem,
    role_checks.critic_warmup_problem,
    role_checks.critic_trajectories_problem,
    role_checks.policy_lr_warmup_problem,
    role_checks.critic_lr_warmup_problem,
    reward_checks.training_reward_problem,
    reward_checks.reward_model_problem,
    reward_checks.length_penalty_problem,
    reward_checks.evaluation_reward_problem,
    weight_problem,
    trajectory_problem,
    tracker_names_problem,
    profile_problem,
    evaluation_problem,
)
SUPERVISED_RULES: tuple[Callable[[SupervisedConfig], str | None], ...] = (
    role_checks.learner_lr_warmup_problem,
    role_checks.lonely_offload_problem,
    role_checks.conversation_problem,
    tracker_names_problem,
    profile_problem,
    generated_problem,
    held_out_problem,
    role_checks.ties_problem,
    role_checks.text_teacher_problem,
)
# Rules for the answers that a supervised run generates, of the PPO run that would sample them so (`step_like`).
GENERATED_RULES: tuple[TrainRule, ...] = (
    rollout_checks.adapter_problem,
    rollout_checks.seed_problem,
    rollout_checks.stop_problem,
    vllm_args_problem,
    reward_checks.training_reward_problem,
    reward_checks.length_penalty_problem,
)
# Rules about the number of steps.
LENGTH_RULES: tuple[TrainRule, ...] = (
    role_checks.critic_warmup_problem,
    role_checks.policy_lr_warmup_problem,
    role_checks.critic_lr_warmup_problem,
    rollout_checks.push_steps_problem,
    profile_problem,
)

# Keys that only a GPU needs. One file serves both devices, so on the CPU they are named in a note and not refused.
GPU_KEYS = ("rollout.memory_share",)
GPU_KEYS_OF_ROLE = ("offload", "recompute")


def check_config(config: AnyConfig, explicit: frozenset[str], world_size: int, device: Device) -> list[str]:
    """Raise ConfigErrors with all problems; otherwise return notes on written keys that this device does not need. explicit: the
    keys that the user wrote (`loading.explicit_keys`)."""
    refuse([*world_problems(config, world_size), *live_key_problems(config)], config, explicit)
    return device_notes(config, explicit, device)


def refuse(found: Sequence[str], config: AnyConfig, explicit: frozenset[str]) -> None:
    """Raise ConfigErrors with the problems found and the keys without effect, if there are any."""
    if lines := [*found, *_dead_keys_together(config, explicit)]:
        raise ConfigErrors(lines)


def problems(config: AnyConfig, explicit: frozenset[str], world_size: int) -> Iterator[str]:
    """Yield every problem, those about the world size first."""
    yield from world_problems(config, world_size)
    yield from live_key_problems(config)
    yield from dead_key_problems(config, explicit)


def live_key_problems(config: AnyConfig) -> Iterator[str]:
    """Yield the problems of keys that act, whatever the world size."""
    yield from timeout_problems(config.run)
    yield from engine_problems(config)
    yield from role_checks.freeze_problems(config)
    if isinstance(config, TrainConfig):
        found = (rule(config) for rule in TRAIN_RULES)
    else:
        found = [rule(config) for rule in SUPERVISED_RULES]
        if not any(found) and (sampled := sampling_config(config)) is not None:
            found = (rule(sampled) for rule in GENERATED_RULES)
    yield from (message for message in found if message is not None)


def step_problems(config: AnyConfig, total_steps: int) -> Iterator[str]:
    """Yield problems of the run's length, once the data has turned `trainer.epochs` into a number of steps."""
    counted = config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": total_steps})})
    if isinstance(counted, TrainConfig):
        found = (rule(counted) for rule in LENGTH_RULES)
    else:
        found = (rule(counted) for rule in (role_checks.learner_lr_warmup_problem, profile_problem))
    yield from (message for message in found if message is not None)


def dead_key_problems(config: AnyConfig, explicit: frozenset[str]) -> Iterator[str]:
    """Yield a problem for every key that the user wrote and that has no effect."""
    for name, because in _written_dead_keys(config, explicit).items():
        yield problem(name, value_at(config, name), f"has no effect: {because}")


def _written_dead_keys(config: AnyConfig, explicit: frozenset[str]) -> dict[str, str]:
    # A key written as null states no intent.
    return {name: why for name, why in dead_keys(config).items() if name in explicit and value_at(config, name) is not None}


def _dead_keys_together(config: AnyConfig, explicit: frozenset[str]) -> list[str]:
    """Return a line per reason and, for several keys, one with the overrides that clear them all."""
    dead = _written_dead_keys(config, explicit)
    if len(dead) <= 1:
        return list(dead_key_problems(config, explicit))
    by_reason: dict[str, list[str]] = {}
    for name, because in dead.items():
        by_reason.setdefault(because, []).append(f"{name} = {show(value_at(config, name))}")
    lines = [f"{', '.join(keys)}: {'have' if len(keys) > 1 else 'has'} no effect: {why}" for why, keys in by_reason.items()]
    # Without a key that it needs an optional section would be refused, and a choice is expanded again as long as it has a key.
    fields = dict(value_keys(type(config)))
    required = {name for name in dead if name in fields and fields[name].is_required()}
    whole = {name.rpartition(".")[0] for name in dead if name in required or name.endswith(".type")}
    cleared = dict.fromkeys(next((one for one in whole if name.startswith(one + ".")), name) for name in dead)
    return [*lines, f"to clear the keys without effect: {' '.join(f'{name}=null' for name in cleared)}"]


def device_notes(config: AnyConfig, explicit: frozenset[str], device: Device) -> list[str]:
    """Return one line per written key that has no effect on this device."""
    if device == "cuda":
        return []
    of_roles = (f"{key_of_role(role)}.{key}" for role in role_sections(config) for key in GPU_KEYS_OF_ROLE)
    written = {name: value_at(config, name) for name in (*GPU_KEYS, *of_roles) if name in explicit}
    for name, value in written.items():
        if name.endswith(".offload"):  # gradients are freed on the CPU too
            written[name] = [word for word in value if word != "gradients"]
        if name.endswith(".recompute") and value != "offload":
            written[name] = None
    return [problem(name, value, "for GPUs, no effect on the CPU") for name, value in written.items() if value]
