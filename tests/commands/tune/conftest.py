from __future__ import annotations

from tests.commands.launch.conftest import cluster, on_cluster

__all__ = ["cluster", "on_cluster"]  # fixtures
