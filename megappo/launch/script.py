"""The job script: one template (`job.sbatch.jinja`) for `megappo launch` and for the scripts in `scripts/slurm/`.

python -m megappo.launch.script      # renders scripts/slurm/ again; a test holds them equal to the template
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jinja2

from megappo.launch.failure import REST_LIVES_S

EXAMPLES = Path(__file__).parents[2] / "scripts" / "slurm"


@dataclass(frozen=True)
class Job:
    """What a script depends on. gpus: whether ranks need one each. signal_lead_s: from USR1 to the time limit.

    container: an image; apptainer's where it is a .sif, otherwise pyxis': a registry's, or a file where the name says so (.sqsh,
    or a path that begins with . or /). mounts: `HOST:CONTAINER` paths beside the working directory. options: further options of
    sbatch, whole, e.g. `--partition=gpu`.
    """

    nodes: int
    ranks_per_node: int
    gpus: bool
    launcher: Literal["srun", "torchrun"] = "srun"
    signal_lead_s: int = 180
    max_requeues: int = 3
    cpus_per_rank: int | None = None
    container: str | None = None
    mounts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def uses_pyxis(self) -> bool:
        return self.container is not None and not self.container.endswith(".sif")

    @property
    def image_file(self) -> str | None:
        """The image where it is a file."""
        is_file = self.container is not None and (self.container.endswith((".sif", ".sqsh")) or self.container[:1] in (".", "/"))
        return self.container if is_file else None


def render(job: Job, *, root: Path, python: str, config: Path, launch_dir: Path, log: Path, name: str, resume: bool) -> str:
    """The script of `megappo launch`; every path in it is absolute. log: with Slurm's %j for the job id."""
    return _render(
        job,
        head=["Written by `megappo launch`; docs/launch.md explains it."],
        options=[_directive(option) for option in (f"--job-name={name}", f"--output={_sbatch_path(log)}", *job.options)],
        resume=resume,
        root=shlex.quote(str(root)),
        python=shlex.quote(python),
        config=shlex.quote(str(config)),
        launch_dir=shlex.quote(str(launch_dir)),
        # pyxis takes a name without a slash in front for a registry's.
        container=shlex.quote(str(root / job.container) if job.image_file else job.container) if job.container else None,
    )


def render_by_hand(job: Job, file_name: str, purpose: str) -> str:
    """A script that takes the configuration from its command line. With torchrun a node has as many ranks as GPUs."""
    head = [
        purpose,
        f"    sbatch --time=24:00:00 {file_name} CONFIG [--resume] [key=value ...]",
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


def _render(job: Job, *, head: Sequence[str], options: Sequence[str], resume: bool, by_hand: str = "", **words: str | None) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"quote": shlex.quote, "in_double_quotes": _in_double_quotes}
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
        rest_lives_s=REST_LIVES_S,
        max_requeues=job.max_requeues,
        cpus_per_rank=job.cpus_per_rank,
        pyxis=job.uses_pyxis,
        mounts=job.mounts,
        **words,
    )


def _sbatch_path(path: Path) -> str:
    """A path for sbatch, where % is Slurm's; the %j of the job id is written as {job}."""
    return str(path).replace("%", "%%").replace("{job}", "%j")


def _in_double_quotes(text: str) -> str:
    """Text for between double quotes of a shell."""
    return re.sub(r'([\\"$`])', r"\\\1", text)


def _directive(option: str) -> str:
    """An option as a line of #SBATCH holds it: sbatch splits at blanks, ends at # and drops quotes that are not escaped."""
    name, equals, value = option.partition("=")
    if re.fullmatch(r"[\w.,:/@%+=\[\]-]*", value):
        return option
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'


if __name__ == "__main__":
    for file_name, text in examples().items():
        (EXAMPLES / file_name).write_text(text)
