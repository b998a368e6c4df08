"""Architecture of a model as frozen values, and checks of layouts against it. `hf_config.py` reads it from a config.json."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

from megappo.models.implementation import Implementation


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. Fields that `type` does not use are None."""

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
    llama4_beta: float | None = None  # ministral3 scales queries by position

    @property
    def llama_4_scaling(self) -> dict[str, Any] | None:
        """Value of the key `llama_4_scaling` for vLLM 0.32 and Mistral's own files; None without `llama4_beta`."""
        # transformers keeps the value in rope_parameters, where vLLM does not look for it.
        if self.llama4_beta is None:
            return None
        return {"original_max_position_embeddings": self.original_max_positions, "beta": self.llama4_beta}


def positions_of(stated: int, rope_type: str | None, factor: float | None) -> int:
    """Return the positions of a model, as vLLM reads them. stated: max_position_embeddings of its config.json, which a linear rope
    stretches by its factor; the configs of other types state what they are stretched to."""
    return int(stated * factor) if rope_type == "linear" and factor is not None else stated


@dataclass(frozen=True)
class MoeArch:
    """Mixture of experts in place of the MLP."""

    num_experts: int
    top_k: int
    ffn_size: int  # columns of one expert
    norm_topk_prob: bool  # the weights of the chosen experts add up to 1
    dense_layers: tuple[int, ...] = ()  # numbers of the layers with a plain MLP


class Part(NamedTuple):
    """A tensor of a checkpoint inside a parameter, whose rows it fills from `row` on; both are seen as matrices (`as_2d`)."""

    hf: str
    shape: tuple[int, ...]
    row: int


@dataclass(frozen=True)
class OwnParameter:
    """A parameter of transformers' own class and the tensors that cover it: one of the same name, or those of a layer's experts."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    of_head: bool = False  # of the output projection, which a value model does not have
    constant: bool = False  # a buffer that the checkpoint brings: whole on every rank, never changed
    linear: bool = False  # weight of a torch.nn.Linear, under the checkpoint's name


@dataclass(frozen=True)
class ModelArch:
    """One decoder-only transformer."""

    family: str
    """Name of its `Family`. Without one: transformers' model type, and the other fields are for estimates."""
    architecture: str
    """Hugging Face's name, of the whole checkpoint."""
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
    """Biases on q, k and v only."""
    qk_norm: bool = False
    """RMSNorm of each head of q and k."""
    sliding_window: int | None = None
    """Tokens that a token sees, itself included, in the layers that `sliding_layers` marks; None if every layer sees all."""
    sliding_layers: tuple[bool, ...] = ()
    """One entry per layer, true with the window; () if no layer has it."""
    moe: MoeArch | None = None
    own: tuple[OwnParameter, ...] = ()
    """Parameters of transformers' own class, where no family gives them (`any_model.py`): only fsdp2 runs such a model."""
    keeps_scores: bool = False
    """Attention has sinks or capped scores, which no fused kernel computes (`plain_attention.py`)."""
    head_rows: int = 1
    """Outputs of a value model's head; more than 1 are the bins of a categorical one."""

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
    """Round the vocabulary up so that every tp rank holds the same number of rows."""
    return -(-arch.vocab_size // tp) * tp


def vocab_shard(arch: ModelArch, tp: int, tp_rank: int) -> tuple[int, int]:
    """Return (global id of this tp rank's first vocabulary row, number of its rows that are real; the rest is padding)."""
    rows = padded_vocab(arch, tp) // tp
    start = tp_rank * rows
    return start, max(0, min(rows, arch.vocab_size - start))


def check_tp(arch: ModelArch, tp: int) -> None:
    """Raise ValueError if tp does not divide heads, KV heads or the MLP; it names the largest tp that does."""
    sizes = [("KV heads", arch.num_kv_heads), ("attention heads", arch.num_heads)]
    if arch.has_dense_mlp:
        sizes.append(("MLP columns", arch.ffn_size))
    largest = gcd(*(size for _, size in sizes))
    for what, size in sizes:
        if size % tp:
            fix = f"the largest tp that works is {largest}"
            raise ValueError(f"tp {tp} does not divide the {size} {what} of this {arch.family} model; {fix}")


def check_cp(arch: ModelArch, tp: int, cp: int, implementation: Implementation) -> None:
    """Raise ValueError if cp does not fit the heads of a tp rank; it names the sizes that do. Call `check_tp` first."""
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
