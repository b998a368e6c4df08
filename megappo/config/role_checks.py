"""Rules about one role: frozen weights, the critic's head, warm-ups, and copies of the policy such as its moving average (see
`checks.py`). Keys without effect are in `dead_keys.py`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.config.batch import step_arithmetic, update_schedule
from megappo.config.errors import problem
from megappo.config.layout_checks import only_pretrains, placements_in_use, trained_sections
from megappo.config.role_sections import AnyCriticConfig, CategoricalLossConfig, OptimizerConfig, key_of_role, section_of
from megappo.config.schema import TrainConfig
from megappo.config.supervised import AnyConfig, RewardTrainingConfig, SftDataConfig, SupervisedConfig


def freeze_problems(config: AnyConfig) -> Iterator[str]:
    """Refuse `freeze` beside adapters, which freeze the whole base. Patterns that match no weight: `trainer/prepare/layouts.py`."""
    for role, section in trained_sections(config).items():
        if section.freeze and section.lora is not None:
            key = key_of_role(role)
            fix = f"{key}.lora freezes the whole model already; remove one of the two"
            yield problem(f"{key}.freeze", list(section.freeze), fix)


def _critics(config: TrainConfig) -> list[tuple[str, AnyCriticConfig]]:
    return [(key_of_role(role), critic) for role, critic in config.critics_in_use.items()]


def value_bins_problem(config: TrainConfig) -> str | None:
    """Refuse a categorical head whose range of returns is empty."""
    for role, critic in _critics(config):
        loss = critic.loss
        if isinstance(loss, CategoricalLossConfig) and loss.low >= loss.high:
            return problem(f"{role}.loss.low", loss.low, f"is not below {role}.loss.high {loss.high:g}; exchange them")
    return None


def average_problem(config: TrainConfig) -> str | None:
    """Refuse a moving average of adapters, and evaluations with an average that is not kept."""
    if config.policy.ema is not None and config.policy.lora is not None:
        fix = "policy.lora trains adapters, and only whole weights are averaged; remove one of the two"
        return problem("policy.ema.decay", config.policy.ema.decay, fix)
    if config.trainer.evaluate_with == "ema" and config.policy.ema is None:
        return problem("trainer.evaluate_with", "ema", "policy.ema is not set, so there is no average; set policy.ema.decay")
    return None


def refresh_problem(config: TrainConfig) -> str | None:
    """Refuse to refresh a reference that the policy's weights do not fit, or from an average that is not kept."""
    # The reference may have another engine, layout and ranks than the policy.
    reference, policy = config.reference, config.policy
    refresh = reference.refresh
    if refresh is None or config.algorithm.kl.placement == "none":
        return None
    name, value = ("above_kl", refresh.above_kl) if refresh.every is None else ("every", refresh.every)
    key = f"reference.refresh.{name}"
    if value is None:
        return problem(key, None, "nothing says when to copy; set it or reference.refresh.every, or leave the section out")
    if policy.lora is not None:
        return problem(
            key, value, "policy.lora trains adapters beside a frozen model, which is the reference; remove one of the two"
        )
    if reference.model not in (None, policy.model):
        return problem(key, value, "reference.model is another model than the policy's; leave reference.model out")
    if refresh.source == "ema" and policy.ema is None:
        return problem("reference.refresh.source", "ema", "policy.ema is not set, so there is no average; set policy.ema.decay")
    return None


def critic_head_problem(config: TrainConfig) -> str | None:
    """Refuse to read a value head from a checkpoint that has none."""
    for role, critic in _critics(config):
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


def critic_warmup_problem(config: TrainConfig) -> str | None:
    """Refuse a critic warm-up longer than the run, if `trainer.steps` is set."""
    warmup, steps = config.critic.warmup_steps, config.trainer.steps
    if steps is not None and warmup > steps:
        return problem(
            "critic.warmup.steps", warmup, f"is longer than the run of {steps} steps, so the policy would never train; lower it"
        )
    return None


def critic_trajectories_problem(config: TrainConfig) -> str | None:
    """Refuse recorded trajectories unless the warm-up is the whole run: the steps after it would have to sample."""
    path = config.critic.warmup_trajectories
    if path is None or not config.algorithm.has_critic or only_pretrains(config):
        return None
    steps = config.trainer.steps
    length = f"the run has {steps}" if steps is not None else "trainer.steps is not set"
    fix = (
        f"is for runs whose warm-up is the whole run (critic.warmup.steps is {config.critic.warmup_steps}, {length}); use "
        "megappo pretrain-critic CONFIG --trajectories RUN, and critic.checkpoint in the run that follows"
    )
    return problem("critic.warmup.trajectories", path, fix)


def policy_lr_warmup_problem(config: TrainConfig) -> str | None:
    """Refuse a warm-up of the policy's learning rate that the run does not finish, if `trainer.steps` is set."""
    if config.trainer.steps is None or only_pretrains(config):
        return None
    steps = max(0, config.trainer.steps - config.critic.warmup_steps)  # the critic's warm-up does not update the policy
    total = steps * update_schedule(config, "policy").optimizer_steps(step_arithmetic(config).samples)
    return _warmup_fits("policy.optimizer.warmup_steps", config.policy.optimizer, total)


def critic_lr_warmup_problem(config: TrainConfig) -> str | None:
    """Refuse a warm-up of a critic's learning rate that the run does not finish, if `trainer.steps` is set."""
    if config.trainer.steps is None:
        return None
    for role, critic in config.critics_in_use.items():
        total = config.trainer.steps * update_schedule(config, role).optimizer_steps(step_arithmetic(config).samples)
        if (message := _warmup_fits(f"{key_of_role(role)}.optimizer.warmup_steps", critic.optimizer, total)) is not None:
            return message
    return None


def lonely_offload_problem(config: SupervisedConfig) -> str | None:
    """Refuse to offload what a role that waits for no other needs at any time."""
    section, key = config.learner_section, f"{key_of_role(config.learner)}.offload"
    if len(placements_in_use(config)) == 1 and not set(section.offload) <= {"optimizer"}:
        fix = "fine-tuning has one role, which never waits for another: only optimizer has an effect; use [optimizer], or remove it"
        return problem(key, list(section.offload), fix)
    return None


def conversation_problem(config: SupervisedConfig) -> str | None:
    """Refuse conversations without the template that writes them."""
    data = config.data
    if isinstance(data, SftDataConfig) and data.messages_key is not None and not data.chat_template:
        fix = "data.chat_template is false, and only the template writes conversations; set it to true, or use data.prompt_key"
        return problem("data.messages_key", data.messages_key, fix)
    return None


def learner_lr_warmup_problem(config: SupervisedConfig) -> str | None:
    """Refuse a warm-up of the learning rate that the run does not finish, if `trainer.steps` is set."""
    if config.trainer.steps is None:
        return None
    key = f"{key_of_role(config.learner)}.optimizer.warmup_steps"
    return _warmup_fits(key, config.learner_section.optimizer, config.trainer.steps)


def text_teacher_problem(config: SupervisedConfig) -> str | None:
    """Refuse distillation without a teacher."""
    if config.has_teacher and section_of(config, "teacher").model is None:
        return problem("teacher.model", None, "distillation needs a teacher; name its checkpoint, or remove that section")
    return None


def ties_problem(config: SupervisedConfig) -> str | None:
    """Refuse ties without a probability of them."""
    if isinstance(config, RewardTrainingConfig) and config.data.tie_key is not None and config.loss.tie_margin is None:
        fix = "a tie has no likelihood without loss.tie_margin; set it, such as to 0.5"
        return problem("data.tie_key", config.data.tie_key, fix)
    return None


def _warmup_fits(key: str, optimizer: OptimizerConfig, total: int) -> str | None:
    if optimizer.warmup_steps and optimizer.warmup_steps >= total:
        return problem(key, optimizer.warmup_steps, f"the run has {total} optimizer steps and would never reach lr; lower it")
    return None
