"""Checks of a run before a model is built, cheap ones first: keys, names, missing files, packages, credentials of trackers
(`check_inputs`, by which every command starts); then architectures and layouts. Imports no torch, which takes seconds. Memory is
checked in `megappo/commands/plan` and data in `data.py`, as a plan for another machine needs no data."""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from megappo.checkpoint.remote import require_protocol
from megappo.config import evaluations
from megappo.config.checks import Device, check_config, live_key_problems, refuse
from megappo.config.errors import ConfigError, about, problem
from megappo.config.evaluations import longest_sequence_tokens
from megappo.config.layout_checks import reads_trajectories, reference_is_base, roles_in_use
from megappo.config.loading import explicit_keys
from megappo.config.reward_sections import RewardConfig
from megappo.config.role_sections import section_of
from megappo.config.run_sections import TelemetryConfig
from megappo.config.schema import TrainConfig
from megappo.config.supervised import AnyConfig, SupervisedConfig
from megappo.config.supervised_step import sampling_config
from megappo.data.sources import find_file
from megappo.data.tokenizers import find_tokenizer
from megappo.models.arch import ModelArch
from megappo.models.implementation import choose_implementation, implementation_notes
from megappo.ops.implementations import Kernels, missing
from megappo.parallel.layout import ParallelLayout
from megappo.rewards.rules import RULES, make_rule
from megappo.rollout.vllm_limits import check_vllm
from megappo.runtime.installed import missing_package
from megappo.runtime.user_code import read_code
from megappo.telemetry.hardware import profile_of
from megappo.telemetry.metrics import Metric, metric_names, names_of_kind, nearest_name, open_beginnings
from megappo.telemetry.trackers.mlflow_run import URI
from megappo.telemetry.trajectories.files import files_by_step
from megappo.trainer.prepare.checkpoint_source import check_critic_sources
from megappo.trainer.prepare.images import check_images
from megappo.trainer.prepare.layouts import check_layouts, check_weights, model_of_tokenizer, read_archs
from megappo.trainer.prepare.reward_model import find_reward_tokenizer

WANDB_SERVER = "https://api.wandb.ai"
_WITHOUT_ACCOUNT = ("offline", "dryrun", "disabled")  # values of WANDB_MODE


def tracker_problem(telemetry: TelemetryConfig) -> str | None:
    """Return the first reason, in one line, why a tracker could not work; None if all can. Makes no network request."""
    # Without a server MLflow writes a database into the run directory.
    needed = {"wandb": ["wandb"], "mlflow": ["mlflow", *([] if os.environ.get(URI) else ["sqlalchemy", "alembic"])]}
    for tracker in telemetry.trackers:
        for package in needed.get(tracker, ()):
            if (how := missing_package(package)) is not None:
                return problem("telemetry.trackers", list(telemetry.trackers), how)
    online = os.environ.get("WANDB_MODE") not in _WITHOUT_ACCOUNT
    if "wandb" in telemetry.trackers and online and not has_wandb_credentials():
        return problem(
            "telemetry.trackers",
            list(telemetry.trackers),
            f"no credentials of W&B for {_wandb_server()}; run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline in the "
            "environment",
        )
    return None


def has_wandb_credentials() -> bool:
    """True if wandb would find a key without asking: in the environment, in .netrc, or in its settings."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or _wandb_setting("api_key"):
        return True
    places = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for place in places:
        try:
            if netrc.netrc(Path(place).expanduser()).authenticators(urlsplit(_wandb_server()).netloc):
                return True
        except (OSError, netrc.NetrcParseError):  # wandb passes over such a file too
            continue
    return False


def _wandb_server() -> str:
    return os.environ.get("WANDB_BASE_URL") or _wandb_setting("base_url") or WANDB_SERVER


def _wandb_setting(name: str) -> str | None:
    folder = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    settings = configparser.ConfigParser(interpolation=None)
    try:
        settings.read(Path(folder).expanduser() / "settings")
        return settings.get("default", name, fallback=None)
    except (OSError, configparser.Error):
        return None


def check_inputs(config: AnyConfig, *, resume: bool = False, shapes_only: bool = False, trains: bool = True) -> None:
    """Refuse a run with a mistake that shows without torch: ValueError, one line, worded as by the check that reads the input.
    resume, shapes_only: as in `check_run`. trains: False for `megappo eval`, which reads no `data.train` and no unused reward."""
    refuse(list(live_key_problems(config)), config, explicit_keys(config))
    check_names(config, need_packages=not shapes_only)
    profile_of(config.telemetry.hardware, None)  # raises if there is none of this name
    archs = read_archs(config)
    if shapes_only:
        return
    check_weights(config, archs)
    if isinstance(config, TrainConfig) and not resume:
        check_critic_sources(config, archs)
    find_tokenizer(config.data.tokenizer or model_of_tokenizer(config))
    if isinstance(config, TrainConfig) and reads_trajectories(config):
        _find("critic.warmup.trajectories", str(config.critic.warmup_trajectories), lambda path: files_by_step(Path(path)))
        return
    if trains:
        _find("data.train", config.data.train)
    if isinstance(config, TrainConfig):
        if config.reward_model.model is not None:
            find_reward_tokenizer(config)
        _check_files(config, trains)
        return
    for name, data in config.held_out.items():
        _find(f"evaluations.{name}" if name else "data.eval", data)
    if (sampled := sampling_config(config)) is not None:
        _check_files(sampled, trains=False)


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
        with about("rollout.environment.path", environment.path):
            read_code(environment.path)
    for prefix, reward in rewards.items():
        for key, part in reward.all_parts.values():
            if part.path is not None:
                with about(f"{prefix}{key}.path", part.path):
                    read_code(part.path)


def _find(key: str, sources: str | Sequence[str], find: Callable[[str], object] = find_file) -> None:
    for source in (sources,) if isinstance(sources, str) else sources:
        try:
            find(source)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None


def _check_progress(config: AnyConfig) -> None:
    """ConfigError, with the nearest name, for a column of the progress line that no metric has."""
    if isinstance(config, SupervisedConfig):
        _require_known(config.telemetry.progress, [*names_of_kind(config.name), *evaluations.held_out_names(config)], ())
        return
    labels = {part.label: part.kind for part in config.reward.parts}
    roles = [*roles_in_use(config), *(["reference"] if reference_is_base(config) else [])]
    names = [*metric_names(list(labels), roles), *evaluations.metric_names(config)]
    names += [Metric.REWARD_PART.of(f"{label}/retries") for label, kind in labels.items() if kind == "url"]
    unknown_ends = open_beginnings([label for label, kind in labels.items() if kind != "name"])  # a built-in rule is one number
    _require_known(config.telemetry.progress, names, unknown_ends)


def _require_known(columns: Sequence[str], names: Sequence[str], unknown_ends: tuple[str, ...]) -> None:
    for name in columns:
        if name not in names and not name.startswith(unknown_ends):
            nearest = nearest_name(name, names)
            hint = f"did you mean {nearest}? " if nearest else ""
            fix = f"this run logs no such metric; {hint}docs/metrics.md lists them"
            raise ConfigError(problem("telemetry.progress", name, fix))


def check_names(config: AnyConfig, *, need_packages: bool) -> None:
    """ConfigError for an unknown metric or reward, and for a missing package that this configuration needs."""
    _check_progress(config)
    if not need_packages:
        return
    if (sampled := sampling_config(config)) is not None and not reads_trajectories(sampled):
        _check_reward(sampled.reward)
        for name, one in sampled.evaluations.items():
            if one.reward is not None:
                try:
                    _check_reward(one.reward)
                except ValueError as error:
                    raise ConfigError(f"evaluations.{name}.{error}") from None
        if sampled.rollout.engine == "vllm" and (how := missing_package("vllm")) is not None:
            raise ConfigError(problem("rollout.engine", "vllm", f"{how}, or set rollout.engine=megatron"))
    if (message := tracker_problem(config.telemetry)) is not None:
        raise ConfigError(message)


def _check_reward(reward: RewardConfig) -> None:
    for label, (_, part) in reward.all_parts.items():
        if part.kind == "name" and label not in RULES:
            make_rule(label)  # raises, with the nearest name
    if "math_verify" in reward.all_parts and (how := missing_package("math-verify")) is not None:
        raise ConfigError(problem("reward.parts", "math_verify", how))


@dataclass(frozen=True)
class CheckedRun:
    """Findings of the checks on a configuration that this world can run, if memory and data suffice. archs, layouts: by role.
    notes: for the plan."""

    archs: Mapping[str, ModelArch]
    layouts: Mapping[str, ParallelLayout]
    notes: tuple[str, ...]


def check_run(config: AnyConfig, world_size: int, device: Device, *, resume: bool = False, shapes_only: bool = False) -> CheckedRun:
    """Check the configuration of a PPO run or of a fine-tuning. ValueError, one line, for the first mistake.
    resume: the run continues from its own checkpoint, so inputs only needed at the start may be missing. shapes_only: weights and
    packages may be missing; config.json of the models is enough."""
    notes = check_config(config, explicit_keys(config), world_size, device)
    check_names(config, need_packages=not shapes_only)
    implementation = choose_implementation(config.model.impl, device)  # raises if it cannot work
    check_kernels(config.kernels, device)
    archs = read_archs(config)
    check_images(config, archs)
    if not shapes_only:
        notes = (*notes, *check_weights(config, archs))
    layouts = check_layouts(config, archs, world_size, implementation)
    sections = {role: section_of(config, role) for role in layouts}
    notes = (*notes, *implementation_notes(config.model.impl, device, sections))
    if (sampled := sampling_config(config)) is not None and sampled.rollout.engine == "vllm" and "policy" in archs:
        # Raises if vLLM cannot serve it.
        check_vllm(archs["policy"], longest_sequence_tokens(sampled), device, sampled.policy.dtype == "fp32")
        asked = sampled.rollout.replay_experts
        if asked in ("policy", "all") and archs["policy"].moe is None:
            fix = f"this {archs['policy'].family} model has no experts; remove it"
            raise ConfigError(problem("rollout.replay_experts", asked, fix))
    # A resumed run takes the critics from its own checkpoint.
    if isinstance(config, TrainConfig) and not resume and not shapes_only:
        check_critic_sources(config, archs)
    if (url := config.checkpoint.remote) is not None and not shapes_only:
        with about_remote(url):  # `preflight.py` contacts the storage
            require_protocol(url)
    return CheckedRun(archs, layouts, notes)


@contextmanager
def about_remote(url: str) -> Iterator[None]:
    """Raise a ValueError of a storage as a ConfigError about `checkpoint.remote`."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(problem("checkpoint.remote", url, f"{error}; correct the URL, or set it to null")) from error


def check_kernels(kernels: Kernels, device: Device) -> None:
    """ConfigError if the implementation that `kernels` names is missing on this kind of device."""
    if (reason := missing(kernels, device)) is not None:
        raise ConfigError(problem("kernels", kernels, f"{reason}; set kernels=auto, or reference"))
