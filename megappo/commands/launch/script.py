"""The job script: `job.sbatch.jinja`, filled in."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jinja2

from megappo.config.errors import ConfigError, show
from megappo.config.paths import odd_character
from megappo.config.redaction import hide_secrets
from megappo.runtime.ending import MISTAKE, STOPPED
from megappo.runtime.failure import KILL_GRACE_S


@dataclass(frozen=True)
class Job:
    """Inputs of a job script."""

    nodes: int
    ranks_per_node: int
    gpus: bool  # each rank needs one
    launcher: Literal["srun", "torchrun"] = "srun"
    signal_lead_s: int = 180  # from USR1 to the time limit
    max_requeues: int = 10
    cpus_per_rank: int | None = None
    setup: tuple[str, ...] = ()  # lines of shell that run in the script before anything else; what they export reaches the ranks
    # apptainer runs a .sif, pyxis any other: a .sqsh, a path that begins with . or /, or a registry's name
    container: str | None = None
    mounts: tuple[str, ...] = ()  # `HOST:CONTAINER`, besides the working directory
    options: tuple[str, ...] = ()  # further options of sbatch, such as `--partition=gpu`

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def uses_pyxis(self) -> bool:
        return self.container is not None and not self.container.endswith(".sif")

    @property
    def image_file(self) -> str | None:
        """The image if it is a file, else None."""
        is_file = self.container is not None and (self.container.endswith((".sif", ".sqsh")) or self.container[:1] in (".", "/"))
        return self.container if is_file else None


def render(job: Job, *, root: Path, python: str, config: Path, launch_dir: Path, log: Path, name: str, resume: bool) -> str:
    """Render the script, with absolute paths. In log, {job} stands for the job id."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,  # a misspelt variable must not become an empty word of a shell script
        finalize=_one_line,  # every value passes through it, whatever its name
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"quote": shlex.quote, "in_double_quotes": lambda text: re.sub(r'([\\"$`])', r"\\\1", text)}
    output = str(log).replace("%", "%%").replace("{job}", "%j")  # sbatch expands %; %j is the job id
    return environment.get_template("job.sbatch.jinja").render(
        job=job,
        options=[directive(option) for option in (f"--job-name={name}", f"--output={output}", *job.options)],
        resume=resume,
        kill_grace_s=KILL_GRACE_S,
        requeue=STOPPED,
        mistake=MISTAKE,
        root=shlex.quote(str(root)),
        python=shlex.quote(python),
        config=shlex.quote(str(config)),
        launch_dir=shlex.quote(str(launch_dir)),
        # pyxis takes a name without a leading slash for a registry's.
        container=shlex.quote(str(root / job.container) if job.image_file else job.container) if job.container else None,
    )


def _one_line(value: object) -> object:
    text = str(value)
    # A quoted line break is one word for bash, but sbatch and `slurm.submit` read the script line by line.
    if (character := odd_character(text)) is not None:
        raise ConfigError(f"job script: {show(text)} holds the character {character}; use names of printable characters")
    if hide_secrets(text) != text:
        raise ConfigError(f"job script: {show(text)} holds a secret, which the script would keep; export it before the submission")
    return value


def directive(option: str) -> str:
    """Write an option for an #SBATCH line."""
    name, equals, value = option.partition("=")
    if re.fullmatch(r"[\w.,:/@%+=\[\]-]*", value):
        return option
    # sbatch splits the line at blanks, ends it at # and drops unescaped quotes.
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'
