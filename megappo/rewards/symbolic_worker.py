"""Worker process of `symbolic.py`. Only that process imports this file: with math-verify it takes 0.3 s."""

from __future__ import annotations

import logging
import re
import resource
import signal
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import sympy
from math_verify import grader, parse, verify
from math_verify.grader import get_pct_val, unwrap_fcs

from megappo.rewards.math_forms import form, reference
from megappo.runtime.helper_process import Answerer

# math-verify annotates int, and takes None for no limit of its own, which would need SIGALRM.
_NO_TIMEOUT: Any = None
_IMAGINARY = sympy.Symbol("i", real=False)
_OR = re.compile(r"\\text\{\s*or\s*\}|\\(?:lor|vee)(?![a-zA-Z])|\bor\b")
_INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|lt|gt|ne)(?:q|qslant)?(?![a-zA-Z])")
_by_solutions = grader.sympy_solve_and_compare
_MEMORY_LIMIT = 4 << 30  # bytes of address space; only big integers come near it


def answering(cpu_limit_s: float) -> Answerer:
    """Prepare this process and return its answerer, which takes {"answer"}, {"answer", "response"} or {"responses"}."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the kernel acts on it, even while Python is inside C code
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _MEMORY_LIMIT), hard))
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    grader.sympy_solve_and_compare = _solved_alike  # the process is this rule's alone
    return partial(_answer, cpu_limit_s)


def _answer(cpu_limit_s: float, question: Mapping[str, Any]) -> tuple[str, dict[str, object]]:
    signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)  # CPU time: a busy machine decides no differently
    reply = _compare(question["answer"], question.get("response")) if "answer" in question else _classes(question["responses"])
    signal.setitimer(signal.ITIMER_PROF, 0)
    return "compared", reply


class _Read(NamedTuple):
    """Meaning of a text: sympy's expression, and the text behind it; nothing in `values` if there is no expression."""

    values: list[Any]
    is_percent: bool


def _compare(answer: str, response: str | None) -> dict[str, object]:
    """Read the answer, and compare the response with it if there is one. `usable`: the answer is an expression."""
    gold = _read(reference(answer))
    if not gold.values or response is None:
        return {"usable": bool(gold.values)}
    return {"usable": True, "equal": _equal(gold, _read(response))}


def _classes(responses: list[str]) -> dict[str, object]:
    """Number the answers in the order in which they appear; equal ones, as `_compare` compares, have one number."""
    first: list[_Read] = []  # of every class
    numbers: list[int | None] = []
    for response in responses:
        found = _read(response)
        same = (number for number, other in enumerate(first) if _equal(other, found))
        number = next(same, len(first)) if found.values else None
        if number == len(first):
            first.append(found)
        numbers.append(number)
    return {"classes": numbers}


def _read(marked: str) -> _Read:
    text, is_expression, is_percent, is_literal = form(marked)
    if is_literal:
        return _Read([text], False)
    if is_expression and (union := _union(text)) is not None:
        return _Read([union], False)
    values = parse(f"\\boxed{{{text}}}" if is_expression else text, parsing_timeout=_NO_TIMEOUT)
    number = get_pct_val(values[0]) if values and not is_expression else None
    return _Read(values, is_percent) if number is None else _Read([number], True)


def _union(text: str) -> Any:
    """The set of `x<1 or x>2`; None for another text. math-verify reads it as two answers."""
    parts = _OR.split(text)
    if len(parts) < 2 or not all(_INEQUALITY.search(part) for part in parts):
        return None
    try:
        conditions: list[Any] = [unwrap_fcs(parse(f"\\boxed{{{part}}}", parsing_timeout=_NO_TIMEOUT)[0]) for part in parts]
        return sympy.Union(*(condition.as_set() for condition in conditions))
    except Exception:  # whatever sympy says of conditions that are none
        return None


def _equal(gold: _Read, found: _Read) -> bool:
    if gold.is_percent == found.is_percent:
        return _same(gold.values, found.values)
    # A percentage is its number, as reference answers leave the sign out, and its fraction: 25 % is 25 and 1/4.
    if gold.is_percent:
        return _same(gold.values, found.values) or _same(_hundredth(gold.values), found.values)
    return _same(gold.values, found.values) or _same(gold.values, _hundredth(found.values))


def _hundredth(values: list[Any]) -> list[Any]:
    return [value / 100 for value in values if isinstance(value, sympy.Expr)]


def _same(gold: list[Any], found: list[Any]) -> bool:
    try:
        if _verified(gold, found):
            return not _differ_below_rounding(gold[0], found[0])
        # The parser's `i` is a symbol.
        if any(_IMAGINARY in value.free_symbols for value in (*gold, *found) if isinstance(value, sympy.Basic)):
            return _verified(_complex(gold), _complex(found))
    except Exception:  # sympy's, of what a policy wrote; math-verify too takes it for unequal
        pass
    return False


def _verified(gold: list[Any], found: list[Any]) -> bool:
    if any(_condition_and_numbers(one, other) for one, other in ((gold[:1], found[:1]), (found[:1], gold[:1]))):
        return False
    return bool(verify(gold, found, timeout_seconds=_NO_TIMEOUT, allow_set_relation_comp=True))


def _condition_and_numbers(one: list[Any], other: list[Any]) -> bool:
    """True for `1<x<2` and the set of 1 and 2: math-verify takes the open interval for a pair."""
    return any(grader.is_relation(value) and not grader.is_equation(value) for value in one) and any(
        isinstance(value, sympy.FiniteSet) for value in other
    )


def _complex(values: list[Any]) -> list[Any]:
    return [sympy.sympify(value).subs(_IMAGINARY, sympy.I) for value in values if isinstance(value, sympy.Basic)]


def _differ_below_rounding(gold: Any, found: Any) -> bool:
    """True for small numbers that only math-verify's rounding to six decimals makes equal, as 3e-7 and 4e-7."""
    numbers: list[Any] = [value.evalf() if isinstance(value, sympy.Expr) and value.is_number else None for value in (gold, found)]
    if not all(isinstance(number, sympy.Float | sympy.Integer) for number in numbers):
        return False
    one, other = numbers
    size = max(abs(one), abs(other))
    return bool(size < 1e-3 and abs(one - other) > 2e-3 * size)  # six decimals of such a number are three digits or fewer


def _solved_alike(gold: Any, found: Any, *precision: int) -> bool:
    """Compare solutions in place of math-verify: two equations without a real solution have the same ones there, none."""
    if isinstance(gold, sympy.Eq) and isinstance(found, sympy.Eq) and not sympy.solve(gold, gold.free_symbols):
        ratio = sympy.simplify(_difference(gold) / _difference(found))
        return bool(ratio.is_number and ratio.is_nonzero)
    return _by_solutions(gold, found, *precision)


def _difference(equation: Any) -> Any:
    return equation.lhs - equation.rhs
