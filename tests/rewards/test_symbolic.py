"""math_verify: equality as mathematics, agreement with GSM8K, and responses whose evaluation never ends."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from megappo.rewards.base import NoVerdict, UnusableAnswer
from megappo.rewards.math_forms import final_answer
from megappo.rewards.symbolic import MathVerify
from tests.gsm8k_files import gsm8k, needs_gsm8k
from tests.rewards.math_answers import MATH_ANSWERS
from tests.rewards.samples import sample


@pytest.fixture(scope="module")
def rule() -> Iterator[MathVerify]:
    rule = MathVerify()
    yield rule
    rule.close()


TABLE = [
    ("#### 72", "72", 1),
    ("#### 72", "a solution with <<48/2=24>>24\n#### 72", 1),
    ("#### $1,234.00", "1234", 1),
    ("\\boxed{72}", "72", 1),
    ("so the answer is \\boxed{\\frac{1}{2}}", "0.5", 1),
    ("so the answer is $\\frac{2}{4}$", "\\frac{1}{2}", 1),
    ("It is 1/2.", "$\\frac{1}{2}$", 1),
    ("\\boxed{(x+1)^2}", "x^2+2x+1", 1),
    ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}", 1),
    ("\\boxed{-5}", "-5", 1),
    ("\\boxed{5}", "-5", 0),
    ("\\boxed{73}", "72", 0),
    ("\\boxed{(x+1)^2}", "x^2+1", 0),
    ("#### 71\n the answer is \\boxed{72}", "72", 1),  # a box decides where there is one
    ("the answer is \\boxed{71}\n#### 72", "72", 0),
    ("#### Step 1\n2 + 2\n#### Step 2\nso \\boxed{4}", "4", 1),  # headings of Markdown
    ("#### 1. Add\n\\boxed{4}\n#### 2. Check", "4", 1),
    ("#### Step 1\nThe answer is 4.\n#### Done", "4", 1),
    ("#### Step 1\nThe answer is 5.", "4", 0),
    ("#### 72\n#### Check", "72", 1),
    ("#### $\\frac{1}{2}$", "0.5", 1),
    ("#### \\$5", "5", 1),
    ("#### -\\$5", "-5", 1),
    ("#### 72\n\\boxed{7", "72", 1),  # a box that the length limit cut is none
    ("\\boxed{\\text{a\\}b} 72}\n#### 71", "71", 0),
    ("#### 71\n#### 72", "72", 1),  # the last one
    ("#### 72\n#### 71", "72", 0),
    ("#### ", "72", 0),
    ("I do not know", "72", 0),
    ("", "72", 0),
    ("\\boxed{", "72", 0),
    ("a\nb \u2028 \x00 \ud800 \\boxed{72}", "72", 1),  # whatever text a policy makes travels to the worker and back
]


def test_final_answers_are_compared_as_mathematics(rule: MathVerify) -> None:
    for response, answer, expected in TABLE:
        assert rule(sample(response, answer)) == expected


def test_answers_of_competition_mathematics(rule: MathVerify) -> None:
    for answer, right, wrong in MATH_ANSWERS:
        rule.check_answer(answer)
        assert [rule(sample(f"So it is ${text}$.", answer)) for text in (right, wrong)] == [1.0, 0.0]


def table() -> Iterator[tuple[str, str, str, float]]:
    """(kind, reference answer, response, score) of each line of math_table.txt."""
    kind = ""
    for line in Path(__file__).with_name("math_table.txt").read_text(encoding="utf-8").split("\n"):
        mark, _, rest = line.partition(" ")
        if line.startswith("# kind: "):
            kind = line.removeprefix("# kind: ")
        elif mark in ("+", "-", "++", "--"):
            answer, response = rest.split(" => ")
            whole = response.replace("\u23ce", "\n") if len(mark) == 2 else f"So it is \\boxed{{{response}}}"
            yield kind, answer, whole, float(mark[0] == "+")


@pytest.mark.slow
def test_the_table_of_verdicts(rule: MathVerify) -> None:
    rows = list(table())
    wrong = [row for row in rows if rule(sample(row[2], row[1])) != row[3]]
    kinds = {kind: sum(row[0] == kind for row in rows) for kind, *_ in rows}
    print(f"\nmath_verify: {len(rows) - len(wrong)} of {len(rows)} verdicts are right, {kinds}")
    assert len(rows) >= 300 and wrong == []


def test_votes_are_for_the_answer_and_not_for_its_spelling(rule: MathVerify) -> None:
    votes = [
        (0, r"\boxed{7}? No: \boxed{5}"),
        (0, "<answer>5.</answer>"),
        (1, r"\boxed{7}"),
        (0, r"\boxed{5}, as \boxed{} asks"),
        (2, r"\boxed{2.5e-3}"),
        (2, r"\boxed{\text{The answer is } 0.0025}"),
        (3, r"\boxed{x^2+1=0}"),
        (4, r"\boxed{x^2+2=0}"),
        (None, r"Put it into \boxed{}."),
        (1, r"\fbox{7}"),
    ]
    assert rule.classes([response for _, response in votes]) == [number for number, _ in votes]


@pytest.mark.slow
@needs_gsm8k
def test_all_gold_answers_agree_inside_a_thread_in_a_minute_of_processor_time() -> None:
    """8,792 gold answers as responses score 1; every 20th with its last digit changed scores 0. Not the main thread: no signals
    there."""

    def score_all() -> tuple[int, int]:
        assert threading.current_thread() is not threading.main_thread()
        golds = [record["answer"] for record in gsm8k("train", "test")]
        changed = [(re.sub(r"[0-9](?=[^0-9]*$)", lambda m: str((int(m[0]) + 1) % 10), gold), gold) for gold in golds[::20]]
        return sum(rule(sample(g, g)) == 1.0 for g in golds), sum(rule(sample(c, g)) == 1.0 for c, g in changed)

    rule = MathVerify()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(score_all).result() == (8792, 0)
    assert rule._worker.pid is not None and rule.undecided == 0, "the first worker is still the one"
    used = psutil.Process(rule._worker.pid).cpu_times()  # a busy machine makes the answers late, but costs no more of it
    assert 0 < used.user + used.system < 60
    rule.close()


@pytest.mark.slow
def test_a_response_that_cannot_be_decided_has_no_verdict_is_counted_and_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    rule = MathVerify(cpu_limit_s=0.8)
    for number, endless in enumerate(("$10^{10^{10}}$", "\\boxed{9^{9^{9^9}}}", "\\boxed{1000000000!}"), start=1):
        with caplog.at_level(logging.WARNING):
            assert rule(sample(endless, "5", sample_id=f"train#7/{number}")) is None, endless
        assert rule.undecided == number, endless
        assert f"no verdict on train#7/{number} within 0.8 s ({number} so far)" in caplog.text, endless
        assert rule(sample("\\boxed{5}", "5")) == 1.0 and rule.undecided == number, endless
    rule.close()


def test_an_answer_that_takes_too_long_to_read_is_unusable() -> None:
    rule = MathVerify(cpu_limit_s=0.002)
    with pytest.raises(UnusableAnswer, match="takes more than 0.002 s to read"):
        rule.check_answer(r"\left(3,\frac{\pi}{2}\right)" * 50)
    rule.close()


def test_boxes_are_looked_for_in_linear_time() -> None:
    unmarked = ("\\boxed{" * 100_000, "{" * 200_000, "}" * 200_000, "#### " * 100_000, "#### -" * 100_000)
    unmarked += ("\\boxed{ " * 100_000, "<answer>" * 100_000, "</answer>" * 100_000)
    for text in unmarked:
        assert final_answer(text) == text
    for many in ("\\boxed{}" * 100_000, "<answer> </answer>" * 100_000):
        assert final_answer("\\boxed{5}" + many) == "\\boxed{5}"
    assert final_answer("\\boxed{" * 100_000 + "5" + "}" * 100_000) == "\\boxed{5}"


def test_threads_share_one_worker(rule: MathVerify) -> None:
    samples = [sample(f"\\boxed{{{i}}}", str(i - i % 2)) for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(rule, samples)) == [float(i % 2 == 0) for i in range(200)]


@pytest.mark.parametrize("answer", ["", "$$", "\\boxed{}"])
def test_a_reference_answer_that_is_no_expression_is_an_error(rule: MathVerify, answer: str) -> None:
    for call in (lambda: rule(sample("\\boxed{5}", answer)), lambda: rule.check_answer(answer)):
        with pytest.raises(UnusableAnswer, match="the reference answer .* is no mathematical expression"):
            call()
    assert rule(sample("\\boxed{5}", "5")) == 1.0


def test_the_worker_survives_a_request_to_stop(rule: MathVerify) -> None:
    """It reaches the whole process group; without the worker the step would have no rewards, and the run no checkpoint."""
    assert rule(sample("2", "2")) == 1.0
    assert rule._worker.pid is not None
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        os.kill(rule._worker.pid, number)
    before = rule._worker.pid
    assert rule(sample("3", "3")) == 1.0
    assert rule._worker.pid == before


def test_a_worker_killed_by_something_else_is_a_fault_and_not_a_score(rule: MathVerify, caplog: pytest.LogCaptureFixture) -> None:
    assert rule(sample("5", "5")) == 1.0
    assert rule._worker.pid is not None
    os.kill(rule._worker.pid, signal.SIGKILL)
    with caplog.at_level(logging.WARNING), pytest.raises(NoVerdict, match="died"):
        rule(sample("5", "5"))
    assert "worker was ended by SIGKILL" in caplog.text
    assert rule(sample("5", "5")) == 1.0  # a new worker serves the next call


def test_a_call_that_is_interrupted_leaves_no_late_reply() -> None:
    """An exception out of a signal handler in the middle of a call: the next call must not read the first one's reply."""

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    rule = MathVerify(cpu_limit_s=60)
    assert rule(sample("5", "5")) == 1.0
    worker = rule._worker._process
    assert worker is not None
    previous = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Stop):
            rule(sample("$10^{10^{10}}$", "5"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert worker.returncode == -signal.SIGKILL, "the abandoned computation is ended, not waited for"
    assert [rule(sample("5", "5")), rule(sample("6", "5"))] == [1.0, 0.0]
    rule.close()


def test_the_worker_ends_with_its_rule() -> None:
    rule = MathVerify()
    rule(sample("5", "5"))
    worker = rule._worker._process
    assert worker is not None and worker.poll() is None
    del rule
    assert worker.wait(timeout=10) == -signal.SIGKILL
