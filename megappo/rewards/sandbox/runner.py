"""Program inside a sandbox: runs the code of one response against one test. Its source is passed to `python -c`.
It reads its task from one file and reports to another, which `box.py` names. Standard library only, and no other file imports
it. This is the one place of megappo that runs text as code. The code can forge what shares its process, so the task lacks what a
test expects where a comparison outside can decide (`stdin`, `value`, `call`); `assert` is the rest."""

from __future__ import annotations

import builtins
import os
import resource
import sys
import types
from _signal import SIG_DFL, SIG_SETMASK, SIGINT, pthread_sigmask, signal  # pyright: ignore[reportMissingImports]  enum takes time
from _sitebuiltins import Quitter
from json import dumps, loads
from os import _exit, close, write

TYPE_CHECKING = False  # what typing says too, which takes a tenth of the time that an interpreter needs to start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# The code may replace what it finds in modules: the functions below keep the builtins of the start, as the names above.
__builtins__ = dict(vars(builtins))


def main() -> None:
    asked, report_fd = map(int, sys.argv[1:])
    del sys.argv[1:]
    with open(asked, "rb") as file:  # that it was read tells the rank that the code has started
        task = loads(file.read())
    os.closerange(3, report_fd)
    os.closerange(report_fd + 1, 1 << 20)
    if os.getpid() == 1:
        _leave_first_process()
    _confine(task["user"], task["limits"])
    builtins.exit, builtins.quit = Quitter("exit", "Ctrl-D"), Quitter("quit", "Ctrl-D")  # as the module site does
    if task["kind"] == "stdin":
        close(report_fd)
        _run(_module("__main__"), task["setup"], task["source"])
        return
    module = _module("solution")  # so that `if __name__ == "__main__":` is skipped
    if task["kind"] == "assert":
        test, report = _guarded(module, task["test"]), dumps({"nonce": task["nonce"]})
        _run(module, task["setup"], task["source"])
        test()
    else:
        _run(module, task["setup"], task["source"])
        report = dumps({"value": _tagged(_result(module, task))})
    write(report_fd, report.encode())
    _exit(0)  # threads of the code do not matter any more


def _confine(user: int | None, limits: list[tuple[int, int]]) -> None:
    """Give up rights and the error stream, and take the limits (number, value), which then cannot be raised."""
    nothing = os.open("/dev/null", os.O_WRONLY)
    os.dup2(nothing, 2)
    close(nothing)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    for number, value in limits:
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    pthread_sigmask(SIG_SETMASK, [])  # the rank starts it deaf to requests to stop


def _leave_first_process() -> None:
    # The child goes on. The first process of a namespace reaps orphans and ends as the child does, and all others with it.
    child = os.fork()
    if child == 0:
        return
    signal(SIGINT, SIG_DFL)  # it gets what it has a handler for, and Python has this one
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            _exit(code if code >= 0 else 128 - code)


def _module(name: str) -> types.ModuleType:
    module = sys.modules[name] = types.ModuleType(name)  # dataclasses look their module up
    vars(module)["__builtins__"] = builtins
    return module


def _run(module: types.ModuleType, *sources: str) -> None:
    for source in sources:
        exec(compile(source, "<solution>", "exec", dont_inherit=True), vars(module))


def _result(module: types.ModuleType, task: dict[str, Any]) -> Any:
    """Value of an expression, or of a call of the code's function or of the method of its class Solution."""
    if task["kind"] == "value":
        return eval(compile(task["expression"], "<test>", "eval", dont_inherit=True), vars(module))
    name = task["function"]
    return (getattr(module, name) if hasattr(module, name) else getattr(module.Solution(), name))(*task["arguments"])


def _guarded(module: types.ModuleType, test: str) -> Callable[[], None]:
    """Compile test code, to run when the module is filled, so that it never compares an object of the code with a plain value."""
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
        # An object whose `__eq__` returns True would otherwise pass every test.
        if made_by_code(left) != made_by_code(right):
            raise AssertionError("an object of the code's own class stands for a plain value")
        return comparison(left, right)

    def made_by_code(value: Any, depth: int = 0) -> bool:
        if type(value) in (list, tuple, set, frozenset, dict) and depth < 8:
            return any(made_by_code(item, depth + 1) for item in (value.values() if type(value) is dict else value))
        members = [member for kind in type(value).__mro__ for member in vars(kind).values()]
        return any(getattr(member, "__globals__", None) is vars(module) for member in members)

    code = compile(ast.fix_missing_locations(Guard().visit(ast.parse(test))), "<test>", "exec", dont_inherit=True)
    return lambda: exec(code, {**vars(module), "__compare__": compare, "__builtins__": __builtins__})


def _tagged(value: Any) -> Any:
    """JSON of a plain value; containers as [kind, items]. Raises TypeError for other objects."""
    value = value.tolist() if hasattr(value, "tolist") else value  # NumPy
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, dict):
        return ["dict", [[_tagged(key), _tagged(item)] for key, item in dict.items(value)]]
    # Subclasses count as what they extend: only contents are compared.
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            items: Any = kind.__iter__
            return ["set" if kind is frozenset else kind.__name__, [_tagged(item) for item in items(value)]]
    raise TypeError(f"{type(value).__name__} is no plain value")


if __name__ == "__main__":
    main()
