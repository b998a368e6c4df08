"""The kernels of a run: checked before the first model where they run on a GPU, the same on all ranks, said once for all ops."""

import logging
from types import SimpleNamespace

import pytest
import torch

from megappo.ops import dispatch, verdicts
from megappo.trainer import kernel_selection
from tests.worlds import spawn_world

HOST_OPS = ("token_advantages", "whiten_apply")


@pytest.fixture(autouse=True)
def automatic():
    with dispatch.using("auto"):
        yield


@pytest.fixture
def notes(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(dispatch.ORDER, "cuda", ("triton", "reference"))  # whatever this installation was built with
    monkeypatch.setattr(verdicts, "_device_name", lambda device: "a GPU")
    return []


def select(name, kind, notes):
    kernel_selection.select_kernels(name, torch.device(kind), SimpleNamespace(note=notes.append), HOST_OPS)


@pytest.mark.parametrize("name, kind, checked", [("auto", "cpu", False), ("triton", "cuda", True), ("reference", "cuda", False)])
def test_a_run_checks_the_kernels_of_a_gpu(monkeypatch, notes, name, kind, checked):
    asked = []
    monkeypatch.setattr(verdicts, "_find", lambda kernels, device, *others: asked.append((kernels, device)) or {})
    select(name, kind, notes)
    assert asked == ([(name, torch.device(kind))] if checked else [])


def test_a_run_on_a_gpu_says_what_runs_there_and_what_on_the_host(monkeypatch, notes):
    monkeypatch.setattr(verdicts, "_find", lambda *of: {})
    select("triton", "cuda", notes)
    on_gpu, on_host = notes
    assert on_gpu.startswith("kernels on cuda: gemm + triton: linear_backward; triton: linear_stats, policy_loss, ")
    assert not any(op in on_gpu for op in HOST_OPS)
    assert on_host == "kernels on cpu: cpp: token_advantages, whiten_apply"


def test_a_run_on_the_cpu_says_it_in_one_line(notes):
    select("auto", "cpu", notes)
    (line,) = notes
    assert line.startswith("kernels on cpu: ") and "; cpp: policy_loss, token_advantages, " in line


def test_auto_says_why_it_does_not_take_the_best(monkeypatch, notes):
    monkeypatch.setattr(verdicts, "_find", lambda *of: {})
    monkeypatch.setitem(dispatch.ORDER, "cuda", ("cuda", "triton", "reference"))
    monkeypatch.setattr(dispatch, "missing", lambda name, kind: "there is no nvcc" if name == "cuda" else None)
    select("auto", "cuda", notes)
    assert "triton: linear_stats, policy_loss, " in notes[0]
    assert notes[2] == "kernels left out: there is no nvcc"


def test_a_kernel_that_fails_is_left_out_loudly(monkeypatch, notes, caplog):
    fault = {("policy_loss", "triton"): "died of SIGSEGV"}
    monkeypatch.setattr(verdicts, "_find", lambda name, device, chosen, faults, module: fault)
    with caplog.at_level(logging.WARNING):
        select("auto", "cuda", notes)
    assert "reference: policy_loss" in notes[0]
    assert "kernels left out: policy_loss (triton) died of SIGSEGV" in notes
    (record,) = caplog.records
    assert "kernels: policy_loss (triton) died of SIGSEGV; it is left out" in record.getMessage()


def test_a_named_kernel_that_fails_ends_the_run(monkeypatch, notes):
    monkeypatch.setattr(verdicts, "_find", lambda *of: {("policy_loss", "triton"): "died of SIGSEGV"})
    with pytest.raises(ValueError, match="^kernels = triton: policy_loss died of SIGSEGV; use kernels=auto$"):
        select("triton", "cuda", notes)
    assert not notes


def test_what_one_rank_cannot_run_no_rank_runs():
    first = {"value_loss": "cuda", "policy_loss": "cuda", "linear_backward": "gemm + cuda", "vocab_stats": "triton"}
    second = {"value_loss": "cuda", "policy_loss": "triton", "linear_backward": "gemm + triton", "vocab_stats": "reference"}
    assert kernel_selection.disagreements([first, first]) == {}
    said = "cannot run on rank 1, which takes "
    assert kernel_selection.disagreements([first, second]) == {
        ("policy_loss", "cuda"): f"{said}triton",
        ("vocab_stats", "triton"): f"{said}reference",
    }
    hopper, other = {"linear_stats": "cuda"}, {"linear_stats": "gemm + cuda"}
    assert kernel_selection.disagreements([other, hopper]) == {
        ("linear_stats", "cuda"): "cannot run on rank 0, which takes gemm + cuda"
    }


def choose_with_a_fault_on_one_node(rank):
    """Two nodes of two ranks: which ranks look, what each rank ends with. The second node's Triton is wrong in policy_loss."""
    looked = []

    def find(name, device, chosen, faults, module):
        looked.append(chosen["policy_loss"])
        wrong = rank >= 2 and chosen["policy_loss"] == "triton"
        return {("policy_loss", "triton"): "died of SIGSEGV"} if wrong else {}

    dispatch.ORDER["cuda"] = ("triton", "reference")
    kernel_selection.platform.node = lambda: f"node-{rank // 2}"
    verdicts._find = find
    verdicts.fingerprint = lambda device: "the same"
    kernel_selection._POLL_S = 0.05
    faults = kernel_selection.choose_kernels("auto", torch.device("cuda"))
    chosen = dispatch.selected("cuda")
    return looked, faults, chosen["policy_loss"], chosen["value_loss"]


def test_one_rank_of_a_node_looks_and_all_ranks_of_the_world_choose_the_same():
    ranks = spawn_world(choose_with_a_fault_on_one_node, 4)
    looked = [of[0] for of in ranks]
    # in the second round the first node looks at what it takes now, too
    assert looked == [["triton", "reference"], [], ["triton", "reference"], []]
    assert {of[2:] for of in ranks} == {("reference", "triton")}
    assert all(of[1] == {("policy_loss", "triton"): "died of SIGSEGV"} for of in ranks)


def fail_on_one_rank(rank):
    kernel_selection.platform.node = lambda: f"node-{rank}"
    verdicts.fingerprint = lambda device: "the same"

    def find(*of):
        if rank == 1:
            raise RuntimeError("kernels: their check failed: OutOfMemoryError")
        return {}

    verdicts._find = find
    with pytest.raises(RuntimeError, match="checking the kernels failed on 1 of 2 ranks; rank 1: .*OutOfMemoryError"):
        kernel_selection.choose_kernels("auto", torch.device("cuda"))
    return True


def test_a_check_that_cannot_be_done_ends_all_ranks():
    assert spawn_world(fail_on_one_rank, 2) == [True, True]
