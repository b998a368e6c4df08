"""The kernels of a run: checked before the first model where they run on a GPU, the same on all ranks, said once for all ops."""

import logging
from types import SimpleNamespace

import pytest
import torch

from megappo.ops import dispatch, selfcheck
from megappo.trainer import kernel_selection
from tests.worlds import spawn_world


@pytest.fixture(autouse=True)
def automatic():
    with dispatch.using("auto"):
        yield


@pytest.fixture
def notes(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(dispatch.ORDER, "cuda", ("triton", "reference"))  # whatever this installation was built with
    return []


@pytest.fixture
def checked(monkeypatch):
    """Devices whose kernels were checked."""
    devices = []
    monkeypatch.setattr(kernel_selection, "require_right", devices.append)
    return devices


def select(name, kind, notes):
    kernel_selection.select_kernels(name, torch.device(kind), SimpleNamespace(note=notes.append))


@pytest.mark.parametrize("name, kind, wanted", [("auto", "cpu", False), ("triton", "cuda", True), ("reference", "cuda", False)])
def test_a_run_checks_the_kernels_of_a_gpu(notes, checked, name, kind, wanted):
    select(name, kind, notes)
    assert checked == ([torch.device(kind)] if wanted else [])


def test_a_run_on_a_gpu_says_what_runs_there(notes, checked):
    select("triton", "cuda", notes)
    (line,) = notes
    kernels = "triton: linear_stats, policy_loss, token_advantages, "
    assert line.startswith(f"kernels on cuda: gemm + triton: linear_backward, linear_dlogits; {kernels}")


def test_a_run_on_the_cpu_says_it_in_one_line(notes):
    select("auto", "cpu", notes)
    (line,) = notes
    assert line.startswith("kernels on cpu: ") and "; cpp: policy_loss, token_advantages, " in line


def test_auto_says_why_it_does_not_take_the_best(monkeypatch, notes, checked):
    monkeypatch.setitem(dispatch.ORDER, "cuda", ("cuda", "triton", "reference"))
    monkeypatch.setattr(dispatch, "missing", lambda name, kind: "there is no nvcc" if name == "cuda" else None)
    select("auto", "cuda", notes)
    assert "triton: linear_stats, policy_loss, " in notes[0]
    assert notes[1] == "kernels left out: there is no nvcc"


def test_a_kernel_that_fails_its_check_ends_the_run_after_a_line_that_names_the_way_out(monkeypatch, notes, caplog):
    wrong = selfcheck.Finding("policy_loss", "loss", {"policy_loss": "triton"}, 0.5, 1e-5, ())
    monkeypatch.setattr(selfcheck, "run_checks", lambda device: [wrong])
    with caplog.at_level(logging.INFO, "megappo"), pytest.raises(ValueError, match="kernels=reference, and report this$"):
        select("auto", "cuda", notes)
    # all that a kernel which crashes the process leaves behind
    assert caplog.messages[-1].startswith("checking the kernels on cuda;") and caplog.messages[-1].endswith("kernels=reference")
    assert not notes


def test_ranks_that_would_take_different_kernels_are_refused():
    first = {"value_loss": "cuda", "policy_loss": "cuda"}
    kernel_selection.require_same([first, dict(first)])
    with pytest.raises(ValueError, match="rank 1 takes triton for policy_loss, and rank 0 cuda; .*kernels=reference"):
        kernel_selection.require_same([first, first | {"policy_loss": "triton"}])


def fail_on_one_rank(rank):
    def check(device):
        if rank == 1:
            raise ValueError("kernels: policy_loss (triton) failed; use kernels=reference, and report this")

    dispatch.ORDER["cuda"] = ("triton", "reference")
    kernel_selection.require_right = check
    with pytest.raises(ValueError, match="^kernels: policy_loss .triton. failed; use kernels=reference"):
        kernel_selection.choose_kernels("auto", torch.device("cuda"))
    return True


def test_a_check_that_fails_on_one_rank_ends_all_ranks():
    assert spawn_world(fail_on_one_rank, 2) == [True, True]
