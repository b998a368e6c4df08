"""Write the reference pages: docs/config.md from the models of the configuration, docs/metrics.md from the catalogue of metrics.

    python scripts/reference_pages.py

All text, types, ranges, defaults and names come from the package. Tests assert that the written pages are current."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megappo.config.keys import Choice, choice_of, is_mapping, item_class, section_class, section_classes
from megappo.config.schema import SftConfig, TrainConfig
from megappo.telemetry.metrics import GROUPS, STAGES, Metric

CONFIG_HEAD = """# Configuration

Generated from `megappo/config/schema.py` and the sections it imports by `python scripts/reference_pages.py`; change the text there.

A configuration is one YAML file. On the command line `key=value` sets one key over the file, with the value in YAML:
`megappo train recipe.yaml policy.optimizer.lr=2e-6 run.name=second`. The value of a text is that text, with its blanks, `#` and
brackets (in a shell `'data.prompt_suffix= Put it after ####.'`); of a text YAML reads only null and what stands in quotes
(`'data.prompt_suffix="\\n"'`). `key=null` takes back what the file says where the key itself cannot be null. A choice is written as
the word that chooses, or as a section with it and the keys of what it chooses:
`kl: none`, `kl: {placement: loss, coef: 0.04}`, `algorithm.kl.controller=adaptive algorithm.kl.controller.target=0.1`.
`megappo config recipe.yaml` prints the resolved configuration. Unknown keys, keys of the wrong type
(`"2"` is not 2) and keys without effect under the other keys are errors.

For completion in an editor, write `megappo config --schema > train.schema.json` (fine-tuning: `--sft --schema`) and start a file
with `# yaml-language-server: $schema=train.schema.json`.
"""

BOUNDS = (("minimum", ">= {}"), ("exclusiveMinimum", "> {}"), ("maximum", "<= {}"), ("exclusiveMaximum", "< {}"))
TYPES = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
    "object": "mapping",
}


def type_text(schema: Mapping[str, Any]) -> str:
    """Put a property of a JSON schema into words: `integer >= 1 or null`."""
    if "anyOf" in schema:
        return " or ".join(type_text(part) for part in schema["anyOf"])
    if "$ref" in schema or "discriminator" in schema:
        return "section"
    if "enum" in schema:
        return "one of " + ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "prefixItems" in schema:
        return f"list of {len(schema['prefixItems'])}, each {type_text(schema['prefixItems'][0])}"
    if schema.get("type") == "array":
        items = schema.get("items", {})
        return "list of sections" if type_text(items) == "section" else f"list of {type_text(items)}"
    named = schema.get("additionalProperties")
    if isinstance(named, Mapping) and "$ref" in named:
        return "mapping of names to sections"
    text = TYPES[schema["type"]]
    bounds = ", ".join(form.format(f"{schema[name]:g}") for name, form in BOUNDS if name in schema)
    if "pattern" in schema:
        bounds = f"`{schema['pattern']}`"
    return f"{text} {bounds}".rstrip()


def default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.default
    if isinstance(value, tuple):
        value = [item.model_dump() if isinstance(item, BaseModel) else item for item in value]
    return f"`{json.dumps(value)}`"


class Listed:
    """What the page already has: classes of items, texts, choices and table rows with the section that shows them."""

    def __init__(self) -> None:
        self.classes: set[type[BaseModel]] = set()
        self.texts: set[str] = set()
        self.choices: dict[tuple[str, str, tuple[type[BaseModel], ...]], str] = {}
        self.rows: dict[str, str] = {}


def section_lines(name: str, cls: type[BaseModel], text: str, listed: Listed) -> Iterator[str]:
    """Yield a heading, the table of the section's own values, its sections and the items of its lists, each class once."""
    properties = cls.model_json_schema()["properties"]
    values = [(key, field) for key, field in cls.model_fields.items() if not section_classes(field) or field.default is None]
    if name:
        yield from (f"### {name}", "", *([] if text in listed.texts else [text, ""]))
    listed.texts |= {text} | {field.description or "" for _, field in values}
    yield from table_lines(name, values, properties, listed)
    yield from inner_lines(name, cls, listed)


def inner_lines(name: str, cls: type[BaseModel], listed: Listed) -> Iterator[str]:
    for key, field in cls.model_fields.items():
        dotted = f"{name}.{key}" if name else key
        choice = choice_of(field.annotation, field.discriminator)
        inner = section_class(field)
        items = item_class(field)
        if choice is not None:
            yield from choice_lines(dotted, choice, field.description or "", listed)
        elif inner is not None:
            yield from section_lines(dotted, inner, field.description or "", listed)
        elif items is not None and items not in listed.classes:
            listed.classes.add(items)
            name_of_item = f"{dotted}.NAME" if is_mapping(field) else f"{dotted}[]"
            yield from section_lines(name_of_item, items, f"One item of `{dotted}`.", listed)


def choice_lines(name: str, choice: Choice, text: str, listed: Listed) -> Iterator[str]:
    """Yield a heading, the text and table of each section that a word chooses, then the sections inside them."""
    words = ", ".join(f"`{word}`" for word in choice.sections)
    text = text.replace("\n", " ")
    same = listed.choices.setdefault((text, str(choice.default), tuple(choice.sections.values())), name)
    if same != name:
        yield from (f"### {name}", "", f"As `{same}`.", "")
        return
    yield from (f"### {name}", "", f"{text} `{choice.key}` chooses among {words}; without it: `{choice.default}`.", "")
    for word, cls in choice.sections.items():
        yield from (f"**`{choice.key}: {word}`** {' '.join((cls.__doc__ or '').split())}".rstrip(), "")
        properties = cls.model_json_schema()["properties"]
        fields = [(key, field) for key, field in cls.model_fields.items() if key != choice.key and not section_classes(field)]
        yield from table_lines(f"{name}: {word}", fields, properties, listed)
    for cls in choice.sections.values():
        if cls not in listed.classes:
            listed.classes.add(cls)
            yield from inner_lines(name, cls, listed)


def table_lines(name: str, values: Sequence[tuple[str, FieldInfo]], properties: Mapping[str, Any], listed: Listed) -> Iterator[str]:
    """Yield the table of a section's values. Rows that another section already shows become a reference to it."""
    rows = {key: _row(key, field, properties[key]) for key, field in values}
    elsewhere: dict[str, list[str]] = {}
    for key, row in rows.items():
        if (place := listed.rows.setdefault(row, name)) != name:
            elsewhere.setdefault(place, []).append(key)
    shared = {key for keys in elsewhere.values() for key in keys}
    if new := [row for key, row in rows.items() if key not in shared]:
        yield from ("| key | type | default | meaning |", "|---|---|---|---|", *new, "")
    for place, keys in elsewhere.items():
        yield from (f"As in `{place}`: {', '.join(f'`{key}`' for key in keys)}.", "")


def _row(key: str, field: FieldInfo, schema: Mapping[str, Any]) -> str:
    cells = (f"`{key}`", type_text(schema), default_text(field), field.description or "")
    # A bar would end the cell, a line break the table.
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def config_page() -> str:
    lines, listed = [CONFIG_HEAD, "## `megappo train`", ""], Listed()
    lines += section_lines("", TrainConfig, "", listed)
    # What both commands have is shown once.
    listed.rows = dict.fromkeys(listed.rows, "megappo train")
    listed.choices = {choice: f"{name}` of `megappo train" for choice, name in listed.choices.items()}
    lines += ["## `megappo sft`", "", *section_lines("", SftConfig, "", listed)]
    return "\n".join(lines).rstrip() + "\n"


# ---------------------------------------------------------------------------------------------------------------------- metrics


METRICS_HEAD = """# Metrics

Generated from `megappo/telemetry/metrics.py` by `python scripts/reference_pages.py`; change the text there.

Every name that a run can log. `metrics.jsonl` has one JSON object for each step: `step`, `time` (seconds since 1970) and the
metrics of that step. TensorBoard, W&B and MLflow show the same names.

- A run logs what its configuration has. Without a critic there are no `critic/...`, without experts no `.../expert_max_violation`.
- A `*` stands for several names; the text says which. STAGE is one of STAGES_OF_A_STEP.
- Metrics of the critic `b` of `critics` are those of `critic` with another beginning: `critic_b/loss`.
- All numbers are of the whole step over all ranks, so they do not depend on the layout. Times and rates are rank 0's.
- A number that is not finite is `null` in `metrics.jsonl`.

What to watch first, and what a bad value means: [troubleshooting](troubleshooting.md#the-curve-looks-wrong). Console and rates:
[statistics](telemetry.md). Histograms: [telemetry](telemetry.md#histograms). In Python:

```python
import json

steps = [json.loads(line) for line in open("runs/quickstart/ppo/metrics.jsonl")]
print([step["kl/per_token"] for step in steps if "kl/per_token" in step])
```
"""


def group_of(metric: Metric) -> str:
    return metric.value.split("/", 1)[0]


def cell(text: str) -> str:
    return text.replace("|", "\\|")  # a bar would end the cell


def metrics_page() -> str:
    lines = [METRICS_HEAD.replace("STAGES_OF_A_STEP", ", ".join(f"`{stage}`" for stage in STAGES))]
    for group, text in GROUPS.items():
        lines += [f"## {group}", "", text, "", "| metric | meaning |", "|---|---|"]
        members = [metric for metric in Metric if group_of(metric) == group]
        lines += [f"| `{metric.value}` | {cell(metric.meaning)} |" for metric in members]
        lines += [""]
    return "\n".join(lines)


PAGES = {ROOT / "docs" / "config.md": config_page, ROOT / "docs" / "metrics.md": metrics_page}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")
        print(path)
