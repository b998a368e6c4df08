import pytest

from tests.checkpoint.cases import world_main
from tests.worlds import spawn_world


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Results of all cases, one dict per rank: a world starts slowly, so all cases share one."""
    return spawn_world(world_main, 2, str(tmp_path_factory.mktemp("world")))
