"""`megappo tune` of runs on given examples: an update and the passes that it reads, and nothing of a sampler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megappo.commands import cli
from megappo.telemetry.hardware import load_hardware
from megappo.telemetry.tables import figures

RECIPES = Path(__file__).parents[3] / "configs" / "recipes"
LLAMA = Path(__file__).parents[3] / "configs" / "models" / "Llama-3.2-1B-Instruct"
PARAMETERS = 1_235_814_400


def tune(capsys, *arguments):
    code = cli.main(["tune", *map(str, arguments)])
    return code, capsys.readouterr()


def test_the_winner_of_a_reward_model_is_what_the_plan_accepts(tmp_path, capsys):
    path, lines, model = RECIPES / "reward_model.yaml", tmp_path / "layout.txt", f"reward_model.model={LLAMA}"
    small = [model, "data.max_tokens=512", "trainer.batch_size=16"]
    searched = ["--gpus", 4, "--gpu", "h100", "--top", 2, "--output", lines, "--json", tmp_path / "all.json"]
    code, told = tune(capsys, path, *searched, *small)
    assert code == 0 and not {"generate", "push weights", "rollout"} & set(told.out.split()), told
    overrides = lines.read_text().split()
    assert {line.split(".")[0] for line in overrides} == {"run", "reward_model"}
    assert json.loads((tmp_path / "all.json").read_text())["overrides"] == overrides
    assert cli.main(["plan", str(path), *small, *overrides, "--shapes-only", "--gpu-memory-gib", "80"]) == 0
    assert "WARNING" not in capsys.readouterr().out


def test_a_step_is_its_update_and_the_passes_of_its_loss(tmp_path, capsys):
    """An update has three passes' worth of matrix products, one on an H100; a reference in every step has one more."""

    def parts(*keys):
        arguments = [RECIPES / "dpo.yaml", "--gpus", 1, "--gpu", "h100", "--as-is", "--json", tmp_path / "a.json"]
        assert tune(capsys, *arguments, f"policy.model={LLAMA}", "policy.recompute=none", *keys)[0] == 0
        return {part["name"]: part["seconds"] for part in json.loads((tmp_path / "a.json").read_text())["parts"]}

    once, beside, kto = parts(), parts("reference.every_step=true"), parts("loss.type=kto")
    assert list(once) == ["policy update"]
    assert list(beside) == ["reference log-probs", "policy update"] and list(kto) == ["log-probs", "policy update"]
    hardware, tokens = load_hardware("h100"), 2 * 128 * 2048
    least = 6 * PARAMETERS * tokens / (hardware.bf16_tflops * 1e12 * hardware.matmul_share)
    assert least < once["policy update"] < 2 * least
    assert beside["reference log-probs"] == pytest.approx(once["policy update"] / 3, rel=0.1)
    where = ["--world-size", "1", "--gpu", "h100", "--shapes-only", f"policy.model={LLAMA}", "policy.recompute=none"]
    capsys.readouterr()
    assert cli.main(["plan", str(RECIPES / "dpo.yaml"), *where, "reference.every_step=true", "policy.dtype=bf16"]) == 0
    reference, update = (figures(seconds) for seconds in beside.values())
    assert f"reference log-probs {reference} (compute), policy update {update} (compute)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option", [("--placements",), ("--measure", "2"), ("--mean-response-tokens", "9"), ("--lengths", "runs/x")]
)
def test_options_about_sampling_are_refused(option, capsys):
    code, told = tune(capsys, RECIPES / "sft.yaml", "--gpus", 8, "--gpu", "h100", *option, f"policy.model={LLAMA}")
    assert code == 2 and told.err.startswith(f"megappo: {option[0]}: of runs that generate") and told.err.count("\n") == 1


def test_answers_to_held_out_prompts_are_no_part_of_a_step(capsys):
    code, told = tune(capsys, RECIPES / "sft.yaml", "--gpus", 8, "--gpu", "h100", "rollout.tp=2", f"policy.model={LLAMA}")
    assert code == 2 and told.err.startswith('megappo: rollout.engine = "vllm": tune lays out a training step')


def test_a_role_that_is_not_there_is_refused(capsys):
    where = [RECIPES / "dpo.yaml", "--gpus", 8, "--gpu", "h100", f"policy.model={LLAMA}"]
    for role in ("critic", "reference"):
        code, told = tune(capsys, *where, "--roles", role)
        assert code == 2 and f"--roles {role}: is not built" in told.err and told.err.count("\n") == 1
