"""Read another trainer's settings, (trainer, dotted key -> value), from a shell script, YAML or Python. Nothing is executed."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megappo.commands.convert.shell import UNREAD, parse_shell
from megappo.config.errors import ConfigError
from megappo.config.foreign.before_ppo import BEFORE_PPO, FLOWMESH_DPO
from megappo.config.foreign.nemo_rl import NEMO_RL
from megappo.config.foreign.openrlhf import LIGHTRFT, OPENRLHF
from megappo.config.foreign.rule import Trainer
from megappo.config.foreign.trl import FLOWMESH, TRL
from megappo.config.foreign.verl import VERL
from megappo.config.keys import leaves
from megappo.config.yaml_reader import MAX_BYTES, parse_yaml, why_no_file

READ = (VERL, NEMO_RL, OPENRLHF, LIGHTRFT, TRL, FLOWMESH, *BEFORE_PPO)
OF_HYDRA = (VERL.name, NEMO_RL.name)
LAUNCHERS = ("nnodes", "nproc_per_node", "num_processes")  # flags of torchrun and accelerate, before the script's own
MOST_FILES = 8  # in a chain of NeMo-RL's defaults
LEAST_KEYS = 3  # known keys by which a file without a trainer's name is recognised
_SETTING = re.compile(r"\+{0,2}(?P<key>[A-Za-z_]\w*(?:\.\w+)+)=(?P<value>.*)", re.DOTALL)
# Behind a command that Hydra reads: keys without a dot too, `group@place=file`, and `~key`.
_OF_HYDRA = re.compile(r"\+{0,2}(?P<key>~?[A-Za-z_][\w/-]*(?:@\w+)?(?:\.\w+)*)(?:=(?P<value>.*))?", re.DOTALL)
_OPTIONS = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}  # Hydra's, with a value
_REFERENCE = re.compile(r"\$\{\s*(?:oc\.select:)?([\w.]+)\s*(?:,\s*([^}]*))?\}")
_PRODUCT = re.compile(r"\$\{mul:\s*([\w.]+)\s*,\s*([\w.]+)\s*\}")


@dataclass(frozen=True)
class Unread:
    """A value that only a run could tell."""

    text: str


@dataclass
class Source:
    """Settings of one run of another trainer, as written."""

    path: str
    trainer: Trainer
    values: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def read_source(path: str | Path) -> Source:
    """Read a file of another trainer. Raises ConfigError, one line that says what was recognised."""
    text = _read_text(Path(path))
    name = str(path)
    if name.endswith(".py"):
        return _read_python(text, name)
    if name.endswith((".yaml", ".yml")):
        return _read_yaml(text, name)
    return _read_shell(text, name)


def _read_text(path: Path) -> str:
    if (fault := why_no_file(path)) is not None:
        raise ConfigError(f"{path}: {fault}; name a shell script, YAML or Python file")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes; this is not the settings of a run")
        return raw.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None


def _nothing(path: str, recognised: str) -> ConfigError:
    names = ", ".join(dict.fromkeys(trainer.name for trainer in READ))
    return ConfigError(f"{path}: no settings of {names} in it; recognised: {recognised}")


def _by_keys(values: Mapping[str, Any], trainers: tuple[Trainer, ...] = READ) -> Trainer | None:
    """Trainer that knows the most keys, at least LEAST_KEYS; of equals the first."""
    known = [sum(key in trainer.rules for key in values) for trainer in trainers]
    return trainers[known.index(max(known))] if max(known) >= LEAST_KEYS else None


# ------------------------------------------------------------------------------------------------------------------ shell


def _read_shell(text: str, path: str) -> Source:
    commands = parse_shell(text, path).commands
    found: list[Source] = []
    for number, words in enumerate(commands):
        named = next(((place, one) for place in range(len(words)) for one in READ if _starts(words, place, one)), None)
        start, trainer = (named[0] + 1, named[1]) if named else (0, None)
        values, strange = (
            _overrides(words[start:], path) if named and named[1].name in OF_HYDRA else (_settings(words[start:], path), [])
        )
        values = values or _flags(words[start:], path)
        trainer = trainer or _by_keys(values)
        if trainer is OPENRLHF and sum(key in LIGHTRFT.rules for key in values) > sum(key in OPENRLHF.rules for key in values):
            trainer = LIGHTRFT
        if trainer is None or not values:
            continue
        if trainer.name in (LIGHTRFT.name, TRL.name):
            before = {key: value for key, value in _flags(words[:start], path).items() if key in LAUNCHERS}
            # The parser takes the script's name for a value of the launcher's last flag.
            values = {key: value[0] if isinstance(value, list) else value for key, value in before.items()} | values
            values = dict(_positive(key, value, trainer) for key, value in values.items())
        # A comment inside a continued command ends it; for bash the rest is another command.
        lost = [word for other in commands[number + 1 :] for word in other if _SETTING.fullmatch(word)]
        notes = [f"{word.replace(UNREAD, '')}: after the end of the command, so {trainer.name} never saw it" for word in lost]
        key = {NEMO_RL.name: "--config", TRL.name: "config"}.get(trainer.name, "")
        if (below := _file_of(values.get(key), path, trainer)) is not None:
            values = _set_over(below, {name: value for name, value in values.items() if name != key})
        notes += [f"{word.replace(UNREAD, '')}: no key=value, so {trainer.name}'s meaning of it is not known" for word in strange]
        found.append(Source(path, trainer, values, notes))
    if not found:
        first = " ".join(commands[0][:3])[:60] if commands else ""
        what = f"a shell script of {len(commands)} commands ({first} ...)" if commands else "an empty file"
        raise _nothing(path, what)
    if len(found) > 1:
        found[-1].notes.append(f"{len(found)} commands in the file; this is the last")
    return found[-1]


def _positive(key: str, value: Any, trainer: Trainer) -> tuple[str, Any]:
    """Read `--no_NAME`, which transformers' parser has beside every `--NAME` that is on by default."""
    name = key.removeprefix("no_")
    return (name, False) if name != key and value is True and name in trainer.rules and key not in trainer.rules else (key, value)


def _starts(words: list[str], place: int, trainer: Trainer) -> bool:
    """True if the word at this place starts the trainer, alone or behind the one before it (`trl dpo`)."""
    found = (words[place], " ".join(words[max(0, place - 1) : place + 1]))
    return any(word == command or word.endswith("/" + command) for command in trainer.commands for word in found)


def _value(text: str, key: str, path: str) -> Any:
    if UNREAD in text:
        return Unread(text.replace(UNREAD, ""))
    try:
        return parse_yaml(text, f"{path}: {key}")[0]
    except ConfigError:
        return text  # text that is not YAML (`a: b: c`) is a string


def _settings(words: list[str], path: str) -> dict[str, Any]:
    """Read Hydra's overrides: `a.b=value`, `+a.b=value`."""
    matches = [match for word in words if (match := _SETTING.fullmatch(word))]
    return {match["key"]: _value(match["value"], match["key"], path) for match in matches}


def _overrides(words: list[str], path: str) -> tuple[dict[str, Any], list[str]]:
    """Read all words behind a command that Hydra reads: (settings, words that are none). An option is a key by its long name."""
    found: dict[str, Any] = {}
    strange: list[str] = []
    rest = iter(words)
    for word in rest:
        match = _OF_HYDRA.fullmatch(word)
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            name = _OPTIONS.get(name, name)
            follows = not equals and name in ("--config", *_OPTIONS.values())
            found[name] = _value(value if equals else next(rest, ""), name, path) if equals or follows else True
        elif match is not None and (match["value"] is not None or word.startswith("~")):
            found[match["key"]] = None if match["value"] is None else _value(match["value"], match["key"], path)
        else:
            strange.append(word)
    return found, strange


def _flags(words: list[str], path: str) -> dict[str, Any]:
    """Read argparse's flags: `--key value`, `--key=value`, `--key a b`; `--key` alone is true."""
    found: dict[str, list[str]] = {}
    key = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            found[key] = [value] if equals else []
        elif key:
            found[key].append(word)
    values = {key: [_value(text, key, path) for text in texts] for key, texts in found.items()}
    return {key: (some if len(some) > 1 else some[0] if some else True) for key, some in values.items()}


# ------------------------------------------------------------------------------------------------------------------- YAML


def _read_yaml(text: str, path: str, trainer: Trainer | None = None) -> Source:
    data, _ = parse_yaml(text, path)
    if not isinstance(data, dict):
        raise _nothing(path, f"YAML whose top is a {type(data).__name__}" if data is not None else "an empty YAML file")
    values = dict(leaves(data))
    if str(data.get("apiVersion", "")).startswith("flowmesh"):
        trainer = FLOWMESH_DPO if values.get("spec.taskType") == "dpo" else FLOWMESH
    else:
        trainer = trainer or _by_keys(values)
    if "defaults" in values and (trainer is None or trainer.name == NEMO_RL.name):
        values = _with_defaults(values, path)
        trainer = _by_keys(values)
    if trainer is None:
        shown = ", ".join(list(data)[:6])
        raise _nothing(path, f"YAML with the keys {shown}" if shown else "an empty YAML file")
    return Source(path, trainer, {key: _resolved(value, values, key) for key, value in values.items()})


def _file_of(config: Any, path: str, trainer: Trainer) -> dict[str, Any] | None:
    """Read the file that a trainer's `--config` names, relative to the working directory or the script; None if it is not there."""
    for folder in (Path(), Path(path).parent):
        if isinstance(config, str) and (folder / config).is_file():
            return _read_yaml(_read_text(folder / config), str(folder / config), trainer).values
    return None


def _with_defaults(values: dict[str, Any], path: str, depth: int = 0) -> dict[str, Any]:
    """Read the files that NeMo-RL's key `defaults` names, from the file's folder, and set the file's own keys over theirs. A file
    that is not there, or too deep a chain of them, leaves the key."""
    named = values.get("defaults")
    files = [Path(path).parent / str(one) for one in (named if isinstance(named, list) else [named])]
    if named is None or depth > MOST_FILES or not all(file.is_file() for file in files):
        return values
    below: dict[str, Any] = {}
    for file in files:
        data, _ = parse_yaml(_read_text(file), str(file))
        found = _with_defaults(dict(leaves(data if isinstance(data, dict) else {})), str(file), depth + 1)
        below = _set_over(below, found)
    return _set_over(below, {key: value for key, value in values.items() if key != "defaults"})


def _set_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Set keys over others: a value takes the place of a whole section of the same name, and the other way round."""
    around = {key[: place.start()] for key in above for place in re.finditer(r"\.", key)}
    kept = {
        key: value
        for key, value in below.items()
        if key not in around and not any(key[: place.start()] in above for place in re.finditer(r"\.", key))
    }
    return {**kept, **above}


def _resolved(value: Any, values: Mapping[str, Any], key: str) -> Any:
    """Resolve an interpolation: `${a.b}`, `${.b}` (beside `key`), `${oc.select:a.b,default}`, `${mul:${a.b}, ${c.d}}`."""
    parent = key.rpartition(".")[0]
    for _ in range(8):  # a reference may lead to another
        if not (isinstance(value, str) and "${" in value):
            return value
        if product := _PRODUCT.fullmatch(value):
            numbers = [float(text) if re.fullmatch(r"[\d.]+", text) else None for text in product.groups()]
            value = int(numbers[0] * numbers[1]) if numbers[0] is not None and numbers[1] is not None else Unread(value)
            continue
        whole = _REFERENCE.fullmatch(value)
        if whole is not None:
            name = parent + whole[1] if whole[1].startswith(".") else whole[1]
            value = values.get(name, whole[2] if whole[2] is not None else Unread(value))
            continue
        replaced = _REFERENCE.sub(lambda match: str(values.get(match[1], match[0])), value)
        if replaced == value:
            return Unread(value)
        value = replaced
    return Unread(str(value))


# ----------------------------------------------------------------------------------------------------------------- Python


def _read_python(text: str, path: str) -> Source:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(f"{path}{f':{line}' if line else ''}: not Python: {getattr(error, 'msg', error)}") from None
    names: dict[str, Any] = {}
    for node in tree.body:  # constants of the module, in order; never evaluated beyond literals
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = _literal(node.value, names)
            if not isinstance(value, Unread):
                names[node.targets[0].id] = value
    every = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    of = {name: one for one in READ for name in one.classes}
    name = next((_called(node) for node in every if _called(node) in of), "PPOConfig")
    trainer, calls = of[name], [node for node in every if _called(node) == name]
    values: dict[str, Any] = {}
    for call in calls:
        for keyword in call.keywords:
            value = _literal(keyword.value, names)
            if keyword.arg is not None:
                values[keyword.arg] = value
            elif isinstance(value, dict):
                values |= {str(key): item for key, item in value.items()}
    if values:
        notes = [f"{len(calls)} calls of {name} in the file, read as one"] if len(calls) > 1 else []
        return Source(path, trainer, values, notes)
    for value in names.values():  # kwargs = {...} or kwargs = dict(...)
        if isinstance(value, dict) and (trainer := _by_keys(value, tuple(of.values()))):
            return Source(path, trainer, {str(key): item for key, item in value.items()})
    raise _nothing(path, f"Python without a call of {', '.join(of)}, and without a dictionary of its arguments")


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""


def _literal(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Value of a literal, of a name that holds one, or of dict(...) of them; otherwise Unread with the source."""
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Call) and _called(node) == "dict" and not node.args:
        return {keyword.arg: _literal(keyword.value, names) for keyword in node.keywords if keyword.arg}
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return Unread(ast.unparse(node))
    return list(value) if isinstance(value, tuple) else value
