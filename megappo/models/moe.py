"""Mixture of experts (qwen3_moe): the MLP of a sparse layer, its router with a balancing loss per sequence, load statistics.

Dispatch and experts are Megatron-core's (alltoall; one MLP per expert, or TransformerEngine's grouped GEMM). The router is ours:
Megatron balances a micro-batch, so its loss would change with the split of a batch; here the unit is the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from torch import Tensor

from megappo.models.arch import ModelArch, check_ep
from megappo.models.attention import PackedSequences
from megappo.models.implementation import Implementation
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
        "moe_layer_freq": [int(arch.is_sparse(layer)) for layer in range(arch.num_layers)],
        "moe_router_score_function": "softmax",
        # Softmax over the chosen logits equals softmax over all, normalised over the chosen.
        "moe_router_pre_softmax": not moe.norm_topk_prob,
        "moe_router_dtype": "fp32",  # in bf16 close scores tie, and layouts would choose different experts
        "moe_router_load_balancing_type": "none",  # `SequenceRouter` adds its own loss
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def moe_submodule(implementation: Implementation) -> ModuleSpec:
    """Make the spec of the MLP of a sparse layer, whose layer must be a `SparseLayer`."""
    if implementation == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TEColumnParallelGroupedLinear, TERowParallelGroupedLinear

        linears = MLPSubmodules(linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear)
        experts = ModuleSpec(module=TEGroupedMLP, submodules=linears)
    else:
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        experts = ModuleSpec(module=SequentialMLP, submodules=linears)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, router=SequenceRouter))


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
        self.scale = 0.0

    def begin(self, coefficient: float, num_sequences: float) -> None:
        """Start a pass whose loss is coefficient / num_sequences times the sum of the balancing losses of layers and sequences.
        num_sequences: of the whole batch, over all ranks and micro-batches. With coefficient 0 only the load is recorded."""
        self.scale = coefficient / num_sequences
        self.tokens.zero_()
        self.loss.zero_()


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


class SequenceRouter(Router):
    """Softmax top-k router in fp32. Its balancing loss is that of DeepSeek-V3, eq. 17-20 (arXiv:2412.19437), per sequence:

        L_b = sum_i f_i P_i,  f_i = E / (K T_b) * (tokens of b that chose expert i),  P_i = mean over b of the score of expert i

    Padding is ignored. The tp and cp ranks of a sequence sum their choices, and each takes the gradient of its own tokens' scores.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None, **newer: Any) -> None:
        super().__init__(config, pg_collection, **newer)  # since Megatron-core 0.17: whether its layer predicts further tokens
        if not config.use_cpu_initialization:
            # Megatron creates this weight on the host and moves it at the first forward: too late for DDP's gradient buffers.
            self.weight.data = self.weight.data.to(torch.cuda.current_device())
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
        return self.routing(_RouterLinear.apply(input.flatten(0, -2), self.weight))

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        probs, chosen = topk_routing_with_score_function(
            logits, self.config.moe_router_topk, use_pre_softmax=self.config.moe_router_pre_softmax
        )
        # Under recomputation the first forward runs without gradients: only the second counts.
        if self.training and torch.is_grad_enabled() and self.state is not None:
            probs = self._balance(self.state, logits, probs, chosen)
        return probs, chosen

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
        loss = (torch.softmax(logits, dim=-1) * slope).sum()
        state.loss[self.layer_number - 1] += loss.detach()
        return _AttachLoss.apply(probs, loss, state.scale)


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
    """Make DDP and the optimizer reduce expert weights over the expert groups, for any sizes."""
    for module in model.modules():
        if isinstance(module, (SequentialMLP, TEGroupedMLP)):
            for parameter in module.parameters():
                # Megatron does this only if ep > 1. With ep = 1 and etp < tp under sequence parallel the tp ranks hold copies of an
                # expert that saw different tokens: reduced over the dense data-parallel group, their gradients would differ.
                setattr(parameter, "allreduce", False)
                # Without this mark the gradient norm takes the experts of all tp ranks but the first for copies and drops them.
                setattr(parameter, "tensor_model_parallel", True)
