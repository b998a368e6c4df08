"""The keys of a configuration class as a flat table, and the nearest known key to one that does not exist.

Walks the pydantic models so that suggestions, documentation and dumps follow `schema.py` without a second list of the keys.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megappo.config.foreign.rule import Outcome, Rule, Trainer


def section_class(field: FieldInfo) -> type[BaseModel] | None:
    """Class of a field that is a section, or null in its place (`reward.parts[].code`); None if the field is a value."""
    kinds = get_args(field.annotation)
    kind = kinds[0] if len(kinds) == 2 and kinds[1] is NoneType else field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def item_class(field: FieldInfo) -> type[BaseModel] | None:
    """Class of the items of a field that is a list (`reward.parts`) or a mapping (`evaluations`) of sections, or a mapping of such
    lists (`reward.route.map`); None otherwise."""
    items = get_args(field.annotation) if get_origin(field.annotation) in (tuple, dict) else ()
    if items and get_origin(items[-1]) is tuple:
        items = get_args(items[-1])
    return next((one for one in items if isinstance(one, type) and issubclass(one, BaseModel)), None)


def is_mapping(field: FieldInfo) -> bool:
    """True if a field maps names of the user's choice to sections."""
    return get_origin(field.annotation) is dict and get_args(field.annotation)[-1] is item_class(field)


@cache  # a walk of all classes; the rules of keys without effect ask for it dozens of times for each configuration
def value_keys(cls: type[BaseModel]) -> tuple[tuple[str, FieldInfo], ...]:
    """(dotted name, field) of every key that holds a value, in the order of the schema."""
    found: list[tuple[str, FieldInfo]] = []
    for name, field in cls.model_fields.items():
        section = section_class(field)
        inner = ((f".{key}", value) for key, value in value_keys(section)) if section is not None else (("", field),)
        found += ((name + key, value) for key, value in inner)
    return tuple(found)


def sections(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted name, class) of every section below `cls`, in the order of the schema."""
    for name, field in cls.model_fields.items():
        section = section_class(field)
        if section is not None:
            yield prefix + name, section
            yield from sections(section, f"{prefix}{name}.")


def written_keys(data: Mapping[str, Any], cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every key that `data` sets, including keys unknown to the schema."""
    for name, value in data.items():
        field = cls.model_fields.get(name)
        section = section_class(field) if field is not None else None
        if section is not None and isinstance(value, Mapping):
            yield from written_keys(value, section, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def value_at(config: BaseModel, dotted: str) -> Any:
    """Value of a dotted key of a configuration; None if a section around it is null."""
    value: Any = config
    for part in dotted.split("."):
        value = getattr(value, part) if value is not None else None
    return value


RENAMED: Mapping[str, str] = {
    "telemetry.tensorboard": "it is now telemetry.trackers: [tensorboard], or [] for none",
}
"""Keys of earlier versions -> where their meaning is now."""


def hint(name: str, cls: type[BaseModel]) -> str:
    """End of the message about an unknown key: the key that is meant, or what becomes of another trainer's key here; or empty."""
    if name in RENAMED:
        return RENAMED[name]
    role, _, key = name.partition(".")
    if key.partition(".")[0] == "lora" and role in cls.model_fields:
        return f"the {role} trains nothing that an adapter could learn; policy and critic have the section"
    key, foreign = _nearest(name, cls)
    if foreign is not None and foreign[1].outcome is not Outcome.TAKEN:
        trainer, rule = foreign
        also = f" (see {key})" if key else ""
        return f"{trainer.name} has it; {rule.outcome.value} here: {rule.otherwise or rule.note}{also}"
    return f"did you mean {key}?" if key else ""


def _nearest(name: str, cls: type[BaseModel]) -> tuple[str | None, tuple[Trainer, Rule] | None]:
    """(key, rule that led to it).

    In this order: the name of another trainer's key, with its sections; a key whose last part is the same (`policy.tp` ->
    `policy.parallel.tp`); the last part of another trainer's key; the nearest dotted name; the nearest last part.
    """
    from megappo.config.foreign.tables import exact_rule, rule_by_last_part  # hundreds of keys, for messages alone

    known = [key for key, _ in value_keys(cls)] + [key for key, _ in sections(cls)]
    wanted = name.lstrip("-").replace("-", "_")
    last = wanted.rsplit(".", 1)[-1]

    def likeness(key: str) -> float:
        return difflib.SequenceMatcher(None, wanted, key).ratio()

    def usable(found: tuple[Trainer, Rule] | None) -> bool:  # its key may be one of the other command (train, sft)
        return found is not None and (not found[1].keys or found[1].keys[0] in known)

    if usable(foreign := exact_rule(wanted)) and foreign is not None:
        return next(iter(foreign[1].keys), None), foreign
    same_last = [key for key in known if key.rsplit(".", 1)[-1] == last]
    if same_last:
        return max(same_last, key=likeness), None
    if usable(foreign := rule_by_last_part(last)) and foreign is not None:
        return next(iter(foreign[1].keys), None), foreign
    # difflib's ratio from 0 to 1: a close full name first, then a close last part, then a loose full name.
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.75)
    if near:
        return near[0], None
    last_parts = {key.rsplit(".", 1)[-1] for key in known}
    near_last = difflib.get_close_matches(last, last_parts, n=1, cutoff=0.7)
    if near_last:
        return max((key for key in known if key.rsplit(".", 1)[-1] == near_last[0]), key=likeness), None
    return next(iter(difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)), None), None
