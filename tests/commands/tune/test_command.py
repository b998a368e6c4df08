"""The command: tables, overrides that `megappo plan` takes, trials that are run once, and one line for every mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megappo.commands import cli
from megappo.commands.plan.estimate import check_plan, work_out
from megappo.commands.plan.run import plan_run
from megappo.commands.tune import trials
from megappo.commands.tune.candidates import Machine
from megappo.commands.tune.cost import workload_of
from megappo.commands.tune.parts import by_stage, parts_of
from megappo.commands.tune.search import Search
from megappo.commands.tune.written import measured_stages
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.config.yaml_reader import read_yaml
from megappo.telemetry.hardware import Hardware, hardware_of, load_hardware
from megappo.telemetry.tables import figures
from megappo.trainer.prepare.layouts import check_layouts, read_archs
from tests.commands.plan.checkpoints import LLAMA_7B, SPARSE, write_checkpoint
from tests.commands.trajectories import runs

ROOT = Path(__file__).parents[3]
QUICKSTART = Path(__file__).with_name("quickstart_run")
# About as many parameters as LLAMA_7B in an eighth of its layers: fewer splits into stages and chunks to search.
WIDE = LLAMA_7B | {"num_hidden_layers": 4, "hidden_size": 12288, "intermediate_size": 33024}
WIDE |= {"num_attention_heads": 96, "num_key_value_heads": 96}


def write_run(folder, facts=WIDE, extra=""):
    model = write_checkpoint(folder / "model", facts, weights=False, tokenizer=False)
    path, half = folder / "run.yaml", facts["num_hidden_layers"] // 2
    path.write_text(
        f"run: {{num_ranks: 16, output_dir: {folder / 'runs'}}}\n"
        f"policy: {{model: {model}, parallel: {{tp: 2, pp: 2, layers_per_stage: [{half - 1}, {half + 1}]}}}}\n"
        "data: {train: none, max_prompt_tokens: 256, prompts_per_step: 128}\nrollout: {max_response_tokens: 512}\n"
        "algorithm: {mini_batch_size: 64}\n" + extra
    )
    return path


# What the kept roles need while they work.
SMALL = ["policy.micro_batch_tokens=1024", "reference.micro_batch_tokens=1024"]


def tune(capsys, *arguments):
    code = cli.main(["tune", *map(str, arguments)])
    return code, capsys.readouterr()


@pytest.mark.slow
def test_the_winner_is_what_the_plan_accepts(tmp_path, capsys):
    path, lines, whole = write_run(tmp_path), tmp_path / "layout.txt", tmp_path / "tuned.yaml"
    code, told = tune(capsys, path, "--gpus", 16, "--gpu", "h100", "--top", 3, "--output", lines, "--json", tmp_path / "all.json")
    assert code == 0, told.err
    for heading in ("policy:", "critic:", "reference:", "rollout", "the chosen step", "overrides"):
        assert any(line.strip().startswith(heading) for line in told.out.splitlines()), heading
    overrides = lines.read_text().split()
    assert "run.num_ranks=16" in overrides and "policy.parallel.layers_per_stage=null" in overrides
    config = load_config(path, overrides)
    archs = read_archs(config)
    plan = check_plan(work_out(config, archs, check_layouts(config, archs, 16), 16, "cuda", load_hardware("h100").memory_bytes))
    facts = json.loads((tmp_path / "all.json").read_text())
    assert not plan.warnings and facts["overrides"] == overrides
    assert plan.peak(plan.fullest_rank()) == facts["peak_bytes"] <= load_hardware("h100").usable_bytes
    table = facts["roles"]["policy"]
    assert len(table) == 3 and table[0]["overrides"] == [line for line in overrides if line.startswith("policy.")]
    seconds = [one["seconds"] for one in table]
    assert seconds == sorted(seconds)
    assert tune(capsys, path, "--gpus", 16, "--gpu", "h100", "--top", 3, "--output", whole)[0] == 0
    assert load_config(whole) == config


def test_roles_that_are_not_asked_for_keep_their_layout(tmp_path, capsys):
    path, lines = write_run(tmp_path, extra="reward: {parts: [{url: 'http://127.0.0.1:8000/score'}]}\n"), tmp_path / "layout.txt"
    arguments = [path, "--gpus", 16, "--gpu", "h200", "--roles", "critic", "--top", 1, "--output", lines, *SMALL]
    code, told = tune(capsys, *arguments, "policy.parallel.tp=4", "policy.parallel.layers_per_stage=null")
    assert code == 0, told.err
    assert {line.split(".")[0] for line in lines.read_text().split()} == {"run", "critic"}
    assert "tp4 pp2 dp2" in told.out, "the policy's own, in the chosen step"
    assert ["reward", "(url)", "unknown"] in [
        line.split() for line in told.out.splitlines()
    ] and "s and what is unknown;" in told.out


def test_what_the_plan_remarks_about_the_chosen_run_is_told(tmp_path, capsys, monkeypatch):
    """Its notes, and its warning where the tuner is made to take what may run out of memory."""
    path, ranking = write_run(tmp_path), tmp_path / "all.json"
    arguments = [path, "--gpus", 16, "--gpu", "h200", "--roles", "reference", "--top", 1, "--json", ranking]
    arguments += ["rollout.memory_share=0.3", "critic.parallel.tp=4"]
    code, told = tune(capsys, *arguments, *SMALL)
    assert code == 0, told.err
    facts = json.loads(ranking.read_text())
    config = load_config(path, ["rollout.memory_share=0.3", "critic.parallel.tp=4", *SMALL, *facts["overrides"]])
    prepared = plan_run(config, 16, "cuda", load_hardware("h200").memory_bytes, shapes_only=True)
    assert facts["notes"] == list(prepared.notes) != [] and facts["warnings"] == [] and "WARNING" not in told.out
    assert all(f"\n  note: {note}\n" in told.out for note in prepared.notes)
    monkeypatch.setattr(Hardware, "usable_bytes", property(lambda self: 10 * self.memory_bytes))
    larger = ["policy.micro_batch_tokens=65536", "algorithm.mini_batch_size=128", "rollout.memory_share=0.45"]
    code, told = tune(capsys, *arguments, *larger)
    assert code == 0, told.err
    (warning,) = json.loads(ranking.read_text())["warnings"]
    assert "may run out of memory" in warning and f"\n  WARNING: {warning}\n" in told.out


def test_experts_are_placed(tmp_path, capsys):
    path = write_run(tmp_path, SPARSE | {"max_position_embeddings": 1024}, "critic: {dtype: bf16}\n")
    code, told = tune(capsys, path, "--gpus", 4, "--gpu", "h100", "--roles", "critic", "policy.parallel=null", "--top", 40)
    assert code == 0, told.err
    assert "ep2" in told.out and "etp2" in told.out


@pytest.mark.slow
def test_a_role_under_fsdp2_is_searched_in_its_own_layouts(tmp_path, capsys):
    """Beside a policy of Megatron's; what is chosen passes the checks of `megappo plan`, which count its shards."""
    path, lines, facts = write_run(tmp_path, extra="critic: {engine: fsdp2}\n"), tmp_path / "layout.txt", tmp_path / "all.json"
    code, told = tune(capsys, path, "--gpus", 16, "--gpu", "h100", "--output", lines, "--json", facts)
    assert code == 0, told.err
    found = json.loads(facts.read_text())
    assert "critic under fsdp2: " in told.out and "policy: " in told.out
    sizes = {f"critic.parallel.{key}=1" for key in ("pp", "vpp", "ep", "etp")}
    assert len({one["layout"].split(",")[0] for one in found["roles"]["critic"]}) > 1, "with tensor and context parallel"
    assert all(sizes <= {*one["overrides"]} for one in found["roles"]["critic"])
    assert len(found["roles"]["policy"]) > 1
    config = load_config(path, lines.read_text().split())
    planned = plan_run(config, 16, "cuda", load_hardware("h100").memory_bytes, shapes_only=True).plan
    assert planned.peak(planned.fullest_rank()) == found["peak_bytes"]
    assert code == tune(capsys, path, "--gpus", 16, "--gpu", "h100", "--output", lines, "critic.engine=megatron")[0]
    other = load_config(path, [*lines.read_text().split(), "critic.engine=megatron"])
    assert plan_run(other, 16, "cuda", None, shapes_only=True).plan.stage("critic", 0) != planned.stage("critic", 0)


MISTAKES = [
    (
        ["--gpu", "h100", "policy.engine=fsdp2", "policy.optimizer.distributed=false"],
        "policy.optimizer.distributed = false: policy",
    ),
    (
        ["--gpu", "h100", "--roles", "critic", "policy.engine=fsdp2", "policy.parallel.layers_per_stage=[]"],
        "policy.parallel.pp = 2: policy.engine is fsdp2",
    ),
    (["--gpu", "h100", "--placements", "critic.ranks=0-7"], 'critic.ranks = "0-7": --placements would choose others'),
    (["--gpu", "h100", "rollout.ranks=8-16"], 'rollout.ranks = "8-16": 8-16 is outside the world, which has ranks 0-15'),
    (["--gpu", "h100", "critic.ranks=0-7", "policy.ranks=8-9"], "critic.ranks=0-7"),
    (["--gpu", "h900"], "--gpu h900: no such profile; use a100, h100, h200, b200, gb200, h20, cpu"),
    (["--gpu", "h100", "--gpus", "0"], "argument --gpus: 0 is not an integer >= 1"),
    (["--gpu", "h100", "--gpus", "-8"], "argument --gpus: -8 is not an integer >= 1"),
    (["--gpu", "h100", "--gpus", "12"], "--gpus 12: is not a multiple of the 8 GPUs of a node; use 8 or 16, or --gpus-per-node"),
    (["--gpu", "h100", "--gpus-per-node", "0"], "argument --gpus-per-node: 0 is not an integer >= 1"),
    (["--gpu", "h100", "--roles", "policy,judge"], "--roles judge: is no role; use policy, critic, reference, rollout"),
    (["--gpu", "h100", "--roles", "reference", "algorithm.kl.placement=none"], "--roles reference: is not built: algorithm.kl"),
    (["--gpu", "h100", "--roles", "rollout", "rollout.engine=megatron"], "--roles rollout: is not there: rollout.engine"),
    (["--gpu", "h100", "--top", "0"], "argument --top: 0 is not an integer >= 1"),
    (["--gpu", "h100", "--measure", "0"], "argument --measure: 0 is not an integer >= 1"),
    pytest.param(
        ["--gpu", "h100", "--measure", "1"],
        "16 ranks need a GPU each and this machine has 0; in a job of Slurm",
        marks=pytest.mark.slow,
    ),
    (["--gpu", "h100", "--measure", "1", "--roles", "rollout"], "--measure: trials are of models, not of --roles rollout"),
    (["--gpu", "h100", "--slurm"], "--slurm runs the trials of --measure K on the nodes of a job, and has no effect"),
    (["--gpu", "h100", "--measure", "1", "--slurm"], "--slurm: this is not in a job of Slurm; salloc --nodes N"),
    (["--gpu", "h100", "--mean-response-tokens", "9999"], "--mean-response-tokens 9999: must be > 0 and at most the longest"),
    (["--gpu", "h100", "--spread", "0.5"], "--spread 0.5: lengths have a spread around a mean, which is missing"),
    (["--gpu", "h100", "--mean-response-tokens", "99", "--spread", "-1"], "--spread -1: must be between 0 (all responses are"),
    (["--gpu", "h100", "--lengths", "absent"], "absent: No such file or directory; name the directory of a run"),
    (["--gpu", "h100", "--lengths", "x", "--spread", "1"], "--lengths: the run's responses have their own mean and spread"),
    (["--gpu", "h100", "--as-is", "--top", "3", "--roles", "policy"], "--as-is searches nothing, so that --roles has no effect"),
    (["--gpu", "h100", "--calibrate", "x"], "--calibrate: a run is held against its own configuration; give --as-is"),
    (["--gpu", "h100", "--as-is", "--output", "x"], "--as-is searches nothing, so that --output has no effect; leave out one of"),
    (["--gpu", "h100", "--as-is", "--calibrate", "x"], "x/metrics.jsonl: No such file or directory; name the directory"),
    (["--gpu", "h100", "policy.model=missing"], 'policy.model = "missing": missing is not a directory'),
    (
        ["--gpu", "h100", "--output", "/nowhere/layout.txt"],
        "--output /nowhere/layout.txt: there is no directory /nowhere",
    ),
    (["--gpu", "h100", "algorithm.mini_batch_size=100"], "algorithm.mini_batch_size = 100: must divide the 128 samples"),
    ([], "--gpu is missing: a100"),
    (["--gpu", "h100", "--gpus", "many"], "argument --gpus: many is not an integer >= 1"),
    (["--gpu", "h100", "--tensor-model-parallel-size", "8"], "set as key=value; did you mean policy.parallel.tp=VALUE?"),
]


@pytest.mark.parametrize("arguments, message", MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_mistake_is_one_line(tmp_path, capsys, monkeypatch, arguments, message):
    code, told = tune(capsys, write_run(tmp_path), *arguments)
    assert code == 2 and told.err.count("\n") == 1 and (told.out == "" or "need a GPU each" in message)
    assert told.err.startswith("megappo: ") and message in told.err


def test_a_configuration_is_priced_as_it_is_written(tmp_path, capsys):
    """A whole number of layers on each stage is no rule for it, and nothing is searched. What no model knows is not 0."""
    path, facts = write_run(tmp_path, extra="reward: {parts: [{url: 'http://127.0.0.1:8000/score'}]}\n"), tmp_path / "step.json"
    code, told = tune(capsys, path, "--gpu", "h200", "--as-is", "--mean-response-tokens", "300", "--json", facts, *SMALL)
    assert code == 0, told.err
    priced = json.loads(facts.read_text())
    seconds = {part["name"]: part["seconds"] for part in priced["parts"]}
    assert list(seconds)[:2] == ["generate", "log-probs"] and list(seconds)[-2:] == ["the rest", "reward (url)"]
    assert seconds["reward (url)"] is None and min(one for one in seconds.values() if one is not None) > 0
    assert sum(one for one in seconds.values() if one is not None) == pytest.approx(priced["step_seconds"])
    limits = {"compute", "memory", "links", "host", "pipeline", "longest response", ""}
    assert {part["limit"] for part in priced["parts"]} <= limits
    words = [line.split() for line in told.out.splitlines()]
    assert ["reward", "(url)", "unknown"] in words and "s and what is unknown; fullest is rank" in told.out
    assert any(line[:2] == ["policy", "update"] for line in words) and "overrides" not in told.out
    small = [*SMALL, "rollout.memory_share=0.3"]  # plan refuses what does not fit
    assert tune(capsys, path, "--gpu", "h200", "--as-is", "--json", facts, *small)[0] == 0
    longest = json.loads(facts.read_text())["step_seconds"]
    assert cli.main(["plan", str(path), "--gpu", "h200", "--shapes-only", *small]) == 0
    lines = capsys.readouterr().out.split("\nstep\n")[1].splitlines()
    assert all(line.startswith("  ") and len(line) <= 112 for line in lines)
    line = " ".join(line.strip() for line in lines)
    assert line.startswith(f"about {figures(longest)} s a step: generate ") and ", reward (url) unknown" in line


@pytest.mark.slow
def test_a_model_without_a_family_is_counted_by_its_engine(tmp_path, capsys):
    """Megatron's counter ended in a KeyError of the model's type."""
    sizes = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
    }
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1024, "max_position_embeddings": 1024}
    facts = {"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "head_dim": 32} | sizes | experts
    whole = ["policy.parallel.tp=1", "policy.parallel.pp=1", "policy.parallel.layers_per_stage=null"]
    engines = [f"{role}.engine=fsdp2" for role in ("policy", "critic", "reference")]
    path, found = write_run(tmp_path, facts), tmp_path / "all.json"
    code, told = tune(capsys, path, "--gpu", "h100", "--as-is", *whole, *engines)
    assert code == 0, told.err
    assert any(line.split()[:2] == ["policy", "update"] for line in told.out.splitlines())
    # Nor is tp proposed, which a run refuses.
    assert tune(capsys, path, "--gpu", "h100", "--gpus", 4, "--json", found, *whole, *engines)[0] == 0
    roles = json.loads(found.read_text())["roles"]
    assert all("policy.parallel.tp=1" in one["overrides"] for one in roles["policy"]) and len(roles["policy"]) > 1


def test_a_run_says_which_part_of_the_model_is_off(tmp_path, capsys):
    """A run that took what was predicted but for its updates, and one of the quickstart, on two CPU ranks."""
    path, facts = write_run(tmp_path), tmp_path / "step.json"
    drawn = runs.write_run(tmp_path / "drawn", {3: [runs.record([5] * count) for count in (40, 100, 700)]})  # the limit is 512
    arguments = [path, "--gpu", "h200", "--as-is", "--lengths", drawn, *SMALL]
    code, told = tune(capsys, *arguments, "--json", facts)
    assert code == 0, told.err
    assert "128 samples of 256 + 217 tokens" in told.out, "(40 + 100 + 512) / 3"
    stages: dict[str, float] = {}
    for part in json.loads(facts.read_text())["parts"]:
        stages[part["timing"]] = stages.get(part["timing"], 0.0) + part["seconds"]
    stages["update_policy"] *= 3
    row = {f"timing/{stage}_s": seconds for stage, seconds in stages.items() if stage} | {"timing/step_s": sum(stages.values())}
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step} | row) + "\n" for step in range(3)))
    code, told = tune(capsys, *arguments, "--calibrate", run)
    assert code == 0, told.err
    ratios = {line.split()[0]: line.split()[-1] for line in told.out.split("measured / predicted")[1].splitlines() if line.strip()}
    assert ratios["update_policy"] == "3.00" and ratios["logprobs"] == ratios["update_critic"] == ratios["generate"] == "1.00"
    assert "the model is off most in update_policy" in told.out and "too little" in told.out
    own = tmp_path / "mine.yaml"
    code, told = tune(capsys, *arguments, "--calibrate", QUICKSTART, "--output", own)
    assert code == 0 and "the run's steps took" in told.out and f"--gpu {own}" in told.out, told.err
    assert_calibrated(capsys, [path, "--as-is", "--lengths", drawn, *SMALL], own, QUICKSTART)
    means = {"lengths/prompt_mean": 100.0, "lengths/response_mean": 300.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step} | row | means) + "\n" for step in range(3)))
    code, told = tune(capsys, path, "--gpu", "h200", "--as-is", "--calibrate", run, *SMALL)
    assert code == 0 and "128 samples of 100 + 300 tokens" in told.out, told.err
    code, told = tune(capsys, path, "--gpu", "h200", "--as-is", "--calibrate", run, "rollout.max_response_tokens=200", *SMALL)
    assert code == 2 and f"--calibrate {run}: its responses of 300: must be > 0 and at most the longest, 200" in told.err
    (run / "metrics.jsonl").write_text('{"step": 1, "actor/loss": 0.5}\n')
    code, told = tune(capsys, *arguments, "--calibrate", run)
    assert code == 2 and "the run logged no timings (timing/step_s)" in told.err and told.err.count("\n") == 1


def assert_calibrated(capsys, arguments, profile, run):
    """What the profile of a run predicts for it is what the run took, in a search and in a run's prediction too."""
    hardware, measured = load_hardware(str(profile)), measured_stages(run)
    assert {"generate", "logprobs", "update_policy", "update_critic", "push_weights"} == set(hardware.calibration.named())
    code, told = tune(capsys, *arguments, "--gpu", profile, "--calibrate", run)
    assert code == 0 and f"calibrated by a run: generate x {figures(hardware.calibration.generate)}, " in told.out, told.err
    ratios = [line.split()[-1] for line in told.out.split("measured / predicted\n")[1].splitlines()[:5]]
    assert ratios == ["1.00"] * 5
    config = load_config(arguments[0], SMALL)
    lengths = replace(load_hardware("h200"), calibration=hardware.calibration)
    archs, work = read_archs(config), workload_of(config)
    choice = Search(config, archs, Machine(16, lengths), work, ("critic",)).best()
    plain = Search(config, archs, Machine(16, load_hardware("h200")), work, ("critic",)).best()
    assert choice is not None and plain is not None
    pairs = zip(by_stage(parts_of(choice)).items(), by_stage(parts_of(plain)).values(), strict=True)
    factors = {stage: seconds / before for (stage, seconds), before in pairs if seconds is not None and before is not None}
    assert factors == pytest.approx(hardware.calibration.named(), rel=1e-6) and measured["step"] > 0


@pytest.mark.slow
def test_the_configuration_is_read_once_and_once_more_with_the_winner(tmp_path, capsys, monkeypatch):
    asked = []

    def count(path):
        asked.append(path)
        return read_yaml(path)

    monkeypatch.setattr("megappo.config.loading.read_yaml", count)
    code, told = tune(capsys, write_run(tmp_path), "--gpu", "h100", "--top", 1)
    assert code == 0, told.err
    assert len(asked) == 2


def test_the_script_is_the_command_of_its_checkout(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/tune_parallelism.py", "absent.yaml", "--gpu", "h100"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("megappo: ") and "absent.yaml" in done.stderr


def test_a_model_that_fits_nowhere_says_what_it_would_need(tmp_path, capsys):
    path = write_run(tmp_path)
    code, told = tune(capsys, path, "--gpus", 1, "--gpu", "h100")
    assert code == 2 and told.err.count("\n") == 1
    needed = int(told.err.split("it needs about ")[1].split()[0])
    assert needed > 1 and tune(capsys, path, "--gpus", needed, "--gpu", "h100", "--top", 1)[0] == 0
    assert tune(capsys, path, "--gpus", needed // 2, "--gpu", "h100", "--top", 1)[0] == 2


def test_more_gpus_are_such_that_the_kept_layouts_divide(tmp_path, capsys):
    """The reference's 6 ranks do not divide the 16 of two nodes."""
    settings = ["reference.micro_batch_tokens=1024", "policy.parallel=null"]
    heads = {"num_attention_heads": 48, "num_key_value_heads": 48, "hidden_size": 24576}
    facts = LLAMA_7B | heads | {"num_hidden_layers": 4}  # few splits into chunks to search
    path = write_run(tmp_path, facts, "reference: {parallel: {pp: 2, cp: 3}}\n")
    code, told = tune(capsys, path, "--gpus", 6, "--gpu", "h100", "--roles", "policy,critic,rollout", *settings)
    assert code == 2 and "no layout fits on 6 x h100 beside the reference as configured; it needs about" in told.err
    assert int(told.err.split("it needs about ")[1].split()[0]) % 24 == 0


def test_offload_is_no_advice_without_a_gpu_or_where_it_is_on(tmp_path, capsys):
    arguments = [write_run(tmp_path, extra="critic: {dtype: fp32}\n"), "--gpus", 1, "rollout.engine=megatron"]
    on = [f"{role}.offload=[parameters]" for role in ("policy", "critic", "reference")]
    for gpu, settings, advised in (("h100", [], True), ("h100", on, False), ("cpu", ["policy.dtype=fp32"], False)):
        code, told = tune(capsys, *arguments, "--gpu", gpu, *settings)
        assert code == 2 and "no layout fits on 1 x" in told.err and ("or offload" in told.err) == advised, told.err


def test_what_no_number_of_gpus_helps_says_so(tmp_path, capsys):
    path = write_run(tmp_path, LLAMA_7B | {"num_hidden_layers": 4})
    code, told = tune(capsys, path, "--gpus", 1, "--gpu", "h100", "rollout.memory_share=0.98")
    assert code == 2 and "no layout fits on 1 x h100, and not on 256 either; lower rollout.memory_share" in told.err


def test_a_profile_of_the_users_own(tmp_path, capsys):
    own = tmp_path / "mine.yaml"
    text = (ROOT / "megappo/telemetry/hardware.yaml").read_text()
    own.write_text("mine:" + text.split("\nh200:")[1].split("\nb200:")[0])
    assert load_hardware(str(own)).memory_gib == load_hardware("h200").memory_gib
    own.write_text(own.read_text().replace("memory_tb_s: 4.8", "memory_tb_s: -1.0"))
    code, told = tune(capsys, write_run(tmp_path), "--gpu", own)
    assert code == 2 and "mine.memory_tb_s = -1.0: Input should be greater than 0" in told.err
    text = own.read_text()
    for found, written, says in (
        ("  memory_tb_s: -1.0\n", "", "mine.memory_tb_s is missing; add it (megappo/telemetry/hardware.yaml says what it is)"),
        ("tb_s: -1.0", "tb_s: 1\n  calibration: {generate: 0}", "mine.calibration.generate = 0: Input should be greater than 0"),
        ("tb_s: -1.0", "tb_s: 1\n  calibration: {sleep: 1}", "mine.calibration.sleep = 1: Unexpected keyword argument"),
    ):
        own.write_text(text.replace(found, written))
        code, told = tune(capsys, tmp_path / "run.yaml", "--gpu", own)
        assert code == 2 and says in told.err and told.err.count("\n") == 1
    assert cli.main(["plan", str(tmp_path / "run.yaml"), "--shapes-only", f"telemetry.hardware={own}"]) == 2
    assert "mine.calibration.sleep" in capsys.readouterr().err
    assert cli.main(["plan", str(tmp_path / "run.yaml"), "--shapes-only", "telemetry.hardware=h900"]) == 2
    assert "telemetry.hardware = h900: no such profile; use a100, " in capsys.readouterr().err


@pytest.mark.parametrize("key", ["processors", "gpus_per_node"])
def test_a_number_of_things_is_an_integer(tmp_path, key):
    """Half a processor would become none, and then a division by zero."""
    values = asdict(load_hardware("h200"))
    values.pop("name")
    with pytest.raises(ConfigError, match=f"mine.{key} = 0.5: Input should be a valid integer"):
        hardware_of("mine", values | {key: 0.5}, "mine.yaml")


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path, capsys):
    for file, says in (("/proc/all.json", "/proc cannot be written to"), ("/dev/null", "is no plain file")):
        code, told = tune(capsys, write_run(tmp_path), "--gpu", "h100", "--json", file)
        assert code == 2 and told.out == "" and f"--json {file}: {says}" in told.err


def measuring(folder, monkeypatch, role, most, outcome, *settings):
    """Arguments that measure on two CPU ranks, which are replaced: `outcome(place)` is what the trial at this place leaves. Also
    a list that grows by (folder, names) with every world."""
    path = write_run(folder, LLAMA_7B | {"hidden_size": 256, "intermediate_size": 512}, "critic: {dtype: fp32}\n")
    started = []

    def start_ranks(world, arguments, module):
        assert (world, module) == (2, "megappo.commands.tune.rank")
        where, *names = arguments
        for place, name in enumerate(names):
            Path(where, f"{name}.result.json").write_text(json.dumps(outcome(place)))
        started.append((Path(where), names))
        return 0

    monkeypatch.setattr(trials, "start_ranks", start_ranks)
    common = ["run.device=cpu", "rollout.engine=megatron", "policy.parallel=null", *settings, *SMALL]
    return [path, "--gpus", 2, "--measure", most, "--roles", role, *common, "--json", folder / "all.json"], started


def test_trials_are_run_once_and_decide(tmp_path, capsys, monkeypatch):
    """The ranks are replaced by one that finds the second layout of each role the fastest; real ranks: `record_trials.py`."""

    def outcome(place):
        seconds = 1.0 if place % 3 == 1 else 2.0
        return {"forward_s": seconds, "update_s": 3 * seconds}

    arguments, started = measuring(tmp_path, monkeypatch, "critic", 3, outcome)
    code, told = tune(capsys, *arguments)
    assert code == 0, told.err
    ((folder, names),) = started
    assert len(names) == 3 and all(json.loads((folder / f"{name}.json").read_text())["samples"] == 64 for name in names)
    lines = told.out.split("critic, measured")[1].splitlines()
    # A pass over 128 samples and two updates of 64.
    assert lines[1].split()[-3] == "8.00" and lines[2].split()[-3] == "16.0"
    ranking = json.loads((tmp_path / "all.json").read_text())["roles"]["critic"]
    chosen = [line.strip() for line in told.out.split("overrides")[1].splitlines() if "critic" in line]
    assert chosen == ranking[1]["overrides"] != ranking[0]["overrides"]
    assert tune(capsys, *arguments)[0] == 0 and len(started) == 1, "what is known is not run again"


def test_generation_counts_where_the_measured_policy_generates(tmp_path, capsys, monkeypatch):
    """The fastest updates are those of a layout that generates more slowly than it wins by them."""

    def outcome(place):
        return {"forward_s": 1e-3 / (1 + place), "update_s": 0.0}

    arguments, _ = measuring(tmp_path, monkeypatch, "policy", 2, outcome, "critic.micro_batch_tokens=1024")
    code, told = tune(capsys, *arguments)
    assert code == 0, told.err
    assert "  generate  forward  update" in told.out and "ratio  with generation, predicted" in told.out
    facts = json.loads((tmp_path / "all.json").read_text())
    slow, fast = facts["measured"]["policy"]
    assert slow["seconds"] > fast["seconds"], "ranked with generation"
    assert [line for line in facts["overrides"] if line.startswith("policy.")] == slow["overrides"]


def test_a_layout_whose_trial_fails_is_left_out_and_where_all_fail_it_says_so(tmp_path, capsys, monkeypatch):
    fails = 1

    def outcome(place):
        return {"reason": "rank 3: no room"} if place < fails else {"forward_s": 1.0, "update_s": 1.0}

    arguments, _ = measuring(tmp_path, monkeypatch, "critic", 2, outcome)
    code, told = tune(capsys, *arguments)
    assert code == 0, told.err
    measured = json.loads((tmp_path / "all.json").read_text())
    best, failed = measured["measured"]["critic"]
    assert [line for line in measured["overrides"] if line.startswith("critic.")] == best["overrides"]
    where = f"{tmp_path}/runs/tuning/critic-"
    assert failed["seconds"] is None and f"  {failed['layout']}: failed: rank 3: no room (delete {where}" in told.out
    assert failed["overrides"] == measured["roles"]["critic"][0]["overrides"], "the predicted best"
    fails = 2
    code, told = tune(capsys, *arguments, "run.output_dir=" + str(tmp_path / "again"))
    assert code == 2 and "--measure: all 2 layouts of the critic failed, see above; try more of them (--measure 4)" in told.err
