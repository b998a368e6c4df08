"""Output of `megappo convert`: the report on every key, and the configuration with its comments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from megappo.commands.convert.conversion import FATES, Conversion, Row, nested
from megappo.config.errors import show
from megappo.config.foreign.rule import Outcome
from megappo.config.yaml_reader import CoreDumper

WIDEST_LEFT = 66  # columns of `key = value` before what became of it


def unknown(conversion: Conversion) -> list[Row]:
    return [row for row in conversion.rows if row.outcome is None]


def report(conversion: Conversion) -> str:
    """Write the report: counts, then every key under its outcome."""
    trainer = conversion.source.trainer
    written = [row for row in conversion.rows if not row.is_default]
    of = {fate: [row for row in written if row.fate == fate] for fate in FATES}
    counts = ", ".join(f"{len(rows)} {fate}" for fate, rows in of.items())
    of_kind = f", kind: {trainer.kind}" if trainer.kind else ""
    lines = [f"{trainer.name}, {conversion.source.path}{of_kind}: {len(written)} keys: {counts}"]
    for fate, rows in of.items():
        lines += _block(fate, rows)
    lines += _block(
        f"{trainer.name}'s defaults, where megappo's are others", [row for row in conversion.rows if row.is_default and row.sets]
    )
    chosen = [key for key in conversion.values if not any(key in row.sets for row in conversion.rows)]
    if chosen:
        lines += ["", "chosen by megappo convert"]
        lines += [_line(f"{key}: {show(conversion.values[key])}", conversion.comments[key]) for key in chosen]
    if conversion.todo or conversion.source.notes:
        lines += ["", "before it runs", *(f"  {line}" for line in [*conversion.todo, *conversion.source.notes])]
    return "\n".join(lines) + "\n"


def _block(title: str, rows: list[Row]) -> Iterator[str]:
    if rows:
        yield from ("", title, *(_line(f"{row.key} = {show(row.value)}", _fate(row)) for row in rows))


def _fate(row: Row) -> str:
    sets = ", ".join(f"{key}: {show(value)}" for key, value in row.sets.items())
    return " - ".join(text for text in (sets, row.note) if text)


def _line(left: str, right: str) -> str:
    gap = " " * max(2, WIDEST_LEFT - len(left))
    return f"  {left}{gap}{right}".rstrip() if len(left) < WIDEST_LEFT else f"  {left}\n  {' ' * WIDEST_LEFT}{right}".rstrip()


def configuration(conversion: Conversion) -> str:
    """Write the configuration as YAML; the comment beside a value names the foreign key that it comes from."""
    source = conversion.source
    lines = [f"# Written by `megappo convert {source.path}` ({source.trainer.name})."]
    lines += [f"# Before it runs: {line}" for line in conversion.todo]
    lines += [f"kind: {source.trainer.kind}"] if source.trainer.kind else []
    lines += _yaml(nested(conversion.values), "", conversion.comments, 0)
    lost = [row for row in conversion.rows if row.outcome is Outcome.MISSING or row.outcome is None]
    lines += [f"# {row.key} = {show(row.value)}: {_reason(row)}" for row in lost]
    return "\n".join(lines) + "\n"


def _reason(row: Row) -> str:
    return f"unknown ({row.note})" if row.outcome is None else f"no equivalent: {row.note}"


def _yaml(data: dict[str, Any], prefix: str, comments: dict[str, str], depth: int) -> Iterator[str]:
    for name, value in data.items():
        key, indent = f"{prefix}{name}", "  " * depth
        if isinstance(value, dict) and key not in comments:  # a key of ours may be a mapping itself
            yield f"{indent}{name}:"
            yield from _yaml(value, f"{key}.", comments, depth + 1)
        else:
            yield f"{indent}{name}: {_scalar(value)}  # {' '.join(comments[key].split())}"


def _scalar(value: Any) -> str:
    if isinstance(value, float):
        return repr(value) if "e" not in repr(value) or "." in repr(value) else repr(value).replace("e", ".0e")
    if isinstance(value, str | list | dict):
        text = yaml.dump(value, Dumper=CoreDumper, default_flow_style=True, width=10_000, allow_unicode=True)
        return text.removesuffix("\n").removesuffix("\n...")
    return json.dumps(value)
