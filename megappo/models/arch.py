"""Architecture of a model as frozen values, and checks of layouts against it. `hf_config.py` reads it from a config.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
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
    channels: int | None = None  # of a head that are rotated; None: all

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


class Clamp(NamedTuple):
    """SwiGLU of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up between -limit and limit."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class MoeArch:
    """Mixture of experts in place of the MLP."""

    num_experts: int
    top_k: int
    ffn_size: int  # columns of one expert
    norm_topk_prob: bool  # the weights of the chosen experts add up to 1
    dense_layers: tuple[int, ...] = ()  # numbers of the layers with a plain MLP
    # DeepSeek-V3's router (arXiv:2412.19437, section 2.1.2).
    sigmoid: bool = False  # scores are sigmoids; a constant of each expert, the correction, is added for the choice alone
    groups: int = 1  # of consecutive experts: the chosen ones are of the `top_groups` groups whose two best scores add up to most
    top_groups: int = 1
    scaling: float = 1.0  # of the weights of the chosen experts
    shared_size: int = 0  # columns of the MLP that every token passes beside its experts
    shared_gate: bool = False  # its output is multiplied by the sigmoid of a score of the token
    clamp: Clamp | None = None  # of experts whose checkpoint has [experts, in, out] matrices and biases, as the router has

    @property
    def stacked(self) -> bool:
        """True if one tensor of the checkpoint, [experts, in, out], holds a matrix of all experts of a layer."""
        return self.clamp is not None


LATENT_EPS = 1e-6
"""Of the norms of compressed queries, keys and values, in transformers whatever rms_norm_eps is."""


class Latent(NamedTuple):
    """Multi-head latent attention (arXiv:2405.04434): ranks of the compressed queries (None: not compressed) and of keys with
    values; channels of a head's query and key without position and with it (one such key for all heads), and of its value."""

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class VisionArch:
    """The tower of a vision-language model, and how its features enter the language model (`vision_families.py` reads it)."""

    config: str
    """`vision_config` with its model_type, as JSON: transformers builds the tower of it."""
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Name (`visual.` before transformers' own) and shape of every tensor of the tower."""
    image_token: int
    """Id that marks a feature in the text of a checkpoint's processor."""
    patch: int
    """Side of a patch in pixels."""
    merge: int
    """A feature is made of merge x merge patches."""
    frames: int
    """Frames of a patch; an image has so many equal ones."""
    sections: tuple[int, ...]
    """Channel pairs of a head that are rotated by time, height and width; empty: a feature has the position of its token."""
    interleaved: bool
    """The three take turns over the channels, instead of one after the other."""
    deepstack: int
    """Layers, from the first, whose outputs get further features added."""
    tile: int = 0
    """Side in pixels of the squares that the tower gets, a number of them for an image; 0: an image is one grid of any size."""


class Delta(NamedTuple):
    """Gated delta net (arXiv:2412.06464): heads of keys, each of which a block of value heads shares, and of values; channels of
    either; tokens that the convolution before it sees. layers: true where it takes the place of attention. by_key_head: rows of the
    projections in the checkpoint are those of one key head after the other, not of queries, keys, values after each other."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    layers: tuple[bool, ...]
    by_key_head: bool

    @property
    def keys(self) -> int:
        """Channels of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


class Kind(NamedTuple):
    """Layers of one kind have the same tensors."""

    sparse: bool
    """With experts."""
    delta: bool
    """With a gated delta net in place of attention."""


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
    output_bias: bool = False
    """A bias on attention's output projection."""
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
    """Attention has sinks or capped scores, which no fused kernel has (`attention.plain_attention`); that of a family has sinks."""
    softmax_scale: float | None = None
    """Factor of the scores of attention; None: 1 / sqrt(head_dim)."""
    sliding_rope: Rope | None = None
    """Of the layers with the window; None: `rope`, as the others."""
    activation: str = "silu"
    """Of the MLP's gate, as transformers calls it."""
    embedding_scale: float = 1.0
    centred_norms: bool = False
    """Weights of norms are distances from 1."""
    sandwich: bool = False
    """Norms behind attention and MLP too, before they are added to the residual."""
    latent: Latent | None = None
    """Latent attention; then `head_dim` is that of a value and every head has keys of its own."""
    delta: Delta | None = None
    """Gated delta nets in place of attention in some layers; the other fields are of the layers with attention."""
    output_gate: bool = False
    """Each head's output is multiplied by the sigmoid of a gate, whose rows of q_proj follow those of the head's query."""
    head_rows: int = 1
    """Outputs of a value model's head; more than 1 are the bins of a categorical one."""
    vision: VisionArch | None = None
    """None: the model reads text alone."""
    scores_texts: bool = False
    """The head scores whole texts, at their last tokens: exports are sequence classifiers, not token classifiers."""

    def kind(self, layer: int) -> Kind:
        """Return the kind of a layer. layer: from 0, in the whole model."""
        sparse = self.moe is not None and layer not in self.moe.dense_layers
        return Kind(sparse, self.delta is not None and self.delta.layers[layer])

    def count_kinds(self, layers: Collection[int]) -> dict[Kind, int]:
        """Count the layers of each kind among these."""
        if self.delta is not None:
            return Counter(map(self.kind, layers))
        num_sparse = 0 if self.moe is None else len(layers) - sum(layer in layers for layer in self.moe.dense_layers)
        counts = {Kind(True, False): num_sparse, Kind(False, False): len(layers) - num_sparse}
        return {kind: count for kind, count in counts.items() if count}

    @property
    def has_dense_mlp(self) -> bool:
        return self.moe is None or bool(self.moe.dense_layers)

    @property
    def key_dim(self) -> int:
        """Channels of a head's query and key."""
        return self.head_dim if self.latent is None else self.latent.nope + self.latent.rope

    @property
    def query_rows(self) -> int:
        """Rows of a head in q_proj."""
        return 2 * self.head_dim if self.output_gate else self.head_dim

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def kv_copies(self, tp: int) -> int:
        """Number of tp ranks, one behind the other, that hold a copy of the same KV head."""
        return max(1, tp // self.num_kv_heads)

    def as_held(self, tp: int) -> ModelArch:
        """The architecture that tp ranks compute together: with copies every rank has a KV head of its own."""
        return self if tp <= self.num_kv_heads else replace(self, num_kv_heads=tp)


def padded_vocab(arch: ModelArch, tp: int) -> int:
    """Round the vocabulary up so that every tp rank holds the same number of rows."""
    return -(-arch.vocab_size // tp) * tp


def vocab_shard(arch: ModelArch, tp: int, tp_rank: int) -> tuple[int, int]:
    """Return (global id of this tp rank's first vocabulary row, number of its rows that are real; the rest is padding)."""
    rows = padded_vocab(arch, tp) // tp
    start = tp_rank * rows
    return start, max(0, min(rows, arch.vocab_size - start))


def check_tp(arch: ModelArch, tp: int) -> None:
    """Raise ValueError if tp does not divide heads or the MLP, or neither it nor the KV heads divide the other.
    It names the largest tp that works."""
    sizes = [("attention heads", arch.num_heads)]
    if arch.has_dense_mlp:
        sizes.append(("MLP columns", arch.ffn_size))
    if arch.moe is not None and arch.moe.shared_size:
        sizes.append(("columns of the shared experts", arch.moe.shared_size))
    if arch.delta is not None:
        sizes.append(("key heads of the delta nets", arch.delta.key_heads))
    common, kv_heads = gcd(*(size for _, size in sizes)), arch.num_kv_heads

    def fits(size: int) -> bool:
        return kv_heads % size == 0 or size % kv_heads == 0

    if common % tp == 0 and fits(tp):
        return
    largest = next(size for size in range(common, 0, -1) if common % size == 0 and fits(size))
    fix = f"of this {arch.family} model; the largest tp that works is {largest}"
    for what, size in sizes:
        if size % tp:
            raise ValueError(f"tp {tp} does not divide the {size} {what} {fix}")
    raise ValueError(f"tp {tp} neither divides the {kv_heads} KV heads nor is a multiple of them {fix}")


def check_cp(arch: ModelArch, tp: int, cp: int, implementation: Implementation) -> None:
    """Raise ValueError if cp does not fit the heads of a tp rank; it names the sizes that do. Call `check_tp` first."""
    # The limit is of layers that exchange tokens for heads: delta nets, our attention, and TransformerEngine's with a window.
    ring = implementation == "transformer_engine" and arch.sliding_window is None and arch.latent is None
    heads, kv_heads = arch.num_heads // tp, arch.as_held(tp).num_kv_heads // tp
    key_heads = 0 if arch.delta is None else arch.delta.key_heads // tp

    def fits(size: int) -> bool:
        return key_heads % size == 0 and (ring or (heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)))

    if not fits(cp):
        has = f"a tp rank has {heads} attention heads and {kv_heads} KV heads (tp {tp})"
        has += f", and its delta nets {key_heads} key heads" if key_heads else ""
        sizes = ", ".join(str(size) for size in range(1, max(heads, key_heads) + 1) if fits(size))
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
    if arch.moe.clamp is not None and arch.hidden_size % etp:
        what = f"the {arch.hidden_size} hidden channels of this {arch.family} model, as which biases of its experts are cut"
        raise ValueError(f"etp {etp} does not divide {what}; use a divisor of {gcd(arch.moe.ffn_size, arch.hidden_size)}")
    if arch.moe.ffn_size % etp:
        columns = f"the {arch.moe.ffn_size} columns of an expert of this {arch.family} model"
        raise ValueError(f"etp {etp} does not divide {columns}; use a divisor of {arch.moe.ffn_size}")
