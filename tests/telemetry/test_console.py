"""A console whose reader has gone, or whose disk is full: the process goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WRITER = """
import sys, time
from megappo.telemetry.console import is_kept, keep_console
if sys.argv[1] == "kept":
    keep_console()
    keep_console()  # as a command of a command would
print("first", flush=True)
sys.stdin.readline()
for step in range(1000):
    print("row", step, "x" * 100, flush=step % 2 == 0)
    print("warning", step, file=sys.stderr)
open(sys.argv[2], "w").write(f"trained {is_kept()}")
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
    return writer.returncode, (folder / "done").exists() and (folder / "done").read_text() == "trained True", said or ""


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
