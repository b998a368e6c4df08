"""Evaluation sets while preparing: loaded, checked with their own rewards, and refused in one line before a model is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megappo.commands import cli
from megappo.commands.plan.run import plan_run
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.trainer.prepare.evaluate import plan_evaluation
from megappo.trainer.run_facts import run_facts
from tests.commands.plan.checkpoints import write_prompts, write_run

MATH = "evaluations: {{math: {{data: {0}/math.jsonl, n: 4, temperature: 0.6, {1}}}}}\n"


def write(folder: Path, keys: str = "", count: int = 12) -> Path:
    write_prompts(folder / "math.jsonl", count)
    return write_run(folder, MATH.format(folder, keys))


def planned(folder: Path, keys: str = "", *overrides: str):
    return plan_run(load_config(write(folder, keys), overrides), 2, "cpu")


def refused(capsys, *arguments: object) -> str:
    """The line on stderr of a command that exits with 2."""
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "") and captured.err.count("\n") == 1, captured
    return captured.err


@pytest.fixture(autouse=True)
def outside_a_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_a_set_is_loaded_beside_data_eval_with_the_defaults_of_the_run(tmp_path):
    held_out = write_prompts(tmp_path / "eval.jsonl", 5)
    data = planned(tmp_path, "prompts: 7", f"data.eval={held_out}", "data.eval_prompts=3", "trainer.eval_every=5").data
    assert data is not None and data.eval is data.evaluations[0].prompts and len(data.eval) == 3
    default, math = data.evaluations
    assert (default.name, default.settings.n, default.settings.temperature, default.votes) == ("", 1, 0.0, None)
    assert (math.name, len(math.prompts), math.settings.every, math.settings.before) == ("math", 7, 5, True)
    assert math.settings.max_response_tokens == 8 and math.settings.pass_at == (1, 2, 4)
    assert math.votes == "exact_match" and math.reward is None


def test_the_plan_tells_the_sets(tmp_path):
    report = planned(tmp_path, "reward: {parts: [{name: has_eos}]}, every: 3").report()
    assert "  eval math: kept 12 of 12 prompts; 4 samples at temperature 0.6, every 3 steps" in report
    assert (
        "no maj@4: no rule of its reward names the final answer (exact_match, gsm8k_strict, gsm8k_flexible, math_verify do)"
        in report
    )


def test_pass_at_has_the_powers_of_two_and_n(tmp_path):
    for n, ks in ((1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))):
        data = planned(tmp_path, "", f"evaluations.math.n={n}").data
        assert data is not None and data.evaluations[0].settings.pass_at == ks


MINE, STRICT = "reward: {parts: [{path: mine.py, function: score}]}", "reward: {parts: [{name: gsm8k_strict}]}"
TEXT = '{"prompt": "a", "answer": "x"}\n'
OWN = "def score(sample):\n    return 1.0\nscore.requires = ('level',)\n"
# keys of the set, files beside it, what the line says
BAD = [
    ("prompt_key: question", {}, "evaluations.math: data.prompt_key=question: "),
    ("reward: {parts: [{name: exact_mach}]}", {}, "evaluations.math.reward.parts: there is no rule 'exact_mach'; did you mean"),
    (MINE, {}, 'evaluations.math.reward.parts.0.path = "'),
    (MINE, {"mine.py": OWN}, 'evaluations.math.reward.parts = "mine.score": requires level, which 12 of 12 records'),
    (STRICT, {"math.jsonl": TEXT}, 'evaluations.math.reward.parts = "gsm8k_strict": the reference answer'),
    ("max_response_tokens: 5000", {}, "evaluations.math.max_response_tokens = 5000: the policy has 256 positions"),
    ("m: 3", {}, "evaluations.math.m = 3: unknown key; the keys are data, prompt_key"),
    ("n: 2, n: 3", {}, "evaluations.math.n is written twice"),
]


@pytest.mark.parametrize("keys, files, message", BAD)
def test_a_mistake_in_a_set_is_one_line_before_a_model_is_built(tmp_path, monkeypatch, capsys, keys, files, message):
    monkeypatch.chdir(tmp_path)
    text = MATH.replace("n: 4, temperature: 0.6", "temperature: 0.6") if "n: 2, n: 3" in keys else MATH
    write_prompts(tmp_path / "math.jsonl", 12)
    path = write_run(tmp_path, text.format(tmp_path, keys))
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert message in refused(capsys, "train", path)


def test_a_missing_file_and_keep_best_on_votes_that_cannot_be_counted(tmp_path, capsys):
    path = write(tmp_path)
    assert "evaluations.math: data file absent.jsonl does not exist" in refused(
        capsys, "train", path, "evaluations.math.data=absent.jsonl"
    )
    silent = ["evaluations.math.reward={parts: [{name: has_eos}]}", "trainer.keep_best=eval/math/maj@4"]
    assert "eval/math/maj@4 does not exist: no rule of its reward names the final answer" in refused(capsys, "train", path, *silent)


def test_what_a_set_measures_is_a_fact_and_its_intervals_are_not(tmp_path):
    def facts(*overrides: str):
        config = load_config(write(tmp_path), overrides)
        data = plan_run(config, 2, "cpu").data
        assert data is not None
        return run_facts(config, data)["data"]["evaluations"]["math"]

    assert facts() == facts("evaluations.math.every=7", "evaluations.math.before=false")
    for change in ("temperature=1.0", "n=8", "reward={parts: [{name: has_eos}]}", "max_response_tokens=4"):
        assert facts() != facts(f"evaluations.math.{change}"), change


# ------------------------------------------------------------------------------------------------------------ megappo eval


def test_eval_needs_no_training_data_and_no_layout_but_the_policys(tmp_path):
    of_training = ["data.train=absent.jsonl", "critic.parallel.pp=2", "policy.optimizer.warmup_steps=500", "run.num_ranks=null"]
    config = load_config(write(tmp_path), of_training)
    plan = plan_evaluation(config, str(tmp_path / "model"), [], 4, "cpu")
    assert [one.name for one in plan.data.evaluations] == ["math"] and plan.source.model == str(tmp_path / "model")
    with pytest.raises(ConfigError, match="policy"):  # the policy's own layout must fit the ranks
        plan_evaluation(config, str(tmp_path / "model"), [], 3, "cpu")


def test_eval_of_what_is_no_checkpoint(tmp_path, capsys):
    path = write(tmp_path)
    assert 'CHECKPOINT = "absent": is not a directory; name a run' in refused(capsys, "eval", "absent", path)
    text = refused(capsys, "eval", tmp_path, path)
    assert "holds no complete checkpoint" in text and "or a Hugging Face checkpoint" in text
    (tmp_path / "sft" / "export").mkdir(parents=True)
    (tmp_path / "sft" / "export" / "config.json").write_text("{}")
    assert f"its model lies in {tmp_path / 'sft' / 'export'}" in refused(capsys, "eval", tmp_path / "sft", path)


def test_eval_with_nothing_to_evaluate_or_nowhere_to_write(tmp_path, capsys):
    path, model = write(tmp_path), tmp_path / "model"
    assert '--only = "maths": is no set of evaluations; did you mean math? The sets: math' in refused(
        capsys, "eval", model, path, "--only", "maths"
    )
    assert "neither data.eval nor a set" in refused(capsys, "eval", model, path, "evaluations={}")
    assert "name a file in an existing directory" in refused(capsys, "eval", model, path, "-o", tmp_path / "no" / "a.json")
    assert "is a directory" in refused(capsys, "eval", model, path, "-o", tmp_path)
    # It would be replaced by a file, for the whole machine.
    assert "--output /dev/null: is no plain file" in refused(capsys, "eval", model, path, "-o", "/dev/null")


def test_the_checkpoint_of_a_run_without_a_policy_is_refused(tmp_path, capsys):
    from tests.trainer.prepare.test_critic_source import write_step

    path = write(tmp_path)
    write_step(tmp_path / "other", 3, load_config(path), roles=("critic",))
    assert "step-3 holds no policy (it has: critic)" in refused(capsys, "eval", tmp_path / "other", path)
    write_step(tmp_path / "whole", 4, load_config(path))
    plan = plan_evaluation(load_config(path), str(tmp_path / "whole"), [], 2, "cpu")
    assert plan.source.path == tmp_path / "whole" / "checkpoints" / "step-4"
    facts = json.loads((plan.source.path / "manifest.json").read_text())
    assert facts["step"] == 4
