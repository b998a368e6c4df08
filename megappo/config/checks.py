"""Rules about several keys, checked once before anything is built.

A rule returns a message or None and stands in the file of its section (`*_checks.py`). Ranges of single keys are in `schema.py`,
keys without effect in `dead_keys.py`, rules about the model, tokenizer or data in `megappo/trainer/prepare`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from megappo.config.algorithm_checks import (
    adaptive_kl_problem,
    critic_mini_batch_problem,
    critics_problem,
    distillation_problem,
    dynamic_sampling_problem,
    group_problem,
    importance_sampling_problem,
    mini_batch_problem,
    sequence_loss_problem,
    vtrace_problem,
)
from megappo.config.dead_keys import dead_keys
from megappo.config.engine_checks import engine_problems
from megappo.config.errors import ConfigErrors, problem, show
from megappo.config.evaluations import evaluation_problem, generated_problem, held_out_problem
from megappo.config.keys import value_at, value_keys
from megappo.config.layout_checks import role_sections, world_problems
from megappo.config.reward_checks import (
    evaluation_reward_problem,
    length_penalty_problem,
    reward_model_problem,
    training_reward_problem,
)
from megappo.config.role_checks import (
    average_problem,
    conversation_problem,
    critic_head_problem,
    critic_lr_warmup_problem,
    critic_trajectories_problem,
    critic_warmup_problem,
    freeze_problems,
    learner_lr_warmup_problem,
    lonely_offload_problem,
    policy_lr_warmup_problem,
    refresh_problem,
    text_teacher_problem,
    ties_problem,
    value_bins_problem,
)
from megappo.config.role_sections import key_of_role
from megappo.config.rollout_checks import (
    adapter_problem,
    environment_problem,
    greedy_problem,
    logits_problem,
    partial_rollout_problem,
    push_problem,
    push_steps_problem,
    replay_problem,
    seed_problem,
    staleness_problem,
    stop_problem,
    top_k_ids_problem,
    top_k_problem,
)
from megappo.config.run_checks import (
    profile_problem,
    timeout_problems,
    tracker_names_problem,
    trajectory_problem,
    weight_problem,
)
from megappo.config.schema import TrainConfig
from megappo.config.supervised import AnyConfig, SupervisedConfig
from megappo.config.supervised_step import sampling_config
from megappo.config.vllm_args import vllm_args_problem, vllm_temperature_problem

Device = Literal["cpu", "cuda"]
TrainRule = Callable[[TrainConfig], str | None]

TRAIN_RULES: tuple[TrainRule, ...] = (
    mini_batch_problem,
    critics_problem,
    critic_mini_batch_problem,
    group_problem,
    distillation_problem,
    sequence_loss_problem,
    value_bins_problem,
    importance_sampling_problem,
    push_steps_problem,
    push_problem,
    average_problem,
    vtrace_problem,
    refresh_problem,
    dynamic_sampling_problem,
    environment_problem,
    partial_rollout_problem,
    staleness_problem,
    greedy_problem,
    top_k_problem,
    top_k_ids_problem,
    replay_problem,
    logits_problem,
    adapter_problem,
    seed_problem,
    stop_problem,
    vllm_args_problem,
    vllm_temperature_problem,
    adaptive_kl_problem,
    critic_head_problem,
    critic_warmup_problem,
    critic_trajectories_problem,
    policy_lr_warmup_problem,
    critic_lr_warmup_problem,
    training_reward_problem,
    reward_model_problem,
    length_penalty_problem,
    evaluation_reward_problem,
    weight_problem,
    trajectory_problem,
    tracker_names_problem,
    profile_problem,
    evaluation_problem,
)
SUPERVISED_RULES: tuple[Callable[[SupervisedConfig], str | None], ...] = (
    learner_lr_warmup_problem,
    lonely_offload_problem,
    conversation_problem,
    tracker_names_problem,
    profile_problem,
    generated_problem,
    held_out_problem,
    ties_problem,
    text_teacher_problem,
)
# Rules for the answers that a supervised run generates, of the PPO run that would sample them so (`step_like`).
GENERATED_RULES: tuple[TrainRule, ...] = (
    adapter_problem,
    seed_problem,
    stop_problem,
    vllm_args_problem,
    training_reward_problem,
    length_penalty_problem,
)
# Rules about the number of steps.
LENGTH_RULES: tuple[TrainRule, ...] = (
    critic_warmup_problem,
    policy_lr_warmup_problem,
    critic_lr_warmup_problem,
    push_steps_problem,
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
    yield from freeze_problems(config)
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
        found = (rule(counted) for rule in (learner_lr_warmup_problem, profile_problem))
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
