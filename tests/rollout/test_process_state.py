"""Settings and CUDA streams that the trainer and an engine in its process use in turns.

Stand-in streams check order and waits on any machine; the last tests run where torch sees a CUDA device.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megappo.rollout import vllm_process
from megappo.rollout.vllm_process import EngineState

CUDA = torch.device("cuda", 1)


class FakeCuda:
    """Streams of torch.cuda that only log; the current one is a property of the process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.current, self.device, made = self.stream("trainer"), 1, iter("abc")
        monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: self.stream(f"own {next(made)}"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", self.set_stream)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.device)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(self, "device", device))

    def stream(self, name: str) -> Any:
        log = self.log

        class Stream:
            def wait_stream(self, other: Any) -> None:
                log.append(f"{name} waits for {other.name}")

        Stream.name = name
        return Stream()

    def set_stream(self, stream: Any) -> None:
        self.log.append(f"set {stream.name}")
        self.current = stream


@pytest.fixture
def cuda(monkeypatch) -> Iterator[FakeCuda]:
    yield FakeCuda(monkeypatch)


FIRST = ["own a waits for trainer", "set own a"]


@pytest.mark.parametrize("fails", [False, True])
def test_each_side_waits_for_the_other_and_the_callers_stream_comes_back(cuda, fails):
    own, trainer = EngineState(CUDA), cuda.current
    try:
        with own.installed():
            cuda.log.append("generate")
            cuda.device = 0
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert cuda.log == [*FIRST, "generate", "trainer waits for own a", "set trainer"]
    assert cuda.current is trainer and cuda.device == 1


def test_the_stream_that_an_engine_moved_to_is_waited_for_and_comes_back_for_it(cuda):
    own = EngineState(CUDA)
    with own.installed():
        torch.cuda.set_stream(torch.cuda.Stream())  # vLLM does so when its first communicator or graph asks for a stream
    with own.installed():
        cuda.log.append("generate")
    assert cuda.log == [
        *FIRST,
        "set own b",
        "trainer waits for own b",
        "set trainer",
        "own b waits for trainer",
        "set own b",
        "generate",
        "trainer waits for own b",
        "set trainer",
    ]


def test_a_replaced_set_stream_is_told_of_both_changes(cuda, monkeypatch):
    """vLLM replaces it during its import, within the first call, and believes what it was told last."""
    own, told = EngineState(CUDA), []
    with own.installed():
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: (told.append(stream.name), cuda.set_stream(stream)))
    with own.installed():
        assert told == ["trainer", "own a"]
    assert told == ["trainer", "own a", "trainer"]


def test_settings_of_an_engine_are_there_for_it_alone():
    own, before = EngineState(torch.device("cpu")), torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), own.installed():
        torch.set_num_threads(before + 3)
        torch.set_float32_matmul_precision("medium")
        torch.set_default_dtype(torch.bfloat16)
        1 / 0
    settings = (torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.get_default_dtype())
    assert settings == (before, "highest", torch.float32)
    with own.installed():
        settings = (torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.get_default_dtype())
        assert settings == (before + 3, "medium", torch.bfloat16)
    assert torch.get_num_threads() == before


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device (a GPU, or tests/host_cuda)")


@needs_cuda
@pytest.mark.parametrize("fails", [False, True])
def test_on_a_cuda_device_the_stream_comes_back(fails):
    device = torch.device("cuda", 0)
    own, caller = EngineState(device), torch.cuda.Stream(device)
    with torch.cuda.stream(caller):
        for _ in range(2):
            try:
                with own.installed():
                    moved = torch.cuda.Stream(device)
                    assert torch.cuda.current_stream(device) not in (caller, moved)
                    torch.cuda.set_stream(moved)
                    if fails:
                        raise RuntimeError
            except RuntimeError:
                assert fails
            assert torch.cuda.current_stream(device) == caller
            with own.installed():
                assert torch.cuda.current_stream(device) == moved


@needs_cuda
def test_on_a_cuda_device_neither_side_reads_what_the_other_has_not_finished():
    """Long work before a short one: without the waits the short one would read old values."""
    device = torch.device("cuda", 0)
    own, size = EngineState(device), 512
    matrix, identity = torch.zeros(size, size, device=device), torch.eye(size, device=device)

    def long_work(value: float) -> torch.Tensor:
        result = torch.full((size, size), value, device=device)
        for _ in range(200):
            result = result @ identity
        return result

    for step in (1.0, 2.0):
        matrix.copy_(long_work(step))  # the push
        with own.installed():
            answer = matrix[0, :8].clone()
            matrix.copy_(long_work(-step))
        assert answer.tolist() == [step] * 8
        assert matrix[0, :8].clone().tolist() == [-step] * 8


def test_what_is_imported_stays_out_of_collections_while_vllm_runs() -> None:
    """vLLM thaws the heap where an engine is closed."""
    thaw = gc.unfreeze
    with vllm_process._imports_frozen():
        frozen = gc.get_freeze_count()
        gc.unfreeze()
        assert gc.get_freeze_count() > 0.9 * frozen > 0, "a few of them may have died since"
    assert gc.unfreeze is thaw, "the caller's own calls thaw"
