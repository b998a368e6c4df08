"""Self-check in a separate process, so that a kernel that hangs or crashes the device does not take the run with it.

`run_trial` starts the process, `main` is its program. The process writes a line before and after every op, the second after a
synchronisation, so that the op that was running is known however the process ends. If several ops contribute to a wrong result,
each is run alone with references for the others, and those that are still wrong are to blame.

MEGAPPO_KERNEL_CHECK_S: seconds that one op may take, with its compilation by Triton; 300 if unset.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megappo.ops import dispatch, selfcheck
from megappo.ops.dispatch import Pair
from megappo.ops.implementations import Kernels
from megappo.runtime.error_text import first_line
from megappo.runtime.helpers import deaf_to_stop, end_with, parent_to_follow

LIMIT_S = 300.0  # seconds of one op, with its compilation by Triton
_POLL_S = 0.1  # seconds
_PACKAGE = Path(__file__).parents[2]
# Signals of a process's own fault; any other was sent by somebody.
_CRASHES = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGTRAP}
_KERNELS = ("cpp", "cuda", "triton")
# Errors of an op that its environment causes: memory, disk, permissions, the compiler that Triton calls.
_SURROUNDINGS = ("OutOfMemoryError", "KeyboardInterrupt", "OSError", "FileNotFoundError", "PermissionError")
_SURROUNDINGS_SAY = ("out of memory", "C compiler", "No space left")
# Seconds. A process that is killed inside a driver call ends only when the driver returns.
_GRACE_S = 60.0


@dataclass
class Trial:
    """Findings of one process. passed: (index of a problem, op -> implementation that it ran). faults: the fault of each pair."""

    passed: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    faults: dict[Pair, str] = field(default_factory=dict)


def time_limit() -> float:
    """Seconds for one op. ValueError if MEGAPPO_KERNEL_CHECK_S is no positive number."""
    text = os.environ.get("MEGAPPO_KERNEL_CHECK_S", str(LIMIT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"MEGAPPO_KERNEL_CHECK_S = {text}: use a number of seconds above 0, like {LIMIT_S:g}")
    return seconds


def run_trial(
    device: torch.device,
    kernels: Kernels,
    faults: Mapping[Pair, str],
    problems: Sequence[int],
    *,
    module: str = "megappo.ops.trial",
) -> Trial:
    """Check these problems of `selfcheck.problems_for` in a new process, with these kernels selected and these faults left out.

    Ends at the first kernel that hangs. RuntimeError, one line, if no kernel is to blame: no GPU memory, a GPU that takes one
    process only, a process that somebody killed, or references that differ.
    """
    limit_s = time_limit()
    with tempfile.TemporaryDirectory(prefix="megappo-kernels-") as name:
        report, errors = Path(name, "report"), Path(name, "stderr")
        report.touch()  # read before the process has begun to write
        job = {
            "rank": parent_to_follow(),
            "report": str(report),
            "device": str(device),
            "kernels": kernels,
            "problems": list(problems),
            "faults": [[*pair, fault] for pair, fault in faults.items()],
        }
        # The same megappo as this process's, wherever that was started.
        path = os.pathsep.join(filter(None, (str(_PACKAGE), os.environ.get("PYTHONPATH"))))
        with errors.open("wb") as sink:
            with deaf_to_stop():  # or a request to stop would look like a kernel that failed
                process = subprocess.Popen(
                    [sys.executable, "-m", module, json.dumps(job)],
                    env={**os.environ, "PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                )
            in_time = _wait(process, report, limit_s)
        lines = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
        last = next(filter(None, reversed(errors.read_text(errors="replace", encoding="utf-8").splitlines())), "")
    end = None if process.returncode == 0 else _early_end(process.returncode, in_time, limit_s, lines, last)
    return _read(lines, end)


def _wait(process: subprocess.Popen[bytes], report: Path, limit_s: float) -> bool:
    """Wait for the process. True if it ended by itself; False if it wrote nothing for `limit_s` and was killed."""
    said, since = "", time.monotonic()
    while process.poll() is None:
        time.sleep(_POLL_S)
        now = report.read_text(encoding="utf-8")
        if now != said:
            said, since = now, time.monotonic()
        in_an_op = '{"begin"' in said[said.rfind("\n", 0, -1) + 1 :]
        # Outside an op (imports from a slow disk, the references) at least LIMIT_S.
        if time.monotonic() - since > (limit_s if in_an_op else max(limit_s, LIMIT_S)):
            process.kill()
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                raise RuntimeError(
                    f"kernels: the GPU does not let go of a hanging kernel (process {process.pid}); reset it or restart the machine"
                ) from None
            return False
    return True


@dataclass(frozen=True)
class _End:
    """Early end of a process. by_op: caused by the op that ran, not by its environment."""

    text: str
    by_op: bool


def _early_end(code: int, in_time: bool, limit_s: float, lines: Sequence[Mapping[str, Any]], last: str) -> _End:
    if not in_time:
        return _End(f"did not come back within {limit_s:g} s", True)
    if code < 0:
        return _End(f"died of {signal.Signals(-code).name}" + (f" ({last})" if last else ""), signal.Signals(-code) in _CRASHES)
    raised = next((line["raised"] for line in lines if "raised" in line), last)
    surroundings = raised.startswith(_SURROUNDINGS) or any(text in raised for text in _SURROUNDINGS_SAY)
    return _End(f"failed: {raised}", not surroundings)


def _read(lines: Sequence[Mapping[str, Any]], end: _End | None) -> Trial:
    trial, running = Trial(), []
    for line in lines:
        if "begin" in line:
            running.append(tuple(line["begin"]))
        elif "end" in line:
            running.remove(tuple(line["end"]))
        elif "passed" in line:
            trial.passed.append((line["passed"], line["ran"]))
        elif "fault" in line:
            trial.faults[line["fault"][0], line["fault"][1]] = line["reason"]
    if end is not None:
        op, implementation = running[-1] if running else ("", "")
        if not end.by_op or implementation not in _KERNELS:
            where = f" in {op} ({implementation})" if running else ""
            said = f"kernels: their check {end.text}{where}"
            raise RuntimeError(f"{said}, which is no kernel's fault; mend it, or use kernels=reference")
        trial.faults[op, implementation] = end.text
    return trial


# ------------------------------------------------------------------------------------------------------------ the process


class _ReportedCalls(selfcheck.Calls):
    """Calls that report each op before and after it ran."""

    def __init__(self, say: Callable[..., None], device: torch.device) -> None:
        super().__init__()
        self._say, self._device = say, device
        self.all: dict[str, str] = {}

    def __call__(self, op: str, implementation: str, call: Callable[[], Any]) -> Any:
        self.all[op] = implementation
        self._say(begin=[op, implementation])
        result = super().__call__(op, implementation, call)
        wait_for(self._device)  # a launch returns at once: the op has run, and its errors are raised, after this
        self._say(end=[op, implementation])
        return result


def wait_for(device: torch.device) -> None:
    """Wait until all launched work has run. Raises the device's errors."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argument: str) -> None:
    """Run the job that `run_trial` described, as JSON."""
    job = json.loads(argument)
    end_with(job["rank"])  # or a killed rank would leave a process behind that waits for a hanging kernel
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is reported by its signal; no core file
    device = torch.device(job["device"])

    def say(**line: Any) -> None:
        # Closed after every line: what was said is in the file however the process ends.
        with open(job["report"], "a", encoding="utf-8") as report:
            report.write(json.dumps(line) + "\n")

    def raised(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        say(raised=first_line(error, kind=True))
        sys.__excepthook__(kind, error, trace)

    say(started=True)
    # The error's own first line, not the last line of a traceback.
    sys.excepthook = raised
    if device.type == "cuda":
        torch.cuda.set_device(device)
    faults: dict[Pair, str] = {(op, implementation): fault for op, implementation, fault in job["faults"]}
    dispatch.select(job["kernels"], device.type)
    dispatch.leave_out(faults)
    every = selfcheck.problems_for(device.type)
    for index in job["problems"]:
        while (found := _look(every[index], device, say)).faults:
            for (op, implementation), fault in found.faults.items():
                say(fault=[op, implementation], reason=fault)
            if job["kernels"] != "auto":
                return  # one is enough to refuse them
            faults |= found.faults
            dispatch.leave_out(faults)
        say(passed=index, ran=found.ran)


@dataclass(frozen=True)
class _Look:
    ran: dict[str, str]
    faults: dict[Pair, str]


def _look(problem: selfcheck.Problem, device: torch.device, say: Callable[..., None]) -> _Look:
    """Check one problem with the kernels selected now. RuntimeError if references alone give a wrong result."""
    calls = _ReportedCalls(say, device)
    wrong = next((finding for finding in selfcheck.check(problem, device, calls) if not finding.ok), None)
    if wrong is None:
        return _Look(calls.all, {})
    suspects = [(op, implementation) for op, implementation in calls.all.items() if implementation in _KERNELS]
    if not suspects:
        raise RuntimeError(f"{', '.join(calls.all)} {wrong.fault()}, without any kernel of megappo")
    guilty = [pair for pair in suspects if not _passes_alone(pair[0], problem, device, say)]
    # Each right alone: only their combination is wrong, so all are left out.
    return _Look(calls.all, dict.fromkeys(guilty or suspects, wrong.fault()))


def _passes_alone(op: str, problem: selfcheck.Problem, device: torch.device, say: Callable[..., None]) -> bool:
    with dispatch.alone(op, device.type):
        return all(finding.ok for finding in selfcheck.check(problem, device, _ReportedCalls(say, device)))


if __name__ == "__main__":
    main(sys.argv[1])
