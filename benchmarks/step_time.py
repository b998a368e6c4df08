"""The model of the step time beside steps that others published (tests/commands/tune/published_steps.json).

    python benchmarks/step_time.py            # every row
    python benchmarks/step_time.py --write    # and the table of docs/layouts.md

A row with `chooses` gave a constant of a profile (`megappo/telemetry/hardware.yaml`) and is no test of the model."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megappo.commands.tune.candidates import Machine
from megappo.commands.tune.cost import workload_of
from megappo.commands.tune.lengths import SPREAD, Lengths
from megappo.commands.tune.parts import parts_of
from megappo.commands.tune.search import Search
from megappo.config.loading import load_config
from megappo.telemetry.hardware import Hardware, load_hardware
from megappo.telemetry.tables import table
from megappo.trainer.prepare.layouts import read_archs

FIGURES = ROOT / "tests/commands/tune/published_steps.json"
PAGE = ROOT / "docs/layouts.md"
BEGIN, END = "<!-- published steps begin here -->", "<!-- published steps end here -->"
WHOLE = ("total", "generate", "log-probs", "update", "push")
PARTS = (*WHOLE, "trainer")
BEFORE_OVERLAP = (0, 13)  # the last release of vLLM whose host never works beside the GPU (`tune/generation.py`, OVERLAPS_HOST)
Row = Mapping[str, Any]


def predicted(row: Row, record: Mapping[str, Any], folder: Path, hardware: Hardware | None = None) -> dict[str, float]:
    """Seconds by part of a published step, as `megappo tune --as-is` prices them. folder: for its files."""
    model = folder / row["model"]
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(record["models"][row["model"]]), encoding="utf-8")
    base = json.loads(json.dumps(record["bases"][row["base"]]))
    base["policy"]["model"] = str(model)
    path = folder / "run.yaml"
    path.write_text(json.dumps(base), encoding="utf-8")  # which is YAML too
    config = load_config(path, [f"{key}={value}" for key, value in row["set"].items()])
    response = row.get("response")
    lengths = None if response is None else Lengths(response, config.rollout.max_response_tokens, row.get("spread", SPREAD))
    machine = Machine(config.run.num_ranks or 1, hardware or load_hardware(row["gpu"]))
    if "vllm" in row:
        major, minor = map(int, row["vllm"].split("."))
        # NeMo-RL runs a replica of several ranks under Ray, for whose executor vLLM's host does not work beside the GPU.
        alone = config.rollout.tp == 1
        machine = replace(machine, vllm=(major, minor) if alone else min((major, minor), BEFORE_OVERLAP))
    choice = Search(config, read_archs(config), machine, workload_of(config, None, response, lengths), ()).as_written()
    parts = {part.name: part.seconds or 0.0 for part in parts_of(choice)}
    return {
        "total": choice.total_s,
        "generate": parts["generate"],
        "log-probs": sum(seconds for name, seconds in parts.items() if name.endswith("log-probs")),
        "update": parts["policy update"],
        "trainer": parts["policy update"] + choice.rest_s,
        "push": parts.get("push weights", 0.0),
    }


def group_of(row: Row) -> str:
    """The base of a row, or `later`: rows of that base that were added once the model was held against the others."""
    return row.get("group", row["base"])


def errors(record: Mapping[str, Any], group: str, part: str, found: Mapping[str, Mapping[str, float]]) -> list[float]:
    """|predicted / published - 1| of a part in every row of this group that is a test. found: name of a row -> `predicted`."""
    rows = [row for row in record["rows"] if group_of(row) == group and part in row["seconds"] and "chooses" not in row]
    return [abs(found[row["name"]][part] / row["seconds"][part] - 1) for row in rows]


def lines_of(found: Mapping[str, Mapping[str, float]], rows: Sequence[Row], parts: Sequence[str]) -> Iterator[list[str]]:
    """Cells of a table: `predicted / published` seconds of every part."""
    for row in rows:
        own, given = found[row["name"]], row["seconds"]
        cells = [f"{own[part]:.3g} / {given[part]:g}" if part in given else "" for part in parts]
        yield [row["name"], *cells, row.get("chooses", "")]


def page_lines(record: Mapping[str, Any], found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The part of the page: whole steps one by one, trainers by their medians."""
    whole = [row for row in record["rows"] if row["base"] == "nemo"]
    lines = ["| predicted / published s | " + " | ".join(WHOLE) + " | chose |", "|---" * (len(WHOLE) + 2) + "|"]
    lines += ["| " + " | ".join(cells) + " |" for cells in lines_of(found, whole, WHOLE)]
    first, later = ({part: errors(record, group, part, found) for part in WHOLE} for group in ("nemo", "later"))
    medians = " | ".join(f"{median(off):.0%}" for off in first.values())
    lines.append(f"| **median error of the first {len(first['total'])}** | {medians} | |")
    lines.append(
        f"| **of the {len(later['total'])} added later** (671b, 235b-256, 235b and 30b-async on gb200) | "
        f"{median(later['total']):.0%} | | | | | |"
    )
    lines.append(f"| **of all {len(first['total'] + later['total'])}** | {median(first['total'] + later['total']):.0%} | | | | | |")
    for base, part in (("prime", "trainer"), ("bridge", "update"), ("sky", "update"), ("sky", "log-probs")):
        off = errors(record, base, part, found)
        lines += ["", f"{record['titles'][base]}, {part}: median error {median(off):.0%} of {len(off)}."]
    return [*lines, "", "Sources: " + "; ".join(record["sources"].values()) + "."]


def written_page(text: str, lines: Sequence[str]) -> str:
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.split(END)[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write the table of {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    record = json.loads(FIGURES.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as name:
        found = {row["name"]: predicted(row, record, Path(name)) for row in record["rows"]}
    print("\n".join(table(["row", *PARTS, "chose"], list(lines_of(found, record["rows"], PARTS)))))
    for group in dict.fromkeys(map(group_of, record["rows"])):
        medians = {part: off for part in PARTS if (off := errors(record, group, part, found))}
        print(group, ", ".join(f"{part} {median(off):.1%} of {len(off)}" for part, off in medians.items()))
    if args.write:
        PAGE.write_text(written_page(PAGE.read_text(encoding="utf-8"), page_lines(record, found)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
