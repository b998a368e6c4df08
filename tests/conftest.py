"""Loaded before every test module: makes Triton's library functions interpretable in this process.

tl.sum, tl.max and the like are interpreted only if Triton was first imported under TRITON_INTERPRET=1, and a kernel only if its
file was; torch, Megatron-core and vLLM import the one some time, and tests of the choice of kernels the other, so nothing may come
before this. With a GPU they stay compiled, and the interpreter's tests are for the machine without one. Worlds that tests start do
not inherit the variable.
"""

import atexit
import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import tiers

TESTS = Path(__file__).parent
# Folders in the order in which they go to the workers, before the others: those whose tests take minutes first, so that none of
# them is left to one worker at the end. Between them those that wait for most of their time (ranks that hang, limits that pass):
# beside two others they cost none, and beside each other, or at the end, they leave cores idle (120 s of them). Late those that
# need the environment with a CUDA torch, which test.sh makes meanwhile (scripts, host_cuda).
FIRST = ("trainer", "parity", "benchmarks", "runtime", "commands", "parallel", "engine", "rewards", "scripts", "host_cuda")
FIRST += ("rollout", "ops", "checkpoint", "telemetry", "models")

# The workers and the worlds that they start share two cores: a slow example says nothing of the code.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

# The worlds of the tests are several processes on few cores, and last bits are those of a number of threads. Before torch comes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The process that hands tests to pytest-xdist's workers: it runs none, and they wait until it has read this file.
IS_CONTROLLER = "-n" in sys.argv and "PYTEST_XDIST_WORKER" not in os.environ

if not IS_CONTROLLER:
    gc.disable()  # until all tests are there: imports and thousands of tests make much that stays

if not IS_CONTROLLER and importlib.util.find_spec("triton") and not importlib.import_module("torch").cuda.is_available():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("triton.language")
        for file in (TESTS.parent / "megappo" / "ops" / "triton").glob("[!_]*.py"):
            importlib.import_module(f"megappo.ops.triton.{file.stem}")
    importlib.import_module("tests.ops.interpreted_calls").exchange_once()


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prepared data of the tests, and of the worlds that they start, in a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGAPPO_CACHE", str(tmp_path_factory.mktemp("megappo-cache")))
        yield


@pytest.fixture(autouse=True)
def umask_stays() -> Iterator[None]:
    """Commands that a test, or a fixture of its module, runs in this process restrict the files that they make (`run.permissions`),
    not those of later tests: every test starts with the usual umask."""
    before = os.umask(0o022)
    yield
    os.umask(before)


# What a rank reads, or what that begins with.
WORLD_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "MEGAPPO_")


def _world() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(WORLD_VARIABLES)}


@pytest.fixture(autouse=True)
def no_world_is_left() -> Iterator[None]:
    """A test that leaves the variables of a world behind makes ranks of the processes that later tests start: jobs on one port,
    commands that wait for peers."""
    before = _world()
    yield
    left = _world()
    for name in left.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    assert left == before


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out slow tests: worlds, vLLM, Slurm, compilers")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        tiers.refuse_slow_work()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Not imported, as all tests of a slow place are slow."""
    return True if config.getoption("--quick") and tiers.is_slow_place(collection_path) else None


def pytest_collection_finish() -> None:
    gc.freeze()  # libraries, and thousands of tests: a million objects
    gc.set_threshold(10_000)  # with the usual 700 an eighth of the quick tier went into collections
    gc.enable()


def pytest_unconfigure() -> None:
    # Or libraries that look for leaks at the end (nanobind's) take the frozen objects for some. Not before: pytest collects garbage
    # several times when it ends, which takes seconds with these objects.
    atexit.register(gc.unfreeze)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The quick ones alone where those are asked for; the same order on every worker, and without workers."""
    if config.getoption("--quick"):
        slow = [item for item in items if tiers.is_slow(item)]
        config.hook.pytest_deselected(items=slow)
        left_out = set(slow)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: FIRST.index(_folder(item.nodeid)) if _folder(item.nodeid) in FIRST else len(FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With pytest-xdist (`scripts/test.sh`) a folder's tests stay in one process: its fixtures start worlds that they share."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _folder(nodeid)

    return ByFolder(config, log)


def _folder(nodeid: str) -> str:
    """`tests/ops/test_losses.py::...` -> ops, `tests/commands/test_cli.py::...` -> test_cli.py"""
    return nodeid.split("::")[0].split("/")[1]
