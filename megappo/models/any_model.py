"""Architecture of any causal language model of transformers, read from its config and from its class on the meta device.

For engine fsdp2, which runs transformers' own classes under the checkpoint's names. What packed sequences would change is refused
here; `hf_classes.check_packing` judges the rest at start-up. Imports transformers, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from megappo.models.arch import ModelArch, MoeArch, OwnParameter, Rope
from megappo.models.expert_slots import parameters_in_checkpoint
from megappo.models.row_shards import layer_prefix

# The longest sequence of a batch chooses the table of angles, so packed neighbours would change it.
_ROPES_OF_LENGTH = ("longrope", "dynamic")
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def with_own_parameters(arch: ModelArch, path: str | Path) -> ModelArch:
    """Return `arch`, of a family with experts, with the parameters (`own`) of transformers' class."""
    config = _config(path)
    return replace(arch, own=parameters_in_checkpoint(_on_meta(_causal_class(config), config)))


def describe_model(path: str | Path) -> ModelArch:
    """Read the architecture of a checkpoint directory that no family covers; config.json is enough.
    Shapes and names are exact; sizes of heads, MLP and experts are for estimates.
    ValueError, one line, if engine fsdp2 cannot run it."""
    config = _config(path)
    for problem in _problems(config):
        raise ValueError(f"{path}: {problem}")
    kind = _causal_class(config)
    model = _on_meta(kind, config)
    for problem in _class_problems(model):
        raise ValueError(f"{path}: {problem}")
    own = parameters_in_checkpoint(model)
    heads, layers = int(config.num_attention_heads), int(config.num_hidden_layers)
    return ModelArch(
        family=config.model_type,
        architecture=kind.__name__,
        num_layers=layers,
        hidden_size=int(config.hidden_size),
        num_heads=heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=_head_dim(config, heads),
        ffn_size=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        vocab_size=int(config.vocab_size),
        max_positions=int(config.max_position_embeddings),
        tied_embeddings=bool(config.tie_word_embeddings),
        norm_eps=float(getattr(config, "rms_norm_eps", None) or getattr(config, "layer_norm_eps", None) or 1e-5),
        rope=Rope(),
        moe=_experts(config, own, layers),
        own=own,
        keeps_scores=getattr(config, "attn_logit_softcapping", None) is not None or any("sinks" in one.name for one in own),
        **_windows(config, layers),
    )


def _config(path: str | Path) -> Any:
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: transformers cannot read config.json: {' '.join(str(error).split())[:200]}") from None


def _causal_class(config: Any) -> type[PreTrainedModel]:
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found[0] if isinstance(found, tuple) else found


def _on_meta(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model = kind._from_config(config, dtype=torch.float32)
    model.tie_weights()
    return model


def _problems(config: Any) -> Iterator[str]:
    """Yield the features of a config that packed sequences or log-probs cannot handle, one line each."""
    name = config.model_type
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "is_encoder_decoder", False):
        yield f"transformers has no causal language model of type {name}"
    for kind in sorted(_rope_types(config) & {*_ROPES_OF_LENGTH}):
        yield f"rope type {kind!r} depends on the longest sequence, so that packed neighbours would change it; no engine runs it"
    for kind in sorted({*(getattr(config, "layer_types", None) or ())} - _ATTENTION_LAYERS):
        yield f"{name} has layers of type {kind!r}, which see other sequences of a packed batch; no engine runs it"
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        yield f"final_logit_softcapping {cap} caps the logits of this {name} model, which log-probs leave out; no engine runs it"
    if getattr(config, "max_position_embeddings", None) is None:
        yield f"config.json of this {name} model has no max_position_embeddings, by which lengths are checked"


def _class_problems(model: PreTrainedModel) -> Iterator[str]:
    name = type(model).__name__
    if any(isinstance(part, torch.nn.Conv1d) for part in model.modules()):
        yield f"{name} has convolutions over tokens, which run across the sequences of a packed batch; no engine runs it"
    if not isinstance(getattr(model.base_model, "layers", None), torch.nn.ModuleList):
        yield f"{name} has no list of its layers under the name `layers`, by which engine fsdp2 shards it"
    output: Any = model.get_output_embeddings()
    if getattr(output, "weight", None) is None or getattr(output, "bias", None) is not None:
        yield f"{name} has an output projection with a bias, or none, and the log-probs take a matrix alone; no engine runs it"


def _rope_types(config: Any) -> set[str]:
    given = getattr(config, "rope_parameters", None) or {}
    of_layers = [value for value in given.values() if isinstance(value, Mapping)]
    return {str(one.get("rope_type")) for one in of_layers or [given]}


def _head_dim(config: Any, heads: int) -> int:
    if hasattr(config, "qk_nope_head_dim"):
        # Multi-head latent attention has more channels for keys than for values: FLOPs follow their mean.
        return (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) // 2
    return int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def _experts(config: Any, own: tuple[OwnParameter, ...], layers: int) -> MoeArch | None:
    # Only a parameter that holds all experts of a layer has three dimensions.
    held = {layer_prefix(parameter.name): parameter.shape[0] for parameter in own if len(parameter.shape) == 3}
    if not held:
        return None
    dense = tuple(layer for layer in range(layers) if not any(f"layers.{layer}." in prefix for prefix in held))
    top_k = int(getattr(config, "num_experts_per_tok", None) or 1)
    size = int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
    return MoeArch(max(held.values()), top_k, size, bool(getattr(config, "norm_topk_prob", True)), dense)


def _windows(config: Any, layers: int) -> dict[str, Any]:
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return {}
    slides = tuple(kind == "sliding_attention" for kind in kinds) if kinds else (True,) * layers
    return {"sliding_window": int(window), "sliding_layers": slides} if any(slides) else {}
