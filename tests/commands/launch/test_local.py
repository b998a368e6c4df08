"""Ranks on this machine: exit codes, failures, signals, and GPUs that are missing or unwanted."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from megappo.commands.launch import local, processes, training
from megappo.commands.launch.local import AGAIN_S, Requests, WorldEnd, run_world, start_ranks
from megappo.commands.launch.processes import ForkedProcesses, NewProcesses
from megappo.commands.launch.restart import read_starts
from megappo.parallel.device import select_device
from megappo.runtime import ending
from megappo.runtime.ending import read_end
from megappo.runtime.failure import ATTEMPT_DIR, SPARE_RANKS, end_of_lost, first_failure, note_lost
from tests.listening import listeners

ROOT = Path(__file__).parents[3]
RANK = "tests.commands.launch.local_rank"


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@dataclass
class World:
    """Two stand-ins for ranks. `run` returns how they ended and after how many seconds."""

    folder: Path
    begun: Path

    def run(
        self, *, stoppable: bool = True, when_begun: Callable[[], object] = lambda: None, rejoins: int = 0
    ) -> tuple[WorldEnd, float]:
        events = threading.Thread(target=lambda: (self.wait_for_ranks(), when_begun()), daemon=True)
        with Requests(stoppable=stoppable) as requests:
            events.start()
            since = time.monotonic()
            end = run_world(NewProcesses(RANK), 2, [], requests, self.folder, rejoins=rejoins)
            seconds = time.monotonic() - since
            events.join(10)
        assert not any(psutil.pid_exists(int(file.read_text())) for file in self.begun.iterdir()), "a rank outlived its world"
        return end, seconds

    def wait_for_ranks(self) -> None:
        while len([file for file in self.begun.iterdir() if file.read_text()]) < 2:
            time.sleep(0.01)


@pytest.fixture
def world(tmp_path: Path, monkeypatch) -> Iterator[Callable[[str], World]]:
    def of(words: str) -> World:
        begun, folder = tmp_path / "begun", tmp_path / "evidence"
        begun.mkdir()
        folder.mkdir()
        monkeypatch.setenv("BEGUN", str(begun))
        monkeypatch.setenv("STUB", words)
        return World(folder, begun)

    yield of


@pytest.fixture(autouse=True)
def stub_is_found(monkeypatch) -> None:
    """Ranks do not look for modules in the working directory, where RANK is."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))


@pytest.fixture(autouse=True)
def signals_of_a_terminal() -> Iterator[None]:
    """Not those of `nohup` or of a shell's background, which ignore two of them; the launcher leaves ignored ones ignored."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def signals(*numbers: signal.Signals, pause_s: float = 0.0) -> Callable[[], None]:
    def send() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(pause_s)

    return send


@pytest.mark.parametrize("word", ["kill", "raise"])
def test_a_spare_rank_may_be_killed_and_may_not_fail(world, word) -> None:
    here = world(f"goes-on {word}")
    (here.folder / SPARE_RANKS).write_text("1 2")
    end, _ = here.run()
    assert (end.code, end.failure is None) == ((0, True) if word == "kill" else (1, False))


def test_the_other_rank_of_a_lost_replica_is_ended_though_it_waits_for_ever(world) -> None:
    here = world("sleep kill")
    (here.folder / SPARE_RANKS).write_text("0 1")
    end, seconds = here.run()
    assert (end.code, end.failure) == (0, None) and seconds < 30
    assert [end_of_lost(here.folder, rank) for rank in (0, 1)] == ["killed by SIGKILL"] * 2


def test_a_rank_that_was_lost_may_end_once_the_run_is_over_and_no_rank_is_spare(world) -> None:
    here = world("kill exit-0")
    note_lost(here.folder, 0)
    end, _ = here.run()
    assert (end.code, end.failure) == (0, None)


@pytest.mark.parametrize("words, starts", [("waits again-joins", 1), ("waits again-fails", 2), ("goes-on again-sleep", 1)])
def test_a_spare_rank_that_is_killed_starts_again_and_ends_nothing_before_it_takes_part(world, capfd, words, starts) -> None:
    here = world(words)
    (here.folder / SPARE_RANKS).write_text("1\n2")
    end, seconds = here.run(rejoins=starts)
    assert (end.code, end.failure) == (0, None) and seconds < 30, "a rank that sleeps takes no part, and is not waited for"
    said = [f"megappo: rank 1 will take part again: start {start} of {starts}" for start in range(1, starts + 1)]
    assert [line for line in capfd.readouterr().err.splitlines() if "again" in line] == said
    assert (here.folder / "rank-1.lost").exists() == ("joins" not in words), "training rank 0 removes what it knows"


@pytest.mark.parametrize(
    "words, code, described",
    [
        ("exit-0 exit-0", 0, ""),
        ("exit-0 exit-3", 3, "rank 1 on HOST: exit code 3"),
        ("sleep kill", 137, "rank 1 on HOST: killed by SIGKILL"),
        ("raise sleep", 1, "rank 0: RuntimeError: the culprit"),
        ("exit-1 exit-17", 17, "rank 0 on HOST: exit code 1"),
    ],
)
def test_the_first_failure_ends_the_world_and_names_the_code(world, words: str, code: int, described: str) -> None:
    end, seconds = world(words).run()
    assert (end.code, end.describe()) == (code, described.replace("HOST", os.uname().nodename))
    assert seconds < 30, "the others sleep for a minute"


COMMAND = ["config", "--recipe", "grpo"]  # imports `platform`, as all do, and no torch


@pytest.mark.parametrize("starter", [NewProcesses, lambda module: ForkedProcesses(module, ["random"]), None])
def test_a_file_of_the_user_named_as_a_module_is_not_imported(tmp_path: Path, monkeypatch, starter) -> None:
    """By ranks, by the process that they are forked from, and by `python -m megappo`, as under a user's own torchrun (None)."""
    for name in ("random", "torch", "platform"):
        (tmp_path / f"{name}.py").write_text(f"open('{tmp_path}/executed', 'w').close()\nraise SystemExit('imported {name}')\n")
    monkeypatch.chdir(tmp_path)
    if starter is None:
        done = subprocess.run([sys.executable, "-m", "megappo", *COMMAND], capture_output=True, text=True)
        assert "algorithm:" in done.stdout, done.stderr
    else:
        ranks = starter("megappo")
        assert not isinstance(ranks, ForkedProcesses) or ranks.unfit() is None
        rank = ranks.start({"RANK": "0"}, COMMAND)
        while rank.poll() is None:
            time.sleep(0.05)
        if isinstance(ranks, ForkedProcesses):
            ranks.close()
    assert not (tmp_path / "executed").exists()


def test_a_killed_rank_is_noticed_at_once(world, monkeypatch) -> None:
    """By the signal of its end (RELIABILITY F1 allows two seconds), and not when the launcher looks again."""
    monkeypatch.setattr(local, "_LOOK_S", 1000.0)
    made = world("sleep sleep")
    end, seconds = made.run(when_begun=lambda: os.kill(int((made.begun / "1").read_text()), signal.SIGKILL))
    assert end.code == 137 and seconds < 50, "the ranks sleep for a minute"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("words", ["stop stop", "late stop"])
def test_a_request_to_stop_is_handed_to_the_ranks_and_waited_for(world, capsys, words: str, number: signal.Signals) -> None:
    """Also one that comes before a rank listens. torchrun would kill the ranks at three of them."""
    if words.startswith("late") and number != signal.SIGTERM:
        pytest.skip("one signal is enough")
    end, _ = world(words).run(when_begun=signals(number))
    assert end == WorldEnd(0)
    assert f"megappo: {number.name}: the ranks finish their step, save and end" in capsys.readouterr().err


def test_two_signals_in_a_row_are_one_request(world) -> None:
    """As timeout(1) sends them; and USR1 before TERM is Slurm's order."""
    end, _ = world("stop stop").run(when_begun=signals(signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, pause_s=0.1))
    assert end == WorldEnd(0)


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_request_ends_at_once(world, number: signal.Signals, code: int) -> None:
    end, seconds = world("deaf deaf").run(when_begun=signals(number, number, pause_s=AGAIN_S + 0.1))
    assert (end.code, end.describe()) == (code, f"ended by {number.name}") and seconds < 30


def test_ranks_that_know_no_stop_are_ended_at_the_first_signal(world, capsys) -> None:
    end, seconds = world("sleep sleep").run(stoppable=False, when_begun=signals(signal.SIGTERM))
    assert end.code == 143 and seconds < 30
    local.say(end)
    assert capsys.readouterr().err == "megappo: ended by SIGTERM\n"


class Unfit:
    """In place of ranks that are forked."""

    def __init__(self, *_: object) -> None: ...
    def unfit(self) -> str:
        return "a test says so"

    def close(self) -> None: ...


RESTARTS = [
    ("exit-0 exit-3", 1, 3, 2, "not restarted: --max-restarts 1"),
    ("exit-0 kill", 5, 17, 3, "not restarted: 3 attempts started at step 0 and none reached another checkpoint"),
    ("exit-2 exit-2", 5, 2, 1, "rank 0 ended first, exit code 2"),
    ("exit-0 exit-17", 5, 17, 1, "rank 1 ended first, exit code 17"),
    ("exit-0 exit-69", 5, 69, 1, "rank 1 ended first, exit code 69"),
    ("exit-0 exit-0", 5, 0, 1, "imports everything again, as ranks cannot be forked: a test says so"),
]


@pytest.mark.parametrize("words, most, code, num_starts, said", RESTARTS, ids=[case[0] for case in RESTARTS])
def test_restarts_end_where_another_one_is_no_use(
    world, tmp_path: Path, monkeypatch, capsys, words: str, most: int, code: int, num_starts: int, said: str
) -> None:
    world(words)
    monkeypatch.setattr(training, "RANK_MODULE", RANK)
    monkeypatch.setattr(processes, "ForkedProcesses", Unfit)
    run_dir = tmp_path / "run"
    record = run_dir / "launch" / "001"
    record.mkdir(parents=True)
    assert training.train_here(2, ["train"], run_dir, max_restarts=most, record=record) == code
    assert len(read_starts(record)) == num_starts and said in capsys.readouterr().err
    assert read_end(run_dir) is None, "the stand-ins never began a run here"


@pytest.mark.parametrize("began", [True, False])
def test_a_failure_is_recorded_in_the_run_that_had_begun(world, tmp_path: Path, monkeypatch, began: bool) -> None:
    world("raise sleep")
    monkeypatch.setattr(training, "RANK_MODULE", RANK)
    if began:
        (tmp_path / "config.yaml").touch()  # rank 0 has taken the directory
    assert training.train_here(2, ["train"], tmp_path) == 1
    end = read_end(tmp_path)
    assert (end is not None) == began
    if end is not None:
        assert (end.outcome, end.step, end.code, end.message) == ("failed", 0, 1, "rank 0: RuntimeError: the culprit")


def test_a_job_of_one_rank_leaves_its_evidence_where_the_job_script_looks(world, tmp_path: Path, monkeypatch) -> None:
    world("raise")
    monkeypatch.setattr(training, "RANK_MODULE", RANK)
    folder = tmp_path / "attempt-0"
    folder.mkdir()
    monkeypatch.setenv(ATTEMPT_DIR, str(folder))
    assert training.train_here(1, ["train"], tmp_path / "run") == 1
    failure = first_failure(folder)
    assert failure is not None and "RuntimeError: the culprit" in failure.text


def test_a_disk_that_has_gone_keeps_the_code_of_the_failure(world, tmp_path: Path, monkeypatch, capsys) -> None:
    """And is no mistake of the user, although its refusal is a ValueError."""
    world("raise sleep")
    monkeypatch.setattr(training, "RANK_MODULE", RANK)
    monkeypatch.setattr(processes, "ForkedProcesses", Unfit)
    run_dir = tmp_path / "run"
    record = run_dir / "launch" / "001"
    record.mkdir(parents=True)
    run = training.run_world

    def run_and_lose_the_disk(*args) -> WorldEnd:
        end = run(*args)
        (run_dir / "config.yaml").touch()  # a run that has started, and whose checkpoints are not there
        monkeypatch.setattr(ending, "record_end", fail)
        return end

    def fail(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(training, "run_world", run_and_lose_the_disk)
    assert training.train_here(2, ["train"], run_dir, max_restarts=3, record=record) == 1
    said = capsys.readouterr().err
    assert "the culprit; not restarted: " in said and "mount its file system" in said
    assert "ended.json cannot be written: No space left on device" in said


def test_handlers_come_back(monkeypatch) -> None:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    with Requests(stoppable=True):
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(number) for number in numbers] == before


def test_ranks_share_the_cores_that_this_process_may_use(monkeypatch):
    """On a shared node, Slurm gives a job some of the machine's."""
    monkeypatch.setattr(local, "run_world", lambda *_: WorldEnd(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 4, 5, 6})
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # so that what it was comes back
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert start_ranks(2, ["train"]) == 0 and os.environ["OMP_NUM_THREADS"] == "2"


def test_other_faults_of_the_launcher_are_not_swallowed(monkeypatch):
    def fail(*_):
        raise RuntimeError("out of ports")

    monkeypatch.setattr(local, "_meeting_point", fail)
    with pytest.raises(RuntimeError, match="out of ports"):
        start_ranks(2, ["train"])


def test_the_store_of_a_world_on_this_machine_listens_to_this_machine() -> None:
    """And serves a client; torch's own socket would listen on all interfaces."""
    before = listeners()
    store = local.loopback_store()
    new = [(listener.address, listener.port) for listener in listeners() - before]
    TCPStore("127.0.0.1", store.port).set("key", "value")
    assert new == [("127.0.0.1", store.port)] and store.get("key") == b"value"


def test_more_ranks_than_gpus_are_refused_before_they_start(monkeypatch, two_gpus):
    def start(*_):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(local, "run_world", start)
    with pytest.raises(ValueError, match=r"run\.num_ranks: 3 ranks on this machine .* torch sees 2"):
        start_ranks(3, ["train"])
    with pytest.raises(AssertionError, match="ranks were started"):
        start_ranks(2, ["train"])


@pytest.mark.parametrize(
    "local_rank, requested, expected",
    [
        ("1", "auto", torch.device("cuda", 1)),
        ("0", "cuda", torch.device("cuda", 0)),
        ("2", "auto", "torch sees 2"),
        ("0", "cpu", "run.device = cpu: torch sees a CUDA device"),
    ],
)
def test_the_device_of_a_rank_on_a_machine_with_gpus(monkeypatch, two_gpus, local_rank, requested, expected):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    if isinstance(expected, torch.device):
        assert select_device(requested) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            select_device(requested)


def test_what_ranks_are_forked_from_ends_at_once_also_while_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C then ends the wait for the imports; seconds later there was a traceback of a broken pipe."""
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    started = time.monotonic()
    processes.ForkedProcesses("megappo.commands.cli", ["sleeps"]).close()
    assert time.monotonic() - started < 30 and capfd.readouterr().err == ""
