"""Two tiers: `--quick` leaves out the slow tests, and holds the others to starting no ranks and no vLLM.

Slow are the tests marked so, those whose module or fixtures start worlds (`worlds.spawn_world`), ask for Slurm or open a page in a
browser, kernels that are interpreted or compiled, and the places below.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

TESTS = Path(__file__).parent
# Folders and files, below tests/, that start ranks, vLLM, Slurm, compilers or checks of kernels without `spawn_world`.
SLOW_PLACES = (
    "benchmarks",
    "bridge/test_bench_bridge.py",
    "bridge/test_vllm_layout.py",
    "engine",
    "host_cuda",
    "commands/launch/test_cluster.py",
    "runtime/test_failure.py",
    "commands/launch/test_local.py",
    "ops/test_linear_stats_cuda.py",
    "ops/test_triton_compile.py",
    "parity",
    "rollout/test_timeouts.py",
    "scripts",
    "test_build.py",
    "test_examples.py",
    "commands/tune/test_trials.py",
    "commands/tune/test_slurm.py",
    "commands/tune/test_trial.py",
    "commands/verify/test_verify.py",
)
# Parameters of the kernels' tests: Triton's are interpreted without a GPU (1 s of processor time each), CUDA's compiled (24 s).
SLOW_KERNELS = {"cuda_on_cpu", "triton"}
SLOW_FIXTURES = {"cluster", "cuda_on_cpu", "on_cluster", "seen", "wandb_runs"}
HINT = "mark this test slow (pytest.mark.slow, or its place in tests/tiers.py): --quick starts no ranks and no vLLM"


class SlowTest(BaseException):
    """A test that is not marked does what only slow ones may. No Exception: code under test may catch those."""


@functools.cache  # asked of every test; pathlib's comparisons took a sixth of the collection
def is_slow_place(path: Path) -> bool:
    return any(path.is_relative_to(TESTS / place) for place in SLOW_PLACES)


def is_slow(item: pytest.Item) -> bool:
    if item.get_closest_marker("slow") or is_slow_place(item.path):
        return True
    assert isinstance(item, pytest.Function) and item.module is not None
    callspec = getattr(item, "callspec", None)
    if callspec is not None and not SLOW_KERNELS.isdisjoint(callspec.id.split("-")):
        return True
    definitions = [one for each in item._fixtureinfo.name2fixturedefs.values() for one in each]
    homes = {item.module.__name__, *(one.func.__module__ for one in definitions)} & sys.modules.keys()
    return not SLOW_FIXTURES.isdisjoint(item.fixturenames) or any(starts_worlds(sys.modules[home]) for home in homes)


@functools.cache
def starts_worlds(module: ModuleType) -> bool:
    """True if the module, or a module of the tests that one of its names is from, has `spawn_world`."""
    homes = {home for value in vars(module).values() if (home := getattr(value, "__module__", None)) and home.startswith("tests.")}
    modules = [module, *(sys.modules[home] for home in homes if home in sys.modules and home != "tests.worlds")]
    return any(hasattr(one, "spawn_world") for one in modules)


def refuse_slow_work() -> None:
    """For the rest of this process: what a quick test may not do fails with a hint."""
    sys.addaudithook(check_event)
    setattr(BaseProcess, "start", _refuse)


def check_event(event: str, arguments: tuple[Any, ...]) -> None:
    """Python's audit hook: SlowTest for an import of vLLM and for a child process that is a rank of a world or starts ranks."""
    if event == "import" and arguments[0] == "vllm":
        _refuse()
    if event == "subprocess.Popen":
        environment = arguments[3] if arguments[3] is not None else os.environ
        if "WORLD_SIZE" in environment or starts_ranks(arguments[1]):
            _refuse()


def starts_ranks(argv: Sequence[str | bytes | os.PathLike]) -> bool:
    """True for torchrun, and for `megappo train` or `sft`, which start ranks. WORLD_SIZE is set where this hook sees nothing."""
    # Whole words: the text of a `bash -c` is not looked into, as tests of job scripts run them with stand-ins for these programs.
    names = [Path(os.fsdecode(word)).name for word in argv]
    return not {"torchrun", "torch.distributed.run"}.isdisjoint(names) or any(
        (name, command) in (("megappo", "train"), ("megappo", "sft")) for name, command in pairwise(names)
    )


def _refuse(*_: Any) -> NoReturn:
    raise SlowTest(HINT)
