"""The model of the step time beside steps that others published (tests/commands/tune/published_steps.json).

    python benchmarks/step_time.py            # every row
    python benchmarks/step_time.py --write    # and the table of docs/layouts.md

A row with `chooses` gave a constant of a profile (`megappo/telemetry/hardware.yaml`) or of a framework and is no test of the model.
Frameworks push weights in ways of their own: `frameworks` of the record has their constants with the sources."""

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

from megappo.commands.plan.memory import FP32, count_parameters
from megappo.commands.tune.candidates import Choice, Machine
from megappo.commands.tune.cost import workload_of
from megappo.commands.tune.lengths import SPREAD, Lengths
from megappo.commands.tune.parts import parts_of
from megappo.commands.tune.search import Search
from megappo.config.loading import load_config
from megappo.config.schema import TrainConfig
from megappo.models.arch import ModelArch
from megappo.parallel.layout import ParallelLayout, placement_of
from megappo.telemetry.hardware import Hardware, load_hardware
from megappo.telemetry.tables import table
from megappo.trainer.prepare.layouts import read_archs

FIGURES = ROOT / "tests/commands/tune/published_steps.json"
PAGE = ROOT / "docs/layouts.md"
BEGIN, END = "<!-- published steps begin here -->", "<!-- published steps end here -->"
WHOLE = ("total", "generate", "log-probs", "update", "push")
PARTS = (*WHOLE, "trainer")
BEFORE_OVERLAP = (0, 13)  # the last release of vLLM whose host never works beside the GPU (`tune/generation.py`, OVERLAPS_HOST)
MOST_SEQUENCES = 1024  # of a replica at once, vLLM's default on these GPUs
BF16 = 2
Row = Mapping[str, Any]


def predicted(row: Row, record: Mapping[str, Any], folder: Path, hardware: Hardware | None = None) -> dict[str, float]:
    """Seconds by part of a published step, as `megappo tune --as-is` prices them, with the constants of the framework that took it.
    folder: for its files."""
    model = folder / row["model"]
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(record["models"][row["model"]]), encoding="utf-8")
    base = json.loads(json.dumps(record["bases"][row["base"]]))
    base["policy"]["model"] = str(model)
    path = folder / "run.yaml"
    path.write_text(json.dumps(base), encoding="utf-8")  # which is YAML too
    config = load_config(path, [f"{key}={value}" for key, value in row["set"].items()])
    response, framework = row.get("response"), record["frameworks"].get(row["base"])
    lengths = None if response is None else Lengths(response, config.rollout.max_response_tokens, row.get("spread", SPREAD))
    hardware = hardware or load_hardware(row["gpu"])
    if framework is not None:
        hardware = replace(hardware, sparse_layer_overhead_us=framework["sparse_layer_overhead_us"][row["gpu"]])
        config = as_collected(config)
    machine = Machine(config.run.num_ranks or 1, hardware)
    if "vllm" in row:
        major, minor = map(int, row["vllm"].split("."))
        # NeMo-RL runs a replica of several ranks under Ray, for whose executor vLLM's host does not work beside the GPU.
        alone = config.rollout.tp == 1
        machine = replace(machine, vllm=(major, minor) if alone else min((major, minor), BEFORE_OVERLAP))
    work = replace(workload_of(config, None, response, lengths), unpassed=frozenset(row.get("unpassed", ())))
    archs = read_archs(config)
    choice = Search(config, archs, machine, work, ()).as_written()
    if framework is not None:
        choice = with_refit(choice, archs["policy"], framework, row["source"])
    parts = {part.name: part.seconds or 0.0 for part in parts_of(choice)}
    return {
        "total": choice.total_s,
        "generate": parts["generate"],
        "log-probs": sum(seconds for name, seconds in parts.items() if name.endswith("log-probs")),
        "update": parts["policy update"],
        "trainer": parts["policy update"] + choice.rest_s,
        "push": parts.get("push weights", 0.0),
    }


def as_collected(config: TrainConfig) -> TrainConfig:
    """The places that NeMo-RL's collector of an asynchronous run fills: those of max_staleness steps (`algorithms/async_utils.py`,
    `max_inflight`)."""
    rollout = config.rollout
    if rollout.max_staleness is None:
        return config
    replicas = len(placement_of(rollout.ranks, config.run.num_ranks or 1)) // rollout.tp
    places = config.data.prompts_per_step * rollout.samples_per_prompt // replicas * rollout.max_staleness
    return config.model_copy(update={"rollout": rollout.model_copy(update={"max_num_seqs": min(places, MOST_SEQUENCES)})})


def with_refit(choice: Choice, arch: ModelArch, framework: Mapping[str, Any], source: str) -> Choice:
    """The step with NeMo-RL's push of weights: every rank of vLLM is handed the whole model. With vLLM on the same ranks the state
    of the optimizer goes to pageable host memory before and comes back for the next update; beside vLLM on other ranks only v0.4
    moved it, for the log-probs."""
    parameters, config = count_parameters(arch, ParallelLayout(1), 0).total, choice.plan.config
    trip = 3 * FP32 * parameters / choice.roles["policy"].layout.world_size / (framework["optimizer_gb_s"] * 1e9)
    if config.rollout.max_staleness is None:
        push, prepare = BF16 * parameters / (framework["refit_gb_s"] * 1e9) + trip, trip
    else:
        push = BF16 * parameters / (framework["broadcast_gb_s"] * 1e9)
        prepare = 2 * trip if source == "nemo-0.4" else 0.0
    return replace(choice, push_s=push, rest_s=choice.rest_s + prepare)


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
    lines += ["", f"Constants of NeMo-RL, none of them chosen by a row that is a test: {record['frameworks']['nemo']['sources']}."]
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
