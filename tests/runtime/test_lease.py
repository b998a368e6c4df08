"""One holder of a run directory at a time: holders that live or are gone, on this host and on others, and races."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.commands import cli
from megappo.commands.launch import submit
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.config.run_directory import LEASE, check_run_dir
from megappo.config.run_sections import RunConfig
from megappo.runtime import lease as module
from megappo.runtime import lease_record
from megappo.runtime.ending import UNRECOVERABLE
from megappo.runtime.lease import (
    LAUNCHER_VARIABLE,
    LEASE_VARIABLE,
    Lease,
    LeaseHeld,
    held_lease,
    read_lease,
    refuse_if_held,
)
from megappo.runtime.lease_record import LeaseRecord, started_of
from tests.commands.plan.checkpoints import write_run

# A holder in a process of its own: takes the lease, says so, and waits for its end.
HOLDER = """
import sys, time
from pathlib import Path
from megappo.runtime import lease
lease.BEAT_S = 0.05
held = lease.Lease.acquire(Path(sys.argv[1]), "megappo train other.yaml")
print(held.id, flush=True)
time.sleep(600)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "run"


@pytest.fixture
def holder(run_dir: Path):
    """A living process that has the run, and its lease's id."""
    process = start_holder(run_dir)
    yield process
    process.kill()
    process.wait()


def start_holder(run_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(run_dir)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline().strip()
    return process


def rewrite(run_dir: Path, age_s: float = 0.0, **changes: object) -> None:
    """Change fields of the record, as another host would have written it, `age_s` seconds ago."""
    path = run_dir / LEASE
    before = path.read_text()
    with path.open("r+") as file:  # in one write, which a reader that looks meanwhile sees whole
        file.write(json.dumps(json.loads(before) | changes).ljust(len(before)))
    written = time.time() - age_s
    os.utime(path, (written, written))


def elsewhere(run_dir: Path, age_s: float, **changes: object) -> None:
    """A record of another host."""
    with Lease.acquire(run_dir, "megappo train far.yaml"):
        text = (run_dir / LEASE).read_text()
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / LEASE).write_text(text)
    rewrite(run_dir, age_s, host="far", id="f00d", **changes)


# ---------------------------------------------------------------------------------------------------------------- one holder


def test_a_run_has_one_holder_and_the_refusal_says_who_and_what_to_do(run_dir: Path) -> None:
    with Lease.acquire(run_dir, "megappo train a.yaml"):
        with pytest.raises(LeaseHeld) as refusal:
            Lease.acquire(run_dir, "megappo train b.yaml")
        with pytest.raises(LeaseHeld):
            refuse_if_held(run_dir)
        text = str(refusal.value)
        assert "\n" not in text and "megappo train a.yaml" in text and f"process {os.getpid()}" in text
        assert "since 20" in text and "kill" in text and f"remove {run_dir / LEASE}" in text
        assert sorted(path.name for path in run_dir.iterdir()) == [LEASE]  # the refused one left nothing
    assert not run_dir.exists()  # made for the lease alone


def test_a_released_lease_leaves_other_files_alone_and_can_be_taken_again(run_dir: Path) -> None:
    for _ in range(2):
        with Lease.acquire(run_dir, "x"):
            (run_dir / "metrics.jsonl").write_text("kept")
        assert [path.name for path in run_dir.iterdir()] == ["metrics.jsonl"]
        assert read_lease(run_dir) is None


def test_a_killed_holder_of_this_host_is_gone_at_once(run_dir: Path, holder) -> None:
    with pytest.raises(LeaseHeld):
        Lease.acquire(run_dir, "x")
    holder.kill()  # not waited for: a process that has ended may stay in the table of processes
    deadline = time.monotonic() + 60
    while started_of(holder.pid) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    started = time.monotonic()
    with Lease.acquire(run_dir, "x"):
        assert time.monotonic() - started < 30, "not when its beat is old"
        refused = not read_lease(run_dir).is_alive()
    assert not refused


def test_a_process_that_got_the_number_of_the_holder_is_not_the_holder(run_dir: Path, holder) -> None:
    rewrite(run_dir, started=read_lease(run_dir).started - 1)
    assert not read_lease(run_dir).is_alive()
    Lease.acquire(run_dir, "x").release()


def test_a_stopped_holder_of_this_host_keeps_its_run(run_dir: Path, holder) -> None:
    """It goes on to write when it is continued, however old its beat is."""
    holder.send_signal(signal.SIGSTOP)
    old = time.time() - 1000
    os.utime(run_dir / LEASE, (old, old))
    with pytest.raises(LeaseHeld):
        Lease.acquire(run_dir, "x")
    holder.send_signal(signal.SIGCONT)


def test_the_same_number_in_another_container_is_another_process(run_dir: Path) -> None:
    """A container has its own table of processes, and may have the name of its host: only the beat counts."""
    elsewhere(run_dir, age_s=0, pids="of another container")
    assert read_lease(run_dir).is_alive()


# ------------------------------------------------------------------------------------------------------------- other hosts


@pytest.mark.parametrize(("age_s", "alive"), [(0, True), (50, True), (70, False)])
def test_a_holder_of_another_host_lives_as_long_as_it_beats(run_dir: Path, age_s: float, alive: bool) -> None:
    elsewhere(run_dir, age_s)
    assert read_lease(run_dir).is_alive() == alive
    if not alive:
        Lease.acquire(run_dir, "x").release()


def test_clocks_of_two_hosts_may_differ(run_dir: Path) -> None:
    """The record's own time is by the other host's clock; the age is that of the file."""
    elsewhere(run_dir, age_s=0, beat=5, since=5)
    assert read_lease(run_dir).is_alive()
    rewrite(run_dir, age_s=100, beat=int(time.time()) + 1000)
    assert not read_lease(run_dir).is_alive()


def test_a_holder_of_another_host_is_watched_until_it_beats_or_is_gone(run_dir: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(lease_record, "WATCH_S", 0.05)
    elsewhere(run_dir, age_s=58)
    started = time.monotonic()
    Lease.acquire(run_dir, "x").release()  # it does not beat any more
    assert time.monotonic() - started > 0.5
    assert capsys.readouterr().err.count("s for a sign of life of `megappo train far.yaml`") == 1
    elsewhere(run_dir, age_s=30)
    threading.Timer(0.3, lambda: rewrite(run_dir, beat=7)).start()
    with pytest.raises(LeaseHeld):
        Lease.acquire(run_dir, "x")


def test_slurm_has_ended_the_predecessor_of_a_requeued_job(run_dir: Path, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    elsewhere(run_dir, age_s=0)
    assert read_lease(run_dir).is_alive()  # another step of the same attempt
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    Lease.acquire(run_dir, "x").release()
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    elsewhere(run_dir, age_s=0, job="12")
    with pytest.raises(LeaseHeld, match="scancel 12"):
        refuse_if_held(run_dir)


# ------------------------------------------------------------------------------------------------------------------- races


def test_of_many_that_take_over_a_stale_lease_exactly_one_wins(run_dir: Path, monkeypatch) -> None:
    """All have judged the holder to be gone before the first of them acts."""
    judge = LeaseRecord.outlives_watch
    for number in range(10):
        elsewhere(run_dir, age_s=100)
        won, judged = [], threading.Barrier(8)

        def together(record: LeaseRecord, judged=judged) -> bool:
            lives = judge(record)
            if not lives:
                judged.wait(timeout=20)
            return lives

        def take(won=won) -> None:
            with contextlib.suppress(LeaseHeld):
                won.append(Lease.acquire(run_dir, "x"))

        monkeypatch.setattr(LeaseRecord, "outlives_watch", together)
        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        monkeypatch.setattr(LeaseRecord, "outlives_watch", judge)
        assert len(won) == 1, number
        assert read_lease(run_dir).id == won[0].id
        assert [path.name for path in run_dir.iterdir()] == [LEASE]
        won[0].release()


def test_a_process_that_died_while_it_took_over_stops_nobody(run_dir: Path) -> None:
    elsewhere(run_dir, age_s=100)
    (run_dir / f".{LEASE}.after-f00d").write_text((run_dir / LEASE).read_text().replace("f00d", "beef"))
    assert read_lease(run_dir).id == "beef" and read_lease(run_dir).is_alive()
    os.utime(run_dir / f".{LEASE}.after-f00d", (0, 0))
    with Lease.acquire(run_dir, "x") as mine:
        assert read_lease(run_dir).id == mine.id
        assert [path.name for path in run_dir.iterdir()] == [LEASE]


# -------------------------------------------------------------------------------------------------------------------- beat


def test_the_holder_beats_in_place(run_dir: Path, monkeypatch) -> None:
    with Lease.acquire(run_dir, "x") as mine:
        before, inode = read_lease(run_dir), (run_dir / LEASE).stat().st_ino
        monkeypatch.setattr(time, "time", lambda: before.beat + 7.5)
        mine.beat()
        after = read_lease(run_dir)
        assert after.beat == before.beat + 7 and after.id == before.id
        assert (run_dir / LEASE).stat().st_ino == inode and (run_dir / LEASE).stat().st_mtime > before.beat - 1


def test_a_holder_that_lost_its_lease_ends_at_once_and_says_to_whom(run_dir: Path) -> None:
    holder = start_holder(run_dir)
    rewrite(run_dir, id="f00d", command="megappo train thief.yaml")
    said = holder.communicate(timeout=60)[1]
    assert holder.returncode == UNRECOVERABLE
    assert said.count("\n") == 1 and "has lost the run to `megappo train thief.yaml`" in said
    assert read_lease(run_dir).id == "f00d"


def test_a_lease_that_was_removed_by_hand_is_made_again(run_dir: Path) -> None:
    with Lease.acquire(run_dir, "x") as mine:
        (run_dir / LEASE).unlink()
        mine.beat()
        assert read_lease(run_dir).id == mine.id


def test_a_full_disk_while_beating_is_a_warning_and_not_the_end(run_dir: Path, monkeypatch, caplog) -> None:
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "BEAT_S", 0.02)
    with Lease.acquire(run_dir, "x") as mine:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            time.sleep(0.3)
        assert read_lease(run_dir).id == mine.id
        os.utime(run_dir / LEASE, (0, 0))
        deadline = time.monotonic() + 60
        while (run_dir / LEASE).stat().st_mtime == 0:  # it goes on after the fault
            assert time.monotonic() < deadline
            time.sleep(0.02)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "cannot be renewed: [Errno 28] No space left on device" in warnings[0]


def test_only_ones_own_is_released(run_dir: Path) -> None:
    mine = Lease.acquire(run_dir, "x")
    rewrite(run_dir, id="f00d")
    mine.release()
    assert read_lease(run_dir).id == "f00d"


def test_a_forked_child_does_not_release_its_parents_lease(run_dir: Path) -> None:
    with Lease.acquire(run_dir, "x") as mine:
        child = os.fork()
        if child == 0:
            mine.release()
            os._exit(0)
        os.waitpid(child, 0)
        assert read_lease(run_dir).id == mine.id


# ----------------------------------------------------------------------------------------------------------- broken records


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"id": 1}', "[" * 100_000, '{"id": "../x", "pid": 1}'], ids=range(7))
def test_a_record_that_cannot_be_read_refuses_in_one_line(run_dir: Path, content: str) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / LEASE).write_text(content)
    with pytest.raises(ValueError, match="if no process writes to this run, remove the file") as refusal:
        Lease.acquire(run_dir, "x")
    assert "\n" not in str(refusal.value) and str(run_dir / LEASE) in str(refusal.value)
    assert (run_dir / LEASE).read_text() == content and len(list(run_dir.iterdir())) == 1


@pytest.mark.parametrize("change", [{"pid": "1"}, {"since": None}, {"id": "../x"}, {"id": ""}])
def test_fields_of_other_types_are_refused(run_dir: Path, change: dict) -> None:
    elsewhere(run_dir, age_s=100)
    rewrite(run_dir, 100, **change)
    with pytest.raises(ValueError, match="not a record of megappo"):
        read_lease(run_dir)


def test_a_record_that_is_a_directory_refuses_in_one_line(run_dir: Path) -> None:
    (run_dir / LEASE).mkdir(parents=True)
    with pytest.raises(ValueError, match="Is a directory; if no process"):
        Lease.acquire(run_dir, "x")


# ------------------------------------------------------------------------------------------------------------ who uses it


def test_a_run_directory_with_nothing_but_a_lease_is_free_for_a_new_run(run_dir: Path) -> None:
    run = RunConfig(name="run", output_dir=str(run_dir.parent))
    with Lease.acquire(run_dir, "x"):
        assert check_run_dir(run, resume=False) == run_dir
        with pytest.raises(ConfigError, match="no run to resume"):
            check_run_dir(run, resume=True)


def test_ranks_find_the_lease_of_their_launcher(run_dir: Path) -> None:
    with held_lease(run_dir, "megappo train x.yaml") as held:
        assert os.environ[LEASE_VARIABLE] == held.id and os.environ[LAUNCHER_VARIABLE] == str(os.getpid())
        with Lease.of_launcher(run_dir, held.id):
            pass  # a rank does not release it
        assert read_lease(run_dir).id == held.id
        refuse_if_held(run_dir)  # it is this process that has it
        with pytest.raises(LeaseHeld, match="has lost the run; `megappo train x.yaml`"):
            Lease.of_launcher(run_dir, "f00d")
    assert LEASE_VARIABLE not in os.environ and LAUNCHER_VARIABLE not in os.environ and not run_dir.exists()


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_train_refuses_a_run_in_use_before_any_rank_starts(
    tmp_path: Path, holder, run_dir: Path, monkeypatch, capsys, resume
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("megappo.commands.launch.local.start_ranks", lambda *_: pytest.fail("ranks were started"))
    if resume:
        (run_dir / "config.yaml").write_text("")
    assert cli.main(["train", str(write_run(tmp_path)), *resume]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{run_dir} is in use by `megappo train other.yaml`" in said


def test_launch_refuses_a_run_in_use_and_writes_nothing(tmp_path: Path, holder, run_dir: Path) -> None:
    config = load_config(write_run(tmp_path))
    with pytest.raises(LeaseHeld, match="in use by"):
        submit.record(config, run_dir)
    assert [path.name for path in run_dir.iterdir()] == [LEASE]


def test_a_directory_without_the_lease_is_not_tidied(tmp_path: Path) -> None:
    """A reader beside a run that writes; the holder of the lease knows that whoever wrote it is gone."""
    left = tmp_path / ".tmp-step-3.f00d"
    left.mkdir()
    CheckpointDirectory(tmp_path).remove_leftovers()
    assert left.is_dir()
    CheckpointDirectory(tmp_path, owner="a1b2").remove_leftovers()
    assert not left.exists()
