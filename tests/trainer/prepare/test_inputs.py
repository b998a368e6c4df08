"""Mistakes that every command knows before it imports torch, which takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megappo.checkpoint.manifest import Manifest, write_manifest
from megappo.models.hf_config import arch_of
from megappo.models.weight_map import EMBEDDING, hf_tensors
from tests.commands.plan.checkpoints import TINY, write_checkpoint, write_run, write_weights

ROOT = Path(__file__).parents[3]
# One process for all calls. What torch has not: its import fails, and with it the call.
WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
from megappo.commands.cli import main
for arguments in json.load(sys.stdin):
    try:
        print(f"exit code {main(arguments)}", file=sys.stderr)
    except ImportError:
        print("torch was needed", file=sys.stderr)
"""
# Overrides, and a fragment of the one line.
MISTAKES = [
    ("policy.model=absent", 'policy.model = "absent": absent is not a directory'),
    ("critic.model=absent", 'critic.model = "absent": absent is not a directory'),
    ("policy.model={}/empty", "has no config.json"),
    ("policy.model={}/unfinished", "holds no .safetensors weights; the download may be incomplete"),
    ("policy.model={}/headless", "headless: tensor lm_head.weight [64, 128] is missing; set tie_word_embeddings to true"),
    ("critic.model={}/wide", "embed_tokens.weight has shape [65, 128], config.json asks for [64, 128]; take both from the same"),
    ("data.tokenizer=absent", "tokenizer absent does not exist; set data.tokenizer"),
    ("data.tokenizer={}/empty", "holds no tokenizer"),
    ("data.train=absent.jsonl", "data file absent.jsonl does not exist"),
    ("data.eval=absent.jsonl", "data file absent.jsonl does not exist"),
    ('evaluations={{"math": {{"data": "absent.jsonl"}}}}', "evaluations.math: data file absent.jsonl does not exist"),
    ('reward.parts=[{{"path": "absent.py", "function": "score"}}]', "cannot be read: No such file or directory"),
    ('reward.parts=[{{"name": "exakt"}}]', "exakt"),
    ("critic.checkpoint={}/empty", "holds no complete checkpoint"),
    ("critic.checkpoint=absent", 'critic.checkpoint = "absent": is not a directory'),
    ("algorithm.mini_batch_size=7", "algorithm.mini_batch_size = 7: must divide"),
]

SCORED = ["reward_model.model={}/scores", 'reward.parts=[{{"model": "reward_model"}}]', "reward_model.chat_template=false"]
OF_REWARD_MODEL = [
    ("reward_model.tokenizer=absent", "tokenizer absent does not exist; set reward_model.tokenizer to a tokenizer directory"),
    ("reward_model.tokenizer={}/empty", "holds no tokenizer"),
    ("reward_model.model={}/empty", "has no config.json"),
]
# Arguments of `megappo eval` after the checkpoint and the configuration, of a run with the evaluation `sums`.
OF_EVAL = [
    ("{}/absent", [], 'absent": is not a directory; name a run directory'),
    ("{}/empty", [], "holds no complete checkpoint"),
    ("{}/model", ["--only", "sum"], '--only = "sum": is no set of evaluations; did you mean sums?'),
    ("{}/model", ["-o", "absent/results.json"], "there is no directory absent; name a file in an existing directory"),
    ("{}/model", ["evaluations.sums.data=absent.jsonl"], "evaluations.sums: data file absent.jsonl does not exist"),
    ("{}/model", ["data.tokenizer=absent"], "tokenizer absent does not exist; set data.tokenizer"),
]

# Arguments of the commands on checkpoints. {0}/done is a run with an export, {0}/cut one without, whose step-4 is its only one.
OF_CHECKPOINTS = [
    (["generate", "absent", "--prompt", "x"], "absent is not a directory"),
    (["generate", "{0}/empty", "--prompt", "x"], "has no config.json"),
    (["generate", "{0}/cut", "--prompt", "x"], "`megappo export {0}/cut OUTPUT` writes the model of its newest checkpoint"),
    (["generate", "{0}/cut/checkpoints/step-4", "--prompt", "x"], "`megappo export {0}/cut OUTPUT --step 4` makes it a model"),
    (["generate", "{0}/model", "--prompt", "x", "--tokenizer", "absent"], "tokenizer absent does not exist; set --tokenizer"),
    (["export", "absent", "{0}/out"], "absent holds no run: absent/config.yaml does not exist"),
    (["export", "{0}/empty", "{0}/out"], "holds no run"),
    (["export", "{0}/cut", "{0}"], "exists; export to another directory"),
    (["export", "{0}/cut", "{0}/out", "--role", "ema"], "--role ema: checkpoints hold policy, critic"),
    (["export", "{0}/cut", "{0}/out", "--step", "best"], "step-4 knows of none"),
    (["export", "{0}/cut", "{0}/out", "--step", "5"], "has no such checkpoint; steps there: [4]"),
]
# The controls.
FOUND = [["generate", "{0}/done", "--prompt", "x"], ["generate", "{0}/model", "--prompt", "x"], ["export", "{0}/cut", "{0}/out"]]


def write_ended_runs(folder: Path) -> None:
    """The runs of OF_CHECKPOINTS."""
    for name in ("done", "cut"):
        (folder / name / "checkpoints" / "step-4").mkdir(parents=True)
        (folder / name / "config.yaml").write_text(f"policy: {{model: {folder / 'model'}}}\ndata: {{train: t}}\n")
        write_manifest(folder / name / "checkpoints" / "step-4", Manifest(4, 1, False, {}, {}))
    write_checkpoint(folder / "done" / "export", TINY)


def answers(calls: list[list[str]]) -> list[str]:
    """Lines on stderr of these calls of `megappo` in a process that has no torch."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=json.dumps(calls),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[str]]:
    """(command, override) -> its two lines; the override "" is none."""
    folder = tmp_path_factory.mktemp("inputs")
    run = str(write_run(folder))
    (folder / "empty").mkdir()
    write_checkpoint(folder / "unfinished", TINY, weights=False)
    shapes = hf_tensors(arch_of(TINY))
    write_weights(write_checkpoint(folder / "wide", TINY) / "model.safetensors", shapes | {EMBEDDING: (65, 128)})
    write_weights(write_checkpoint(folder / "headless", TINY) / "model.safetensors", hf_tensors(arch_of(TINY), value_head=True))
    overrides = ["", *(override for override, _ in MISTAKES)]
    calls = {(name, text): [name, run, *filter(None, [text.format(folder)])] for name in ("train", "plan") for text in overrides}
    write_checkpoint(folder / "scores", TINY | {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1})
    for override in ("", *(override for override, _ in OF_REWARD_MODEL)):
        said = [text.format(folder) for text in (*SCORED, *filter(None, [override]))]
        calls["train with a reward model", override] = ["train", run, *said]
    sums = f'evaluations={{"sums": {{"data": "{folder / "train.jsonl"}"}}}}'
    for checkpoint, more, _ in [*OF_EVAL, ("{}/model", ["data.train=absent.jsonl"], "")]:
        calls["eval", f"{checkpoint} {more}"] = ["eval", checkpoint.format(folder), run, sums, *more]
    for command in (["verify"], ["tune", "--gpu", "h100"]):
        calls[command[0], "policy.model=absent"] = [command[0], run, "policy.model=absent", *command[1:]]
    write_ended_runs(folder)
    for arguments in (*FOUND, *(call for call, _ in OF_CHECKPOINTS)):
        calls[arguments[0], str(arguments)] = [text.format(folder) for text in arguments]
    lines = answers(list(calls.values()))
    # A call that needs torch says one line alone.
    found = iter(lines)
    said = {}
    for call in calls:
        first = next(found)
        said[call] = [first] if first == "torch was needed" else [first, next(found)]
    assert next(found, None) is None
    return said


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize("override, fragment", MISTAKES, ids=[override for override, _ in MISTAKES])
def test_what_needs_no_model_is_refused_without_torch(refusals, command: str, override: str, fragment: str) -> None:
    line, code = refusals[command, override]
    assert line.startswith("megappo: ") and fragment in line
    assert code == "exit code 2"


@pytest.mark.parametrize("command", ["verify", "tune"])
def test_commands_on_shapes_look_for_the_models_first(refusals, command: str) -> None:
    line, code = refusals[command, "policy.model=absent"]
    assert 'policy.model = "absent"' in line and code == "exit code 2"


@pytest.mark.parametrize("override, fragment", OF_REWARD_MODEL, ids=[override for override, _ in OF_REWARD_MODEL])
def test_a_reward_model_is_looked_for_first(refusals, override: str, fragment: str) -> None:
    line, code = refusals["train with a reward model", override]
    assert line.startswith(f'megappo: {override.split("=")[0]} = "') and fragment in line
    assert code == "exit code 2"


@pytest.mark.parametrize("checkpoint, more, fragment", OF_EVAL, ids=[fragment for _, _, fragment in OF_EVAL])
def test_an_evaluation_looks_for_its_checkpoint_sets_and_data_first(refusals, checkpoint: str, more: list, fragment: str) -> None:
    line, code = refusals["eval", f"{checkpoint} {more}"]
    assert line.startswith("megappo: ") and fragment in line
    assert code == "exit code 2"


@pytest.mark.parametrize("arguments, fragment", OF_CHECKPOINTS, ids=[fragment for _, fragment in OF_CHECKPOINTS])
def test_commands_on_checkpoints_look_for_them_first(refusals, arguments: list[str], fragment: str) -> None:
    line, code = refusals[arguments[0], str(arguments)]
    folder = next((word.partition("/cut")[0] for word in line.split('"') if "/cut" in word), "")
    assert line.startswith("megappo: ") and fragment.format(folder) in line, line
    assert code == "exit code 2"


def test_a_checkpoint_that_is_there_needs_torch(refusals) -> None:
    assert all(refusals[arguments[0], str(arguments)] == ["torch was needed"] for arguments in FOUND)


def test_a_run_without_mistake_needs_torch(refusals) -> None:
    """The controls; an evaluation reads no training data."""
    assert refusals["train", ""] == refusals["plan", ""] == refusals["train with a reward model", ""] == ["torch was needed"]
    assert refusals["eval", "{}/model ['data.train=absent.jsonl']"] == ["torch was needed"]
