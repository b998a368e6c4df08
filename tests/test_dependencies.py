"""The direction of imports that the design states, read from the source: who may import megatron, vllm, transformers, and
each other.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "megappo"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Library -> parts of the package (by path prefix below megappo/) that may import it.
ALLOWED_LIBRARIES = {
    "megatron": ("platform/", "parallel/", "models/", "engine/megatron", "checkpoint/"),
    "vllm": ("rollout/vllm", "bridge/vllm"),
    "transformers": ("models/", "data/tokenizers"),
}
# May be imported by every part, and imports none.
EVERYBODYS = {"error_text", "json_object", "own_code"}
# Part -> megappo parts that it may import, where the design restricts it. A part may always import itself.
ALLOWED_PARTS = {
    "error_text.py": set(),
    "json_object.py": set(),
    "own_code.py": set(),
    "config/": set(),
    "telemetry/log.py": set(),
    "algo/": set(),
    "ops/": {"algo", "cache_dir", "resilience"},  # how a helper process is started
    "platform/quiet.py": set(),
    "bridge/": {"models", "parallel", "platform", "rollout"},  # platform/garbage.py
    "checkpoint/": {"parallel", "platform", "resilience"},  # how the writer process is started
    "data/": {"cache_dir", "config", "resilience"},  # how the encoding processes are started
    "rewards/": {"config", "resilience", "workers"},
    "workers/": {"resilience"},  # how a helper process is started
    "experience/": {"algo", "data", "parallel", "platform"},
    "convert/": {"config"},
    "runs/": {"checkpoint", "config", "resilience", "telemetry"},
    "trajectories/": {"arguments", "config", "telemetry"},
}
FORBIDDEN_PARTS = {
    "models/": {"algo", "engine", "trainer", "rollout", "verify"},
    "trainer/": {"plan", "tune", "verify"},  # instruments, which know the trainer and are not known to it
    "prepare/": {"plan", "tune", "verify", "trainer", "engine"},
    "plan/": {"tune", "verify"},
    "verify/": {"rollout", "rewards", "checkpoint", "bridge"},
    "engine/": {"algo", "trainer", "rollout", "rewards", "verify", "prepare", "plan", "tune", "bridge"},
    "rollout/": {"algo", "trainer", "plan", "tune", "verify"},
    "parallel/": {"algo", "ops", "models", "engine", "trainer", "rollout", "prepare", "plan", "tune", "verify"},
}
# Module prefix -> parts of the package that may import it: `engine.base` and `engine.factory` are the boundary, and behind it
# nobody looks. Shapes of Megatron's models (`models.meta`) are the models' own business.
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
    "megappo.models.own_classes": ("engine/", "models/"),
    "megappo.models.tensor_parallel": ("engine/", "models/"),
    "megappo.models.naming": ("engine/", "models/"),
    # The choice of an engine: where a run, a trial or a measurement has it as the default of an argument, and nowhere else.
    "megappo.engine.build": (
        "engine/",
        *(f"trainer/{start}.py" for start in ("main", "sft", "export", "generate", "evaluate")),
        "verify/world.py",
        "tune/trial.py",
    ),
}


@functools.cache  # every test below walks over many of the same modules
def imported_names(source: str) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {node.module or ""}
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def library_faults(path: str, source: str) -> list[str]:
    names = imported_names(source)
    return [
        library
        for library, places in ALLOWED_LIBRARIES.items()
        if any(name == library or name.startswith(f"{library}.") for name in names) and not path.startswith(places)
    ]


def part_faults(path: str, source: str) -> set[str]:
    own = path.split("/")[0].removesuffix(".py")
    parts = (
        {name.split(".")[1] for name in imported_names(source) if name.startswith("megappo.") and name.count(".") >= 1}
        - {own}
        - EVERYBODYS
    )
    faults: set[str] = set()
    for prefix, allowed in ALLOWED_PARTS.items():
        if path.startswith(prefix):
            faults |= parts - allowed
    for prefix, forbidden in FORBIDDEN_PARTS.items():
        if path.startswith(prefix):
            faults |= parts & forbidden
    return faults


def module_faults(path: str, source: str) -> set[str]:
    """Modules behind the boundary of an engine; `engine.megatron` stands for `engine.megatron_schedule` too."""
    names = imported_names(source)
    return {
        prefix
        for prefix, places in ALLOWED_MODULES.items()
        if any(name.startswith(prefix) for name in names) and not path.startswith(places)
    }


@pytest.mark.parametrize("module", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_module_imports_only_what_its_part_may(module: Path) -> None:
    path, source = module.relative_to(PACKAGE).as_posix(), module.read_text(encoding="utf-8")
    assert not library_faults(path, source)
    assert not part_faults(path, source)
    assert not module_faults(path, source)


def test_a_forbidden_import_is_detected() -> None:
    assert library_faults("trainer/ppo.py", "import megatron.core") == ["megatron"]
    assert library_faults("rollout/types.py", "def f():\n    from vllm import LLM") == ["vllm"]
    assert part_faults("engine/megatron.py", "from megappo.algo.kl import FixedKL") == {"algo"}
    assert module_faults("trainer/roles.py", "from megappo.engine.megatron import MegatronEngine") == {"megappo.engine.megatron"}
    assert module_faults("bridge/sync.py", "from megappo.engine import megatron_schedule") == {"megappo.engine.megatron"}
    assert module_faults("verify/measure.py", "from megappo.engine.build import build_frozen") == {"megappo.engine.build"}
    assert not module_faults("trainer/main.py", "from megappo.engine.build import RoleEngines")
    assert part_faults("algo/kl.py", "from megappo import ops\nimport megappo.data.packing") == {"ops", "data"}


def import_graph() -> dict[str, set[str]]:
    """Module -> modules of megappo that it imports, inside functions too."""
    sources = {".".join(("megappo", *p.relative_to(PACKAGE).with_suffix("").parts)): p.read_text(encoding="utf-8") for p in MODULES}
    return {name: set(imported_names(source) & sources.keys()) for name, source in sources.items()}


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


@pytest.mark.parametrize("start", ("main", "sft", "generate", "export"))
def test_a_run_brings_no_instrument(start: str) -> None:
    brought = closure(import_graph(), f"megappo.trainer.{start}")
    assert not {name for name in brought if name.split(".")[1] in ("plan", "tune", "verify")}


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
    others = [*root.glob("docs/*.md"), root / "CONTRIBUTING.md", *root.glob("scripts/**/*.py"), *root.glob("examples/*.py")]
    elsewhere = "\n".join(path.read_text(encoding="utf-8") for path in others)
    assert unused({p.relative_to(PACKAGE).as_posix(): p.read_text(encoding="utf-8") for p in MODULES}, elsewhere) == []


def test_code_that_nobody_uses_is_found() -> None:
    sources = {"a.py": "def f(): ...\nclass C: ...\n@op\ndef g(): ...", "b.py": "from megappo.a import C\ndef h(): ...\nx = 'h'"}
    assert unused(sources) == ["a.py: f"]
    assert unused(sources, "call `f()`") == []
