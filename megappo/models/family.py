"""A model family: the differences of its checkpoints from llama's, in one value.

One file of `families/` makes one `Family`, `families/registry.py` lists them. `hf_config.py` reads a config.json by it,
`weight_map.py` places its tensors, `verify` shrinks its models; none of these knows a family by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megappo.models.weight_rules import GateUp, RowParallel, Rule

HEADS = ("CausalLM", "SequenceClassification", "TokenClassification")
"""Endings of the transformers classes that a checkpoint may be of."""


@dataclass(frozen=True)
class Window:
    """Sliding attention as a config.json states it in `sliding_window`.

    default: tokens if the key is absent; None: no window. switched: the window holds only if use_sliding_window is true.
    first_layer: default of max_window_layers, the first layer with the window, unless `layer_types` names the layers; None: the
    family reads neither key and has the window in every layer.
    """

    default: int | None = None
    switched: bool = False
    first_layer: int | None = None

    @property
    def by_layer(self) -> bool:
        """True if config.json can give the window to some layers only."""
        return self.first_layer is not None


@dataclass(frozen=True)
class Experts:
    """Tensors of a sparse layer in place of those of the MLP.

    router: one row per expert. gate, up, down: Hugging Face's names, with {} for the number of the expert. dense: the family of the
    same model without experts, which a message recommends.
    """

    router: Rule
    gate: str
    up: str
    down: str
    dense: str

    def rules(self, expert: int) -> tuple[Rule, ...]:
        """Rules of one expert. expert: global number, from 0."""
        local = f"mlp.experts.local_experts.{expert}."
        return (
            GateUp(local + "linear_fc1.weight", self.gate.format(expert), self.up.format(expert), "expert"),
            RowParallel(local + "linear_fc2.weight", self.down.format(expert), "expert"),
        )


@dataclass(frozen=True)
class Composite:
    """A multimodal architecture that holds a text-only model in `text_config`; model_type: the family if that names none."""

    architecture: str
    model_type: str


@dataclass(frozen=True)
class Family:
    """Differences of the checkpoints of one Hugging Face architecture from llama's.

    name: its model_type, used in messages and `ModelArch.family`. stem: of the names of transformers' classes. rules: the tensors
    of a layer without experts, in the order in which they are written. keys: config.json's key of llama -> the other name that
    this family has for it; both are read. head_dim, num_kv_heads, norm_eps: defaults if config.json has no such key; None:
    hidden_size / num_heads, and as many KV heads as attention heads. window: None if its models have no sliding attention.
    scaled_queries: queries are scaled by position (`Rope.llama4_beta`). composite: the multimodal wrapper, if it has one.
    """

    name: str
    stem: str
    rules: tuple[Rule, ...]
    keys: Mapping[str, str] = field(default_factory=dict)
    head_dim: int | None = None
    num_kv_heads: int | None = None
    norm_eps: float = 1e-6
    window: Window | None = None
    scaled_queries: bool = False
    experts: Experts | None = None
    composite: Composite | None = None

    def architecture(self, head: str = "CausalLM") -> str:
        """Name of transformers' text-only class, for example Qwen2ForCausalLM."""
        return f"{self.stem}For{head}"

    def layer_rules(self, sparse: bool) -> tuple[Rule, ...]:
        """Rules of a layer; of a sparse one without those of its experts."""
        if not sparse:
            return self.rules
        assert self.experts is not None, f"{self.name} has no experts"
        return (*(rule for rule in self.rules if not rule.local.startswith("mlp.")), self.experts.router)

    @property
    def qkv_bias(self) -> bool:
        return self._has("self_attention.linear_qkv.bias")

    @property
    def qk_norm(self) -> bool:
        return self._has("self_attention.q_layernorm.weight")

    def _has(self, local: str) -> bool:
        return any(rule.local == local for rule in self.rules)
