"""vLLM's GPU worker inside the trainer's ranks on the host's CUDA device: pushes, answers, and whose stream waits for whose.

Processes need TRITON_INTERPRET=1 from their start.

vLLM runs as its wheel for GPUs is. What no host can do takes vLLM's own other way: norms, activations and rotary embeddings by
its torch versions instead of its compiled kernels, attention and the model runners' kernels in Triton, which is interpreted, and
NCCL through torch (as where each rank sees one GPU only).
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.config.schema import RolloutConfig
from megappo.models.arch import ModelArch
from megappo.models.hf_config import read_arch
from megappo.models.pieces import as_2d
from megappo.models.weight_map import hf_tensors, megatron_pieces
from megappo.ops import dispatch
from megappo.parallel.layout import ParallelLayout
from megappo.rollout import vllm_engine
from megappo.rollout.types import Request, SamplingParams
from megappo.rollout.vllm_engine import VllmEngine
from megappo.rollout.vllm_options import VllmModel
from tests.bridge.engines import engine_tensors, read_checkpoint
from tests.rollout import policies
from tests.rollout.responses import generate_all

RANKS = 2
GREEDY = SamplingParams(max_tokens=3, temperature=0.0)
# The waits of rollout/vllm_process.py, by who waits.
WAITS = ("vLLM", "the trainer")


def prepare(rank: int) -> None:
    """Once in a process, before its first engine."""
    dispatch.select("reference", "cuda")
    torch.cuda.set_stream(torch.cuda.Stream(rank))  # the trainer's, which waits for nobody by itself
    os.environ.update(VLLM_DISABLE_PYNCCL="1", VLLM_CACHE_ROOT=tempfile.mkdtemp())
    from host_cuda import triton_kernels

    triton_kernels.install()
    real = vllm_engine.vllm_options

    def options(*args: Any, **kwargs: Any) -> dict[str, Any]:
        import vllm._custom_ops
        from vllm.model_executor.models import registry
        from vllm.v1.sample.ops import topk_topp_sampler
        from vllm.v1.worker import gpu_worker

        topk_topp_sampler.HAS_TRITON = False  # the interpreter of Triton 3.7 cannot do its kernel
        vllm._custom_ops.vocab_parallel_embedding = embedded
        registry._run_in_subprocess = lambda function: function()  # a second import of vLLM, 10 s
        gpu_worker.warmup_kernels = lambda *args: None  # there is nothing to compile, and interpreting takes long
        native = {name: ["native"] for name in ("rms_norm", "fused_add_rms_norm")}
        return {
            **real(*args, **kwargs),
            "attention_config": {"backend": "TRITON_ATTN"},
            "kernel_config": {"ir_op_priority": native, "enable_flashinfer_autotune": False},
            "compilation_config": {"custom_ops": ["none"]},
        }

    vllm_engine.vllm_options = options
    vllm_engine.sees_peers = lambda *args: False


def embedded(ids: Tensor, weight: Tensor, first: int, end: int, *rest: int) -> Tensor:
    """vLLM's kernel for a part of the vocabulary, ids first to end, without added ids: other ids give zeros."""
    inside = (ids >= first) & (ids < end)
    return weight[torch.where(inside, ids - first, 0)] * inside[:, None]


def engine_of(rank: int, path: str, tp: int) -> VllmEngine:
    """fp32, asynchronous scheduling as vLLM chooses. Collective."""
    config = RolloutConfig(tp=tp, max_num_seqs=4, kv_cache_gib=1 / 512, vllm_args={"enforce_eager": True})
    model = VllmModel(path, read_arch(path), torch.float32, max_model_len=64)
    return VllmEngine(model, config, eos_token_ids=(), device=torch.device("cuda", rank), cache_after_push="recompute")


def requests() -> list[Request]:
    rng = random.Random(4)
    return [Request(i, tuple(rng.randrange(3, 131) for _ in range(n)), seed=n) for i, n in enumerate((3, 9, 17))]


def policys_weights(policy: Any, arch: ModelArch, layout: ParallelLayout) -> dict[str, Tensor]:
    """The checkpoint that the ranks' parameters are parts of, on the host. Collective."""
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, {name: p.detach().cpu() for name, p in policy.engine.named_parameters().items()})
    whole = {name: torch.full(shape, torch.nan) for name, shape in hf_tensors(arch).items()}
    for rank, tensors in enumerate(everyone):
        for piece in megatron_pieces(arch, layout, rank):
            box = piece.box
            part = as_2d(tensors[piece.local])[piece.row : piece.row + box.rows, piece.col : piece.col + box.cols]
            as_2d(whole[piece.hf])[box.r0 : box.r1, box.c0 : box.c1] = part
    return whole


def wrong_parameters(engine: VllmEngine, arch: ModelArch, checkpoint: dict[str, Tensor], tp: int, rank: int) -> list[str]:
    """Names of vLLM's parameters that are not what the checkpoint says, bit for bit."""
    want = engine_tensors(arch, checkpoint, tp, rank % tp)
    have = {name: parameter.detach().cpu() for name, parameter in engine.receiver.model.named_parameters()}
    return sorted((want.keys() ^ have.keys()) | {name for name in want.keys() & have if not torch.equal(want[name], have[name])})


def of_the_process() -> tuple:
    """State that an engine must leave as it was."""
    return (
        torch.cuda.current_stream(),
        torch.cuda.current_device(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.get_rng_state().tolist(),
        torch.cuda.get_rng_state().tolist(),
        dict(os.environ),
    )


def pushed_and_asked(rank: int, path: str, tp: int, runner: str, last: bool) -> dict[str, Any]:
    """Two versions of a policy, pushed into an engine that answers."""
    arch, found = read_arch(path), {"versions": []}
    policy = policies.make_policy(path, ParallelLayout(RANKS, tp=2), torch.device("cuda", rank))
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "v2"))  # the user's
    before = of_the_process()
    engine = engine_of(rank, path, tp)
    found["kept"] = [of_the_process() == before]
    layout = policy.engine.groups.layout
    engine.connect(policy.engine)
    responses = None
    for version in (1, 2):
        stale = policies.distance(policy, requests(), responses) if responses else None
        metrics = engine.push_weights(version)
        weights = policys_weights(policy, arch, layout)
        if version == 1:
            assert all(torch.equal(weights[name], tensor) for name, tensor in read_checkpoint(path).items())
        wrong = wrong_parameters(engine, arch, weights, tp, rank)
        responses = generate_all(engine, requests(), GREEDY)
        found["versions"].append([metrics["verified"], wrong, policies.distance(policy, requests(), responses), stale])
        if version == 1:
            before = of_the_process()
            engine.push_weights(version)
            generate_all(engine, requests()[:RANKS], SamplingParams(max_tokens=1))
            found["kept"].append(of_the_process() == before)
            policies.train_once(policy)
    found["races"] = {waits: races_without(engine, waits) for waits in ("", *WAITS)}
    found["runner"] = type(engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner).__module__
    found["half drawn"] = drawn_over_a_push(engine)
    if last:
        found["answer"] = answer_without_a_wait(engine)
    else:
        engine.close()
    return found


def races_without(engine: VllmEngine, waits: str) -> str:
    """The error if both sides write to a parameter in turns, as pushes and sleep do, one of them without its wait."""
    parameter = next(engine.receiver.model.parameters())
    torch.cuda.synchronize()
    try:
        with torch.no_grad(), wait_removed(waits):
            parameter.mul_(1.0)
            with engine._running():
                parameter.mul_(1.0)
            parameter.mul_(1.0)
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.synchronize()
    return ""


def drawn_over_a_push(engine: VllmEngine) -> list[list[int]]:
    """The tokens that each version drew of each response, if weights are pushed between two engine steps."""
    responses: list[Any] = []
    with engine.between_pushes():
        engine.submit(requests(), GREEDY)
        engine.poll()
    engine.push_weights(4)
    with engine.between_pushes():
        while engine.num_unfinished:
            responses += engine.poll()
    return [[len(segment.tokens) for segment in one.segments] for one in responses]


def answer_without_a_wait(engine: VllmEngine) -> str:
    """The error if vLLM answers without its wait for the push. The engine is of no use then."""
    try:
        with wait_removed("vLLM"):  # it waits at the push already
            assert engine._sync is not None
            engine._sync.push(3, verify=False)  # reading the checksums waits for the device
            generate_all(engine, requests(), GREEDY)
    except RuntimeError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def wait_removed(who: str) -> Iterator[None]:
    """One of the two waits of `EngineState`; "" removes none."""
    real, trainers = torch.cuda.Stream.wait_stream, torch.cuda.current_stream()

    def wait_stream(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        waiting = "the trainer" if stream == trainers else "vLLM"
        if inspect.stack()[1].function != "_stream_in_place" or waiting != who:
            real(stream, other)

    with mock.patch.object(torch.cuda.Stream, "wait_stream", wait_stream):
        yield
