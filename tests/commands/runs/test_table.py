"""`megappo runs`: the state of every run, whatever its files hold, without a change to any of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megappo.commands import cli
from megappo.commands.runs.read import Run, find_runs, read_run
from megappo.commands.runs.report import age_text, plain, size_text
from tests.commands.runs.folders import FILES, HOUR, save, write_end, write_lease, write_metrics

ROOT = Path(__file__).parents[3]
NO_PROCESS = 2**22 + 1  # above Linux's largest process id


def of(folder: Path, name: str) -> Run:
    return read_run(folder / name)


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in sorted(folder.rglob("*"))}


def test_the_state_follows_from_lease_and_end(tmp_path):
    write_lease(tmp_path / "running")
    write_lease(tmp_path / "dead", pid=NO_PROCESS)
    write_lease(tmp_path / "reused", started=1)  # the process id belongs to another process by now
    write_lease(tmp_path / "elsewhere", host="node7", beat=0)
    write_lease(tmp_path / "resumed"), write_end(tmp_path / "resumed", "stopped", code=75)
    (
        write_lease(tmp_path / "died again", pid=NO_PROCESS, since=2_000_000_000),
        write_end(tmp_path / "died again", "stopped", code=75),
    )
    (
        write_lease(tmp_path / "left behind", pid=NO_PROCESS, since=1_000_000_000),
        write_end(tmp_path / "left behind", "failed", code=1),
    )
    write_end(tmp_path / "done"), write_end(tmp_path / "stopped", "stopped", code=75), write_end(tmp_path / "failed", "failed")
    write_metrics(tmp_path / "old", 3)
    (tmp_path / "queued" / "launch").mkdir(parents=True)
    (tmp_path / "not a run").mkdir()
    assert {run.path.name: run.state for run in map(read_run, find_runs(tmp_path))} == {
        "running": "running",
        "dead": "died",
        "reused": "died",
        "elsewhere": "died",
        "resumed": "running",
        "died again": "died",
        "left behind": "failed",
        "done": "finished",
        "stopped": "stopped",
        "failed": "failed",
        "old": "unknown",
        "queued": "submitted",
    }


def test_steps_checkpoint_and_size(tmp_path):
    run_dir = tmp_path / "run"
    write_metrics(run_dir, 12)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')  # being written
    (run_dir / "config.yaml").write_text("sft:\n  steps: 7\ntrainer:\n  epochs: 1\n  steps: 40\n  eval_every: 0\n")
    save(run_dir, 5), save(run_dir, 10)
    (run_dir / "checkpoints" / ".tmp-step-15.x").mkdir()
    os.symlink("/usr/share", run_dir / "link")  # its megabytes are not the run's
    run = of(tmp_path, "run")
    assert (run.step, run.total_steps, run.faults) == (12, 40, ())
    assert run.checkpoint is not None and run.checkpoint.step == 10
    assert run.checkpoint.bytes == 100 * sum(len(f"{name} of 10") for name in FILES)
    assert 0 < run.bytes < 1 << 20


def test_a_run_of_so_many_epochs_has_no_total(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("trainer:\n  epochs: 2\n  steps: null\ndata:\n  steps: 3\n")
    assert of(tmp_path, "run").total_steps is None


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_loop(path: Path) -> None:
    os.symlink(path.name, path)


def text(content: str):
    return lambda path: path.write_text(content, encoding="utf-8", errors="surrogateescape")


DEEP = "[" * 100_000
# file, what stands there, part of the fault
BROKEN = [
    *(("lease.json", make, "lease.json: ") for make in (text("{"), text("[1]"), text(DEEP), a_folder)),
    ("lease.json", text('{"id": 1}'), "lease.json: "),
    ("ended.json", text("no"), "ended.json: it is not a record of megappo"),
    ("ended.json", text("3"), "ended.json: "),
    ("ended.json", text(DEEP), "ended.json: "),
    ("ended.json", text('{"outcome": "won", "step": 1, "time": 1}'), "outcome 'won' is not one of finished"),
    ("ended.json", text('{"outcome": "failed"}'), "ended.json: "),
    ("ended.json", text('{"outcome": "failed", "step": 1, "time": 1e300}'), "is no time in epoch seconds"),
    ("ended.json", text('{"outcome": "failed", "step": 1, "time": NaN}'), "is no time in epoch seconds"),
    ("ended.json", text('{"outcome": "failed", "step": 1, "time": "now"}'), "ended.json: "),
    ("ended.json", a_pipe, "ended.json: is not a file"),
    ("ended.json", a_loop, "ended.json: "),
    ("metrics.jsonl", text("zeros\0\n"), "metrics.jsonl: not JSON"),
    ("metrics.jsonl", text("x" * 70_000), "metrics.jsonl: no whole line"),
    ("metrics.jsonl", text("[]\n"), "metrics.jsonl: "),
    ("metrics.jsonl", text('{"step": "two"}\n'), "metrics.jsonl: its last line has no step"),
    ("metrics.jsonl", text('{"step": ' + "9" * 9999 + "}\n"), "metrics.jsonl: "),
    ("metrics.jsonl", a_pipe, "metrics.jsonl: is not a file"),
    ("config.yaml", a_folder, "config.yaml: is not a file"),
    ("config.yaml", text("#" * (2 << 20)), "config.yaml: has 2097152 bytes"),
    ("checkpoints/step-20", a_folder, "step-20: "),
    ("checkpoints/step-20/manifest.json", text("{}"), "step-20: "),
    ("checkpoints/step-20/manifest.json", text(DEEP), "step-20: "),
    ("checkpoints/step-" + "9" * 200, a_folder, "step-9"),
]


@pytest.mark.parametrize("name, make, fault", BROKEN)
def test_a_broken_file_is_a_fault_of_its_run_alone(tmp_path, capsys, name, make, fault):
    write_end(tmp_path / "whole"), write_metrics(tmp_path / "whole", 4)
    run_dir = tmp_path / "torn"
    write_metrics(run_dir, 2), save(run_dir, 1)
    (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
    (run_dir / name).unlink(missing_ok=True)
    make(run_dir / name)
    before = snapshot(tmp_path)
    assert cli.main(["runs", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "  whole  finished 60 min ago" in printed
    (line,) = (line for line in printed.splitlines() if line.startswith("  torn: "))
    assert fault in line
    assert cli.main(["runs", str(tmp_path), "--json"]) == 0
    torn, whole = json.loads(capsys.readouterr().out)
    assert (torn["name"], whole["step"], whole["faults"]) == ("torn", 4, [])
    assert torn["checkpoint"]["step"] == 1 and any(fault in one for one in torn["faults"])
    assert snapshot(tmp_path) == before


def test_a_run_that_died_is_said_to_go_on_only_if_it_can(tmp_path, capsys):
    for name, weights_only in (("whole", False), ("weights", True)):
        write_lease(tmp_path / name, pid=NO_PROCESS)
        save(tmp_path / name, 4, weights_only=weights_only)
    write_lease(tmp_path / "without", pid=NO_PROCESS)
    assert cli.main(["runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    whole, weights, without = (
        next(line for line in lines if line.startswith(f"  {name}: ")) for name in ("whole", "weights", "without")
    )
    assert whole.endswith("; --resume goes on after step 4")
    assert weights.endswith("; step-4 holds weights only (checkpoint.save_only_model): megappo export takes it, --resume cannot")
    assert without.endswith("or its machine went down")


def test_text_of_others_does_not_reach_the_terminal(tmp_path, capsys):
    name = "a\x1b[31m\n" + os.fsdecode(b"\xff")
    write_end(tmp_path / name, "failed", code=1, message="rank 1:\x1b]0;title\x07 ValueError\nTraceback " + "x" * 1000)
    assert cli.main(["runs", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "a?[31m ?: rank 1:?]0;title? ValueError Traceback" in printed
    assert max(map(len, printed.splitlines())) < 400


def test_an_end_of_other_types_is_shown_as_it_is(tmp_path, capsys):
    write_end(tmp_path / "run", "failed", code=[1], message=5, step={})
    assert cli.main(["runs", str(tmp_path)]) == 0
    assert "  run: 5" in capsys.readouterr().out


def test_one_run_may_be_named_itself(tmp_path, capsys):
    write_end(tmp_path / "run")
    assert find_runs(tmp_path / "run") == [tmp_path / "run"]


MISTAKES = [
    (["absent"], "absent: No such file or directory; name the directory that holds the runs"),
    (["file"], "file: Not a directory; name the directory that holds the runs"),
    (["x" * 300], "File name too long; name the directory that holds the runs"),
    (["empty"], "empty holds no run (no directory with config.yaml, metrics.jsonl or checkpoints/ in it)"),
    (["one", "two"], "runs: one directory, not 2 (one two)"),
    (["--step", "3"], "--step 3 is of `megappo runs verify RUN`"),
    (["verify"], "runs verify: name one run"),
    (["verify", "one", "two"], "runs verify: name one run"),
    (["verify", "absent"], "absent: No such file or directory; name the directory of a run"),
    (["verify", "file"], "file: Not a directory; name the directory of a run"),
    (["verify", "x" * 300], "File name too long; name the directory of a run"),
    (["verify", "empty"], "empty holds no checkpoint (checkpoints/step-N)"),
    (["verify", "run", "--step", "7"], "--step 7: run/checkpoints has no such checkpoint; there are 1"),
    (["verify", "run", "--step", "0"], "--step: 0 is not an integer >= 1"),
]


@pytest.mark.parametrize("arguments, said", MISTAKES)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, arguments, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    save(tmp_path / "run", 1)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["runs", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and said in captured.err


def test_the_table_imports_no_torch(tmp_path):
    """Nor anything else that takes half a second: a hundred runs are listed in that time."""
    write_end(tmp_path / "run"), save(tmp_path / "run", 1)
    heavy = "print(code, *(sys.modules.keys() & {'torch', 'numpy'}))"
    program = f"import sys\nfrom megappo.commands import cli\ncode = cli.main(sys.argv[1:])\n{heavy}"
    for arguments in (["runs", str(tmp_path)], ["runs", "verify", str(tmp_path / "run")]):
        done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == "0", done.stdout + done.stderr


def test_ages_and_sizes():
    assert [age_text(s) for s in (-5, 0, 119, 120, 7199, 7200, 2 * 24 * HOUR)] == [
        "0 s",
        "0 s",
        "119 s",
        "2 min",
        "119 min",
        "2 h",
        "2 d",
    ]
    assert [size_text(size) for size in (0, 5000, 3 << 20, 5 << 30)] == ["0 KiB", "5 KiB", "3.00 MiB", "5.00 GiB"]
    assert plain("a\tb\x7f") == "a b?"
