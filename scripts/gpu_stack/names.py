"""Names and keywords of the libraries that megappo touches, looked up in the sources of any version of them, without importing it:

    python -m scripts.gpu_stack.names FOLDER...      each a site-packages, or the folder of an unpacked wheel

Prints a line per library and version, and one per name that is not there; exit status 1 if there is one. megappo's side is its
imports, the attributes of modules that it imports, the keywords of its calls of them, and `OBJECTS`: what it takes from objects
that a library hands out.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megappo.bridge.vllm_reload import _INFO_FIELDS, _STEPS

ROOT = Path(__file__).resolve().parents[2]
# TransformerEngine is touched by Megatron-core alone.
LIBRARIES = {"vllm": "vllm", "megatron-core": "megatron.core", "torch": "torch"}
# Made at import, so that no source names them: operators by C++, properties by metaclasses.
MADE_AT_IMPORT = ("torch.ops.", "torch.classes.", "torch.distributed.group.")
RELOAD = "vllm.model_executor.model_loader.reload"

# Class of a library -> members that megappo uses of its objects, methods with the arguments that it passes.
OBJECTS: dict[str, tuple[str, ...]] = {
    "vllm.LLM": ("sleep(level)", "wake_up(tags)", "release_kv_cache_memory()", "reset_prefix_cache()", "llm_engine"),
    "vllm.v1.engine.llm_engine.LLMEngine": (
        "add_request(request_id, prompt, params, lora_request)",
        "step()",
        "engine_core",
        "model_executor",
        "output_processor",
    ),
    "vllm.v1.engine.core_client.InprocClient": ("get_output()", "engine_core", "_finalizer"),
    "vllm.v1.engine.core.EngineCore": ("shutdown()", "scheduler", "batch_queue"),
    "vllm.v1.core.sched.scheduler.Scheduler": ("has_requests()",),
    "vllm.v1.engine.output_processor.OutputProcessor": ("request_states",),
    "vllm.v1.engine.output_processor.RequestState": ("logprobs_processor",),
    "vllm.v1.executor.uniproc_executor.ExecutorWithExternalLauncher": ("_distributed_args()",),
    "vllm.v1.worker.gpu_worker.Worker": ("get_model()", "sleep(level)", "wake_up(tags)", "model_runner", "weight_transfer_engine"),
    "vllm.v1.worker.worker_base.WorkerBase": ("vllm_config", "device"),
    "vllm.distributed.weight_transfer.WeightTransferEngine": (
        *("model", "model_config", "vllm_config", "device"),
        "init_transfer_engine(init_info)",
        "receive_weights(update_info)",
    ),
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": ("kv_caches",),
    "vllm.v1.worker.lora_model_runner_mixin.LoRAModelRunnerMixin": ("lora_manager",),
    "vllm.lora.worker_manager.WorkerLoRAManager": ("_adapter_manager",),
    "vllm.lora.model_manager.LoRAModelManager": ("add_adapter(adapter)", "remove_adapter(adapter_id)", "activate_adapter(lora_id)"),
    f"{RELOAD}.layerwise": tuple(f"{name}({', '.join(given)})" for name, given in _STEPS.values()),
    f"{RELOAD}.types.LayerReloadingInfo": ("can_load()", "reset()", *sorted(_INFO_FIELDS)),
    "megatron.core.parallel_state": ("_GLOBAL_MEMORY_BUFFER", "_set_global_memory_buffer()"),
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer": (
        "_get_model_param_range_map(param)",
        *("model_fp32_groups", "model_float16_groups", "buffers", "data_parallel_group", "is_stub_optimizer"),
    ),
    "megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params": (
        *("float16_groups", "fp32_from_float16_groups", "fp32_from_fp32_groups"),
    ),
    "megatron.core.optimizer.optimizer.MegatronOptimizer": ("get_parameters()",),
    "megatron.core.distributed.DistributedDataParallel": ("zero_grad_buffer()",),
}


@dataclass(frozen=True)
class Use:
    """A dotted name that megappo takes from a library at `where`; of a call how many arguments by position, and its keywords."""

    name: str
    where: str
    positional: int = 0
    keywords: tuple[str, ...] = ()


def uses(folder: Path = ROOT / "megappo") -> list[Use]:
    """Find every name of a library in megappo's source."""
    return [use for file in sorted(folder.rglob("*.py")) for use in _uses_of(file)]


def _uses_of(file: Path) -> Iterator[Use]:
    tree, bound = ast.parse(file.read_text()), {}
    where = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else file.name
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_library(node.module or ""):
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield Use(f"{node.module}.{alias.name}", where)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_library(alias.name):
                    bound[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
                    yield Use(alias.name, where)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _dotted(node.func, bound)):
            keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
            positional = 0 if any(isinstance(argument, ast.Starred) for argument in node.args) else len(node.args)
            yield Use(name, where, positional, keywords)
        elif isinstance(node, ast.Attribute) and (name := _dotted(node, bound)):
            yield Use(name, where)


def _is_library(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in LIBRARIES.values())


def _dotted(node: ast.expr, bound: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return bound.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value, bound)):
        return f"{owner}.{node.attr}"
    return None


Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.stmt


class Sources:
    """Sources of a library in a folder. A definition is found where it is written, through imports and base classes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.module = cache(self._module)
        self.find = cache(self._find)

    def _module(self, name: str) -> ast.Module | None:
        path = self._folder.joinpath(*name.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py"), path / "__init__.pyi", path.with_suffix(".pyi")):
            if file.is_file():
                return ast.parse(file.read_text("utf-8"))
        return ast.Module([], []) if path.is_dir() else None

    def _find(self, name: str) -> tuple[str, Definition] | None:
        """(module, definition) of a dotted name; None if it is not there."""
        if (module := self.module(name)) is not None:
            return name, module
        owner, _, last = name.rpartition(".")
        found = self.find(owner) if owner else None
        if found is None:
            return None
        home, definition = found
        if isinstance(definition, ast.Module):
            return self._in_module(home, last)
        if isinstance(definition, ast.ClassDef):
            return self.member(home, definition, last)
        return found  # an attribute of a value: more cannot be known

    def _in_module(self, home: str, name: str) -> tuple[str, Definition] | None:
        stars = []
        for node in _statements(self.module(home)):
            if isinstance(node, ast.ImportFrom):
                source = _absolute(home, node, package=self._folder.joinpath(*home.split(".")).is_dir())
                for alias in node.names:
                    if alias.name == "*":
                        stars.append(source)
                    elif (alias.asname or alias.name) == name:
                        return self.find(f"{source}.{alias.name}") or ((home, node) if not _is_library(source) else None)
            elif name in _defined_by(node):
                return home, node
            elif place := _lazy_import(node, name):
                return self.find(f"{home}{place.replace(':', '.')}")
        return next((found for star in stars if self.module(star) and (found := self._in_module(star, name))), None)

    def member(self, home: str, owner: ast.ClassDef, name: str) -> tuple[str, Definition] | None:
        for node in ast.walk(owner):
            if isinstance(node, ast.stmt) and node is not owner and name in _defined_by(node, "self."):
                return home, node
        for base in owner.bases:
            base_name = _dotted(base, {part.id: part.id for part in ast.walk(base) if isinstance(part, ast.Name)}) or ""
            found = self.find(f"{home}.{base_name}")
            if found and isinstance(found[1], ast.ClassDef) and (inherited := self.member(*found, name)):
                return inherited
        return None

    def parameters(self, home: str, node: Definition) -> list[str] | None:
        """Names of the parameters that a call may give, a class's those of its __init__ or its fields; None if they are open."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            if given.vararg or given.kwarg or any("overload" in ast.unparse(d) for d in node.decorator_list):
                return None
            return [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs) if a.arg not in ("self", "cls")]
        if not isinstance(node, ast.ClassDef):
            return None
        fields = [s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
        if any("dataclass" in ast.unparse(d) or "config" in ast.unparse(d) for d in node.decorator_list):
            inherited = [self.find(f"{home}.{ast.unparse(base)}") for base in node.bases]
            return [p for base in inherited if base for p in self.parameters(*base) or []] + fields
        made = self.member(home, node, "__init__")
        return self.parameters(*made) if made else fields or None


def _statements(node: ast.AST | None) -> Iterator[ast.stmt]:
    """Statements of a module's scope, those under `if`, `try` and `with` among them."""
    for child in ast.iter_child_nodes(node) if node else ():
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            yield from _statements(child)


def _defined_by(node: ast.stmt, prefix: str = "") -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    parts = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return {ast.unparse(part).removeprefix(prefix) for part in parts}


def _lazy_import(node: ast.stmt, name: str) -> str:
    """Place, like ".entrypoints.llm:LLM", that a module's table gives for a name, as vLLM's does; "" if none."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
        return ""
    table = {ast.unparse(key): value for key, value in zip(node.value.keys, node.value.values, strict=True) if key}
    value = table.get(repr(name))
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) and ":" in value.value else ""


def _absolute(home: str, node: ast.ImportFrom, package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = home.split(".")
    base = parts[: len(parts) - node.level + package]
    return ".".join((*base, *([node.module] if node.module else [])))


def options() -> tuple[str, ...]:
    """Names of the arguments that megappo gives `vllm.LLM`, from the source that puts them together."""
    found = set()
    for file in ("vllm_options.py", "vllm_adapter.py"):
        for node in ast.walk(ast.parse((ROOT / "megappo/rollout" / file).read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict":
                found |= {keyword.arg for keyword in node.keywords if keyword.arg}
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "options" and isinstance(node.slice, ast.Constant):
                found.add(str(node.slice.value))
    return tuple(sorted(found))


def faults(folder: Path, module: str, found: Sequence[Use]) -> list[str]:
    """What megappo takes of a library's `module` and the version in `folder` has not, one line each."""
    sources, lines = Sources(folder), []
    wanted = [*found, *_uses_of_objects()]
    if module == "vllm":
        wanted.append(Use("vllm.engine.arg_utils.EngineArgs", "megappo/rollout/vllm_options.py", 0, options()))
    for use in wanted:
        inside = f"{use.name}.".startswith(f"{module}.") and not use.name.startswith(MADE_AT_IMPORT)
        if inside and not use.name.rpartition(".")[2].startswith("__") and (fault := _fault(sources, use)):
            lines.append(f"{fault} ({use.where})")
    return sorted(set(lines))


def _uses_of_objects() -> Iterator[Use]:
    for owner, members in OBJECTS.items():
        for member in members:
            name, _, given = member.rstrip(")").partition("(")
            yield Use(f"{owner}.{name}", "an object of it", 0, tuple(given.split(", ")) if given else ())


def _fault(sources: Sources, use: Use) -> str:
    found = sources.find(use.name)
    if found is None:
        return f"{use.name} is not there"
    parameters = sources.parameters(*found) if use.positional or use.keywords else None
    if parameters is None:
        return ""
    lost = sorted(set(use.keywords) - set(parameters))
    if lost or use.positional > len(parameters):
        return f"{use.name} takes {', '.join(parameters) or 'nothing'}; not {', '.join(lost) or f'{use.positional} by position'}"
    return ""


def main(folders: Sequence[str]) -> int:
    found, wrong = uses(), 0
    for folder in map(Path, folders):
        for library, module in LIBRARIES.items():
            if folder.joinpath(*module.split(".")).is_dir():
                facts = next(folder.glob(f"{library.replace('-', '_')}-*.dist-info"), None)
                lines = faults(folder, module, found)
                print(f"{facts.name.removesuffix('.dist-info') if facts else library}: {len(lines) or 'no'} faults")
                print("".join(f"  {line}\n" for line in lines), end="")
                wrong += len(lines)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
