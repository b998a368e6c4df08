"""`--measure K --slurm` on a real Slurm of two nodes: the trials run on the nodes of the job that the command is in."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time

import psutil
import pytest

from megappo.commands import cli
from megappo.commands.tune import measure
from megappo.commands.tune.measure import trial_name
from megappo.commands.tune.trials import RUNNING, Failed, Measured, read_outcome
from tests.commands.plan.checkpoints import TINY, write_checkpoint
from tests.commands.tune.test_trials import STUB

PYTHON = sys.executable
CRITIC = ["--roles", "critic", "--top", "3"]
FOUR_RANKS, TWO_RANKS = (["--gpus", f"{2 * n}", "--gpus-per-node", f"{n}", *CRITIC] for n in (2, 1))


def write_run(folder, name="run"):
    model = write_checkpoint(folder / "model", TINY, weights=False, tokenizer=False)
    path = folder / f"{name}.yaml"
    path.write_text(
        f"run: {{device: cpu, output_dir: {folder / 'runs here'}}}\n"
        f"policy: {{model: {model}, dtype: fp32}}\nreference: {{dtype: fp32}}\n"
        "critic: {dtype: fp32, offload: [parameters]}\n"
        "data: {train: none, max_prompt_tokens: 16, prompts_per_step: 8}\n"
        "rollout: {engine: megatron, max_response_tokens: 16}\nalgorithm: {mini_batch_size: 8}\n"
    )
    return path


@pytest.fixture
def in_job(on_cluster, monkeypatch):
    """This process as in a shell of salloc, with two ranks on each of two nodes."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    asked = ["salloc", "--no-shell", "--nodes=2", "--ntasks-per-node=2", "--partition=main", "--time=10"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True, env=on_cluster.environment).stderr
    job_id = re.search(r"job allocation (\d+)", said)[1]
    for name, value in (("JOB_ID", job_id), ("JOB_NUM_NODES", "2"), ("JOB_PARTITION", "main")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    yield on_cluster
    on_cluster.command("scancel", job_id)


def tune(capsys, path, *arguments, ranks=FOUR_RANKS):
    code = cli.main(["tune", str(path), *ranks, "--slurm", *arguments])
    return code, capsys.readouterr()


def kill_rank_one(folder, killed):
    """As the kernel does for want of host memory, as soon as the second trial has begun."""
    first = ""
    while not killed:
        time.sleep(0.02)
        running = "".join(file.read_text() for file in folder.glob(f"*.world/{RUNNING}") if file.exists())
        first = first or running
        if not running or running == first:
            continue
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if command[:4] == [PYTHON, "-P", "-m", "megappo.commands.tune.rank"] and str(folder) in command:
                if process.environ()["SLURM_PROCID"] == "1":
                    process.kill()
                    killed.append(running)


def test_trials_run_on_the_jobs_nodes_and_are_reused_and_a_killed_rank_costs_its_trial_only(tmp_path, capfd, in_job):
    """The ranks are real ones, over gloo, one on each of two nodes."""
    path, folder, killed = write_run(tmp_path), tmp_path / "runs here" / "tuning", []
    threading.Thread(target=kill_rank_one, args=(folder, killed), daemon=True).start()
    ranking = tmp_path / "all.json"
    code, told = tune(capfd, path, "--measure", "2", "--json", str(ranking), ranks=TWO_RANKS)
    assert code == 0, told
    assert "2 trials on 2 ranks of the nodes of this job; results in " in told.out
    names = sorted(file.name.removesuffix(".result.json") for file in folder.glob("*.result.json"))
    measured = next(one for name in names if isinstance(one := read_outcome(folder, name), Measured))
    failed = read_outcome(folder, killed[0])
    assert len(names) == 2 and 0 < measured.load_s < measured.forward_s
    assert isinstance(failed, Failed) and re.fullmatch(r"rank 1 on 127.0.0.[12] ended \(killed by SIGKILL\)", failed.reason)
    table = told.out.split("critic, measured")[1].split("overrides")[0].splitlines()
    assert len(table[1].split()) > 4 and f"failed: {failed.reason} (delete {folder}/{killed[0]}.result.json" in table[2]
    facts = json.loads(ranking.read_text())
    assert [one.get("reason") for one in facts["measured"]["critic"]] == [None, failed.reason]
    chosen = [line for line in facts["overrides"] if line.startswith("critic.")]
    assert chosen == facts["measured"]["critic"][0]["overrides"]
    code, again = tune(capfd, path, "--measure", "2", ranks=TWO_RANKS)
    assert code == 0 and again.out.split("critic, measured")[1] == told.out.split("critic, measured")[1]
    assert "trials on" not in again.out and not list(folder.glob("*.world")), "nothing is run again"


def test_the_others_go_on_after_a_trial_that_fails_and_ranks_that_come_to_none_are_told(tmp_path, capfd, in_job, monkeypatch):
    """Ranks that `stub_rank.py` stands in for: the third one's do not even come to the trial, and it is blamed on none."""
    path, folder, ends = write_run(tmp_path), tmp_path / "runs here" / "tuning", ["a", "fails", "nowhere"]
    python, seen = tmp_path / "python", []
    python.write_text(f'#!/bin/bash\nexec {PYTHON} {STUB} "${{@:4}}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))

    def named(search, one):
        name = trial_name(search, one)
        seen.append(name) if name not in seen else None
        return f"{name}-{ends[seen.index(name)]}"

    monkeypatch.setattr(measure, "trial_name", named)
    code, told = tune(capfd, path, "--measure", "3")
    assert code == 2 and ": failed: rank 1: MemoryError: of this rank\n" in told.out
    assert [len(line.split()) for line in (folder / "starts").read_text().splitlines()] == [3, 1]
    assert isinstance(read_outcome(folder, f"{seen[0]}-a"), Measured)
    assert "RuntimeError: before any trial\n" in told.err
    assert told.err.splitlines()[-1].startswith("megappo: --measure: the ranks ended with exit code 1, and not in a trial")


def test_a_job_with_too_few_nodes_is_refused_before_anything_is_computed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    code, told = tune(capsys, write_run(tmp_path), "--measure", "1", "--gpus", "8")
    assert code == 2 and told.out == "" and not (tmp_path / "runs here").exists()
    assert "--slurm: 8 ranks are 4 nodes of 2 (--gpus, --gpus-per-node), and this job has 2; salloc --nodes 4" in told.err
