"""Builds a policy or critic for one rank: TransformerConfig, layer spec, model. Weights come from `hf_import.py`.

With TransformerEngine and CUDA the layers are TransformerEngine's, otherwise Megatron-core's own with our norm and attention.
Both have the same parameter names and shapes, so checkpoints are interchangeable.
"""

from __future__ import annotations

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
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megappo.models.arch import ModelArch, check_tp
from megappo.models.attention import PackedAttention, rotary_te_attention
from megappo.models.gpt import CriticModel, PackedModel, PolicyModel
from megappo.models.implementation import Implementation
from megappo.models.norm import RMSNorm
from megappo.parallel.groups import ProcessGroups
from megappo.parallel.layout import ParallelLayout, stage_layers

Recompute = Literal["none", "selective", "full"]


def build_model(
    arch: ModelArch,
    groups: ProcessGroups,
    *,
    dtype: torch.dtype,
    recompute: Recompute = "none",
    value_head: bool = False,
    implementation: Implementation = "local",
) -> PackedModel:
    """This rank's part of a policy, or of a critic with `value_head`. Parameters are uninitialised except norms and value head.

    Collective over the role's ranks. ValueError where the layout does not fit the architecture.
    """
    layout, at = groups.layout, groups.coordinates
    check_tp(arch, layout.tp)
    num_layers = len(stage_layers(arch.num_layers, layout.pp, at.pp))
    if not get_cuda_rng_tracker().is_initialized():
        # Megatron forks this state under sequence parallel. Nothing here is random: dropout is 0 and weights are read.
        model_parallel_cuda_manual_seed(0, tp_rank=at.tp, ep_rank=0, etp_rank=0)
    config = transformer_config(arch, layout, dtype, recompute)
    layers = _block(config, num_layers, implementation)
    ends = {"pre_process": groups.is_first_stage, "post_process": groups.is_last_stage}
    if value_head:
        model: PackedModel = CriticModel(arch, config, layers, groups.collection, **ends)
    else:
        model = PolicyModel(arch, config, layers, groups.collection, **ends, tied_embeddings=arch.tied_embeddings)
    _mark_sharded(model)
    return model


def transformer_config(arch: ModelArch, layout: ParallelLayout, dtype: torch.dtype, recompute: Recompute) -> TransformerConfig:
    """Megatron's configuration of the architecture in this layout."""
    recomputation: dict[str, Any] = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }[recompute]
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        sequence_parallel=layout.sequence_parallel,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # no experts here, but the default is refused with variable_seq_lengths
        calculate_per_token_loss=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        # These need CUDA extensions that may be absent.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **recomputation,
    )


def _block(config: TransformerConfig, num_layers: int, implementation: Implementation) -> TransformerBlockSubmodules:
    if implementation == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear

        norm, column, row, attention = TENorm, TEColumnParallelLinear, TERowParallelLinear, rotary_te_attention()
    else:
        norm, column, row, attention = RMSNorm, ColumnParallelLinear, RowParallelLinear, PackedAttention
    head_norm = norm if config.qk_layernorm else IdentityOp
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=column, core_attention=attention, linear_proj=row, q_layernorm=head_norm, k_layernorm=head_norm
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)


def _mark_sharded(model: PackedModel) -> None:
    """Mark weights that are cut over tp. Megatron does so while it initialises; the gradient norm relies on it."""
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding)) and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, True, 0, 1)
        elif isinstance(module, RowParallelLinear):
            set_tensor_model_parallel_attributes(module.weight, True, 1, 1)
