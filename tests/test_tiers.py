"""`scripts/test.sh --quick`: which tests it leaves out, and what it lets none of the others do."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import test_worlds, tiers
from tests.algo import test_kl
from tests.parity import test_replay


def test_modules_that_start_worlds_are_known(request):
    assert tiers.starts_worlds(test_worlds) and tiers.starts_worlds(test_replay)
    assert not tiers.starts_worlds(test_kl) and not tiers.is_slow(request.node)


def test_places_that_are_slow_exist():
    assert [place for place in tiers.SLOW_PLACES if not (tiers.TESTS / place).exists()] == []


@pytest.mark.slow
def test_a_mark_makes_a_test_slow(request):
    assert tiers.is_slow(request.node)


def started(*argv, **environment):
    return "subprocess.Popen", (argv[0], [*argv], None, environment)


SLOW_WORK = [
    ("import", ("vllm",)),
    started("python", WORLD_SIZE="2"),
    started("/usr/bin/torchrun", "--standalone", "rank.py"),
    started("python", "-m", "torch.distributed.run", "rank.py"),
    started("python", "-W", "ignore", "-m", "megappo", "train", "run.yaml"),
    started(Path("bin/megappo"), "sft", "run.yaml"),
]


@pytest.mark.parametrize("event, arguments", SLOW_WORK, ids=str)
def test_slow_work_is_refused_with_the_mark_that_is_missing(event, arguments):
    with pytest.raises(tiers.SlowTest, match="mark this test slow"):
        tiers.check_event(event, arguments)


def test_other_work_is_not():
    tiers.check_event("import", ("torch",))
    tiers.check_event(*started("python"))
    tiers.check_event(*started("python", "-m", "megappo", "config", "train", "sft.yaml"))


def test_a_process_that_would_start_ranks_is_not_started(tmp_path):
    """In an interpreter of its own: a hook cannot be taken back."""
    code = "import subprocess; from tests import tiers; tiers.refuse_slow_work(); subprocess.run(['torchrun', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tiers.TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 1 and tiers.HINT in done.stderr
