"""Every recipe against the dimensions of the public model that it names: `megappo plan` accepts it and counts what is known."""

import json
import re
from pathlib import Path

import pytest

from megappo.commands import cli
from megappo.commands.gate.gates import read_gates
from megappo.config.loading import load_config
from tests.commands.plan.checkpoints import write_checkpoint
from tests.data.tokenizer_files import write_hf_tokenizer
from tests.trainer.public_models import CONVERTED, PUBLIC

CONFIGS = Path(__file__).parents[2] / "configs"
GATES = sorted((CONFIGS / "gates").glob("*.yaml"))
IMAGES = ("ppo_images", "ppo_images_moe")
"""Recipes whose data are no problems of GSM8K: their gates name what the others' do, which their runs log (test_recipes.py)."""


def recipe_path(name: str) -> Path:
    return next(path for path in (CONFIGS / f"{name}.yaml", CONFIGS / f"recipes/{name}.yaml") if path.is_file())


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Files as long as GSM8K's, with its keys."""
    folder = tmp_path_factory.mktemp("prompts")
    for split, count in (("train", 7473), ("test", 1319)):
        lines = (json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) for n in range(count))
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return folder


def plan(capsys, name, folder, prompts, *arguments):
    """(exit code, stdout, stderr) of `megappo plan` on a recipe whose checkpoint and data lie in folders of the test."""
    model = write_checkpoint(folder / name, PUBLIC[name][0], tokenizer=False)
    write_hf_tokenizer(model)
    places = [f"policy.model={model}", f"data.train={prompts / 'train.jsonl'}", f"data.eval={prompts / 'test.jsonl'}"]
    code = cli.main(["plan", str(recipe_path(name)), *places, *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_every_recipe_has_public_dimensions_to_be_held_against():
    assert {path.stem for path in CONFIGS.glob("gsm8k_*.yaml")} == set(PUBLIC) | CONVERTED
    assert GATES and {path.stem for path in GATES} <= set(PUBLIC) | {*IMAGES}


@pytest.mark.parametrize("name", PUBLIC)
def test_plan_accepts_a_recipe_and_counts_its_parameters_and_steps(name, tmp_path, capsys, prompts, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    promised = re.search(r"GPUs? of (\d+) GB", recipe_path(name).read_text())
    assert promised is not None
    code, out, err = plan(capsys, name, tmp_path, prompts, "--gpu-memory-gib", promised[1])
    assert code == 0, err
    _, parameters, steps = PUBLIC[name]
    config = load_config(recipe_path(name))
    policy = next(line for line in out.splitlines() if line.lstrip().startswith("policy"))
    assert f"{parameters:,}" in policy, policy
    assert f"{config.run.num_ranks} ranks on cuda" in out
    assert f"run: {steps} steps" in out
    # The plan only warns where its estimate of activations does not fit; a recipe must fit with its estimate.
    # That this machine has no TransformerEngine says nothing of the recipe.
    notes = [line for line in out.splitlines() if "note:" in line and "TransformerEngine is not installed" not in line]
    assert "WARNING" not in out and notes == [], out


@pytest.mark.parametrize("name", PUBLIC)
def test_comments_of_a_recipe_state_the_steps_that_the_plan_counts(name):
    text = recipe_path(name).read_text()
    stated = re.search(r"([\d,]+) prompts / ([\d,]+) = (\d+) steps per epoch, (\d+) in all", text)
    assert stated is not None
    prompts, per_step, per_epoch, total = (int(number.replace(",", "")) for number in stated.groups())
    config = load_config(recipe_path(name))
    assert (prompts, per_step) == (7473, config.data.prompts_per_step)
    steps = config.trainer.steps or -(-prompts * config.trainer.epochs // per_step)
    assert (per_epoch, total) == (-(-prompts // per_step), steps)
    assert total == PUBLIC[name][2]


@pytest.mark.parametrize("path", GATES, ids=[path.stem for path in GATES])
def test_gates_ask_for_steps_that_their_recipe_reaches(path):
    """That it logs their metrics: test_recipes.py, with its runs."""
    config = load_config(recipe_path(path.stem))
    steps = config.trainer.steps or PUBLIC[path.stem][2]
    for gate in read_gates(path):
        assert gate.count is not None or 1 <= gate.final <= steps, gate.text
        if gate.metric.startswith("eval/") and gate.count is None and gate.first == gate.final:
            assert gate.final % config.trainer.eval_every == 0, f"{gate.text}: not evaluated there"
    assert "They have not been measured" in path.read_text(), "no limit may pass for a result"


def test_gates_of_images_name_what_other_runs_log():
    metrics = {path.stem: {gate.metric for gate in read_gates(path)} for path in GATES}
    of_images = [metrics.pop(name) for name in IMAGES]
    assert set().union(*of_images) <= set().union(*metrics.values())


def test_twins_differ_in_their_engines_alone():
    names = [f"gsm8k_qwen2.5_1.5b_{engine}" for engine in ("megatron", "fsdp2")]
    megatron, fsdp2 = (load_config(recipe_path(name)).model_dump() for name in names)
    for role in ("policy", "critic", "reference"):
        assert (megatron[role].pop("engine"), fsdp2[role].pop("engine")) == ("megatron", "fsdp2")
    assert megatron["run"].pop("name") != fsdp2["run"].pop("name")
    assert megatron == fsdp2
    gates = [[gate.text for gate in read_gates(CONFIGS / "gates" / f"{name}.yaml")] for name in names]
    assert gates[0] == gates[1]
    assert {"reward/score_mean > 0.75 at 40", "eval/score > 0.65 at 40"} <= set(gates[0]), "those of the source"


# a recipe, an override that its model cannot carry, what the message says
TOO_WIDE = [
    ("gsm8k_qwen2.5_0.5b", "policy.parallel.tp=4", "14 attention heads"),
    ("gsm8k_qwen2.5_1.5b_megatron", "critic.parallel.pp=8", "28 layers"),
    ("gsm8k_qwen2.5_1.5b_fsdp2", "critic.parallel.pp=7", "critic.engine is fsdp2"),
    ("gsm8k_deepseek_7b_chat", "critic.parallel.pp=4", "does not divide the 8 ranks"),
    ("gsm8k_llama3.2_1b_multi", "algorithm.mini_batch_size=48", "128 samples"),
    ("gsm8k_ministral3_3b", "rollout.max_response_tokens=300000", "262144 positions"),
]


@pytest.mark.parametrize("name, override, says", TOO_WIDE)
def test_what_the_public_model_cannot_carry_is_refused(name, override, says, tmp_path, capsys, prompts):
    code, out, err = plan(capsys, name, tmp_path, prompts, override)
    assert (code, out) == (2, "") and says in err and err.count("\n") == 1, err
