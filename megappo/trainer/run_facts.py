"""Identity of a run (configuration, tokenizer, reference, data, rewards): recorded in every checkpoint and compared on resume."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from collections.abc import Collection, Mapping, Sequence
from operator import getitem
from typing import Any

import torch

import megappo
from megappo.checkpoint.identity import first_difference, identity_of_model, notable_changes
from megappo.config.dump import dump_yaml
from megappo.config.errors import ConfigError
from megappo.config.layout_checks import placements_in_use, reference_is_base, role_sections, roles_in_use, trained_sections
from megappo.config.reward_sections import RewardConfig, RewardPart
from megappo.config.role_sections import key_of_role, section_of
from megappo.config.schema import TrainConfig
from megappo.config.supervised import KINDS, AnyConfig, SupervisedConfig
from megappo.config.supervised_step import sampling_config
from megappo.config.yaml_reader import parse_yaml
from megappo.data.examples import Examples
from megappo.data.prompts import PromptSet
from megappo.data.sources import joined_spec
from megappo.parallel.consensus import gathered, warn_once
from megappo.rewards.base import PreparedPart
from megappo.trainer.prepare.data import RunData
from megappo.trainer.prepare.evaluations import EvaluationSet
from megappo.trainer.prepare.hub import commit_of
from megappo.trainer.prepare.layouts import model_paths
from megappo.trainer.prepare.recorded import RecordedData
from megappo.trainer.prepare.run import AnyData
from megappo.trainer.prepare.supervised import SupervisedData

logger = logging.getLogger(__name__)

ORDER_KEYS = (("run", "seed"), ("data", "shuffle"), ("data", "weight_key"))


def run_facts(config: AnyConfig, data: AnyData) -> dict[str, Any]:
    """Return the facts of a run, JSON-compatible. `checkpoint/identity.py` says which may change on resume."""
    in_use = {role: path for role, (_, path) in model_paths(config).items()}
    if reference_is_base(config):
        in_use["reference"] = in_use[config.learner]
    of_kind = _supervised_facts(config, data) if isinstance(config, SupervisedConfig) else _ppo_facts(config, data, in_use)
    return {
        "config": dump_yaml(config),
        "tokenizer": data.tokenizer.fingerprint,
        **{role: identity_of_model(in_use[role]) if role in in_use else None for role in ("reference", "teacher")},
        "lora": {
            role: {"base": identity_of_model(in_use[role]), **section.lora.model_dump(mode="json")}
            for role, section in trained_sections(config).items()
            if section.lora is not None
        },
        "freeze": {role: list(section.freeze) for role, section in trained_sections(config).items() if section.freeze},
        **of_kind,
        "commits": {role: commit for role, path in in_use.items() if (commit := commit_of(path)) is not None},
        "layouts": {name: section.parallel.model_dump() for name, section in role_sections(config).items()},
        "engines": {name: section_of(config, name).engine for name in roles_in_use(config)},
        "ranks": placements_in_use(config),
        "versions": {"megappo": megappo.__version__, "torch": torch.__version__, **_megatron_version()},
    }


def _ppo_facts(config: TrainConfig, data: AnyData, in_use: Mapping[str, str]) -> dict[str, Any]:
    assert not isinstance(data, SupervisedData), "of another kind of run"
    return {
        "critics": list(config.critics_in_use),
        "value_head": config.critic.head_facts if config.algorithm.has_critic else None,
        "further_value_heads": {role: one.head_facts for role, one in config.critics_in_use.items() if one is not config.critic},
        "reward_model": _reward_model_facts(config, data, in_use),
        "data": _recorded_facts(data) if isinstance(data, RecordedData) else _data_facts(config, data),
        "reward": _reward_facts(config.reward, data.reward_parts),
        "environment": _environment_facts(data),
    }


def _reward_facts(reward: RewardConfig, parts: Mapping[str, PreparedPart]) -> dict[str, Any]:
    return {**reward.model_dump(mode="json"), **_recipe_facts(reward), "code": {name: one.sha256 for name, one in parts.items()}}


def _supervised_facts(config: SupervisedConfig, data: AnyData) -> dict[str, Any]:
    assert isinstance(data, SupervisedData), "of a supervised run"

    def source(spec: str | Sequence[str], examples: Examples) -> dict[str, str]:
        return {"path": joined_spec(spec), "sha256": examples.source_sha256}

    settings, sampled = config.data.model_dump(mode="json", exclude=_NO_FORMAT), sampling_config(config)
    held_out = {name: source(config.held_out[name], examples) for name, examples in data.held_out.items()}
    return {
        "kind": config.name,
        "critics": [],
        "value_head": None,
        "reward_model": None,
        "data": {
            "train": source(config.data.train, data.train),
            "eval": held_out.get(""),
            "evaluations": {name: one for name, one in held_out.items() if name},
            "format": settings,
            "ptx": None,
            "template": data.tokenizer.chat_template_sha256 if config.data.chat_template else None,
            **_image_facts(data),
            **data.train.identities(),
        },
        "reward": {"code": {}} if sampled is None else _reward_facts(sampled.reward, data.reward_parts),
        "environment": None,
    }


_NO_FORMAT = {"train", "eval", "answer_key", "tokenizer", "template_args", "max_tokens", "overlong", "shuffle"}
"""Keys of `data` that do not change an example, or that other facts have."""


def _recipe_facts(reward: RewardConfig) -> dict[str, Any]:
    recipes = {label: [_part_facts(part) for part in parts] for label, parts in reward.recipes.items()}
    if reward.route is None:
        return {"parts": recipes[""], "route": None}
    return {"parts": [], "route": {"key": reward.route.key, "recipes": recipes}}


def _reward_model_facts(config: TrainConfig, data: RunData | RecordedData, in_use: Mapping[str, str]) -> dict[str, Any] | None:
    if data.reward_text is None:
        return None
    keys = ("chat_template", "center", "scale", "clip")
    return {
        "model": identity_of_model(in_use["reward_model"]),
        "tokenizer": data.reward_text.tokenizer.fingerprint,
        **{key: getattr(config.reward_model, key) for key in keys},
    }


def _part_facts(part: RewardPart) -> dict[str, Any]:
    """Return a part without the path of its file, which may move: the facts of the code have its content."""
    facts = part.model_dump(mode="json", exclude={"workers", "remote"})  # which change no score
    if part.url is not None:
        facts["send"] = list(part.remote.send)
    return facts if facts.pop("path", None) is None else {"name": part.label, **facts}


def _environment_facts(data: RunData | RecordedData) -> dict[str, Any] | None:
    """Return the environment's settings and the SHA-256 of its code, without path and workers, which may change."""
    if data.environment is None:
        return None
    settings = data.environment.settings.model_dump(mode="json", exclude={"path", "workers"})
    return {**settings, "code": data.environment.function.sha256}


def _data_facts(config: TrainConfig, data: RunData) -> dict[str, Any]:
    def source(spec: str | Sequence[str] | None, prompts: PromptSet | None) -> dict[str, str] | None:
        return {"path": joined_spec(spec), "sha256": prompts.source_sha256} if spec is not None and prompts is not None else None

    keys = ("prompt_key", "answer_key", "chat_template", "system_prompt", "prompt_suffix")
    return {
        "train": source(config.data.train, data.train),
        "eval": source(config.data.eval, data.eval),
        "evaluations": {one.name: _evaluation_facts(one) for one in data.evaluations if one.name},
        "format": {key: getattr(config.data, key) for key in keys},
        "ptx": _text_facts(config, data),
        "template": data.tokenizer.chat_template_sha256 if config.data.chat_template else None,
        **_image_facts(data),
        **data.train.identities(),
    }


def _image_facts(data: RunData | SupervisedData) -> dict[str, str]:
    return {} if data.images is None else {"images": data.images.store.sha256}


def _recorded_facts(data: RecordedData) -> dict[str, Any]:
    samples = data.samples
    return {
        "train": None,
        "eval": None,
        "evaluations": {},
        "ptx": None,
        "trajectories": {"path": samples.path, "sha256": samples.sha256},
    }


def _text_facts(config: TrainConfig, data: RunData) -> dict[str, Any] | None:
    """Return the facts of the texts of `algorithm.ptx`, whose cursor depends on them; None without."""
    ptx = config.algorithm.ptx
    if data.ptx is None or ptx is None:
        return None
    path, sha256 = joined_spec(ptx.data), data.ptx.texts.source_sha256
    return {"path": path, "sha256": sha256, "text_key": ptx.text_key, "max_tokens": ptx.max_tokens}


def _evaluation_facts(one: EvaluationSet) -> dict[str, Any]:
    settings = one.settings.model_dump(mode="json", exclude={"data", "reward", "every", "before"})
    reward = None if one.reward is None else _reward_facts(one.reward, one.reward_parts)
    return {"path": joined_spec(one.settings.data), "sha256": one.prompts.source_sha256, "settings": settings, "reward": reward}


def require_equal_data(facts: Mapping[str, Any]) -> None:
    """Check that all ranks read the same data, hub models and user code, which may be copies on local disks. Collective over the
    world. ValueError on all ranks if one differs from rank 0."""
    compared = {name: facts[name] for name in ("commits", "environment", "data")}
    first, *others = gathered({**compared, "reward": {"code": facts["reward"]["code"]}})
    for rank, theirs in enumerate(others, 1):
        if theirs == first:
            continue
        what = f"keys of data, evaluations or rollout.environment: rank 0 has others than rank {rank}"
        if (difference := first_difference(_of_copies(first), _of_copies(theirs))) is not None:
            what = "{}: rank 0 has {}, rank {rank} has {}".format(*difference, rank=rank)
        raise ValueError(
            f"{what}; put one copy on a file system that all nodes share (HF_HOME too), and install the same packages on all nodes"
        )


def _of_copies(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ranks may read from copies of their own, by the key of the configuration that names it."""
    data, environment = facts["data"], facts["environment"]
    sources = {f"data.{name}": data[name] for name in ("train", "eval")}
    sources |= {f"evaluations.{name}.data": one for name, one in data["evaluations"].items()}
    rewards = {f"evaluations.{name}.reward": one.get("reward") for name, one in data["evaluations"].items()}
    rewards["reward"] = facts["reward"]
    return {
        **{f"{role}.model's commit": commit for role, commit in facts["commits"].items()},
        **{f"{key}: code of {name}": sha256 for key, one in rewards.items() if one for name, sha256 in one["code"].items()},
        "rollout.environment's code": None if environment is None else environment["code"],
        **{key: source and {name: source[name] for name in ("path", "sha256")} for key, source in sources.items()},
        "critic.warmup.trajectories": data.get("trajectories"),
        "algorithm.ptx.data": data["ptx"],
        **{f"data.train as prompts ({key})": data.get(key) for key in ("template", "images", "kept", "tokens")},
    }


def require_same_order(saved: Mapping[str, Any], facts: Mapping[str, Any], name: str) -> None:
    """ConfigError, one line, if a key that determines the order of the prompts differs from the checkpoint `name`."""
    # The loader compares its state too, but only once the models are built and the record of the last end is removed.
    then, now = (parse_yaml(one["config"], name)[0] for one in (saved, facts))
    for section, key in ORDER_KEYS:
        old, new = then[section], now[section]
        if old.get(key) != new.get(key):
            changed = f"{section}.{key} was {old[key]} at {name}, and is {new[key]}"
            raise ConfigError(f"{changed}: the prompts would come in another order; restore it, or start a new run")


def require_same_models(held: Collection[str], config: AnyConfig, name: str) -> None:
    """ConfigError, one line, if only one of this run and the checkpoint `name` trains the policy. held: the checkpoint's models."""
    if isinstance(config, SupervisedConfig):
        return  # its one role is part of the kind
    # Continuing with the critic alone would save checkpoints without the policy, and in time remove those with it.
    trains, held_policy = "policy" in trained_sections(config), "policy" in held
    if trains != held_policy:
        was, now = ("policy and critic" if one else "the critic alone" for one in (held_policy, trains))
        fix = "start a new run under another run.name; critic.checkpoint starts it from the critic there"
        raise ConfigError(f"{name} is of a run that trains {was}, and this one would train {now}; {fix}")


def warn_of_changes(saved: Mapping[str, Any], facts: Mapping[str, Any], name: str) -> None:
    """Log once what differs from the checkpoint `name` and may differ."""
    for line in (*notable_changes(saved, facts, name), *changed_schedules(saved, facts, name)):
        warn_once(logger, "%s", line)


def changed_schedules(saved: Mapping[str, Any], facts: Mapping[str, Any], name: str) -> list[str]:
    """List the learning rates that another length of the run than at the checkpoint `name` moves, one line each."""
    then, now = (parse_yaml(one["config"], name)[0] for one in (saved, facts))
    lengths = ((f"trainer.{key}", then["trainer"].get(key), now["trainer"].get(key)) for key in ("steps", "epochs"))
    moved = next((f"{key} was {old} at {name}, and is {new}" for key, old, new in lengths if old != new), None)
    lines = []
    trained = (KINDS[facts["kind"]].learner,) if "kind" in facts else ("policy", *facts["critics"])
    for key in map(key_of_role, trained if moved is not None else ()):
        kind = functools.reduce(getitem, (*key.split("."), "optimizer", "lr_schedule", "type"), now)
        if kind != "constant":
            jump = "the rate jumps to that of a run of the new length, up from its lowest if the run had ended"
            lines.append(f"{key}.optimizer.lr_schedule is {kind}, and {moved}: {jump}")
    return lines


def _megatron_version() -> dict[str, str]:
    try:
        return {"megatron-core": importlib.metadata.version("megatron-core")}
    # Another engine runs without it.
    except importlib.metadata.PackageNotFoundError:
        return {}
