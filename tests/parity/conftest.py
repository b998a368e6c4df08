"""The worlds of the parity matrix, started once: one rank, two and four."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.matrix import MODELS, VARIANTS, run_world, write_models
from tests.worlds import spawn_world


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints of policy and reference by model."""
    folders = {model: tmp_path_factory.mktemp("parity") / model for model in MODELS}
    for model, folder in folders.items():
        write_models(folder, model)
    return folders


@pytest.fixture(scope="session")
def measured(models) -> dict[int, dict]:
    """world size -> model -> title -> Measured of rank 0."""
    worlds = {}
    for size in (1, 2, 4):
        ranks = spawn_world(run_world, size, {model: str(folder) for model, folder in models.items()}, VARIANTS, timeout_s=500)
        worlds[size] = ranks[0]
    return worlds
