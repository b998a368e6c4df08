"""Stages 4 and 5 on fake CUDA tensors: the models' forward passes on tensors of device `cuda` without data.

Such tensors have type, shape and device, and refuse operations that need their values: a CPU tensor in a CUDA operation, a read
that synchronises. Experts read how many tokens go where, so they are left out. tests/host_cuda runs whole steps with values.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from scripts.gpu_stack.pretend import Handle, pretend_gpu
from scripts.gpu_stack.rows import Check, Wrong, run

GROUP = "fake_device"
LENGTHS = (7, 40, 1, 12)
NUM_TOKENS = sum(LENGTHS)


class WithoutDevice(FakeTensorMode):
    """Takes the way of a machine without a GPU, though torch.cuda answers like one that has some."""

    @property
    def avoid_device_init(self) -> bool:
        return True


class HostTensorsAreReal(TorchDispatchMode):
    """Above a FakeTensorMode: what touches no GPU tensor is computed; between the two kinds of tensors there are only copies."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._pin_memory.default:
            func, args, kwargs = torch.ops.aten.clone.default, args[:1], {}  # pinning is the driver's
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        hosts = [x for x in tensors if not isinstance(x, FakeTensor)]
        device = kwargs.get("device")
        to_gpu = device is not None and torch.device(device).type == "cuda"
        if len(hosts) == len(tensors) and not to_gpu:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if len(hosts) < len(tensors) and any(x.dim() for x in hosts) and func not in COPIES:
            raise Wrong(f"{func} mixes tensors of the GPU with one of the host, {[list(x.shape) for x in hosts if x.dim()][0]}")
        args, kwargs = tree_map_only(Tensor, self._without_data, (args, kwargs))
        return func(*args, **kwargs)

    def _without_data(self, x: Tensor) -> Tensor:
        return x if isinstance(x, FakeTensor) else self._fake.from_tensor(x)


COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


@contextmanager
def no_data() -> Iterator[None]:
    with WithoutDevice() as fake, HostTensorsAreReal(fake):
        yield


def host_batch() -> Any:
    """Four sequences on the host, as the experience is."""
    from megappo.data.packing import PackedBatch

    cu_seqlens = torch.tensor((0, *LENGTHS)).cumsum(0).to(torch.int32)
    tokens = torch.arange(NUM_TOKENS) % 131
    last = cu_seqlens[1:].long() - 1
    fields = {name: torch.randn(NUM_TOKENS) for name in ("logprob", "ref_logprob", "value")}
    fields["response_mask"] = torch.zeros(NUM_TOKENS, dtype=torch.bool).index_fill_(0, last, True)
    sequences = {"bootstrap": torch.zeros(len(LENGTHS)), "truncated": torch.zeros(len(LENGTHS), dtype=torch.bool)}
    return PackedBatch(tokens, cu_seqlens).with_fields(fields, sequences)


@contextmanager
def one_rank() -> Iterator[Any]:
    """ProcessGroups of a world of one, whose collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megappo.parallel.groups import build_groups
    from megappo.parallel.layout import ParallelLayout

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        yield build_groups(ParallelLayout(1))
    finally:
        dist.destroy_process_group()


def outputs(model: str, dtype: torch.dtype, value_head: bool) -> dict[str, Tensor]:
    """Stage 4's per-token results of one role, without data."""
    from megappo.engine.megatron import MegatronEngine
    from megappo.engine.micro_batches import MicroBatch
    from megappo.engine.role_engine import EngineSettings
    from megappo.models.build import build_model
    from megappo.models.hf_config import read_arch
    from megappo.trainer.roles import Critic, LanguageModel
    from tests.models.checkpoints import hf_config

    device = torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as folder, one_rank() as groups, no_data(), torch.no_grad():
        config = hf_config(model)
        config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
        config.save_pretrained(folder)
        chunks = build_model(read_arch(folder), groups, dtype=dtype, value_head=value_head)
        places = {parameter.device for chunk in chunks for parameter in chunk.parameters()}
        if places != {device}:
            raise Wrong(f"parameters lie on {', '.join(map(str, places))}, not {device}")
        engine = MegatronEngine("role", chunks, groups, EngineSettings(device, NUM_TOKENS))
        micro = MicroBatch.of(host_batch(), groups).to(device)
        raw = chunks[0](micro.batch.tokens, micro.batch.host_offsets, micro.context, micro.real)
        if value_head:
            return dict(Critic(engine)._report(raw, micro.batch).tokens)
        output = engine._language_output(raw.squeeze(1), micro.context)
        return dict(LanguageModel(engine, 0.7)._report(output, micro.batch, want_entropy=True).tokens)


def placement_fault(results: dict[str, Tensor], device_type: str) -> str:
    """First fault of per-token results that must be [T] fp32 there; "" if none."""
    for name, x in results.items():
        if (x.device.type, x.dtype, tuple(x.shape)) != (device_type, torch.float32, (NUM_TOKENS,)):
            return f"{name} is {x.dtype} {list(x.shape)} on {x.device}, not float32 [{NUM_TOKENS}] on {device_type}"
    return ""


def _described(results: dict[str, Tensor], device_type: str) -> str:
    fault = placement_fault(results, device_type)
    if fault:
        raise Wrong(fault)
    return f"{', '.join(results)}: fp32 [{NUM_TOKENS}] on {device_type}"


def stage_4(model: str, dtype: torch.dtype, value_head: bool) -> Callable[[], str]:
    return lambda: _described(outputs(model, dtype, value_head), "cuda")


def stage_5(kernels: Any) -> Callable[[], str]:
    """Check of stage 5, whose kernel is where the experience is."""

    def check() -> str:
        from megappo.config.schema import AlgorithmConfig
        from megappo.ops import dispatch
        from megappo.trainer.advantages import advantages_of

        algorithm = AlgorithmConfig(gamma=0.99, lam=0.95, lam_value=1.0, bootstrap_truncated=True)
        dispatch.select(kernels, "cuda")
        with no_data():
            shaped = advantages_of(host_batch().to("cuda"), torch.ones(len(LENGTHS)), 0.05, algorithm)
        return _described({name: shaped[name] for name in ("reward", "advantage", "raw_advantage", "returns")}, "cuda")

    return check


def prepare() -> str:
    pretend_gpu()
    torch.cuda.Stream = torch.cuda.Event = Handle
    torch.cuda.current_stream = lambda *args: Handle()
    return torch.cuda.get_device_name()


def refuses() -> str:
    """The negative control: operations on tensors of both places, each of which a fake tensor alone would let through."""
    mixed: Sequence[Callable[[Tensor], Tensor]] = (
        lambda gpu: gpu + torch.ones(3),
        lambda gpu: torch.ones(3) * gpu,
        lambda gpu: gpu.index_select(0, torch.arange(2)),
    )
    for operation in mixed:
        with no_data():
            gpu = torch.zeros(3, device="cuda") + torch.ones(3).to("cuda")
            try:
                operation(gpu)
            except Wrong:
                continue
        raise Wrong("an operation on a GPU tensor and one of the host went through")
    return f"{len(mixed)} operations on tensors of the GPU and the host"


ROLES = (("policy", False), ("critic", True))
DTYPES = (("bf16", torch.bfloat16), ("fp32", torch.float32))
CHECKS: Sequence[Check] = (
    ("a GPU without data", prepare),
    ("refuses mixed places", refuses),
    *(
        (f"stage 4, {role} {model} {name}", stage_4(model, dtype, value_head))
        for model in ("llama", "mistral_window")
        for role, value_head in ROLES
        for name, dtype in DTYPES
    ),
    *((f"stage 5, kernels: {kernels}", stage_5(kernels)) for kernels in ("auto", "cuda", "triton")),
)

if __name__ == "__main__":
    import megatron.core.models.gpt  # noqa: F401  before torch's classes of streams are replaced, which its annotations name

    run(GROUP, CHECKS)
