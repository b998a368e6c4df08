"""Starting ranks on this machine: exit codes, signals, and GPUs that are missing or unwanted."""

import os
import signal
import subprocess

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import SignalException

from megappo import cli
from megappo.config.checks import STOPPED
from megappo.launch.local import start_ranks
from megappo.platform.device import select_device
from tests.plan.checkpoints import write_run


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def raising(error):
    def run(arguments):
        raise error

    return run


@pytest.mark.parametrize("received, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_in_one_line(monkeypatch, capsys, received, code):
    monkeypatch.setattr("torch.distributed.run.run", raising(SignalException("got it", received)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert start_ranks(2, ["train"]) == code
    assert capsys.readouterr().err == f"megappo: ended by {received.name}\n"


def test_ranks_share_the_cores_that_this_process_may_use(monkeypatch):
    """On a shared node, Slurm gives a job some of the machine's."""
    monkeypatch.setattr("torch.distributed.run.run", lambda arguments: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 4, 5, 6})
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # so that what it was comes back
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert start_ranks(2, ["train"]) == 0 and os.environ["OMP_NUM_THREADS"] == "2"


def test_other_faults_of_the_launcher_are_not_swallowed(monkeypatch):
    monkeypatch.setattr("torch.distributed.run.run", raising(RuntimeError("out of ports")))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(RuntimeError, match="out of ports"):
        start_ranks(2, ["train"])


def test_more_ranks_than_gpus_are_refused_before_they_start(monkeypatch, two_gpus):
    monkeypatch.setattr("torch.distributed.run.run", raising(AssertionError("ranks were started")))
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


def test_a_request_to_stop_that_the_command_gets_is_handed_to_its_ranks(monkeypatch):
    """`kill -USR1` of `megappo train` itself; without that the signal would end it and leave the ranks."""
    rank = subprocess.Popen(["sleep", "30"], env=os.environ | {"TORCHELASTIC_RUN_ID": "x"})
    other = subprocess.Popen(["sleep", "30"])

    def run(arguments):
        os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr("torch.distributed.run.run", run)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = signal.getsignal(signal.SIGUSR1)
    assert start_ranks(2, ["train"]) == 0
    assert rank.wait(10) == -signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) == before
    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.parametrize("of_ranks, stops, code", [(0, True, 75), (0, False, 0), (1, True, 1)])
def test_the_command_says_that_a_run_was_stopped_and_can_be_resumed(tmp_path, monkeypatch, of_ranks, stops, code):
    for name in ("RANK", "WORLD_SIZE", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)

    def ranks(*_):
        (tmp_path / "runs" / "run").mkdir(parents=True)
        if stops:
            (tmp_path / "runs" / "run" / STOPPED).write_text("{}")
        return of_ranks

    monkeypatch.setattr("megappo.launch.local.start_ranks", ranks)
    assert cli.main(["train", str(write_run(tmp_path))]) == code
