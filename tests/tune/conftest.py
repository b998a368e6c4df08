from __future__ import annotations

from tests.launch.conftest import cluster, on_cluster

__all__ = ["cluster", "on_cluster"]  # fixtures
