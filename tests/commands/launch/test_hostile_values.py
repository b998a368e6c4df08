"""No value of a job script is ever a command: names with a shell's characters stay words, those with line breaks are refused."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest

from megappo.commands.launch import slurm
from megappo.commands.launch.script import Job, render
from megappo.commands.launch.submit import Limits, check_options
from megappo.config.errors import ConfigError
from tests.commands.launch.test_script import run_script, script, write_program

# As parts of a folder's name, so without a slash. Each would leave a file `gone` where a shell takes it for a command.
COMMANDS = {
    "semicolon": "; touch gone ;",
    "substitution": "$(touch gone)",
    "backticks": "`touch gone`",
    "single quotes": "'; touch gone; '",
    "double quotes": '"; touch gone; "',
    "backslash": "\\'; touch gone #",
    "pipe and background": "| touch gone & touch gone &",
    "default of a variable": "${gone-$(touch gone)} %j %N %%",
    "expansion": "~ * ? [a-z] {touch,gone} !touch <(touch gone)",
    "leading dash": "-x touch gone",
}
BREAKS = ["\n", "\r", "\0", "\x1b", "\x85", "\u2028", "\u2029", "\ud800"]


def job_of(text: str, container: str | None) -> Job:
    mounts = (f"/data {text}:/data",) if container else ()
    options = (f"--comment={text}", f"--partition={text}", f"--account={text}", f"--exclude={text}")
    return Job(2, 2, gpus=False, container=container, mounts=mounts, options=options)


@pytest.mark.parametrize("container", [None, "pyxis", "apptainer"])
@pytest.mark.parametrize("case", COMMANDS)
def test_a_name_with_a_shells_characters_runs_nothing(tmp_path: Path, case: str, container: str | None) -> None:
    text = COMMANDS[case]
    image = {None: None, "pyxis": f"./{text}.sqsh", "apptainer": f"{text}.sif"}[container]
    folder = tmp_path / text
    write_program(
        tmp_path / "sleep", "exec /bin/sleep 0.02"
    )  # the script waits by the second for ranks that take milliseconds here
    calls, done = run_script(folder, job_of(text, image), PATH=f"{folder / 'bin'}:{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    config = str(folder / "config.yaml")
    assert len(calls) == 4 and all(config in call for call in calls), "and every command got the configuration's name whole"
    assert not list(tmp_path.rglob("gone")) and not Path("/gone").exists()


def test_without_quotes_the_same_name_is_a_command(tmp_path: Path, monkeypatch) -> None:
    """Negative control."""
    monkeypatch.setattr("megappo.commands.launch.script.shlex.quote", str)
    run_script_of = script(tmp_path / COMMANDS["substitution"], job_of("x", None))
    subprocess.run(["bash", "-c", run_script_of], cwd=tmp_path, capture_output=True, timeout=30)
    assert (tmp_path / "gone").exists()


@pytest.mark.parametrize("character", BREAKS)
def test_a_line_break_in_any_value_is_refused_by_every_template(tmp_path: Path, monkeypatch, character: str) -> None:
    """All fields that are text are found by their type, so that a new one is tried too."""
    bad = f"x{character}touch gone{character}#"
    words = {"root": tmp_path, "python": "python", "config": tmp_path, "launch_dir": tmp_path, "log": tmp_path, "name": "run"}
    plain = Job(1, 1, gpus=True, container="x.sqsh", mounts=("/a:/a",), setup=("true",), options=("--comment=x",))
    render(plain, **words, resume=False)
    for word, value in words.items():
        with pytest.raises(ConfigError, match="holds the character"):
            render(plain, **words | {word: type(value)(bad)}, resume=False)
    texts = {field.name: getattr(plain, field.name) for field in dataclasses.fields(Job)}
    texts = {name: value for name, value in texts.items() if isinstance(value, (str, tuple)) and name != "launcher"}
    assert set(texts) == {"container", "mounts", "setup", "options"}
    for name, value in texts.items():
        changed = dataclasses.replace(plain, **{name: bad if isinstance(value, str) else (bad,)})
        for image in (changed, changed if name == "container" else dataclasses.replace(changed, container="x.sif")):
            with pytest.raises(ConfigError, match="holds the character"):
                render(image, **words, resume=False)
    for options in (
        (f"--comment={bad}",),
        Limits(partition=bad).options(),
        Limits(account=bad).options(),
        Limits(time=bad).options(),
    ):
        with pytest.raises(ConfigError, match="must be one option in one line"):
            check_options(options, {})


def test_a_secret_does_not_get_into_a_script(tmp_path: Path) -> None:
    for secret in ("--export=ALL,HF_TOKEN=hf_secret", "--comment=https://me:secret@host/x"):
        with pytest.raises(ConfigError, match="holds a secret") as caught:
            script(tmp_path, Job(1, 1, gpus=False, options=(secret,)))
        assert "secret@" not in str(caught.value) and "hf_secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="holds a secret"):
        script(tmp_path, Job(1, 1, gpus=False, setup=("export HF_TOKEN=hf_secret",)))
    with pytest.raises(ConfigError, match="holds a secret"):
        script(tmp_path, Job(1, 1, gpus=False, container="docker://me:secret@registry/x"))


@pytest.mark.parametrize("option", ["--comment 'open", '--nodelist "n1', "--x \\"])
def test_quotes_that_are_not_closed_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="must be one option"):
        check_options([option], {})
    check_options(["--comment=it's", '--comment=5" disk', "--mincpus 3"], {})  # after = they are quoted


def test_sbatch_gets_the_options_of_real_lines_only(tmp_path: Path, monkeypatch) -> None:
    """A line separator within a comment of the script begins no line for sbatch, so it must not for us."""
    asked = []
    monkeypatch.setattr(slurm, "_ask", lambda *command, env=None: asked.append(command) or "7\n")
    file = tmp_path / "job.sbatch"
    file.write_text("#!/bin/bash\n#SBATCH --nodes=1\n# a\u2028#SBATCH --wrap=x\n")
    assert slurm.submit(file) == "7" and asked == [("sbatch", "--parsable", "--nodes=1", str(file))]
