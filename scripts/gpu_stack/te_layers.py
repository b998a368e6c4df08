"""TransformerEngine's layers, built on the meta device: the same parameters as the local layers', by name and shape, and the
switches by which a weight's gradient is added to `main_grad` (megappo/models/build.py).

Every family and layout of the parity matrix, policy and critic, on the first and the last rank. TransformerEngine's modules ask
for a GPU while they are made; one that answers questions and does nothing stands in. A forward pass is beyond it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any
from unittest import mock

import torch

from scripts.gpu_stack.pretend import Handle, pretend_gpu
from scripts.gpu_stack.rows import Check, Skipped, Wrong, run
from tests.parity.matrix import MODELS, layouts_of

GROUP = "te_layers"
Shapes = Mapping[str, tuple[int, ...]]


def _stand_in_megatron() -> None:
    """Megatron's use of the device while layers are made: random states, and weights that it initialises in host memory."""
    import megatron.core.extensions.transformer_engine as extension
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    extension._initialize_affine_weight_cpu = lambda *args, **kwargs: None
    CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()
    CudaRNGStatesTracker.get_states = lambda self: {}
    CudaRNGStatesTracker.add = lambda self, *args, **kwargs: None
    # After the imports, whose annotations join these classes with others by |.
    torch.cuda.Stream = torch.cuda.Event = Handle
    torch.cuda.current_stream = lambda *args: Handle()


def imports() -> str:
    try:
        version = metadata.version("transformer_engine")
    except metadata.PackageNotFoundError:
        raise Skipped("it is not installed: check_gpu_stack.sh --transformer-engine compiles it (17 minutes)") from None
    pretend_gpu()
    import transformer_engine.pytorch  # noqa: F401

    _stand_in_megatron()
    return version


def difference(local: Shapes, te: Shapes) -> str:
    """First parameter in which two builds of one chunk differ; "" if none."""
    for name in sorted(local.keys() | te.keys()):
        if local.get(name) != te.get(name):
            return f"{name}: local {local.get(name, 'has none')}, TransformerEngine {te.get(name, 'has none')}"
    return ""


def _shapes(arch: Any, layout: Any, rank: int, value_head: bool, implementation: Any) -> Shapes:
    from megappo.models.gpt import named_parameters
    from tests.models.meta import meta_model

    with meta_model(arch, layout, rank, value_head=value_head, implementation=implementation) as chunks:
        return {name: tuple(parameter.shape) for name, parameter in named_parameters(chunks).items()}


def _layouts(model: str) -> Iterator[Any]:
    """Layouts of policies and critics in the parity matrix, each once."""
    cases = ((case, size) for size, cases in MODELS[model].items() for case in cases)
    yield from dict.fromkeys(layout for case, size in cases for layout in layouts_of(case, size))


def _arch_of(model: str) -> Any:
    """Architecture of a model of the parity matrix. Raises Skipped without TransformerEngine."""
    try:
        metadata.version("transformer_engine")
    except metadata.PackageNotFoundError:
        raise Skipped("no TransformerEngine") from None
    from megappo.models.hf_config import read_arch
    from tests.models.checkpoints import hf_config

    with tempfile.TemporaryDirectory() as folder:
        stem = {"qwen3_moe": "Qwen3Moe", "mistral_window": "Mistral"}.get(model, "Llama")
        # Layers of several kinds: TransformerEngine requires head sizes that its kernels support.
        config = hf_config(model, num_hidden_layers=4, num_key_value_heads=4)
        config.architectures = [f"{stem}ForCausalLM"]
        config.save_pretrained(folder)
        return read_arch(folder)


def family(model: str) -> str:
    arch = _arch_of(model)
    num_layouts = num_parameters = 0
    for layout in _layouts(model):
        for rank in (0, layout.world_size - 1):
            for value_head in (False, True):
                built = [_shapes(arch, layout, rank, value_head, i) for i in ("local", "transformer_engine")]
                fault = difference(*built)
                if fault:
                    raise Wrong(f"{layout}, rank {rank}, {'critic' if value_head else 'policy'}: {fault}")
                num_parameters += len(built[0])
        num_layouts += 1
    return f"{num_layouts} layouts, {num_parameters} parameters of policies and critics"


def switch_fault(products: Mapping[str, torch.nn.Module]) -> str:
    """First product with a weight whose gradient would be made, rounded and added, or would overwrite `main_grad` in what is taken
    for the first micro-batch; "" if none.
    """
    for name, product in products.items():
        for switch in ("fuse_wgrad_accumulation", "disable_parameter_transpose_cache"):
            if getattr(product, switch, None) is not True:
                return f"{name}: {switch} is {getattr(product, switch, 'not there')}, not True"
    return "" if products else "no product of TransformerEngine"


def _te_products(chunk: torch.nn.Module) -> dict[str, torch.nn.Module]:
    import transformer_engine.pytorch as te

    kinds = (te.Linear, te.LayerNormLinear, te.GroupedLinear)
    return {name: module for name, module in chunk.named_modules() if isinstance(module, kinds)}


def switches(model: str) -> str:
    """The model as a GPU would have it, wrapped for training but for the buffers of gradients, which need memory."""
    arch = _arch_of(model)
    from megappo.models import build
    from megappo.models.build import fusion_config
    from megappo.parallel.layout import ParallelLayout
    from tests.models.meta import meta_model

    as_on_gpu = mock.patch.object(build, "fusion_config", lambda *args, **_: fusion_config(*args, on_gpu=True))
    with as_on_gpu, meta_model(arch, ParallelLayout(1), 0, implementation="transformer_engine") as (chunk,):
        products = _te_products(chunk)
        if switch_fault(products) == "":
            raise Wrong("the negative control: gradients are added before accumulate_into_main_grad says so")
        build.accumulate_into_main_grad(chunk)
        fault = switch_fault(products)
    if fault:
        raise Wrong(fault)
    kinds = sorted({type(product).__name__ for product in products.values()})
    return f"{len(products)} products add to main_grad: {', '.join(kinds)}"


CHECKS: Sequence[Check] = (
    ("imports", imports),
    *((model, lambda model=model: family(model)) for model in MODELS),
    *((f"gradients of {model}", lambda model=model: switches(model)) for model in MODELS),
)

if __name__ == "__main__":
    run(GROUP, CHECKS)
