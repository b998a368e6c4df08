"""The recipes on the real GSM8K files, at a size for two CPU ranks: two steps with vLLM, validation, checkpoint, export, of some a
resume.

One world of two ranks runs every family one after another; the tests look at the files that the runs left. transformers is the
oracle: it formats and counts the prompts from the same records, and reads the exported checkpoints.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megappo.commands import cli
from megappo.commands.gate.gates import read_gates
from megappo.config.loading import load_config
from megappo.config.schema import TrainConfig
from megappo.data.loader import PromptLoader
from megappo.models.hf_config import read_arch
from megappo.telemetry.jsonl import read_lines
from megappo.trainer.prepare.data import load_run_data
from tests.forked_commands import run_command
from tests.gsm8k_files import gsm8k, needs_gsm8k
from tests.models.fp8_checkpoints import transformers_model
from tests.trainer.families import (
    CONFIGS,
    FAMILIES,
    MAX_PROMPT,
    MAX_RESPONSE,
    MINI_BATCH,
    PROMPTS_PER_STEP,
    VOCAB,
    overrides_of,
    write_family,
)
from tests.trainer.public_models import CONVERTED
from tests.trainer.recipe_runs import probe_sequences, run_recipes
from tests.worlds import spawn_world

pytestmark = needs_gsm8k
TWINS = ("gsm8k_qwen2.5_1.5b_megatron", "gsm8k_qwen2.5_1.5b_fsdp2")
SHIPPED = "ministral 3 as shipped: policy tp 2 sp, critic dp 2"
# They have a third step, after a resume: both engines, and a checkpoint in fp8.
RESUMED = {SHIPPED, *(name for name, family in FAMILIES.items() if family.recipe in TWINS)}
TOLERANCE = 1e-4  # fp32 against transformers', as everywhere
EXACT = dict(dtype=torch.float32, attn_implementation="eager")


class Run(NamedTuple):
    """A finished run: configuration, the checkpoint that it started from, its directory, what its policy says of the probe, whether
    it was resumed for its last step."""

    config: TrainConfig
    model: Path
    folder: Path
    said: tuple[torch.Tensor, torch.Tensor]
    resumed: bool

    @property
    def steps(self) -> range:
        return range(1, 4 if self.resumed else 3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("recipes")
    jobs, configs = [], {}
    for number, (name, family) in enumerate(FAMILIES.items()):
        model = write_family(folder / f"model{number}", family)
        recipe, overrides = CONFIGS / f"{family.recipe}.yaml", overrides_of(family, model, folder / f"runs{number}")
        jobs.append((name, recipe, overrides, name in RESUMED))
        configs[name] = (load_config(recipe, overrides), model)
    said, other = spawn_world(run_recipes, 2, jobs, VOCAB)
    for name in FAMILIES:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(said[name], other[name])), f"{name}: the ranks differ"
    return {
        name: Run(config, model, Path(config.run.output_dir) / config.run.name, said[name], name in RESUMED)
        for name, (config, model) in configs.items()
    }


@pytest.fixture(params=list(FAMILIES))
def run(request, runs) -> Run:
    return runs[request.param]


def by_step(run: Run) -> dict[int, dict[str, Any]]:
    return {record["step"]: record for record in read_lines(run.folder / "metrics.jsonl")}


def test_every_recipe_runs_here():
    assert {family.recipe for family in FAMILIES.values()} | CONVERTED == {path.stem for path in CONFIGS.glob("gsm8k_*.yaml")}


def test_every_step_trains_policy_and_critic(run):
    metrics = by_step(run)
    assert list(metrics) == [0, *run.steps], "one line per step, and one for the validation before training"
    for step in run.steps:
        record = metrics[step]
        for role in ("policy", "critic"):
            assert record[f"{role}/updates"] == PROMPTS_PER_STEP // MINI_BATCH
            assert record[f"{role}/skipped_updates"] == 0
            assert 0 < record[f"{role}/grad_norm"] < math.inf
        # The sampler is within rounding of the trainer: the weights of every step reached vLLM.
        assert record["rollout/prob_diff_max"] < TOLERANCE
        assert 1 <= record["lengths/response_mean"] <= MAX_RESPONSE
        assert set(rules(run)) <= set(record)
        has_reference = run.config.algorithm.kl.placement != "none"
        assert ("kl/per_token" in record) == has_reference
    if "kl/per_token" in metrics[1]:
        assert abs(metrics[1]["kl/per_token"]) < TOLERANCE, "policy and reference start equal"
        assert abs(metrics[2]["kl/per_token"]) > TOLERANCE, "and differ after an update"


def rules(run: Run) -> list[str]:
    return [f"reward/{part.name}" for part in run.config.reward.parts]


def test_the_gates_of_a_recipe_name_what_it_logs(run, request):
    file = CONFIGS / "gates" / f"{FAMILIES[request.node.callspec.params['run']].recipe}.yaml"
    if not file.is_file():
        pytest.skip(f"{file.stem} has no gates")
    logged = {name for record in by_step(run).values() for name in record}
    assert {gate.metric for gate in read_gates(file)} <= logged


def test_twins_give_the_same_curves(runs, capsys):
    """The recipes of one model for two engines, in layouts of their own: the same samples, and numbers within rounding."""
    folders = [str(run.folder) for name, run in runs.items() if FAMILIES[name].recipe in TWINS]
    assert len(folders) == 2
    metrics = [word for name in ("policy/*", "critic/*", "kl/*", "reward/*") for word in ("--metric", name)]
    equal = [word for name in ("eval/*", "lengths/*") for word in ("--max-difference", f"{name}=0")]
    code = cli.main(["compare", *folders, "--json", *metrics, *equal, "--tolerance", str(TOLERANCE)])
    facts = json.loads(capsys.readouterr().out)
    assert code == 0, facts["limits"]
    compared = {name: found for name, found in facts["metrics"].items() if found["steps"] == 3}
    assert len(compared) > 30 and {"policy/loss", "policy/grad_norm", "critic/loss", "critic/value_mean"} <= set(compared)
    # The KL of two equal models is rounding alone.
    apart = {name: found for name, found in compared.items() if found["parts"] is not None and found["largest"] > TOLERANCE**2}
    assert not apart, apart
    assert facts["settings"]["critic.engine"] == dict(zip(TWINS, ("megatron", "fsdp2")))
    assert cli.main(["compare", *folders, "--max-difference", "timing/step_s=0"]) == 1, "negative control"


def test_an_fp8_release_is_trained_and_exported_as_a_plain_checkpoint(runs):
    """That it is sampled from as it is trained: `rollout/prob_diff_max`, above."""
    name = next(name for name, family in FAMILIES.items() if family.fp8)
    stored = {tensor.dtype for tensor in load_file(runs[name].model / "model.safetensors").values()}
    assert torch.float8_e4m3fn in stored
    export = runs[name].folder / "export"
    exported = {tensor.dtype for file in export.glob("*.safetensors") for tensor in load_file(file).values()}
    assert exported == {torch.float32} and "quantization_config" not in (export / "config.json").read_text()


def test_held_out_prompts_are_validated_before_and_at_the_end(run):
    evaluated = {step for step, record in by_step(run).items() if "eval/score" in record}
    assert evaluated >= {0, 2, max(run.steps)}
    if run.config.trainer.eval_every == 1:
        assert evaluated == {0, *run.steps}


def test_a_resumed_run_takes_the_prompts_that_follow(run, oracle):
    """Ids of the trajectories of all steps are an uninterrupted walk through the kept prompts, also where step 3 was resumed."""
    kept = oracle(run, "train")
    loader = PromptLoader(len(kept), PROMPTS_PER_STEP, run.config.data.shuffle, run.config.run.seed)
    for step in run.steps:
        rows = read_lines(next((run.folder / "trajectories").glob(f"*{step}.jsonl")))
        expected = [kept[index] for index in loader.next_step()]
        assert [row["id"].rsplit("#", 1)[1] for row in rows] == [str(row) for row, _ in expected]
        assert [row["prompt_tokens"] for row in rows] == [tokens for _, tokens in expected]
        assert [row["version"] for row in rows] == [step - 1] * PROMPTS_PER_STEP
    checkpoints = {path.name for path in (run.folder / "checkpoints").iterdir() if path.is_dir()}
    assert checkpoints == {f"step-{step}" for step in run.steps[1:]}


def test_the_export_is_the_trained_policy(run):
    exported = transformers.AutoModelForCausalLM.from_pretrained(run.folder / "export", **EXACT)
    logprob, entropy = run.said
    found_logprob, found_entropy = what_transformers_says(exported)
    assert (logprob - found_logprob).abs().max() < TOLERANCE
    assert (entropy - found_entropy).abs().max() < 10 * TOLERANCE  # a sum over the vocabulary
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.folder / "export")
    assert tokenizer.chat_template == transformers.AutoTokenizer.from_pretrained(run.model).chat_template


def test_the_comparison_sees_the_steps_of_training(run):
    """Negative control: the checkpoint that the run started from does not pass."""
    whole = "vision_config" in json.loads((run.model / "config.json").read_text())
    model_class = transformers.AutoModelForImageTextToText if whole else transformers.AutoModelForCausalLM
    logprob, _ = what_transformers_says(transformers_model(model_class, run.model, **EXACT))
    assert (run.said[0] - logprob).abs().max() > 100 * TOLERANCE


def export(*arguments: object) -> subprocess.CompletedProcess:
    return run_command("export", *arguments, cwd=CONFIGS.parent)


def test_a_checkpoint_exports_to_what_the_run_exported_then(runs, tmp_path):
    """`megappo export` of step 2 in one process, bit for bit; the resumed run has put that export aside and written its own."""
    run = runs[SHIPPED]
    done = export(run.folder, tmp_path / "out", "--step", 2)
    assert done.returncode == 0, done.stderr
    then, now, again = (tensors_of(path) for path in (run.folder / "export.old1", run.folder / "export", tmp_path / "out"))
    assert then.keys() == again.keys() == now.keys()
    assert all(torch.equal(then[name], again[name]) for name in then)
    assert not all(torch.equal(then[name], now[name]) for name in then)


def test_a_critic_exports_to_a_token_classifier(runs, tmp_path):
    run = runs["qwen2.5 0.5b: policy tp 2 sp, critic pp 2"]
    done = export(run.folder, tmp_path / "out", "--role", "critic")
    assert done.returncode == 0, done.stderr
    _, loading = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "out", output_loading_info=True, **EXACT)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]


def test_a_checkpoint_of_a_deeper_model_is_not_exported_in_part(runs, tmp_path):
    """Leaving out the optimizer's tensors must not leave out layers."""
    name = "qwen 3: policy dp 2, critic pp 2"
    run, family = runs[name], FAMILIES[name]
    shutil.copytree(run.folder, tmp_path / "run")
    write_family(tmp_path / "shallow", replace(family, changes={**family.changes, "num_hidden_layers": 1}))
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(run.model), str(tmp_path / "shallow")))
    done = export(tmp_path / "run", tmp_path / "out")
    assert done.returncode == 2 and "only the checkpoint has model.layers.1" in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def what_transformers_says(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprob [T], entropy [T]) of every token given its prefix; 0 at the first of a sequence."""
    logprobs, entropies = [], []
    for tokens in map(torch.tensor, probe_sequences(VOCAB)):
        with torch.no_grad():
            all_logprobs = torch.log_softmax(model.eval()(input_ids=tokens[None]).logits[0].double(), dim=-1)[:-1]
        zero = torch.zeros(1, dtype=torch.double)
        logprobs.append(torch.cat([zero, all_logprobs.gather(1, tokens[1:, None])[:, 0]]))
        entropies.append(torch.cat([zero, -(all_logprobs.exp() * all_logprobs).sum(-1)]))
    return torch.cat(logprobs), torch.cat(entropies)


# ---------------------------------------------------------------------------------------------------------------- prompts


Oracle = Callable[[Run, str], list[tuple[int, list[int]]]]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    """(row, ids) of the questions of a split that are short enough, formatted by transformers from the real records."""
    known: dict[tuple[Any, ...], list[tuple[int, list[int]]]] = {}

    def prompts_of(run: Run, split: str) -> list[tuple[int, list[int]]]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(run.model)
        system, suffix = run.config.data.system_prompt, run.config.data.prompt_suffix
        key = (tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, system, suffix, split)
        if key not in known:
            start = [{"role": "system", "content": system}] if system else []
            conversations = [[*start, {"role": "user", "content": record["question"] + suffix}] for record in gsm8k(split)]
            ids = tokenizer.apply_chat_template(conversations, add_generation_prompt=True, return_dict=True)["input_ids"]
            known[key] = [(row, tokens) for row, tokens in enumerate(ids) if len(tokens) <= MAX_PROMPT]
        return known[key]

    return prompts_of


def distinct_formats() -> list[str]:
    """One family for every pair of template and system message."""
    found: dict[tuple, str] = {}
    for name, family in FAMILIES.items():
        found.setdefault((family.template, load_config(CONFIGS / f"{family.recipe}.yaml").data.system_prompt), name)
    return list(found.values())


@pytest.mark.parametrize("name", distinct_formats())
def test_prompts_and_overlong_filter_are_those_of_transformers(runs, name, oracle):
    """All 7,473 training questions of the real file."""
    run = runs[name]
    data = load_run_data(run.config, read_arch(run.model))
    expected = oracle(run, "train")
    assert 1000 < len(expected) < 7473, "the limit divides the real questions"
    assert [list(prompt.tokens) for prompt in data.train.prompts] == [tokens for _, tokens in expected]
    longer = f"{7473 - len(expected):,} longer than data.max_prompt_tokens={MAX_PROMPT}"
    assert data.train.summary() == f"kept {len(expected):,} of 7,473 prompts; {longer}"
    assert data.eval is not None
    assert [list(prompt.tokens) for prompt in data.eval.prompts] == [tokens for _, tokens in oracle(run, "test")[:4]]
    assert all(prompt.answer == gsm8k("test")[int(prompt.id.rsplit("#", 1)[1])]["answer"] for prompt in data.eval.prompts)
