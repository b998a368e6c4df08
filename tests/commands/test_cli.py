"""The command line: exit codes, one line on stderr, nothing written; what needs no torch does not import it."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megappo.commands import cli, doctor, rank
from megappo.config.errors import ConfigError
from megappo.rewards.base import TooFewVerdicts
from megappo.runtime.ending import Ended, Unrecoverable, input_accepted, record_end
from megappo.runtime.world import first_host
from tests.commands.plan.checkpoints import TINY, write_checkpoint, write_run

ROOT = Path(__file__).parents[2]


def files_of(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*")}


def run(capsys, *arguments):
    """(exit code, stdout, stderr)"""
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def outside_a_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def make_other_run(folder):
    (folder / "runs" / "run").mkdir(parents=True)
    (folder / "runs" / "run" / "metrics.jsonl").write_text("precious")


def make_unsupported(folder):
    write_checkpoint(folder / "model", TINY | {"architectures": ["FalconForCausalLM"]}, tokenizer=False)


def make_incomplete_prompts(folder):
    (folder / "train.jsonl").write_text(json.dumps({"question": "1+1=", "gold": "2"}) + "\n")


def nothing(folder):
    pass


# what is prepared, arguments after the configuration, what stderr must contain
BAD = [
    (nothing, ["policy.model=absent"], ['policy.model = "absent"', "`hf download OWNER/NAME --local-dir absent`"]),
    (nothing, ["data.train=absent.jsonl"], ["data.train: data file absent.jsonl does not exist"]),
    (make_unsupported, [], ["policy.model", "FalconForCausalLM is not supported", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
    (nothing, ["policy.optimizer.lr=fast"], ['policy.optimizer.lr = "fast": must be a number']),
    (nothing, ["algorithm.gamma=2"], ["algorithm.gamma = 2: must be <= 1"]),
    (nothing, ["policy.parallel.tp=4"], ["policy.parallel: tp 4 x pp 1 = 4 does not divide the 2 ranks"]),
    (
        nothing,
        ["run.num_ranks=8", "policy.parallel.tp=8"],
        ["policy.parallel.tp = 8", "4 attention heads", "largest tp that works is 4"],
    ),
    (nothing, ["data.max_prompt_tokens=1"], ["no prompts are left", "kept 0 of 100"]),
    (make_incomplete_prompts, [], ["data.prompt_key=prompt", "question, gold"]),
    (nothing, ["data.prompts_per_step=128"], ["data.prompts_per_step=128", "100 prompts"]),
    (nothing, ["algorithm.mini_batch_size=24"], ["algorithm.mini_batch_size = 24", "64 samples", "use 16 or 32"]),
    (nothing, ["polcy.model=x"], ["did you mean policy.model?"]),
    (nothing, ["roles.judge.model=x"], ["roles.judge.model", "unknown key"]),
    (nothing, ["rollout.engine=sglang"], ['rollout.engine = "sglang"', "'vllm' or 'megatron'"]),
    (nothing, ["reward.parts=[{name: bleu}]"], ["bleu", "exact_match"]),
    (nothing, ["algorithm.kl.controller.target=5.0"], ["algorithm.kl.controller.type is fixed", "set type to adaptive"]),
    (nothing, ["--tensor-model-parallel-size", "2"], ["did you mean policy.parallel.tp=VALUE?"]),
    (nothing, ["--resum"], ["--resum: options are set as key=value"]),
]
BAD_TRAIN_ONLY = [
    (make_other_run, [], ["holds another run, without a checkpoint", "run.name=run-2"]),
    (nothing, ["--resume"], ["holds no run to resume"]),
    (make_other_run, ["--resume"], ["holds no checkpoint to resume; leave --resume out"]),
    (nothing, ["run.device=cuda"], ["run.device = cuda", "run.device=cpu"]),
]


@pytest.mark.parametrize("prepare, arguments, fragments", BAD + BAD_TRAIN_ONLY, ids=range(len(BAD + BAD_TRAIN_ONLY)))
def test_train_refuses_bad_input_in_one_line_and_writes_nothing(
    tmp_path, capsys, monkeypatch, outside_a_launcher, prepare, arguments, fragments
):
    def train_here(*_, **__):
        raise AssertionError("ranks were started")

    monkeypatch.setattr("megappo.commands.launch.training.train_here", train_here)
    path = write_run(tmp_path)
    prepare(tmp_path)
    before = files_of(tmp_path)
    code, out, err = run(capsys, "train", path, *arguments)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and "Traceback" not in err
    assert all(fragment in err for fragment in fragments), err
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("prepare, arguments, fragments", BAD[:8], ids=range(8))
def test_plan_refuses_the_same(tmp_path, capsys, outside_a_launcher, prepare, arguments, fragments):
    path = write_run(tmp_path)
    prepare(tmp_path)
    code, out, err = run(capsys, "plan", path, *arguments)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert all(fragment in err for fragment in fragments), err


@pytest.mark.parametrize("steps, starts", [(3, 0), (4, 1)])
def test_a_resume_of_a_finished_run_starts_ranks_only_if_steps_or_the_export_are_left(
    tmp_path, capsys, monkeypatch, outside_a_launcher, steps, starts
):
    started = []
    monkeypatch.setattr("megappo.commands.launch.training.train_here", lambda *_, **__: started.append(1) or 0)
    monkeypatch.setattr("megappo.commands.launch.attempt.newest_step", lambda run_dir: 3)
    path, run_dir = write_run(tmp_path), tmp_path / "runs" / "run"
    (run_dir / "export").mkdir(parents=True)
    record_end(run_dir, Ended("finished", 3))
    code, out, _ = run(capsys, "train", path, "--resume", f"trainer.steps={steps}")
    assert code == 0 and len(started) == starts
    assert ("nothing is left to train: it finished with step 3 of 3; raise trainer.steps" in out) == (starts == 0)
    (run_dir / "export").rmdir()
    assert run(capsys, "train", path, "--resume", f"trainer.steps={steps}")[0] == 0 and len(started) == starts * 2 + (steps == 3)


def test_independent_mistakes_are_refused_at_once_a_line_each(tmp_path, capsys, outside_a_launcher):
    overrides = ["algorithm.mini_batch_size=24", "data.eval_prompts=5", "trainer.eval_every=5"]
    code, out, err = run(capsys, "plan", write_run(tmp_path), *overrides)
    assert (code, out) == (2, "")
    batch, prompts, every, way_out = err.splitlines()
    assert "algorithm.mini_batch_size = 24" in batch and "data.eval_prompts = 5" in prompts and "trainer.eval_every = 5" in every
    assert all(line.startswith("megappo: ") for line in err.splitlines())
    assert way_out.endswith(" data.eval_prompts=null trainer.eval_every=null")


def test_one_prompt_is_enough_for_steps_of_one(tmp_path, capsys, outside_a_launcher):
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": 2}) + "\n")
    size = ["data.prompts_per_step=1", "rollout.samples_per_prompt=1", "algorithm.mini_batch_size=1"]
    code, out, err = run(capsys, "plan", write_run(tmp_path), f"data.train={tmp_path / 'one.jsonl'}", *size)
    assert (code, err) == (0, "") and "kept 1 of 1 prompts" in out


def test_train_starts_the_ranks_that_the_configuration_asks_for(tmp_path, capsys, monkeypatch, outside_a_launcher):
    """Negative control of the table above: the unchanged configuration does start."""
    started = []
    monkeypatch.setattr(
        "megappo.commands.launch.training.train_here",
        lambda ranks, arguments, _, resume, **__: started.append((ranks, arguments, resume)) or 7,
    )
    path = write_run(tmp_path)
    assert run(capsys, "train", path, "run.seed=3")[0] == 7, "the exit code of the ranks is handed on"
    assert started == [(2, ["train", str(path), "run.seed=3"], False)]
    make_other_run(tmp_path)
    monkeypatch.setattr("megappo.commands.launch.attempt.newest_step", lambda run_dir: 3)
    run(capsys, "train", "--resume", path, "run.seed=3")
    run(capsys, "train", path, "--resume", "run.seed=3")
    assert started[1:] == [(2, ["train", str(path), "run.seed=3"], True)] * 2


@pytest.mark.parametrize(
    "arguments, fragments",
    [
        ([], ["required: COMMAND"]),
        (["trian", "x.yaml"], ["invalid choice: 'trian'", "train"]),
        (["train"], ["required: CONFIG"]),
        (["plan", "x.yaml", "--world-size", "0"], ["0 is not an integer >= 1"]),
        (["plan", "x.yaml", "--gpu-memory-gib", "nan"], ["nan is not a number > 0"]),
        (["plan", "absent.yaml"], ["absent.yaml: no such file"]),
        (["plan", "x" * 300], ["xxx: File name too long; give the path of a YAML configuration"]),
        (["trajectories", "x" * 300], ["xxx/trajectories: File name too long"]),
        (["convert", "/dev/null"], ["/dev/null: is no plain file; name a shell script"]),
        (["doctor", "--all"], ["unrecognized arguments: --all"]),
        (["config"], ["name a YAML file"]),
    ],
)
def test_a_wrong_command_line_is_one_line(capsys, arguments, fragments):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert all(fragment in err for fragment in fragments), err


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("train", "sft", "plan", "tune", "generate", "export", "doctor", "config"))


def test_a_fault_keeps_its_traceback(capsys, monkeypatch):
    """A ValueError of a library is not a user's mistake: it must not shrink to one line."""
    monkeypatch.setattr(doctor, "main", lambda args: json.loads("{"))
    with pytest.raises(ValueError):
        cli.main(["doctor"])

    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "main", interrupted)
    assert cli.main(["doctor"]) == 130


def test_once_the_input_is_accepted_a_value_error_of_megappo_is_a_fault_too(capsys, monkeypatch):
    """It must keep its traceback, and exit with 1: Slurm does not requeue a mistake of the user."""
    monkeypatch.setattr(doctor, "main", lambda args: first_host(""))
    assert run(capsys, "doctor")[0] == 2, "negative control"

    def accepted(args):
        with input_accepted():
            first_host("")

    monkeypatch.setattr(doctor, "main", accepted)
    with pytest.raises(ValueError, match="not a list of hosts"):
        cli.main(["doctor"])

    def searched(args):
        with input_accepted(unless=(ConfigError,)):
            raise ConfigError("no layout fits")

    monkeypatch.setattr(doctor, "main", searched)
    monkeypatch.setattr(cli, "PACKAGE", Path(__file__).parents[1])
    assert run(capsys, "doctor") == (2, "", "megappo: no layout fits\n")


def test_verify_accepts_its_input_before_it_measures(tmp_path, monkeypatch, outside_a_launcher):
    monkeypatch.setattr("megappo.commands.verify.run._measure", lambda *_: first_host(""))
    with pytest.raises(ValueError, match="not a list of hosts"):
        cli.main(["verify", str(write_run(tmp_path)), "--max-ranks", "2"])


@pytest.mark.parametrize("error, code", [(Unrecoverable("replicas differ"), 17), (TooFewVerdicts("replicas differ"), 69)])
def test_a_fault_that_would_come_back_has_a_code_of_its_own(capsys, monkeypatch, error, code):
    def failed(args):
        raise error

    monkeypatch.setattr(doctor, "main", failed)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch wraps it once for each world of earlier tests
    ended, _, err = run(capsys, "doctor")
    assert ended == code and "Traceback" in err and err.endswith(f"{type(error).__name__}: replicas differ\n")


def test_a_broken_pipe_to_a_helper_process_is_a_fault(monkeypatch):
    def broken(args):
        raise BrokenPipeError

    monkeypatch.setattr(doctor, "main", broken)
    with pytest.raises(BrokenPipeError):  # `megappo verify` must not end with 0
        cli.main(["doctor"])


def test_a_disk_that_is_full_is_one_line_and_of_a_rank_a_traceback(capsys, monkeypatch, outside_a_launcher):
    def full(args):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/a")

    monkeypatch.setattr(doctor, "main", full)
    assert run(capsys, "doctor") == (1, "", "megappo: runs/a: No space left on device\n")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(OSError, match="No space left"):  # its stage is in the traceback
        cli.main(["doctor"])


def test_a_current_directory_that_is_gone_is_named(capsys, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert run(capsys, "doctor") == (2, "", "megappo: the current directory has been removed; change to one that exists\n")


def test_ranks_of_another_launcher_cannot_be_restarted_here(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rank, "enter_rank", lambda stop: None)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    code, _, err = run(capsys, "train", write_run(tmp_path), "--max-restarts", "2")
    assert code == 2 and "--max-restarts 2: these ranks were started by torchrun or srun" in err


def test_a_replay_is_of_an_asynchronous_run_without_restarts(tmp_path, capsys, outside_a_launcher):
    path, before = write_run(tmp_path), "megappo: --replay runs/x: "
    assert run(capsys, "train", path, "--replay", "runs/x") == (
        2,
        "",
        f"{before}rollout.max_staleness is null, and such a run repeats by itself; leave it out\n",
    )
    code, _, err = run(capsys, "train", path, "rollout.max_staleness=1", "--replay", "runs/x", "--max-restarts", "1")
    assert (code, err) == (2, f"{before}use it without --max-restarts; a replay that fails would fail again\n")


def test_plan_prints_for_other_machines(tmp_path, capsys, outside_a_launcher):
    path = write_run(tmp_path)
    code, out, _ = run(capsys, "plan", path, "run.num_ranks=null", "--world-size", "8", "--gpu-memory-gib", "80")
    assert code == 0 and "8 ranks on cuda" in out and "of 81,920.00 at its peak" not in out and "KV" in out
    code, out, _ = run(capsys, "plan", path)
    assert code == 0 and "2 ranks on cpu" in out


def test_config_prints_what_loads_again(tmp_path, capsys):
    path = write_run(tmp_path)
    code, out, _ = run(capsys, "config", path, "policy.optimizer.lr=3e-6")
    assert code == 0
    (tmp_path / "resolved.yaml").write_text(out)
    assert run(capsys, "config", tmp_path / "resolved.yaml")[1] == out
    code, out, _ = run(capsys, "config", "--schema")
    assert code == 0 and "policy" in json.loads(out)["properties"]
    assert "critic" not in json.loads(run(capsys, "config", "--sft", "--schema")[1])["properties"]


def write_sft(folder):
    write_run(folder)
    path = folder / "sft.yaml"
    path.write_text(
        f"run: {{num_ranks: 2, device: cpu, output_dir: {folder / 'runs'}}}\n"
        f"policy: {{model: {folder / 'model'}, dtype: fp32, parallel: {{tp: 2}}}}\n"
        f"data: {{train: {folder / 'train.jsonl'}, chat_template: false, max_tokens: 32}}\n"
        f"trainer: {{steps: 10, batch_size: 20}}\n"
    )
    return path


@pytest.mark.parametrize(
    "arguments, fragments",
    [
        (["data.train=absent.jsonl"], ["absent.jsonl does not exist"]),
        (["data.response_key=gold"], ["data.response_key=gold", "prompt, answer"]),
        (["data.max_tokens=1"], ["no demonstrations are left"]),
        (["trainer.batch_size=101"], ["trainer.batch_size = 101", "100 demonstrations"]),
        (["policy.parallel.pp=3", "policy.parallel.tp=1", "run.num_ranks=3"], ["policy.parallel.pp = 3", "use 2 or 4"]),
        (["policy.offload=[parameters]"], ["policy.offload", "only optimizer has an effect"]),
        (["critic.model=x"], ["critic.model", "unknown key"]),
    ],
)
def test_sft_refuses_bad_input(tmp_path, capsys, outside_a_launcher, arguments, fragments):
    path = write_sft(tmp_path)
    before = files_of(tmp_path)
    code, out, err = run(capsys, "sft", path, *arguments)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert all(fragment in err for fragment in fragments), err
    assert files_of(tmp_path) == before


def test_sft_starts_and_says_what_it_will_do(tmp_path, capsys, monkeypatch, outside_a_launcher):
    started = []
    monkeypatch.setattr("megappo.commands.launch.training.train_here", lambda ranks, *_, **__: started.append(ranks) or 0)
    path = write_sft(tmp_path)
    code, text, _ = run(capsys, "sft", path)
    assert code == 0 and started == [2]
    assert "llama of 803,968 parameters, tp2 pp1 dp1 on 2 ranks" in text
    assert "kept 100 of 100 demonstrations" in text and "10 steps of 20 demonstrations = 2.00 epochs" in text


def test_the_installed_command_exits_with_2_and_no_traceback(tmp_path):
    path = write_run(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | {
        "PYTHONPATH": str(ROOT)
    }
    command = [sys.executable, "-m", "megappo", "config", str(path), "policy.tp=2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "megappo: command line: policy.tp = 2: unknown key; did you mean policy.parallel.tp?\n"


HEAVY = ("torch", "megatron", "vllm", "transformers", "numpy")


def imported_by(script):
    """The libraries that take seconds to import which a new process holds after this script."""
    code = f"import sys\nfrom megappo.commands.cli import main\n{script}\nprint(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


@pytest.mark.slow
def test_a_rank_of_any_launcher_imports_no_plan_and_names_the_command_that_prints_it(tmp_path):
    """Training left out, in the process that torchrun or srun has started: the guard of imports follows the same module. Nor does
    a run of text import what reads pictures."""
    path = write_run(tmp_path)
    script = f"""
import sys
import megappo.trainer.main
from megappo.commands.cli import main
megappo.trainer.main.train = lambda config, data, **_: print(len(data.train), "prompts")
assert main(["train", {str(path)!r}]) == 0
unused = ("PIL", *("megappo.commands." + one for one in ("plan.", "tune.", "verify.")))
print([name for name in sys.modules if name.startswith(unused)])
"""
    world = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | world, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == f"2 ranks; `megappo plan {path}` prints their layouts, memory and batches"
    assert said[-2:] == ["100 prompts", "[]"]


def test_help_and_the_resolved_configuration_import_nothing_heavy(tmp_path):
    assert imported_by(f"assert main(['config', {str(write_run(tmp_path))!r}]) == 0") == []
    assert imported_by("try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0") == []
    assert imported_by("import numpy") == ["numpy"], "negative control"


def test_every_command_refuses_a_wrong_key_before_it_imports_anything_heavy(tmp_path):
    path = str(write_run(tmp_path))
    job = ["--nodes", "1", "--gpus-per-node", "2"]
    calls = [["train", path], ["plan", path], ["verify", path], ["launch", path, *job], ["launch", path, "--local"]]
    calls += [["tune", path, "--gpu", "h100"], ["config", path], ["sft", str(write_sft(tmp_path))]]
    assert imported_by(f"assert [main([*call, 'a.b=1']) for call in {calls!r}] == [2] * {len(calls)}") == []
