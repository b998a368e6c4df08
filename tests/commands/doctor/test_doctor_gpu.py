"""Doctor on a GPU: what its kernels did in their check."""

from megappo.commands.doctor import doctor
from megappo.ops import dispatch, verdicts


def test_the_report_says_which_kernel_failed_its_check_on_the_gpu(monkeypatch):
    def select_checked(kernels, device):
        dispatch.leave_out({("whiten_apply", "triton"): "died of SIGSEGV"})
        return {("whiten_apply", "triton"): "died of SIGSEGV"}

    monkeypatch.setitem(dispatch.ORDER, "cuda", ("triton", "reference"))
    monkeypatch.setattr(verdicts, "select_checked", select_checked)
    with dispatch.using("auto"):
        column, wrong = doctor.gpu_column()
    assert column["whiten_apply"] == ["reference", "ok; triton left out: died of SIGSEGV"]
    assert column["policy_loss"] == ["triton", "ok"]
    assert wrong == []


def test_the_report_says_why_the_kernels_of_the_gpu_could_not_be_checked(monkeypatch):
    def select_checked(kernels, device):
        raise RuntimeError("kernels: their check failed: no memory")

    monkeypatch.setattr(verdicts, "select_checked", select_checked)
    column, wrong = doctor.gpu_column()
    assert {state for _, state in column.values()} == {"unknown"} and wrong == ["kernels: their check failed: no memory"]
