"""`megappo launch` up to the submission: mistakes cost one line, exit code 2, nothing written and nothing submitted."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from pathlib import Path

import pytest

from megappo.commands import cli
from megappo.commands.launch.environment import HIDDEN, revision, shown_variables
from megappo.commands.launch.script import Job
from megappo.commands.launch.slurm import parse_time, without_job_variables
from megappo.commands.launch.submit import Limits, _tensor_parallel, record, remarks, remove_launch
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from tests.commands.launch.cluster import Cluster
from tests.commands.plan.checkpoints import write_run
from tests.config.examples import sft_config

TWO_BY_TWO = ["--nodes", "2", "--gpus-per-node", "2", "run.num_ranks=4"]


@pytest.fixture(autouse=True)
def outside_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)


HELD = ["--sbatch=--hold", "--sbatch=--mincpus 3", "--sbatch=--comment=a # b"]


def launch(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["launch", *(str(argument) for argument in arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def files_of(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


MISTAKES = {
    "no nodes": (["--gpus-per-node", "2"], "--nodes is missing"),
    "no ranks": (["--nodes", "2"], "--gpus-per-node is missing"),
    "zero nodes": (["--nodes", "0", "--gpus-per-node", "2"], "argument --nodes: 0 is not an integer >= 1"),
    "negative": (["--nodes", "2", "--gpus-per-node=-8"], "argument --gpus-per-node: -8 is not an integer >= 1"),
    "another world": (
        ["--nodes", "2", "--gpus-per-node", "4"],
        "run.num_ranks = 2: 2 nodes x 4 are 8 ranks; set run.num_ranks=8 or null",
    ),
    "layout": ([*TWO_BY_TWO, "critic.parallel.pp=3"], "critic.parallel: tp 1 x pp 3 = 3 does not divide the 4 ranks"),
    "tp over two nodes": (
        ["--nodes", "4", "--gpus-per-node", "3", "run.num_ranks=12", "policy.parallel.tp=2"],
        "policy.parallel.tp = 2: does not divide the 3 GPUs of a node",
    ),
    "ranks of a third node": (
        [*TWO_BY_TWO, "critic.ranks=0-1", "rollout.ranks=2-5"],
        'rollout.ranks = "2-5": 2-5 is outside the world, which has ranks 0-3; name ranks below 4, or start more',
    ),
    "a node without work": (
        [*TWO_BY_TWO, "policy.ranks=0-1", "critic.ranks=0-1", "reference.ranks=0-1", "rollout.ranks=0-1"],
        'rollout.ranks = "0-1": ranks 2-3 of the world would have no role',
    ),
    "ranks of two nodes": (
        [*TWO_BY_TWO, "policy.ranks=1-2", "policy.parallel.tp=2"],
        'policy.ranks = "1-2": ranks 1-2 would be a group of policy.parallel.tp = 2 across nodes of 2 ranks; let each range begin',
    ),
    "a replica on two nodes": ([*TWO_BY_TWO, "rollout.ranks=0,2", "rollout.tp=2"], 'rollout.ranks = "0,2": ranks 0,2 would be'),
    "time": ([*TWO_BY_TWO, "--time", "4"], "--time 4: too short for one checkpoint: Slurm asks for it up to 240 s before the end"),
    "no time": ([*TWO_BY_TWO, "--time", "tomorrow"], "--time tomorrow: not a time"),
    "lead": ([*TWO_BY_TWO, "--time", "1:00:00", "--signal-lead", "3600"], "--signal-lead 3600"),
    "weights only": (
        [*TWO_BY_TWO, "checkpoint.save_only_model=true"],
        "checkpoint.save_only_model = true: a requeued job could not resume",
    ),
    "unknown key": ([*TWO_BY_TWO, "policy.parallel.tpp=2"], "unknown key; did you mean policy.parallel.tp?"),
    "resume": ([*TWO_BY_TWO, "--resume"], "holds no run to resume"),
    "local nodes": (["--local", "--nodes", "2"], "--nodes 2 does not go with --local"),
    "local lead": (["--local", "--signal-lead", "60"], "--signal-lead 60 does not go with --local"),
    "local image": (["--local", "--container", "x.sif"], "--container x.sif does not go with --local"),
    "mount alone": ([*TWO_BY_TWO, "--mount", "/data:/data"], "--mount /data:/data has no effect without --container"),
    "mount": ([*TWO_BY_TWO, "--container", "x.sif", "--mount", "/data"], "--mount /data: must be HOST:CONTAINER"),
    "setup that bash cannot read": (
        [*TWO_BY_TWO, "--setup", "export A='b"],
        "--setup = \"export A='b\": bash cannot read it: unexpected EOF while looking for matching `''",
    ),
    "no setup": ([*TWO_BY_TWO, "--setup", " "], '--setup = " ": must be one line of shell'),
    "setup of two lines": ([*TWO_BY_TWO, "--setup", "true\nfalse"], "must be one line of shell"),
    "setup with a secret": ([*TWO_BY_TWO, "--setup", "export HF_TOKEN=hf_1"], "holds a secret"),
    "local setup": (["--local", "--setup", "true"], "--setup ['true'] does not go with --local"),
    "local shapes": (["--local", "--shapes-only"], "--shapes-only does not go with --local"),
    "local folder": (["--local", "--write-to", "x"], "--write-to x does not go with --local"),
    "an option of ours": ([*TWO_BY_TWO, "--sbatch=--time=1:00:00"], '--sbatch = "--time=1:00:00": use --time of megappo launch'),
    "ours in two words": ([*TWO_BY_TWO, "--sbatch=--time 60"], '--sbatch = "--time 60": use --time of megappo launch'),
    "an array": ([*TWO_BY_TWO, "--sbatch=--array=0-3"], '--sbatch = "--array=0-3": the script has its own'),
    "a path that is a command": (
        [*TWO_BY_TWO, r'run.output_dir="x\ntouch PWNED\n#"'],
        r'run.output_dir = "x\ntouch PWNED\n#": holds the character \n; a path is one printable line',
    ),
    "an image that is a command": ([*TWO_BY_TWO, "--container", "x\ntouch gone\n#.sif"], "--container = "),
    "a mount that is a command": ([*TWO_BY_TWO, "--container", "x.sif", "--mount", "/a:/b\rtouch gone"], "--mount = "),
    "open quotes": ([*TWO_BY_TWO, "--sbatch=--comment 'a"], "must be one option in one line"),
    "a secret": ([*TWO_BY_TWO, "--sbatch=--export=HF_TOKEN=hf_1"], "holds a secret"),
    "two lines": ([*TWO_BY_TWO, "--account", "me\ntouch gone"], "must be one option in one line"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_refused_in_one_line(tmp_path: Path, capsys, monkeypatch, case: str) -> None:
    monkeypatch.setattr("megappo.commands.launch.slurm.has_slurm", lambda: True)
    monkeypatch.setattr("megappo.commands.launch.slurm.partitions", dict)
    monkeypatch.setattr("megappo.commands.launch.slurm.submit", lambda script: pytest.fail("it was submitted"))
    arguments, message = MISTAKES[case]
    config = write_run(tmp_path)
    before = files_of(tmp_path)
    for dry_run in ([], ["--dry-run"]):
        code, out, err = launch(capsys, config, *dry_run, *arguments)
        assert (code, out) == (2, "") and err.startswith("megappo: ") and err.count("\n") == 1, err
        assert message in err
        assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    "size, overrides",
    [
        ((2, 2), ["policy.ranks=0-1", "critic.ranks=0-1", "reference.ranks=0-1", "rollout.ranks=2-3", "rollout.tp=2"]),
        ((3, 2), ["policy.ranks=0-3", "rollout.ranks=2-5", "rollout.tp=4"]),  # two whole nodes
        ((2, 4), ["critic.ranks=1-2", "critic.parallel.tp=2", "critic.parallel.pp=1"]),  # no multiples of 2, but on one node
    ],
    ids=["apart", "whole nodes", "inside"],
)
def test_groups_on_one_node_or_on_whole_nodes_are_taken(
    tmp_path: Path, capsys, size: tuple[int, int], overrides: list[str]
) -> None:
    nodes, per_node = size
    ranks = f"run.num_ranks={nodes * per_node}"
    config = write_run(tmp_path)
    code, out, err = launch(capsys, config, "--nodes", nodes, "--gpus-per-node", per_node, "--dry-run", ranks, *overrides)
    assert (code, err) == (0, "") and out.startswith("#!/bin/bash\n")


def test_vllm_beside_fine_tuning_may_not_be_cut_by_nodes_either(tmp_path: Path) -> None:
    config = sft_config(tmp_path, ["rollout.tp=2", "rollout.ranks=1-2"])
    assert _tensor_parallel(config) == {"policy.parallel.tp": (1, "all"), "rollout.tp": (2, "1-2")}
    assert "rollout.tp" not in _tensor_parallel(sft_config(tmp_path))


def test_without_slurm_it_says_what_else_can_be_done(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    config = write_run(tmp_path)
    code, out, err = launch(capsys, config, *TWO_BY_TWO)
    assert (code, out) == (2, "") and "no Slurm on this machine" in err and "--local" in err and "--dry-run" in err
    code, out, err = launch(capsys, config, *TWO_BY_TWO, "--dry-run")
    assert (code, err) == (0, "") and out.startswith("#!/bin/bash\n") and not (tmp_path / "runs").exists()


def test_a_job_that_is_written_has_all_that_a_launch_writes_and_the_command_that_submits_it(tmp_path: Path, capsys) -> None:
    config, folder = write_run(tmp_path), tmp_path / "by hand"
    code, out, err = launch(capsys, config, *TWO_BY_TWO, "--write-to", folder, "--setup", "true", "run.seed=3")
    assert (code, err) == (0, "") and not (tmp_path / "runs").exists()
    assert {path.name for path in folder.iterdir()} == {"job.sbatch", "config.yaml", "launch.json", "README"}
    command = f"sbatch '{folder}/job.sbatch'"
    assert out.splitlines()[0] == f"written, not submitted: {command}" and (folder / "README").read_text().startswith(
        command + "\n"
    )
    assert "seed: 3" in (folder / "config.yaml").read_text() and "\n  true\n" in (folder / "job.sbatch").read_text()
    for options, message in ((["--write-to", folder], "name a new folder"), (["--dry-run", "--write-to", "x"], "give one of them")):
        code, out, err = launch(capsys, config, *TWO_BY_TWO, *options)
        assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys) -> None:
    code, out, err = launch(capsys, write_run(tmp_path), *TWO_BY_TWO, "--write-to", "/proc/x")
    assert (code, out) == (2, "") and err.startswith("megappo: --write-to /proc/x: ") and err.count("\n") == 1


def test_a_job_is_written_where_weights_and_data_are_elsewhere(tmp_path: Path, capsys) -> None:
    config, folder = write_run(tmp_path), tmp_path / "job"
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "model" / "model.safetensors").unlink()
    assert launch(capsys, config, *TWO_BY_TWO, "--write-to", folder)[0] == 2 and not folder.exists(), "negative control"
    code, _, err = launch(capsys, config, *TWO_BY_TWO, "--write-to", folder, "--shapes-only")
    assert (code, err) == (0, "") and (folder / "job.sbatch").exists()
    code, _, err = launch(capsys, config, *TWO_BY_TWO, "--dry-run", "--shapes-only", "critic.parallel.pp=3")
    assert code == 2 and "critic.parallel: tp 1 x pp 3 = 3 does not divide the 4 ranks" in err


ON_CLUSTER = {
    "partition": (["--partition", "h100"], "--partition h100: unknown to sinfo; there are main"),
    "nodes": (["--partition", "main", "--nodes", "4", "run.num_ranks=8"], "--nodes 4: partition main has 2 nodes"),
    "one of two partitions": (["--partition", "main,h100"], "--partition h100: unknown to sinfo; there are main"),
    "nodes of the default": (["--nodes", "4", "run.num_ranks=8"], "--nodes 4: partition main has 2 nodes"),
    "limit": (["--partition", "main", "--time", "3-0"], "--time 3-0: jobs in partition main end after 1440 minutes"),
    "limit of the default": (["--time", "3-0"], "--time 3-0: jobs in partition main end after 1440 minutes"),
    "image": (["--container", "images/none.sif"], "--container images/none.sif: no such file"),
    "account": (["--sbatch=--qos-of-nobody"], "Slurm refuses: sbatch: unrecognized option '--qos-of-nobody'"),
}


@pytest.mark.parametrize("case", ON_CLUSTER)
def test_what_the_cluster_cannot_run_is_refused(tmp_path: Path, capsys, on_cluster: Cluster, case: str) -> None:
    arguments, message = ON_CLUSTER[case]
    config = write_run(tmp_path)
    before, jobs = files_of(tmp_path), on_cluster.command("squeue", "--noheader")
    code, _, err = launch(capsys, config, *TWO_BY_TWO, *arguments)
    assert code == 2 and message in err and err.count("\n") == 1, err
    assert files_of(tmp_path).keys() == before.keys() and on_cluster.command("squeue", "--noheader") == jobs


def test_a_launch_is_recorded_and_its_run_cannot_be_launched_twice(
    tmp_path: Path, capsys, monkeypatch, on_cluster: Cluster
) -> None:
    """The job is held back, so that it starts nothing. What a site exports for sbatch would beat the lines of the script."""
    config = write_run(tmp_path)
    monkeypatch.setenv("SBATCH_PARTITION", "nonsense")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "5")
    arguments = ("--partition", "main", "--time", "1:00:00", *HELD, "checkpoint.save_every=0")
    code, out, err = launch(capsys, config, *TWO_BY_TWO, *arguments)
    assert (code, err) == (0, "")
    folder = tmp_path / "runs" / "run" / "launch" / "001"
    job = (folder / "job_id").read_text().strip()
    script = (folder / "job.sbatch").read_text()
    assert "note: checkpoint.save_every = 0: a crash loses everything" in out and "note: no --time" not in out
    assert script in out and f"job {job}: 2 nodes x 2 ranks, srun" in out and str(folder / f"job-{job}.log") in out
    record = json.loads((folder / "launch.json").read_text())
    assert record["revision"]["commit"] and record["command"]
    assert on_cluster.command("squeue", "--noheader", "--format=%c|%k", "--jobs", job) == "3|a # b\n"
    asked = on_cluster.job(job)
    assert (asked["JobState"], asked["Partition"], asked["TimeLimit"]) == ("PENDING", "main", "01:00:00")
    monkeypatch.delenv("SBATCH_PARTITION")
    code, _, err = launch(capsys, config, *TWO_BY_TWO)
    assert code == 2 and f"job {job} has this run already; scancel it" in err
    on_cluster.command("scancel", job)
    on_cluster.wait_for("the cancelled job", lambda: not on_cluster.command("squeue", "--noheader", "--jobs", job), 30)
    assert launch(capsys, config, *TWO_BY_TWO, "--sbatch=--hold")[0] == 0
    again = (folder.parent / "002" / "job_id").read_text().strip()
    on_cluster.command("scancel", again)


@pytest.mark.parametrize(
    "job, time, expected",
    [
        (Job(2, 8, gpus=True), "24:00", ["--time 24:00: Slurm reads minutes:seconds; hours are 24:00:00", "one core per rank"]),
        (Job(2, 8, gpus=True, launcher="torchrun"), "24:00:00", ["one core for all ranks of a node"]),
        (Job(2, 8, gpus=True, options=("--exclusive",)), "1-0", []),
        (Job(2, 8, gpus=True, cpus_per_rank=4), None, ["no --time"]),
        (Job(2, 8, gpus=False), "60", []),
    ],
)
def test_what_is_perhaps_not_meant_is_remarked(tmp_path: Path, job: Job, time: str | None, expected: list[str]) -> None:
    notes = remarks(load_config(write_run(tmp_path), []), job, Limits(time=time))
    assert len(notes) == len(expected) and all(part in note for part, note in zip(expected, notes)), notes


def test_a_launch_from_within_a_job_does_not_hand_on_what_describes_that_job() -> None:
    cluster = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_JWT": "x", "PATH": "/bin", "SBATCH_ACCOUNT": "me"}
    of_the_step = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "1", "SLURM_CPU_BIND": "mask", "SRUN_DEBUG": "3"}
    assert without_job_variables(cluster | of_the_step) == cluster
    wanted = cluster | {"SLURM_CLUSTERS": "west"}
    assert without_job_variables(wanted) == wanted


def test_an_image_sees_the_run_directory_wherever_it_is(tmp_path: Path, capsys, monkeypatch) -> None:
    config = write_run(tmp_path)
    (tmp_path / "x.sif").touch()
    arguments = [config, *TWO_BY_TWO, "--container", "x.sif", "--mount", "/data:/data", "--dry-run"]
    for directory, mounts in ((tmp_path, ""), (tmp_path / "model", f" --bind {tmp_path}/runs/run:{tmp_path}/runs/run")):
        monkeypatch.chdir(directory)
        code, out, _ = launch(capsys, *arguments)
        assert code == 0 and f'--bind "$PWD" --bind /data:/data{mounts} --pwd "$PWD" {directory}/x.sif)' in out


@pytest.mark.parametrize("image, name, refused", [("x.sif", "a b", False), ("x.sif", "a,b", True), ("team/x", "a b", True)])
def test_directories_that_a_container_cannot_mount_are_refused(tmp_path: Path, capsys, monkeypatch, image, name, refused) -> None:
    (tmp_path / name).mkdir()
    config = write_run(tmp_path)
    monkeypatch.chdir(tmp_path / name)
    code, _, err = launch(capsys, config, *TWO_BY_TWO, "--container", image, "--dry-run")
    assert (code == 2 and f"the working directory {tmp_path}/{name} cannot be mounted" in err) if refused else (code == 0)


def test_a_layout_that_crosses_nodes_is_remarked(tmp_path: Path, capsys, on_cluster: Cluster) -> None:
    code, out, _ = launch(
        capsys, write_run(tmp_path), "--nodes", "2", "--gpus-per-node", "1", "policy.parallel.tp=2", "--sbatch=--hold"
    )
    assert code == 0 and "note: policy.parallel.tp = 2: crosses nodes of 1 GPUs" in out and "note: no --time" in out
    on_cluster.command("scancel", (tmp_path / "runs" / "run" / "launch" / "001" / "job_id").read_text().strip())


def test_local_starts_the_ranks_here_with_the_recorded_configuration(tmp_path: Path, capsys, monkeypatch) -> None:
    started = []
    monkeypatch.setattr(
        "megappo.commands.launch.training.train_here",
        lambda ranks, arguments, run_dir, **how: started.append((ranks, arguments, how)) or 7,
    )
    code, _, _ = launch(capsys, write_run(tmp_path), "--local", "--max-restarts", "2", "run.seed=3")
    recorded = tmp_path / "runs" / "run" / "launch" / "001" / "config.yaml"
    how = {"resume": False, "max_restarts": 2, "record": recorded.parent}
    assert code == 7 and started == [(2, ["train", str(recorded)], how)] and "seed: 3" in recorded.read_text()


def test_a_run_that_saves_weights_only_cannot_be_restarted(tmp_path: Path, capsys) -> None:
    options = ["checkpoint.save_only_model=true", "--max-restarts", "2"]
    code, _, err = launch(capsys, write_run(tmp_path), "--local", *options)
    assert cli.main(["train", str(write_run(tmp_path)), *options]) == code == 2
    for text in (err, capsys.readouterr().err):
        assert "checkpoint.save_only_model = true: a restart could not resume; set it to false, or --max-restarts 0" in text
    assert not (tmp_path / "runs").exists()


def test_in_place_restarts_are_for_this_machine(tmp_path: Path, capsys) -> None:
    code, _, err = launch(capsys, write_run(tmp_path), *TWO_BY_TWO, "--max-restarts", "2")
    assert code == 2 and "--max-restarts 2 goes with --local" in err and "--max-requeues" in err


def test_the_commit_is_megappos_own_and_not_of_a_repository_that_it_was_installed_in(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "site-packages").mkdir()
    assert revision(tmp_path / "site-packages") is None
    found = revision(tmp_path)
    assert found is not None and len(found["commit"]) == 40 and found["changed"] == []


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    config = load_config(str(write_run(tmp_path)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # stands for a disk that fills up: the file is written in part
    try:
        with pytest.raises(ConfigError, match=r"run\.output_dir = .*: File too large; free space, or name another"):
            record(config, tmp_path / "runs" / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "runs" / "new").exists()


def test_what_a_refused_launch_made_is_removed_and_a_link_is_left(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to("scratch")
    folder = tmp_path / "runs" / "run" / "launch" / "001"
    folder.mkdir(parents=True)
    remove_launch(folder)
    assert (tmp_path / "runs").is_symlink() and not list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("90", 5400),
        ("10:30", 630),
        ("24:00:00", 86400),
        ("2-0", 172800),
        ("1-12:30", 131400),
        ("1-01:01:01", 90061),
        ("infinite", None),
        ("UNLIMITED", None),
    ],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: int | None) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "1h", "-5", "1:2:3:4", "1.5", "1-"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a time"):
        parse_time(text)


def test_the_record_of_the_environment_hides_secrets_and_leaves_out_what_does_not_matter() -> None:
    secrets = dict.fromkeys(("HF_TOKEN", "VLLM_API_KEY", "SLURM_JWT", "NCCL_PASSWORD", "MEGAPPO_SECRET", "WANDB_API_KEY"), "s3cret")
    shown = shown_variables(secrets | {"NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7", "MAIL": "me", "http_proxy": "http://me:pw@host"})
    assert shown["NCCL_DEBUG"] == "INFO" and shown["SLURM_JOB_ID"] == "7" and shown["HF_TOKEN"] == HIDDEN
    assert "s3cret" not in shown.values() and not shown.keys() & {"MAIL", "http_proxy", "WANDB_API_KEY"}
    assert os.environ.get("PATH") == shown_variables(os.environ).get("PATH")
