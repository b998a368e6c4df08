"""Run the parts of the first run on a GPU, one after the other, and write their output: see scripts/first_gpu_run.sh."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from scripts.gpu_run.page import Outcome, page
from scripts.gpu_run.parts import PARTS, Part, Place

ROOT = Path(__file__).resolve().parents[2]
REPORT = "report.md"
# Killed parts get this long to end their ranks.
GRACE_S = 20


class Mistake(ValueError):
    """A wrong argument."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Mistake(message)


def main(argv: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run all parts. Exit code: 0 if every part that ran succeeded, 1 if one failed, 2 for wrong arguments or no GPU."""
    try:
        args = _arguments(argv, parts)
        place = _place(args)
    except Mistake as error:
        print(f"first_gpu_run: {error}", file=sys.stderr)
        return 2
    chosen = [part for part in parts if args.only is None or part.name in args.only]
    outcomes: list[Outcome] = []
    for number, part in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {part.title} ...", flush=True)
        outcomes.append(run_part(part, place))
        print(f"      {outcomes[-1].summary}", flush=True)
        # After every part, so that the results survive if the machine is taken away.
        (place.folder / REPORT).write_text(page(outcomes, place), encoding="utf-8")
    failed = [outcome.part.name for outcome in outcomes if outcome.failed]
    print(f"report: {place.folder / REPORT}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def _arguments(argv: Sequence[str] | None, parts: Sequence[Part]) -> argparse.Namespace:
    names = [part.name for part in parts]
    parser = _Parser(
        prog="first_gpu_run",
        description="Everything that only a GPU can tell, and one page about it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="parts:\n" + "\n".join(f"  {part.name:13} {part.title} (at most {part.limit_s // 60} minutes)" for part in parts),
    )
    parser.add_argument("--out", type=Path, help="folder of the report; otherwise runs/first_gpu_run-DATE")
    parser.add_argument("--only", help=f"comma-separated parts, of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="smallest sizes: whether everything runs, not how fast")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, as far as the parts go there; implies --quick")
    args = parser.parse_args(argv)
    args.only = args.only.split(",") if args.only else None
    for name in args.only or ():
        if name not in names:
            raise Mistake(f"--only {name}: there are {', '.join(names)}")
    return args


def _place(args: argparse.Namespace) -> Place:
    import torch

    num_gpus = 0 if args.rehearse else torch.cuda.device_count()
    if not args.rehearse and not torch.cuda.is_available():
        built = "has no CUDA" if torch.version.cuda is None else "sees no GPU"
        raise Mistake(f"torch {torch.__version__} of {sys.executable} {built}; see docs/gpu.md, or --rehearse on the CPU")
    folder = (args.out or Path("runs") / f"first_gpu_run-{datetime.now():%Y%m%d-%H%M%S}").absolute()
    if folder.exists() and any(folder.iterdir()):
        raise Mistake(f"--out {folder}: it is not empty; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    return Place("cpu" if args.rehearse else "cuda", num_gpus, args.quick or args.rehearse, folder)


def run_part(part: Part, place: Place) -> Outcome:
    """Run one part with its output in NAME.log. Its failure or time-out does not affect other parts."""
    reason = part.left_out(place)
    if reason is not None:
        return Outcome(part, left_out=reason)
    log, command, started = place.folder / f"{part.name}.log", part.command(place), time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        # The parts' `python` is this one. Without a GPU the quickstart takes its environment by name only.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        environment = {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"}
        if not place.on_gpu:
            environment["MEGAPPO_VENV"] = sys.prefix
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            code = child.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(child)
    return Outcome(part, command=command, code=code, seconds=time.monotonic() - started, log=log)


def _end_group(child: subprocess.Popen) -> None:
    """End the part and all its processes; ranks in a hanging NCCL call ignore SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)


if __name__ == "__main__":
    sys.exit(main())
