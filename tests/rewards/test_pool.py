"""Own code and math_verify in processes: several at once, limits that hold, and nothing left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megappo.config.loading import validated
from megappo.config.reward_sections import RewardConfig
from megappo.rewards.base import RewardError
from megappo.rewards.scorer import Scorer
from megappo.trainer.prepare.reward_parts import load_parts
from megappo.trainer.sampling import scorer_of
from tests.rewards.samples import sample, scores

CODE = """
import os, sys, time
from megappo.rewards.base import UnusableAnswer
def meet(folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    for _ in range(600):
        if len(os.listdir(folder)) == 2: return
        time.sleep(0.1)
    raise TimeoutError("nobody else is at work")
def score(s, base):
    print("a line that is no reply")
    if s.response == "pid": return os.getpid()
    if s.response.startswith("meet "): meet(s.response.removeprefix("meet "))
    if s.response == "hang":
        if os.fork() == 0: time.sleep(600)
        while True: pass
    if s.response == "die": os.kill(os.getpid(), 11)
    if s.response == "exit": sys.exit(3)
    if s.response == "none": return None
    if s.response == "unusable": raise UnusableAnswer("no")
    if s.response == "raise": return 1 / 0
    if s.response == "odd": return lambda: 1
    if s.response == "stdin": return len(sys.stdin.read())
    return {"score": base + len(s.response), "parts": {"tokens": len(s.tokens)}}
"""


@contextmanager
def pool(folder: Path, **keys: Any) -> Iterator[Scorer]:
    (folder / "mine.py").write_text(CODE)
    part = {"path": str(folder / "mine.py"), "function": "score", "args": {"base": 10}, "workers": 2, **keys}
    reward = validated({"parts": [part]}, RewardConfig)
    scorer = scorer_of(reward, load_parts(reward))
    (folder / "mine.py").write_text("changed after it was hashed")
    try:
        yield scorer
    finally:
        scorer.close()


def children() -> set[str]:
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_workers_score_what_the_rank_would(tmp_path: Path) -> None:
    before = children()
    with pool(tmp_path) as scorer:
        found = scores(scorer, [sample(text) for text in ("a", "none", "unusable", "ccc", "stdin")])
        assert str(found.total) == "[11.0, nan, nan, 13.0, 0.0]" and found.no_verdict == ["", "undecided", "unusable", "", ""]
        assert str(found.parts["mine.score.tokens"]) == "[0.0, nan, nan, 0.0, 0.0]" and max(found.seconds["mine.score"]) > 0
        (tmp_path / "both").mkdir()
        both = sample(f"meet {tmp_path / 'both'}")
        assert scores(scorer, [both] * 4).total == [10 + len(both.response)] * 4, "at the same time"
        workers = {scores(scorer, [sample("pid")]).total[0] for _ in range(8)}
        assert 1 <= len(workers) <= 2 and os.getpid() not in workers
        assert len(children() - before) == 2
    assert not children() - before, "nothing is left behind"


@pytest.mark.parametrize(
    "text, says",
    [
        (
            "raise",
            r"rule mine.score raised ZeroDivisionError: division by zero \(mine.py:21\); sample t#7, response 'raise'",
        ),
        ("exit", "raised SystemExit: 3"),
        ("odd", "returned function, which cannot be sent to the rank: "),
    ],
)
def test_a_worker_that_fails_names_the_sample(tmp_path: Path, text: str, says: str) -> None:
    with pool(tmp_path) as scorer, pytest.raises(RewardError, match=says):
        scores(scorer, [sample("a"), sample(text, sample_id="t#7")])


def test_a_worker_that_dies_has_no_verdict_and_another_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pool(tmp_path) as scorer:
        found = scores(scorer, [sample("a"), sample("die", sample_id="t#7"), sample("bb")])
        assert str(found.total) == "[11.0, nan, 12.0]" and found.no_verdict == ["", "died", ""]
    assert "reward rule mine.score lost its process, which was ended by SIGSEGV: no verdict on sample t#7" in caplog.text


def test_a_call_over_its_limit_is_undecided_and_its_process_ended(tmp_path: Path) -> None:
    before = children()
    with pool(tmp_path, timeout_s=1.0) as scorer:
        found = scores(scorer, [sample("hang"), sample("a"), sample("bb")])
        assert str(found.total) == "[nan, 11.0, 12.0]" and found.no_verdict == ["undecided", "", ""]
        assert scores(scorer, [sample("ccc")] * 2).total == [13, 13], "the next call starts another"
        assert len(children() - before) <= 2
    assert not children() - before


def test_closing_ends_calls_in_hand(tmp_path: Path) -> None:
    before = children()
    with pool(tmp_path) as scorer:
        scorer.submit([sample("hang"), sample("hang"), sample("a")])
        while len(children() - before) < 2:
            time.sleep(0.01)
        scorer.work(0.5)
    assert not children() - before
    with pytest.raises(RewardError):
        scorer.finish()


def test_math_verify_may_have_several_workers() -> None:
    reward = validated({"parts": [{"name": "math_verify", "workers": 2}]}, RewardConfig)
    scorer, before = scorer_of(reward, load_parts(reward)), children()
    samples = [sample(rf"\boxed{{{i}}}", "3") for i in range(6)] + [sample("3", "")]
    found = scores(scorer, samples)
    assert str(found.total) == "[0.0, 0.0, 0.0, 1.0, 0.0, 0.0, nan]" and found.no_verdict == [""] * 6 + ["unusable"]
    assert len(children() - before) == 2
    scorer.close()
    assert not children() - before
