"""Mixture-of-experts checkpoints of transformers, what its autograd says about them, and the passes that ranks run on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from megappo.data.packing import PackedBatch, pack
from megappo.parallel.layout import ParallelLayout
from tests.engine.whole import Whole

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
    num_experts=8,
    num_experts_per_tok=3,
    attn_implementation="eager",
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
)
# Layer 1 of the second is dense: of four stages, one holds no expert.
CASES = {"sparse": dict(norm_topk_prob=True), "mixed": dict(norm_topk_prob=False, mlp_only_layers=[1])}
NUM_LAYERS, NUM_EXPERTS, TOP_K = 4, 8, 3
LENGTHS = (7, 1, 40, 12, 33, 5, 26, 9, 18)
COEFFICIENT = 3.0
"""Of the balancing loss: large, so that a mistake in it shows in the gradients of the router and of everything below."""


@dataclass(frozen=True)
class Job:
    """One training pass of a case. budget: tokens of a micro-batch; distributed: optimizer; fault: see `_broken`."""

    case: str
    layout: ParallelLayout
    budget: int = 64
    recompute: str = "none"
    distributed: bool = False
    coefficient: float = COEFFICIENT
    fault: str = ""
    dtype: str = "fp32"

    def __str__(self) -> str:
        sharded = " sharded optimizer" if self.distributed else ""
        run = f"{self.case} {self.layout} budget {self.budget} recompute {self.recompute}{sharded}"
        return f"{run} {self.dtype} {self.fault}".strip()


def write_checkpoint(folder: Path, case: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_BASE, **CASES[case])).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.12)
    model.save_pretrained(folder / case)
    return model


def example_batch() -> PackedBatch:
    """Sequences with a random weight for the log-prob of every token but the first of a sequence."""
    generator = torch.Generator().manual_seed(1)
    batch = pack([torch.randint(0, 131, (n,), generator=generator).tolist() for n in LENGTHS])
    weight = torch.randn(batch.num_tokens, generator=generator)
    weight[batch.cu_seqlens[:-1].long()] = 0.0
    return batch.with_fields({"weight": weight})


# ------------------------------------------------------------------------------------------------------------ the oracle


def balance_loss(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(DeepSeek-V3 eq. 17-20 for one sequence, tokens per expert) from router logits [T, experts], word for word, in fp64."""
    scores = torch.softmax(logits.double(), dim=1)
    num_tokens, num_experts = scores.shape
    chosen = torch.zeros_like(scores)
    for token in range(num_tokens):
        for expert in scores[token].argsort(descending=True)[:TOP_K]:
            chosen[token, expert] = 1.0
    fraction = [num_experts / (TOP_K * num_tokens) * chosen[:, i].sum() for i in range(num_experts)]
    probability = [scores[:, i].sum() / num_tokens for i in range(num_experts)]
    return sum(f * p for f, p in zip(fraction, probability)), chosen.sum(0)


def reference(model: transformers.PreTrainedModel, batch: PackedBatch, coefficient: float) -> dict:
    """Results of transformers, one sequence at a time: log-probs, gradients, load, balancing losses.

    Gradients are of sum(weight * logprob) + coefficient * (sum over layers of the mean over sequences of the balancing loss).
    """
    model.zero_grad()
    routed: dict[int, torch.Tensor] = {}
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, args, out, number=number: routed.update({number: out[0]}))
        for number, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "gate")
    ]
    tokens = torch.zeros(NUM_LAYERS, NUM_EXPERTS, dtype=torch.float64)
    balance = 0.0
    logprobs = []
    for index in range(batch.num_sequences):
        sequence = batch.select([index])
        logprobs.append(_logprobs(model, sequence.tokens))
        total = (logprobs[-1] * sequence["weight"]).sum()
        for layer, router_logits in routed.items():
            loss, counts = balance_loss(router_logits)
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
    }


def logprobs(model: transformers.PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    """[T] fp32 from transformers, one sequence at a time; 0 for the first token of a sequence."""
    with torch.no_grad():
        return torch.cat([_logprobs(model, batch.select([index]).tokens) for index in range(batch.num_sequences)])


def _logprobs(model: transformers.PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    chosen = model(input_ids=tokens[None]).logits[0].float().log_softmax(1)[:-1].gather(1, tokens[1:, None])[:, 0]
    return torch.cat([chosen.new_zeros(1), chosen])


def _as_checkpoint(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Gradients by the names of the checkpoint: transformers holds all experts of a layer in one tensor."""
    out = {}
    for name, parameter in model.named_parameters():
        prefix, _, last = name.rpartition(".experts.")
        for expert in range(NUM_EXPERTS if prefix else 0):
            grad = parameter.grad[expert]
            parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[last]
            for part, values in zip(parts, grad.chunk(len(parts))):
                out[f"{prefix}.experts.{expert}.{part}.weight"] = values
        if not prefix:
            out[name] = parameter.grad.view(-1, 1) if parameter.dim() == 1 else parameter.grad
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
        engine = Whole(_engine(folder, job))
        batch = example_batch()
        model = LanguageModel(engine, 1.0)

        def loss_of(output, micro):
            logprob, _ = model.token_logprobs(output, micro, want_entropy=False)
            return LossOutput(loss_sum=(logprob * micro["weight"]).sum(), tokens={"logprob": logprob})

        evaluated, _ = model.logprobs(batch, want_entropy=False)
        with engine.train_mode():
            engine.optimizer_zero_grad()
            result = engine.forward_backward(batch, loss_of, reads=("weight",))
            # The distributed optimizer reduces each gradient only to the rank that owns it.
            pieces = [] if job.distributed else _gradient_pieces(engine)
            norm = engine.optimizer_step().grad_norm
    return {
        "logprob": result.tokens["logprob"],
        "evaluated": evaluated,
        "norm": norm,
        "pieces": pieces,
        "tokens": result.router.tokens,
        "loss": result.router.balance_loss,
        "num_micro_batches": result.num_micro_batches,
    }


def _gradient_pieces(engine) -> list[tuple]:
    """[(hf name, box, gradient)] of this rank."""
    from megappo.models.pieces import as_2d
    from megappo.models.weight_map import megatron_pieces

    grads = {name: as_2d(parameter.main_grad) for name, parameter in engine.named_parameters().items()}
    return [
        (p.hf, p.box, grads[p.local][p.row : p.row + p.box.rows, p.col : p.col + p.box.cols].clone())
        for p in megatron_pieces(engine.chunks[0].arch, engine.groups.layout, dist.get_rank())
    ]


def _engine(folder: Path, job: Job):
    from megappo.config.role_sections import OptimizerConfig, PolicyConfig
    from megappo.engine.build import build_megatron
    from megappo.engine.factory import EngineSpec
    from megappo.models.hf_config import read_arch
    from megappo.parallel.groups import build_groups

    path = str(folder / job.case)
    config = PolicyConfig(
        model=path,
        dtype=job.dtype,
        micro_batch_tokens=job.budget,
        recompute=job.recompute,
        router_aux_coef=job.coefficient,
        optimizer=OptimizerConfig(lr=1e-3, distributed=job.distributed, clip_grad=0.0),
    )
    spec = EngineSpec("policy", path, read_arch(path), config, total_updates=10)
    return build_megatron(spec, build_groups(job.layout), device=torch.device("cpu"))


@contextmanager
def _broken(fault: str) -> Iterator[None]:
    """One deliberate mistake, for the tests that must detect it."""
    from megappo.models import build, moe

    honest, mark = moe.local_sequences, build.mark_experts

    def padding_counts(packed, *args):
        return honest(replace(packed, real=None), *args)

    def whole_micro_batch(packed, *args):
        sequence, real = honest(packed, *args)
        return torch.zeros_like(sequence), real

    if fault == "Megatron's own mark":
        build.mark_experts = lambda chunk: None
    elif fault:
        moe.local_sequences = {"padding counts": padding_counts, "balanced per micro-batch": whole_micro_batch}[fault]
    try:
        yield
    finally:
        moe.local_sequences, build.mark_experts = honest, mark
