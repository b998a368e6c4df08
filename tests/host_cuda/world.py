"""Starts processes of a CUDA torch on the host's device, and brings back what they found.

A world imports torch and the trainer once, forks its ranks, and runs a list of scenarios in them: importing costs more than
most scenarios do. A scenario is a function of a module of these tests; its result must be picklable by both torches.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.cuda_environment import folder_of_environment
from tests.host_cuda import build

REPOSITORY = Path(__file__).parent.parent.parent
TRAINER = ("megappo.engine.megatron", "megappo.trainer.ppo")


@dataclass(frozen=True)
class Scenario:
    """`function`: "package.module:name", called as name(rank, *args) on every rank."""

    name: str
    function: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A rank's result of a scenario, or the text of what it raised."""

    result: Any
    error: str | None


class HostCudaWorldError(AssertionError):
    """The ranks did not come to the end; the text is the end of their output."""


def python_of_cuda_torch() -> tuple[str | None, str]:
    """(interpreter, how it was found) or (None, why there is none)."""
    folder = folder_of_environment()
    python = folder / "bin/python"
    if not python.exists():
        how = "MEGAPPO_CUDA_VENV names none" if os.environ.get("MEGAPPO_CUDA_VENV") else "scripts/setup_cuda_env.sh makes one"
        return None, f"no CUDA build of torch at {folder} ({how})"
    try:
        build.torch_folder(str(python))
        build.toolkit_headers()
    except build.HostCudaError as error:
        return None, str(error)
    return str(python), str(folder)


def run_world(
    python: str,
    scenarios: Sequence[Scenario],
    world_size: int = 1,
    *,
    timeout_s: float = 900.0,
    imports: Sequence[str] = TRAINER,
    environment: Mapping[str, str] = MappingProxyType({}),
    **settings: str,
) -> dict[str, list[Finding]]:
    """Scenario -> what each rank found. imports: modules that all ranks share. settings: as of `build.environment`.

    Raises HostCudaWorldError where a rank died or the world ran past `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="host_cuda") as folder:
        Path(folder, "scenarios").write_bytes(pickle.dumps([(s.name, s.function, s.args) for s in scenarios]))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
        variables = {
            **inherited,
            **build.environment(python, world_size, **settings),
            **environment,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{build.site()}:{REPOSITORY}",
        }
        output = Path(folder, "output")
        with output.open("w") as file:
            process = subprocess.Popen(
                [python, "-m", "tests.host_cuda.drive", folder, str(world_size), *imports],
                cwd=REPOSITORY,
                env=variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            _wait(process, timeout_s)
        text = output.read_text(errors="replace")
        if process.returncode:
            raise HostCudaWorldError(f"the world of {world_size} ended with {process.returncode}\n{text[-6000:]}")
        print("".join(line for line in text.splitlines(True) if " took " in line))  # pytest -s
        ranks = [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(world_size)]
        return {s.name: [Finding(*rank[s.name]) for rank in ranks] for s in scenarios}


def _wait(process: subprocess.Popen, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while process.poll() is None:
        if time.monotonic() > deadline:
            os.killpg(process.pid, 9)
            process.wait()
            return
        time.sleep(0.05)
