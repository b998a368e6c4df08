"""Apply a trainer's rules to its settings: a megappo configuration, and one row for every key and what became of it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from megappo.commands.convert.arithmetic import BY, CHOOSE, JOINED, LATE, OFF
from megappo.commands.convert.settings import Otherwise, Settings, Values, translated
from megappo.commands.convert.sources import Source, Unread
from megappo.config.checks import problems
from megappo.config.dead_keys import dead_keys
from megappo.config.errors import show
from megappo.config.foreign.rule import Outcome, Rule, Trainer, missing, unneeded
from megappo.config.keys import Written, value_at, value_keys, written_sections
from megappo.config.loading import explicit_keys, validated
from megappo.config.redaction import HIDDEN
from megappo.config.schema import TrainConfig
from megappo.config.supervised import KINDS, AnyConfig
from megappo.config.yaml_reader import LARGEST_NUMBER

SECRETS = ("use_wandb", "logger.wandb.key")  # flags whose value is a key of an account
NOT_NAMED = "NAME IT: the source does not"
CHANGED, UNKNOWN = "taken over with a change", "unknown"
FATES = (Outcome.TAKEN.value, CHANGED, *(outcome.value for outcome in Outcome if outcome is not Outcome.TAKEN), UNKNOWN)


@dataclass
class Row:
    """One foreign key and its fate."""

    key: str
    value: Any
    outcome: Outcome | None  # None: unknown key
    note: str = ""
    sets: Values = field(default_factory=dict)
    is_default: bool = False  # the trainer's default, not written in the source, where megappo's differs

    @property
    def fate(self) -> str:
        """The fate under which the report counts the key."""
        if self.outcome is None:
            return UNKNOWN
        as_it_was = not self.note and all(value == self.value for value in self.sets.values())
        return CHANGED if self.outcome is Outcome.TAKEN and not as_it_was else self.outcome.value


@dataclass
class Conversion:
    """Result of a conversion."""

    source: Source
    rows: list[Row]
    values: Values  # our keys, dotted, in the order of the schema
    comments: dict[str, str]  # our key -> where its value comes from
    lost: list[str]  # what the source learns by and the configuration does not say
    todo: list[str]  # changes to make before the configuration can run


def class_of(trainer: Trainer) -> type[AnyConfig]:
    """Class of the configuration that a trainer's settings become."""
    return KINDS[trainer.kind] if trainer.kind else TrainConfig


def placeholders(cls: type[AnyConfig]) -> dict[str, str]:
    """Required keys that a source may lack (TRL takes data as arguments), with names to replace."""
    if issubclass(cls, TrainConfig):
        return {"policy.model": "model", "data.train": "prompts.jsonl"}
    return {f"{cls.learner}.model": "model", "data.train": f"{cls.unit}s.jsonl"}


def convert(source: Source) -> Conversion:
    """Convert the settings of another trainer. What cannot be converted becomes a row, never an error."""
    trainer = source.trainer
    cls = class_of(trainer)
    known = {key: value for key, value in source.values.items() if not isinstance(value, Unread)}
    older = {old: known[new] for new, old in trainer.renamed.items() if new in known}
    written = frozenset(source.values) | {old for new, old in trainer.renamed.items() if new in source.values}
    removed = {key[1:] for key in source.values if key.startswith("~")}
    # A source that a trainer printed has both names, the older as null.
    moved = {key: value for key, value in older.items() if known.get(key) is None}
    settings = Settings({**trainer.defaults, **known, **moved}, written, trainer.steps_of_ppo)
    rows = [
        _first(key, value, trainer, settings)
        for key, value in source.values.items()
        if not key.endswith(trainer.ignored or ("\0",))
    ]
    rows += [
        Row(key, value, Outcome.TAKEN, is_default=True) for key, value in trainer.defaults.items() if key not in written | removed
    ]
    _apply(rows, trainer, settings)
    comments = {key: _comment(row, trainer) for row in reversed(rows) for key in row.sets}
    for key in comments:
        joined = [row for row in rows if key in row.sets and (rule := rule_of(row.key, trainer)) and rule.by in JOINED]
        if len(joined) > 1:
            comments[key] = "; ".join(_comment(row, trainer) for row in joined)
    for key, name in trainer.chosen.items():
        chosen = None if key in settings.ours else CHOOSE[name](key, settings)
        if chosen is not None:
            settings.ours[key], comments[key] = chosen
    for key, placeholder in placeholders(cls).items():
        if key not in settings.ours:
            unsaid = [
                row
                for row in rows
                if row.outcome is Outcome.MISSING and (rule := rule_of(row.key, trainer)) and rule.keys[:1] == (key,)
            ]
            said = [_line(row) for row in unsaid]
            settings.ours[key], comments[key] = placeholder, f"NAME IT: {said[0]}" if said else NOT_NAMED
    _drop(rows, settings.ours, _misplaced(settings.ours, cls))
    _drop(rows, settings.ours, _incomplete(settings.ours, cls))
    _drop(rows, settings.ours, _contradictory(settings.ours, cls), Outcome.MISSING)
    config = _load(settings.ours, cls)
    assert isinstance(config, cls), config  # every value has been tried alone
    _drop(rows, settings.ours, dead_keys(config))
    _drop_default_rows(rows, settings.ours, cls)
    values = {key: settings.ours[key] for key, _ in value_keys(cls) if key in settings.ours}
    without = [row for row in rows if row.outcome is Outcome.MISSING]
    lost = settings.lost + [_line(row) for row in without if (rule := rule_of(row.key, trainer)) and rule.changes_learning]
    todo = [f"{key}: {comments[key]}" for key in values if comments[key].startswith(("NAME IT", "CHOOSE"))]
    todo += [_line(row) for row in without if isinstance(source.values.get(row.key), Unread) and _line(row) not in lost]
    final = _load(values, cls)
    assert isinstance(final, cls), final
    todo += problems(final, explicit_keys(final), final.run.num_ranks or 1)
    return Conversion(source, rows, values, comments, lost, lost + todo + settings.lines)


def _line(row: Row) -> str:
    return f"{'the default ' if row.is_default else ''}{row.key} = {show(row.value)}: {row.note}"


def rule_of(key: str, trainer: Trainer) -> Rule | None:
    """Find the rule of a key: its own, that of Hydra's signs, or that of the innermost section whose rule covers all keys below."""
    if key in trainer.rules:
        return trainer.rules[key]
    if key.startswith("~"):
        whole = rule_of(key[1:], trainer)
        return missing(f"taken out of {trainer.name}'s configuration", *(whole.keys if whole is not None else ()), off=())
    if "@" in key:
        return unneeded(f"chooses a file of {trainer.name}'s defaults")
    around = [section for section in trainer.sections if key.startswith(section + ".")]
    return trainer.rules[max(around, key=len)] if around else None


def _first(key: str, value: Any, trainer: Trainer, settings: Settings) -> Row:
    rule = rule_of(key, trainer)
    if rule is None:
        near = difflib.get_close_matches(key, sorted(trainer.rules), n=1, cutoff=0.6)
        shown = value.text if isinstance(value, Unread) else value
        return Row(key, shown, None, f"nearest: {near[0]}" if near else "nothing is near")
    if key in SECRETS and isinstance(value, str | Unread):
        value = HIDDEN
    if isinstance(value, Unread):
        lost = rule.outcome is Outcome.TAKEN
        return (
            Row(key, value.text, Outcome.MISSING, f"set {rule.keys[0]}: the value is known only when the script runs")
            if lost
            else _plain(key, value.text, rule)
        )
    return Row(key, value, Outcome.TAKEN) if rule.outcome is Outcome.TAKEN else _plain(key, value, rule)


def _plain(key: str, value: Any, rule: Rule) -> Row:
    if rule.expects and value not in rule.expects:
        return Row(key, value, Outcome.MISSING, rule.otherwise or rule.note)
    if rule.outcome is Outcome.MISSING and any(value == off for off in rule.off):  # 0 and False are equal here
        return Row(key, value, Outcome.UNNEEDED, f"off ({rule.note})")
    return Row(key, value, rule.outcome, rule.note)


def _apply(rows: list[Row], trainer: Trainer, settings: Settings) -> None:
    """Fill in what the rows that are taken over set, plain values first; written keys win over defaults."""
    taken = [(row, rule) for row in rows if row.outcome is Outcome.TAKEN and (rule := rule_of(row.key, trainer)) is not None]
    stages = (
        [one for one in taken if not one[1].by],
        [one for one in taken if one[1].by and one[1].by not in sum(LATE, ())],
        *([one for one in taken if one[1].by in late] for late in LATE),
    )
    for stage in stages:
        for row, rule in sorted(stage, key=lambda one: one[0].is_default):
            try:
                sets = _values(row, rule, settings)
            except Otherwise as other:
                row.outcome, row.note = other.outcome, other.reason
                continue
            refused = next((text for key, value in sets.items() if (text := _refusal(key, value, class_of(trainer)))), None)
            if refused is not None:
                row.outcome, row.note = Outcome.MISSING, refused
                continue
            unchanged = rule.by == "or_zero" and set(sets.values()) == {row.value}  # the note is of -1
            row.note = "" if unchanged else rule.note
            clash = {key for key, value in sets.items() if settings.ours.get(key, value) != value and rule.by not in JOINED}
            defaults = [other for other in rows if other.is_default and not row.is_default]
            clash -= {key for other in defaults for key in other.sets}  # what is written wins over a default
            if clash and not row.is_default:
                key = min(clash)
                row.outcome, row.note = Outcome.MISSING, f"{key} is already {json.dumps(settings.ours[key])}, from another key"
                continue
            for other in defaults:
                other.sets = {key: value for key, value in other.sets.items() if key not in sets}
            row.sets = {key: value for key, value in sets.items() if key not in clash}
            settings.ours |= row.sets


def _values(row: Row, rule: Rule, settings: Settings) -> Values:
    reads_null = rule.by in ("top_k", "trackers") if rule.by else rule.values is not None and None in rule.values
    if row.value is None and not reads_null:
        raise Otherwise(Outcome.IMPLIED, "null: the default")
    if rule.by in OFF and not row.value:
        raise Otherwise(*OFF[rule.by])
    if rule.by:
        return BY[rule.by](rule, row.value, settings)
    return dict.fromkeys(rule.keys, translated(rule, row.value))


def _comment(row: Row, trainer: Trainer) -> str:
    origin = f"default of {trainer.name}'s {row.key}" if row.is_default else row.key
    shown = "" if list(row.sets.values()) == [row.value] * len(row.sets) else f" = {json.dumps(row.value, default=str)}"
    return f"{origin}{shown}" + (f" ({row.note})" if row.note else "")


# ------------------------------------------------------------------------------------------------------------- our side


def nested(values: Values) -> dict[str, Any]:
    """Turn dotted keys into nested mappings, in their order."""
    data: dict[str, Any] = {}
    for key in values:
        *parents, last = key.split(".")
        here = data
        for part in parents:
            here = here.setdefault(part, {})
        here[last] = values[key]
    return data


def _load(values: Values, cls: type[AnyConfig]) -> AnyConfig | ValidationError:
    data = nested(values)
    for section in written_sections(data, cls):
        if section.choice is not None and not section.data.keys() <= section.cls.model_fields.keys():
            section.data[section.choice.key] = _word_of(section)
    try:
        return validated(data, cls)
    except ValidationError as error:
        return error


def _errors(found: AnyConfig | ValidationError) -> list[Any]:
    return found.errors(include_url=False) if isinstance(found, ValidationError) else []


def _refusal(key: str, value: Any, cls: type[AnyConfig]) -> str | None:
    if isinstance(value, int | float) and not abs(value) < LARGEST_NUMBER:  # the reader of YAML refuses it
        return f"{key}: too large a number"
    found = _load(placeholders(cls) | {key: value}, cls)
    errors = [e for e in _errors(found) if e["type"] != "missing"]
    return f"{key}: {errors[0]['msg'].lower()}" if errors else None


def _word_of(section: Written) -> str:
    """Word of the first section of a choice that has all keys."""
    choice = section.choice
    assert choice is not None
    # `_refusal` tries each key alone, without the word that would choose its section.
    fitting = (word for word, cls in choice.sections.items() if section.data.keys() <= cls.model_fields.keys())
    return next(fitting, section.data[choice.key])


def _misplaced(values: Values, cls: type[AnyConfig]) -> dict[str, str]:
    """Map the keys that the chosen section of a choice lacks, or whose section it lacks, to the reason."""
    return {
        key: f"{section.key}.{section.choice.key} is {section.data[section.choice.key]}"
        for section in written_sections(nested(values), cls)
        if section.choice is not None
        for name in section.data.keys() - section.cls.model_fields.keys()
        for key in values
        if f"{key}.".startswith(f"{section.key}.{name}.")
    }


def _incomplete(values: Values, cls: type[AnyConfig]) -> dict[str, str]:
    """Map the keys of a section whose required key the source does not say, such as a factor without its data, to the reason."""
    found = _load(values, cls)
    absent = [".".join(map(str, e["loc"])) for e in _errors(found)]
    return {key: f"{name} is missing" for name in absent for key in values if key.startswith(name.rpartition(".")[0] + ".")}


def _contradictory(values: Values, cls: type[AnyConfig]) -> dict[str, str]:
    """Map the keys whose value the chosen section of a choice does not take, such as k1 in a loss, to the reason."""
    found = _load(values, cls)
    errors = _errors(found)
    # The place of an error names the chosen word too.
    return {key: e["msg"].lower() for e in errors for key in values if _is_part(key.split("."), [str(part) for part in e["loc"]])}


def _is_part(key: list[str], place: list[str]) -> bool:
    rest = iter(place)
    return key[-1] == place[-1] and all(part in rest for part in key)


def _drop(rows: list[Row], values: Values, dead: Mapping[str, str], outcome: Outcome = Outcome.IMPLIED) -> None:
    """Remove keys without effect under the others, or refused under them; they may not be written (a KL factor without a KL)."""
    why = "has no effect" if outcome is Outcome.IMPLIED else "cannot be that here"
    for key in [key for key in values if key in dead]:
        del values[key]
        for row in rows:
            if key in row.sets:
                del row.sets[key]
                if not row.sets:
                    row.outcome, row.note = outcome, f"{key} {why}: {dead[key].split(';')[0]}"


def _drop_default_rows(rows: list[Row], values: Values, cls: type[AnyConfig]) -> None:
    reference, known = validated(nested(placeholders(cls)), cls), dict(value_keys(cls))
    for row in [row for row in rows if row.is_default]:
        # A default of the other trainer counts only where megappo's differs.
        row.sets = {key: value for key, value in row.sets.items() if not _is_default(reference, key, value)}
        if not row.sets and row.outcome is not Outcome.MISSING:
            rows.remove(row)
    written = {key for row in rows for key in row.sets}
    same = {key for key, value in values.items() if key not in written and key in known and _is_default(reference, key, value)}
    for key in same:
        del values[key]


def _is_default(reference: AnyConfig, key: str, value: Any) -> bool:
    default = value_at(reference, key)
    return key not in placeholders(type(reference)) and (list(default) if isinstance(default, tuple) else default) == value
