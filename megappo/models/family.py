"""A model family: the differences of its checkpoints from llama's, in one value.

Each file of `families/` makes one; `families/registry.py` lists them. Readers of families know none of them by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megappo.models.weight_rules import GateUp, RowParallel, Rule

HEADS = ("CausalLM", "SequenceClassification", "TokenClassification")
"""Endings of the transformers classes that a checkpoint may be of."""


@dataclass(frozen=True)
class Window:
    """Sliding attention as a config.json states it in `sliding_window`."""

    default: int | None = None
    """Tokens if the key is absent; None: no window."""
    switched: bool = False
    """The window holds only if use_sliding_window is true."""
    first_layer: int | None = None
    """Default of max_window_layers, the first layer with the window, unless `layer_types` names the layers.
    None: the family reads neither key and has the window in every layer."""

    @property
    def by_layer(self) -> bool:
        """True if config.json can give the window to some layers only."""
        return self.first_layer is not None


@dataclass(frozen=True)
class Experts:
    """Tensors of a sparse layer in place of the MLP's. gate, up, down: Hugging Face names, with {} for the number of the expert."""

    router: Rule
    gate: str
    up: str
    down: str
    dense: str
    """Family of the same model without experts, which a message recommends."""

    def rules(self, expert: int) -> tuple[Rule, ...]:
        """Rules of one expert. expert: global number, from 0."""
        local = f"mlp.experts.local_experts.{expert}."
        return (
            GateUp(local + "linear_fc1.weight", self.gate.format(expert), self.up.format(expert), "expert"),
            RowParallel(local + "linear_fc2.weight", self.down.format(expert), "expert"),
        )


@dataclass(frozen=True)
class Composite:
    """A multimodal architecture that holds a text-only model in `text_config`."""

    architecture: str
    model_type: str  # the family if text_config names none


@dataclass(frozen=True)
class Family:
    """How the checkpoints of one Hugging Face architecture differ from llama's."""

    name: str
    """model_type of its config.json, used in messages and `ModelArch.family`."""
    stem: str  # beginning of the names of transformers' classes
    rules: tuple[Rule, ...]
    """Tensors of a layer without experts, in the order in which they are written."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """llama's key of config.json -> this family's other name for it; both are read."""
    # Defaults for keys that config.json lacks.
    head_dim: int | None = None  # None: hidden_size / num_heads
    num_kv_heads: int | None = None  # None: as many as attention heads
    norm_eps: float = 1e-6
    window: Window | None = None  # None: no sliding attention
    scaled_queries: bool = False  # by position (`Rope.llama4_beta`)
    experts: Experts | None = None
    composite: Composite | None = None

    def architecture(self, head: str = "CausalLM") -> str:
        """Name of transformers' text-only class, for example Qwen2ForCausalLM."""
        return f"{self.stem}For{head}"

    def layer_rules(self, sparse: bool) -> tuple[Rule, ...]:
        if not sparse:
            return self.rules
        # The rules of the experts are `Experts.rules`.
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
