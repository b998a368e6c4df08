"""The direction of imports that the design states, read from the source: who may import megatron, vllm, transformers, and
each other.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "megappo"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Library -> modules of the package (by path prefix below megappo/) that may import it.
ALLOWED_LIBRARIES = {
    "megatron": ("parallel/", "models/", "engine/megatron", "checkpoint/"),
    "vllm": ("rollout/vllm", "bridge/vllm"),
    # The server runs a reward model as transformers does.
    "transformers": ("models/", "data/tokenizers", "data/image_processor", "commands/serve_reward/"),
}
# A room imports lower floors only, and itself.
FLOORS = (
    ("commands",),
    ("trainer",),
    ("rollout",),
    ("engine", "bridge"),
    ("models", "checkpoint"),
    ("data", "ops", "rewards", "telemetry", "parallel"),
    ("runtime",),
    ("config", "algo"),
)
# Lower floors that a room does not know either: the engine gets its losses as callables, and no op, model or layout is of PPO.
STRANGERS = {
    "engine": {"algo"},
    "bridge": {"algo", "data", "ops", "rewards", "telemetry"},
    "models": {"algo", "rewards", "telemetry"},
    "checkpoint": {"algo", "data", "ops", "rewards", "telemetry"},
    "rollout": {"algo", "rewards", "checkpoint"},
    "data": {"algo"},
    "rewards": {"algo"},
    "telemetry": {"algo"},
    "parallel": {"algo"},
    "runtime": {"algo"},
    "ops": {"config"},
}
# Folder -> folders of the same room that it may import; a folder without an entry may import all of them.
OF_THE_ROOM = {"trainer/prepare": set(), "trainer/experience": set()}
# Module prefix -> places that may import it: `engine.base`, its `losses` and `factory` are the boundary of an engine, and behind it
# nobody looks. Which engines there are is the default of an argument where a run, a trial or a measurement begins.
ALLOWED_MODULES = {
    "megappo.engine.megatron": ("engine/",),
    "megappo.engine.fsdp2": ("engine/",),
    "megappo.engine.role_engine": ("engine/",),
    "megappo.engine.micro_batches": ("engine/",),
    "megappo.engine.linear_output": ("engine/",),
    "megappo.engine.offload": ("engine/",),
    "megappo.models.gpt": ("engine/", "models/"),
    "megappo.models.build": ("engine/", "models/"),
    "megappo.models.hf_import": ("engine/", "models/"),
    "megappo.models.hf_export": ("engine/", "models/"),
    "megappo.models.hf_classes": ("engine/", "models/"),
    "megappo.models.tensor_parallel": ("engine/", "models/"),
    "megappo.engine.build": (
        "engine/",
        "trainer/main.py",
        *(f"commands/{start}.py" for start in ("export/export", "generate/answer", "eval/evaluate")),
        "commands/verify/world.py",
        "commands/tune/trial.py",
    ),
}


@functools.cache  # every rule below walks over the same modules
def imports_in(source: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    return tuple(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom))


@functools.cache
def imported_names(source: str) -> frozenset[str]:
    names: set[str] = set()
    for node in imports_in(source):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {node.module or ""}
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def floor_of(room: str) -> int:
    return next(height for height, rooms in enumerate(reversed(FLOORS)) if room in rooms)


def room_faults(path: str, source: str) -> set[str]:
    """Rooms that the module imports and may not."""
    room = path.split("/")[0]
    others = {name.split(".")[1] for name in imported_names(source) if name.startswith("megappo.")} - {room}
    return {other for other in others if floor_of(other) >= floor_of(room) or other in STRANGERS.get(room, ())}


def folder_faults(path: str, source: str) -> set[str]:
    """Modules of the same room that a folder of it imports and may not."""
    folder = path.rpartition("/")[0]
    if folder not in OF_THE_ROOM:
        return set()
    own, room = "megappo." + folder.replace("/", "."), f"megappo.{folder.split('/')[0]}."
    return {name for name in imported_names(source) if name.startswith(room) and not name.startswith(own)}


def library_faults(path: str, source: str) -> set[str]:
    names = imported_names(source)
    return {
        library
        for library, places in ALLOWED_LIBRARIES.items()
        if any(name == library or name.startswith(f"{library}.") for name in names) and not path.startswith(places)
    }


def module_faults(path: str, source: str) -> set[str]:
    """Modules behind the boundary of an engine; `engine.megatron` stands for `engine.megatron_schedule` too."""
    names = imported_names(source)
    return {
        prefix
        for prefix, places in ALLOWED_MODULES.items()
        if any(name.startswith(prefix) for name in names) and not path.startswith(places)
    }


OBJECT_COLLECTIVES = re.compile(r"\.\s*((?:all_gather|gather|broadcast|scatter|send|recv)_object(?:_list)?)\b")


def collective_faults(path: str, source: str) -> set[str]:
    """Exchanges of Python objects outside parallel/, whose `gathered`, `told_by` and `raised_by_all` are the only ones."""
    return set() if path.startswith("parallel/") else set(OBJECT_COLLECTIVES.findall(source))


RULES = (collective_faults, room_faults, folder_faults, library_faults, module_faults)


def strangers_to_all(source: str, modules: set[str]) -> set[str]:
    """Modules of megappo that the source imports and that do not exist: late imports show only when they run."""
    named = {n.module for n in imports_in(source) if isinstance(n, ast.ImportFrom) and n.module}
    return {name for name in named if name.split(".")[0] == "megappo" and name not in modules}


def test_every_import_of_the_package_exists() -> None:
    root = PACKAGE.parent
    modules = {".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for p in MODULES}
    files = [*MODULES, *(path for part in ("tests", "scripts", "benchmarks", "examples") for path in (root / part).rglob("*.py"))]
    found = {str(path.relative_to(root)): strangers_to_all(path.read_text(encoding="utf-8"), modules) for path in files}
    assert {path: names for path, names in found.items() if names} == {}
    assert strangers_to_all("def f():\n    from megappo.gone import x", modules) == {"megappo.gone"}


def test_every_module_imports_only_what_its_place_may() -> None:
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in MODULES}
    inside = {path: source for path, source in sources.items() if "/" in path}
    assert sources.keys() - inside == {"__init__.py", "__main__.py"}
    found = {path: set().union(*(rule(path, source) for rule in RULES)) for path, source in inside.items()}
    assert {path: faults for path, faults in found.items() if faults} == {}


def test_a_forbidden_import_is_detected() -> None:
    assert library_faults("trainer/ppo.py", "import megatron.core") == {"megatron"}
    assert library_faults("rollout/types.py", "def f():\n    from vllm import LLM") == {"vllm"}
    assert collective_faults("trainer/preflight.py", "dist.all_gather_object(found, own)") == {"all_gather_object"}
    assert room_faults("engine/megatron.py", "from megappo.algo.kl import FixedKL") == {"algo"}
    assert room_faults("algo/kl.py", "from megappo import ops\nimport megappo.data.packing") == {"ops", "data"}
    assert room_faults("config/checks.py", "def f():\n    import megappo.runtime.world") == {"runtime"}
    assert room_faults("data/packing.py", "import megappo.ops.losses") == {"ops"}, "rooms of one floor do not know each other"
    assert folder_faults("trainer/prepare/data.py", "from megappo.trainer.roles import Critic") == {
        "megappo.trainer.roles",
        "megappo.trainer.roles.Critic",
    }
    assert not folder_faults("trainer/prepare/data.py", "from megappo.trainer.prepare.hub import fetch")
    assert module_faults("trainer/roles.py", "from megappo.engine.megatron import MegatronEngine") == {"megappo.engine.megatron"}
    assert module_faults("bridge/sync.py", "from megappo.engine import megatron_schedule") == {"megappo.engine.megatron"}
    assert module_faults("commands/verify/measure.py", "from megappo.engine.build import build_megatron") == {
        "megappo.engine.build"
    }
    assert not module_faults("trainer/main.py", "from megappo.engine.build import RoleEngines")


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Module -> modules of megappo that it imports, inside functions too."""
    names = {p: ".".join(("megappo", *p.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__") for p in MODULES}
    sources = {names[p]: p.read_text(encoding="utf-8") for p in MODULES}
    return {name: modules_of(source, sources.keys()) for name, source in sources.items()}


def modules_of(source: str, known: Collection[str]) -> set[str]:
    """Of the known modules those that a source imports; of `from package import module` the module alone."""
    found: set[str] = set()
    for node in imports_in(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else str(node.module) for name in inside}
    return found & set(known)


def closure(graph: dict[str, set[str]], start: str) -> set[str]:
    """All modules that `start` brings, itself included."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting.extend(graph[name])
    return reached


INSTRUMENTS = ("plan", "tune", "verify")


def instruments_of(*starts: str) -> set[str]:
    """Instruments that these modules of megappo bring."""
    graph = import_graph()
    brought = set().union(*(closure(graph, f"megappo.{start}") for start in starts))
    return {one for one in INSTRUMENTS if any(f"{name}.".startswith(f"megappo.commands.{one}.") for name in brought)}


def test_a_rank_and_what_works_on_checkpoints_bring_no_instrument() -> None:
    """`commands.rank` is all that a process runs which finds itself to be a rank, whoever started it."""
    assert instruments_of("commands.rank", "trainer.main", "commands.generate", "commands.export", "commands.eval") == set()
    starts = "negative control: the process that starts the ranks plans the run, and predicts its steps"
    assert instruments_of("commands.train") == {"plan", "tune"}, starts


def test_a_closure_follows_modules_to_the_end() -> None:
    assert closure({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}, "a") == {"a", "b", "c"}


def test_there_are_no_import_cycles() -> None:
    """Between modules, imports inside functions included."""
    graph = import_graph()
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


# ------------------------------------------------------------------------------------------------------------------- unused code


def names_used(tree: ast.Module) -> Iterator[str]:
    """Names that code reads, imports or spells in a short text (a registry, an annotation in quotes)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 100:
            yield from re.findall(r"\w+", node.value)


def unused(sources: dict[str, str], elsewhere: str = "") -> list[str]:
    """`file: name` of functions and classes of modules that no module reads and `elsewhere` does not name. Decorated ones are
    registered by their decorator."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    used = {name for tree in trees.values() for name in names_used(tree)} | set(re.findall(r"\w+", elsewhere))
    return [
        f"{path}: {node.name}"
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.decorator_list and node.name not in used
    ]


def test_nothing_is_there_for_the_tests_alone() -> None:
    root = PACKAGE.parent
    others = [
        *root.glob("docs/*.md"),
        root / "CONTRIBUTING.md",
        *root.glob("scripts/**/*.py"),
        *root.glob("benchmarks/**/*.py"),
        *root.glob("examples/*.py"),
    ]
    elsewhere = "\n".join(path.read_text(encoding="utf-8") for path in others)
    assert unused({p.relative_to(PACKAGE).as_posix(): p.read_text(encoding="utf-8") for p in MODULES}, elsewhere) == []


def test_code_that_nobody_uses_is_found() -> None:
    sources = {"a.py": "def f(): ...\nclass C: ...\n@op\ndef g(): ...", "b.py": "from megappo.a import C\ndef h(): ...\nx = 'h'"}
    assert unused(sources) == ["a.py: f"]
    assert unused(sources, "call `f()`") == []
