"""The check of the kernels in this process: every implementation passes, and a wrong kernel of any op is found and named."""

import re

import pytest
import torch

from megappo.ops import dispatch, selfcheck
from megappo.ops.selfcheck import Numbers, run_checks

CPU = torch.device("cpu")
OPS = sorted(dispatch.selected("cpu"))


def first_line(device):
    """The message about the first difference."""
    return next(finding.line(device) for finding in run_checks(device) if not finding.ok)


def test_every_implementation_passes(kernels):
    assert [finding.line(kernels) for finding in run_checks(kernels) if not finding.ok] == []


def test_every_op_is_checked():
    ran = {op: implementation for finding in run_checks(CPU) for op, implementation in finding.ops.items()}
    assert sorted(ran) == OPS
    assert ran == {op: implementation for op, implementation in dispatch.selected("cpu").items() if op in ran}


def one_wrong_element(result):
    result.flatten()[result.numel() // 2] += 0.03 * result.abs().amax()


def unwritten_end(result):
    """A grid that is one tile short."""
    result[-max(1, len(result) // 40) :] = 0.0


def not_a_number(result):
    result.flatten()[-1] = torch.nan


def inject(monkeypatch, op, fault):
    """Replaces the op's implementation by one whose first floating result with tokens is spoiled."""
    name, right = dispatch._resolve(op, "cpu")

    def wrong(*args):
        results = right(*args)
        # None: in place, over the first argument or into the last
        in_place = args[::-1] if op.endswith("_into") else args
        written = in_place if results is None else (results,) if isinstance(results, torch.Tensor) else results
        fault(next(x for x in written if x.dim()))
        return results

    monkeypatch.setitem(dispatch._selection.resolved, (op, "cpu"), (name, wrong))


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_kernel_is_named(monkeypatch, op):
    """Right ones are not: `test_every_implementation_passes`."""
    for fault in (one_wrong_element, unwritten_end, not_a_number):
        with monkeypatch.context() as patch:
            inject(patch, op, fault)
            wrong = next(finding for finding in run_checks(CPU) if not finding.ok)
        assert op in wrong.ops, fault
        assert re.fullmatch(rf"kernels: .*{op} \(.*\) differs from its reference by [^\n]*report this", wrong.line(CPU)), fault


def test_the_line_says_what_differs_where_and_what_to_do(monkeypatch):
    right = dispatch.implementation("policy_loss", (torch.zeros(1),))

    def wrong(*args):
        loss, gradient, *metrics = right(*args)
        gradient[1234] += 0.5
        return loss, gradient, *metrics

    monkeypatch.setitem(dispatch._selection.resolved, ("policy_loss", "cpu"), ("cpp", wrong))
    assert re.fullmatch(
        r"kernels: policy_loss \(cpp\) differs from its reference by 0\.5, not \S+, in gradient of policy_loss at \[1234\]; "
        r"use kernels=reference, and report this",
        first_line(CPU),
    )


def test_a_kernel_that_raises_is_named(monkeypatch):
    def refused(*args):
        raise RuntimeError("value_loss: no kernel image is available for execution on the device\nmore about it")

    monkeypatch.setitem(dispatch._selection.resolved, ("value_loss", "cpu"), ("cpp", refused))
    assert first_line(CPU) == (
        "kernels: value_loss (cpp) failed: value_loss: no kernel image is available for execution on the device; "
        "use kernels=reference, and report this"
    )


def test_a_shape_that_differs_is_named(monkeypatch):
    right = dispatch.implementation("vocab_stats", (torch.zeros(1),))
    monkeypatch.setitem(dispatch._selection.resolved, ("vocab_stats", "cpu"), ("cpp", lambda *args: right(*args)[:-1]))
    assert "vocab_stats (cpp), vocab_stats_merge (cpp) failed: " in first_line(CPU)


def test_only_what_is_possible_and_did_not_run_is_advised(monkeypatch):
    monkeypatch.setattr(selfcheck, "missing", lambda implementation, kind: "not built" if implementation == "triton" else None)
    finding = selfcheck.Finding("policy_loss", "loss", {"policy_loss": "cuda"}, 1.0, 0.1, ())
    assert finding.line(torch.device("cuda")).endswith("in loss of policy_loss; use kernels=reference, and report this")
    monkeypatch.setattr(selfcheck, "missing", lambda implementation, kind: None)
    assert finding.line(torch.device("cuda")).endswith("use kernels=triton or kernels=reference, and report this")
    gemm = selfcheck.Finding("linear_logprob", "logprob", {"linear_stats": "gemm + reference"}, 1.0, 0.1, ())
    assert gemm.line(CPU).endswith("use kernels=cpp, and report this")
    mixed = selfcheck.Finding("linear_logprob", "logprob", {"vocab_stats": "triton", "linear_stats": "reference"}, 1.0, 0.1, ())
    assert mixed.line(torch.device("cuda")).endswith("use kernels=cuda or kernels=reference, and report this")


def test_both_precisions_get_the_same_numbers():
    narrow, wide = Numbers(CPU, wide=False), Numbers(CPU, wide=True)
    for draw in (lambda n: n.normal(50, dtype=torch.bfloat16), lambda n: n.uniform(50), lambda n: n.flags(50, 0.5)):
        a, b = draw(narrow), draw(wide)
        assert torch.equal(a.double(), b.double())
    assert torch.equal(narrow.integers(50, below=7), wide.integers(50, below=7))
