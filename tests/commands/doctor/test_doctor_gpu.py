"""Doctor on a GPU: what its kernels did in their check."""

import torch

from megappo.commands.doctor import doctor
from megappo.ops import dispatch, selfcheck
from megappo.ops.selfcheck import Finding


def test_the_report_says_which_kernel_failed_its_check_on_the_gpu(monkeypatch):
    right = Finding("value_loss", "loss", {"value_loss": "triton"}, 0.0, 1e-5, ())
    wrong = Finding("policy_loss", "loss", {"policy_loss": "triton"}, 0.5, 1e-5, ())
    monkeypatch.setitem(dispatch.ORDER, "cuda", ("triton", "reference"))
    monkeypatch.setattr(selfcheck, "run_checks", lambda device: [right, wrong])
    with dispatch.using("auto"):
        column, said = doctor.checked_column(torch.device("cuda", 0))
    assert column["value_loss"] == ["triton", "ok"] and column["policy_loss"] == ["triton", "WRONG"]
    assert column["token_advantages"] == ["triton", "unknown"]
    assert [line.partition(" differs")[0] for line in said] == ["kernels: policy_loss (triton)"]
