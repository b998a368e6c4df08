"""PPO at the quickstart's size by `megappo launch`: on two nodes of one rank, stopped by Slurm's signal, requeued and resumed, then
killed; on the same nodes at the same time, in a folder that was written and submitted by hand, on two nodes of two ranks of which
the first trains and the second generates.

The oracles are runs of both on two ranks that are forked from a process that has imported everything.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megappo.commands import cli
from tests.commands.launch.cluster import NODES, Cluster
from tests.trainer.small_run import TOLERANCE, check_same_numbers
from tests.trainer.test_placed_run import responses, rows
from tests.trainer.test_resume import metrics
from tests.worlds import spawn_world

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
START_S, STEP_S = 240, 60  # generous: the machine may be busy with other tests
STOPPED_AFTER, WHOLE, NEVER = 2, 5, 100  # steps
APART_STEPS = 8  # of half a second: the ranks are looked at after the first one
TRAINING, GENERATING = (0, 1), (2, 3)
BOTH = {
    "critic.warmup": "null",
    "rollout.engine": "vllm",
    "rollout.tp": 2,
    "rollout.kv_cache_gib": 0.03,
    "telemetry.trajectories_every": 1,
    "telemetry.trajectories_per_step": 16,
}
APART = {"policy.ranks": "0-1", "critic.ranks": "0-1", "reference.ranks": "0-1", "rollout.ranks": "2-3"}
SECRET = "hf_do_not_write_this_anywhere"


@dataclass
class Launched:
    """folder: of the job's script, log and evidence."""

    job: str
    run: Path
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / f"job-{self.job}.log"

    def steps(self) -> list[int]:
        path = self.run / "metrics.jsonl"
        return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def write_quickstart(folder: Path) -> None:
    """Model, tokenizer and sums as scripts/quickstart.sh makes them, without the supervised warm-up."""
    from transformers import LlamaForCausalLM

    from scripts.quickstart_model import TASK, llama_config, train_tokenizer, write_arithmetic

    LlamaForCausalLM(llama_config()).save_pretrained(folder / "model")
    train_tokenizer(folder / "model")
    write_arithmetic(folder / "data", 200, 20, 10, 0, TASK, 0.0)


def overrides_of(folder: Path, name: str, steps: int, **changes: object) -> list[str]:
    """Of the quickstart's configuration, for a run of `write_quickstart`'s files. changes: dotted keys."""
    overrides = {
        "run.name": name,
        "run.output_dir": folder / "runs",
        "run.num_ranks": "null",
        "policy.model": folder / "model",
        "data.train": folder / "data" / "train.jsonl",
        "data.eval": "null",
        "data.tokenizer": folder / "model" / "tokenizer.model",
        "data.prompts_per_step": 16,
        "algorithm.mini_batch_size": 32,
        "policy.optimizer.warmup_steps": 1,
        "policy.optimizer.lr_schedule": "constant",  # runs of different lengths are compared step by step
        "critic.optimizer.warmup_steps": 1,
        "critic.warmup.steps": 1,
        "trainer.steps": steps,
        "trainer.eval_every": "null",
        "rollout.engine": "megatron",
        "checkpoint.export_at_end": "false",
        "checkpoint.save_every": 0,  # what the rank that is killed did is lost
        **changes,
    }
    return [f"{key}={value}" for key, value in overrides.items()]


def launch(folder: Path, name: str, steps: int, *options: str, **changes: object) -> Launched:
    """Submit a run. changes: as of `overrides_of`."""
    arguments = ["launch", str(QUICKSTART), "--nodes", "2", "--gpus-per-node", "1", *options]
    assert cli.main([*arguments, *overrides_of(folder, name, steps, **changes)]) == 0
    run = folder / "runs" / name
    record = run / "launch" / "001"
    return Launched((record / "job_id").read_text().strip(), run, record)


def submit_by_hand(cluster: Cluster, folder: Path, name: str, steps: int, *options: str, **changes: object) -> Launched:
    """As a user who reads the README of the folder that was written, from another directory."""
    record = folder / "runs" / "by hand"
    arguments = ["launch", str(QUICKSTART), "--nodes", "2", "--write-to", str(record), *options]
    assert cli.main([*arguments, *overrides_of(folder, name, steps, **changes)]) == 0
    command = shlex.split((record / "README").read_text().splitlines()[0])
    job = subprocess.run(command, env=cluster.environment, cwd="/", capture_output=True, text=True, check=True).stdout.split()[-1]
    return Launched(job, folder / "runs" / name, record)


def process_of(rank: int, launched: Launched) -> psutil.Process:
    """The rank itself, not the shell above it."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "megappo" in command and "train" in command and "-c" not in command and "torch" not in " ".join(command):
            environment = process.environ()
            own = environment.get("RANK", environment.get("SLURM_PROCID"))  # torchrun's; srun sets the other one alone
            if environment.get("MEGAPPO_ATTEMPT_DIR", "").startswith(str(launched.folder)) and own == str(rank):
                return process
    raise AssertionError(f"no process of rank {rank}")


def are_running(cluster: Cluster, *launched: Launched) -> bool:
    return all(cluster.job(each.job)["JobState"] == "RUNNING" for each in launched)


@dataclass(frozen=True)
class Seen:
    """A rank between two steps."""

    node: str
    has_vllm: bool


def see(rank: int, launched: Launched) -> Seen:
    process = process_of(rank, launched)
    # The library that vLLM computes with: a module of Python that is imported alone costs nothing.
    mapped = Path(f"/proc/{process.pid}/maps").read_text()
    return Seen(process.environ()["SLURMD_NODENAME"], "/vllm/_C" in mapped)


@dataclass
class Story:
    """Events of the two runs. seen: ranks of the one that is apart, in order. In the folder are the runs `whole` and `colocated`
    too."""

    folder: Path
    broken: Launched
    apart: Launched
    seen: list[Seen]


def run_oracles(rank: int, folder: Path) -> None:
    from tests.trainer.recipe_runs import run

    run(QUICKSTART, overrides_of(folder, "whole", WHOLE), resume=False)
    run(QUICKSTART, overrides_of(folder, "colocated", APART_STEPS, **BOTH), resume=False)


@pytest.fixture(scope="module")
def story(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("ppo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        patch.setenv("HF_TOKEN", SECRET)
        patch.chdir(ROOT)
        write_quickstart(folder)
        broken = launch(folder, "broken", NEVER, "--launcher", "torchrun", "--time", "1:00:00", "--max-requeues", "2")
        two_each = ("--gpus-per-node", "2", "--partition", "main")
        apart = submit_by_hand(cluster, folder, "apart", APART_STEPS, *two_each, **BOTH, **APART)
    cluster.wait_for("both jobs", lambda: are_running(cluster, broken, apart), STEP_S, apart.log)
    cluster.wait_for("two steps", lambda: STOPPED_AFTER in broken.steps(), START_S, broken.log)
    cluster.command("scancel", "--signal=USR1", broken.job)
    cluster.wait_for("a step", lambda: 1 in apart.steps() or cluster.has_ended(apart.job), START_S, apart.log)
    assert apart.steps(), apart.log.read_text()
    seen = [see(rank, apart) for rank in (*TRAINING, *GENERATING)]
    cluster.wait_for("the requeue", lambda: cluster.release_requeued(broken.job), STEP_S, broken.log)
    stopped = broken.steps()[-1]
    cluster.wait_for("steps after the resume", lambda: broken.steps()[-1] > max(stopped, WHOLE), START_S, broken.log)
    process_of(1, broken).kill()
    # At once, not when the ranks that wait for it give up (run.timeouts.pass_s, 120 s).
    cluster.wait_for("the end", lambda: cluster.has_ended(broken.job), STEP_S, broken.log)
    spawn_world(run_oracles, 2, folder, timeout_s=START_S)
    cluster.wait_for("the run apart", lambda: cluster.has_ended(apart.job), START_S, apart.log)
    return Story(folder, broken, apart, seen)


def test_two_jobs_on_the_same_nodes_do_not_disturb_each_other(story: Story) -> None:
    """Both ran when the first of them was signalled."""
    said = story.apart.log.read_text()
    assert said.splitlines()[-1] == f"megappo: finished; results in {story.apart.run}", said
    assert story.apart.steps() == list(range(1, APART_STEPS + 1))


def test_the_signal_saves_at_a_step_boundary_and_the_requeued_job_resumes_there(story: Story) -> None:
    first, second = (json.loads(line) for line in (story.broken.folder / "attempts.jsonl").read_text().splitlines())
    assert first["step"] == 0 and second["step"] >= STOPPED_AFTER
    log = story.broken.log.read_text()
    assert f"megappo: stopped after step {second['step']} with a checkpoint\nmegappo: requeue 1 of 2" in log
    assert f"resumed after step {second['step']}" in (story.broken.folder / "attempt-1" / "rank-0.log").read_text()


def test_the_curve_of_the_interrupted_run_is_that_of_the_whole_one(story: Story) -> None:
    """To the last bit, although torchrun started one on two nodes."""
    whole, broken = metrics(story.folder, "whole"), metrics(story.folder, "broken")
    assert [row["step"] for row in whole] == list(range(1, WHOLE + 1))
    assert broken[:WHOLE] == whole


def test_a_killed_rank_ends_the_job_at_once_and_is_named(story: Story) -> None:
    log = story.broken.log.read_text().splitlines()
    assert log[-2].startswith("megappo: rank 1 on ") and "failed first (killed by SIGKILL: " in log[-2]
    assert log[-1].startswith("megappo: not requeued: no checkpoint was saved since this attempt started at step ")


def test_a_launch_is_recorded_without_secrets(story: Story) -> None:
    record = json.loads((story.broken.folder / "launch.json").read_text())
    assert record["environment"]["HF_TOKEN"] == "(hidden)" and record["packages"]["torch"] and record["command"]
    attempt = json.loads((story.broken.folder / "attempt-1" / "environment.json").read_text())
    assert attempt["environment"]["SLURM_RESTART_COUNT"] == "1"
    files = [path for path in (story.folder / "runs").rglob("*") if path.is_file()]
    assert len(files) > 30 and not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_the_second_node_generates_and_the_first_one_is_free_of_vllm(story: Story) -> None:
    assert [story.seen[rank] for rank in TRAINING] == [Seen(NODES[0], has_vllm=False)] * 2
    assert [story.seen[rank] for rank in GENERATING] == [Seen(NODES[1], has_vllm=True)] * 2


def test_weights_that_cross_nodes_change_no_number(story: Story) -> None:
    """Nor a token, in any step."""
    ours, theirs = rows(story.folder, "apart"), rows(story.folder, "colocated")
    assert len(ours) == len(theirs) == APART_STEPS
    check_same_numbers(ours, theirs)
    # A mean of signed numbers: of some machine's samples it is small in one step or another.
    assert max(abs(row["kl/per_token"]) for row in theirs) > 10 * TOLERANCE, "weights that stayed behind would be seen"
    assert len(responses(story.folder, "apart")) == APART_STEPS * 16
    assert responses(story.folder, "apart") == responses(story.folder, "colocated")
