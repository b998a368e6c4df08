"""`--measure K --slurm` on a real Slurm of two nodes: a job that is waited for, found again, and told of where it fails."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from megappo.commands import cli
from megappo.commands.launch import slurm
from megappo.commands.launch.script import Job
from megappo.commands.launch.slurm import JobStatus
from megappo.commands.tune import job, measure
from megappo.commands.tune.measure import trial_name
from megappo.commands.tune.trials import RUNNING, Failed, Measured, read_outcome, write_outcome
from megappo.config.errors import ConfigError
from tests.commands.plan.checkpoints import TINY, write_checkpoint
from tests.commands.tune.test_batch import STUB, write_trials

PYTHON = sys.executable
FOUR_RANKS = ["--gpus", "4", "--gpus-per-node", "2", "--roles", "critic", "--top", "3"]


def write_run(folder, name="run"):
    model = write_checkpoint(folder / "model", TINY, weights=False, tokenizer=False)
    path = folder / f"{name}.yaml"
    path.write_text(
        f"run: {{device: cpu, output_dir: {folder / 'runs here'}}}\n"
        f"policy: {{model: {model}, dtype: fp32}}\nreference: {{dtype: fp32}}\n"
        "critic: {dtype: fp32, offload: {parameters: true}}\n"
        "data: {train: none, max_prompt_tokens: 16, prompts_per_step: 8}\n"
        "rollout: {engine: megatron, max_response_tokens: 16}\nalgorithm: {mini_batch_size: 8}\n"
    )
    return path


@pytest.fixture(autouse=True)
def outside_a_job(monkeypatch):
    monkeypatch.setattr(job, "POLL_S", 0.3)
    for name in ("RANK", "WORLD_SIZE", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)


def tune(capsys, path, *arguments):
    code = cli.main(["tune", str(path), *FOUR_RANKS, *arguments])
    return code, capsys.readouterr()


def stand_in(folder, monkeypatch, stub):
    """The job's Python runs `stub_rank.py` for a rank; the names of trials end as in `stub`."""
    python = folder / "python"
    python.write_text(
        f'#!/bin/bash\ncase "$*" in\n  "-m megappo.commands.tune.rank"*) exec {PYTHON} {STUB} "${{@:3}}" ;;\n'
        f"  *) exec {PYTHON} -c \"import sys, runpy; sys.executable = sys.argv.pop(1); sys.argv[:3] = ['batch']; "
        'runpy.run_module(\'megappo.commands.tune.batch\', run_name=\'__main__\')" "$0" "$@" ;;\nesac\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    seen = []

    def named(search, one, job=None):
        name = trial_name(search, one, job)
        seen.append(name) if name not in seen else None
        return f"{name}-{stub[seen.index(name)]}"

    monkeypatch.setattr(measure, "trial_name", named)


def kill_rank_one(folder, killed):
    """As the kernel does for want of host memory, as soon as the job's second trial has begun."""
    while not killed:
        time.sleep(0.02)
        names = next((json.loads(file.read_text()) for file in folder.glob("job-*.json")), [])
        running = [file.read_text() for file in folder.glob(f"*.world/{RUNNING}") if file.exists()]
        if running != names[1:2] or not running:
            continue
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if command[:3] == [PYTHON, "-m", "megappo.commands.tune.rank"] and str(folder) in command:
                if process.environ()["SLURM_PROCID"] == "1":
                    process.kill()
                    killed += running


def test_trials_run_as_a_job_and_are_reused_and_a_killed_rank_costs_its_trial_only(tmp_path, capsys, on_cluster):
    """The ranks are real ones, over gloo, two on each of two nodes."""
    path, folder, killed = write_run(tmp_path), tmp_path / "runs here" / "tuning", []
    threading.Thread(target=kill_rank_one, args=(folder, killed), daemon=True).start()
    ranking = tmp_path / "all.json"
    code, told = tune(capsys, path, "--measure", "2", "--slurm", "--partition", "main", "--time", "10", "--json", str(ranking))
    assert code == 0, told
    job_id = next(folder.glob("job-*.json")).stem.removeprefix("job-")
    names = json.loads((folder / f"job-{job_id}.json").read_text())
    lines = told.out.splitlines()
    first = f"job {job_id}: 2 trials on 2 nodes x 2 ranks, predicted to take "
    start = next(number for number, line in enumerate(lines) if line.startswith(first))
    assert lines[start].endswith(f" s and the start of the ranks, log {folder}/job-{job_id}.log")
    assert "  runs on 127.0.0.[1-2]" in lines[start : start + 4]
    measured = read_outcome(folder, names[0])
    assert killed == [names[1]] and isinstance(measured, Measured) and 0 < measured.load_s < measured.forward_s
    failed = read_outcome(folder, names[1])
    assert isinstance(failed, Failed) and failed.reason == "rank 1 on 127.0.0.1 ended (killed by SIGKILL)"
    table = told.out.split("critic, measured")[1].split("overrides")[0].splitlines()
    assert len(table[1].split()) > 4 and f"failed: {failed.reason} (delete {folder}/{names[1]}.result.json" in table[2]
    facts = json.loads(ranking.read_text())
    assert [one.get("reason") for one in facts["measured"]["critic"]] == [None, failed.reason]
    chosen = [line for line in facts["overrides"] if line.startswith("critic.")]
    assert chosen == facts["measured"]["critic"][0]["overrides"] == facts["roles"]["critic"][0]["overrides"]
    assert f"critic {table[1].split('  ')[1]}" in (folder / f"job-{job_id}.log").read_text()
    sbatch = (folder / f"job-{job_id}.sbatch").read_text()
    assert '#SBATCH "--time=10"\n' in sbatch and "--gpus-per-node" not in sbatch
    before = on_cluster.command("squeue", "--noheader", "--states=all", "--format=%i")
    code, again = tune(capsys, path, "--measure", "2", "--slurm", "--partition", "main")
    assert code == 0 and again.out.split("critic, measured")[1] == told.out.split("critic, measured")[1]
    assert on_cluster.command("squeue", "--noheader", "--states=all", "--format=%i") == before, "nothing is run again"
    assert not list(folder.glob("*.world"))


def test_a_job_goes_on_after_a_trial_that_fails_and_its_end_is_told(tmp_path, capsys, on_cluster, monkeypatch):
    """The third one's ranks do not even come to the trial: blamed on none, with the end of the log."""
    path, folder = write_run(tmp_path), tmp_path / "runs here" / "tuning"
    stand_in(tmp_path, monkeypatch, ["a", "fails", "nowhere"])
    code, told = tune(capsys, path, "--measure", "3", "--slurm", "--time", "2")
    assert code == 2 and ": forward 1 s, update 2 s\n" in told.out and ": failed: rank 1: MemoryError: of this rank\n" in told.out
    starts = (folder / "starts").read_text().splitlines()
    assert [len(line.split()) for line in starts] == [3, 1]
    assert "  | RuntimeError: before any trial\n" in told.err
    last, log = told.err.splitlines()[-1], next(folder.glob("job-*.log"))
    assert last.startswith("megappo: --measure: job ") and f" ended (FAILED, exit code 1); its log is {log}" in last
    assert "1 of 3 trials have no result" in last


def test_an_interrupt_leaves_the_job_alone_and_the_next_call_finds_it(tmp_path, capsys, on_cluster, monkeypatch):
    """The job is held back until it was interrupted, so that it is still to come."""
    path, folder = write_run(tmp_path), tmp_path / "runs here" / "tuning"
    stand_in(tmp_path, monkeypatch, ["a"])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker of pytest-xdist ignores it

    waits, over = threading.Event(), threading.Event()  # on a busy machine Slurm's first answer takes seconds
    say = job.Follower._say

    def say_and_set(follower, line):
        say(follower, line)
        if line == "  waits (JobHeldUser)":
            waits.set()

    def interrupt():
        waits.wait(60)
        if not over.is_set():
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(job.Follower, "_say", say_and_set)
    threading.Thread(target=interrupt, daemon=True).start()
    code, told = tune(capsys, path, "--measure", "1", "--slurm", "--sbatch=--hold")
    over.set()
    signal.signal(signal.SIGINT, before)
    job_id = next(folder.glob("job-*.json")).stem.removeprefix("job-")
    assert code == 130 and f"\njob {job_id} goes on: ask again in the same words" in told.out and f"scancel {job_id}" in told.out
    assert "  waits (JobHeldUser)\n" in told.out
    assert on_cluster.job(job_id)["JobState"] == "PENDING"
    on_cluster.command("scontrol", "release", job_id)
    code, told = tune(capsys, path, "--measure", "1", "--slurm", "--sbatch=--hold")
    assert code == 0 and "critic, measured" in told.out, told
    assert len(list(folder.glob("job-*.json"))) == 1, "and no second job"


def test_a_controller_that_restarts_says_nothing_about_the_job(tmp_path, capsys, monkeypatch):
    """And neither does a file system that shows a result late."""
    (name,) = write_trials(tmp_path, "a")
    answers = [ConfigError("Slurm refuses: connection refused")] * 2 + [JobStatus("COMPLETED", "None", "n1", 0)]

    def job_status(job_id):
        answer = answers.pop(0)
        if isinstance(answer, ConfigError):
            raise answer
        threading.Timer(0.5, write_outcome, (tmp_path, name, Measured(forward_s=1.0, update_s=None))).start()
        return answer

    monkeypatch.setattr(slurm, "job_status", job_status)
    job.Follower("7", tmp_path, [name]).wait()
    assert capsys.readouterr().out == "  Slurm refuses: connection refused; still asking\n  a: forward 1 s\n"


def test_a_job_out_of_time_is_not_waited_for(tmp_path, capsys, monkeypatch):
    """Slurm gives it exit code 0. What it had measured is kept."""
    names = write_trials(tmp_path, "a", "b")
    write_outcome(tmp_path, "a", Measured(forward_s=1.0, update_s=None))
    (tmp_path / "job-7.log").write_text("".join(f"line {n}\n" for n in range(40)))
    monkeypatch.setattr(slurm, "job_status", lambda job_id: JobStatus("TIMEOUT", "TimeLimit", "n1", 0))
    monkeypatch.setattr(job.time, "sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(ConfigError, match=r"job 7 ended \(TIMEOUT, exit code 0\); its log is .*; 1 of 2 trials have no result"):
        job.Follower("7", tmp_path, names).wait()
    told = capsys.readouterr()
    assert told.out == "  a: forward 1 s\n" and told.err == "".join(f"  | line {n}\n" for n in range(25, 40))


def test_a_script_for_gpus_keeps_every_path_whole(tmp_path):
    """Its commands are replaced by one that prints what it is given."""
    folder, name = tmp_path / "a 100% 'b' $HOME \"c\"", "policy-1"
    folder.mkdir()
    text = job.render(Job(8, 4, gpus=True, options=("--comment=two words",)), folder, [name, "critic-2"])
    lines = text.splitlines()
    assert {"#SBATCH --nodes=8", "#SBATCH --ntasks-per-node=4", "#SBATCH --gpus-per-node=4"} <= set(lines)
    options = [shlex.split(line)[1] for line in lines if line.startswith("#SBATCH ")]
    log = f"{folder}/job-%j.log".replace("100%", "100%%")
    assert options[:3] == ["--job-name=megappo-tune", f"--output={log}", "--comment=two words"]
    shown = text.replace("exec ", "printf '%s\\n' ")
    run = {"env": {"SLURM_CPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "2", "PATH": os.environ["PATH"]}, "text": True}
    done = subprocess.run(["bash", "-eu", "-c", shown + "env"], capture_output=True, check=True, **run)
    assert done.stdout.splitlines()[:6] == [PYTHON, "-m", "megappo.commands.tune.batch", str(folder), name, "critic-2"]
    assert {"OMP_NUM_THREADS=2", "SRUN_CPUS_PER_TASK=2", "NCCL_DEBUG=WARN", "PYTHONUNBUFFERED=1"} <= set(done.stdout.splitlines())


REFUSED = {
    "partition": (["--partition", "h100"], "--partition h100: unknown to sinfo; there are main"),
    "nodes": (["--partition", "main", "--gpus", "8"], "--partition main: has 2 nodes, and 8 ranks are 4 nodes of 2"),
    "limit": (["--partition", "main", "--time", "3-0"], "--time 3-0: jobs in partition main end after 1440 minutes"),
    "time": (["--time", "soon"], "--time soon: not a time"),
    "option": (["--sbatch=exclusive"], '--sbatch = "exclusive": must be one option in one line'),
    "own option": (["--sbatch=--nodes=1"], '--sbatch = "--nodes=1": use --gpus'),
    "log": (["--sbatch=--output=here"], '--sbatch = "--output=here": the trials depend on their own'),
    "default partition": (["--gpus", "8"], "--partition main: has 2 nodes, and 8 ranks are 4 nodes of 2"),
    "sbatch": (["--sbatch=--qos-of-nobody"], "Slurm refuses: sbatch: unrecognized option '--qos-of-nobody'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_slurm_cannot_run_is_refused_and_leaves_nothing(tmp_path, capsys, on_cluster, case):
    path, (arguments, message) = write_run(tmp_path), REFUSED[case]
    code, told = tune(capsys, path, "--measure", "1", "--slurm", *arguments)
    assert code == 2 and message in told.err and told.err.count("\n") == 1
    assert not (tmp_path / "runs here").exists() and sorted(os.listdir(tmp_path)) == ["model", "run.yaml"]
    assert case == "sbatch" or told.out == "", "before anything is computed"
