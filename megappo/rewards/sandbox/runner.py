"""Program inside a sandbox: run the code of one response against one test. Its source is passed to `python -c`; nothing imports it.

It reads its task from file 3 and reports to file 4; the supervisor has prepared both. Standard library only.

This is the one place of megappo that runs text as code. What shares the process with the code can be forged by it: so what a test
expects is not in the task where a comparison outside can do (`stdin`, `value`, `call`), and `assert` is the rest.
"""

import json
import os
import sys
import types
from typing import Any


def main() -> None:
    with open(3, "rb") as file:
        task = json.loads(file.read())
    _prepare_builtins()
    if task["kind"] == "stdin":
        os.close(4)
        _run(_module("__main__"), task["setup"], task["source"])
        return
    module = _module("solution")  # so that `if __name__ == "__main__":` is skipped
    _run(module, task["setup"], task["source"])
    if task["kind"] == "assert":
        _run_guarded(module, task["test"])
        report = {"nonce": task["nonce"]}
    elif task["kind"] == "value":
        report = {"value": _tagged(eval(compile(task["expression"], "<test>", "eval"), vars(module)))}
    else:
        report = {"value": _tagged(_function(module, task["function"])(*task["arguments"]))}
    os.write(4, json.dumps(report).encode())
    os._exit(0)  # threads of the code do not matter any more


def _prepare_builtins() -> None:
    """Define exit and quit, which the module site does otherwise."""
    import _sitebuiltins
    import builtins

    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D")
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D")


def _module(name: str) -> types.ModuleType:
    module = sys.modules[name] = types.ModuleType(name)  # dataclasses look their module up
    return module


def _run(module: types.ModuleType, *sources: str) -> None:
    for source in sources:
        exec(compile(source, "<solution>", "exec"), vars(module))


def _function(module: types.ModuleType, name: str) -> Any:
    """Function of the code, or method of its class Solution."""
    return getattr(module, name) if hasattr(module, name) else getattr(module.Solution(), name)


def _run_guarded(module: types.ModuleType, test: str) -> None:
    """Run test code; what it compares is a plain value, or an instance of the code's classes on both sides.

    Otherwise an object whose `__eq__` returns True would pass every test.
    """
    import ast

    class Guard(ast.NodeTransformer):
        def visit_Compare(self, node: ast.Compare) -> ast.AST:
            self.generic_visit(node)
            if len(node.ops) > 1:
                return node
            left, right = ast.Name("left", ast.Load()), ast.Name("right", ast.Load())
            comparison = ast.Lambda(_arguments("left", "right"), ast.Compare(left, node.ops, [right]))
            return ast.Call(ast.Name("__compare__", ast.Load()), [comparison, node.left, node.comparators[0]], [])

    def _arguments(*names: str) -> ast.arguments:
        return ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])

    def compare(comparison: Any, left: Any, right: Any) -> Any:
        if made_by_code(left) != made_by_code(right):
            raise AssertionError("an object of the code's own class stands for a plain value")
        return comparison(left, right)

    def made_by_code(value: Any, depth: int = 0) -> bool:
        if type(value) in (list, tuple, set, frozenset, dict) and depth < 8:
            return any(made_by_code(item, depth + 1) for item in (value.values() if type(value) is dict else value))
        members = [member for kind in type(value).__mro__ for member in vars(kind).values()]
        return any(getattr(member, "__globals__", None) is vars(module) for member in members)

    tree = ast.fix_missing_locations(Guard().visit(ast.parse(test)))
    exec(compile(tree, "<test>", "exec"), {**vars(module), "__compare__": compare})


def _tagged(value: Any) -> Any:
    """JSON of a plain value; containers as [kind, items]. Subclasses count as what they extend: only contents are compared.

    TypeError for other objects.
    """
    value = value.tolist() if hasattr(value, "tolist") else value  # NumPy
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, dict):
        return ["dict", [[_tagged(key), _tagged(item)] for key, item in dict.items(value)]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return ["set" if kind is frozenset else kind.__name__, [_tagged(item) for item in kind.__iter__(value)]]
    raise TypeError(f"{type(value).__name__} is no plain value")


main()
