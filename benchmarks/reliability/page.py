"""docs/reliability.md from its template, the promises and the measured figures."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reliability.faults import KINDS
from benchmarks.reliability.promises import PROMISES, Promise
from benchmarks.reliability.soak import HEADING, Injection, Outcome

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "benchmarks" / "reliability.md.in"
FIGURES = ROOT / "docs" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"

Figures = Mapping[str, Any]


def render(template: str, figures: Figures) -> str:
    """The page. figures: content of docs/reliability.json. ValueError if the template names something unknown."""
    texts = {
        "resume": _table(["R"], figures),
        "faults": _table(["F", "P"], figures),
        "security": _table(["S"], figures),
        "soak": markdown(HEADING, [outcome.cells() for outcome in outcomes(figures["all"])]),
        "machine": figures["machine"],
        **sentences(figures),
    }
    for name, text in texts.items():
        template = template.replace("{{" + name + "}}", text)
    if "{{" in template:
        raise ValueError(f"the template asks for {template.split('{{')[1].split('}}')[0]}, which is no figure")
    return template


def missing_tests(promise: Promise) -> list[str]:
    """Tests that a promise names and that do not exist."""
    return [name for name in promise.tests if not _is_test(name)]


def _is_test(name: str) -> bool:
    file, _, function = name.partition("::")
    path = ROOT / file
    if not path.is_file():
        return False
    return any(isinstance(node, ast.FunctionDef) and node.name == function for node in ast.parse(path.read_text("utf-8")).body)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = ("| " + " | ".join(line) + " |" for line in (head, *rows))
    return "\n".join((first, "|" + "---|" * len(head), *others))


def _table(letters: Sequence[str], figures: Figures) -> str:
    rows = [list(_cells(promise, figures)) for promise in PROMISES if promise.key[0] in letters]
    width = 4 if any(row[3] != "-" for row in rows) else 3
    return markdown(("", "promise", "tests", "measured, or not covered")[:width], [row[:width] for row in rows])


def _cells(promise: Promise, figures: Figures) -> Iterator[str]:
    yield promise.key
    yield promise.text
    yield str(len(promise.tests)) if promise.tests else "-"
    not_covered = f"not covered: {promise.not_covered}" if promise.not_covered else ""
    yield "; ".join(filter(None, (promise.figure.format(**sentences(figures)), not_covered))) or "-"


# --------------------------------------------------------------------------------------------------------------- sentences


def sentences(figures: Figures) -> dict[str, str]:
    """Measured figures as texts, by the names that promises and template use."""
    kills, soak, saves = figures["kills"], figures["all"], figures["saves"]
    by_kind = {kind: [outcome for outcome in outcomes(soak) if outcome.injection.kind == kind] for kind in KINDS}
    return {
        "kills": f"{_survived(kills)}: {_times(outcomes(kills))}",
        "asynchronous": _survived(figures["asynchronous"]),
        "all": f"{_survived(soak)}; all ten took {soak['faulty_s'] - soak['clean_s']:.0f} s",
        "all_compared": f"{soak['tensors']} tensors and states and {soak['values']} metrics of a clean run and one under faults",
        **{f"{kind}_times": _times(faults) for kind, faults in by_kind.items() if faults},
        "goodput": f"{figures['goodput']['ettr']:.1%} at one kill in {_kill_every(figures)}",
        "in_place_s": f"{_first_step_s(figures['goodput']):.1f} s",
        "by_hand_s": f"{_first_step_s(figures['baseline']):.1f} s",
        "save_size": f"{saves['bytes'] / 1e6:.0f} MB with its optimizer",
        "save_stall": f"{_stall_times(saves['median'])}; {saves['median']['processor'] * 1000:.1f} ms of processor time "
        f"(median, {saves['bytes'] / 1e6:.0f} MB)",
        "verify": f"building a model and loading {saves['bytes'] / 1e6:.0f} MB: {_resume_times(saves, 'page cache')}; "
        f"{_resume_times(saves, 'disk')}",
        "save_machine": saves["machine"],
    }


def _stall_times(times: Figures) -> str:
    """The stall of a save beside a save in the foreground and a bare copy."""
    stall, at_once, copy = (f"{times[name] * 1000:.1f} ms" for name in ("stall", "worst", "copy"))
    return (
        f"{stall}, {times['stall'] / times['sync']:.1%} of a save in the foreground ({times['sync']:.2f} s with hashes and fsync); "
        f"{at_once} if an update follows at once (a bare copy: {copy})"
    )


def _resume_times(saves: Figures, source: str) -> str:
    """Times of building a model and loading it, by what there is of verification."""
    alone, before, meanwhile = (
        next(seconds for name, seconds in saves["resumes"].items() if name.strip().startswith(kind) and name.endswith(source))
        for kind in ("build and load", "verified before", "verified meanwhile")
    )
    return f"from the {source} {alone:.2f} s without hashes, {meanwhile:.2f} s with them beside, {before:.2f} s with them before"


def _kill_every(figures: Figures) -> str:
    return f"{figures['goodput']['faulty_s'] / len(figures['goodput']['faults']):.0f} s"


def outcomes(soak: Figures) -> list[Outcome]:
    return [Outcome(**{**fault, "injection": Injection(**fault["injection"])}) for fault in soak["faults"]]


def _survived(soak: Figures) -> str:
    survived = sum(not outcome.wrong for outcome in outcomes(soak))
    equal = "" if soak["equal"] else "NOT "
    end = f"{soak['samples']:,} samples {equal}in the clean run's order" if soak.get("samples") else f"end {equal}equal bit for bit"
    return f"{survived} of {len(soak['faults'])} survived, {end}"


def _times(faults: Sequence[Outcome]) -> str:
    """Longest times of these faults."""
    most = "at most " if len(faults) > 1 else ""
    detected = [fault.detected_s for fault in faults if fault.detected_s is not None]
    recovered = [fault.recovered_s for fault in faults if fault.recovered_s is not None]
    restart = f"restart after {most}{max(detected):.1f} s, " if detected else ""
    return f"{restart}next step after {most}{max(recovered):.1f} s"


def _first_step_s(soak: Figures) -> float:
    """Mean seconds from a fault to the end of the first new step."""
    return statistics.mean(outcome.recovered_s or 0.0 for outcome in outcomes(soak))
