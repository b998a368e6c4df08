"""Keys that have no effect under the other keys of a configuration. Writing one is an error (`checks.py`): whoever sets `kl.target`
under a fixed controller believes that it acts. The dump of a resolved configuration leaves them out, so that it loads again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

from pydantic import BaseModel

from megappo.config.batch import step_arithmetic, update_schedule
from megappo.config.keys import value_keys
from megappo.config.layout_checks import only_pretrains, reference_is_base, role_sections, roles_in_use, scores_with_model
from megappo.config.role_sections import AnyCriticConfig, FrozenConfig, RoleConfig, key_of_role, section_of
from megappo.config.schema import TrainConfig
from megappo.config.supervised import AnyConfig, DpoConfig, RewardTrainingConfig, SftConfig


class Dead(NamedTuple):
    """Keys that have no effect if `when(config)`; `because` finishes the sentence "has no effect: ..."."""

    keys: tuple[str, ...]  # dotted; `name.*` is a whole section
    when: Callable[[Any], bool]
    because: str


def _without_megatron(config: AnyConfig) -> bool:
    return all(section_of(config, role).engine != "megatron" for role in roles_in_use(config))


def _all_sets_say(key: str, config: TrainConfig) -> bool:
    return config.data.eval is None and all(getattr(one, key) is not None for one in config.evaluations.values())


_IMPL = Dead(
    ("model.impl",), _without_megatron, "no role has engine megatron, whose layers it chooses; remove it, or set a role's engine"
)

_OF_TEMPLATE = Dead(
    ("data.system_prompt", "data.template_args"),
    lambda c: not c.data.chat_template,
    "data.chat_template is false; remove it, or use the template",
)

_OF_IMAGES = Dead(
    ("data.image_root", "data.max_image_pixels"),
    lambda c: c.data.image_key is None and not (isinstance(c, TrainConfig) and c.rollout.shown_images),
    "data.image_key is not set, so prompts have no images; remove it, or name their field",
)

_OF_VLLM = Dead(
    (
        "rollout.tp",
        "rollout.dtype",
        "rollout.max_num_seqs",
        "rollout.memory_share",
        "rollout.kv_cache_gib",
        "rollout.sleep",
        "rollout.vllm_args",
        "rollout.adapter",
        "rollout.push_every",
        "rollout.max_staleness",
        "rollout.cache_after_push",
    ),
    lambda c: c.rollout is not None and c.rollout.engine == "megatron",
    "rollout.engine is megatron, which generates with the policy's own shards; remove it, or set engine to vllm",
)

_OF_SAMPLER = (
    Dead(
        ("rollout.adapter",),
        lambda c: c.policy.lora is None,
        "policy.lora is not set, so all weights are pushed; remove it, or set policy.lora",
    ),
    Dead(
        ("rollout.memory_share",),
        lambda c: c.rollout is not None and c.rollout.kv_cache_gib is not None,
        "rollout.kv_cache_gib fixes the size of the KV cache; remove one of the two",
    ),
)

_OF_ROUTE = Dead(
    ("reward.parts",),
    lambda c: c.reward is not None and c.reward.route is not None,
    "reward.route chooses the parts of every response; keep one of the two",
)

_OF_EPOCHS = Dead(
    ("trainer.epochs",), lambda c: c.trainer.steps is not None, "trainer.steps sets the length of the run; remove one of the two"
)

_OF_SAVES = Dead(
    ("checkpoint.keep_last", "checkpoint.asynchronous"),
    lambda c: c.checkpoint.save_every in (0, "never") and c.trainer.keep_best is None,
    "checkpoint.save_every plans no checkpoint before the end; remove it, or set save_every to auto, epoch or steps",
)


# Keys about the values of several critics.
SEVERAL_CRITICS = ("algorithm.value_of_critics", "algorithm.disagreement_mask_ratio", "algorithm.disagreement_entropy_ratio")

TRAIN: tuple[Dead, ...] = (
    _IMPL,
    _OF_IMAGES,
    Dead(
        ("rollout.sampling.replay_top_k_ids",),
        lambda c: not c.rollout.sampling.truncates,
        "neither top_p nor top_k cuts anything; remove it, or set top_k",
    ),
    Dead(
        ("reward_model.*",),
        lambda c: not scores_with_model(c),
        "no part of the reward is the reward model; remove it, or add the part {model: reward_model}",
    ),
    Dead(
        ("reference.*",),
        lambda c: c.algorithm.kl.placement == "none",
        "algorithm.kl.placement is none, so there is no reference model; remove it, or set placement to reward or loss",
    ),
    Dead(
        ("reference.*",),
        reference_is_base,
        "the reference is the policy without its adapters (policy.lora); remove it, or name reference.model to build one",
    ),
    Dead(
        ("teacher.*",),
        lambda c: c.algorithm.distillation is None,
        "algorithm.distillation is not set, so there is no teacher; remove it, or set algorithm.distillation",
    ),
    Dead(
        ("algorithm.lam",),
        lambda c: c.algorithm.lam_length_alpha is not None and c.algorithm.lam_value is not None,
        "lam_length_alpha replaces it for the policy and lam_value for the critic; remove one of the three",
    ),
    Dead(
        (
            "critic.*",
            "critics",
            "algorithm.lam",
            "algorithm.lam_value",
            "algorithm.lam_length_alpha",
            "algorithm.bootstrap_truncated",
            *SEVERAL_CRITICS,
        ),
        lambda c: not c.algorithm.has_critic,
        "algorithm.estimator has no critic; remove it, or set algorithm.estimator to gae or vtrace",
    ),
    Dead(
        SEVERAL_CRITICS,
        lambda c: len(c.critics_in_use) == 1,
        "there is one critic, which agrees with itself; remove it, or add one to critics",
    ),
    Dead(
        ("algorithm.disagreement_entropy_ratio",),
        lambda c: c.algorithm.entropy.type == "bonus" and c.algorithm.entropy.coef == 0,
        "algorithm.entropy.coef is 0, so there is no entropy bonus; remove it, or set it",
    ),
    Dead(
        ("algorithm.gamma",),
        lambda c: not c.algorithm.estimator.discounts,
        "algorithm.estimator does not discount; remove it, or use gae or reinforce_plus_plus",
    ),
    Dead(
        ("algorithm.loss.sequence_advantages",),
        lambda c: c.algorithm.compares_groups,
        "algorithm.estimator gives all tokens of a response one advantage already; remove it",
    ),
    Dead(
        ("algorithm.target_kl",),
        lambda c: update_schedule(c, "policy").optimizer_steps(step_arithmetic(c).samples) <= 1,
        "a step makes one update, and there is no later one to stop; remove it, or raise ppo_epochs, or lower mini_batch_size",
    ),
    _OF_VLLM,
    Dead(
        ("rollout.cache_after_push",),
        lambda c: c.rollout.max_staleness is None,
        "rollout.max_staleness is null, so no push finds a response half drawn; remove it, or set rollout.max_staleness",
    ),
    Dead(
        ("rollout.environment.join",),
        lambda c: c.rollout.environment is not None and c.rollout.max_staleness is not None,
        "with rollout.max_staleness a turn goes on as soon as it is answered; remove it",
    ),
    *_OF_SAMPLER,
    Dead(("data.eval_prompts",), lambda c: c.data.eval is None, "data.eval is not set; remove it, or name the held-out prompts"),
    *(
        Dead(
            (f"trainer.eval_{key}",),
            partial(_all_sets_say, key),
            "data.eval is not set, and every set of evaluations has its own; remove it, or name the held-out prompts",
        )
        for key in ("every", "before")
    ),
    Dead(
        ("trainer.evaluate_with",),
        lambda c: c.data.eval is None and not c.evaluations,
        "there are no held-out prompts; remove it, or name some in data.eval or evaluations",
    ),
    Dead(
        ("policy.ema.*", "reference.refresh.*", "algorithm.ptx.*"),
        only_pretrains,
        "critic.warmup.steps is the whole run, in which the policy does not change; remove it, or lower critic.warmup.steps",
    ),
    Dead(
        ("data.eval", "data.eval_prompts"),
        lambda c: c.data.eval is not None and c.trainer.eval_every == 0 and not c.trainer.eval_before,
        "trainer.eval_every is 0 and eval_before is false, so nothing is evaluated; remove it, or evaluate",
    ),
    _OF_EPOCHS,
    _OF_TEMPLATE,
    _OF_ROUTE,
    _OF_SAVES,
    Dead(
        ("telemetry.trajectories_per_step",),
        lambda c: c.telemetry.trajectories_every == 0,
        "telemetry.trajectories_every is 0; remove it, or set trajectories_every",
    ),
    Dead(
        ("telemetry.histograms_every",),
        lambda c: not c.telemetry.trackers,
        "telemetry.trackers is empty; remove it, or name a tracker",
    ),
)

SUPERVISED: tuple[Dead, ...] = (
    _IMPL,
    _OF_TEMPLATE,
    _OF_EPOCHS,
    _OF_SAVES,
    Dead(
        ("trainer.eval_every", "trainer.eval_before"),
        lambda c: not c.held_out,
        "there is no held-out data; remove it, or name some in data.eval or evaluations",
    ),
    Dead(
        ("data.eval", "evaluations"),
        lambda c: bool(c.held_out) and c.trainer.eval_every == 0 and not c.trainer.eval_before,
        "trainer.eval_every is 0 and eval_before is false, so nothing is evaluated; remove it, or evaluate",
    ),
    Dead(
        ("telemetry.histograms_every", "telemetry.trajectories_every", "telemetry.trajectories_per_step"),
        lambda c: True,
        "only runs that sample have histograms and trajectories; remove it",
    ),
    Dead(("policy.ema.*",), lambda c: True, "supervised training keeps no average of the weights; remove it"),
    Dead(("policy.logits_dtype",), lambda c: True, "supervised training has no sampler to agree with; remove it"),
)
"""Rules of every kind of supervised training; keys that a kind does not have are passed over. A kind adds its own below."""

OF_DEMONSTRATIONS: tuple[Dead, ...] = (
    _OF_IMAGES,
    _OF_VLLM,
    *_OF_SAMPLER,
    _OF_ROUTE,
    Dead(
        ("data.answer_key",),
        lambda c: c.rollout is None,
        "there is no section rollout, so no answer is generated and scored; remove it, or add rollout and reward",
    ),
    Dead(("reward.above_max",), lambda c: True, "it is of PPO's steps, and an evaluation leaves out what has no score; remove it"),
    Dead(
        ("data.image_key",),
        lambda c: (c.data.messages_key or c.data.tokens_key) is not None,
        "images are of prompts with a response; remove it, or use data.prompt_key and data.response_key",
    ),
    Dead(
        ("teacher.*",),
        lambda c: not c.has_teacher,
        "distillation is not set, so there is no teacher; remove it, or set distillation",
    ),
    Dead(
        ("data.prompt_key", "data.response_key", "data.prompt_suffix"),
        lambda c: (c.data.messages_key or c.data.tokens_key) is not None,
        "data.messages_key or data.tokens_key names what is learned; keep one form",
    ),
    Dead(
        ("data.messages_key", "data.chat_template", "data.template_args", "data.system_prompt"),
        lambda c: c.data.tokens_key is not None,
        "data.tokens_key names token ids, which no template writes; keep one form",
    ),
    Dead(
        ("data.turns", "data.tools_key"),
        lambda c: c.data.messages_key is None or c.data.tokens_key is not None,
        "data.messages_key is not set, so there are no conversations; remove it, or name their field",
    ),
    Dead(
        ("data.mask_key",),
        lambda c: c.data.tokens_key is None,
        "data.tokens_key is not set; remove it, or name the field with token ids",
    ),
)

OF_RANKINGS: tuple[Dead, ...] = (
    _OF_IMAGES,
    Dead(
        ("data.chosen_key", "data.rejected_key", "data.margin_key", "data.tie_key"),
        lambda c: c.data.responses_key is not None,
        "data.responses_key names lists of responses, which have no such field; keep one of the two forms",
    ),
    Dead(("loss.tie_margin",), lambda c: c.data.tie_key is None, "data.tie_key is not set, so no pair is a tie; name the field"),
)

_OF_REFERENCE = (*(f"reference.{name}" for name in FrozenConfig.model_fields if name != "parallel"), "reference.parallel.*")

OF_PREFERENCES: tuple[Dead, ...] = (
    _OF_IMAGES,
    Dead(
        ("reference.*",),
        lambda c: not c.reads_reference,
        "the loss has no reference; remove it, or use sigmoid, ipo or kto as loss",
    ),
    Dead(
        _OF_REFERENCE,
        reference_is_base,
        "the reference is policy.model without the adapters of policy.lora; remove it, or set reference.model",
    ),
    Dead(
        _OF_REFERENCE,
        lambda c: not c.has_reference,
        "the policy's own first weights are the reference, passed once; remove it, or set reference.model or every_step",
    ),
    Dead(
        ("data.chosen_key", "data.rejected_key"),
        lambda c: c.loss.type == "kto",
        "kto learns from single responses; remove it, and name data.response_key and label_key",
    ),
    Dead(
        ("data.response_key", "data.label_key"),
        lambda c: c.loss.type != "kto",
        "only kto learns from single responses; remove it, or set loss to kto",
    ),
)

OF_ROLE: tuple[tuple[type[RoleConfig], Dead], ...] = (
    (
        RoleConfig,
        Dead(
            ("parallel.layers_per_stage",),
            lambda role: role.parallel.pp * role.parallel.vpp == 1,
            "{role}.parallel.pp is 1, so one stage holds all layers; remove it, or set pp",
        ),
    ),
    (
        AnyCriticConfig,
        Dead(
            ("checkpoint_role",),
            lambda critic: critic.checkpoint is None,
            "{role}.checkpoint is not set; remove it, or name the checkpoint",
        ),
    ),
    (
        AnyCriticConfig,
        Dead(
            ("value_head",),
            lambda critic: critic.checkpoint is not None and critic.checkpoint_role != "policy",
            "the critic of {role}.checkpoint brings its own head; remove it, or set {role}.checkpoint_role to policy",
        ),
    ),
)
"""Class of a role's section -> rule about keys of that section. `{role}` in the reason stands for the section's name."""

RULES: Mapping[type[BaseModel], tuple[Dead, ...]] = {
    TrainConfig: TRAIN,
    SftConfig: (*SUPERVISED, *OF_DEMONSTRATIONS),
    RewardTrainingConfig: (*SUPERVISED, *OF_RANKINGS),
    DpoConfig: (*SUPERVISED, *OF_PREFERENCES),
}


def dead_keys(config: AnyConfig) -> dict[str, str]:
    """Map the dotted name of every key without effect under this configuration to the reason."""
    found: dict[str, str] = {}
    for rule in RULES[type(config)]:
        if rule.when(config):
            for name in _covered(rule.keys, type(config)):
                found.setdefault(name, rule.because)  # the first matching rule gives the reason
    for role, section in role_sections(config).items():
        key = key_of_role(role)
        rules = [rule for cls, rule in OF_ROLE if isinstance(section, cls) and rule.when(section)]
        if not ("critics" in found and key.startswith("critics.")):  # `critics` is reported as a whole
            for name, because in ((f"{key}.{name}", rule.because) for rule in rules for name in rule.keys):
                found.setdefault(name, because.format(role=key))
    return found


@cache
def _covered(patterns: tuple[str, ...], cls: type[BaseModel]) -> tuple[str, ...]:
    return tuple(name for name, _ in value_keys(cls) if any(_covers(pattern, name) for pattern in patterns))


def _covers(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith(".*") else name == pattern
