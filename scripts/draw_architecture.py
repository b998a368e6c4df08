"""Draw docs/images/architecture.svg: the stages of a PPO step, read from the code of `megappo/trainer/ppo.py`.

    python scripts/draw_architecture.py            # writes the picture
    python scripts/draw_architecture.py --check    # exit code 1 if the picture is not the code's

A row is a stage of `PPO.step`: the name of its timer, the functions that it calls with the module they live in, and the names that
it leaves for later stages. Nothing but the widths is written here, so the picture changes when the loop does.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOOP = ROOT / "megappo" / "trainer" / "ppo.py"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"

LINE = 17  # px between two lines of text
STAGE_X, CALLS_X, LEFT_X, WIDTH = 16, 210, 640, 940
ARROW_X = 104


@dataclass(frozen=True)
class Stage:
    """A stage of the loop. calls: (name, module or the part of the loop that it belongs to). leaves: names assigned in it."""

    number: int
    names: tuple[str, ...]
    calls: tuple[tuple[str, str], ...]
    leaves: tuple[str, ...]


def stages_of(source: str) -> list[Stage]:
    """Read the stages of `PPO.step`: statements between two comments that are a number."""
    lines, tree = source.splitlines(), ast.parse(source)
    modules = {
        alias.asname or alias.name: node.module.removeprefix("megappo.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("megappo.")
        for alias in node.names
    }
    loop = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "PPO")
    parts = _parts(loop, modules)
    methods = {node.name: node for node in loop.body if isinstance(node, ast.FunctionDef)}
    step = methods["step"]
    found: dict[int, list[ast.stmt]] = {}
    number = 0
    # A loop repeats the stages in it.
    for statement in (one for outer in step.body for one in (outer.body if isinstance(outer, ast.While) else [outer])):
        comment = lines[statement.lineno - 1].rpartition("#")[2].strip()
        number = int(comment) if comment.isdigit() else number
        if number:
            found.setdefault(number, []).append(statement)
    return [
        Stage(
            number,
            tuple(name for s in statements if (name := _timer(s)) is not None),
            tuple(dict.fromkeys(call for s in statements for call in _calls(s, modules, parts, methods))),
            tuple(name for name in _names(statements, ast.Store) if name in _names(_after(found, number), ast.Load)),
        )
        for number, statements in found.items()
    ]


def _after(found: dict[int, list[ast.stmt]], number: int) -> list[ast.stmt]:
    return [statement for later, statements in found.items() if later > number for statement in statements]


def _names(statements: list[ast.stmt], context: type[ast.expr_context]) -> tuple[str, ...]:
    """Names that are assigned (ast.Store) or read (ast.Load), in the order of the text; those of comprehensions are their own."""
    inside = {id(n) for s in statements for c in ast.walk(s) if isinstance(c, ast.comprehension) for n in ast.walk(c.target)}
    nodes = [node for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Name)]
    wanted = [node for node in nodes if isinstance(node.ctx, context) and id(node) not in inside]
    return tuple(dict.fromkeys(node.id for node in sorted(wanted, key=lambda node: (node.lineno, node.col_offset))))


def _parts(loop: ast.ClassDef, modules: dict[str, str]) -> dict[str, str]:
    """Attribute of the loop -> the class that it is of, from the annotated arguments of `__init__`."""
    start = next(node for node in loop.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    arguments = [*start.args.args, *start.args.kwonlyargs]
    parts = {}
    for argument in arguments:
        annotation = argument.annotation or ast.Constant(None)
        classes = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} & modules.keys()
        if classes:
            parts[argument.arg] = sorted(classes)[0]
    return parts


def _timer(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.With) and isinstance(call := statement.items[0].context_expr, ast.Call) and call.args:
        name = call.args[0]
        # Of a choice the first: the stage of a run with a critic.
        return ast.literal_eval(name.body if isinstance(name, ast.IfExp) else name)
    return None


def _calls(
    statement: ast.stmt, modules: dict[str, str], parts: dict[str, str], methods: dict[str, ast.FunctionDef]
) -> Iterator[tuple[str, str]]:
    """Calls of imported functions and of methods of the loop's parts, in the order of the text; its own methods are entered."""
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0)):
        match call.func:
            case ast.Name(id=name) if name in modules and not modules[name].startswith("telemetry.timers"):
                yield name, modules[name]
            case ast.Attribute(value=ast.Attribute(attr=owner), attr=name) if owner in parts:
                yield f"{parts[owner]}.{name}", modules[parts[owner]]
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if name in methods:
                for inner in methods[name].body:
                    yield from _calls(inner, modules, parts, methods)


def draw(stages: list[Stage]) -> str:
    """The picture as SVG text."""
    body: list[str] = []
    y = 44
    heads = ((STAGE_X, "stage (timer)"), (CALLS_X, "calls"), (LEFT_X, "leaves for later stages"))
    body += [f'<text class="head" x="{x}" y="26">{text}</text>' for x, text in heads]
    for stage in stages:
        rows = max(len(stage.names), len(stage.calls), 1)
        height = rows * LINE + 16
        body.append(f'<rect x="8" y="{y}" width="{WIDTH - 16}" height="{height}" rx="6"/>')
        for row, name in enumerate(stage.names or ("log, evaluate, save",)):
            label = f"{stage.number}  {name}" if row == 0 else f"    {name}"
            body.append(f'<text class="stage" x="{STAGE_X}" y="{y + 20 + row * LINE}" xml:space="preserve">{escape(label)}</text>')
        for row, (name, module) in enumerate(stage.calls):
            text = f'{escape(name)} <tspan class="module">{escape(module)}</tspan>'
            body.append(f'<text x="{CALLS_X}" y="{y + 20 + row * LINE}">{text}</text>')
        body.append(f'<text x="{LEFT_X}" y="{y + 20}">{escape(", ".join(stage.leaves))}</text>')
        y += height + 14
        if stage is not stages[-1]:
            body.append(f'<path d="M{ARROW_X} {y - 14} V{y - 3}" marker-end="url(#tip)"/>')
    first, last = stages[0], stages[-1]
    body.append(f'<path class="back" d="M{WIDTH - 8} {y - 30} h10 V60 h-9" marker-end="url(#tip)"/>')
    title = f"One step of PPO: stages {first.number} to {last.number}, then again with new weights"
    style = (
        "text{font:13px sans-serif;fill:#222}.head{font-weight:bold;fill:#555}.stage{font-weight:bold}"
        ".module{fill:#888;font-size:11px}rect{fill:#f5f7fa;stroke:#b8c4d0}path{fill:none;stroke:#5b7083;stroke-width:1.5}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 20}" height="{y}" viewBox="0 0 {WIDTH + 20} {y}" role="img">'
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    marker = f'<defs>{tip}<path d="M0 0 L8 4 L0 8 z" style="fill:#5b7083"/></marker></defs>'
    return "\n".join([head, f"<title>{title}</title><style>{style}</style>{marker}", *body, "</svg>"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only; exit code 1 if the picture is not the code's")
    check = parser.parse_args().check
    picture = draw(stages_of(LOOP.read_text(encoding="utf-8")))
    if not check:
        PICTURE.write_text(picture, encoding="utf-8")
        print(PICTURE.relative_to(ROOT))
        return 0
    if PICTURE.is_file() and PICTURE.read_text(encoding="utf-8") == picture:
        return 0
    print("docs/images/architecture.svg is not drawn from this code: run python scripts/draw_architecture.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
