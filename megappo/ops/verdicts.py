"""Cached verdicts on the kernels of this GPU: checked once by `trial.py`, then read from a file.

One file per GPU model, driver, torch, Triton and SHA-256 of the library and of all of ops/ and algo/; a change of any of these
means a new check, and so does deleting the file. It lies in MEGAPPO_CACHE, else XDG_CACHE_HOME/megappo, else ~/.cache/megappo.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megappo.ops import dispatch, selfcheck
from megappo.ops.dispatch import Pair
from megappo.ops.implementations import LIBRARY, Kernels, interpreted
from megappo.ops.trial import Trial, run_trial
from megappo.runtime.cache_dir import cache_dir

logger = logging.getLogger(__name__)

Faults = dict[Pair, str]
Look = Callable[[], Faults]
Share = Callable[[Mapping[str, str], Look], Faults]
"""(op -> implementation that this process would take, its check of them) -> faults found in any process"""
_DRIVER = Path("/proc/driver/nvidia/version")


def select_checked(
    kernels: Kernels,
    device: torch.device,
    *,
    share: Share = lambda chosen, look: look(),
    module: str = "megappo.ops.trial",
) -> Faults:
    """Select the kernels for a run on this device and leave out those that fail their check; returns the faults.

    share: tells all processes the faults that one found. ValueError, one line, if a kernel that the user named is missing or
    fails; RuntimeError if the check cannot be done (see `run_trial`).
    """
    dispatch.select(kernels, device.type)
    faults: Faults = {}
    # `share` may be collective: it gives all processes the same faults, so all leave this loop after the same number of calls.
    while True:
        dispatch.leave_out(faults)
        chosen = dispatch.selected(device.type)
        found = share(chosen, lambda: _find(kernels, device, chosen, faults, module))
        if found.keys() <= faults.keys():
            return faults
        faults |= found


def _find(kernels: Kernels, device: torch.device, chosen: Mapping[str, str], faults: Faults, module: str) -> Faults:
    """Faults among the chosen kernels, from the file, or from a trial of those that it lacks. Empty: all are sound.

    RuntimeError also if the trial ran other implementations than this process would: it says nothing about these.
    """
    verdicts = Verdicts.read(cache_file(device))
    if known := {pair: fault for pair, fault in verdicts.faults.items() if pair in chosen.items()}:
        return known
    unknown = verdicts.unknown(chosen, len(selfcheck.problems_for(device.type)))
    if not unknown:
        return {}
    logger.info("checking the kernels in a process of their own: minutes the first time, while Triton compiles")
    trial = run_trial(device, kernels, faults, unknown, module=module)
    others = {op: ran[op] for _, ran in trial.passed for op in ran if ran[op] != chosen[op] and not trial.faults}
    if others:
        op, implementation = next(iter(others.items()))
        ran = f"ran {op} by {implementation}, and the run would by {chosen[op]}"
        raise RuntimeError(f"kernels: their check {ran}: please report this")
    verdicts.add(trial)
    return trial.faults


@dataclass
class Verdicts:
    """Verdicts of one cache file. passed: problems with right results, with the ops that ran."""

    file: Path
    passed: list[tuple[int, dict[str, str]]]
    faults: Faults

    @classmethod
    def read(cls, file: Path) -> Verdicts:
        """Read the file. Empty if it does not exist, and, with a warning, if it cannot be parsed."""
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            passed = [(int(index), dict(ran)) for index, ran in kept["passed"]]
            return cls(file, passed, {(op, implementation): fault for op, implementation, fault in kept["faults"]})
        except FileNotFoundError:
            return cls(file, [], {})
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be read, so the kernels are checked again: %s: %s", file, type(error).__name__, error)
            return cls(file, [], {})

    def unknown(self, chosen: Mapping[str, str], num_problems: int) -> list[int]:
        """Problems that have not passed with these kernels."""
        known = {index for index, ran in self.passed if ran.items() <= chosen.items()}
        return [index for index in range(num_problems) if index not in known]

    def add(self, trial: Trial) -> None:
        """Add a trial to the file. A folder that cannot be written gives a warning only."""
        now = Verdicts.read(self.file)  # again: other processes may have written since
        now.passed += [entry for entry in trial.passed if entry not in now.passed]
        now.faults |= trial.faults
        state = {"passed": now.passed, "faults": [[*pair, fault] for pair, fault in now.faults.items()]}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            # In its folder: only there a rename is atomic.
            handle, fresh = tempfile.mkstemp(dir=self.file.parent, prefix=self.file.name)
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(state, file, indent=1)
            os.replace(fresh, self.file)  # atomic: readers see the old file or the new one
        except OSError as error:
            logger.warning("%s cannot be written, so every start checks the kernels; set MEGAPPO_CACHE: %s", self.file, error)


def cache_file(device: torch.device) -> Path:
    """Path of this device's file, which need not exist."""
    return cache_dir() / f"kernels-{fingerprint(device)}.json"


def fingerprint(device: torch.device) -> str:
    """16 hexadecimal digits over everything that a verdict depends on."""
    facts = _device_name(device), torch.__version__, _version("triton"), interpreted()
    digest = hashlib.sha256("\n".join(map(str, facts)).encode())
    kernels = Path(__file__).parent
    # algo/ too: its references are the other side of the comparison
    for source in (LIBRARY, *sorted(kernels.rglob("*.py")), *sorted((kernels.parent / "algo").glob("*.py"))):
        digest.update(source.read_bytes() if source.exists() else b"")
    return digest.hexdigest()[:16]


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return platform.machine()
    gpu = torch.cuda.get_device_properties(device)
    driver = _DRIVER.read_text(encoding="utf-8") if _DRIVER.exists() else ""  # absent on WSL, where a new driver means no new check
    return f"{gpu.name} sm_{gpu.major}{gpu.minor} {driver}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
