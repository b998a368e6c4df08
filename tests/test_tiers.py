"""`scripts/test.sh --quick`: which tests it leaves out, and what it lets none of the others do."""

import pytest

from . import test_worlds, tiers
from .algo import test_kl
from .parity import test_replay


def test_modules_that_start_worlds_are_known(request):
    assert tiers.starts_worlds(test_worlds) and tiers.starts_worlds(test_replay)
    assert not tiers.starts_worlds(test_kl) and not tiers.is_slow(request.node)


def test_places_that_are_slow_exist():
    assert [place for place in tiers.SLOW_PLACES if not (tiers.TESTS / place).exists()] == []


@pytest.mark.slow
def test_a_mark_makes_a_test_slow(request):
    assert tiers.is_slow(request.node)


@pytest.mark.parametrize(
    "event, arguments", [("import", ("vllm",)), ("subprocess.Popen", ("python", [], None, {"WORLD_SIZE": "2"}))]
)
def test_slow_work_is_refused_with_the_mark_that_is_missing(event, arguments):
    with pytest.raises(tiers.SlowTest, match="mark this test slow"):
        tiers.check_event(event, arguments)


def test_other_work_is_not():
    tiers.check_event("import", ("torch",))
    tiers.check_event("subprocess.Popen", ("python", [], None, {}))
