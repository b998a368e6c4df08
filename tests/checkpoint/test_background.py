"""The writer process of one rank: it writes what it is given, outlives requests to stop, and does not outlive its rank."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from megappo.checkpoint.background import NICE, BackgroundWriter, SnapshotFile
from megappo.checkpoint.image import FileImage, SharedBuffer
from megappo.checkpoint.manifest import fingerprint_file
from megappo.checkpoint.store import PendingSave
from megappo.runtime import helper_process as helpers

CPU = torch.device("cpu")
TENSOR = torch.arange(200_000, dtype=torch.float32)


@pytest.fixture
def writer():
    one = BackgroundWriter()
    yield one
    one.close()


def snapshot():
    images = [FileImage("a", [b"head", TENSOR, b"tail"]), FileImage("b", [])]
    buffer = SharedBuffer(sum(image.nbytes for image in images), CPU)
    buffer.copy_of(images)()
    starts = accumulate((image.nbytes for image in images), initial=0)
    return [SnapshotFile(image.name, buffer, at, image.nbytes) for image, at in zip(images, starts)]


def test_the_files_are_those_of_the_snapshot(writer, tmp_path):
    writer.start()
    writer.submit(tmp_path, snapshot())
    entries = writer.result()
    assert (tmp_path / "a").read_bytes() == b"head" + TENSOR.numpy().tobytes() + b"tail"
    assert (tmp_path / "b").read_bytes() == b""
    assert entries == {name: fingerprint_file(tmp_path / name) for name in ("a", "b")}
    assert writer.is_done()


def test_a_rank_that_does_not_see_the_directory_says_so(writer, tmp_path):
    writer.start()
    copied: Future[None] = Future()
    copied.set_result(None)
    for place, fault, text in (
        (tmp_path / "absent", ValueError, "absent, created by rank 0, is not visible here"),
        (tmp_path, OSError, "x/a"),
    ):
        writer.submit(place, [file._replace(name=f"x/{file.name}") for file in snapshot()])
        with pytest.raises(fault, match=text):
            PendingSave(1, place, {}, writer, copied).entries()


def test_requests_to_stop_do_not_reach_it(writer, tmp_path):
    """From its first moment on."""
    writer.start()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(writer.pid, number)
    writer.submit(tmp_path, snapshot())
    assert set(writer.result()) == {"a", "b"}
    os.kill(writer.pid, signal.SIGTERM)
    (tmp_path / "again").mkdir()
    writer.submit(tmp_path / "again", snapshot())
    assert set(writer.result()) == {"a", "b"}


def test_without_the_block_a_request_to_stop_ends_it(writer, tmp_path, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(helpers, "STOP_SIGNALS", set())
    writer.start()
    os.kill(writer.pid, signal.SIGTERM)
    writer.submit(tmp_path, snapshot())
    with pytest.raises(OSError, match="SIGTERM"):
        writer.result()


def test_the_mask_of_the_rank_stays_as_it_was(writer):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    writer.start()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize("when", ["before the job", "during it"])
def test_a_killed_writer_is_an_error_and_is_replaced(writer, tmp_path, when):
    writer.start()
    first = writer.pid
    if when == "before the job":
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        writer.submit(tmp_path, snapshot())
    else:
        os.kill(first, signal.SIGSTOP)
        writer.submit(tmp_path, snapshot())
        assert not writer.is_done(0.05)
        os.kill(first, signal.SIGKILL)
    with pytest.raises(OSError, match=r"the writer process was ended by SIGKILL"):
        writer.result()
    assert writer.is_done()
    writer.start()
    assert writer.pid != first
    (tmp_path / "again").mkdir()
    writer.submit(tmp_path / "again", snapshot())
    assert set(writer.result()) == {"a", "b"}


def test_a_full_disk_is_the_error_of_the_file_and_the_process_goes_on(writer, tmp_path):
    writer.start()
    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    writer.submit(tmp_path, snapshot())
    with pytest.raises(OSError, match=f"File too large: '{tmp_path}/a'"):
        writer.result()
    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (tmp_path / "again").mkdir()
    writer.submit(tmp_path / "again", snapshot())
    assert set(writer.result()) == {"a", "b"}


RANK = """
import time
from megappo.checkpoint import background
writer = background.BackgroundWriter()
writer.start()
print(writer.pid, flush=True)
time.sleep(60)
"""


def test_it_ends_with_its_rank(tmp_path):
    """Killed, so that nothing of the rank runs any more. The writer is stopped, so that it does not see its socket close."""
    rank = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True)
    pid = int(rank.stdout.readline())
    lowered = min(19, os.getpriority(os.PRIO_PROCESS, rank.pid) + NICE)
    while os.getpriority(os.PRIO_PROCESS, pid) < lowered:  # which it does once it has asked the kernel to be ended
        time.sleep(0.01)
    os.kill(pid, signal.SIGSTOP)
    rank.kill()
    rank.wait()
    deadline = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline, "the writer outlives its rank"
        time.sleep(0.01)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_writer_brings_no_torch():
    code = "import sys, megappo.checkpoint.background; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_snapshot_does_not_follow_the_tensors(tmp_path, writer):
    values = torch.zeros(1000)
    buffer = SharedBuffer(4000, CPU)
    buffer.copy_of([FileImage("a", [values])])()
    values.fill_(1)
    writer.start()
    writer.submit(tmp_path, [SnapshotFile("a", buffer, 0, 4000)])
    writer.result()
    assert (tmp_path / "a").read_bytes() == bytes(4000)


def test_a_buffer_leaves_no_name_behind():
    before = set(os.listdir("/dev/shm"))
    buffer = SharedBuffer(1 << 20, CPU)
    assert set(os.listdir("/dev/shm")) <= before
    descriptor = buffer.descriptor
    del buffer
    with pytest.raises(OSError):
        os.fstat(descriptor)
