"""The job script: one template (`job.sbatch.jinja`) for `megappo launch` and for the scripts in `scripts/slurm/`.

    python -m megappo.launch.script      # renders scripts/slurm/ again; a test holds them equal to the template
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional, Sequence

import jinja2

EXAMPLES = Path(__file__).parents[2] / "scripts" / "slurm"


@dataclass(frozen=True)
class Job:
    """What a script depends on. gpus: whether ranks need one each. signal_lead_s: from USR1 to the time limit.

    container: an image; apptainer's where it ends in .sif, otherwise pyxis'. mounts: `HOST:CONTAINER` paths beside the working
    directory. options: further options of sbatch, whole, e.g. `--partition=gpu`.
    """

    nodes: int
    ranks_per_node: int
    gpus: bool
    launcher: Literal["srun", "torchrun"] = "srun"
    signal_lead_s: int = 180
    max_requeues: int = 3
    cpus_per_rank: Optional[int] = None
    container: Optional[str] = None
    mounts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


def render(job: Job, *, root: Path, python: str, config: Path, launch_dir: Path, log: Path, name: str, resume: bool) -> str:
    """The script of `megappo launch`; every path in it is absolute. log: with Slurm's %j for the job id."""
    return _render(
        job,
        head=["Written by `megappo launch`; docs/launch.md explains it."],
        options=[f"--job-name={name}", f"--output={_sbatch_path(log)}", *job.options],
        resume=resume,
        root=shlex.quote(str(root)),
        python=shlex.quote(python),
        config=shlex.quote(str(config)),
        launch_dir=shlex.quote(str(launch_dir)),
    )


def render_by_hand(job: Job, file_name: str, purpose: str) -> str:
    """A script that takes the configuration from its command line."""
    head = [
        purpose,
        f"    sbatch --time=24:00:00 {file_name} CONFIG [key=value ...]",
        "Made of megappo/launch/job.sbatch.jinja, as the scripts of `megappo launch` are: change that one, and this one by",
        "`python -m megappo.launch.script`. A copy under another name is yours.",
    ]
    return _render(job, head=head, options=["--job-name=megappo", *job.options], resume=False, by_hand=file_name)


def examples() -> dict[str, str]:
    """File name below scripts/slurm/ -> text."""
    jobs = {
        "one_node.sbatch": (Job(1, 8, gpus=True), "One node of 8 GPUs, one task per rank."),
        "many_nodes_srun.sbatch": (Job(8, 8, gpus=True), "8 nodes of 8 GPUs, one task per rank: srun starts all 64 ranks."),
        "many_nodes_torchrun.sbatch": (
            Job(8, 8, gpus=True, launcher="torchrun"),
            "8 nodes of 8 GPUs, one task per node: torchrun starts the ranks of each, c10d rendezvous.",
        ),
    }
    return {name: render_by_hand(job, f"scripts/slurm/{name}", purpose) for name, (job, purpose) in jobs.items()}


def _render(job: Job, *, head: Sequence[str], options: Sequence[str], resume: bool, by_hand: str = "", **paths: str) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template("job.sbatch.jinja").render(
        head=head,
        options=options,
        resume=resume,
        by_hand=by_hand,
        nodes=job.nodes,
        ranks_per_node=job.ranks_per_node,
        gpus=job.gpus,
        launcher=job.launcher,
        signal_lead_s=job.signal_lead_s,
        max_requeues=job.max_requeues,
        cpus_per_rank=job.cpus_per_rank,
        container=shlex.quote(job.container) if job.container else None,
        pyxis=job.container is not None and not job.container.endswith(".sif"),
        mounts=[shlex.quote(mount) for mount in job.mounts],
        **paths,
    )


def _sbatch_path(path: Path) -> str:
    """A path in a line of #SBATCH, where % is Slurm's; the %j of the job id is written as {job}."""
    return '"' + str(path).replace("%", "%%").replace("{job}", "%j") + '"'


if __name__ == "__main__":
    for file_name, text in examples().items():
        (EXAMPLES / file_name).write_text(text)
