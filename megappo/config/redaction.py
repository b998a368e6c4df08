"""Hide secrets in what megappo writes down: command lines, environment variables, messages. Imports nothing of megappo.

A value is a secret under a telling name (`HF_TOKEN=...`), as credentials in a URL (`https://user:password@host`), or in the form of
a well-known token (`hf_...`). When in doubt it is hidden: a leaked secret cannot be taken back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "(hidden)"  # the name alone shows that the value was set

_SECRET_NAME = re.compile(
    r"TOKEN|KEY|SECRET|PASS|CRED|AUTH|JWT|COOKIE|BEARER|DSN|WEBHOOK|SIGNATURE|LOGIN|_PWD(?:_|$)|(?:^|_)(?:PAT|PW|PSW)(?:_|$)",
    re.IGNORECASE,
)
_VALUE = r"""(?:\(hidden\)|"[^"]*"|'[^']*'|[^\s,;&'"]+)"""
# An assignment to a variable of the environment: `HF_TOKEN=...`, also inside `--export=ALL,HF_TOKEN=...`.
_VARIABLE = re.compile(rf"(?<![A-Za-z0-9_])([A-Z][A-Z0-9_]*)(\s?=\s?){_VALUE}")
# Options, parameters of a URL and keys of other programs. Not a bare `..._key` or `..._token`: data.prompt_key, eos_token.
_WORD = (
    r"(?:(?:access|api|auth|bearer|gh|github|hf|id|private|refresh|secret|session|wandb)[_-]?)*"
    r"(?:token|password|passwd|passphrase|secret|api[_-]?key|access[_-]?key|private[_-]?key|pwd|pw|pat|credentials?|signature)"
)
_ASSIGNMENT = re.compile(rf"(?<![A-Za-z0-9_])({_WORD})(\s?=\s?){_VALUE}", re.IGNORECASE)
_OPTION = re.compile(rf"--?{_WORD}", re.IGNORECASE)
_OPTION_VALUE = re.compile(rf"(?<!\S)({_OPTION.pattern}\s+){_VALUE}", re.IGNORECASE)
# Up to the last @ before a slash, and for `user:password` before a blank: a password may hold an @, or a slash that nobody escaped.
_CREDENTIALS = re.compile(r"""(://)(?:[^\s/:@'"]*:[^\s'"]*|[^\s/'"]*)@""")
_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{32,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)|(?<=Bearer )[\w.~+/=-]{8,}"
)


def is_secret_name(name: str) -> bool:
    """True if the value of an environment variable with this name is hidden."""
    return _SECRET_NAME.search(name) is not None


def hide_secrets(text: str) -> str:
    """Replace every secret in the text by `(hidden)`."""
    text = _CREDENTIALS.sub(rf"\1{HIDDEN}@", text)
    text = _TOKENS.sub(HIDDEN, text)
    text = _VARIABLE.sub(lambda found: f"{found[1]}{found[2]}{HIDDEN}" if is_secret_name(found[1]) else found[0], text)
    return _OPTION_VALUE.sub(rf"\1{HIDDEN}", _ASSIGNMENT.sub(rf"\1\2{HIDDEN}", text))


def redacted(command: Sequence[str]) -> list[str]:
    """Hide the secrets of a command line for a record: `--token x` and `--token=x` lose x."""
    hidden = [False, *(_OPTION.fullmatch(word) is not None for word in command)]
    return [HIDDEN if hide else hide_secrets(word) for hide, word in zip(hidden, command)]


def redacted_values(data: Any, name: str = "") -> Any:
    """Hide the secrets in the texts of plain data (mappings, lists, scalars), by their form or by the name of their key."""
    if isinstance(data, Mapping):
        return {key: redacted_values(value, str(key)) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [redacted_values(item, name) for item in data]
    if not isinstance(data, str):
        return data
    return HIDDEN if _OPTION.fullmatch(f"--{name}") or (name.isupper() and is_secret_name(name)) else hide_secrets(data)
