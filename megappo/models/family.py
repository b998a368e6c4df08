"""A model family: the differences of its checkpoints from llama's, in one value.

Each file of `families/` makes one; `families/registry.py` lists them. Readers of families know none of them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megappo.models.arch import Kind, ModelArch, MoeArch
from megappo.models.weight_rules import Matrix, OfStack, Rule, gate_up, row_parallel

HEADS = ("CausalLM", "SequenceClassification", "TokenClassification")
"""Endings of the transformers classes that a checkpoint may be of."""


class NotImplementedByFamilies(ValueError):
    """A valid config whose architecture or feature megappo's own layers do not have."""


class RunsNowhere(ValueError):
    """A model that engine fsdp2 does not run either."""


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
    pattern: int | None = None
    """Default of sliding_window_pattern, unless `layer_types` names the layers: the last of every so many has no window."""
    sampler_by_layer: bool = False
    """vLLM too has the window in the named layers only; of other families it reads one window for all."""

    @property
    def by_layer(self) -> bool:
        """True if config.json can give the window to some layers only."""
        return self.first_layer is not None or self.pattern is not None


@dataclass(frozen=True)
class Experts:
    """Tensors of a sparse layer in place of the MLP's. gate, up, down: Hugging Face names, with {} for the number of the expert."""

    router: Rule
    gate: str = "mlp.experts.{}.gate_proj.weight"
    up: str = "mlp.experts.{}.up_proj.weight"
    down: str = "mlp.experts.{}.down_proj.weight"
    beside: tuple[Rule, ...] = ()  # of the layer: shared experts, corrections

    def rules(self, expert: int) -> tuple[Rule, ...]:
        """Rules of one expert. expert: global number, from 0."""
        local = f"mlp.experts.local_experts.{expert}."
        return (
            gate_up(local + "linear_fc1.weight", self.gate.format(expert), self.up.format(expert), "expert"),
            row_parallel(local + "linear_fc2.weight", self.down.format(expert), "expert"),
        )

    def linears(self, expert: int) -> tuple[Rule, ...]:
        """Rules of one expert's matrices as weights [out, in] of linear layers under names of their own, which adapters have."""
        return self.rules(expert)


@dataclass(frozen=True)
class StackedExperts(Experts):
    """Experts with biases whose checkpoint has one tensor of each kind for all of a layer, [experts, in, out]. gate is not used,
    the tensor of `up` has columns of gate and up in turn, as this rank's parameter has."""

    up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"

    def rules(self, expert: int) -> tuple[Rule, ...]:
        local = f"mlp.experts.local_experts.{expert}."
        return (
            OfStack(local + "linear_fc1.weight", self.up, expert, "hidden", "gate and up", 1),
            OfStack(local + "linear_fc1.bias", self.up + "_bias", expert, None, "gate and up", 1),
            OfStack(local + "linear_fc2.weight", self.down, expert, "expert", "hidden", 0),
            # The ranks' products are added up: each brings its channels of the bias.
            OfStack(local + "linear_fc2.bias", self.down + "_bias", expert, None, "hidden", 1),
        )

    def linears(self, expert: int) -> tuple[Rule, ...]:
        local, prefix = f"mlp.experts.local_experts.{expert}.", f"mlp.experts.{expert}."
        return (
            Matrix(local + "linear_fc1.weight", prefix + "gate_up_proj.weight", "gate and up", "hidden", 0),
            Matrix(local + "linear_fc2.weight", prefix + "down_proj.weight", "hidden", "expert", 1),
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
    activation: str = "silu"  # of the MLP's gate
    local_theta: float | None = None
    """Base of the rotary embedding of layers with a window, if `rope_local_base_freq` is absent. None: one embedding for all."""
    classifier_stem: str | None = None  # of the classes of its classifiers; None: `stem`
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of further keys."""
    partial_rotary: float | None = None
    """Share of a head's channels that are rotated, if `partial_rotary_factor` is absent. None: every family else rotates all."""
    further_layers: str | None = None
    """Prefix of the layers that predict further tokens. None: they follow the last, as many as num_nextn_predict_layers says."""
    delta: tuple[Rule, ...] = ()
    """Tensors of a layer's gated delta net, in place of those of attention."""
    details: Callable[[Values, ModelArch], ModelArch] = lambda values, arch: arch
    """Add what the keys of this family alone say to what llama's say. ValueError, one line, for a value that is not supported."""

    def architecture(self, head: str = "CausalLM") -> str:
        """Name of transformers' text-only class, for example Qwen2ForCausalLM."""
        return f"{self.stem if head == HEADS[0] else self.classifier_stem or self.stem}For{head}"

    def layer_rules(self, kind: Kind) -> tuple[Rule, ...]:
        rules = self.rules
        if kind.delta:
            rules = (*(rule for rule in rules if not rule.local.startswith("self_attention.")), *self.delta)
        if not kind.sparse:
            return rules
        # The rules of the experts are `Experts.rules`.
        assert self.experts is not None, f"{self.name} has no experts"
        return (*(rule for rule in rules if not rule.local.startswith("mlp.")), self.experts.router, *self.experts.beside)

    @property
    def qkv_bias(self) -> bool:
        return self._has("self_attention.linear_qkv.bias")

    @property
    def qk_norm(self) -> bool:
        return self._has("self_attention.q_layernorm.weight")

    def _has(self, local: str) -> bool:
        return any(rule.local == local for rule in self.rules)


def usual_keys(text: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return a text-only config under llama's keys."""
    renamed = {other: key for key, other in family.keys.items()}
    others = {renamed[key]: value for key, value in text.items() if key in renamed}
    # If a file has a value under both names, llama's counts.
    return others | {key: value for key, value in text.items() if key not in renamed}


class Values:
    """Values of a text-only config by llama's keys; messages name the file's own key."""

    def __init__(self, text: Mapping[str, Any], family: Family) -> None:
        self.family = family
        self._text, self._values = text, {**family.defaults, **usual_keys(text, family)}

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def spelled(self, key: str) -> str:
        """Return the key as this file spells it, or as its family would."""
        return key if key in self._text else self.family.keys.get(key, key)

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.spelled(key)} = {value!r}: a number is needed")
        return float(value)

    def positive(self, key: str) -> int:
        return self._checked(key, self.get(key))

    def positive_or(self, key: str, family_default: int | None, otherwise: int) -> int:
        """Return the value; the family's default if the key is absent; `otherwise` without a default, or if it is null."""
        value = self.get(key, family_default)
        return otherwise if value is None else self._checked(key, value)

    def _checked(self, key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"config.json: {self.spelled(key)} = {value!r}; a positive integer is needed")
        return value


def read_moe(values: Values, size: str = "moe_intermediate_size", **fields: Any) -> MoeArch:
    """Read the keys of experts that families share. size: that of an expert's columns. fields: others of `MoeArch`."""
    # router_aux_loss_coef is not read: the run sets the weight.
    num_experts, top_k = values.positive("num_experts"), values.positive("num_experts_per_tok")
    norm_topk_prob = bool(fields.pop("norm_topk_prob", values.get("norm_topk_prob", False)))
    if top_k > num_experts:
        raise ValueError(f"num_experts_per_tok {top_k} is more than the {num_experts} experts")
    if top_k == 1 and norm_topk_prob:
        raise ValueError("norm_topk_prob with num_experts_per_tok 1 gives every expert the weight 1 and the router no gradient")
    return MoeArch(num_experts, top_k, values.positive(size), norm_topk_prob, **fields)
