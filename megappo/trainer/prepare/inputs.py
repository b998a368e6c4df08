"""Checks that need neither a layout nor the data: rules about keys, names, missing files. Imports no torch, which takes seconds, as
every command starts here. `checks.py` and `data.py` then read the inputs."""

from __future__ import annotations

from pathlib import Path

from megappo.config import evaluations
from megappo.config.checks import rule_problems
from megappo.config.errors import ConfigError, problem
from megappo.config.layout_checks import reads_trajectories, reference_is_base, roles_in_use
from megappo.config.loading import explicit_keys
from megappo.config.reward_sections import RewardConfig
from megappo.config.schema import SftConfig, TrainConfig
from megappo.data.sources import find_file
from megappo.data.tokenizers import find_tokenizer
from megappo.rewards.rules import RULES, make_rule
from megappo.runtime.installed import missing_package
from megappo.runtime.user_code import read_code
from megappo.telemetry.metrics import Metric, metric_names, nearest_name, open_beginnings
from megappo.telemetry.trackers.available import tracker_problem
from megappo.telemetry.trajectories.files import files_by_step
from megappo.trainer.prepare.checkpoint_source import check_critic_sources
from megappo.trainer.prepare.layouts import read_archs
from megappo.trainer.prepare.reward_model import find_reward_tokenizer


def check_inputs(config: TrainConfig | SftConfig, *, resume: bool = False, shapes_only: bool = False, trains: bool = True) -> None:
    """Refuse a run with a mistake that shows without torch: ValueError, one line, worded as by the check that reads the input.
    resume, shapes_only: as in `check_run`. trains: False for `megappo eval`, which reads no `data.train` and no unused reward."""
    # With data.fit_batch the batch sizes are known only once the data is read.
    if isinstance(config, SftConfig) or not config.data.fit_batch:
        for message in rule_problems(config, explicit_keys(config)):
            raise ConfigError(message)
    if isinstance(config, TrainConfig):
        check_names(config, need_packages=not shapes_only)
    archs = read_archs(config, need_weights=not shapes_only, need_heads=False)
    if shapes_only:
        return
    if isinstance(config, TrainConfig) and not resume:
        check_critic_sources(config, archs)
    find_tokenizer(config.data.tokenizer or config.policy.model)
    if isinstance(config, TrainConfig) and reads_trajectories(config):
        _find_trajectories(str(config.critic.warmup_trajectories))
        return
    if trains:
        _find("data.train", config.data.train)
    if isinstance(config, TrainConfig):
        if config.reward_model.model is not None:
            find_reward_tokenizer(config.reward_model)
        _check_files(config, trains)


def _find_trajectories(path: str) -> None:
    try:
        files_by_step(Path(path))
    except ConfigError as error:
        raise ConfigError(f"critic.warmup.trajectories: {error}") from None


def _check_files(config: TrainConfig, trains: bool) -> None:
    if trains and (texts := config.algorithm.ptx) is not None:
        _find("algorithm.ptx.data", texts.data)
    sets = evaluations.evaluation_sets(config)
    for name, one in sets.items():
        _find(f"evaluations.{name}" if name else "data.eval", one.data)
    rewards = {f"evaluations.{name}.": one.reward for name, one in config.evaluations.items() if one.reward is not None}
    if trains or any(one.reward is None for one in sets.values()):
        rewards[""] = config.reward
    if (environment := config.rollout.environment) is not None and environment.path is not None:
        _require_code("rollout.environment.path", environment.path)
    for prefix, reward in rewards.items():
        for key, part in reward.all_parts.values():
            if part.path is not None:
                _require_code(f"{prefix}{key}.path", part.path)


def _find(key: str, source: str) -> None:
    try:
        find_file(source)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def _require_code(key: str, path: str) -> None:
    try:
        read_code(path)
    except ValueError as error:
        raise ConfigError(problem(key, path, str(error))) from None


def _check_progress(config: TrainConfig) -> None:
    """ConfigError, with the nearest name, for a column of the progress line that no metric has."""
    labels = {part.label: part.kind for part in config.reward.parts}
    roles = [*roles_in_use(config), *(["reference"] if reference_is_base(config) else [])]
    names = [*metric_names(list(labels), roles), *evaluations.metric_names(config)]
    names += [Metric.REWARD_PART.of(f"{label}/retries") for label, kind in labels.items() if kind == "url"]
    unknown_ends = open_beginnings([label for label, kind in labels.items() if kind != "name"])  # a built-in rule is one number
    for name in config.telemetry.progress:
        if name not in names and not name.startswith(unknown_ends):
            nearest = nearest_name(name, names)
            hint = f"did you mean {nearest}? " if nearest else ""
            fix = f"this run logs no such metric; {hint}docs/metrics.md lists them"
            raise ConfigError(problem("telemetry.progress", name, fix))


def check_names(config: TrainConfig, *, need_packages: bool) -> None:
    """ConfigError for an unknown metric or reward, and for a missing package that this configuration needs."""
    _check_progress(config)
    if not need_packages:
        return
    if reads_trajectories(config):
        if (message := tracker_problem(config.telemetry)) is not None:
            raise ConfigError(message)
        return
    _check_reward(config.reward)
    for name, one in config.evaluations.items():
        if one.reward is not None:
            try:
                _check_reward(one.reward)
            except ValueError as error:
                raise ConfigError(f"evaluations.{name}.{error}") from None
    if config.rollout.engine == "vllm" and (how := missing_package("vllm")) is not None:
        raise ConfigError(problem("rollout.engine", "vllm", f"{how}, or set rollout.engine=megatron"))
    if (message := tracker_problem(config.telemetry)) is not None:
        raise ConfigError(message)


def _check_reward(reward: RewardConfig) -> None:
    for label, (_, part) in reward.all_parts.items():
        if part.kind == "name" and label not in RULES:
            make_rule(label)  # raises, with the nearest name
    needed = {"math_verify": "math-verify"} if "math_verify" in reward.all_parts else {}
    for key, package in needed.items():
        if (how := missing_package(package)) is not None:
            raise ConfigError(problem("reward.parts", key, how))
