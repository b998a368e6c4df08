"""The check in another process: whatever a kernel does there, it alone is left out here, and its verdict is remembered."""

import json
import os
import re

import pytest
import torch

from megappo.ops import dispatch, selfcheck, trial, verdicts
from megappo.ops.trial import Trial, run_trial
from megappo.ops.verdicts import Verdicts, cache_file, select_checked

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    """A memory of this test's own, and nothing selected or left out after it."""
    monkeypatch.setenv("MEGAPPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH")))))
    with dispatch.using("auto"):
        yield


def with_faults(monkeypatch, faults, **settings):
    monkeypatch.setenv("TEST_FAULTS", faults)
    return lambda kernels: select_checked(kernels, CPU, module="tests.ops.faulty_trial", **settings)


def no_process(*args, **kwargs):
    raise AssertionError("a process was started for what is known")


def test_each_kind_of_fault_costs_the_one_kernel_that_has_it(monkeypatch):
    """Five processes: one in which a kernel does not return is the last of them for that kernel."""
    before = dispatch.selected("cpu")
    monkeypatch.setenv("MEGAPPO_KERNEL_CHECK_S", "6")
    run = with_faults(
        monkeypatch,
        "vocab_stats_merge cpp differs, vocab_logits_backward_ cpp spoils_in_place, whiten_apply cpp leaves,"
        "policy_loss cpp hangs, value_loss cpp aborts, token_advantages cpp segfaults",
    )
    faults = run("auto")
    assert {op: fault.partition(" (")[0].partition(" by ")[0] for (op, implementation), fault in faults.items()} == {
        "vocab_stats_merge": "differs from its reference",
        "vocab_logits_backward_": "differs from its reference",
        "token_advantages": "died of SIGSEGV",
        "whiten_apply": "failed: RuntimeError: CUDA error: an illegal memory access was encountered",
        "policy_loss": "did not come back within 6 s",
        "value_loss": "died of SIGABRT",
    }
    after = dispatch.selected("cpu")
    bad = {op for op, _ in faults}
    assert {op for op in before if after[op] != before[op]} == bad
    assert {after[op] for op in bad} == {"reference"}

    # the next start of a rank knows
    monkeypatch.setattr(verdicts, "run_trial", no_process)
    dispatch.leave_out({})
    assert run("auto") == faults and dispatch.selected("cpu") == after


def test_sound_kernels_are_remembered_for_what_uses_them(monkeypatch):
    run = with_faults(monkeypatch, "none none none")
    assert run("auto") == {}
    monkeypatch.setattr(verdicts, "run_trial", no_process)
    assert run("auto") == {} and run("cpp") == {}
    # a library of another build is another one
    monkeypatch.setattr(verdicts, "fingerprint", lambda device: "another")
    with pytest.raises(AssertionError, match="a process was started"):
        run("auto")


def test_a_check_of_something_else_than_the_run_would_run_says_nothing(monkeypatch):
    """As on a device that hands its tensors to ops as those of another kind."""
    monkeypatch.setenv("TEST_ORDER", "reference")
    with pytest.raises(RuntimeError, match="^kernels: their check ran [a-z_]+ by reference, and the run would by "):
        with_faults(monkeypatch, "none none none")("auto")
    assert not cache_file(CPU).exists()


def test_a_named_kernel_that_fails_is_an_error_of_one_line(monkeypatch):
    run = with_faults(monkeypatch, "policy_loss cpp differs, value_loss cpp differs")
    with pytest.raises(ValueError) as raised:
        run("cpp")
    assert re.fullmatch(
        r"kernels = cpp: policy_loss differs from its reference by \S+, not \S+, in gradient of policy_loss at \[1500\]; "
        r"use kernels=auto",
        str(raised.value),
    )


def test_the_next_in_order_takes_over_and_is_checked_itself(monkeypatch):
    monkeypatch.setitem(dispatch.ORDER, "cpu", ("cpp", "triton", "reference"))
    monkeypatch.setenv("TEST_ORDER", "cpp triton reference")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run = with_faults(monkeypatch, "policy_loss cpp aborts, value_loss cpp aborts, value_loss triton differs")
    faults = run("auto")
    assert sorted(faults) == [("policy_loss", "cpp"), ("value_loss", "cpp"), ("value_loss", "triton")]
    chosen = dispatch.selected("cpu")
    assert (chosen["policy_loss"], chosen["value_loss"], chosen["whiten_apply"]) == ("triton", "reference", "cpp")


@pytest.mark.parametrize(
    "faults, said",
    [
        ("policy_loss cpp raises", "failed: OutOfMemoryError: CUDA out of memory in policy_loss (cpp)"),
    ],
)
def test_what_is_no_kernels_fault_ends_the_check_and_is_not_remembered(monkeypatch, faults, said):
    with pytest.raises(RuntimeError) as raised:
        with_faults(monkeypatch, faults)("auto")
    line = str(raised.value)
    assert said in line and "use kernels=reference" in line and "\n" not in line
    assert not cache_file(CPU).exists()


def test_a_process_that_cannot_start_is_no_kernels_fault():
    with pytest.raises(RuntimeError, match=r"check failed: .*No module named tests.ops.no_such.* no kernel's fault"):
        run_trial(CPU, "auto", {}, [0], module="tests.ops.no_such")


def test_an_end_from_outside_is_no_kernels_fault():
    running = [{"started": True}, {"begin": ["whiten_apply", "cuda"]}]
    killed = trial._early_end(-9, True, 300, running, "")
    with pytest.raises(RuntimeError, match="SIGKILL in whiten_apply"):
        trial._read(running, killed)
    # nor is what happens in a product of matrices, which no setting of ours replaces
    hung = trial._early_end(-9, False, 300, running, "")
    assert trial._read(running, hung).faults == {("whiten_apply", "cuda"): "did not come back within 300 s"}
    with pytest.raises(RuntimeError, match="did not come back within 300 s in linear_backward"):
        trial._read([{"begin": ["linear_backward", "gemm + cuda"]}], hung)


@pytest.mark.parametrize("text", ["0", "-3", "soon", "nan"])
def test_a_time_limit_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("MEGAPPO_KERNEL_CHECK_S", text)
    with pytest.raises(ValueError, match=f"^MEGAPPO_KERNEL_CHECK_S = {text}: use a number of seconds above 0, like 300$"):
        trial.time_limit()


def test_a_problem_is_known_for_the_kernels_that_ran_in_it(tmp_path):
    known = Verdicts(tmp_path / "file", [(0, {"whiten_apply": "cuda"}), (1, {"whiten_apply": "cuda", "policy_loss": "triton"})], {})
    assert known.unknown({"whiten_apply": "cuda", "policy_loss": "triton"}, 3) == [2]
    assert known.unknown({"whiten_apply": "cuda", "policy_loss": "cuda"}, 3) == [1, 2]
    assert known.unknown({"whiten_apply": "triton", "policy_loss": "triton"}, 2) == [0, 1]


def test_the_file_keeps_what_others_wrote_and_is_whole_at_any_time(tmp_path):
    file = tmp_path / "new" / "kernels.json"
    mine, other = Verdicts.read(file), Verdicts.read(file)
    mine.add(Trial([(0, {"whiten_apply": "cuda"})], {("policy_loss", "cuda"): "died of SIGSEGV"}))
    other.add(Trial([(1, {"whiten_apply": "cuda"})], {("value_loss", "cuda"): "died of SIGABRT"}))
    both = Verdicts.read(file)
    assert both.passed == [(0, {"whiten_apply": "cuda"}), (1, {"whiten_apply": "cuda"})]
    assert sorted(both.faults) == [("policy_loss", "cuda"), ("value_loss", "cuda")]
    assert os.listdir(file.parent) == ["kernels.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"passed": [[0]], "faults": []}), json.dumps({"passed": []})])
def test_a_file_that_is_none_of_ours_is_said_and_written_again(tmp_path, caplog, content):
    file = tmp_path / "kernels.json"
    file.write_text(content)
    assert Verdicts.read(file) == Verdicts(file, [], {})
    assert "cannot be read, so the kernels are checked again" in caplog.text
    Verdicts.read(file).add(Trial([(0, {"whiten_apply": "cuda"})], {}))
    assert Verdicts.read(file).passed == [(0, {"whiten_apply": "cuda"})]


def test_a_folder_that_cannot_be_written_is_said(tmp_path, caplog):
    (tmp_path / "in_the_way").write_text("")
    Verdicts.read(tmp_path / "other").add(Trial([], {}))
    assert not caplog.text
    Verdicts(tmp_path / "in_the_way" / "kernels.json", [], {}).add(Trial([(0, {"whiten_apply": "cuda"})], {}))
    assert "cannot be written, so every start checks the kernels; set MEGAPPO_CACHE" in caplog.text


def test_the_file_is_where_caches_are(monkeypatch, tmp_path):
    name = cache_file(CPU).name
    assert re.fullmatch(r"kernels-[0-9a-f]{16}\.json", name)
    assert cache_file(CPU) == tmp_path / "cache" / name
    monkeypatch.delenv("MEGAPPO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_file(CPU) == tmp_path / "xdg" / "megappo" / name
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_file(CPU) == tmp_path / ".cache" / "megappo" / name


def test_another_driver_gpu_or_library_is_another_file(monkeypatch, tmp_path):
    seen = {cache_file(CPU)}
    other = {"_device_name": lambda device: "another", "_version": lambda package: "0", "LIBRARY": tmp_path / "none"}
    for name, change in other.items():
        with monkeypatch.context() as patch:
            patch.setattr(verdicts, name, change)
            seen.add(cache_file(CPU))
    assert len(seen) == 4 and seen == seen | {cache_file(CPU)}


def test_every_problem_is_one_of_the_trial(monkeypatch):
    ran = run_trial(CPU, "reference", {}, range(len(selfcheck.problems_for("cpu"))))
    assert [index for index, _ in ran.passed] == list(range(len(selfcheck.problems_for("cpu"))))
    assert {op for _, ops in ran.passed for op in ops} == set(dispatch.selected("cpu")) and not ran.faults
