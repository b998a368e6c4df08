"""A console whose reader has gone, or whose disk is full: the process goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

WRITER = """
import sys, time
from megappo.telemetry.console import keep_console, open_console
if sys.argv[1] == "kept":
    keep_console()
    keep_console()  # as a command of a command would
else:
    open_console()
print("first", flush=True)
sys.stdin.readline()
for step in range(1000):
    print("row", step, "x" * 100, flush=step % 2 == 0)
    print("warning", step, file=sys.stderr)
open(sys.argv[2], "w").write("trained")
"""


def write(folder: Path, how: str, *, options: tuple[str, ...] = (), stderr: int = subprocess.PIPE) -> tuple[int, bool, str]:
    """Exit code, True if the work was done, standard error; the reader leaves after one line, as `head -1` does."""
    writer = subprocess.Popen(
        [sys.executable, *options, "-c", WRITER, how, str(folder / "done")],
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    assert writer.stdin is not None and writer.stdout is not None
    assert writer.stdout.readline() == "first\n"
    writer.stdout.close()
    writer.stdout = None
    _, said = writer.communicate("\n", timeout=60)
    return writer.returncode, (folder / "done").exists() and (folder / "done").read_text() == "trained", said or ""


@pytest.mark.parametrize("options", [(), ("-u",)])
def test_a_reader_that_leaves_ends_no_work(tmp_path: Path, options: tuple[str, ...]) -> None:
    code, done, said = write(tmp_path, "kept", options=options)
    assert (code, done) == (0, True)
    assert said.count("standard output is lost (Broken pipe)") == 1 and "Traceback" not in said and "warning 999" in said


def test_neither_does_one_of_both_streams(tmp_path: Path) -> None:
    assert write(tmp_path, "kept", stderr=subprocess.STDOUT)[:2] == (0, True)


def test_a_plain_process_dies_of_it(tmp_path: Path) -> None:
    """Negative control."""
    code, done, _ = write(tmp_path, "plain")
    assert code != 0 and not done


def test_a_full_disk_ends_no_work_either(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", WRITER.replace("sys.stdin.readline()", ""), "kept", str(tmp_path / "done")],
            env={"PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0 and (tmp_path / "done").exists() and "standard output is lost (No space left" in done.stderr


COMMAND = "import sys; from megappo.commands import cli; sys.exit(cli.main(sys.argv[1:]))"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def command(*arguments: object, options: tuple[str, ...] = (), stdout: int | IO[str] = subprocess.PIPE, **variables: str) -> Any:
    """A command of `megappo` in a process of its own; standard output and error are bytes."""
    return subprocess.run(
        [sys.executable, *options, "-c", COMMAND, *map(str, arguments)],
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin", **variables},
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=60,
    )


@pytest.mark.parametrize(("options", "arguments"), [((), ("config", "--schema")), (("-u",), ("plan", "--help"))])
def test_a_command_whose_output_has_no_room_says_so_in_one_line(options: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = command(*arguments, options=options, stdout=full)
    assert (done.returncode, done.stderr) == (1, b"megappo: standard output cannot be written: No space left on device\n")


def test_a_command_whose_reader_has_left_ends_in_silence() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        done = command("config", "--schema", stdout=nobody)
    assert (done.returncode, done.stderr) == (0, b"")


def test_in_a_locale_of_ascii_output_is_utf_8_and_paths_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "policy: {model: m}\ndata: {train: t.jsonl, system_prompt: 数学}\nreward: {parts: [{name: exact_match}]}\n", "utf-8"
    )
    done = command("config", path, **ASCII)
    assert done.returncode == 0 and "system_prompt: 数学\n" in done.stdout.decode("utf-8"), done.stderr
    path.write_text(path.read_text("utf-8").replace("t.jsonl", "ö.jsonl"), "utf-8")
    done = command("config", path, **ASCII)
    assert done.returncode == 2 and b"have the characters of ascii in this locale; set LC_ALL=C.UTF-8" in done.stderr, done.stderr
