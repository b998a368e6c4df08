"""Limits of vLLM that `megappo plan` and the engine check before anything heavy. Needs neither vLLM nor a process group."""

from __future__ import annotations

from megappo.models.arch import ModelArch
from megappo.models.families.registry import FAMILIES

# vLLM 0.32, CPU attention backend (get_supported_head_sizes)
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

# the same, CPU_MLA
CPU_LATENT = (512, 64)

# the same, CPU delta nets (gdn_attention.py): channels of a head's keys and values, in bf16 alone
CPU_DELTA_DIM = 128

# the same, CPU experts (CPUUnquantizedExperts.output_alignment); it pads the columns of an expert by itself
CPU_EXPERT_ALIGNMENT = 32


def cut_sizes(arch: ModelArch) -> list[tuple[str, int]]:
    """Return (name, size) of everything that vLLM shards evenly over the ranks of a replica."""
    sizes = [("attention heads", arch.num_heads)]
    sizes += [("MLP columns", arch.ffn_size)] if arch.has_dense_mlp else []
    sizes += [("key heads of the delta nets", arch.delta.key_heads)] if arch.delta is not None else []
    return sizes + ([("columns of an expert", arch.moe.ffn_size)] if arch.moe is not None else [])


def kv_heads_fit(arch: ModelArch, tp: int) -> bool:
    """True if vLLM can shard the KV heads evenly, or replicate them if there are fewer than ranks."""
    return arch.num_kv_heads % tp == 0 or tp % arch.num_kv_heads == 0


def check_vllm(arch: ModelArch, max_model_len: int, device_type: str, in_fp32: bool = False) -> None:
    """Raise ValueError for a model or context length that vLLM would refuse later or run with wrong results; `check_layouts` is
    about rollout.tp. max_model_len: longest prompt plus response, in tokens. device_type: "cpu" or "cuda". in_fp32: the policy is
    not in bf16."""
    if device_type == "cpu" and (delta := arch.delta) is not None:
        if in_fp32:
            fix = "set policy.dtype: bf16, or rollout.engine: megatron"
            raise ValueError(f"rollout.engine: vLLM on a CPU has delta nets in bf16 alone, and policy.dtype is fp32; {fix}")
        if {delta.key_dim, delta.value_dim} != {CPU_DELTA_DIM}:
            raise ValueError(
                f"rollout.engine: vLLM on a CPU has delta nets with heads of {CPU_DELTA_DIM} channels alone, and the model's "
                f"keys and values have {delta.key_dim} and {delta.value_dim}; set rollout.engine: megatron"
            )
    if device_type == "cpu" and arch.latent is not None and arch.latent[1:4:2] != CPU_LATENT:
        raise ValueError(
            f"rollout.engine: vLLM on a CPU has latent attention for (kv_lora_rank, qk_rope_head_dim) {CPU_LATENT} alone, and the "
            f"model's are {arch.latent[1:4:2]}; set rollout.engine: megatron"
        )
    if device_type == "cpu" and arch.latent is None and arch.head_dim not in CPU_HEAD_DIMS:
        raise ValueError(
            f"rollout.engine: vLLM on a CPU has no attention for head_dim {arch.head_dim} (it has "
            f"{', '.join(map(str, CPU_HEAD_DIMS))}); set rollout.engine: megatron"
        )
    if device_type == "cpu" and arch.moe is not None and arch.hidden_size % CPU_EXPERT_ALIGNMENT:
        raise ValueError(
            f"rollout.engine: vLLM on a CPU multiplies experts in blocks of {CPU_EXPERT_ALIGNMENT} and the model's "
            f"hidden_size is {arch.hidden_size}; set rollout.engine: megatron"
        )
    # Architectures without a family have such layers in vLLM too.
    family = FAMILIES.get(arch.family)
    by_layer = family is None or (family.window is not None and family.window.sampler_by_layer)
    if not by_layer and any(arch.sliding_layers) and not all(arch.sliding_layers):
        raise ValueError(
            f"rollout.engine: vLLM has no sliding attention in some layers only of a {arch.family} model; set "
            "rollout.engine: megatron"
        )
    positions = _positions(arch)
    if max_model_len > positions:
        raise ValueError(
            f"prompt plus response may take {max_model_len} tokens, but the model has {positions} positions; lower "
            "data.max_prompt_tokens or rollout.max_response_tokens"
        )


def _positions(arch: ModelArch) -> int:
    rope = arch.rope
    # vLLM tabulates YaRN up to factor x original length and reads past the end of the table beyond.
    if rope.type == "yarn" and rope.factor is not None and rope.original_max_positions is not None:
        return min(arch.max_positions, int(rope.original_max_positions * rope.factor))
    return arch.max_positions
