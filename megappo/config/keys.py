"""The keys of a configuration class as a flat table, and the nearest known key to an unknown one. Walks the pydantic models, so
that suggestions, documentation and dumps follow `schema.py` without a second list."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megappo.config.foreign.rule import Outcome, Rule, Trainer


def section_class(field: FieldInfo) -> type[BaseModel] | None:
    """Return the class of a field that is a section or an optional one (`reward.parts[].code`); None if the field is a value."""
    kinds = get_args(field.annotation)
    kind = kinds[0] if len(kinds) == 2 and kinds[1] is NoneType else field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def item_class(field: FieldInfo) -> type[BaseModel] | None:
    """Section class of the items of a list, a mapping (`evaluations`) or a mapping of lists (`reward.route.map`); else None."""
    items = get_args(field.annotation) if get_origin(field.annotation) in (tuple, dict) else ()
    if items and get_origin(items[-1]) is tuple:
        items = get_args(items[-1])
    return next((one for one in items if isinstance(one, type) and issubclass(one, BaseModel)), None)


def is_mapping(field: FieldInfo) -> bool:
    """True if a field maps names that the user chooses to sections."""
    return get_origin(field.annotation) is dict and get_args(field.annotation)[-1] is item_class(field)


class Choice(NamedTuple):
    """Alternative sections of which the word at `key` selects one: a discriminated union of pydantic."""

    key: str
    sections: Mapping[str, type[BaseModel]]
    """Word -> section; the first is the default."""

    @property
    def default(self) -> str:
        return next(iter(self.sections))


def choice_of(annotation: Any, key: Any = None) -> Choice | None:
    """Return the choice in a field's type or in the items of its list, or None. key: the field's own discriminator."""
    if key is None:
        found = (choice_of(part) for part in get_args(annotation) if get_origin(part) in (Annotated, tuple))
        marks = [mark.discriminator for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, FieldInfo)]
        return choice_of(get_args(annotation)[0], marks[0]) if any(marks) else next((one for one in found if one), None)
    words = {cls: get_args(cls.model_fields[key].annotation) for cls in get_args(annotation)}
    return Choice(key, {word: cls for cls, own in words.items() for word in own})


def section_classes(field: FieldInfo) -> tuple[type[BaseModel], ...]:
    """Return the classes of a field that is a section: several for a choice, none for a value or a list."""
    section = section_class(field)
    if section is not None:
        return (section,)
    is_list = get_origin(field.annotation) in (tuple, dict)
    choice = None if is_list else choice_of(field.annotation, field.discriminator)
    return tuple(choice.sections.values()) if choice is not None else ()


@cache  # walks all classes, and dead_keys.py asks dozens of times per configuration
def value_keys(cls: type[BaseModel]) -> tuple[tuple[str, FieldInfo], ...]:
    """Return (dotted name, field) of every value key in the order of the schema; a choice lists the keys of all its sections."""
    found: dict[str, FieldInfo] = {}
    for name, field in cls.model_fields.items():
        if len(section_classes(field)) > 1 and (choice := choice_of(field.annotation, field.discriminator)) is not None:
            words: Any = Literal[tuple(choice.sections)]
            found[f"{name}.{choice.key}"] = FieldInfo(annotation=words, default=choice.default, description=field.description)
        inner = [(f".{key}", value) for section in section_classes(field) for key, value in value_keys(section)]
        for key, value in inner or [("", field)]:
            found.setdefault(name + key, value)
    return tuple(found.items())


def sections(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield (dotted name, class) of every section below `cls` in the order of the schema; a choice once per section."""
    for name, field in cls.model_fields.items():
        for section in section_classes(field):
            yield prefix + name, section
            yield from sections(section, f"{prefix}{name}.")


class Written(NamedTuple):
    """A section as a document writes it."""

    key: str
    """Dotted name, with indices in lists."""
    data: dict[str, Any]
    cls: type[BaseModel]
    choice: Choice | None
    """The choice to which the section belongs."""
    is_static: bool
    """False inside lists and mappings, whose keys have no names of their own in `value_keys`."""


def written_sections(data: dict[str, Any], cls: type[BaseModel], prefix: str = "", is_static: bool = True) -> Iterator[Written]:
    """Yield every section below `cls` that `data` writes, outer ones first, and write out the choices in `data`. `controller:
    fixed` becomes {type: fixed}, and a choice without its word takes the default. Values that are no section, or name an unknown
    one, are left for pydantic to refuse."""
    for name, value in data.items():
        if (field := cls.model_fields.get(name)) is None:
            continue
        choice = choice_of(field.annotation, field.discriminator)
        if choice is not None and isinstance(value, str):
            value = data[name] = {choice.key: value}
        for key, inner, static in _mappings_in(value, field, prefix + name):
            if choice is not None:
                inner.setdefault(choice.key, choice.default)
                section = choice.sections.get(inner[choice.key]) if isinstance(inner[choice.key], str) else None
            else:
                section = section_class(field) or item_class(field)
            if section is not None:
                yield Written(key, inner, section, choice, is_static and static)
                yield from written_sections(inner, section, f"{key}.", is_static and static)


def _mappings_in(value: Any, field: FieldInfo, key: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield (key, mapping, False inside a list or mapping) of every mapping in the value of a field that may be a section."""
    if get_origin(field.annotation) not in (tuple, dict):
        if isinstance(value, dict) and section_classes(field):
            yield key, value, True
        return
    if not (item_class(field) or choice_of(field.annotation)):
        return
    items = value.items() if isinstance(value, dict) and get_origin(field.annotation) is dict else ((None, value),)
    for name, one in items:
        here = key if name is None else f"{key}.{name}"
        if isinstance(one, list):
            yield from ((f"{here}.{index}", item, False) for index, item in enumerate(one) if isinstance(item, dict))
        elif name is not None and is_mapping(field) and isinstance(one, dict):
            yield here, one, False


def keys_in(config: BaseModel) -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted name, field) of every value key of this configuration, inside named sections too."""
    for name, field in value_keys(type(config)):
        yield name, field
        for item, section in value_at(config, name).items() if is_mapping(field) else ():
            yield from ((f"{name}.{item}.{key}", inner) for key, inner in keys_in(section))


def value_at(config: BaseModel, dotted: str) -> Any:
    """Return the value of a dotted key; None if a section on the way is null or not the chosen one."""
    value: Any = config
    for part in dotted.split("."):
        value = _member(value, part)
    return value


def leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested mappings. An empty mapping is a value."""
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def replaced(section: Any, path: Sequence[str], value: Any) -> Any:
    """Copy a section, or a mapping of sections, with another value at this path of keys."""
    first, *rest = path
    changed = {first: replaced(_member(section, first), rest, value) if rest else value}
    return {**section, **changed} if isinstance(section, Mapping) else section.model_copy(update=changed)


def _member(section: Any, name: str) -> Any:
    return section.get(name) if isinstance(section, Mapping) else getattr(section, name, None)


def hint(name: str, cls: type[BaseModel]) -> str:
    """End a message about an unknown key: name the key that is meant, or what becomes of another trainer's key; may be empty."""
    role, _, key = name.partition(".")
    section = section_class(cls.model_fields[role]) if role in cls.model_fields else None
    if key.partition(".")[0] == "lora" and section is not None and "lora" not in section.model_fields:
        return f"the {role} trains nothing that an adapter could learn; policy and critic have the section"
    from megappo.config.foreign.tables import TRAINERS  # hundreds of keys, needed only for messages

    is_foreign = any(name in trainer.rules for trainer in TRAINERS)  # `critic.megatron.…` is verl's
    if not is_foreign and (valued := _key_of_word(name, cls)) is not None:
        return valued
    key, foreign = _nearest(name, cls)
    if foreign is not None and foreign[1].outcome is not Outcome.TAKEN:
        trainer, rule = foreign
        also = f" (see {key})" if key else ""
        return f"{trainer.name} has it; {rule.outcome.value} here: {rule.otherwise or rule.note}{also}"
    return f"did you mean {key}?" if key else ""


def _key_of_word(name: str, cls: type[BaseModel]) -> str | None:
    """Fix for `telemetry.wandb`, a value of telemetry.trackers that is written as a key, with or without keys below it."""
    section, *parts = name.split(".")
    inside = section_class(cls.model_fields[section]) if section in cls.model_fields else None
    if inside is None or not parts or parts[0] in inside.model_fields:
        return None
    keys = [key for key, field in inside.model_fields.items() if parts[0] in _words_of(field.annotation)]
    return f"{parts[0]} is a value of {section}.{keys[0]}" if keys else None


def _words_of(annotation: Any) -> set[Any]:
    """Words that a type lists, also as items of a tuple."""
    args = set(get_args(annotation))
    return args if get_origin(annotation) is Literal else set().union(*map(_words_of, args))


def _nearest(name: str, cls: type[BaseModel]) -> tuple[str | None, tuple[Trainer, Rule] | None]:
    """Return (key, rule that led to it)."""
    from megappo.config.foreign.tables import exact_rule, rule_by_last_part  # hundreds of keys, needed only for messages

    # In this order: another trainer's key with its sections; our key with the same last part (`policy.tp`); another trainer's last
    # part; the nearest dotted name; the nearest last part.
    known = [key for key, _ in value_keys(cls)] + [key for key, _ in sections(cls)]
    wanted = name.lstrip("-").replace("-", "_")
    last = wanted.rsplit(".", 1)[-1]

    def likeness(key: str) -> float:
        return difflib.SequenceMatcher(None, wanted, key).ratio()

    def usable(found: tuple[Trainer, Rule] | None) -> bool:  # its key may belong to the other command (train, sft)
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
