"""Mixture of experts: the MLP of a sparse layer, its router with a balancing loss per sequence, load statistics.

Dispatch and experts are Megatron-core's (alltoall; one MLP per expert, or TransformerEngine's grouped GEMM). The router is ours:
Megatron balances a micro-batch, so its loss would change with the split of a batch; here the unit is the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor
from torch.nn.functional import normalize, pad

from megappo.data.packing import NO_ID
from megappo.models.arch import Clamp, ModelArch, MoeArch, check_ep
from megappo.models.attention import PackedSequences
from megappo.models.implementation import Implementation
from megappo.models.weight_map import hf_layer
from megappo.models.weight_rules import CORRECTION
from megappo.parallel.layout import ParallelLayout


def moe_config(arch: ModelArch, layout: ParallelLayout) -> dict[str, Any]:
    """Arguments of TransformerConfig for experts; empty for a dense model. ValueError if the layout does not fit the experts."""
    check_ep(arch, layout.ep, layout.etp)
    moe = arch.moe
    if moe is None:
        return {}
    if layout.tp > 1 and not layout.sequence_parallel:
        # Every tp rank would dispatch the same tokens, and each expert would see them tp times.
        raise ValueError(f"tp {layout.tp} with experts needs sequence_parallel; set sequence_parallel to true, or tp to 1")
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.ffn_size,
        "moe_layer_freq": [int(arch.kind(layer).sparse) for layer in range(arch.num_layers)],
        "moe_router_score_function": "softmax",
        # Softmax over the chosen logits equals softmax over all, normalised over the chosen.
        "moe_router_pre_softmax": not moe.norm_topk_prob,
        "moe_router_dtype": "fp32",  # in bf16 close scores tie, and layouts would choose different experts
        "moe_router_load_balancing_type": "none",  # `SequenceRouter` adds its own loss
        "moe_shared_expert_intermediate_size": moe.shared_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def moe_submodule(arch: ModelArch, implementation: Implementation) -> ModuleSpec:
    """Make the spec of the MLP of a sparse layer, whose layer must be a `SparseLayer`."""
    if implementation == "transformer_engine":
        from megatron.core.extensions import transformer_engine as te

        linears = MLPSubmodules(linear_fc1=te.TEColumnParallelGroupedLinear, linear_fc2=te.TERowParallelGroupedLinear)
        experts = ModuleSpec(module=TEGroupedMLP, submodules=linears)
        dense = MLPSubmodules(linear_fc1=te.TEColumnParallelLinear, linear_fc2=te.TERowParallelLinear)
    else:
        dense = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        experts = ModuleSpec(module=SequentialMLP, submodules=dense)
    # Megatron calls the router as a class. A model without experts has no layer of this spec.
    moe = cast(MoeArch, arch.moe)
    router: Any = partial(SequenceRouter, moe=moe)
    if moe is not None and moe.clamp is not None:
        experts = ModuleSpec(module=ClampedExperts, params={"clamp": moe.clamp})
    shared = ModuleSpec(module=SharedExpertMLP, submodules=dense)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, router=router, shared_experts=shared))


class ClampedExperts(torch.nn.Module):
    """Experts of gpt-oss, one after the other: matrices [in, out], columns of gate and up in turn, biases, `Clamp`. etp cuts the
    columns of gate and up in pairs, and the channels of the last bias, whose parts the sum over the ranks puts together."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        clamp: Clamp,
        name: str | None = None,  # of the module, since Megatron-core 0.19
    ) -> None:
        super().__init__()
        self.local_experts = torch.nn.ModuleList(
            ClampedExpert(config, pg_collection.expt_tp, clamp) for _ in range(num_local_experts)
        )

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Return the experts' outputs times `probs` [rows], and no bias. tokens: [rows, H], sorted by expert."""
        counts = tokens_per_expert.tolist()
        parts = zip(self.local_experts, tokens.split(counts), probs.split(counts))
        return torch.cat([(expert(rows) * weights[:, None]).to(rows.dtype) for expert, rows, weights in parts]), None


class _Matrix(torch.nn.Module):
    """Product with weight [in, out], and bias [1, biased] of the outputs behind `before`. It returns what Megatron's linears do."""

    def __init__(self, inputs: int, outputs: int, biased: int, before: int = 0, **empty: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(inputs, outputs, **empty))
        self.bias = torch.nn.Parameter(torch.empty(1, biased, **empty))
        self._around = (before, outputs - before - biased)

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        return rows @ self.weight + pad(self.bias, self._around), None


class ClampedExpert(torch.nn.Module):
    """One expert, or the part of one that an etp rank has."""

    def __init__(self, config: TransformerConfig, etp: dist.ProcessGroup, clamp: Clamp) -> None:
        super().__init__()
        assert config.moe_ffn_hidden_size is not None
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        empty: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        ffn, hidden, mine = config.moe_ffn_hidden_size // etp.size(), config.hidden_size, config.hidden_size // etp.size()
        self.clamp = clamp
        self.linear_fc1 = _Matrix(hidden, 2 * ffn, 2 * ffn, **empty)
        self.linear_fc2 = _Matrix(ffn, hidden, mine, etp.rank() * mine, **empty)

    def forward(self, rows: Tensor) -> Tensor:
        alpha, limit = self.clamp
        both, _ = self.linear_fc1(rows)
        gate, up = both[:, ::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
        product = (up + 1) * (gate * torch.sigmoid(alpha * gate))
        return self.linear_fc2(product)[0]


class SparseLayer(TransformerLayer):
    """Layer that gives its router the sequences of the micro-batch, also in a recomputed forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mlp: Any = self.mlp  # of `moe_submodule`
        with mlp.router.within(kwargs["packed_seq_params"]):
            return super().forward(*args, **kwargs)


class RouterState:
    """State that the routers of one model share: the weight of the balancing loss in the current pass, and this rank's load in it,
    whose sum over the ranks of a role is that of the whole batch. Rows of dense layers and of other stages are 0."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        self.tokens = torch.zeros(num_layers, num_experts, dtype=torch.float64, device=device)
        """[layers, experts] real tokens sent to each expert."""
        self.loss = torch.zeros(num_layers, dtype=torch.float64, device=device)
        """[layers] sum of the sequences' balancing losses, neither divided by their number nor weighted."""
        self.replayed = torch.zeros(2, dtype=torch.float64, device=device)
        """Replayed choices of this rank's tokens in the current pass, one for each sparse layer; those unlike the router's own."""
        self.scale = 0.0

    def begin(self, coefficient: float, num_sequences: float) -> None:
        """Start a pass whose loss is coefficient / num_sequences times the sum of the balancing losses of layers and sequences.
        num_sequences: of the whole batch, over all ranks and micro-batches. With coefficient 0 only the load is recorded."""
        self.scale = coefficient / num_sequences
        self.tokens.zero_()
        self.loss.zero_()
        self.replayed.zero_()


def share_router_state(chunks: Sequence[torch.nn.Module]) -> RouterState | None:
    """Give all routers of a model (its chunks on this rank, not wrapped) one state. None for a dense model."""
    config = cast(TransformerConfig, chunks[0].config)
    if config.num_moe_experts is None:
        return None
    state = RouterState(config.num_layers, config.num_moe_experts, next(chunks[0].parameters()).device)
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, SequenceRouter):
                module.state = state
    return state


@torch.no_grad()
def correct(parameters: Mapping[str, Tensor], load: Tensor, rate: float, frozen: Collection[str]) -> None:
    """Move the corrections among a rank's parameters (by canonical name) by `rate`: up of an expert with less than the mean load of
    its layer, down of one with more (DeepSeek-V3, section 2.1.2). load: [layers, experts] tokens of the whole batch. frozen:
    Hugging Face names of those that stay."""
    for name, parameter in parameters.items():
        layer = int(name.split(".")[2]) if name.endswith(CORRECTION.local) else -1
        if layer >= 0 and hf_layer(layer) + CORRECTION.name not in frozen:
            of_layer = load[layer]
            parameter.add_((of_layer.mean() - of_layer).sign().to(parameter.dtype), alpha=rate)


class SequenceRouter(Router):
    """Top-k router in fp32, by softmax or sigmoid. Its balancing loss is that of DeepSeek-V3, eq. 17-20 (arXiv:2412.19437):

        L_b = sum_i f_i P_i,  f_i = E / (K T_b) * (tokens of b that chose expert i),  P_i = mean over b of the score of expert i

    Padding is ignored. The tp and cp ranks of a sequence sum their choices, and each takes the gradient of its own tokens' scores.
    """

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None, *, moe: MoeArch, **newer: Any
    ) -> None:
        super().__init__(config, pg_collection, **newer)  # since Megatron-core 0.17: whether its layer predicts further tokens
        self.moe = moe
        if moe.sigmoid:
            # In fp32 in a model of any type: sums of scores and corrections of all experts must not tie. No gradient reaches it.
            self.correction = torch.nn.Parameter(torch.zeros(moe.num_experts), requires_grad=False)
        if not config.use_cpu_initialization:
            # Megatron creates this weight on the host and moves it at the first forward: too late for DDP's gradient buffers.
            for parameter in self.parameters():
                parameter.data = parameter.data.to(torch.cuda.current_device())
        self.state: RouterState | None = None
        self._packed: PackedSequences | None = None

    @contextmanager
    def within(self, packed: PackedSequences) -> Iterator[None]:
        """Route the tokens of this micro-batch inside the context."""
        self._packed = packed
        try:
            yield
        finally:
            self._packed = None

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route this rank's tokens [t, 1, H]: weight of each expert [t, experts] fp32, 0 if not chosen, and the choice, bool."""
        logits = _RouterLinear.apply(input.flatten(0, -2), self.weight)
        return self.routing(logits if self.bias is None else logits + self.bias.float())

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        replay = self._replay()
        probs, chosen = (
            self._by_sigmoids(logits, replay)
            if self.moe.sigmoid
            else topk_routing_with_score_function(
                logits, self.config.moe_router_topk, use_pre_softmax=self.config.moe_router_pre_softmax, router_replay=replay
            )
        )
        # Under recomputation the first forward runs without gradients: only the second counts.
        if self.training and torch.is_grad_enabled() and self.state is not None:
            probs = self._balance(self.state, logits, probs, chosen)
        return probs, chosen

    def _by_sigmoids(self, logits: Tensor, replay: Replay | None) -> tuple[Tensor, Tensor]:
        """Route as DeepSeek-V3 does (eq. 12-16): weights [t, experts] fp32 and the choice, bool."""
        moe, scores = self.moe, logits.sigmoid()
        with torch.no_grad():
            ranked = scores + self.correction
            if moe.groups > 1:
                # Megatron's group_limited_topk adds up the best top_k / top_groups scores of a group, DeepSeek the best two.
                grouped = ranked.view(len(ranked), moe.groups, -1)
                best = grouped.topk(2, dim=-1).values.sum(-1).topk(moe.top_groups, dim=-1).indices
                allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
                ranked = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
            chosen = ranked.topk(moe.top_k, dim=-1).indices
            chosen = chosen if replay is None else replay.of(chosen)
        weights = scores.gather(1, chosen)
        if moe.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        probs = torch.zeros_like(scores).scatter(1, chosen, weights * moe.scaling)
        return probs, torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)

    def _replay(self) -> Any:
        """Return what takes the choice from this micro-batch's routes, as Megatron calls it; None without routes."""
        if self._packed is None or self._packed.routes is None:
            return None
        assert self.layer_number is not None and self.state is not None
        layers = cast(list[int], self.config.moe_layer_freq)  # of `moe_config`
        top_k, before = self.config.moe_router_topk, sum(layers[: self.layer_number - 1])
        return Replay(self._packed.routes[:, before * top_k : (before + 1) * top_k].long(), self.state.replayed)

    def _balance(self, state: RouterState, logits: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
        assert self._packed is not None, "the router ran outside its layer"
        assert self.layer_number is not None and self.num_experts is not None
        packed = self._packed
        if packed.own_sequences is None:  # the same in every layer
            num_ranks = self.tp_group.size() if self.config.sequence_parallel else 1
            packed.own_sequences = local_sequences(packed, num_ranks, self.tp_group.rank(), logits.size(0))
        sequence, real = packed.own_sequences
        with torch.no_grad():
            counts = logits.new_zeros(packed.cu_seqlens_q.numel() - 1, self.num_experts)
            counts.index_add_(0, sequence, (chosen & real[:, None]).to(counts.dtype))
            state.tokens[self.layer_number - 1] += counts.sum(0)
        if state.scale == 0.0:
            return probs
        with torch.no_grad():
            if self.tp_cp_group.size() > 1:
                dist.all_reduce(counts, group=self.tp_cp_group)
            # Tokens of each sequence without padding: each chose topk experts.
            num_tokens = counts.sum(1, keepdim=True) / self.config.moe_router_topk
            # d L_b / d score of one token: f_i / T_b
            # A sequence of padding alone has no tokens.
            slope = counts * (self.num_experts / self.config.moe_router_topk) / num_tokens.clamp(min=1).square()
            slope = slope[sequence] * real[:, None]
        scores = normalize(logits.sigmoid(), p=1, dim=-1) if self.moe.sigmoid else torch.softmax(logits, dim=-1)
        loss = (scores * slope).sum()
        state.loss[self.layer_number - 1] += loss.detach()
        return _AttachLoss.apply(probs, loss, state.scale)


@dataclass(frozen=True)
class Replay:
    """A router's choice that the sampler made. routes: [t, top_k] int64, NO_ID in a row whose token chooses itself. counts: [2],
    gains the replayed choices, and those with another expert than the router's own."""

    routes: Tensor
    counts: Tensor

    def of(self, own: Tensor) -> Tensor:
        """Return the experts in place of the router's choice [t, top_k]."""
        given = (self.routes != NO_ID).all(1)
        other = given & (self.routes.sort(1).values != own.sort(1).values).any(1)
        self.counts.add_(torch.stack([given.sum(), other.sum()]))
        return torch.where(given[:, None], self.routes, own)

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Callable[..., tuple]
    ) -> tuple[Tensor, Tensor]:
        """Return scores and experts, as Megatron's routing asks for them (its `RouterReplay` keeps them in global lists)."""
        chosen = self.of(choose(scores, topk, num_groups=num_groups, group_topk=group_topk)[1])
        return scores.gather(1, chosen), chosen


def local_sequences(packed: PackedSequences, tp: int, tp_rank: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return ([t] int64 sequence of each token of this rank, [t] bool, false for padding); t = num_tokens = T / cp / tp.
    tp: ranks over which sequence parallel cuts the tokens of a cp rank."""
    context, lengths = packed.context, packed.cu_seqlens_q.long().diff()
    total = num_tokens * tp * (1 if context is None else context.size)
    sequence = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths, output_size=total)
    real = torch.ones_like(sequence, dtype=torch.bool)
    if packed.real is not None:
        real = torch.zeros_like(real).index_fill_(0, packed.real, True)
    if context is not None:
        sequence, real = context.take(sequence), context.take(real)
    return sequence.chunk(tp)[tp_rank], real.chunk(tp)[tp_rank]


# Megatron's own calls TransformerEngine's GEMM.
class _RouterLinear(torch.autograd.Function):
    """x @ weight^T in fp32 from tensors of any dtype, saved in that dtype: [t, H], [experts, H] -> [t, experts] fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.float().T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        return (grad @ weight.float()).to(x.dtype), (grad.T @ x.float()).to(weight.dtype)


class _AttachLoss(torch.autograd.Function):
    """Identity on x that gives the loss the gradient `scale`, as if scale * loss had been added to the model's loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, (loss.dtype, loss.device)
        return x.view_as(x)  # a new tensor: autograd would make no node for the input itself

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        dtype, device = ctx.like
        # Filled on the device: a copy from the host would synchronise in every layer.
        return grad, torch.full((), ctx.scale, dtype=dtype, device=device), None


def mark_experts(model: torch.nn.Module) -> None:
    """Make DDP and the optimizer reduce expert weights over the expert groups, for any sizes. A gate of shared experts goes to the
    device."""
    for module in model.modules():
        if isinstance(module, SharedExpertMLP) and module.gate_weight is not None and not module.config.use_cpu_initialization:
            # Megatron makes it on the host, as a router's weight.
            module.gate_weight.data = module.gate_weight.data.to(torch.cuda.current_device())
        if isinstance(module, (SequentialMLP, TEGroupedMLP, ClampedExperts)):
            for parameter in module.parameters():
                # Megatron does this only if ep > 1. With ep = 1 and etp < tp under sequence parallel the tp ranks hold copies of an
                # expert that saw different tokens: reduced over the dense data-parallel group, their gradients would differ.
                setattr(parameter, "allreduce", False)
                # Without this mark the gradient norm takes the experts of all tp ranks but the first for copies and drops them.
                setattr(parameter, "tensor_model_parallel", True)
