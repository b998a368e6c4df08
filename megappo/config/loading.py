"""Load a YAML file and `key=value` overrides into a validated, frozen configuration; an error is one line that names its place.

`yaml_reader.py` reads the file and `checks.py` has the rules about several keys. This file applies the overrides, refuses unknown
keys, and lets pydantic validate in strict mode (no "2" for 2, no true for 1).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megappo.config.errors import ConfigError, problem
from megappo.config.keys import (
    Choice,
    Written,
    choice_of,
    hint,
    is_mapping,
    item_class,
    section_class,
    section_classes,
    value_keys,
    written_sections,
)
from megappo.config.paths import UTF_8_LOCALE
from megappo.config.schema import TrainConfig
from megappo.config.supervised import KINDS, AnyConfig, SupervisedConfig, command_of
from megappo.config.yaml_reader import Document, parse_yaml, read_yaml

Config = TypeVar("Config", bound=BaseModel)

COMMAND_LINE = "command line"

_YAML_OF_A_TEXT = re.compile(r"""null|Null|NULL|~|'.*'|".*\"""", re.DOTALL)
"""Values of a text that YAML reads: null, and what stands in quotes."""

HALF = ("fp16", "float16", "half", "16")

# pydantic's error types -> the fix; {name} are the fields of the error's context.
FIXES: Mapping[str, str] = {
    "greater_than_equal": "must be >= {ge}",
    "greater_than": "must be > {gt}",
    "less_than_equal": "must be <= {le}",
    "less_than": "must be < {lt}",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "int_parsing_size": "must be a smaller integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a string; put it in quotes if it looks like a number",
    "string_pattern_mismatch": "must match {pattern} (letters, digits and . _ -)",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entry",
    "literal_error": "must be one of {expected}",
    "union_tag_invalid": "must be one of {expected_tags}",
    "tuple_type": "must be a list, for example [a, b]",
    "model_type": "is a section; give it keys, or leave it out",
    "model_attributes_type": "is a section; give it keys, or leave it out",
}


def load_config(path: str | Path, overrides: Sequence[str] = (), cls: type[Config] = TrainConfig) -> Config:
    """Read `path`, apply the overrides (`policy.parallel.tp=2`, values in YAML) and validate. `key=null` on a key or section that
    cannot be null removes the file's value, so that the default holds. Raises ConfigError: one line with the place (file and line,
    or the command line), the key, its value and the fix."""
    return _config_of(read_yaml(path), path, overrides, cls)


def _config_of(document: Document, path: str | Path, overrides: Sequence[str], cls: type[Config]) -> Config:
    origins = {key: f"{path}:{line}" for key, line in document.lines.items()}
    for override in overrides:
        key, value = parse_override(override, cls)
        if value is None and not _takes_null(key, cls):
            _remove(document.data, key)
        else:
            list(written_sections(document.data, cls))  # expands words, so that this key finds their section
            _assign(document.data, key, value, str(path))
            origins[key] = COMMAND_LINE
    if cls is TrainConfig and (kind := document.data.get("kind")) in tuple(KINDS):
        fix = "this command takes PPO runs alone; train, plan, launch, verify, export and config take runs of any kind"
        raise ConfigError(f"{_place('kind', origins, str(path))}: {problem('kind', kind, fix)}")
    _refuse_unknown(document.data, cls, origins, str(path))
    try:
        return validated(document.data, cls)
    except ValidationError as error:
        raise ConfigError(_first_line(error, cls, origins, str(path))) from None


def load_run(path: str | Path, overrides: Sequence[str] = (), usual: str | None = None) -> AnyConfig:
    """Load a configuration of any kind: that of its key `kind`, in the file or as an override; without one, `usual`, or PPO.
    Raises ConfigError as `load_config`, and for a `kind` that there is not."""
    kinds = [text.partition("=")[2] for text in overrides if text.startswith("kind=")]
    document = read_yaml(path)
    written = kinds[-1] if kinds else document.data.get("kind")
    if written is None:
        return _config_of(document, path, overrides, TrainConfig if usual is None else KINDS[usual])
    cls = KINDS.get(written) if isinstance(written, str) else None
    if cls is None:
        fix = f"is no kind of run; use {' or '.join(KINDS)}, or leave it out for `megappo train`"
        raise ConfigError(f"{path}: {problem('kind', written, fix)}")
    if usual not in (None, written):
        fix = f"this is `megappo {KINDS[usual].command}`; use `megappo {cls.command}`"
        raise ConfigError(f"{path}: {problem('kind', written, fix)}")
    return _config_of(document, path, overrides, cls)


def validated(data: Mapping[str, Any], cls: type[Config]) -> Config:
    """Validate nested mappings, in which a word may stand for a choice. Raises pydantic's ValidationError."""
    copy = json.loads(json.dumps(data))
    list(written_sections(copy, cls))
    # Only JSON mode takes a list for a tuple and stays strict otherwise.
    return cls.model_validate_json(json.dumps(copy), strict=True)


def parse_override(text: str, cls: type[BaseModel]) -> tuple[str, Any]:
    """Parse `a.b=value` into (dotted key, plain value): the value of a text as it stands, else YAML. Raises ConfigError,
    which names our key for another trainer's flag."""
    key, equals, value = text.partition("=")
    values = [name for name, _ in value_keys(cls)]
    if key.startswith("-"):
        meant = hint(key, cls).replace("?", "=VALUE?")
        raise ConfigError(f"{COMMAND_LINE}: {key}: options are set as key=value{'; ' if meant else ''}{meant}")
    if not equals or not key:
        raise ConfigError(f"{COMMAND_LINE}: {text}: not an override; write key=value, for example run.name=first")
    if not value.strip():  # `lr=$LR` with LR unset: reading it as null would silently drop the file's value
        fix = f"no value behind the =; write {key}=VALUE, {key}=null to take back the file's, or {key}='\"\"' for an empty text"
        raise ConfigError(f"{COMMAND_LINE}: {text}: {fix}")
    if (half := next((character for character in text if "\udc80" <= character <= "\udcff"), None)) is not None:
        # Python's stand-in (surrogateescape) for a byte that the locale cannot decode.
        codec = sys.getfilesystemencoding()
        fix = "write UTF-8" if codec == "utf-8" else UTF_8_LOCALE
        raise ConfigError(f"{COMMAND_LINE}: {key}: byte {ord(half) - 0xDC00:#x} is no character in this locale ({codec}); {fix}")
    # YAML would cut a text at ` #`, drop its leading blank, and read `[INST]` as a list.
    kind = _text_kind(key, cls)
    is_yaml = _YAML_OF_A_TEXT.fullmatch(value.strip()) or kind == "texts" and value.lstrip().startswith("[")
    is_text = kind is not None and not is_yaml
    data = value if is_text else parse_yaml(value, f"{COMMAND_LINE}: {key}")[0]
    for name in values:
        if name.startswith(key + ".") and data is not None and not _is_whole(key, data, cls):  # `policy=null` resets the section
            raise ConfigError(f"{COMMAND_LINE}: {problem(key, data, f'is a section; set its keys, for example {name}=VALUE')}")
        if key.startswith(name + ".") and not _is_inside_mapping(key, name, cls):
            raise ConfigError(f"{COMMAND_LINE}: {problem(key, data, f'{name} is set as a whole, for example {name}=VALUE')}")
    if key not in values and not _names_section(key, cls) and not any(_is_inside_mapping(key, name, cls) for name in values):
        raise ConfigError(f"{COMMAND_LINE}: {problem(key, data, _unknown(key, cls))}")
    return key, data


def _text_kind(key: str, cls: type[BaseModel]) -> Literal["text", "texts"] | None:
    """text: the value of this key is a text, or a text or null. texts: or a list of them. None for all others. Keys of a mapping's
    sections (`evaluations.NAME.data`) too."""
    for name, field in value_keys(cls):
        kinds = {get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in get_args(field.annotation)}
        if name == key:
            if field.annotation is str or kinds == {str, NoneType}:
                return "text"
            lists = {kind for kind in kinds if get_origin(kind) is tuple}
            is_union = get_origin(field.annotation) is not dict and str in kinds
            return "texts" if is_union and lists and not kinds - lists - {str, NoneType} else None
        item = item_class(field)
        if item is not None and is_mapping(field) and key.startswith(name + "."):
            return _text_kind(key.removeprefix(name + ".").partition(".")[2], item)
    return None


def _is_inside_mapping(key: str, name: str, cls: type[BaseModel]) -> bool:
    """True if `key` lies in the mapping `name`, whose keys the user chooses. Pydantic checks the rest."""
    return key.startswith(name + ".") and get_origin(dict(value_keys(cls))[name].annotation) is dict


def _assign(data: dict[str, Any], key: str, value: Any, name: str) -> None:
    """Set a dotted key and create missing sections. Raises ConfigError if a value stands where a section is needed."""
    *parents, last = key.split(".")
    here = data
    for depth, part in enumerate(parents):
        if here.get(part) is None:  # missing, or an optional section that the file leaves out
            here[part] = {}
        inner = here[part]
        if not isinstance(inner, dict):
            section = ".".join(parents[: depth + 1])
            raise ConfigError(
                f"{name}: {problem(section, inner, f'is a section, and {key} is set on the command line; remove the value')}"
            )
        here = inner
    here[last] = value


def _remove(data: dict[str, Any], key: str) -> None:
    head, _, rest = key.partition(".")
    if not rest:
        data.pop(head, None)
    elif isinstance(data.get(head), dict):
        _remove(data[head], rest)


def _takes_null(key: str, cls: type[BaseModel]) -> bool:
    field = dict(value_keys(cls)).get(key)
    return field is not None and type(None) in get_args(field.annotation)


def _place(key: str, origins: Mapping[str, str], name: str) -> str:
    parts = key.split(".")
    for size in range(len(parts), 0, -1):
        if (found := origins.get(".".join(parts[:size]))) is not None:
            return found
    return name


def _refuse_unknown(data: dict[str, Any], cls: type[BaseModel], origins: Mapping[str, str], name: str) -> None:
    whole = Written("", data, cls, None, True)
    for section in (whole, *written_sections(data, cls)):
        for last, value in section.data.items():
            key = f"{section.key}.{last}" if section.key else last
            if last not in section.cls.model_fields:
                raise ConfigError(f"{_place(key, origins, name)}: {problem(key, value, _unknown_in(section, key, last, cls))}")


def _unknown_in(section: Written, key: str, last: str, cls: type[BaseModel]) -> str:
    """Fix for a key that its section lacks: the choice's other section that has it, or the nearest key."""
    choice = section.choice
    others = [word for word, one in choice.sections.items() if last in one.model_fields] if choice is not None else []
    if choice is not None and others:
        word = f"{section.key}.{choice.key}"
        return (
            f"{word} is {section.data[choice.key]}, which has no such key; remove it, or set {choice.key} to {' or '.join(others)}"
        )
    if not section.is_static or choice is not None:
        return f"unknown key; the keys are {', '.join(section.cls.model_fields)}"
    return _unknown(key, cls)


def _unknown(key: str, cls: type[BaseModel]) -> str:
    # The file may be meant for another command; the nearest key here would mislead.
    known = (TrainConfig, *KINDS.values())
    has = (one for one in known if one is not cls and (key in dict(value_keys(one)) or _names_section(key, one)))
    other = next(has, None)
    of_other = "" if other is None else f"`megappo {command_of(other)}` has it; "
    schema = f"--{cls.model_fields['kind'].default} --schema" if issubclass(cls, SupervisedConfig) else "--schema"
    return f"unknown key; {of_other}{hint(key, cls) or f'`megappo config {schema}` lists the keys'}"


def _names_section(key: str, cls: type[BaseModel]) -> bool:
    return bool(_sections_at(key, cls))


def _sections_at(key: str, cls: type[BaseModel]) -> tuple[type[BaseModel], ...]:
    """Classes of the section with this name: several for a choice, none if there is no such section."""
    found: tuple[type[BaseModel], ...] = (cls,)
    for part in key.split("."):
        fields = [field for one in found if (field := one.model_fields.get(part)) is not None]
        found = tuple(section for field in fields for section in section_classes(field))
    return found


def _is_whole(key: str, data: Any, cls: type[BaseModel]) -> bool:
    """True if a value stands for a whole section: the word of a choice, or a mapping for a choice or an optional section."""
    *around, last = key.split(".")
    holders = _sections_at(".".join(around), cls) if around else (cls,)
    fields = [field for holder in holders if (field := holder.model_fields.get(last)) is not None]
    is_choice = len(_sections_at(key, cls)) > 1
    return is_choice or isinstance(data, dict) and any(field.default is None for field in fields)


def _first_line(error: ValidationError, cls: type[BaseModel], origins: Mapping[str, str], name: str) -> str:
    errors = error.errors(include_url=False)
    first = errors[0]
    fix, parent = _fix(first), first["loc"][:-1]
    key = _key_of(first["loc"], cls)
    if first["type"] == "union_tag_invalid":
        word = first.get("ctx", {})["discriminator"].strip("'")
        key, first = f"{key}.{word}", {**first, "input": first["input"][word]}
    field = dict(value_keys(cls)).get(union := _key_of(parent, cls))
    if field is not None and item_class(field) is None and isinstance(first["loc"][-1], str):
        # A key of several types gets one error per type, each below the key; join those of the type that the value is nearest to.
        nearest = _nearest([one for one in errors if one["loc"][: len(parent)] == parent])
        first, inside = nearest[0], nearest[0]["loc"][len(parent) + 1 :]
        key, fix = ".".join((union, *map(str, inside))), ", or ".join(map(_fix, nearest))
    place = _place(key, origins, name)
    if first["type"] == "missing":
        return f"{place}: {_missing(key, cls)}"
    return f"{place}: {problem(key, first['input'], fix)}"


def _nearest(errors: Sequence[ErrorDetails]) -> Sequence[ErrorDetails]:
    """Choose among the errors of alternative types: the first one inside a list, else all but those that say only that a path is
    no list, or a list no path."""
    depth = max(len(one["loc"]) for one in errors)
    if depth > min(len(one["loc"]) for one in errors):
        return [next(one for one in errors if len(one["loc"]) == depth)]
    kinds = {one["type"] for one in errors}
    return [one for one in errors if one["type"] not in ("string_type", "tuple_type")] if kinds & {"path", "too_short"} else errors


def _missing(key: str, cls: type[BaseModel]) -> str:
    around, _, last = key.rpartition(".")
    for name, field in value_keys(cls):
        if name == around and last.isdigit():  # a list that is too short
            return f"{key} is missing: {' '.join((field.description or '').split())}"
        if (name == key or name.startswith(key + ".")) and field.is_required():
            return f"{name} is missing: {' '.join((field.description or '').split())}"
    return f"{key} is missing"


def _key_of(place: Sequence[int | str], cls: type[BaseModel]) -> str:
    """Turn pydantic's place into a dotted name; pydantic puts the word of a choice between section and key."""
    parts: list[str] = []
    section: type[BaseModel] | None = cls
    choice: Choice | None = None
    for part in map(str, place):
        if choice is not None and part in choice.sections:
            section, choice = choice.sections[part], None
            continue
        parts.append(part)
        if section is not None and (field := section.model_fields.get(part)) is not None:
            choice = choice_of(field.annotation, field.discriminator)
            section = None if choice is not None else section_class(field) or item_class(field)
    return ".".join(parts)


def _fix(error: ErrorDetails) -> str:
    if error["type"] == "model_type" and error["input"] is None:  # `policy:` with nothing below it
        return "is an empty section; give it keys, or leave it out"
    template, context = FIXES.get(error["type"]), error.get("ctx", {})
    if error["type"] == "literal_error" and error["input"] in HALF and "'bf16'" in context["expected"]:
        return "fp16 is not supported: its gradients underflow below 6e-8, so it needs loss scaling; use bf16, as wide as fp32"
    if error["type"] == "literal_error" and " or " not in context["expected"]:
        return f"must be {context['expected']}"
    return template.format(**context) if template else error["msg"]


def explicit_keys(config: BaseModel, prefix: str = "") -> frozenset[str]:
    """Return the dotted names of the value keys that the user wrote, in the file or as overrides."""
    found: set[str] = set()
    for name in config.model_fields_set:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            found |= explicit_keys(value, f"{prefix}{name}.")
            continue
        found.add(prefix + name)
        if isinstance(value, dict):
            sections = {key: one for key, one in value.items() if isinstance(one, BaseModel)}
            found |= {key for item, one in sections.items() for key in explicit_keys(one, f"{prefix}{name}.{item}.")}
    return frozenset(found)


def json_schema(cls: type[BaseModel] = TrainConfig) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) for editors: type, range, default and text of every key."""
    schema = cls.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        for name, key in section["properties"].items():
            if "discriminator" in key:  # the bare word is allowed too
                words = {"enum": list(key["discriminator"]["mapping"])}
                chosen = {part: key.pop(part) for part in ("oneOf", "discriminator")}
                section["properties"][name] = {**key, "anyOf": [words, chosen]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
