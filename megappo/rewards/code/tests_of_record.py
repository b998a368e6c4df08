"""Tests of a programming task, as data sets write them, and the comparison of a result with what they expect.
Expected values stay on the rank wherever a comparison outside the sandbox can decide: the program never sees them."""

from __future__ import annotations

import ast
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megappo.rewards.base import UnusableAnswer
from megappo.rewards.code.response import lines_of
from megappo.rewards.sandbox.box import Outcome

_REL_TOL, _ABS_TOL = 1e-6, 1e-9  # of numbers that another machine has printed


@dataclass(frozen=True)
class CodeTest:
    """One test."""

    kind: Literal["stdin", "call", "value", "assert"]
    """stdin (a program's output), call (a function's result, of JSON), value (an expression's result) or assert (test code)."""
    stdin: str
    """Text for the program."""
    task: Mapping[str, Any]
    """Task of the runner."""
    expected: Any
    """Text, value, or a nonce of the task."""

    def passed(self, outcome: Outcome) -> bool:
        """True if the program ended well with the expected result. Raises nothing, whatever the program wrote."""
        if outcome.status != "exit 0":
            return False
        if self.kind == "stdin":
            return same_output(outcome.stdout, self.expected)
        try:
            report = json.loads(outcome.report)
            if self.kind == "assert":
                return report["nonce"] == self.expected
            value = _untagged(report["value"])
            if self.kind == "value":
                return bool(value == self.expected)
            return any(_close(value, _lists(expected)) for expected in self.expected)
        except (ValueError, TypeError, KeyError, RecursionError, MemoryError):
            return False  # the program wrote its own report


def read_tests(field: Any, entry_point: str | None = None) -> tuple[CodeTest, ...]:
    """Read the tests of a record. Raises UnusableAnswer, one line: no known form, or no test in it.

    field: {"inputs": [...], "outputs": [...]} of a program, with "fn_name" of that function's arguments and results; or test code,
    or a list of it, each one test; or JSON text of one of them. entry_point: function to which test code's own `check` is applied
    (HumanEval).
    """
    if isinstance(field, str):
        field = _json_or_code(field)
    if isinstance(field, Mapping):
        return _of_pairs(field)
    codes = [field] if isinstance(field, str) else field
    if not isinstance(codes, Sequence) or not codes or not all(isinstance(code, str) and code.strip() for code in codes):
        raise UnusableAnswer("the tests are neither inputs with outputs, nor test code, nor a list of it")
    return tuple(_of_code(code, entry_point) for code in codes)


def same_output(text: str, expected: str) -> bool:
    """True if both have the same words on the same lines; blanks do not count, and decimals may differ by 1e-6 of their size."""
    lines, wanted = text.rstrip().split("\n"), expected.rstrip().split("\n")
    return len(lines) == len(wanted) and all(_same_line(line.split(), want.split()) for line, want in zip(lines, wanted))


def _same_line(words: Sequence[str], wanted: Sequence[str]) -> bool:
    return len(words) == len(wanted) and all(word == want or _same_decimal(word, want) for word, want in zip(words, wanted))


def _same_decimal(word: str, want: str) -> bool:
    if "." not in want:
        return False
    try:
        return math.isclose(float(word), float(want), rel_tol=_REL_TOL, abs_tol=_ABS_TOL)
    except ValueError:
        return False


def _json_or_code(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, (Mapping, list)) else text


def _of_pairs(field: Mapping[str, Any]) -> tuple[CodeTest, ...]:
    inputs, outputs, function = field.get("inputs"), field.get("outputs"), field.get("fn_name")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or isinstance(inputs, str) or isinstance(outputs, str):
        raise UnusableAnswer("the tests lack inputs or outputs, which are lists")
    if not inputs or len(inputs) != len(outputs):
        raise UnusableAnswer(f"the tests have {len(inputs)} inputs and {len(outputs)} outputs")
    make = _stdin_test if function is None else _call_test
    return tuple(make(given, expected, function) for given, expected in zip(inputs, outputs))


def _stdin_test(given: Any, expected: Any, function: None) -> CodeTest:
    return CodeTest("stdin", _text(given), {"kind": "stdin"}, _text(expected))


def _text(value: Any) -> str:
    """Text of an input or output; some data sets list its lines."""
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, Sequence) or not all(isinstance(line, str) for line in lines):
        raise UnusableAnswer(f"an input or output of a program is {type(value).__name__}, neither text nor a list of lines")
    return "\n".join(lines)


def _call_test(given: Any, expected: Any, function: Any) -> CodeTest:
    """Make a test of a list of arguments, or of JSON text: one argument per line, and the result (LiveCodeBench)."""
    if isinstance(given, str):
        try:
            given = [json.loads(line) for line in lines_of(given)]
            expected = json.loads(expected) if isinstance(expected, str) else expected
        except ValueError:
            raise UnusableAnswer("an input or output of a function is text that is no JSON") from None
    if not isinstance(function, str) or not isinstance(given, Sequence):
        raise UnusableAnswer("fn_name is no name, or an input of the function is no list of arguments")
    # APPS wraps the result in a list, others do not.
    accepted = [expected, expected[0]] if isinstance(expected, list) and len(expected) == 1 else [expected]
    return CodeTest("call", "", {"kind": "call", "function": function, "arguments": list(given)}, accepted)


def _of_code(code: str, entry_point: str | None) -> CodeTest:
    if entry_point is not None:
        code = f"{code}\ncheck({entry_point})\n"
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UnusableAnswer(f"the test code cannot be parsed: {error}") from None
    if not any(isinstance(node, (ast.Assert, ast.Raise, ast.Call)) for node in ast.walk(tree)):
        raise UnusableAnswer(f"the test code {code.strip()[:40]!r} checks nothing, so every program would pass")
    if (split := _split(tree)) is not None:
        return CodeTest("value", "", {"kind": "value", "expression": split[0]}, split[1])
    nonce = secrets.token_hex(16)
    return CodeTest("assert", "", {"kind": "assert", "test": code, "nonce": nonce}, nonce)


def _split(tree: ast.Module) -> tuple[str, Any] | None:
    """Split test code that is one `assert expression == literal` into (expression, literal)."""
    if len(tree.body) != 1 or not isinstance(statement := tree.body[0], ast.Assert):
        return None
    test = statement.test
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return None
    try:
        return ast.unparse(test.left), ast.literal_eval(test.comparators[0])
    except (ValueError, TypeError):
        return None  # no literal


def _untagged(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, items = value
    if kind == "bytes":
        return bytes.fromhex(items)
    if kind == "complex":
        return complex(*items)
    if kind == "dict":
        return {_untagged(key): _untagged(item) for key, item in items}
    return {"list": list, "tuple": tuple, "set": set}[kind](_untagged(item) for item in items)


def _lists(value: Any) -> Any:
    # JSON has lists only, and its keys are text.
    if isinstance(value, (list, tuple)):
        return [_lists(item) for item in value]
    return {str(key): _lists(item) for key, item in value.items()} if isinstance(value, dict) else value


def _close(value: Any, expected: Any) -> bool:
    value = _lists(value)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(_close(a, b) for a, b in zip(value, expected))
    if isinstance(value, float) and isinstance(expected, (int, float)):
        return math.isclose(value, expected, rel_tol=_REL_TOL, abs_tol=_ABS_TOL)
    return bool(value == expected)
