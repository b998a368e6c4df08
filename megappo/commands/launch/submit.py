"""`megappo launch`: check the job here, write its script, configuration and origin into the run directory, and submit it to Slurm.
docs/launch.md lists the files of a launch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megappo.commands.launch import slurm
from megappo.commands.launch.environment import report
from megappo.commands.launch.script import Job, directive, render
from megappo.config.dump import dump_yaml
from megappo.config.errors import ConfigError, problem
from megappo.config.layout_checks import placement_problems, roles_in_use, sampler_of
from megappo.config.paths import odd_character
from megappo.config.rank_ranges import ranges_text, ranks_of
from megappo.config.redaction import redacted
from megappo.config.role_sections import key_of_role, section_of
from megappo.config.run_directory import LAUNCHES, run_dir_of
from megappo.config.supervised import AnyConfig
from megappo.runtime.lease import refuse_if_held


@dataclass(frozen=True)
class Limits:
    """Options of the job besides nodes; None leaves the choice to the cluster."""

    partition: str | None = None
    account: str | None = None
    time: str | None = None

    def options(self) -> tuple[str, ...]:
        given = {"partition": self.partition, "account": self.account, "time": self.time}
        return tuple(f"--{name}={value}" for name, value in given.items() if value is not None)


def require_resumable(config: AnyConfig, what: str, way_out: str) -> None:
    """Raise ConfigError if the run saves no checkpoints or only weights, so that `what` could not resume."""
    if config.checkpoint.save_every == "never":
        raise ConfigError(problem("checkpoint.save_every", "never", f"{what} could not resume; use auto or epoch, or {way_out}"))
    if config.checkpoint.save_only_model:
        raise ConfigError(problem("checkpoint.save_only_model", True, f"{what} could not resume; set it to false, or {way_out}"))


def check_job(config: AnyConfig, job: Job, limits: Limits) -> None:
    """Check everything that does not need Slurm. Raises ConfigError, one line, for the first mistake."""
    ranks = config.run.num_ranks
    if ranks not in (None, job.world_size):
        fix = f"{job.nodes} nodes x {job.ranks_per_node} are {job.world_size} ranks; set run.num_ranks={job.world_size} or null"
        raise ConfigError(problem("run.num_ranks", ranks, fix))
    check_options(job.options, {})
    check_options(job.options[len(limits.options()) :], _OWN_OPTIONS)
    _check_setup(job)
    _check_mounts(job)
    _check_nodes(config, job)
    if job.max_requeues:
        require_resumable(config, "a requeued job", "--max-requeues 0")
    limit_s = slurm.parse_time(limits.time) if limits.time is not None else None
    needed = job.signal_lead_s + slurm.SIGNAL_RESOLUTION_S
    if limit_s is not None and limit_s <= needed:
        raise ConfigError(
            f"--time {limits.time}: too short for one checkpoint: Slurm asks for it up to {needed} s before the end "
            f"(--signal-lead {job.signal_lead_s}, and Slurm may be {slurm.SIGNAL_RESOLUTION_S} s early); give more time"
        )


# Options that the script sets itself -> option of `megappo launch` that changes it; None if there is none.
_OWN_OPTIONS = {
    "nodes": "--nodes",
    "ntasks": "--gpus-per-node",
    "ntasks-per-node": "--gpus-per-node",
    "gpus-per-node": "--gpus-per-node",
    "cpus-per-task": "--cpus-per-rank",
    "partition": "--partition",
    "account": "--account",
    "time": "--time",
    "signal": "--signal-lead",
    "requeue": "--max-requeues",
    "no-requeue": "--max-requeues",
    **dict.fromkeys(("output", "error", "open-mode", "job-name", "chdir", "array", "wrap", "parsable", "test-only")),
}


def check_options(options: Sequence[str], own: Mapping[str, str | None]) -> None:
    """Check sbatch options. own: options that the script sets itself -> our option that changes it. Raises ConfigError for one of
    these, and for text that is not one option on one line."""
    for option in options:
        if not option.startswith("--") or odd_character(option) is not None or not _is_whole(option):
            raise ConfigError(problem("--sbatch", option, "must be one option in one line, for example --sbatch=--exclusive"))
        name = re.split("[= ]", option.removeprefix("--"), maxsplit=1)[0]
        if name in own:
            unchanged = "the script has its own; change what --write-to writes"
            fix = unchanged if own[name] is None else f"use {own[name]} of megappo launch"
            raise ConfigError(problem("--sbatch", option, fix))


def _is_whole(option: str) -> bool:
    # Quotes that are not closed raise.
    try:
        return bool(shlex.split(directive(option)))
    except ValueError:
        return False


def _check_setup(job: Job) -> None:
    for line in job.setup:
        if odd_character(line) is not None or not line.strip():
            raise ConfigError(problem("--setup", line, "must be one line of shell, for example --setup='module load cuda'"))
        # Only what bash cannot read is found here: a module may be unknown to this machine and known to the nodes.
        read = subprocess.run(["/bin/bash", "-n", "-c", line], capture_output=True, encoding="utf-8", errors="replace")
        if read.returncode != 0:
            said = re.sub(r"^.*?line \d+: ", "", read.stderr.splitlines()[0])
            raise ConfigError(problem("--setup", line, f"bash cannot read it: {said}"))


def _check_mounts(job: Job) -> None:
    for option, value in (("--container", job.container or ""), *(("--mount", mount) for mount in job.mounts)):
        if (character := odd_character(value)) is not None:
            raise ConfigError(problem(option, value, f"holds the character {character}; must be one printable line"))
    for mount in job.mounts:
        if not all(mount.partition(":")[::2]):
            raise ConfigError(f"--mount {mount}: must be HOST:CONTAINER, for example /data:/data")
    # Separators of pyxis and apptainer, which cannot be escaped in a path; a blank is one for pyxis only.
    separators = ",: " if job.uses_pyxis else ",:"
    directory = str(Path.cwd())
    if job.container is not None and (bad := set(directory) & set(separators)):
        raise ConfigError(f"--container: the working directory {directory} cannot be mounted, for {min(bad)!r} in its name")


def _tensor_parallel(config: AnyConfig) -> dict[str, tuple[int, str]]:
    # Key -> its size, and the ranks that are cut into groups of this size.
    found = {
        f"{key_of_role(role)}.parallel.tp": (sizes.tp, section_of(config, role).ranks)
        for role, sizes in roles_in_use(config).items()
    }
    sampler = sampler_of(config)
    if sampler is None or sampler.engine != "vllm":
        return found
    return found | {"rollout.tp": (sampler.tp, sampler.ranks)}


def _check_nodes(config: AnyConfig, job: Job) -> None:
    if next(placement_problems(config, job.world_size), None) is not None:
        return  # reported by the plan
    per_node = job.ranks_per_node
    # A tensor-parallel group must lie within a node or consist of whole nodes.
    for key, (tp, text) in _tensor_parallel(config).items():
        ranks = ranks_of(text, job.world_size)
        groups = [ranks[first : first + tp] for first in range(0, len(ranks), tp)]
        if (cut := next((group for group in groups if _cuts_nodes(group, per_node)), None)) is None:
            continue
        if per_node % tp != 0 and tp % per_node != 0:
            fix = f"does not divide the {per_node} GPUs of a node, so groups would lie across two nodes; use a divisor"
            raise ConfigError(problem(key, tp, fix))
        fix = (
            f"ranks {ranges_text(cut)} would be a group of {key} = {tp} across nodes of {per_node} ranks; "
            f"let each range begin at a multiple of {tp} and name a multiple of {tp} ranks"
        )
        raise ConfigError(problem(f"{key.partition('.')[0]}.ranks", text, fix))


def _cuts_nodes(group: Sequence[int], per_node: int) -> bool:
    """True for ranks on several nodes that do not fill these nodes."""
    num_nodes = len({rank // per_node for rank in group})
    return num_nodes > 1 and len(group) != num_nodes * per_node


def check_cluster(job: Job, limits: Limits) -> None:
    """Check everything that needs Slurm. Raises ConfigError if Slurm is missing or cannot run the job."""
    if not slurm.has_slurm():
        raise ConfigError(
            "no Slurm on this machine (sbatch is not in PATH): --local starts the ranks here, --dry-run prints the script"
        )
    if job.image_file is not None and not Path(job.image_file).exists():
        raise ConfigError(f"--container {job.container}: no such file")
    known = slurm.partitions()
    named = limits.partition or os.environ.get("SBATCH_PARTITION")
    names = named.split(",") if named else [partition.name for partition in known.values() if partition.default]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--partition {unknown[0]}: unknown to sinfo; there are {', '.join(known) or 'none'}")
    # With several partitions Slurm starts the job in any that can run it.
    obstacles = [_obstacle(job, limits, known[name]) for name in names]
    if obstacles and all(obstacles):
        raise ConfigError(obstacles[0])


def _obstacle(job: Job, limits: Limits, partition: slurm.Partition) -> str:
    if not partition.up:
        return f"--partition {partition.name}: is down"
    if job.nodes > partition.nodes:
        return f"--nodes {job.nodes}: partition {partition.name} has {partition.nodes} nodes"
    limit_s = slurm.parse_time(limits.time) if limits.time is not None else None
    if limit_s is not None and partition.limit_s is not None and limit_s > partition.limit_s:
        return f"--time {limits.time}: jobs in partition {partition.name} end after {partition.limit_s // 60} minutes"
    return ""


def remarks(config: AnyConfig, job: Job, limits: Limits) -> list[str]:
    """List settings that work, but perhaps not as intended."""
    notes = []
    if config.checkpoint.save_every == 0 and job.max_requeues:
        notes.append(
            "checkpoint.save_every = 0: a crash loses everything since the start, only a stop by signal saves; leave it at auto"
        )
    if limits.time is None:
        notes.append("no --time: the partition's own limit holds")
    elif re.fullmatch(r"\d+:\d+", limits.time):
        notes.append(f"--time {limits.time}: Slurm reads minutes:seconds; hours are {limits.time}:00")
    if job.gpus and job.cpus_per_rank is None and not any(option.startswith("--exclusive") for option in job.options):
        shared = "one core per rank" if job.launcher == "srun" else "one core for all ranks of a node"
        notes.append(f"no --cpus-per-rank: the cluster's default holds, which may be {shared}")
    for key, (tp, _) in _tensor_parallel(config).items():
        if tp > job.ranks_per_node:
            notes.append(f"{key} = {tp}: crosses nodes of {job.ranks_per_node} GPUs, so every layer waits for the network")
    return notes


def record(config: AnyConfig, run_dir: Path) -> Path:
    """Make a folder below the run directory with the configuration and its origin. Raises ConfigError while a job of the run is
    alive or if nothing can be written there, LeaseHeld while a process has the run."""
    _refuse_second_job(run_dir)
    refuse_if_held(run_dir)
    folder = free_folder(run_dir)
    try:
        _write_record(config, folder)
    except OSError as error:
        if folder.is_dir():
            remove_launch(folder)
        fix = f"{error.filename or folder}: {error.strerror}; free space, or name another"
        raise ConfigError(problem("run.output_dir", config.run.output_dir, fix)) from None
    return folder


def write_by_hand(config: AnyConfig, folder: Path, script: str) -> None:
    """Write what `record` and `submit` write into a new folder, and a README with the command that submits it. Raises ConfigError
    if that fails."""
    sbatch = shlex.join(["sbatch", str(folder / "job.sbatch")])
    results = f"Results: {run_dir_of(config.run).absolute()}. Logs: job-ID.log and attempt-N/ of this folder."
    try:
        _write_record(config, folder)
        (folder / "job.sbatch").write_text(script, encoding="utf-8")
        (folder / "README").write_text(f"{sbatch}\n\n{results}\n", encoding="utf-8")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(f"--write-to {folder}: {error.strerror}; name a folder that can be made") from None
    print(f"written, not submitted: {sbatch}")


def _write_record(config: AnyConfig, folder: Path) -> None:
    content = {"command": redacted(sys.argv), "directory": str(Path.cwd()), **report()}
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
    (folder / "launch.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def submit(script: str, folder: Path) -> str:
    """Write the script into the folder of `record` and submit it; return the job id. The folder is removed if Slurm refuses."""
    file = folder / "job.sbatch"
    file.write_text(script, encoding="utf-8")
    try:
        job_id = slurm.submit(file)
    except ConfigError:
        remove_launch(folder)
        raise
    (folder / "job_id").write_text(job_id + "\n", encoding="utf-8")
    return job_id


def remove_launch(folder: Path) -> None:
    """Remove the folder of a launch that did not start, and parents that become empty."""
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # not empty, or a link
        for parent in folder.parents[:3]:  # launch, the run, output_dir
            parent.rmdir()


def script_of(config: AnyConfig, job: Job, folder: Path, *, resume: bool) -> str:
    """Render the script of a launch that is recorded in this folder, without writing anything."""
    # Unresolved: the target of the interpreter's link is outside the virtual environment.
    python = sys.executable if job.container is None else "python3"
    if job.container is not None:
        # The working directory is mounted anyway, and a launch below the run directory with it.
        run_dir = run_dir_of(config.run).absolute()
        written = (run_dir,) if folder.is_relative_to(run_dir) else (run_dir, folder)
        outside = tuple(f"{path}:{path}" for path in written if not path.is_relative_to(Path.cwd()))
        job = replace(job, mounts=(*job.mounts, *outside))
    return render(
        job,
        root=Path.cwd(),
        python=python,
        config=folder / "config.yaml",
        launch_dir=folder,
        log=folder / "job-{job}.log",
        name=config.run.name,
        resume=resume,
    )


def free_folder(run_dir: Path) -> Path:
    """Return the folder of the next launch of the run, which does not exist yet."""
    launches = run_dir.absolute() / LAUNCHES
    return next(path for n in range(1, 10_000) if not (path := launches / f"{n:03d}").exists())


def _refuse_second_job(run_dir: Path) -> None:
    for file in sorted((run_dir / LAUNCHES).glob("*/job_id")):
        job = file.read_text(encoding="utf-8").strip()
        if slurm.has_slurm() and slurm.is_alive(job):
            fix = f"job {job} has this run already; scancel it, or use another name"
            raise ConfigError(problem("run.name", run_dir.name, fix))
