"""Patches that run Megatron-core on a machine without CUDA, over gloo. Megatron-core (0.16 to 0.19) writes the device as 'cuda' and
checks tensor types by the name 'torch.cuda.FloatTensor'. These literals are replaced inside the few functions that run here; torch
itself is shared with vLLM. A missing literal is an error: Megatron-core has changed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from megappo.runtime.versions import pinned

# Module -> functions (Class.method or name) whose literals name the CUDA device or CUDA tensor types.
_RETARGETED: dict[str, tuple[str, ...]] = {
    # total_num_tokens of the schedules
    "megatron.core.pipeline_parallel.schedules": (
        "forward_backward_no_pipelining",
        "forward_backward_pipelining_without_interleaving",
        "forward_backward_pipelining_with_interleaving",
    ),
    # scratch buffers and type assertions of gradient norm and clipping
    "megatron.core.optimizer.clip_grads": ("get_grad_norm_fp32", "clip_grad_by_total_norm_fp32"),
    # scratch buffer of the gradient norm without TransformerEngine and Apex
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
    """Prepare this process for Megatron-core without CUDA. No effect if CUDA is available; may be called twice. PlatformError for
    another version of Megatron-core."""
    if torch.cuda.is_available() or getattr(torch.cuda.current_device, "megappo_cpu", False):
        return
    _patch_torch()
    for module_name, functions in _RETARGETED.items():
        module = importlib.import_module(module_name)
        for path in functions:
            _retarget(module_name, path, _resolve(module, module_name, path))
    _patch_rng_tracker()
    _patch_token_dispatcher()
    _patch_uneven_gather()


def _patch_torch() -> None:
    # Only calls that raise without CUDA are replaced, so nothing that works changes its meaning.
    def current_device() -> torch.device:
        return torch.device("cpu")

    setattr(current_device, "megappo_cpu", True)
    # Megatron passes its result as device= to factories.
    setattr(torch.cuda, "current_device", current_device)
    # The exchange of tensor shapes between pipeline stages waits for the device.
    setattr(torch.cuda, "synchronize", lambda *args, **kwargs: None)
    # Megatron-core 0.19 asks for it to hand it to the exchange of tokens.
    setattr(torch.cuda, "current_stream", lambda *args, **kwargs: None)
    # Tied embeddings (language_module.py) and optimizer reload call .cuda() on tensors and modules.
    setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    setattr(torch.nn.Module, "cuda", lambda self, *args, **kwargs: self)


def _resolve(module: Any, module_name: str, path: str) -> FunctionType:
    target = module
    for part in path.split("."):
        if not hasattr(target, part):
            raise PlatformError(f"{module_name}.{path} is gone; install {pinned('megatron-core')}")
        target = getattr(target, part)
    return getattr(target, "__func__", target)


def _retarget(module_name: str, path: str, function: FunctionType) -> None:
    function = getattr(function, "__wrapped__", function)
    code = _replace_literals(function.__code__)
    if code == function.__code__:
        raise PlatformError(f"{module_name}.{path} names no CUDA device or type any more; install {pinned('megatron-core')}")
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
    """Let Megatron's tracker of CUDA generator states follow the CPU generator (dropout, activation recompute)."""
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

    # Raises PlatformError if a name is gone; an assignment alone would create it.
    _resolve(random, random.__name__, "_get_cuda_rng_state")
    _resolve(random, random.__name__, "_set_cuda_rng_state")
    setattr(random, "_get_cuda_rng_state", get_state)
    setattr(random, "_set_cuda_rng_state", set_state)
    tracker.add = add
    tracker.fork = fork


def _patch_token_dispatcher() -> None:
    name = "megatron.core.transformer.moe.token_dispatcher"
    dispatcher = _resolve(importlib.import_module(name), name, "MoEAlltoAllTokenDispatcher")
    original = _resolve(dispatcher, name, "_maybe_dtoh_and_synchronize")
    if "cuda_dtoh_stream" not in original.__code__.co_names:
        raise PlatformError(f"{name}: split sizes are no longer copied on a side stream; install {pinned('megatron-core')}")

    def splits_as_arrays(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        # The experts' split sizes are on the host already: no copy on a side stream
        if point == self.cuda_dtoh_point:
            for splits in ("input_splits", "output_splits", "output_splits_tp"):
                value = getattr(self, splits)
                # all_to_all_single takes sequences of integers, not tensors; Megatron's copies are numpy arrays too.
                setattr(self, splits, value.numpy() if isinstance(value, torch.Tensor) else value)
        return tokens_per_expert

    dispatcher._maybe_dtoh_and_synchronize = splits_as_arrays
    dispatcher.cuda_dtoh_stream = splits_as_arrays  # anything but None: the constructor then creates no CUDA stream


def _patch_uneven_gather() -> None:
    name = "megatron.core.tensor_parallel.mappings"
    mappings = importlib.import_module(name)
    original = _resolve(mappings, name, "_gather_along_first_dim")
    if "output_split_sizes" not in original.__code__.co_varnames:
        raise PlatformError(f"{name}._gather_along_first_dim takes no split sizes any more; install {pinned('megatron-core')}")

    def gather(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return original(input_, group, None, use_global_buffer)
        # gloo's all_gather refuses unequal numbers of tokens (experts cut over etp); its all-to-all does not
        output = input_.new_empty((sum(output_split_sizes), *input_.shape[1:]))
        copies = torch.cat([input_] * group.size())
        sent = [input_.size(0)] * group.size()
        torch.distributed.all_to_all_single(output, copies, list(output_split_sizes), sent, group=group)
        return output

    setattr(mappings, "_gather_along_first_dim", gather)
