"""Dump the resolved configuration as YAML, in the order of the schema. The text loads back to an equal configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from megappo.config.dead_keys import dead_keys
from megappo.config.supervised import AnyConfig
from megappo.config.yaml_reader import CoreDumper


def dump_yaml(config: AnyConfig) -> str:
    """Return the YAML of every key with an effect. Comments at its end name the others, with the reason."""
    data = config.model_dump(mode="json")  # tuples become lists
    dead = dead_keys(config)
    for name in dead:
        _remove(data, name.split("."))  # written out, it would be refused when the text is loaded
    text = yaml.dump(data, Dumper=CoreDumper, sort_keys=False, allow_unicode=True, width=120)
    return text + "".join(f"# {line}\n" for line in _comments(dead.items()))


def _remove(data: dict[str, Any], path: list[str]) -> None:
    head, *rest = path
    if data.get(head) is None:  # an absent section, or one that was not chosen
        return
    if not rest:
        del data[head]
        return
    _remove(data[head], rest)
    # A section without keys is not written.
    if not data[head]:
        del data[head]


def _comments(dead: Iterable[tuple[str, str]]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, because in dead:
        reasons.setdefault(because, []).append(name)
    return [f"no effect here: {', '.join(names)} ({because.split(';')[0]})" for because, names in reasons.items()]
