"""Strict YAML reader: YAML 1.2 scalars, no duplicate keys, no tags, bounded size, and the line of every key.

PyYAML's own loader follows YAML 1.1, where `no` is false, `1e-6` is a string, `12:30` is 750 and a second `lr:` silently wins.
`loading.py` interprets the keys. Of megappo, imports only the error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megappo.config.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_VALUES = 10_000  # with aliases expanded: a small file can unfold to billions of values
MAX_DEPTH = 20
MAX_NODES = 2 * MAX_VALUES  # as written: PyYAML takes a minute for 1 MiB of them
LARGEST_NUMBER = 1 << 63  # beyond, libraries and tensors overflow

# (tag, pattern, possible first characters) of YAML 1.2's core schema, without infinities and NaN, which no key accepts.
SCALARS = (
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789")),
    ("tag:yaml.org,2002:float", re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"), list("-+.0123456789")),
)


def _resolvers(base: Mapping[Any, list]) -> dict[Any, list]:
    """Extend PyYAML's table, first character -> [(tag, pattern)], by the core schema."""
    table = {first: list(rules) for first, rules in base.items()}
    for tag, pattern, firsts in SCALARS:
        for first in firsts:
            table.setdefault(first, []).append((tag, pattern))
    return table


class CoreLoader(yaml.SafeLoader):
    """Loader that resolves plain scalars by YAML 1.2's rules."""

    yaml_implicit_resolvers = _resolvers({})
    num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_NODES} values", problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)


class CoreDumper(yaml.SafeDumper):
    """Dumper whose output YAML 1.1 and 1.2 readers understand alike: strings that either would misread are quoted."""

    yaml_implicit_resolvers = _resolvers(yaml.SafeDumper.yaml_implicit_resolvers)


@dataclass
class Document:
    """A YAML mapping as plain data, and the line (from 1) of each key by dotted name."""

    data: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)


class _Converter:
    """Convert a node graph to plain data. Counts the values, so that aliases cannot unfold without bound."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values = 0
        self.lines: dict[str, int] = {}

    def error(self, node: yaml.Node, text: str) -> ConfigError:
        return ConfigError(f"{self.name}:{node.start_mark.line + 1}: {text}")

    def convert(self, node: yaml.Node, path: tuple[str, ...] = ()) -> Any:
        self.values += 1
        if self.values > MAX_VALUES or len(path) > MAX_DEPTH:
            raise self.error(node, f"unfolds to more than {MAX_VALUES} values or {MAX_DEPTH} levels (aliases?)")
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self.convert(item, (*path, str(index))) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        raise self.error(node, f"tag {node.tag} is not allowed; write a plain value")

    def mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = self.scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise self.error(key_node, "a key must be a plain name")
            line = key_node.start_mark.line + 1
            if key in found:
                raise self.error(key_node, f"{'.'.join((*path, key))} is written twice (first on line {first[key]}); keep one")
            first[key] = line
            self.lines[".".join((*path, key))] = line
            found[key] = self.convert(value_node, (*path, key))
        return found

    def scalar(self, node: yaml.ScalarNode) -> Any:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind == "str":
            if any("\ud800" <= character <= "\udfff" for character in node.value):  # from an escape such as "\ud800"
                raise self.error(node, "half of a surrogate pair is no character; write the whole one")
            return node.value
        if kind == "null":
            return None
        if kind == "bool":
            return node.value.lower() == "true"
        if kind in ("int", "float"):
            return self.number(node, kind)
        raise self.error(node, f"tag {node.tag} is not allowed; write a plain value")

    def number(self, node: yaml.ScalarNode, kind: str) -> int | float:
        try:
            value = int(node.value) if kind == "int" else float(node.value)
        except ValueError:  # an explicit tag on other text, or too many digits for Python
            value = math.nan
        if not abs(value) < LARGEST_NUMBER if kind == "int" else not math.isfinite(value):
            raise self.error(node, f"{node.value[:40]!r} is not a number that can be used")
        return value


def parse_yaml(text: str, name: str) -> tuple[Any, dict[str, int]]:
    """Parse text into (plain data, line of each key by dotted name). name: source, for messages. Raises ConfigError."""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=CoreLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{name}{where}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:  # characters that YAML does not allow
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{name}: not a configuration: nested too deeply") from None
    except (ValueError, OverflowError) as error:  # "\UFFFFFFFF" and %YAML 9{5000}: PyYAML does not check its numbers
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    if node is None:
        return None, {}
    converter = _Converter(name)
    return converter.convert(node), converter.lines


def why_no_file(path: Path) -> str | None:
    """Return why there is no plain file at `path`, None if there is one."""
    try:
        # A pipe does not count: every rank reads the file again.
        if path.is_file():
            return None
        return "is a directory" if path.is_dir() else "is no plain file" if path.exists() else "no such file"
    except OSError as error:  # a name that is too long, a directory without permission
        return error.strerror


def read_yaml(path: str | Path) -> Document:
    """Read a YAML file whose top level is a mapping; an empty file is an empty mapping. Raises ConfigError."""
    path = Path(path)
    if (fault := why_no_file(path)) is not None:
        raise ConfigError(f"{path}: {fault}; give the path of a YAML configuration")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)  # one more, to notice a larger file without reading it all
        text = raw.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes; this is not a configuration")
    data, lines = parse_yaml(text, str(path))
    if data is None:
        return Document({})
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold sections with keys (policy:, data:, ...), not a {type(data).__name__}")
    return Document(data, lines)
