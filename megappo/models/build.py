"""Build a policy or critic for one rank: TransformerConfig, layer spec, model. `hf_import.py` loads the weights.

With TransformerEngine and CUDA the layers are TransformerEngine's, otherwise Megatron-core's own with our norm and attention.
Both have the same parameter names and shapes, so checkpoints are interchangeable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from torch.nn.functional import gelu, silu

from megappo.models.arch import Kind, ModelArch, check_cp, check_tp
from megappo.models.attention import PackedAttention, SinkAttention, rotary_te_attention
from megappo.models.delta import DeltaNet, DeltaSubmodules, GatedAttention
from megappo.models.gpt import CriticModel, PackedModel, PolicyModel, named_parameters
from megappo.models.implementation import Implementation
from megappo.models.int8_parallel import Int8ColumnParallelLinear, Int8RowParallelLinear
from megappo.models.kv_copies import mark_kv_copies
from megappo.models.latent import LatentAttention, LatentSubmodules
from megappo.models.moe import SparseLayer, mark_experts, moe_config, moe_submodule
from megappo.parallel.groups import ProcessGroups
from megappo.parallel.layout import ParallelLayout


def fusion_config(arch: ModelArch, implementation: Implementation, *, on_gpu: bool) -> dict[str, Any]:
    """Arguments of TransformerConfig; empty if the model is not built on a GPU."""
    if not on_gpu:
        return {}
    has_te = implementation == "transformer_engine"
    return {
        # SwiGLU in one kernel, by torch.compile (TORCHDYNAMO_DISABLE=1 runs it unfused): only the product is written, and the
        # backward recomputes the rest from gate and up.
        "bias_activation_fusion": True,
        "moe_permute_fusion": has_te and arch.moe is not None,  # permutes the rows of experts, from TransformerEngine 2.1 on
        # True would let TransformerEngine overwrite main_grad in what it takes for the first micro-batch; only fp8 caches weights.
        "disable_parameter_transpose_cache": has_te,
    }


def accumulate_into_main_grad(model: torch.nn.Module) -> None:
    """Let TransformerEngine add a weight's gradient to its fp32 `main_grad` (from DDP) without a rounded copy in the weight's type.
    The protocol is that of `ops.linear_logprob.main_grad_of`."""
    # Set on the modules: Megatron's switch, `gradient_accumulation_fusion`, would also ask the output layer for Apex's kernel.
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation") and all(p.requires_grad for p in module.parameters(recurse=False)):
            setattr(module, "fuse_wgrad_accumulation", True)


def freeze_chunks(chunks: Sequence[PackedModel], is_frozen: Callable[[str], bool]) -> None:
    """Freeze the parameters whose canonical names `is_frozen` accepts."""
    for name, parameter in named_parameters(chunks).items():
        if is_frozen(name):
            parameter.requires_grad_(False)
    for chunk in chunks:
        recomputes = chunk.config.recompute_granularity == "full"
        if chunk.pre_process and recomputes and not any(p.requires_grad for p in chunk.embedding.parameters()):
            # A recomputed layer whose input needs no gradient gives none to its weights either.
            chunk.embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_(torch.is_grad_enabled()))


Recompute = Literal["none", "selective", "full"]
_ACTIVATIONS = {"silu": silu, "gelu_pytorch_tanh": partial(gelu, approximate="tanh")}


def build_model(
    arch: ModelArch,
    groups: ProcessGroups,
    *,
    dtype: torch.dtype,
    recompute: Recompute = "none",
    value_head: bool = False,
    implementation: Implementation = "local",
    in_8_bits: bool = False,
    device: torch.device | None = None,
) -> list[PackedModel]:
    """Build this rank's model chunks (vpp of them) of a policy, or of a critic with `value_head`.
    Only norms and the value head are initialised. in_8_bits: the layers' linear weights are in 8 bits, and frozen. device: None is
    the rank's GPU, or the CPU. Collective over the role's ranks. ValueError if the layout does not fit the architecture."""
    check_tp(arch, groups.layout.tp)
    check_cp(arch, groups.layout.tp, groups.layout.cp, implementation)
    tracker = get_cuda_rng_tracker()
    assert tracker is not None
    if not tracker.is_initialized() and (device is None or device.type != "meta"):
        # Megatron's forward forks this state under sequence parallel. The seed changes nothing: dropout is 0, weights are loaded.
        model_parallel_cuda_manual_seed(0, tp_rank=groups.coordinates.tp, ep_rank=0, etp_rank=0)
    on_gpu = device is None and torch.cuda.is_available()
    fusions = fusion_config(arch, implementation, on_gpu=on_gpu)
    config = transformer_config(arch, groups.layout, groups.coordinates.pp, dtype, recompute, fusions)
    # Without this flag Megatron's modules allocate on the GPU by name; with it they name no device and follow torch.device below.
    config.use_cpu_initialization = not on_gpu
    with torch.device(device) if device is not None else nullcontext():
        chunks = [
            _build_chunk(arch, groups, config, chunk, value_head, implementation, in_8_bits) for chunk in range(groups.layout.vpp)
        ]
    for chunk in chunks:
        _mark_sharded(chunk)
        mark_kv_copies(chunk, arch, groups.layout.tp, groups.coordinates.tp)
        mark_experts(chunk)
    return chunks


def _build_chunk(
    arch: ModelArch,
    groups: ProcessGroups,
    config: TransformerConfig,
    chunk: int,
    value_head: bool,
    implementation: Implementation,
    in_8_bits: bool,
) -> PackedModel:
    layout = groups.layout
    layers = layout.chunk_layers(arch.num_layers, groups.coordinates.pp, chunk)
    ends: dict[str, Any] = {
        "pre_process": groups.is_first_stage and chunk == 0,
        "post_process": groups.is_last_stage and chunk == layout.vpp - 1,
        "vp_stage": chunk if layout.vpp > 1 else None,
    }
    block = _block(arch, config, layers, implementation, in_8_bits)
    if value_head:
        return CriticModel(arch, config, block, groups.collection, **ends)
    return PolicyModel(arch, config, block, groups.collection, **ends, tied_embeddings=arch.tied_embeddings)


class StageLayers(PipelineParallelLayerLayout):
    """Layers of every stage in Megatron's form. Megatron's own class looks up the stage in its global groups."""

    def __init__(self, layout: ParallelLayout, num_layers: int, stage: int) -> None:
        split = [["decoder"] * len(layout.chunk_layers(num_layers, s, c)) for c in range(layout.vpp) for s in range(layout.pp)]
        split[0].insert(0, "embedding")
        split[-1].append("loss")
        super().__init__(split, layout.pp)
        self._parallel_layout, self._num_layers, self._stage = layout, num_layers, stage

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        stage = self._stage if pp_rank is None else pp_rank
        return self._parallel_layout.chunk_layers(self._num_layers, stage, vp_stage or 0).start


def transformer_config(
    arch: ModelArch, layout: ParallelLayout, stage: int, dtype: torch.dtype, recompute: Recompute, fusions: Mapping[str, Any]
) -> TransformerConfig:
    """Make Megatron's configuration of the architecture on this stage. fusions: from `fusion_config`."""
    recomputation: dict[str, Any] = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }[recompute]
    fused_gelu = arch.activation == "gelu_pytorch_tanh" and fusions.get("bias_activation_fusion", False)
    config = TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.as_held(layout.tp).num_kv_heads,
        kv_channels=arch.head_dim,  # not hidden_size / num_heads in every family
        ffn_hidden_size=arch.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        gated_linear_unit=True,
        # Fused, Megatron takes gelu for its approximation by tanh, which it computes in one kernel.
        activation_func=gelu if fused_gelu else _ACTIVATIONS[arch.activation],
        softmax_scale=arch.softmax_scale,
        attention_output_gate=arch.output_gate,
        layernorm_zero_centered_gamma=arch.centred_norms,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        hidden_dropout=0.0,  # the first update of a batch needs the log-probs of the rollout: a ratio of exactly 1
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        pipeline_model_parallel_layout=StageLayers(layout, arch.num_layers, stage) if layout.pp > 1 else None,
        # With two interleaved stages a pair of ranks exchanges messages of several chunks. Only their order tells them apart, and
        # only unbatched operations keep it.
        batch_p2p_comm=not (layout.vpp > 1 and layout.pp == 2),
        # True synchronises the whole device after every exchange, against a fault of old versions: see engine/megatron_schedule.py.
        batch_p2p_sync=False,
        # A stage's output is not read after it was sent: its data is freed, its node in the graph stays.
        deallocate_pipeline_outputs=layout.pp > 1,
        context_parallel_size=layout.cp,
        # Megatron's window does not count the token itself.
        window_size=None if arch.sliding_window is None else (arch.sliding_window - 1, 0),
        window_attn_skip_freq=[int(slides) for slides in arch.sliding_layers] or None,
        sequence_parallel=layout.sequence_parallel,
        variable_seq_lengths=True,  # micro-batches are cut by tokens and differ in size
        moe_token_dispatcher_type="alltoall",  # the default is refused with variable_seq_lengths even without experts
        **moe_config(arch, layout),
        calculate_per_token_loss=True,  # the engine has divided by the whole batch's denominator: Megatron must not divide again
        perform_initialization=False,  # weights are loaded
        **fusions,
        # These need CUDA extensions that may be absent, or a compiler at run time, for little gain.
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **recomputation,
    )
    # On attention's output and the router. Set late: Megatron's own experts have no biases under etp, and refuse them here.
    config.add_bias_linear = arch.output_bias
    return config


def _block(
    arch: ModelArch, config: TransformerConfig, layers: range, implementation: Implementation, in_8_bits: bool
) -> TransformerBlockSubmodules:
    """Make the layer specs of one chunk. layers: global numbers, from 0. in_8_bits: of local dense layers only."""
    norm: Any  # a class, as everywhere in Megatron, whose types here want a ModuleSpec
    bias_dropout_add: Any = get_bias_dropout_add  # a function, likewise
    if implementation == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear

        norm, column, row, attention = TENorm, TEColumnParallelLinear, TERowParallelLinear, rotary_te_attention()
    else:
        norm, attention = RMSNorm, PackedAttention
        column, row = ColumnParallelLinear, RowParallelLinear
        if in_8_bits:
            column, row = Int8ColumnParallelLinear, Int8RowParallelLinear
    if arch.keeps_scores:
        attention = SinkAttention  # no kernel of TransformerEngine's either keeps packed sequences, windows and sinks
    head_norm = norm if config.qk_layernorm else IdentityOp

    if arch.latent is not None:
        attends = ModuleSpec(
            module=LatentAttention,
            params={"latent": arch.latent, "scale": arch.softmax_scale},
            submodules=LatentSubmodules(column, row, norm),  # pyright: ignore[reportArgumentType]
        )
    else:
        attends = ModuleSpec(
            module=GatedAttention if arch.output_gate else SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=column, core_attention=attention, linear_proj=row, q_layernorm=head_norm, k_layernorm=head_norm
            ),
        )

    passes: Any = DeltaSubmodules(column, row)
    delta_net = ModuleSpec(module=DeltaNet, params={"delta": arch.delta}, submodules=passes)

    def layer(kind: Kind) -> ModuleSpec:
        if kind.sparse:
            mlp = moe_submodule(arch, implementation)
        else:
            mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
        return ModuleSpec(
            module=SparseLayer if kind.sparse else SandwichLayer if arch.sandwich else TransformerLayer,
            params={"norm": norm} if arch.sandwich else {},
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm,
                self_attention=delta_net if kind.delta else attends,
                self_attn_bda=bias_dropout_add,
                pre_mlp_layernorm=norm,
                mlp=mlp,
                mlp_bda=bias_dropout_add,
            ),
        )

    kinds = {kind: layer(kind) for kind in {arch.kind(number) for number in layers}}
    return TransformerBlockSubmodules(layer_specs=[kinds[arch.kind(number)] for number in layers], layer_norm=norm)


class RMSNorm(torch.nn.Module):
    """RMSNorm of the local spec: y = x / rms(x) * weight over the last dimension. weight: [hidden_size], `config.params_dtype`;
    a distance from 1 with `config.layernorm_zero_centered_gamma`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.eps, self.centred = eps, config.layernorm_zero_centered_gamma
        # finalize_model_grads sums the partial gradients of marked weights over the tp group; the torch.nn.RMSNorm that Megatron
        # wraps is not marked, so they would stay partial.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        normed = torch.nn.functional.rms_norm(x.float(), (x.size(-1),), eps=self.eps)
        # Rounded as in transformers and vLLM: weights around 0 scale in fp32, others what is rounded.
        if self.centred:
            return (normed * (1.0 + self.weight.float())).to(x.dtype)
        return normed.to(x.dtype) * self.weight


class SandwichLayer(TransformerLayer):
    """A layer that norms the outputs of attention and MLP before it adds them to the residual (Gemma 2 and 3)."""

    def __init__(self, config: TransformerConfig, *args: Any, norm: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        of_output = partial(norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.post_self_attn_layernorm, self.post_mlp_layernorm = of_output(), of_output()
        # Megatron asks for a function at each pass, and calls it without dropout.
        self.self_attn_bda = lambda *_: partial(_add_normed, self.post_self_attn_layernorm)
        self.mlp_bda = lambda *_: partial(_add_normed, self.post_mlp_layernorm)
        # Megatron's would record the norms in passes without gradients too, and the residual keep them of all layers.
        self.bias_dropout_add_exec_handler = nullcontext


def _add_normed(norm: torch.nn.Module, output: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
    assert dropout == 0.0 and output[1] is None
    return residual + norm(output[0])


def _mark_sharded(model: PackedModel) -> None:
    # The gradient norm needs these marks. Megatron-core before 0.19 sets them while it initialises weights, which we turn off.
    for module in model.modules():
        if hasattr(getattr(module, "weight", None), "tensor_model_parallel"):
            continue  # it may be marked once
        if isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding)) and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, True, 0, 1)
        elif isinstance(module, RowParallelLinear):
            set_tensor_model_parallel_attributes(module.weight, True, 1, 1)
