"""Facts about a run in its checkpoints: some must match on resume, the others are only recorded.

Another reference, teacher, adapter, base model, tokenizer or prompts would train towards something else without an error: refused.
Other validation data, reward models, reward code, environments or engines are often meant: a warning. Layouts, ranks of roles,
versions, prompts per step and run length may change. The loader compares seed and order.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.checkpoint.manifest import Manifest
from megappo.config.role_sections import key_of_role

_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16
_WHOLE_FILE_BYTES = 1 << 20  # files up to this size are hashed whole


_ADAPTER_KEYS = ("rank", "alpha", "targets", "base_bits")  # of the section lora; dropout may change
_SCALAR_HEAD = {"type": "mse or huber"}  # both losses train the same head
MUST_MATCH = ("reference", "teacher", "tokenizer")
"""Facts that a resumed run must share with its checkpoint, beside those that `require_same_run` compares by parts."""


def require_same_run(manifest: Manifest, facts: Mapping[str, Any], name: str) -> None:
    for change in _forbidden_changes(manifest.facts, facts):
        raise ValueError(f"{name} was written with {change}, or start a new run in another directory")


def _forbidden_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield what must match and differs, and how to restore it."""
    if (old := saved.get("kind", "ppo")) != (new := now.get("kind", "ppo")):
        yield f"kind {old}, this run is {new}; resume with the file of then"
    if (change := _other_prompts(saved.get("data"), now.get("data"))) is not None:
        yield f"other prompts: {change}; restore it"
    if (change := _other_texts(saved.get("data"), now.get("data"))) is not None:
        yield f"{change}; restore it"
    had, has = saved.get("critics", []), now.get("critics", [])
    if bool(had) != bool(has):
        were, are = ("a", "none") if had else ("no", "one")
        yield f"{were} critic, and under algorithm.estimator this run has {are}; resume with the estimator of then"
    if had != has:
        yield f"{_critics(had)}, this run has {_critics(has)}; change the section critics"
    heads = (other_head(head_of(saved, role), head_of(now, role), role) for role in has)
    adapters, freeze = (saved.get("lora", {}), now.get("lora", {})), (saved.get("freeze", {}), now.get("freeze", {}))
    for change in (other_adapters(*adapters), _other_freeze(*freeze), *heads):
        if change is not None:
            yield f"{change}; restore it"
    for key in MUST_MATCH:
        if _identity(saved.get(key)) != _identity(now.get(key)):
            yield f"{key} {saved.get(key)!r}, this run has {now.get(key)!r}; resume with the same one"


def other_adapters(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the first difference in adapters or in the models below them, with its key; None if there is none. saved, now: role ->
    its section `lora` and `base`, the identity of its model; roles that train all weights are left out."""
    for role in sorted({*saved, *now}):
        old, new = saved.get(role), now.get(role)
        if old is None or new is None:
            return f"{key_of_role(role)}.lora = {_rank(old)}, this run has {_rank(new)}"
        for key in _ADAPTER_KEYS:
            before, after = old[key], new[key]
            if before != after:
                return f"{key_of_role(role)}.lora.{key} = {json.dumps(before)}, this run has {json.dumps(after)}"
        if _identity(old["base"]) != _identity(new["base"]):
            return f"adapters of the {role} on {old['base']['path']}, this run has another model, {new['base']['path']}"
    return None


def _critics(roles: Sequence[str]) -> str:
    return f"the critics {' and '.join(roles)}" if len(roles) > 1 else "one critic"


def _other_freeze(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    for role in sorted({*saved, *now}):
        # Frozen weights have no optimizer state
        old, new = sorted(saved.get(role, [])), sorted(now.get(role, []))
        if old != new:
            return f"{key_of_role(role)}.freeze = {json.dumps(old)}, this run has {json.dumps(new)}"
    return None


def head_of(facts: Mapping[str, Any], role: str) -> Mapping[str, Any] | None:
    """Return the keys of a critic's categorical head in the facts of a run; None for a scalar head."""
    return facts.get("value_head") if role == "critic" else facts.get("further_value_heads", {}).get(role)


def other_head(saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None, role: str = "critic") -> str | None:
    """Return the first difference of two critics' heads, with its key; None if there is none. saved, now: keys of a categorical
    head (`type`, `bins`, ...); None for a scalar head. role: section of the key."""
    old, new = (_SCALAR_HEAD if one is None else one for one in (saved, now))
    changed = next((key for key in ("type", *new) if old.get(key) != new.get(key)), None)
    if changed is None:
        return None
    return f"{role}.loss.{changed} = {json.dumps(old.get(changed))}, this run has {json.dumps(new[changed])}"


def _rank(lora: Mapping[str, Any] | None) -> str:
    return "null" if lora is None else f"{{rank: {lora['rank']}}}"


def _other_prompts(saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str | None:
    """Return the first difference in the training data, with its key; None without one, or if a side has no data."""
    if saved is None or now is None:
        return None
    if (old := saved.get("trajectories")) is not None or now.get("trajectories") is not None:
        return _other_trajectories(old, now.get("trajectories"))
    if (old := saved["train"])["sha256"] != (new := now["train"])["sha256"]:
        moved = f"{old['path']} and now {new['path']}" if old["path"] != new["path"] else new["path"]
        return f"data.train was {moved} of another content (SHA-256 {old['sha256'][:12]}, now {new['sha256'][:12]})"
    for key, value in now["format"].items():
        if (then := saved["format"].get(key, value)) != value:
            return f"data.{key} was {json.dumps(then)} and is {json.dumps(value)}"
    if saved["template"] != now["template"]:
        return "the chat template of data.tokenizer has changed, or data.template_args"
    if saved["kept"] != now["kept"]:  # the cursor counts kept prompts
        return "data.max_prompt_tokens or data.overlong leave out others than before"
    return None


def _other_trajectories(saved: Mapping[str, str] | None, now: Mapping[str, str] | None) -> str | None:
    old, new = ("null" if one is None else one["path"] for one in (saved, now))
    if saved is not None and now is not None:
        if saved["sha256"] == now["sha256"]:
            return None
        old, new = (f"{one['path']} (SHA-256 {one['sha256'][:12]})" for one in (saved, now))
    return f"critic.warmup.trajectories was {old} and is {new}"


def _other_texts(saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str | None:
    """Return the first difference in the texts of `algorithm.ptx`, by whose order and number the cursor counts."""
    old, new = (None if one is None else one.get("ptx") for one in (saved, now))
    if old is None and new is None:
        return None
    if old is None or new is None:
        had, has = ("no texts" if one is None else f"those of {one['path']}" for one in (old, new))
        return f"{had} beside its prompts (algorithm.ptx), this run has {has}"
    if old["sha256"] != new["sha256"]:
        return f"other texts in algorithm.ptx.data (SHA-256 {old['sha256'][:12]}, now {new['sha256'][:12]})"
    changed = next((key for key in ("text_key", "max_tokens") if old[key] != new[key]), None)
    return changed and f"algorithm.ptx.{changed} = {json.dumps(old[changed])}, this run has {json.dumps(new[changed])}"


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
        changed = [f"reward_model.{key}" for key, value in new.items() if _identity(old[key]) != _identity(value)]
        if changed:
            lines.append(f"{', '.join(changed)} changed since {name}: scores are not comparable")
    old, new = saved["reward"], now["reward"]
    for rule, code in new["code"].items():
        if old["code"].get(rule, code) != code:
            lines.append(f"the code of the reward rule {rule} has changed since {name}: scores may not be comparable")
    changed = [key for key, value in new.items() if key != "code" and old.get(key, value) != value]
    if changed:
        lines.append(f"{', '.join(f'reward.{key}' for key in changed)} changed since {name}: scores are not comparable")
    return [*lines, *_changed_environment(saved, now, name)]


def _changed_environment(saved: Mapping[str, Any], now: Mapping[str, Any], name: str) -> list[str]:
    old, new = saved["environment"], now["environment"]
    if old is None or new is None:
        had, has = ("none" if one is None else "one" for one in (old, new))
        return [] if old is new else [f"rollout.environment: there was {had} until {name}, and there is {has} from here"]
    lines = [f"the code of rollout.environment has changed since {name}"] if old["code"] != new["code"] else []
    changed = [f"rollout.environment.{key}" for key, value in new.items() if key != "code" and old.get(key, value) != value]
    return [*lines, *([f"{', '.join(changed)} changed since {name}: trajectories are not comparable"] if changed else [])]


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
    return fact["sha256"] if isinstance(fact, Mapping) else fact  # the path may have moved


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
