"""Measure the parity matrix and write docs/parity.md: `python tests/parity/page.py` from the repository's root (minutes on 2
cores).

The runs are those of tests/parity, which assert what this prints. Needs the test requirements (`scripts/setup_env.sh --test`).
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

OUTPUT = ROOT / "docs" / "parity.md"
# Columns of the matrix, each of several quantities of `megappo.commands.verify.compare`.
COLUMNS = ("tokens", "losses", "gradients", "parameters")
_LOSSES = ("loss", "metrics", "gradient norm")
Row = Sequence[str]


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0]).parse_args()  # there is nothing to choose
    from tests.parity import conftest, matrix, replay
    from tests.parity.oracle import ppo_step
    from tests.worlds import spawn_world

    with tempfile.TemporaryDirectory() as folder:
        models = {model: Path(folder, model) for model in matrix.MODELS}
        for model, path in models.items():
            matrix.write_models(path, model)
        named = {model: str(path) for model, path in models.items()}
        worlds = {size: spawn_world(conftest.measure_all, size, named, False)[0] for size in (1, 2, 4)}
        measured = {size: found for size, (found, _) in worlds.items()}
        faulty = worlds[1][1] | worlds[2][1]
        expected = {}
        for model, path in models.items():
            config = matrix.config_of(path)
            step = (conftest.samples(), conftest.order_of(config), conftest.numbers_of(config), config.run.seed)
            expected[model] = ppo_step(path / "policy", path / "reference", *step)
        chosen = {model: named[model] for model in replay.REPLAYED}
        replayed = {size: spawn_world(replay.replay_world, size, chosen)[0] for size in (1, 2)}
    template = (ROOT / "tests" / "parity" / "parity.md.in").read_text(encoding="utf-8")
    tables = {
        "machine": f"{platform.machine()}, CPU, fp32, gloo",
        "oracle": markdown(("model", *COLUMNS), list(oracle_rows(measured, expected))),
        "matrix": matrix_text(dict(matrix_rows(measured))),
        "variants": variants_text(dict(variant_rows(measured))),
        "replay": markdown(("model", "layout", "policy", "critic", "curves"), list(replay_rows(replayed))),
        "faults": markdown(("mistake", "noticed in", "difference", "layout"), list(fault_rows(faulty, measured, expected))),
    }
    for name, text in tables.items():
        template = template.replace("{{" + name + "}}", text)
    OUTPUT.write_text(template, encoding="utf-8")
    print(f"wrote {OUTPUT.relative_to(ROOT)}")


def markdown(head: Row, rows: Sequence[Row]) -> str:
    first, *others = ("| " + " | ".join(line) + " |" for line in (head, *rows))
    return "\n".join((first, "|" + "---|" * len(head), *others))


def short(title: str) -> str:
    """A layout without its sizes of 1: `tp2 sp` for `tp2 pp1 dp1 sp`."""
    roles = (" ".join(word for word in role.split() if word not in ("tp1", "pp1", "dp1")) for role in title.split(" / critic "))
    return " / critic ".join(role or "one rank" for role in roles)


def matrix_text(rows: dict[tuple[str, str], Row]) -> str:
    """A table for each model."""
    models = list(dict.fromkeys(model for model, _ in rows))
    tables = (
        markdown(("layout", *COLUMNS), [(layout, *row) for (of, layout), row in rows.items() if of == model]) for model in models
    )
    return "\n\n".join(f"### {model}\n\n{table}" for model, table in zip(models, tables, strict=True))


def variants_text(rows: dict[tuple[str, str, str], Row]) -> str:
    """A table of the largest differences, and one of bf16, which differs by more than rounding in fp32."""
    layouts = list(dict.fromkeys((model, layout) for model, layout, _ in rows))
    exact = [name for name in dict.fromkeys(variant for _, _, variant in rows) if name != "bf16"]
    largest_of: list[Row] = [(*of, *(max(rows[*of, name], key=float) for name in exact)) for of in layouts]
    of_bf16: list[Row] = [(*of, *rows[*of, "bf16"]) for of in layouts]
    return f"{markdown(('model', 'layout', *exact), largest_of)}\n\nIn bf16:\n\n{markdown(('model', 'layout', *COLUMNS), of_bf16)}"


def oracle_rows(measured: Any, expected: Any) -> Iterator[Row]:
    """A row for each model: the largest relative differences of each column."""
    from tests.parity.test_oracle import differences

    for model, outcome in expected.items():
        found = dict(differences(measured[1][model]["tp1 pp1 dp1"], outcome))
        yield model, *(f"{max(size for name, size in found.items() if column_of(name) == column):.1e}" for column in COLUMNS)


def column_of(quantity: str) -> str:
    """Column of a quantity of the step written out: `policy gradient norm` is one of the losses."""
    name = quantity.removeprefix("policy ").removeprefix("critic ")
    return name if name in COLUMNS else "losses" if name in _LOSSES else "tokens"


def largest(found: Any, baseline: Any) -> Row:
    """The largest relative difference of each column."""
    from megappo.commands.verify.compare import compare

    by_column = dict.fromkeys(COLUMNS, 0.0)
    for d in compare(found, baseline):
        quantity = d.quantity.removesuffix(", copies")
        column = quantity if quantity in COLUMNS else "losses" if quantity in _LOSSES else "tokens"
        by_column[column] = max(by_column[column], d.relative)
    return [f"{value:.1e}" if value else "0" for value in by_column.values()]


def matrix_rows(measured: Any) -> Iterator[tuple[tuple[str, str], Row]]:
    from tests.parity.matrix import MODELS, title

    for model, sizes in MODELS.items():
        for size, cases in sizes.items():
            for case in cases:
                name = title(case, size)
                yield (model, short(name)), largest(measured[size][model][name], measured[1][model]["tp1 pp1 dp1"])


def variant_rows(measured: Any) -> Iterator[tuple[tuple[str, str, str], Row]]:
    from tests.parity.matrix import RUN_TOGETHER, VARIED, title

    for model, sizes in VARIED.items():
        for size, cases in sizes.items():
            for case in cases:
                for variant in RUN_TOGETHER:
                    name = title(case, size)
                    found = largest(measured[size][model][f"{name}, {variant}"], measured[1][model]["tp1 pp1 dp1"])
                    yield (model, short(name), variant), found


def replay_rows(replayed: Any) -> Iterator[Row]:
    from tests.parity.matrix import title
    from tests.parity.replay import REPLAYED

    for model, sizes in REPLAYED.items():
        expected = replayed[1][model]["tp1 pp1 dp1"]
        for size, cases in sizes.items():
            for case in cases if size > 1 else ():
                yield model, short(title(case, size)), *after_all_steps(replayed[size][model][title(case, size)], expected)


def after_all_steps(found: Any, expected: Any) -> Row:
    """Largest relative difference of the policy's parameters, of the critic's, and of the curves of a replay."""
    from megappo.commands.verify.compare import compare
    from tests.parity.replay import curves

    tensors = {d.role: d.relative for d in compare(found, expected) if d.quantity == "parameters"}
    a, b = curves(found), curves(expected)
    curve = max(abs(x - y) / max(1.0, abs(y)) for name in b for x, y in zip(a[name], b[name], strict=True))
    return [f"{one:.1e}" for one in (tensors["policy"], tensors["critic"], curve)]


def fault_rows(faulty: Any, measured: Any, expected: Any) -> Iterator[Row]:
    from tests.parity.faults import BETWEEN, SHARED
    from tests.parity.matrix import title
    from tests.parity.test_faults import from_one_rank, from_the_oracle

    for fault, (role, quantity) in SHARED.items():
        size = from_the_oracle(faulty[fault], expected["llama"], role, quantity)
        yield fault, quantity, f"{size:.1e}", "one rank"
    for fault, (model, case, (role, quantity)) in BETWEEN.items():
        found = from_one_rank(faulty[fault], measured[1][model]["tp1 pp1 dp1"], role, quantity)
        yield fault, f"{role} {quantity}", f"{found.relative:.1e}", f"{model}, {short(title(case, 2))}"


if __name__ == "__main__":
    main()
