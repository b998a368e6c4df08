"""Architecture of a model as frozen values (shapes and arithmetic), and checks of layouts against it.

`hf_config.py` reads it from a config.json; `weight_map.py` lists the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

from megappo.models.implementation import Implementation


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. Fields that `type` does not use are None; `llama4_beta` scales queries by position (ministral3)."""

    type: str = "default"
    theta: float = 10000.0
    factor: float | None = None
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0  # yarn: a dimension that turns more often over the original length is kept
    beta_slow: float = 1.0  # one that turns less often is stretched, those between are mixed
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    llama4_beta: float | None = None

    @property
    def llama_4_scaling(self) -> dict[str, Any] | None:
        """Value of `llama_4_scaling`, the key in which Mistral's own files and vLLM 0.32 keep `llama4_beta`; None without it.

        transformers keeps it in rope_parameters, where vLLM does not look for it.
        """
        if self.llama4_beta is None:
            return None
        return {"original_max_position_embeddings": self.original_max_positions, "beta": self.llama4_beta}


@dataclass(frozen=True)
class MoeArch:
    """Mixture of experts in place of the MLP. ffn_size: columns of one expert. norm_topk_prob: the weights of the chosen
    experts add up to 1. dense_layers: numbers of the layers that have a plain MLP.
    """

    num_experts: int
    top_k: int
    ffn_size: int
    norm_topk_prob: bool
    dense_layers: tuple[int, ...] = ()


class Part(NamedTuple):
    """A tensor of a checkpoint inside a parameter: as many rows as it has, from `row` on, both seen as matrices (`as_2d`)."""

    hf: str
    shape: tuple[int, ...]
    row: int


@dataclass(frozen=True)
class OwnParameter:
    """A parameter of transformers' own class, and the tensors of its checkpoint in it, which cover it: one of the same name, or
    those of all experts of a layer.

    of_head: belongs to the output projection, so that a value model has none. constant: a buffer that the checkpoint brings; every
    rank has it whole, and nothing changes it. linear: the weight of a torch.nn.Linear, under the checkpoint's name.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    of_head: bool = False
    constant: bool = False
    linear: bool = False


@dataclass(frozen=True)
class ModelArch:
    """One decoder-only transformer. family: name of its `Family`. architecture: Hugging Face's, of the whole checkpoint.

    qkv_bias: biases on q, k and v only. qk_norm: RMSNorm of each head of q and k.

    sliding_window: tokens that a token sees, itself included, in the layers whose `sliding_layers` is true (one entry per layer).
    None and () if every layer sees the whole sequence.

    own: parameters of transformers' own class, where the family does not say them (`any_model.py`): engine fsdp2 alone runs the
    model then. Without a family, `family` is transformers' model type, and the other fields are for estimates. keeps_scores: its
    attention has sinks or capped scores, which no fused kernel computes (`plain_attention.py`).

    head_rows: outputs of the head of a value model, more than 1 if they are the bins of a categorical one.
    """

    family: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool
    norm_eps: float
    rope: Rope
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    moe: MoeArch | None = None
    own: tuple[OwnParameter, ...] = ()
    keeps_scores: bool = False
    head_rows: int = 1

    def is_sparse(self, layer: int) -> bool:
        """True if this layer has experts. layer: from 0, in the whole model."""
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def has_dense_mlp(self) -> bool:
        return self.moe is None or bool(self.moe.dense_layers)

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


def padded_vocab(arch: ModelArch, tp: int) -> int:
    """Vocabulary rounded up so that every tp rank holds the same number of rows."""
    return -(-arch.vocab_size // tp) * tp


def vocab_shard(arch: ModelArch, tp: int, tp_rank: int) -> tuple[int, int]:
    """(global id of this tp rank's first vocabulary row, number of its rows that are real vocabulary; the rest is padding)."""
    rows = padded_vocab(arch, tp) // tp
    start = tp_rank * rows
    return start, max(0, min(rows, arch.vocab_size - start))


def check_tp(arch: ModelArch, tp: int) -> None:
    """Raise ValueError if tp does not divide heads, KV heads or the MLP, naming the largest tp that does."""
    sizes = [("KV heads", arch.num_kv_heads), ("attention heads", arch.num_heads)]
    if arch.has_dense_mlp:
        sizes.append(("MLP columns", arch.ffn_size))
    largest = gcd(*(size for _, size in sizes))
    for what, size in sizes:
        if size % tp:
            fix = f"the largest tp that works is {largest}"
            raise ValueError(f"tp {tp} does not divide the {size} {what} of this {arch.family} model; {fix}")


def check_cp(arch: ModelArch, tp: int, cp: int, implementation: Implementation) -> None:
    """Raise ValueError if cp does not fit the heads of a tp rank, naming the sizes that do. `check_tp` comes first."""
    # The limit is of attention that exchanges tokens for heads: ours, and TransformerEngine's layers with a sliding window.
    if implementation == "transformer_engine" and arch.sliding_window is None:
        return
    heads, kv_heads = arch.num_heads // tp, arch.num_kv_heads // tp

    def fits(size: int) -> bool:
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    if not fits(cp):
        has = f"a tp rank has {heads} attention heads and {kv_heads} KV heads (tp {tp})"
        sizes = ", ".join(str(size) for size in range(1, heads + 1) if fits(size))
        raise ValueError(f"cp {cp} does not divide the heads: {has}; the sizes that work are {sizes}")


def check_ep(arch: ModelArch, ep: int, etp: int) -> None:
    """Raise ValueError if the experts cannot be distributed over ep ranks, or one expert cut over etp ranks."""
    if arch.moe is None:
        for axis, size in (("ep", ep), ("etp", etp)):
            if size > 1:
                raise ValueError(f"{axis} {size} needs experts and this {arch.family} model has none; set {axis} to 1")
        return
    if arch.moe.num_experts % ep:
        fix = f"use a divisor of {arch.moe.num_experts}"
        raise ValueError(f"ep {ep} does not divide the {arch.moe.num_experts} experts of this {arch.family} model; {fix}")
    if arch.moe.ffn_size % etp:
        columns = f"the {arch.moe.ffn_size} columns of an expert of this {arch.family} model"
        raise ValueError(f"etp {etp} does not divide {columns}; use a divisor of {arch.moe.ffn_size}")
