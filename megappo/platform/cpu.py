"""Makes Megatron-core run on a machine without CUDA, over gloo. The only place that patches another library.

Megatron-core 0.16 writes the device as the literal 'cuda' and checks tensor types by the name 'torch.cuda.FloatTensor'. Rather than
wrapping torch for the whole process (vLLM lives in it too), the literals are replaced inside the few Megatron functions that we run.
A function in which the expected literal is gone means that Megatron-core changed underneath: that is an error, not a guess.
"""

from __future__ import annotations

import contextlib
import importlib
from types import CodeType, FunctionType
from typing import Any, Iterator

import torch

# module -> functions (Class.method or name) whose literals name the CUDA device or CUDA tensor types.
_RETARGETED: dict[str, tuple[str, ...]] = {
    # total_num_tokens of the schedules
    "megatron.core.pipeline_parallel.schedules": (
        "forward_backward_no_pipelining",
        "forward_backward_pipelining_without_interleaving",
    ),
    # scratch buffers and type assertions of gradient norm and clipping
    "megatron.core.optimizer.clip_grads": ("get_grad_norm_fp32", "clip_grad_by_total_norm_fp32"),
    # scratch buffer of the gradient norm where neither TransformerEngine nor Apex is installed
    "megatron.core.utils": ("local_multi_tensor_l2_norm",),
    # found_inf and scale buffers; fp16/fp32 parameter split by type name
    "megatron.core.optimizer.optimizer": (
        "MixedPrecisionOptimizer.__init__",
        "Float16OptimizerWithFloat16Params.__init__",
        "FP32Optimizer.__init__",
    ),
    "megatron.core.optimizer.distrib_optimizer": (
        "DistributedOptimizer._build_model_and_main_param_groups",
        "DistributedOptimizer.__init__",
    ),
}
_LITERALS = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}


class PlatformError(RuntimeError):
    """Megatron-core is not the version that the CPU platform was written for."""


def install() -> None:
    """Prepare this process for Megatron-core without CUDA. Does nothing where CUDA is available; may be called twice."""
    if torch.cuda.is_available() or getattr(torch.cuda.current_device, "megappo_cpu", False):
        return
    _patch_torch()
    for module_name, functions in _RETARGETED.items():
        module = importlib.import_module(module_name)
        for path in functions:
            _retarget(module_name, path, _resolve(module, module_name, path))
    _patch_rng_tracker()


def _patch_torch() -> None:
    """Four calls that raise without CUDA anyway, so nothing that works today can change its meaning."""

    def current_device() -> torch.device:
        return torch.device("cpu")

    setattr(current_device, "megappo_cpu", True)
    # Megatron passes its result as device= to factories.
    setattr(torch.cuda, "current_device", current_device)
    # The exchange of tensor shapes between pipeline stages waits for the device.
    setattr(torch.cuda, "synchronize", lambda *args, **kwargs: None)
    # Tied embeddings (language_module.py) and optimizer reload call .cuda() on tensors and modules.
    setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    setattr(torch.nn.Module, "cuda", lambda self, *args, **kwargs: self)


def _resolve(module: Any, module_name: str, path: str) -> FunctionType:
    target = module
    for part in path.split("."):
        if not hasattr(target, part):
            raise PlatformError(f"{module_name}.{path} is gone; install megatron-core==0.16.1")
        target = getattr(target, part)
    return getattr(target, "__func__", target)


def _retarget(module_name: str, path: str, function: FunctionType) -> None:
    function = getattr(function, "__wrapped__", function)
    code = _replace_literals(function.__code__)
    if code == function.__code__:
        raise PlatformError(f"{module_name}.{path} names no CUDA device or type any more; install megatron-core==0.16.1")
    function.__code__ = code


def _replace_literals(code: CodeType) -> CodeType:
    def replaced(constant: Any) -> Any:
        if isinstance(constant, str):
            return _LITERALS.get(constant, constant)
        if isinstance(constant, tuple):
            return tuple(replaced(item) for item in constant)
        return _replace_literals(constant) if isinstance(constant, CodeType) else constant

    return code.replace(co_consts=tuple(replaced(constant) for constant in code.co_consts))


def _patch_rng_tracker() -> None:
    """Megatron's tracker of CUDA generator states follows the CPU generator instead (dropout, activation recompute)."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    tracker = _resolve(random, random.__name__, "CudaRNGStatesTracker")

    def get_state(device: Any = -1, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    def add(self: Any, name: str, seed: int) -> None:
        before = torch.get_rng_state()
        self._is_initialized = True
        self.seeds_.add(seed)
        torch.manual_seed(seed)
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self: Any, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        # The original also warns when the CPU generator moves inside the block: here that is the point.
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)

    _resolve(random, random.__name__, "_get_cuda_rng_state")
    _resolve(random, random.__name__, "_set_cuda_rng_state")
    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
    tracker.add = add
    tracker.fork = fork
