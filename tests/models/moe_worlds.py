"""Mixture-of-experts checkpoints of transformers, what its autograd says about them, and the passes that ranks run on them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from safetensors.torch import load_file, save_file

from megappo.config.role_sections import LoraConfig
from megappo.data.packing import ROUTES, PackedBatch, Ragged, pack
from megappo.models.pieces import as_2d, rectangle
from megappo.parallel.layout import ParallelLayout
from tests.engine.lora_oracle import noise_of, write_noise
from tests.engine.whole import Whole
from tests.models.checkpoints import DELTA_NETS, fill_of_delta_net

_BASE = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=131,
    max_position_embeddings=256,
    moe_intermediate_size=24,
    num_experts_per_tok=3,
    attn_implementation="eager",
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
)
_SIGMOIDS = dict(n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True)
_GROUPS = dict(n_group=4, topk_group=3)  # the best two scores of a group; top_k / topk_group is one
_LATENT = dict(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, num_key_value_heads=4)
_YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.7)
_HALF = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
_CLAMPED = dict(num_local_experts=8, intermediate_size=24, swiglu_limit=0.3, sliding_window=6)
_CLAMPED |= dict(rope_parameters={**_YARN, "truncate": False, "mscale": None, "mscale_all_dim": None})
# transformers' stem and config. Layer 1 of the second is dense: of four stages, one holds no expert.
CASES: dict[str, tuple[str, dict]] = {
    "sparse": ("Qwen3Moe", dict(num_experts=8, norm_topk_prob=True, num_key_value_heads=1)),  # of which tp ranks have copies
    "mixed": ("Qwen3Moe", dict(num_experts=8, norm_topk_prob=False, mlp_only_layers=[1])),
    "mixtral": ("Mixtral", dict(num_local_experts=8, intermediate_size=24)),
    "glm": (
        "Glm4Moe",
        dict(**_SIGMOIDS, n_group=1, topk_group=1, use_qk_norm=True, attention_bias=True, rope_parameters=_HALF)
        | dict(num_key_value_heads=1),
    ),
    "deepseek": ("DeepseekV3", dict(**_SIGMOIDS, **_GROUPS, **{**_LATENT, "head_dim": 8}, rope_parameters=_YARN)),
    "oss": ("GptOss", _CLAMPED),
    "next": (
        "Qwen3Next",
        dict(**DELTA_NETS, num_experts=8, shared_expert_intermediate_size=16, num_key_value_heads=1),
    ),
    "qwen3_5": ("Qwen3_5Moe", dict(**DELTA_NETS, num_experts=8, shared_expert_intermediate_size=16)),
}
NUM_LAYERS, NUM_EXPERTS, TOP_K = 4, 8, 3
OSS_FAULTS = ("no sinks", "no window", "no clamp")
FURTHER = {"deepseek": f"model.layers.{NUM_LAYERS}.", "next": "mtp.layers.0."}
"""Cases whose checkpoint has a layer that predicts a further token, and its prefix."""
DELTA = ("next", "qwen3_5")
NEXT_FAULTS = ("sequences run on", "no gates of heads", "no gate of shared experts")
LENGTHS = (7, 1, 40, 12, 33, 5, 26, 9, 18)
CORRECTED, BIAS_RATE = ("glm", "deepseek"), 0.01
ROUTER_FAULTS = ("no correction", "Megatron's groups", "unscaled")
LORA = LoraConfig(rank=3, alpha=2.0)
COEFFICIENT = 3.0
"""Of the balancing loss: large, so that a mistake in it shows in the gradients of the router and of everything below."""


@dataclass(frozen=True)
class Job:
    """One pass of a case, which trains unless log-probs alone show what it is for. budget: tokens of a micro-batch; distributed:
    optimizer; fault: see `_broken`."""

    case: str
    layout: ParallelLayout
    budget: int = 64
    recompute: Literal["none", "selective", "full"] = "none"
    distributed: bool = False
    coefficient: float = COEFFICIENT
    fault: str = ""
    dtype: Literal["bf16", "fp32"] = "fp32"
    replay: str = ""
    """`given` routes, the model's `own`, or those of the `next` token."""
    lora: bool = False
    """Adapters of `LORA` train, started as `noise_of` their names."""

    @property
    def trains(self) -> bool:
        return self.dtype == "fp32" and self.fault not in (*ROUTER_FAULTS, *OSS_FAULTS, *NEXT_FAULTS)

    def __str__(self) -> str:
        sharded = " sharded optimizer" if self.distributed else ""
        run = f"{self.case} {self.layout} budget {self.budget} recompute {self.recompute}{sharded}"
        return f"{run} {self.dtype} {self.fault}{self.replay} {'lora' * self.lora}".strip()


def write_checkpoint(folder: Path, case: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    stem, settings = CASES[case]
    kind = getattr(transformers, f"{stem}ForCausalLM")
    model = kind(kind.config_class(**{**_BASE, **settings})).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.5 if "sinks" in name else 0.12)
            if case in DELTA and "norm" in name and "linear_attn" not in name:
                parameter.sub_(1.0)
            if case in DELTA and (fill := fill_of_delta_net(name)) is not None:
                fill(parameter)
        for name, buffer in model.named_buffers():
            if "correction" in name:  # as large as the scores differ
                buffer.normal_(0, 0.2)
    model.save_pretrained(folder / case)
    if case in FURTHER:
        _add_further_layer(folder / case, FURTHER[case])
    return model


def _add_further_layer(folder: Path, prefix: str) -> None:
    """Add a layer behind the last as published checkpoints have it: the tensors of a layer, and some of its own."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    last = {name: tensor for name, tensor in tensors.items() if f"layers.{NUM_LAYERS - 1}." in name}
    further = {name.replace(f"model.layers.{NUM_LAYERS - 1}.", prefix): tensor + 1 for name, tensor in last.items()}
    further[f"{prefix}eh_proj.weight"] = torch.randn(64, 128)
    save_file(tensors | further, file, metadata={"format": "pt"})
    if prefix.startswith("model."):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def example_batch() -> PackedBatch:
    """Sequences with a random weight for the log-prob of every token but the first of a sequence."""
    generator = torch.Generator().manual_seed(1)
    batch = pack([torch.randint(0, 131, (n,), generator=generator).tolist() for n in LENGTHS])
    weight = torch.randn(batch.num_tokens, generator=generator)
    weight[batch.cu_seqlens[:-1].long()] = 0.0
    return batch.with_fields({"weight": weight})


def example_routes(case: str, own: list[torch.Tensor] | None = None) -> torch.Tensor:
    """[T, sparse layers, TOP_K] int64: random experts, different ones, or the given choice of each layer; -1 where none is known:
    the prompts' first tokens, and one whole sequence."""
    generator = torch.Generator().manual_seed(2)
    layers, tokens = NUM_LAYERS - len(CASES[case][1].get("mlp_only_layers", ())), sum(LENGTHS)
    routes = torch.rand(tokens, layers, NUM_EXPERTS, generator=generator).argsort(-1)[..., :TOP_K]
    if own is not None:
        routes = torch.stack(own, 1)
    starts = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
    routes[starts] = -1
    routes[int(starts[2]) : int(starts[3])] = -1
    return routes


def with_routes(batch: PackedBatch, routes: torch.Tensor) -> PackedBatch:
    table = routes.flatten(1).int()
    rows = Ragged.of_table(table)
    return batch.with_fields(ragged_fields={ROUTES: Ragged(rows.ids.to(torch.uint8), rows.counts)})


# ------------------------------------------------------------------------------------------------------------ the oracle


def balance_loss(logits: torch.Tensor, experts: torch.Tensor, sigmoid: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(DeepSeek-V3 eq. 17-20 for one sequence, tokens per expert), word for word, in fp64, from transformers' router: logits
    [T, experts] and the chosen experts [T, TOP_K]."""
    scores = torch.softmax(logits.double(), dim=1)
    if sigmoid:
        scores = logits.double().sigmoid() / logits.double().sigmoid().sum(dim=1, keepdim=True)
    num_tokens, num_experts = scores.shape
    chosen = torch.zeros_like(scores)
    for token in range(num_tokens):
        for expert in experts[token]:
            chosen[token, expert] = 1.0
    fraction = [num_experts / (TOP_K * num_tokens) * chosen[:, i].sum() for i in range(num_experts)]
    probability = [scores[:, i].sum() / num_tokens for i in range(num_experts)]
    return torch.stack([f * p for f, p in zip(fraction, probability)]).sum(), chosen.sum(0)


class _FixedRoutes(torch.nn.Module):
    """A router of transformers that takes given experts, row after row of `routes` [T, TOP_K] (-1: its own choice)."""

    def __init__(self, gate: Any, routes: torch.Tensor) -> None:
        super().__init__()
        self.gate: Any = gate
        self.routes, self.at, self.own, self.rerouted = routes, 0, [], 0

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.size(-1)), self.gate.weight)
        given = self.routes[self.at : self.at + len(logits)]
        self.at += len(logits)
        scores = logits.softmax(-1)
        own = scores.topk(TOP_K).indices
        self.own.append(own)
        chosen = torch.where(given < 0, own, given)
        for mine, theirs in zip(own.tolist(), chosen.tolist()):
            self.rerouted += {*mine} != {*theirs}
        weights = scores.gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True) if self.gate.norm_topk_prob else weights, chosen


def reference_of_routes(model: transformers.PreTrainedModel, batch: PackedBatch, routes: torch.Tensor) -> dict:
    """As `reference` without a balancing loss, with fixed routes [T, sparse layers, TOP_K]; also each layer's own choice."""
    mlps = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    gates = [mlp.gate for mlp in mlps]
    for number, mlp in enumerate(mlps):
        mlp.gate = _FixedRoutes(gates[number], routes[:, number])
    model.zero_grad()
    logprobs = torch.cat([_logprobs(model, batch.select([index]).tokens) for index in range(batch.num_sequences)])
    (logprobs * batch["weight"]).sum().backward()
    fixed = [mlp.gate for mlp in mlps]
    for gate, mlp in zip(gates, mlps):
        mlp.gate = gate
    return {
        "logprob": logprobs.detach(),
        "gradients": _as_checkpoint(model),
        "own": [torch.cat(one.own) for one in fixed],
        "counts": (int((routes >= 0).all(-1).sum()), sum(one.rerouted for one in fixed)),
    }


def reference(model: transformers.PreTrainedModel, batch: PackedBatch, coefficient: float) -> dict:
    """Results of transformers, one sequence at a time: log-probs, gradients, load, balancing losses.

    Gradients are of sum(weight * logprob) + coefficient * (sum over layers of the mean over sequences of the balancing loss).
    """
    model.zero_grad()
    routed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    hooks = [
        getattr(layer.mlp, gate).register_forward_hook(
            lambda module, args, out, number=number: routed.update({number: (out[0], out[2])})
        )
        for number, layer in enumerate(model.model.layers)
        for gate in ("gate", "router")
        if hasattr(layer.mlp, gate)
    ]
    tokens = torch.zeros(NUM_LAYERS, NUM_EXPERTS, dtype=torch.float64)
    balance = 0.0
    logprobs = []
    for index in range(batch.num_sequences):
        sequence = batch.select([index])
        logprobs.append(_logprobs(model, sequence.tokens))
        total = (logprobs[-1] * sequence["weight"]).sum()
        for layer, (router_logits, experts) in routed.items():
            loss, counts = balance_loss(router_logits, experts, sigmoid=hasattr(model.model.layers[-1].mlp, "shared_experts"))
            tokens[layer] += counts.detach()
            balance += loss.item()
            total = total + coefficient / batch.num_sequences * loss
        total.backward()
    for hook in hooks:
        hook.remove()
    return {
        "logprob": torch.cat(logprobs).detach(),
        "gradients": _as_checkpoint(model),
        "tokens": tokens,
        "loss": balance / batch.num_sequences,
        "corrections": {int(name.split(".")[2]): buffer for name, buffer in model.named_buffers() if "correction" in name},
    }


def reference_with_adapters(model: transformers.PreTrainedModel, batch: PackedBatch, coefficient: float) -> dict:
    """`reference` of the model with W + alpha / rank * B A as its weights, whose gradients G are passed on to A and B: B^T G and
    G A^T, times alpha / rank."""
    merged, scale = copy.deepcopy(model), LORA.alpha / LORA.rank
    adapters: dict[str, torch.Tensor] = {}
    for name, weight in _each_expert(_as_checkpoint(merged, weights=True)).items():
        module = name.removesuffix(".weight")
        if (
            ".layers." in name
            and weight.dim() == 2
            and min(weight.shape) > 1
            and not name.endswith(("mlp.gate.weight", "moe.gate.weight", "mlp.router.weight", "conv1d.weight", "_bias"))
        ):
            shapes = {".lora_A.weight": (LORA.rank, weight.size(1)), ".lora_B.weight": (weight.size(0), LORA.rank)}
            a, b = (noise_of(module + part, shape).double() for part, shape in shapes.items())
            adapters |= {module + part: values for part, values in zip(shapes, (a, b))}
            with torch.no_grad():
                weight += (scale * b @ a).float()
    found = reference(merged, batch, coefficient)
    weights, gradients = _each_expert(found["gradients"]), {}
    for name, other in adapters.items():
        module, _, part = name.rpartition(".lora_")
        gradient = weights[f"{module}.weight"].double()
        pair = (f"{module}.lora_B.weight", other.T) if part.startswith("A") else (f"{module}.lora_A.weight", other)
        gradients[pair[0]] = scale * (gradient @ pair[1] if part.startswith("A") else pair[1].T @ gradient)
    return found | {"gradients": gradients}


def _each_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Views in which every expert of gpt-oss' stacks, [experts x in, out] as matrices, has a weight [out, in]."""
    found = {}
    for name, values in tensors.items():
        stem, _, kind = name.rpartition(".experts.")
        stacked = stem and kind in ("gate_up_proj", "down_proj")
        parts = enumerate(values.chunk(NUM_EXPERTS)) if stacked else ()
        found |= {f"{stem}.experts.{number}.{kind}.weight": one.T for number, one in parts} if stacked else {name: values}
    return found


def logprobs(model: transformers.PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    """[T] fp32 from transformers, one sequence at a time; 0 for the first token of a sequence."""
    with torch.no_grad():
        return torch.cat([_logprobs(model, batch.select([index]).tokens) for index in range(batch.num_sequences)])


def _logprobs(model: transformers.PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    chosen = model(input_ids=tokens[None]).logits[0].float().log_softmax(1)[:-1].gather(1, tokens[1:, None])[:, 0]
    return torch.cat([chosen.new_zeros(1), chosen])


def _as_checkpoint(model: transformers.PreTrainedModel, weights: bool = False) -> dict[str, torch.Tensor]:
    """Gradients, or views of weights, by the names of the checkpoint: transformers holds all experts of a layer in one tensor, as
    gpt-oss' files do."""
    out = {}
    for name, parameter in model.named_parameters():
        values = parameter.data if weights else parameter.grad
        assert values is not None
        stacked = any("sinks" in other for other, _ in model.named_parameters())
        mixtral = isinstance(model, transformers.MixtralForCausalLM)
        name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        prefix, _, last = ("", "", "") if stacked else name.rpartition(".experts.")
        for expert in range(NUM_EXPERTS if prefix else 0):
            grad = values[expert]
            both, down = (("w1", "w3"), ("w2",)) if mixtral else (("gate_proj", "up_proj"), ("down_proj",))
            parts = {"gate_up_proj": both, "down_proj": down}[last]
            for part, rows in zip(parts, grad.chunk(len(parts))):
                out[f"{prefix}.experts.{expert}.{part}.weight"] = rows
        if not prefix:
            out[name] = as_2d(values)
    return out


# ------------------------------------------------------------------------------------------------------ inside the ranks


def run_world(rank: int, folder: str, jobs: list[Job], exports: list[tuple[str, ParallelLayout, str]]) -> list[dict]:
    """One training pass for each job, then the exports (case, layout, target folder)."""
    from megappo.models.hf_export import export_pretrained
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    results = [_run(Path(folder), job) for job in jobs]
    for case, layout, target in exports:
        engine = _engine(Path(folder), Job(case, layout))
        export_pretrained(engine.chunks, engine.chunks[0].arch, engine.groups, Path(folder, target), Path(folder, case))
    return results


def _run(folder: Path, job: Job) -> dict:
    from megappo.engine.losses import LossOutput
    from megappo.trainer.roles import LanguageModel

    with _broken(job.fault):
        engine: Any = Whole(_engine(folder, job))
        if job.lora:
            with engine.train_mode(), torch.no_grad():
                write_noise(engine)
        batch = example_batch()
        if job.replay:
            routes = torch.load(folder / f"{job.case}.routes")[job.replay]
            batch = with_routes(batch, routes)
        model = LanguageModel(engine, 1.0)

        def loss_of(output, micro):
            logprob, _ = model.token_logprobs(output, micro, want_entropy=False)
            return LossOutput(loss_sum=(logprob * micro["weight"]).sum(), tokens={"logprob": logprob})

        evaluated, _ = model.logprobs(batch, want_entropy=False)
        if not job.trains:
            return {"logprob": evaluated, "evaluated": evaluated, "corrections": _corrections(engine)}
        with engine.train_mode():
            engine.optimizer_zero_grad()
            result: Any = engine.forward_backward(batch, loss_of, reads=("weight", ROUTES))
            # The distributed optimizer reduces each gradient only to the rank that owns it.
            pieces = [] if job.distributed else _gradient_pieces(engine)
            norm = engine.optimizer_step().grad_norm
    return {
        "logprob": result.tokens["logprob"],
        "evaluated": evaluated,
        "norm": norm,
        "pieces": pieces,
        "corrections": _corrections(engine),
        "tokens": result.router and result.router.tokens,  # of a model without experts None
        "loss": result.router and result.router.balance_loss,
        "num_micro_batches": result.num_micro_batches,
        "counts": (result.sums.get("routes_sum", 0.0), result.sums.get("rerouted_sum", 0.0)),
    }


def _corrections(engine) -> dict[int, torch.Tensor]:
    parameters = engine.named_parameters().items()
    return {int(name.split(".")[2]): parameter.detach().clone() for name, parameter in parameters if "correction" in name}


def _gradient_pieces(engine) -> list[tuple]:
    """[(hf name, box, gradient)] of this rank."""

    grads = engine.named_gradients()
    pieces = engine.pieces() if engine.adapters is None else engine.adapters.pieces()
    return [
        (p.hf, p.box, rectangle(grads[p.local], p.slot, p.row, p.col, p.box.rows, p.box.cols).clone())
        for p in pieces[dist.get_rank()]
        if p.local in grads
    ]


def _engine(folder: Path, job: Job):
    from megappo.config.role_sections import OptimizerConfig, PolicyConfig
    from megappo.engine.build import build_megatron
    from megappo.engine.factory import EngineSpec
    from megappo.models.hf_config import read_arch

    path = str(folder / job.case)
    config = PolicyConfig(
        model=path,
        dtype=job.dtype,
        micro_batch_tokens=job.budget,
        recompute=job.recompute,
        router_aux_coef=job.coefficient,
        router_bias_rate=BIAS_RATE if job.case in CORRECTED and not job.lora else 0.0,
        lora=LORA if job.lora else None,
        optimizer=OptimizerConfig(lr=1e-3, distributed=job.distributed, clip_grad=0.0),
    )
    spec = EngineSpec("policy", path, read_arch(path), config, total_updates=10 if job.trains else None)
    return build_megatron(spec, _groups(job.layout), device=torch.device("cpu"))


@cache
def _groups(layout: ParallelLayout) -> Any:
    """Once for each layout: every group has threads of gloo, a thousand of them if each job made its own."""
    from megappo.parallel.groups import build_groups

    return build_groups(layout)


@contextmanager
def _of_another_expert() -> Iterator[None]:
    """Every expert has the adapters of the next one on its rank."""
    from megappo.models import lora_experts

    right = lora_experts.ExpertAdapters._take_apart

    def shifted(self) -> None:
        right(self)
        self._each = {kind: [*each[1:], each[0]] for kind, each in self._each.items()}

    with mock.patch.object(lora_experts.ExpertAdapters, "_take_apart", shifted):
        yield


@contextmanager
def _without_scaling() -> Iterator[None]:
    from megappo.models import lora_experts

    with mock.patch.object(lora_experts, "scaling", lambda lora: 1.0):
        yield


@contextmanager
def _copies_stay_partial() -> Iterator[None]:
    from megappo.engine import megatron

    with mock.patch.object(megatron, "sum_gradients_of_copies", lambda chunks, groups: None):
        yield


@contextmanager
def _marked(name: str, value: bool) -> Iterator[None]:
    """Experts' adapters whose parameters have another mark."""
    from megappo.models import lora_experts

    right = lora_experts.ExpertAdapters.__init__

    def marked(self, *args, **kwargs) -> None:
        right(self, *args, **kwargs)
        for parameter in self.parameters():
            setattr(parameter, name, value)

    with mock.patch.object(lora_experts.ExpertAdapters, "__init__", marked):
        yield


LORA_FAULTS = {
    "adapters of another expert": _of_another_expert,
    "experts without scaling": _without_scaling,
    "copies stay partial": _copies_stay_partial,
    "copies count": partial(_marked, "shared", False),
    "reduced as dense": partial(_marked, "allreduce", True),
}


@contextmanager
def _broken(fault: str) -> Iterator[None]:
    """One deliberate mistake, for the tests that must detect it."""
    from megappo.models import attention, build, moe
    from megappo.models.attention import group_by_length
    from megappo.models.delta import DeltaNet, GatedAttention

    run, gate, shared = DeltaNet._attend, GatedAttention._apply_output_gate, moe.SharedExpertMLP.forward
    attend, expert = attention.plain_attention, moe.ClampedExpert.__init__
    honest, mark, route = moe.local_sequences, build.mark_experts, moe.SequenceRouter._by_sigmoids

    def padding_counts(packed, *args):
        return honest(replace(packed, real=None), *args)

    def whole_micro_batch(packed, *args):
        sequence, real = honest(packed, *args)
        return torch.zeros_like(sequence), real

    def other_router(router, logits, replay):
        """Megatron-core's router where it differs, or ours without a part."""
        mine, ours, corrections = router.moe, route(router, logits, replay), router.correction
        if fault == "Megatron's groups":
            return topk_routing_with_score_function(
                logits,
                mine.top_k,
                num_groups=mine.groups,
                group_topk=mine.top_groups,
                scaling_factor=mine.scaling,
                score_function="sigmoid",
                expert_bias=corrections,
            )
        if fault == "no correction":
            router.correction = torch.nn.Parameter(torch.zeros_like(corrections), requires_grad=False)
            try:
                return route(router, logits, replay)
            finally:
                router.correction = corrections
        return ours[0] / mine.scaling, ours[1]

    def mark_as_dense(chunk):
        """As Megatron-core 0.16 does with ep 1; 0.19 marks them itself."""
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                parameter.allreduce = True

    def other_attention(*args, window, sinks, softcap):
        return attend(*args, window=None if fault == "no window" else window, sinks=None if fault == "no sinks" else sinks)

    def without_clamp(self, config, etp, clamp):
        expert(self, config, etp, clamp._replace(limit=1e9))

    def as_one_sequence(self, grouping, mixed, *others):
        return run(self, group_by_length((0, len(mixed))), mixed, *others)

    def without_gate(self, x):
        self.use_shared_expert_gate = False
        return shared(self, x)

    if fault in LORA_FAULTS:
        with LORA_FAULTS[fault]():
            yield
        return
    if fault == "no clamp":
        moe.ClampedExpert.__init__ = without_clamp
    elif fault in OSS_FAULTS:
        attention.plain_attention = other_attention
    elif fault == "sequences run on":
        DeltaNet._attend = as_one_sequence  # type: ignore[assignment]
    elif fault == "no gates of heads":
        GatedAttention._apply_output_gate = lambda self, x, gate: x + 0 * gate.reshape(x.shape)
    elif fault == "no gate of shared experts":
        moe.SharedExpertMLP.forward = without_gate  # type: ignore[assignment]
    elif fault in ROUTER_FAULTS:
        moe.SequenceRouter._by_sigmoids = other_router  # type: ignore[assignment]
    elif fault == "Megatron's own mark":
        build.mark_experts = mark_as_dense
    elif fault:
        moe.local_sequences = {"padding counts": padding_counts, "balanced per micro-batch": whole_micro_batch}[fault]
    try:
        yield
    finally:
        moe.local_sequences, build.mark_experts, moe.SequenceRouter._by_sigmoids = honest, mark, route
        attention.plain_attention, moe.ClampedExpert.__init__ = attend, expert
        DeltaNet._attend, GatedAttention._apply_output_gate, moe.SharedExpertMLP.forward = run, gate, shared
