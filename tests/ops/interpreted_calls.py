"""Triton's interpreter exchanges the functions of `triton.language` anew at every call of a device function (`tl.sum`, a helper of
a kernel), which looks through all of them: half of the time of a kernel. This does it once for each module and launch."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from triton.runtime import interpreter


def exchange_once() -> None:
    """In this process, for kernels that are interpreted from now on."""
    exchange, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[ModuleType] = set()  # in the launch that runs

    def exchange_what_is_left(fn: Callable[..., Any]) -> Any:
        modules = {value for value in fn.__globals__.values() if value is interpreter.tl or value is interpreter.tl.core}
        if modules and modules <= done:
            return interpreter._LangPatchScope()  # nothing to restore
        done.update(modules)
        return exchange(fn)

    def launch_anew(executor: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()  # the launch before has restored them
        launch(executor, *args, **kwargs)

    interpreter._patch_lang = exchange_what_is_left
    setattr(interpreter.GridExecutor, "__call__", launch_anew)
