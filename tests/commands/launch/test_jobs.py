"""Job scripts on a real Slurm of two nodes, with a stand-in for the training: worlds, failures, and the end of the log."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megappo.commands.launch.script import Job, render
from tests.commands.launch.cluster import NODES, Cluster
from tests.commands.plan.checkpoints import write_run

ROOT = Path(__file__).parents[3]
NUM_RANKS = 4
LONGEST_S = 400  # of a job that takes seconds, while other tests use all cores
PROGRESS = "rank 1 fails after a checkpoint"
STOP = "all are asked to stop"
SPARE = "a spare rank is killed"
SETUP = ("true", "export SITE='a b'")
REGISTRY, IMAGE = "registry.example#team/megappo:1", "images/megappo.sif"
# Stand-ins for what no test can install: each notes its options, and starts what it was asked to start where it is.
PYXIS = f"""#!/bin/bash
while [ "${{1#-}}" != "$1" ]; do
  case $1 in --container-*) container+=("$1") ;; *) slurms+=("$1") ;; esac
  shift
done
[ -z "${{container[*]}}" ] || printf '%s\\n' "${{container[*]}}" >> "$CALLS"
exec {shutil.which("srun")} "${{slurms[@]}}" "$@"
"""
APPTAINER = """#!/bin/bash
while [ "${1%.sif}" = "$1" ]; do options+=("$1"); shift; done
printf '%s\\n' "${options[*]} $1" >> "$CALLS"
shift
exec "$@"
"""
# A controller that is busy: the first request to kill ranks is lost, and waits for an answer.
SCANCEL = f"""#!/bin/bash
case "$*" in --signal=KILL*) mkdir "$CALLS.kill" 2> /dev/null && exec sleep 300 ;; esac
exec {shutil.which("scancel")} "$@"
"""


@dataclass
class Submitted:
    """A job and where it writes."""

    id: str
    folder: Path
    log: Path

    def ranks(self, attempt: int = 0) -> list[dict]:
        """First line of every stand-in, by rank."""
        logs = [self.folder / f"attempt-{attempt}" / f"rank-{rank}.log" for rank in range(NUM_RANKS)]
        return [json.loads(log.read_text().splitlines()[0]) for log in logs]

    def failed_in_step(self, attempt: int) -> str:
        return (self.folder / f"attempt-{attempt}" / "rank-1.exit").read_text().split()[2]


def submit(cluster: Cluster, folder: Path, stub: str, **job) -> Submitted:
    """A job of 2 nodes x 2 ranks, whose ranks are `stub_rank.py` and whose plan accepts everything."""
    folder.mkdir()
    config = write_run(folder)
    python = folder / "python"
    train = f"exec {sys.executable} {ROOT}/tests/commands/launch/stub_rank.py"
    python.write_text(
        f'#!/bin/bash\ncase "$*" in\n  "-P -m megappo train"*) {train} "${{@:5}}" ;;\n  "-P -m megappo plan"*) ;;\n'
        f'  *) exec {sys.executable} "$@" ;;\nesac\n'
    )
    python.chmod(0o755)
    for name, text in (("srun", PYXIS), ("apptainer", APPTAINER), ("scancel", SCANCEL)):
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    script = render(
        Job(2, 2, gpus=False, **job),
        root=ROOT,
        python=str(python),
        config=config,
        launch_dir=folder / "launch dir",
        log=folder / "job-{job}.log",
        name="stub",
        resume=False,
    )
    (folder / "job.sbatch").write_text(script)
    path = f"{folder / 'bin'}:{cluster.environment['PATH']}"
    environment = cluster.environment | {"STUB": stub, "PYTHONPATH": str(ROOT), "CALLS": str(folder / "calls"), "PATH": path}
    done = subprocess.run(
        ["sbatch", "--parsable", folder / "job.sbatch"], env=environment, capture_output=True, text=True, check=True
    )
    job_id = done.stdout.strip()
    return Submitted(job_id, folder / "launch dir", folder / f"job-{job_id}.log")


def end_of(cluster: Cluster, job: Submitted, timeout_s: float = LONGEST_S) -> list[str]:
    cluster.wait_for("the job's end", lambda: cluster.has_ended(job.id), timeout_s, job.log)
    return job.log.read_text().splitlines()


@pytest.fixture(scope="module")
def jobs(cluster, tmp_path_factory) -> dict[tuple[str, str], Submitted]:
    """All at once, on the same two nodes."""
    folder = tmp_path_factory.mktemp("jobs")
    cases = [(launcher, stub) for launcher in ("srun", "torchrun") for stub in ("rank 1 raises", "rank 2 is killed")]
    cases = [("srun", PROGRESS), ("torchrun", STOP), ("srun", SPARE), ("torchrun", SPARE), *cases]
    how = {
        # As at sites where the environment of the submission stays behind: srun would keep back that of the script as well.
        ("srun", "rank 1 raises"): {"options": ("--export=STUB,PYTHONPATH,CALLS,PATH,SLURM_CONF",), "setup": SETUP},
        ("torchrun", "rank 1 raises"): {"setup": SETUP},
        ("srun", PROGRESS): {"container": REGISTRY, "mounts": ("/data:/data",)},
        ("torchrun", "rank 2 is killed"): {"container": IMAGE, "mounts": ("/data:/data",)},
    }
    return {
        case: submit(cluster, folder / f"{n}", case[1], launcher=case[0], max_requeues=1, **how.get(case, {}))
        for n, case in enumerate(cases)
    }


def test_a_job_that_makes_progress_is_requeued_as_often_as_allowed(cluster, jobs) -> None:
    job = jobs["srun", PROGRESS]
    cluster.wait_for("the requeue", lambda: cluster.release_requeued(job.id), LONGEST_S, job.log)
    log = end_of(cluster, job)
    starts = [json.loads(line) for line in (job.folder / "attempts.jsonl").read_text().splitlines()]
    assert [start["step"] for start in starts] == [0, 1]
    assert ["--resume" in job.ranks(attempt)[3]["arguments"] for attempt in (0, 1)] == [False, True]
    assert "megappo: requeue 1 of 1, goes on after step 1" in log
    assert log[-1] == "megappo: not requeued: --max-requeues 1; `megappo launch ... --resume` goes on after step 2"


def test_ranks_that_are_asked_to_stop_by_sigterm_finish_their_step_under_torchrun_too(cluster, jobs) -> None:
    job = jobs["torchrun", STOP]
    wanted = "megappo: stopped after step 1 with a checkpoint\nmegappo: requeue 1 of 1, goes on after step 1\n"
    cluster.wait_for("the requeue", lambda: job.log.exists() and "requeue" in job.log.read_text(), LONGEST_S, job.log)
    assert wanted in job.log.read_text()
    cluster.command("scancel", job.id)


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_job_goes_on_without_a_spare_rank_that_is_killed(cluster, jobs, launcher) -> None:
    """It starts again as often as the job may. Negative control: without the list of spare ranks the job below fails at once."""
    job = jobs[launcher, SPARE]
    assert any(line.startswith("megappo: finished") for line in end_of(cluster, job))
    assert (job.folder / "attempt-0" / "rank-2.lost").read_text().split()[0] == "137"
    assert len((job.folder / "attempt-0" / "rank-2.log").read_text().splitlines()) == 2
    assert not list((job.folder / "attempt-0").glob("rank-*.exit"))


def test_every_step_of_a_job_runs_in_the_image_of_pyxis(cluster, jobs) -> None:
    """Before the ranks, for the ranks and after them, in both attempts; this job's end is that of the test above."""
    job = jobs["srun", PROGRESS]
    end_of(cluster, job)
    options = f"--container-image={REGISTRY} --container-mounts={ROOT}:{ROOT},/data:/data --container-workdir={ROOT}"
    assert (job.folder.parent / "calls").read_text().splitlines() == [options] * 8
    assert [job.failed_in_step(attempt) for attempt in (0, 1)] == ["2", "2"]


def test_every_python_of_a_job_runs_in_the_image_of_apptainer(cluster, jobs) -> None:
    """begin, plan, torchrun on two nodes, end; the end of the log is looked at below."""
    job = jobs["torchrun", "rank 2 is killed"]
    end_of(cluster, job)
    options = f"exec --bind {ROOT} --bind /data:/data --pwd {ROOT} {ROOT}/{IMAGE}"
    assert (job.folder.parent / "calls").read_text().splitlines() == [options] * 5


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_every_rank_finds_its_place_in_one_world(cluster, jobs, launcher) -> None:
    job = jobs[launcher, "rank 1 raises"]
    end_of(cluster, job)
    ranks = job.ranks()
    assert [r["RANK"] for r in ranks] == ["0", "1", "2", "3"] and [r["LOCAL_RANK"] for r in ranks] == ["0", "1"] * 2
    assert {(r["WORLD_SIZE"], r["LOCAL_WORLD_SIZE"]) for r in ranks} == {("4", "2")}
    assert len({(r["MASTER_ADDR"], r["MASTER_PORT"]) for r in ranks}) == 1
    assert ranks[0]["MASTER_ADDR"] == NODES[0]
    if launcher == "torchrun":
        said = (job.folder / "attempt-0" / "node-1.log").read_text()
        assert "torchrun --nnodes 2 --rdzv-backend c10d" in said and "is_host=false" in said


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_what_a_line_of_setup_exports_is_seen_by_every_rank(cluster, jobs, launcher) -> None:
    """Also where sbatch keeps the environment back."""
    end_of(cluster, jobs[launcher, "rank 1 raises"])
    assert [rank["SITE"] for rank in jobs[launcher, "rank 1 raises"].ranks()] == ["a b"] * NUM_RANKS
    if launcher == "srun":
        assert {rank["SITE"] for rank in jobs["srun", PROGRESS].ranks()} == {None}, "nobody exports it where no line does"


def test_a_line_of_setup_that_fails_ends_the_job_and_is_named(cluster, tmp_path) -> None:
    job = submit(cluster, tmp_path / "run", "rank 1 raises", setup=("true", "no-such-command cuda/12"))
    log = end_of(cluster, job)
    assert log[-1] == 'megappo: --setup: "no-such-command cuda/12" ended with exit code 127; no rank was started'
    assert log[0].startswith("=== job ") and len(log) == 3, log  # between them bash's own line
    assert cluster.job(job.id)["ExitCode"] == "2:0" and not list(job.folder.glob("attempt-0/*"))


def test_jobs_on_the_same_host_have_ports_of_their_own(cluster, jobs) -> None:
    ports = []
    for (launcher, stub), job in jobs.items():
        if launcher == "srun" and stub != PROGRESS:
            end_of(cluster, job)
            ports.append(job.ranks()[0]["MASTER_PORT"])
    assert len(ports) == len(set(ports)) == 3


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_the_first_traceback_ends_the_log_and_the_ranks_that_wait_are_ended(cluster, jobs, launcher) -> None:
    """The other ranks would live for ten minutes, and for one after SIGTERM; Slurm itself ends them after one (`srun --wait`). They
    say how long they live: the end of a job is a matter of messages between daemons, each of which may wait for a busy machine.
    """
    job = jobs[launcher, "rank 1 raises"]
    log = end_of(cluster, job)
    assert log[-3] == "RuntimeError: the culprit"
    assert log[-2] == f"megappo: rank 1 on {NODES[0]} failed first (exit code 1); what it said is above"
    assert log[-1] == "megappo: not requeued: no checkpoint was saved since this attempt started at step 0"
    assert cluster.job(job.id)["JobState"] == "FAILED"
    folder = job.folder / "attempt-0"
    failed_at = int((folder / "rank-1.exit").read_text().split()[1]) / 1e9
    lived = {path.name: path.stat().st_mtime - failed_at for path in folder.glob("rank-*.lives")}
    assert len(lived) == NUM_RANKS - 1 and max(lived.values()) < 30, lived
    assert (job.folder.parent / "calls.kill").exists(), "the first request was not lost"


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_rank_that_is_killed_is_named_and_not_those_that_lost_it(cluster, jobs, launcher) -> None:
    log = end_of(cluster, jobs[launcher, "rank 2 is killed"])
    assert log[-2].startswith(f"megappo: rank 2 on {NODES[1]} failed first (killed by SIGKILL: ")
    assert "a victim" not in "\n".join(log)


def test_a_wrong_configuration_is_refused_before_any_rank_starts(cluster, tmp_path) -> None:
    """By a script that is submitted by hand, with the real `megappo plan` on the first node; sbatch's --nodes counts as given."""
    config = write_run(tmp_path)
    config.write_text(config.read_text().replace("num_ranks: 2", "num_ranks: null").replace("tp: 2", "tp: 4"))
    words = {"root": tmp_path, "python": sys.executable, "config": config, "launch_dir": tmp_path / "launch"}
    script = tmp_path / "two_nodes.sbatch"
    script.write_text(render(Job(2, 2, gpus=False), **words, log=tmp_path / "job-{job}.log", name="two", resume=False))
    command = ["sbatch", "--parsable", "--nodes=1", script]
    environment = cluster.environment | {"PYTHONPATH": str(ROOT)}
    job_id = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=True).stdout.strip()
    log = tmp_path / f"job-{job_id}.log"
    cluster.wait_for("the job's end", lambda: cluster.has_ended(job_id), LONGEST_S, log)
    first, *rest = log.read_text().splitlines()
    assert first.startswith("=== job ") and len(rest) == 1, rest
    assert rest[0].startswith("megappo: policy.parallel: tp 4") and "2 ranks" in rest[0]
    assert cluster.job(job_id)["ExitCode"] == "2:0"
    assert not list(tmp_path.glob("launch/attempt-0/rank-*")) and not (tmp_path / "runs").exists()
