"""Draw docs/images/architecture.svg: the stages of a PPO step, read from the code of `megappo/trainer/ppo.py`.

    python scripts/draw_architecture.py            # writes the picture
    python scripts/draw_architecture.py --check    # exit code 1 if the picture is not the code's

A row is a stage of `PPO.step`: the name of its timer, the functions that it calls with the module they live in, those of its
rollout side and training side too, and the names that it leaves for later stages. Nothing but the widths is written here, so the
picture changes when the loop does.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOOP = ROOT / "megappo" / "trainer" / "ppo.py"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"

SIDES = ("RolloutSide", "TrainingSide")  # parts of the loop whose methods are read too

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


@dataclass(frozen=True)
class Source:
    """A class of the trainer in its file. modules: imported name -> module. parts: attribute -> the class that it is of."""

    modules: dict[str, str]
    parts: dict[str, str]
    methods: dict[str, ast.FunctionDef]
    fields: dict[str, str]

    @classmethod
    def of(cls, source: str, name: str) -> Source:
        tree = ast.parse(source)
        modules = {
            alias.asname or alias.name: node.module.removeprefix("megappo.")
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("megappo.")
            for alias in node.names
        }
        body = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name).body
        methods = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        fields = dict(_annotated((node.target.id, node.annotation) for node in body if _is_field(node)))  # type: ignore[union-attr]
        start = methods.get("__init__")
        given = [] if start is None else [*start.args.args, *start.args.kwonlyargs]
        parts = dict(_annotated((one.arg, one.annotation) for one in given if one.annotation is not None))
        for whole in sorted({"Run", "Sampler"} & {*parts.values()}):  # its parts are those of the class too
            held = source_of(modules[whole], whole)
            modules, parts = {**held.modules, "Steps": modules[whole], **modules}, {**held.fields, **parts}
        return cls(modules, {key: found for key, found in parts.items() if found in modules}, methods, fields)

    def part(self, owner: ast.expr) -> str | None:
        """Class of a part: of `self.rollout`, `rollout` or one of `self._extras`."""
        match owner:
            case ast.Attribute(value=ast.Name(id="self"), attr=name) | ast.Name(id=name):
                return self.parts.get(name.removeprefix("_")) or self.parts.get(f"{name}s")
        return None

    def within(self, method: str) -> Source:
        """The same class inside of a method, whose arguments are parts too."""
        arguments = self.methods[method].args.args
        given = dict(_annotated((one.arg, one.annotation) for one in arguments if one.annotation is not None))
        return replace(self, parts={**self.parts, **{key: found for key, found in given.items() if found in self.modules}})


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _annotated(pairs: Iterable[tuple[str, ast.expr]]) -> Iterator[tuple[str, str]]:
    """(name, class) of annotated names, of `Sequence[Extra]` the class Extra."""
    for name, annotation in pairs:
        found = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name) and node.id[0].isupper()]
        if found:
            yield name, found[-1]


def source_of(module: str, name: str) -> Source:
    return Source.of((ROOT / "megappo" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"), name)


def stages_of(source: str) -> list[Stage]:
    """Read the stages of `PPO.step`: statements between two comments that are a number."""
    lines, loop = source.splitlines(), Source.of(source, "PPO")
    found: dict[int, list[ast.stmt]] = {}
    number = 0
    # A loop repeats the stages in it.
    for statement in (
        one for outer in loop.methods["step"].body for one in (outer.body if isinstance(outer, ast.While) else [outer])
    ):
        comment = lines[statement.lineno - 1].rpartition("#")[2].strip()
        number = int(comment) if comment.isdigit() else number
        if number:
            found.setdefault(number, []).append(statement)
    return [
        Stage(
            number,
            tuple(name for s in statements if (name := _timer(s)) is not None),
            tuple(dict.fromkeys(call for s in statements for call in _calls(s, loop))),
            (
                *(name for name in _names(statements, ast.Store) if name in _names(_after(found, number), ast.Load)),
                *dict.fromkeys(field for s in statements for field in _recorded(s, loop) if field.startswith("record.")),
            ),
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


def _timer(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.With) and isinstance(call := statement.items[0].context_expr, ast.Call) and call.args:
        name = call.args[0]
        # A stage that a part names is, with a critic, its update.
        return name.value if isinstance(name, ast.Constant) else "update_critic"
    return None


def _entered(statement: ast.AST, where: Source) -> Iterator[tuple[ast.Call, tuple[str, str] | None, list[ast.stmt], Source]]:
    """Calls in the order of the text: (call, its name and module or None, statements that it enters, the class of these)."""
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0)):
        match call.func:
            case ast.Name(id=name) if name in where.modules and not where.modules[name].startswith("telemetry.timers"):
                yield call, (name, where.modules[name]), [], where
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if name in where.methods:
                yield call, None, where.methods[name].body, where.within(name)
            case ast.Attribute(value=owner, attr=name) if (part := where.part(owner)) is not None:
                if part in SIDES:
                    side = source_of(where.modules[part], part)
                    yield call, None, side.methods[name].body, side.within(name)
                else:
                    yield call, (f"{part}.{name}", where.modules[part]), [], where


def _calls(statement: ast.AST, where: Source) -> Iterator[tuple[str, str]]:
    """Calls of imported functions and of methods of the parts, in the order of the text; methods of the loop and of its sides are
    entered."""
    for _, named, inner, source in _entered(statement, where):
        if named is not None:
            yield named
        for one in inner:
            yield from _calls(one, source)


def _recorded(statement: ast.AST, where: Source) -> Iterator[str]:
    """Fields of the step's record that are set, also by methods that are entered."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
    for _, _, inner, source in _entered(statement, where):
        for one in inner:
            yield from _recorded(one, source)


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
