"""Variables of a chat template, `data.template_args`: which a template reads, and a template that has them as defaults."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megappo.runtime.messages import parse_object


def read_by_template(
    variables: Mapping[str, Any], tokenizer: Any, directory: Path, *, leave_out_unread: bool = False
) -> dict[str, Any]:
    """Return the variables for this tokenizer. Raises ValueError for one that the tokenizer or megappo sets, and for one
    that no template reads, of which Jinja takes no notice, unless those are left out. directory: of the tokenizer's files."""
    if not variables:
        return {}
    reads, given = _variables(tokenizer)
    chosen = {name: value for name, value in variables.items() if name in reads or not leave_out_unread}
    for name in chosen:
        if name in given:
            raise ValueError(f"data.template_args: {name} is set by the tokenizer or by megappo; leave it out")
        if name not in reads:
            known = ", ".join(sorted(reads)) or "none"
            raise ValueError(
                f"data.template_args: the chat template of {directory} reads no {name}; variables that it reads: {known}"
            )
    return chosen


def write_defaults(variables: Mapping[str, Any], tokenizer: Any, directory: Path) -> None:
    """Give the templates of the tokenizer in `directory` these variables as defaults."""
    # In the file that transformers prefers; a second copy without the defaults would be what other programs read.
    for name, template in _templates(tokenizer).items():
        file = directory / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
        file.parent.mkdir(exist_ok=True)
        file.write_text(_with_defaults(template, variables), encoding="utf-8")
    file = directory / "tokenizer_config.json"
    if file.exists():
        config = {key: value for key, value in parse_object(file.read_bytes(), str(file)).items() if key != "chat_template"}
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def _templates(tokenizer: Any) -> Mapping[str, str]:
    template = tokenizer.chat_template
    return {"default": template} if isinstance(template, str) else template


def _variables(tokenizer: Any) -> tuple[set[str], set[str]]:
    """Names that the chat templates read and nothing sets, and names that the tokenizer or a caller of it sets."""
    from jinja2 import Environment, meta
    from jinja2.ext import loopcontrols

    # transformers' own tag, which marks what an assistant said.
    plain = [re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", one) for one in _templates(tokenizer).values()]
    environment = Environment(extensions=[loopcontrols])
    found = set().union(*(meta.find_undeclared_variables(environment.parse(one)) for one in plain))
    given = {"messages", "documents", "raise_exception", "strftime_now", *tokenizer.special_tokens_map}
    given |= set(inspect.signature(tokenizer.apply_chat_template).parameters)
    return found - given, given


def _with_defaults(template: str, variables: Mapping[str, Any]) -> str:
    """Return a template that renders with these variables where none are given."""
    # Each line ends without output, and the next one begins as the first line of the template did: transformers drops the newline
    # after a block, and the blanks before one.
    lines = [f"{{% set {name} = {name} | default({_jinja(value)}) %}}\n" for name, value in variables.items()]
    return "".join(lines) + template


def _jinja(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_jinja(key)}: {_jinja(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_jinja, value))}]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
