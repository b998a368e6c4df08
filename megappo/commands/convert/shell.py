"""Parse a shell script into commands, lists of words: quotes, continued lines, comments, variables and arrays. Executes nothing.

A word that only a run could tell (`$(date)`, a variable set nowhere) keeps its text and the mark UNREAD, so that the key is
reported and its value is not guessed.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megappo.config.errors import ConfigError

# Private-use characters stand for what must survive shlex.
LITERAL, QUOTED, COMPUTED, NEWLINE = "\ue000", "\ue001", "\ue002", "\ue003"  # $ in '', $ in "", $(...), end of a line
UNREAD = "\ue004"
SUM, END = "\ue005", "\ue006"  # around the inside of $((...)), without its blanks

_PIECE = re.compile(
    r"""(?P<single>'[^']*')|(?P<double>"(?:\\.|[^"\\])*")|(?P<continued>\\\n)|(?P<escape>\\.)"""
    r"""|(?P<comment>(?<![^\s;&|(])\#[^\n]*)|(?P<computed>\$\(\((?:[^()]|\([^()]*\))*\)\)|\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`)"""
    r"""|(?P<newline>\n)""",
    re.DOTALL | re.VERBOSE,
)
_COMPUTED = re.compile(r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`")
_SUM = re.compile(r"\$\(\(([\w\s${}*/+-]+)\)\)")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}
_SIGN = re.compile(rf"[${QUOTED}]")
LONGEST = 1000  # characters of one ${...}, and so a bound of the defaults inside defaults
_NAME = re.compile(rf"[${QUOTED}](?P<name>\w+|[@*#?])")
_BRACED = re.compile(r"(?P<name>\w+|[@*])(?P<rest>.*)", re.DOTALL)
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<append>\+?)=(?P<value>.*)", re.DOTALL)
_DECLARING = {"export", "local", "readonly", "declare", "typeset"}
_KEYWORDS = {"then", "else", "do", "if", "elif", "while", "{", "!", "time", "exec", "nohup", "sudo"}


@dataclass
class Script:
    """Commands, one list of words each, and the variables that the script has set."""

    commands: list[list[str]] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)


def parse_shell(text: str, name: str, environment: Mapping[str, str] = os.environ) -> Script:
    """Parse a script; variables that it does not set come from the environment. name: for messages. Raises ConfigError, with the
    place, if quotes are not closed."""
    try:
        lexer = shlex.shlex(_PIECE.sub(_protect, text), posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split, lexer.commenters = True, ""
        tokens = list(lexer)
    except ValueError as error:
        raise ConfigError(f"{name}: not a shell script ({str(error).lower()}), and not YAML or Python by its name") from None
    script = Script()
    for words in _statements(tokens):
        _take(words, script, environment)
    return script


def _protect(match: re.Match[str]) -> str:
    kind, piece = match.lastgroup, match[0]
    if kind == "single":
        return piece.replace("$", LITERAL)
    if kind == "double":
        inner = _COMPUTED.sub(_computed, piece.replace("\\$", LITERAL).replace("\\\n", ""))
        return inner.replace("$", QUOTED)
    if kind == "escape":
        return LITERAL if piece == "\\$" else piece
    return {"continued": " ", "comment": "", "computed": _computed(match), "newline": f" {NEWLINE} "}[kind or ""]


def _computed(match: re.Match[str]) -> str:
    found = _SUM.fullmatch(match[0])
    return COMPUTED if found is None else SUM + "".join(found[1].split()) + END


def _statements(tokens: list[str]) -> Iterator[list[str | list[str]]]:
    """Yield the words of each simple command; an array `NAME=(a b)` is the word `NAME=` and the list of its items."""
    words: list[str | list[str]] = []
    items: list[str] | None = None
    redirected = False
    for token in tokens:
        if items is not None:
            if token.startswith(")"):
                words.append(items)
                items = None
            elif token != NEWLINE:
                items.append(token)
        elif token.startswith("(") and words and isinstance(words[-1], str) and words[-1].endswith("="):
            items = []
            if token == "()":
                words.append([])
                items = None
        elif token == NEWLINE or set(token) <= set("();|") or token in ("&", "&&"):
            yield words
            words, redirected = [], False
        elif set(token) <= set("<>&|"):  # 2>&1, > log: what follows is a file
            if words and words[-1] in ("1", "2"):
                words.pop()
            redirected = True
        elif redirected:
            redirected = False
        else:
            words.append(token)
    yield words


def _take(words: list[str | list[str]], script: Script, environment: Mapping[str, str]) -> None:
    place = 0
    while place < len(words):
        word = words[place]
        assignment = _ASSIGNMENT.fullmatch(word) if isinstance(word, str) else None
        if assignment is not None:
            array = place + 1 < len(words) and isinstance(words[place + 1], list)
            value = (
                [part for item in words[place + 1] for part in _expand(item, script, environment)]
                if array
                else [" ".join(_expand(assignment["value"], script, environment, split=False))]
            )
            before = script.variables.get(assignment["name"], []) if assignment["append"] else []
            script.variables[assignment["name"]] = (
                [*before, *value] if array or not before else [*before[:-1], before[-1] + value[0]]
            )
            place += 2 if array else 1
        elif word in _KEYWORDS or word in _DECLARING or (place and words[place - 1] in _DECLARING and str(word).startswith("-")):
            place += 1
        else:
            break
    rest = [part for word in words[place:] if isinstance(word, str) for part in _expand(word, script, environment)]
    if rest:
        script.commands.append(rest)


def _expand(word: str, script: Script, environment: Mapping[str, str], *, split: bool = True) -> list[str]:
    """Expand a word. A bare `$NAME` splits at spaces, as in bash; `"${NAME[@]}"` gives the items of an array."""
    whole = re.fullmatch(rf"[${QUOTED}]\{{(\w+)\[[@*]\]\}}", word)
    if whole is not None:
        return list(script.variables.get(whole[1], []))
    text = re.sub(f"{SUM}(.*?){END}", lambda found: _total(found[1], script, environment), _replaced(word, script, environment))
    text = text.replace(COMPUTED, f"{UNREAD}$(...)").replace(QUOTED, "$").replace(LITERAL, "$")
    if "$" in word and split:
        return text.split()
    return [text] if text or not (split and QUOTED in word) else []


def _total(text: str, script: Script, environment: Mapping[str, str]) -> str:
    """Compute a sum or product of whole numbers and of variables that hold one; otherwise the mark of what only a run tells."""
    named = re.sub(r"[A-Za-z_]\w*", lambda name: _value(name[0], "", script, environment) or "", text)
    try:
        return str(_number(ast.parse(named, mode="eval").body))
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError):
        return COMPUTED


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("no sum of whole numbers")


def _replaced(text: str, script: Script, environment: Mapping[str, str]) -> str:
    """Replace every variable in a text by its value; a default may hold further ones (`${NAME:-x_${OTHER}_y}`)."""
    parts, start = [], 0
    while (sign := _SIGN.search(text, start)) is not None:
        at = sign.start()
        plain, end = _NAME.match(text, at), _closing(text, at + 1)
        braced = _BRACED.fullmatch(text, at + 2, end - 1) if end else None
        found = braced or plain
        end = end or (plain.end() if plain is not None else at + 1)
        value = text[at] if end == at + 1 else None  # a single $
        if found is not None:
            value = _value(found["name"], braced["rest"] if braced is not None else "", script, environment)
        parts += [text[start:at], f"{UNREAD}{text[at:end]}" if value is None else value]
        start = end
    return "".join(parts) + text[start:]


def _closing(text: str, start: int) -> int:
    """Return the place behind the brace that closes the one at `start`; 0 if there is none nearby."""
    depth = 0
    for place in range(start, min(len(text), start + LONGEST)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1 if text[start] == "{" else 0
    return 0


def _value(name: str, rest: str, script: Script, environment: Mapping[str, str]) -> str | None:
    """Return the value of `${NAMErest}`; None if only a run could tell."""
    if name in ("@", "*"):
        return ""
    known = script.variables.get(name)
    found = known[0] if known else environment.get(name)
    default = re.fullmatch(r":?[-=](.*)", rest, re.DOTALL)
    if rest and default is None:
        return None
    if found or (found is not None and default is None):
        return found
    return None if default is None else _replaced(default[1], script, environment)
