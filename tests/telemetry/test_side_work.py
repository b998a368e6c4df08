"""Full disks, read-only folders, dead writers and closed consoles cost records and never the run (RELIABILITY.md, F17)."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megappo.telemetry.jsonl import MetricsFile, read_lines, replace_file
from megappo.telemetry.metrics import Metric
from megappo.telemetry.runlog import RunLog
from megappo.telemetry.side_work import SideWork
from megappo.telemetry.trackers.tensorboard import TensorBoard
from tests.telemetry.test_runlog import lines, metrics

LOST = Metric.LOST_RECORDS.value


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file of this process can grow beyond `size` bytes: write() takes what fits, then fails with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def a_log(root: Path, **options) -> RunLog:
    return RunLog(root, **{"stream": io.StringIO(), **options})


def a_board(root: Path) -> dict[str, TensorBoard]:
    return {"tensorboard": TensorBoard(root / "tensorboard")}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "a record is lost" in record.getMessage()]


def test_a_full_disk_costs_its_records_and_leaves_no_half_line(tmp_path: Path, caplog) -> None:
    log, file = a_log(tmp_path), tmp_path / "metrics.jsonl"
    for step in range(1, 7):
        full = step in (3, 4)
        with room_for(file.stat().st_size + 20) if full else contextlib.nullcontext():
            log.step({"reward/score_mean": step / 10}, step, 6)
            log.trajectories(step, [{"response": "x" * 10_000}])
    log.close()
    assert [(r["step"], r[LOST]) for r in lines(tmp_path)] == [(1, 0), (2, 0), (5, 4), (6, 4)]
    assert sorted(path.name for path in (tmp_path / "trajectories").iterdir()) == [f"step_00000{n}.jsonl" for n in (1, 2, 5, 6)]
    assert [text.split(":")[0] for text in warnings(caplog)] == ["metrics.jsonl", "trajectories"]
    assert "File too large" in warnings(caplog)[0] and "telemetry/lost_records" in warnings(caplog)[0]
    assert caplog.records[-1].getMessage() == "4 records were lost: 2 of metrics.jsonl, 2 of trajectories"


def test_a_disk_that_refuses_to_cut_is_cut_before_the_next_record(tmp_path: Path, monkeypatch) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append({"step": 1})

    def refuse(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken, room_for(file.path.stat().st_size + 5), pytest.raises(OSError, match="too large"):
        broken.setattr(os, "ftruncate", refuse)
        file.append({"step": 2})
    assert file.path.read_bytes() == b'{"step": 1}\n{"ste'
    assert read_lines(file.path) == [{"step": 1}], "readers leave the torn line out"
    file.append({"step": 3})
    assert file.path.read_bytes() == b'{"step": 1}\n{"step": 3}\n'


def test_no_space_at_all_is_survived(tmp_path: Path, caplog) -> None:
    """/dev/full answers every write with ENOSPC."""
    (tmp_path / "learning_curve.svg.partial").symlink_to("/dev/full")
    console = io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True)
    log = a_log(tmp_path, stream=console)
    log.note("a line")
    for step in (1, 2):
        log.step(metrics(step), step, 2)
    log.close()
    assert [text.split(":")[0] for text in warnings(caplog)] == ["console", "learning_curve.svg"]
    assert all("No space left on device" in text for text in warnings(caplog))


def scalar_steps(root: Path) -> list[int]:
    """Steps of a scalar over all event files, each read alone: within a second their names may not sort by age."""
    steps = []
    for file in (root / "tensorboard").iterdir():
        accumulator = EventAccumulator(str(file)).Reload()
        if accumulator.Tags()["scalars"]:
            steps += [event.step for event in accumulator.Scalars("reward/score_mean")]
    return sorted(steps)


def fail(*_args, **_options):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_goes_on_in_a_new_file_after_the_death_of_its_writer(tmp_path: Path, caplog) -> None:
    boards = a_board(tmp_path)
    log = a_log(tmp_path, trackers=boards)
    log.resume_after(0)
    log.step(metrics(1), 1, 4)
    board = boards["tensorboard"]
    assert board._writer is not None
    writer = board._writer._get_file_writer().event_writer._async_writer
    writer._writer.write = fail  # in its thread, which ends
    for step in (2, 3, 4):
        log.step(metrics(step), step, 4)
    log.close()
    writer._worker.join(20)  # it has failed, and may not have ended yet
    assert not writer._worker.is_alive()
    assert scalar_steps(tmp_path) == [1, 3, 4]
    assert [r["step"] for r in lines(tmp_path)] == [1, 2, 3, 4] and lines(tmp_path)[-1][LOST] == 1
    assert len(warnings(caplog)) == 1 and "tensorboard: a record is lost ([Errno 5] Input/output error)" in warnings(caplog)[0]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_a_full_disk_is_not_filled_with_empty_event_files(tmp_path: Path) -> None:
    log = a_log(tmp_path, trackers=a_board(tmp_path))
    with room_for(10):
        for step in (1, 2, 3):
            log.step(metrics(step), step, 4)
    assert not list((tmp_path / "tensorboard").iterdir())
    log.step(metrics(4), 4, 4)
    log.close()
    assert scalar_steps(tmp_path) == [4]


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard", "trajectories", "learning_curve.svg"])
def test_what_cannot_be_written_is_lost_alone(tmp_path: Path, caplog, name: str) -> None:
    """A folder in place of a file, a file in place of a folder: as root, permissions stop nothing."""
    (tmp_path / name).mkdir() if "." in name else (tmp_path / name).write_text("not a folder")
    stream = io.StringIO()
    log = a_log(tmp_path, trackers=a_board(tmp_path), stream=stream)
    for step in (1, 2):
        log.step(metrics(step), step, 2)
        log.trajectories(step, [{"response": "1"}])
    log.close()
    lost = {text.split(":")[0] for text in warnings(caplog)}
    # The curve is drawn from the records.
    assert lost == ({name, "learning_curve.svg"} if name == "metrics.jsonl" else {name})
    assert len(stream.getvalue().splitlines()) == 3
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"metrics.jsonl", "tensorboard", "trajectories", "learning_curve.svg"} - (lost - {name})


class Gone(io.StringIO):
    """A pipe whose reader has exited."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def test_a_console_that_is_gone_is_not_missed(tmp_path: Path, caplog) -> None:
    log = a_log(tmp_path, stream=Gone())
    log.note("layers: local")
    for step in (1, 2):
        log.step(metrics(step), step, 2)
    log.close()
    assert [r[LOST] for r in lines(tmp_path)] == [1, 2] and len(warnings(caplog)) == 1
    assert warnings(caplog)[0].startswith("console: a record is lost ([Errno 32] Broken pipe)")


def test_half_a_surrogate_pair_is_written_as_its_escape(tmp_path: Path, caplog) -> None:
    log = a_log(tmp_path)
    row = {"response": "a\ud83d and \udca9 é ✓ \\ud800", "answer": "\ud800"}
    log.trajectories(1, [row])
    log.step({"reward/\udc80": 1.0}, 1, 1)
    log.close()
    file = tmp_path / "trajectories" / "step_000001.jsonl"
    assert read_lines(file) == [{"step": 1, **row}] and not warnings(caplog)
    assert "é ✓" in file.read_text("utf-8") and "reward/\udc80" in lines(tmp_path)[0]


def test_a_resume_over_a_damaged_log_goes_on_and_leaves_the_log_alone(tmp_path: Path, caplog) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\noops\n{"step": 3}\n')
    log = a_log(tmp_path)
    log.resume_after(2)
    log.step({}, 3, 3)
    assert file.read_text().startswith('{"step": 1}\noops\n{"step": 3}\n{"step": 3, ')
    assert "line 2: not JSON" in warnings(caplog)[0]


def test_a_replaced_file_is_whole_or_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "learning_curve.svg"
    replace_file(path, b"old")
    with room_for(100), pytest.raises(OSError, match="too large"):
        replace_file(path, b"x" * 1000)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_mistake_of_ours_keeps_its_traceback(caplog) -> None:
    side_work = SideWork()
    assert side_work.run("curve", lambda: None) and not side_work.summary()
    assert not side_work.run("curve", lambda: json.dumps(object())) and not side_work.run("log", fail)
    assert [record.exc_info is not None for record in caplog.records] == [True, False]
    assert side_work.num_lost == 2 and side_work.summary() == "2 records were lost: 1 of curve, 1 of log"


def test_what_ends_a_process_still_ends_it() -> None:
    for error in (KeyboardInterrupt, SystemExit):

        def end(error=error):
            raise error

        with pytest.raises(error):
            SideWork().run("curve", end)
