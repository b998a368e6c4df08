"""Programs judged by the tests of their record: which pass, which fail, and that no program forges its verdict."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from megappo.rewards.base import RewardInput, UnusableAnswer
from megappo.rewards.code.part import CodePart, CodeReward, read_problem
from megappo.rewards.code.response import program_of
from megappo.rewards.code.tests_of_record import CodeTest, read_tests, same_output
from megappo.rewards.sandbox.box import Limits, Outcome
from tests.rewards.samples import sample
from tests.rewards.sandboxes import need_isolation

FRACTION = CodeReward("tests", None, None, "fraction", timeout_s=20.0, workers=2, limits=Limits())
FENCE = "```"


@pytest.fixture(scope="module")
def fraction() -> Iterator[CodePart]:
    need_isolation()
    part = CodePart(FRACTION)
    yield part
    part.close()


def fenced(code: str) -> str:
    return f"Here it is:\n\n{FENCE}python\n{code}\n{FENCE}\n"


def given(code: str, record: Mapping[str, Any]) -> RewardInput:
    return replace(sample(fenced(code)), record=record)


def result(part: CodePart, code: str, tests: Any) -> dict[str, Any]:
    found = part.start([given(code, {"tests": tests})])[0].result()
    return getattr(found, "result", found)


# ---------------------------------------------------------------------------------------------------------- the response


def test_the_last_python_block_is_the_program() -> None:
    table = {
        fenced("a = 1"): "a = 1\n",
        fenced("a = 1") + "\nno, better:\n" + fenced("a = 2") + "\n```text\nout\n```": "a = 2\n",
        "```\nonly = 1\n```": "only = 1\n",
        "```\none = 1\n```\n```\ntwo = 2\n```": None,
        "```cpp\nint main;\n```": None,
        "```PY\na = 1\n```": "a = 1\n",
        "~~~python\na = '```'\n~~~": "a = '```'\n",
        "````python\n```\n````": "```\n",
        "a = 1": None,
        "```python\na = 1": None,  # cut by the length limit
        fenced("a = 1") + "```python\nb = ": "a = 1\n",
        "": None,
    }
    assert {response: program_of(response) for response in table} == table


# -------------------------------------------------------------------------------------------------------------- the tests

PAIRS = {"inputs": ["3\n1 2 3\n", "1\n5\n"], "outputs": ["6\n", "5\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [[1, 2]]]}
MBPP = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert set(add([1], [2])) == {1, 2}"]
HUMAN_EVAL = "def check(candidate):\n    assert candidate(1, 2) == 3\n    for a in range(5):\n        assert candidate(a, 0) == a\n"


def test_each_form_of_tests_is_read() -> None:
    def kinds(field: Any, entry_point: str | None = None) -> list[str]:
        return [test.kind for test in read_tests(field, entry_point)]

    assert kinds(PAIRS) == kinds(json.dumps(PAIRS)) == ["stdin", "stdin"]
    assert kinds(CALLS) == ["call", "call"]
    assert kinds(MBPP) == kinds(json.dumps(MBPP)) == ["value"] * 3
    assert kinds("\n".join(MBPP)) == kinds(HUMAN_EVAL, "add") == ["assert"]
    assert kinds("assert add(1, 2) == add(2, 1)") == kinds("assert abs(add(1, 2) - 3) < 1e-6") == ["assert"]


NO_LINE_ENDS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"
"""Characters at which str.splitlines ends a line, and Python, JSON and Markdown do not."""


@pytest.mark.parametrize("character", NO_LINE_ENDS, ids=lambda character: f"U+{ord(character):04X}")
def test_a_program_and_its_arguments_end_lines_where_python_and_json_do(character: str) -> None:
    code = f"text = 'a{character}b'"
    assert program_of(fenced(code)) == code + "\n"
    assert program_of(fenced(code).replace("\n", "\r\n")) == code + "\n"
    text = json.dumps(f"a{character}b", ensure_ascii=False)
    pairs = {"inputs": [f"{text}\n[1, 2]\n", f"{text}\r\n3"], "outputs": [text, "1"], "fn_name": "f"}
    tests = read_tests(pairs)
    assert [test.task["arguments"] for test in tests] == [[f"a{character}b", [1, 2]], [f"a{character}b", 3]]
    assert tests[0].expected == [f"a{character}b"]


def test_no_arguments_are_no_lines() -> None:
    assert [test.task["arguments"] for test in read_tests({"inputs": [""], "outputs": ["1"], "fn_name": "f"})] == [[]]


def test_what_is_expected_is_not_in_the_task() -> None:
    for field, secrets in ((PAIRS, ["6"]), ({**CALLS, "outputs": [12345, 67890]}, ["12345", "67890"]), (MBPP[:1], ["3"])):
        for test in read_tests(field):
            assert not any(secret in json.dumps(dict(test.task)) for secret in secrets)


UNUSABLE = [
    (None, "neither inputs with outputs"),
    ([], "neither inputs with outputs"),
    ("", "neither inputs with outputs"),
    ([1], "neither inputs with outputs"),
    ({}, "lack inputs or outputs"),
    ({"inputs": "1", "outputs": "2"}, "lack inputs or outputs"),
    ({"inputs": [], "outputs": []}, "0 inputs"),
    ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
    ({"inputs": [1], "outputs": ["1"]}, "is int, neither text"),
    ({"fn_name": "f", "inputs": ["{"], "outputs": [1]}, "is text that is no JSON"),
    ({"fn_name": 3, "inputs": [[1]], "outputs": [1]}, "fn_name is no name"),
    ("assert f(", "cannot be parsed"),
    ("7", "checks nothing, so every program would pass"),  # another field, as the answer
    (["assert f(1) == 2", "x = 3"], "checks nothing"),
]


@pytest.mark.parametrize(("field", "message"), UNUSABLE)
def test_tests_that_cannot_be_read_are_told_in_one_line(field: Any, message: str) -> None:
    with pytest.raises(UnusableAnswer, match=message) as error:
        read_tests(field)
    assert "\n" not in str(error.value)


def test_a_record_without_the_fields_is_unusable() -> None:
    settings = replace(FRACTION, tests_key="meta.tests", entry_point_key="name", setup_key="imports")
    record: dict[str, Any] = {"meta": {"tests": HUMAN_EVAL}, "name": "add", "imports": ["import math", "import re"]}
    tests, setup = read_problem(settings, record)
    assert "check(add)" in tests[0].task["test"] and setup == "import math\nimport re"
    for changed in ({"meta": {}}, {"name": "f(x)"}, {"imports": 3}, {"name": None}):
        with pytest.raises(UnusableAnswer):
            read_problem(settings, record | changed)


def test_output_is_compared_by_lines_and_words() -> None:
    same = [
        ("1 2\n3\n", "1 2\n3"),
        ("1  2 \n3\n\n", "1 2\n3\n"),
        ("0.3333333", "0.33333333"),
        ("1e-12", "0.0"),
        ("", ""),
        ("3", "3.0"),
    ]
    other = [("1 2 3", "1 2\n3"), ("1\n\n2", "1\n2"), ("3.0", "3"), ("0.33", "0.3333"), ("nan", "0.5"), ("a", "a b"), ("1", "")]
    assert all(same_output(text, expected) for text, expected in same)
    assert not any(same_output(text, expected) for text, expected in other)


def test_a_report_of_any_kind_raises_nothing() -> None:
    deep = "[" * 100_000
    reports = ["", "{", deep, "null", "[]", "{}", '{"value": ["list"]}', '{"value": ["eval", "x"]}', '{"value": ["bytes", 3]}']
    reports += ['{"value": ["set", [["list", []]]]}', '{"value": ["dict", [1]]}', '{"value": ' + "9" * 10_000 + "}", '{"nonce": 1}']
    tests = [*read_tests(MBPP), *read_tests(CALLS), *read_tests(HUMAN_EVAL, "add")]
    assert not any(test.passed(Outcome("exit 0", "", report)) for test in tests for report in reports)
    assert CodeTest("value", "", {}, 3).passed(Outcome("exit 0", "", '{"value": 3}')), "the reader can say yes"


# ----------------------------------------------------------------------------------------------------------- the verdicts

ADD = "def add(a, b):\n    return a + b"
SUM = "n = int(input())\nprint(sum(map(int, input().split())))"
MAIN = "if __name__ == '__main__':\n    "
TUPLE = "def add(a, b):\n    return a + b if type(a) is int else tuple(a + b)"
NO_TEXT = "def add(a, b):\n    return a + int(b) if type(b) is str else a + b"
POINT = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef make(x): return P(x)"
COUNTER = "from collections import Counter\ndef f(x): return Counter(x)"
PLAIN = ("None", "True", "-1.5", "b'ab'", "1+2j", "{1: (2, [3])}", "'\\ud800'", "10**40", "{'a', 'b'}")
ALL = {"passed": 1.0}
# name -> program, tests, score, its parts that are not 0 besides has_code
VERDICTS: dict[str, tuple[str, Any, float, dict[str, float]]] = {
    "program right": (SUM, PAIRS, 1.0, ALL),
    "program right half the time": ("input()\nprint(6)", PAIRS, 0.5, {"passed": 0.5}),
    "program under its main guard": (MAIN + "input(); print(sum(map(int, input().split())))", PAIRS, 1.0, ALL),
    "program with all input read": ("import sys; print(sum(map(int, sys.stdin.read().split()[1:])))", PAIRS, 1.0, ALL),
    "program that raises after the answer": (SUM + "\n1 / 0", PAIRS, 0.0, {"error": 1.0}),
    "program that does not end": (SUM + "\nwhile True: pass", PAIRS, 0.0, {"timeout": 1.0}),
    "function right": (ADD, CALLS, 1.0, ALL),
    "function of a class Solution": ("class Solution:\n    def add(self, a, b): return a + b", CALLS, 1.0, ALL),
    "function with a tuple for a list": (TUPLE, CALLS, 1.0, ALL),
    "function wrong once": ("def add(a, b): return 3", CALLS, 0.5, {"passed": 0.5}),
    "function missing": ("def sub(a, b): return a - b", CALLS, 0.0, {"error": 1.0}),
    "values right": (ADD, MBPP, 1.0, ALL),
    "values wrong": ("def add(a, b): return a", MBPP[:2], 0.0, {}),
    "values that raise for text": (NO_TEXT, MBPP, 2 / 3, {"passed": 2 / 3, "error": 1.0}),
    "values behind a main guard": (f"{ADD}\n{MAIN}add(input(), 1)", MBPP, 1.0, ALL),
    "check right": (ADD, HUMAN_EVAL + "check(add)", 1.0, ALL),
    "check wrong": ("def add(a, b): return max(a, b, 3)", HUMAN_EVAL + "check(add)", 0.0, {"error": 1.0}),
    "objects of the program's class": (POINT, ["assert make(1) == P(1) and make(1) != P(2)"], 1.0, ALL),
    "other collections": (COUNTER, ["assert f('aab') == {'a': 2, 'b': 1}"], 1.0, ALL),
    "every plain value": ("def f(x): return x", [f"assert f({value}) == {value}" for value in PLAIN], 1.0, ALL),
    "no Python": ("def add(a, b:", MBPP[:1], 0.0, {"error": 1.0}),
}


def test_verdicts(fraction: CodePart) -> None:
    quick = CodePart(replace(FRACTION, timeout_s=1.5))
    try:
        for name, (code, tests, score, parts) in VERDICTS.items():
            found = result(quick if "timeout" in parts else fraction, code, tests)
            expected = {"has_code": 1.0, "passed": 0.0, "timeout": 0.0, "error": 0.0} | parts
            assert found == {"score": pytest.approx(score), "parts": pytest.approx(expected)}, name
    finally:
        quick.close()


ALWAYS = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = object.__hash__
"""
BY_METACLASS = """
class M(type):
    def __eq__(self, other): return True
    __hash__ = type.__hash__
class A(metaclass=M): pass
def add(*a): return A
"""
EVERY_FILE = """
import os
for fd in range(1, 64):
    for text in ('{"value": true}', '{"nonce": true}', '{"passed": true}', '1', 'ok'):
        try: os.write(fd, text.encode())
        except OSError: pass
os._exit(0)
"""
NONE = "\ndef add(*a): return None"
ANY = "\ndef add(*a): return Any()"
NO_CODE = "(lambda: None).__code__"
FORGED = {
    "says so": "print('all tests passed'); print('ok')",
    "leaves early": "import os; os._exit(0)",
    "leaves by sys.exit": "import sys; sys.exit(0)",
    "leaves by exit": "exit(0)",
    "leaves at the call": "import os\ndef add(*a): os._exit(0)",
    "raises SystemExit at the call": "def add(*a): raise SystemExit(0)",
    "leaves at the end": "import atexit, os\natexit.register(os._exit, 0)",
    "equals everything": ALWAYS + ANY,
    "equals everything in a list": ALWAYS + "def add(*a): return [Any()]",
    "is a number that equals everything": ALWAYS.replace("class Any", "class Any(int)") + ANY,
    "is a class that equals everything": BY_METACLASS,
    "has no asserts": "import builtins\nbuiltins.AssertionError = SystemExit" + NONE,
    "changes exec": "import builtins\nbuiltins.exec = lambda *a: None" + NONE,
    "changes compile": f"import builtins\nbuiltins.compile = lambda *a, **k: {NO_CODE}" + NONE,
    "changes any": ALWAYS + "import builtins\nbuiltins.any = lambda *a: False" + ANY,
    "changes type": ALWAYS + "import builtins\nbuiltins.type = lambda *a: int" + ANY,
    "changes ast": f"import ast\nast.NodeTransformer.visit = ast.parse = lambda *a: {NO_CODE}" + ALWAYS + ANY,
    "changes json": "import json\njson.dumps = lambda x: '{\"value\": 3}'" + NONE,
    "writes to every file": EVERY_FILE,
    "forks first": "import os\nif os.fork(): os._exit(0)" + NONE,
    "starts again": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'pass'])",
    "replaces the interpreter's end": "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\n1 / 0",
}
FORGED_TESTS: dict[str, Any] = {
    "stdin": {"inputs": ["3\n1 2 3\n"], "outputs": ["17"]},
    "value": ["assert add(1, 2) == 17"],
    "assert": ["assert 17 == add(1, 2)", "def check(f):\n    assert f(1, 2) == 17\n    assert [f(1, 2)] == [17]\ncheck(add)"],
}


@pytest.mark.slow  # 50 sandboxes
def test_no_program_forges_its_verdict(fraction: CodePart) -> None:
    # A program of a function prints nothing, so standard output is no way for it.
    table = [(name, kind, code) for name, code in FORGED.items() for kind in FORGED_TESTS if kind != "stdin" or "def " not in code]
    futures = fraction.start([given(code, {"tests": FORGED_TESTS[kind]}) for _, kind, code in table])
    passed = [(name, kind) for (name, kind, _), future in zip(table, futures) if _result(future)["score"] != 0]
    assert not passed


def test_what_the_guard_stops_would_pass_without_it(fraction: CodePart) -> None:
    """A chain of comparisons is left as it stands: there the object that equals everything is believed."""
    code = ALWAYS + "def add(*a): return Any()"
    assert result(fraction, code, ["assert 17 == add(1, 2) == 17"])["score"] == 1.0


def test_a_program_does_not_find_what_is_expected(fraction: CodePart) -> None:
    """It prints all it can see: no file, frame, object or argument of its process holds the expected output."""
    look = (
        "import gc, os, sys\nfor o in gc.get_objects(): print(repr(o)[:10000])\nframe = sys._getframe()\n"
        "while frame: print(frame.f_locals, frame.f_globals); frame = frame.f_back\nprint(sys.argv, sys.orig_argv, os.environ)\n"
        "for fd in range(64):\n    try: print(os.pread(fd, 10000, 0))\n    except OSError: pass\n"
    )
    tests = {"inputs": ["stdin"], "outputs": ["x"]}
    with pytest.MonkeyPatch.context() as patch:
        seen: list[str] = []
        patch.setattr(CodeTest, "passed", lambda self, outcome: seen.append(outcome.stdout) or False)
        record = {"tests": {**tests, "outputs": ["what_is_expected"]}}
        fraction.start([given(look, record)])[0].result()  # its parts do not matter
    assert "stdin" in seen[0] and "what_is_expected" not in seen[0]


def test_all_or_nothing_stops_at_the_first_failure() -> None:
    need_isolation()
    part = CodePart(replace(FRACTION, score="all"))
    try:
        assert result(part, "input()\nprint(6)", PAIRS)["score"] == 0.0
        assert result(part, SUM, PAIRS) == {"score": 1.0, "parts": {"has_code": 1.0, "passed": 1.0, "timeout": 0.0, "error": 0.0}}
        slow = {"inputs": ["x"] * 50, "outputs": ["y"] * 50}
        started = time.monotonic()
        assert result(part, "import time; time.sleep(0.4)", slow)["score"] == 0.0
        assert time.monotonic() - started < 15, "50 tests would take 20 s"
    finally:
        part.close()


def test_a_response_without_a_program_scores_nothing(fraction: CodePart) -> None:
    futures = fraction.start([replace(sample("return a + b"), record={"tests": MBPP}), replace(sample(""), record={"tests": [1]})])
    assert _result(futures[0]) == {"score": 0.0, "parts": {"has_code": 0.0, "passed": 0.0, "timeout": 0.0, "error": 0.0}}
    with pytest.raises(UnusableAnswer):
        futures[1].result()
    assert fraction.start([]) == []


def test_a_part_can_be_closed_with_programs_running() -> None:
    need_isolation()
    part = CodePart(replace(FRACTION, timeout_s=1000.0))
    futures = part.start([given("while True: pass", {"tests": PAIRS}) for _ in range(4)])
    time.sleep(0.5)
    started = time.monotonic()
    part.close()
    part.close()
    assert time.monotonic() - started < 30 and all(future.done() for future in futures)


def _result(future: Any) -> dict[str, Any]:
    found = future.result()
    return getattr(found, "result", found)
