"""docs/launch.md names options that exist, and messages that the code prints."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from megappo.commands.cli import build_parser
from megappo.runtime import ending

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "launch.md").read_text()


def options_of(command: str) -> set[str]:
    commands = next(action for action in build_parser()._actions if isinstance(action.choices, dict)).choices
    assert commands is not None
    return {option for action in commands[command]._actions for option in action.option_strings}


def test_every_option_of_launch_is_explained_and_no_other() -> None:
    table = PAGE.split("| option | |")[1].split("\n\n")[0]
    named = set(re.findall(r"`(--[a-z-]+)", "\n".join(line.split(" | ")[0] for line in table.splitlines())))
    assert named == options_of("launch") - {"-h", "--help"}


def test_the_commands_of_the_page_use_options_that_exist() -> None:
    lines = re.findall(r"^ {4}(?:\$ )?megappo (launch|plan) (.*)$", PAGE, flags=re.MULTILINE)
    assert len(lines) >= 4
    for command, rest in lines:
        assert set(re.findall(r"(?<= )--[a-z-]+", rest.split("#")[0])) <= options_of(command), rest


def test_every_exit_code_is_in_the_table() -> None:
    table = PAGE.split("## Exit codes")[1].split("\n\n")[1]
    codes = {int(code) for line in table.splitlines()[2:] for code in re.findall(r"\b\d+\b", line.split("|")[1])}
    own = {value for name, value in vars(ending).items() if name.isupper() and isinstance(value, int)}
    assert codes == own | {128 + signal.SIGTERM}


def test_the_messages_of_the_page_are_those_of_the_code() -> None:
    """Their words, between the values."""
    sources = [
        path.read_text()
        for folder in ("commands/launch", "commands", "runtime", "config")
        for path in (ROOT / "megappo" / folder).glob("*")
        if path.is_file()
    ]
    text = re.sub(r'"\n\s+f?"', "", "\n".join(sources))
    pieces = [
        "of srun: unset",
        "a world of its own of",
        "and only this one would be used",
        "no Slurm on this machine (sbatch is not in PATH)",
        "unknown to sinfo; there are",
        "too short for one checkpoint: Slurm asks for it up to",
        "has this run already; scancel it",
        "failed first (",
        "no checkpoint was saved since this attempt started at step",
        "Slurm does not requeue this job",
        "crosses nodes",
    ]
    assert [piece for piece in pieces if piece not in PAGE] == [] and [piece for piece in pieces if piece not in text] == []
