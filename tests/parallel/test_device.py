from __future__ import annotations

import pytest
import torch

from megappo.commands.launch.local import HOST, loopback_store
from megappo.parallel.device import require_one_kind, start_distributed


def test_a_port_that_another_world_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs from a shell that exports MASTER_PORT may share a node."""
    store = loopback_store()
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": HOST, "MASTER_PORT": str(store.port)}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^MASTER_PORT={store.port}: another process of .* listens there, .*; unset it, or"):
        start_distributed(torch.device("cpu"))


@pytest.mark.parametrize("left", [{}, {"MASTER_ADDR": HOST, "MASTER_PORT": "99999"}], ids=["no address", "no port"])
def test_a_world_that_the_environment_describes_in_part_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, left: dict[str, str]
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"RANK": "0", "WORLD_SIZE": "1"} | left).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="^RANK and WORLD_SIZE are set, and their world cannot be joined: .*; start the ranks by"):
        start_distributed(torch.device("cpu"))


def test_gpus_of_several_kinds_are_refused_with_the_rank_that_differs() -> None:
    require_one_kind(["NVIDIA H100 80GB HBM3"] * 3)
    with pytest.raises(
        ValueError, match="^run.device = cuda: rank 2 has a NVIDIA A100-SXM4-80GB, and rank 0 a .*; take GPUs of one kind"
    ):
        require_one_kind(["NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"])
