"""The job script: what it asks of Slurm, whether a shell reads it as it was meant."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from megappo.commands.launch.script import Job, render

HOSTILE = "a b; touch $(touch gone) 'x' \"y\" %j"


def script(folder: Path, job: Job, *, resume: bool = False) -> str:
    return render(
        job,
        root=folder,
        python=f"{folder}/python",
        config=folder / "config.yaml",
        launch_dir=folder / "launch",
        log=folder / "job-{job}.log",
        name="run",
        resume=resume,
    )


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def run_script(folder: Path, job: Job, **environment: str) -> tuple[list[list[str]], subprocess.CompletedProcess[str]]:
    """Run a script by bash, with a srun that starts its command once and a python that writes down how it was called."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    write_program(programs / "srun", 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"')
    write_program(programs / "apptainer", 'while [ "${1%.sif}" = "$1" ]; do shift; done; shift; CONTAINED=1 exec "$@"')
    # The watcher's: it outlives the script, and holds what is captured of it open.
    write_program(programs / "sleep", "exec /bin/sleep 0.02")
    write_program(programs / "scontrol", 'printf "%s\\0" scontrol "$@" END >> "$CALLS"')
    seen = f'echo "${{PYTHONNOUSERSITE:-unset}}" >> {shlex.quote(str(folder / "user_site"))}'
    code = 'case "$*" in *"attempt end"*) echo "${DECISION:-0}" ;; *begin*) echo "$RESUME" ;; esac'
    write_program(folder / "python", f'printf "%s\\0" python "${{CONTAINED:-}}" "$@" END >> "$CALLS"\n{seen}\n{code}')
    (programs / "python3").symlink_to(folder / "python")
    text = render(
        job,
        root=folder,
        python=str(folder / "python") if job.container is None else "python3",
        config=folder / "config.yaml",
        launch_dir=folder / "launch",
        log=folder / "job-{job}.log",
        name="run",
        resume=False,
    )
    calls = folder / "calls"
    slurm = {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "8", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_PROCID": "0", "RESUME": ""}
    slurm["SLURM_JOB_NUM_NODES"] = str(job.nodes)
    env = slurm | {"PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(calls)} | environment
    done = subprocess.run(["bash", "-c", text], env=env, cwd="/", capture_output=True, text=True)
    words = calls.read_text().split("\0")[:-1]
    found: list[list[str]] = [[]]
    for word in words:
        if word == "END":
            found.append([])
        else:
            found[-1].append(word)
    return found[:-1], done


JOBS = {
    "srun": Job(8, 8, gpus=True),
    "torchrun": Job(8, 8, gpus=True, launcher="torchrun"),
    "cpu": Job(2, 2, gpus=False),
    "setup": Job(2, 2, gpus=True, setup=("module load 'cuda 12'", "export A=\"$HOME\" B='b c'  # ours")),
    "cores": Job(2, 4, gpus=True, launcher="torchrun", cpus_per_rank=6),
    "pyxis": Job(2, 4, gpus=True, container="nvcr.io#nvidia/pytorch:26.01-py3", mounts=("/data:/data", '/$(touch gone)"x:/x')),
    "apptainer": Job(2, 4, gpus=True, launcher="torchrun", container="images/megappo.sif", mounts=("/data:/data",)),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_shell_can_read_every_script(tmp_path: Path, name: str) -> None:
    text = script(tmp_path, JOBS[name])
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", "-"], input=text, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout


def test_what_is_asked_of_slurm() -> None:
    folder = Path("/runs")
    asked = options(script(folder, Job(8, 4, gpus=True, signal_lead_s=300, options=("--partition=h100", "--exclusive"))))
    assert asked == [
        "--job-name=run",
        "--output=/runs/job-%j.log",
        "--partition=h100",
        "--exclusive",
        "--nodes=8",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--signal=USR1@300",
        "--requeue",
        "--open-mode=append",
    ]
    assert "--ntasks-per-node=1" in options(script(folder, JOBS["torchrun"]))
    assert "--cpus-per-task=24" in options(script(folder, JOBS["cores"]))
    assert not [option for option in options(script(folder, JOBS["cpu"])) if "gpu" in option]
    once = options(script(folder, Job(1, 1, gpus=False, max_requeues=0)))
    assert "--no-requeue" in once and "--requeue" not in once


def test_a_percent_sign_in_a_path_is_not_slurms(tmp_path: Path) -> None:
    assert f"--output={tmp_path}/50%%/job-%j.log" in options(script(tmp_path / "50%", JOBS["cpu"]))
    assert '"${MEGAPPO_ATTEMPT_DIR//%/%%}/node-%n.log"' in script(tmp_path, JOBS["torchrun"])


def test_values_of_options_are_quoted_as_sbatch_reads_them() -> None:
    asked = options(script(Path('/a "b" c'), Job(1, 1, gpus=False, options=("--comment=a # b", "--nodelist=n[1-3,7]"))))
    assert asked[1:4] == ['--output="/a \\"b\\" c/job-%j.log"', '--comment="a # b"', "--nodelist=n[1-3,7]"]


@pytest.mark.parametrize("resume", ["", "--resume"])
def test_preflight_ranks_and_end_get_the_configuration_as_it_is_named(tmp_path: Path, resume: str) -> None:
    """In a folder whose name a careless script would run as commands."""
    folder = tmp_path / HOSTILE
    calls, done = run_script(folder, JOBS["cpu"], RESUME=resume)
    assert done.returncode == 0, done.stderr
    config, launch_dir, more = str(folder / "config.yaml"), str(folder / "launch"), [resume] if resume else []
    assert [call[2:] for call in calls] == [
        ["-P", "-m", "megappo.commands.launch.attempt", "begin", launch_dir, config],
        ["-P", "-m", "megappo", "plan", *more, "--world-size", "4", config],
        ["-P", "-m", "megappo", "train", *more, config],
        ["-P", "-m", "megappo.commands.launch.attempt", "end", launch_dir, "--status", "0", "--max-requeues", "10", config],
    ]
    assert not list(tmp_path.rglob("gone")) and not Path("/gone").exists()
    assert (folder / "user_site").read_text().split() == ["unset"] * 4


def test_a_script_that_is_submitted_once_more_does_not_end_for_the_failure_of_the_first_job(tmp_path: Path) -> None:
    attempt = tmp_path / "run" / "launch" / "attempt-0"
    attempt.mkdir(parents=True)
    for name in ("rank-0.exit", "rank-1.traceback", "rank-0.log"):
        (attempt / name).write_text("1 2 0 n1\n")
    _, done = run_script(tmp_path / "run", JOBS["cpu"])
    assert done.returncode == 0 and {path.name for path in attempt.iterdir()} == {"rank-0.log", "plan.txt"}


@pytest.mark.parametrize(
    "decision, requeued, code", [("0", False, 0), ("75", True, 0), ("17", False, 17), ("69", False, 69), ("2", False, 2)]
)
def test_the_job_is_requeued_where_the_end_says_so(tmp_path: Path, decision: str, requeued: bool, code: int) -> None:
    calls, done = run_script(tmp_path / "run", JOBS["cpu"], DECISION=decision)
    assert done.returncode == code
    assert (calls[-1] == ["scontrol", "requeue", "7"]) == requeued


def container_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("image", "inside"))]


def test_without_a_container_nothing_stands_before_a_command(tmp_path: Path) -> None:
    text = script(tmp_path, JOBS["srun"])
    assert [line.split("#")[0].strip() for line in container_lines(text)] == ["image=()", "inside=()"]


def test_apptainer_contains_every_python(tmp_path: Path) -> None:
    """The stand-in for apptainer leaves a mark in the environment of what it starts. The host's ~/.local stays out."""
    calls, done = run_script(tmp_path / "run", JOBS["apptainer"])
    assert (tmp_path / "run" / "user_site").read_text().split() == ["1"] * 4
    assert done.returncode == 0 and {(call[0], call[1]) for call in calls} == {("python", "1")}
    assert [call[4] for call in calls] == [
        "megappo.commands.launch.attempt",
        "megappo",
        "megappo.commands.launch.node",
        "megappo.commands.launch.attempt",
    ]
    assert container_lines(script(tmp_path, JOBS["apptainer"]))[2:] == [
        f'inside=(apptainer exec --nv --bind "$PWD" --bind /data:/data --pwd "$PWD" {tmp_path}/images/megappo.sif)'
    ]


def test_pyxis_options_are_those_of_every_srun(tmp_path: Path) -> None:
    text = script(tmp_path, JOBS["pyxis"])
    lines = [line for line in text.splitlines() if "srun " in line and not line.startswith(("#", "image"))]
    assert len(lines) == 2 and all('"${image[@]}"' in line for line in lines)
    assert container_lines(text)[2:] == [
        "image=(--container-image='nvcr.io#nvidia/pytorch:26.01-py3')",
        'image+=(--container-mounts="$PWD:$PWD,/data:/data,/\\$(touch gone)\\"x:/x")',
        'image+=(--container-workdir="$PWD")',
    ]


def test_pyxis_gets_the_path_of_a_file_from_the_root_since_other_names_are_those_of_a_registry(tmp_path: Path) -> None:
    job = Job(1, 1, gpus=True, container="images/x.sqsh")
    assert f"image=(--container-image={tmp_path}/images/x.sqsh)" in script(tmp_path, job)


def test_lines_of_setup_run_in_order_before_every_command_and_reach_it(tmp_path: Path) -> None:
    lines = (
        "export SITE='a b'; true",
        'export NCCL_DEBUG="$SITE!"  # ours, not the default',
        "cd . && export PYTHONNOUSERSITE=$NCCL_DEBUG",
    )
    calls, done = run_script(tmp_path / "run", Job(1, 1, gpus=True, setup=lines))
    assert done.returncode == 0 and len(calls) == 4
    assert (tmp_path / "run" / "user_site").read_text().splitlines() == ["a b!"] * 4


@pytest.mark.parametrize("line, code", [("no-such-command --x", 127), ("( exit 3 )", 3), ("false", 1), ("if", 2)])
def test_a_line_of_setup_that_fails_ends_the_job_with_one_line_before_anything_starts(tmp_path: Path, line: str, code: int) -> None:
    folder = tmp_path / "run"
    (folder / "launch").mkdir(parents=True)
    (folder / "calls").touch()
    calls, done = run_script(folder, Job(1, 1, gpus=False, setup=("true", line, "touch later")))
    assert calls == [] and done.returncode == 2 and not (folder / "later").exists()
    assert done.stderr.splitlines()[-1] == f'megappo: --setup: "{line}" ended with exit code {code}; no rank was started'
