"""Run the parts of the first run on a GPU, one after the other, and write their output: see scripts/first_gpu_run.sh."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from scripts.gpu_run.page import Outcome, into_docs, page, record
from scripts.gpu_run.parts import MINUTE, PARTS, Part, Place

ROOT = Path(__file__).resolve().parents[2]
REPORT, RECORD, DOCS = "report.md", "report.json", "docs/gpu.md"
# Killed parts get this long to end their ranks.
GRACE_S = 20


class Mistake(ValueError):
    """A wrong argument."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Mistake(message)


def main(argv: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run all parts. Exit code: 0 if every part that ran succeeded, 1 if one failed or SIGTERM came, 2 for wrong arguments or no
    GPU."""
    try:
        args = _arguments(argv, parts)
        if args.into_docs is not None:
            return _into_docs(args.into_docs)
        place = _place(args)
    except (Mistake, ValueError, OSError) as error:
        print(f"first_gpu_run: {error}", file=sys.stderr)
        return 2
    chosen = [part for part in parts if args.only is None or part.name in args.only]
    outcomes = [Outcome(part, still="not reached") for part in chosen]
    machine, started = facts_of_machine(place), time.monotonic()
    before = signal.signal(signal.SIGTERM, _stopped)
    try:
        for number, part in enumerate(chosen):
            print(f"[{number + 1}/{len(chosen)}] {part.title} ...", flush=True)
            log = place.folder / f"{part.name}.log"
            outcomes[number] = Outcome(part, still="was under way when the run was stopped", log=log, command=part.command(place))
            # Before and after every part, so that the page is whole whenever the machine is taken away.
            write_page(outcomes, place, machine)
            left_s = place.minutes * MINUTE - (time.monotonic() - started) if place.minutes else None
            outcomes[number] = run_part(part, place, left_s)
            print(f"      {outcomes[number].summary}", flush=True)
            write_page(outcomes, place, machine)
    except Stopped:
        write_page(outcomes, place, machine)
        print(f"report: {place.folder / REPORT}; stopped by SIGTERM")
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    failed = [outcome.part.name for outcome in outcomes if outcome.failed]
    print(f"report: {place.folder / REPORT}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


class Stopped(Exception):
    """SIGTERM came."""


def _stopped(*_: object) -> NoReturn:
    raise Stopped


def write_page(outcomes: Sequence[Outcome], place: Place, machine: dict[str, Any]) -> None:
    """Write report.md and report.json, each in one go: a reader finds the old or the new one."""
    texts = {REPORT: page(outcomes, place), RECORD: json.dumps(record(outcomes, place, machine), indent=1) + "\n"}
    for name, text in texts.items():
        (place.folder / f"{name}.part").write_text(text, encoding="utf-8")
        (place.folder / f"{name}.part").replace(place.folder / name)


def facts_of_machine(place: Place) -> dict[str, Any]:
    """Name and number of the GPUs, versions and date, for the docs."""
    import torch

    from megappo.runtime.installed import findings

    told = ("torch", "triton", "megatron-core", "vllm", "transformer-engine")
    versions = {found.requirement.name: found.version for found in findings() if found.requirement.name in told and found.version}
    gpu = torch.cuda.get_device_name(0) if place.on_gpu else ""
    return {"gpu": gpu, "num_gpus": place.num_gpus, "versions": versions, "date": f"{datetime.now():%d %B %Y}"}


def _into_docs(folder: Path) -> int:
    target = ROOT / DOCS
    run = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    target.write_text(into_docs(run, target.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{len(run['parts'])} parts -> {DOCS}")
    return 0


def _arguments(argv: Sequence[str] | None, parts: Sequence[Part]) -> argparse.Namespace:
    names = [part.name for part in parts]
    parser = _Parser(
        prog="first_gpu_run",
        description="Everything that only a GPU can tell, and one page about it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="parts:\n"
        + "\n".join(
            f"  {part.name:13} {part.title} (at most {part.limit_s // 60} minutes; {part.short_s} s of a few)" for part in parts
        ),
    )
    parser.add_argument("--out", type=Path, help="folder of the report; otherwise runs/first_gpu_run-DATE")
    parser.add_argument("--only", help=f"comma-separated parts, of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="smallest sizes: whether everything runs, not how fast")
    parser.add_argument("--minutes", type=float, help="for all parts together, for example 12: shorter ones, most telling first")
    parser.add_argument(
        "--into-docs", type=Path, metavar="DIR", help=f"write the tables of a run's folder into {DOCS}, run nothing"
    )
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
    capability = (0, 0) if args.rehearse else torch.cuda.get_device_capability(0)
    return Place("cpu" if args.rehearse else "cuda", num_gpus, args.quick or args.rehearse, folder, capability, args.minutes)


def run_part(part: Part, place: Place, left_s: float | None = None) -> Outcome:
    """Run one part with its output in NAME.log. Its failure or time-out does not affect other parts. left_s: until all must end."""
    limit_s = part.limit_s if left_s is None else min(part.short_s, left_s)
    reason = part.left_out(place)
    if reason is None and limit_s < part.short_s / 3 and left_s is not None:
        reason = f"{max(left_s, 0):.0f} s are left of {place.minutes:g} minutes"
    if reason is not None:
        return Outcome(part, left_out=reason)
    log, command, started = place.folder / f"{part.name}.log", part.command(place), time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        # The parts' `python` is this one. Without a GPU the quickstart takes its environment by name only.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        # This checkout's megappo, also where it is not installed.
        packages = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PATH": path, "PYTHONPATH": packages, "PYTHONUNBUFFERED": "1"}
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
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(child)
    return Outcome(part, command=command, code=code, seconds=time.monotonic() - started, log=log, limit_s=limit_s)


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
