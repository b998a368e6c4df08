"""Facts about a run in its checkpoints: some must match on resume, the others are only recorded.

Another reference, teacher, adapter, base model, tokenizer or prompts would train towards something else without an error: refused.
Other validation data, reward models, reward code, environments or engines are often meant: a warning. Layouts, ranks of roles,
versions, prompts per step and run length may change. The loader compares seed and order.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megappo.checkpoint.manifest import Manifest
from megappo.config.role_sections import key_of_role

_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16
_WHOLE_FILE_BYTES = 1 << 20  # files up to this size are hashed whole
_DIGITS = 2 * hashlib.sha256().digest_size

_ADAPTER_KEYS = ("rank", "alpha", "targets", "base_bits")  # of the section lora; dropout may change
_SCALAR_HEAD = {"type": "mse or huber"}  # both losses train the same head


def require_same_run(manifest: Manifest, facts: Mapping[str, Any], name: str) -> None:
    saved, now = _fixed(manifest.facts), _fixed(facts)
    for key in saved.keys() ^ now.keys():
        if key.startswith("data."):  # one side is of another version
            (saved if key in saved else now).pop(key)
    if (change := first_change(saved, now)) is not None:
        raise ValueError(f"{name} was written with {change}; restore it, or start a new run in another directory")


def first_change(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the first key whose facts differ, with both of them; None if there is none."""
    difference = first_difference(saved, now)
    return difference and "{} = {}, this run has {}".format(*difference)


def first_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the first key whose facts differ, and both facts in words; None if there is none. A key that is missing is null."""
    for key in {**ours, **theirs}:
        one, other = ours.get(key), theirs.get(key)
        if _identity(one) != _identity(other):
            return key, _said(one), _said(other)
    return None


def _fixed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must stay, by the keys of the configuration that determine it."""
    found = {"kind": facts.get("kind", "ppo"), **_data(facts.get("data") or {})}
    critics = facts.get("critics", [])
    found["critics of algorithm.estimator and the section critics"] = critics
    for role, lora in sorted(facts.get("lora", {}).items()):
        found |= adapter_facts(key_of_role(role), lora)
    found |= {f"{key_of_role(role)}.freeze": sorted(names) for role, names in sorted(facts.get("freeze", {}).items())}
    for role in critics:
        found |= head_facts(key_of_role(role), head_of(facts, role))
    return found | {key: facts.get(key) for key in ("reference", "teacher", "tokenizer")}


def _data(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what determines the order of the prompts, and of the texts of `algorithm.ptx`, and their content."""
    found = {"critic.warmup.trajectories": data.get("trajectories")}
    if "format" in data:
        found |= {"data.train": data["train"], **{f"data.{key}": value for key, value in data["format"].items()}}
        found["chat template of data.tokenizer with data.template_args"] = data["template"]
        found["records kept under data.max_prompt_tokens and data.overlong"] = data["kept"]  # which the cursor counts
    ptx = data.get("ptx") or {}
    return found | {
        "algorithm.ptx.data": {key: ptx[key] for key in ("path", "sha256")} if ptx else None,
        **{f"algorithm.ptx.{key}": ptx.get(key) for key in ("text_key", "max_tokens")},
    }


def adapter_facts(section: str, lora: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the weights of adapters depend on. section: of their role. lora: its section `lora` and `base`, the identity of
    the model below."""
    return {**{f"{section}.lora.{key}": lora[key] for key in _ADAPTER_KEYS}, f"{section}.lora on the model": lora["base"]}


def head_of(facts: Mapping[str, Any], role: str) -> Mapping[str, Any] | None:
    """Return the keys of a critic's categorical head in the facts of a run; None for a scalar head."""
    return facts.get("value_head") if role == "critic" else facts.get("further_value_heads", {}).get(role)


def head_facts(section: str, head: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what the weights of a critic's head depend on. head: as in `head_of`."""
    keys = _SCALAR_HEAD if head is None else head
    return {f"{section}.loss.{key}": keys[key] for key in ("type", *keys)}  # the type first: the others follow from it


def notable_changes(saved: Mapping[str, Any], now: Mapping[str, Any], name: str) -> list[str]:
    """List differences from checkpoint `name` that are allowed but change what is measured or wanted, one line each."""
    lines = _changed_engines(saved, now, name)
    old, new = saved["data"], now["data"]
    if "trajectories" not in old:
        if old["eval"] and new["eval"] and old["eval"]["sha256"] != new["eval"]["sha256"]:
            lines.append(f"data.eval has another content than at {name}: validation scores before and after are of other prompts")
        lines += _changed_sets(old["evaluations"], new["evaluations"], name)
        if old["kept"] == new["kept"] and old["tokens"] != new["tokens"]:
            lines.append(
                f"the prompts have other token ids than at {name}: another version of megappo or of the tokenizer's package"
            )
    if old.get("images") != new.get("images"):
        lines.append(f"the images of the prompts are others than at {name}, in content or processing")
    # None: no part was a reward model; a change of that shows in `reward.parts`.
    if (old := saved["reward_model"]) is not None and (new := now["reward_model"]) is not None:
        lines += _changed_keys("reward_model", old, new, name, "scores")
    old, new = saved["reward"], now["reward"]
    for rule, code in new["code"].items():
        if old["code"].get(rule, code) != code:
            lines.append(f"the code of the reward rule {rule} has changed since {name}: scores may not be comparable")
    lines += _changed_keys("reward", old, new, name, "scores")
    old, new = saved["environment"], now["environment"]
    if old is None or new is None:
        had, has = ("none" if one is None else "one" for one in (old, new))
        lines += [] if old is new else [f"rollout.environment: there was {had} until {name}, and there is {has} from here"]
        return lines
    if old["code"] != new["code"]:
        lines.append(f"the code of rollout.environment has changed since {name}")
    return lines + _changed_keys("rollout.environment", old, new, name, "trajectories")


def _changed_keys(section: str, old: Mapping[str, Any], new: Mapping[str, Any], name: str, what: str) -> list[str]:
    keys = [key for key, value in new.items() if key != "code" and _identity(old.get(key, value)) != _identity(value)]
    changed = ", ".join(f"{section}.{key}" for key in keys)
    return [f"{changed} changed since {name}: {what} are not comparable"] if changed else []


def _changed_engines(saved: Mapping[str, Any], now: Mapping[str, Any], name: str) -> list[str]:
    old = saved["engines"]
    return [
        f"{key_of_role(role)}.engine was {old[role]} until {name} and is {engine} from here: "
        "the state is the same, what is computed from it is to rounding, not to the bit"
        for role, engine in now["engines"].items()
        if old.get(role, engine) != engine
    ]


def _changed_sets(old: Mapping[str, Any], new: Mapping[str, Any], name: str) -> list[str]:
    lines = []
    for one in old.keys() & new.keys():
        what = {"sha256": "content", "settings": "settings", "reward": "reward"}
        changed = [word for key, word in what.items() if old[one].get(key) != new[one].get(key)]
        if changed:
            lines.append(f"evaluations.{one} has another {' and '.join(changed)} than at {name}: its figures are not comparable")
    return sorted(lines)


def _identity(fact: Any) -> Any:
    return fact.get("sha256", fact) if isinstance(fact, Mapping) else fact  # the path may have moved


def _said(fact: Any) -> str:
    if isinstance(fact, Mapping):
        return f"{fact['path']} (SHA-256 {fact['sha256'][:12]})"
    return f"SHA-256 {fact[:12]}" if isinstance(fact, str) and len(fact) == _DIGITS else json.dumps(fact)


def identity_of_model(directory: str | Path) -> dict[str, str]:
    """Return the fact about a model that is loaded from its own source: path (recorded) and fingerprint (compared)."""
    return {"path": str(directory), "sha256": fingerprint_model(directory)}


def fingerprint_model(directory: str | Path) -> str:
    """Fingerprint a Hugging Face checkpoint directory, cheaply at any size: SHA-256 of config.json and, per weight file, its size,
    first MiB and 16 blocks of 64 KiB spread over the rest. The path does not count. ValueError if config.json is missing."""
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} has no config.json; a Hugging Face checkpoint directory is needed")
    digest = hashlib.sha256()
    files = [path for path in directory.iterdir() if path.suffix == ".safetensors" or path.name == "config.json"]
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_WHOLE_FILE_BYTES))  # of safetensors: the header with names and shapes
            for sample in range(_SAMPLES if size > _WHOLE_FILE_BYTES else 0):
                file.seek(_WHOLE_FILE_BYTES + (size - _WHOLE_FILE_BYTES) * sample // _SAMPLES, os.SEEK_SET)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
