from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands.launch.cluster import Cluster, missing_programs, two_nodes


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes for all tests; they end with the session."""
    if missing := missing_programs():
        pytest.fail(
            f"Slurm is not installed here ({', '.join(missing)} not found): run scripts/test.sh as root, "
            "or apt-get install slurm-wlm munge",
            pytrace=False,
        )
    # pytest's own folders have names too long for munge's socket.
    folder = Path(tempfile.mkdtemp(prefix="megappo-slurm-"))
    try:
        with two_nodes(folder) as running:
            yield running
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def on_cluster(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Slurm's commands of this process reach the cluster too."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    return cluster
