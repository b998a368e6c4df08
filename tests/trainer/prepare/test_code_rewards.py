"""Code rewards before a run: tests held against the data, isolation asked for, and the part as a configuration makes it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megappo.commands import cli
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config, validated
from megappo.config.reward_checks import reward_problem
from megappo.config.reward_sections import RewardConfig
from megappo.data.prompts import Prompt, PromptSet
from megappo.rewards.base import RewardInput
from megappo.rewards.sandbox.bubblewrap import PACKAGE, SandboxError
from megappo.trainer.prepare import code_rewards
from megappo.trainer.prepare.code_rewards import code_notes, require_isolation
from megappo.trainer.prepare.reward_parts import check_requirements, load_parts
from megappo.trainer.sampling import scorer_of
from tests.commands.plan.checkpoints import write_run
from tests.rewards.samples import sample
from tests.rewards.sandboxes import need_isolation

GOOD, BAD = {"inputs": ["1"], "outputs": ["1"]}, {"inputs": ["1"], "outputs": []}
FENCED = "```python\nprint(input())\n```"


def reward_of(*parts: dict[str, Any]) -> RewardConfig:
    return validated({"parts": parts}, RewardConfig)


def prompts(*tests: Any) -> PromptSet:
    made = [Prompt(f"d.jsonl#{row}", (1,), "?", "", {"meta": {"tests": one}}, row + 1) for row, one in enumerate(tests)]
    return PromptSet(tuple(made), len(made), 0, 8)


def response(text: str, tests: Any, sample_id: str) -> RewardInput:
    return replace(sample(text, sample_id=sample_id), record={"meta": {"tests": tests}})


CODE = {"code": {"tests_key": "meta.tests"}}


def test_unreadable_tests_are_counted_with_places_and_a_set_without_any_is_refused() -> None:
    reward = reward_of(CODE)
    [note] = code_notes(reward, {"data.train": prompts(GOOD, BAD, json.dumps(GOOD), "x ="), "data.eval": prompts(GOOD)})
    assert note == (
        "data.train: code cannot read the tests of 2 of 4 records and gives them no score: d.jsonl#1 (line 2), d.jsonl#3 (line 4); "
        "the tests have 1 inputs and 0 outputs"
    )
    with pytest.raises(ConfigError) as caught:
        list(code_notes(reward, {"data.train": prompts(GOOD), "data.eval": prompts(BAD, BAD)}))
    assert str(caught.value) == (
        'reward.parts.0.code.tests_key = "meta.tests": the tests have 1 inputs and 0 outputs (d.jsonl#0 (line 1)), and so for all '
        "2 records of data.eval"
    )


def test_records_without_tests_are_refused() -> None:
    reward = reward_of({"code": {"tests_key": "meta.tests", "setup_key": "meta.setup"}})
    with pytest.raises(ConfigError, match="requires meta.setup, which 2 of 2 records of data.train lack: d.jsonl#0"):
        check_requirements(reward, load_parts(reward), {"data.train": prompts(GOOD, GOOD)})
    reward = reward_of(CODE)
    with pytest.raises(ConfigError, match=r"requires meta.tests, which 1 of 2 records of data.train lack: d.jsonl#1 \(line 2\)"):
        check_requirements(reward, load_parts(reward), {"data.train": prompts(GOOD, None)})


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"code": {}, "batch": True}, "reward.parts.0.batch = true: a part with code has none"),
        ({"code": {}, "path": "x.py", "function": "f"}, "path is set too; keep one"),
    ],
)
def test_keys_of_other_kinds_are_refused(part: dict[str, Any], message: str) -> None:
    assert message in str(reward_problem(reward_of(part)))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("{tests_kye: x}", 'reward.parts.0.code.tests_kye = "x": unknown key; the keys are tests_key, entry_point_key'),
        ("{timeout_s: 0}", "reward.parts.0.code.timeout_s = 0: must be > 0"),
        ("{score: most}", "reward.parts.0.code.score = \"most\": must be one of 'all' or 'fraction'"),
    ],
)
def test_a_wrong_key_or_value_is_told_in_one_line(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(str(write_run(tmp_path, f"reward: {{parts: [{{code: {code}}}]}}\n")), [])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_machine_without_bubblewrap_refuses_the_run_and_plans_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(code_rewards, "reason_against", lambda limits: PACKAGE if limits.isolated else None)
    path = write_run(tmp_path, "reward: {parts: [{code: {tests_key: prompt}}]}\n")
    assert cli.main(["train", str(path)]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert (
        "reward.parts.0.code.i_accept_no_isolation = false: no program can be isolated here: bubblewrap is not "
        "installed (Debian and Ubuntu: apt-get install bubblewrap); docs/code_rewards.md" in line
    )
    assert "set this to true" in line
    assert cli.main(["plan", str(path)]) == 2, "the questions are no tests"
    assert "reward.parts.0.code.tests_key" in capsys.readouterr().err


def test_without_isolation_the_plan_says_so_once() -> None:
    reward = reward_of({"code": {"tests_key": "meta.tests", "i_accept_no_isolation": True}, "name": "tests"})
    [note] = code_notes(reward, {"data.train": prompts(GOOD)})
    assert note.startswith("tests: programs of the policy run without isolation, with your rights (reward.parts.0.code.")
    require_isolation(reward)


def test_the_configured_part_scores_beside_rules() -> None:
    need_isolation()
    reward = reward_of({**CODE, "weight": 2.0}, {"name": "has_eos", "weight": 0.5})
    require_isolation(reward)
    require_isolation(reward_of({"name": "has_eos"}))
    parts = load_parts(reward)
    assert len(parts["code"].sha256 or "") == 64
    scorer = scorer_of(reward, parts)
    given = zip([FENCED, FENCED, "print(input())"], [GOOD, BAD, GOOD])
    samples = [response(text, tests, f"t#{i}") for i, (text, tests) in enumerate(given)]
    try:
        scorer.submit(samples)
        scored = scorer.composition.compose(scorer.finish())
    finally:
        scorer.close()
    assert str(scored.total) == "[2.5, nan, 0.5]" and scored.no_verdict == ["", "unusable", ""]
    assert str(scored.parts["code"]) == str(scored.parts["code.passed"]) == "[1.0, nan, 0.0]"
    assert str(scored.parts["code.has_code"]) == "[1.0, nan, 0.0]"


def test_a_sandbox_that_fails_during_the_run_has_no_verdict_on_the_sample(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise SandboxError("bwrap: No space left on device")

    monkeypatch.setattr("megappo.rewards.sandbox.box.Sandbox.run", fail)
    reward = reward_of(CODE)
    scorer = scorer_of(reward, load_parts(reward))
    try:
        scorer.submit([response(FENCED, GOOD, "t#7")])
        scored = scorer.composition.compose(scorer.finish())
    finally:
        scorer.close()
    assert scored.no_verdict == ["died"] and "No space left on device" in caplog.text and "t#7" in caplog.text
