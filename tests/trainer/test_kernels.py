"""The kernels of a run: said once for all ops, and checked before the first model where they run on a GPU."""

from types import SimpleNamespace

import pytest
import torch

from megappo.ops import dispatch
from megappo.trainer import kernels


@pytest.mark.parametrize("kind, checked", [("cpu", False), ("cuda", True)])
def test_a_run_names_its_kernels_and_checks_those_of_a_gpu(monkeypatch, kind, checked):
    devices, notes = [], []
    monkeypatch.setattr(kernels, "require_sound", devices.append)
    with dispatch.using("auto"):
        kernels.select_kernels("reference", torch.device(kind), SimpleNamespace(note=notes.append))
    assert devices == ([torch.device(kind)] if checked else [])
    assert len(notes) == 1 and notes[0].startswith("kernels: reference: ") and "policy_loss" in notes[0]


def test_wrong_kernels_of_a_gpu_end_the_run(monkeypatch):
    def wrong(device):
        raise RuntimeError("kernels: policy_loss (cuda) differs from its reference")

    monkeypatch.setattr(kernels, "require_sound", wrong)
    with dispatch.using("auto"), pytest.raises(RuntimeError, match="policy_loss"):
        kernels.select_kernels("auto", torch.device("cuda"), SimpleNamespace(note=lambda line: None))
