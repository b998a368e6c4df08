"""Architecture of any causal language model of transformers, read from its config and from its class on the meta device: for
engine fsdp2, which runs transformers' own classes under the checkpoint's names. transformers keeps all experts of a layer in one
parameter and a checkpoint has a tensor per expert; the conversion of a save, run on tensors without memory, returns views, whose
offsets are their places. What packed sequences would change is refused here; `hf_classes.check_packing` judges the rest at
start-up. Imports transformers, which takes seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from megappo.models.arch import ModelArch, MoeArch, OwnParameter, Part, Rope, positions_of
from megappo.models.family import RunsNowhere
from megappo.models.pieces import Box, check_tiling, shape_as_2d
from megappo.models.row_shards import layer_prefix


class _WithoutCopies(TorchDispatchMode):
    """Return a tensor itself instead of a contiguous copy, so that views stay views."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))


def parameters_in_checkpoint(model: PreTrainedModel) -> tuple[OwnParameter, ...]:
    """List the parameters of a model on the meta device and the buffers that its checkpoint brings. Tied ones appear once.
    ValueError if a tensor of the checkpoint is not a block of rows of one parameter."""
    head = _names_of_head(model)
    held = dict(model.named_parameters())
    constants = constants_of(model)
    # Each has a storage of its own, which tells whose view a tensor is.
    tensors = {name: torch.empty(tensor.shape, device="meta") for name, tensor in (held | constants).items()}
    parts: dict[str, list[Part]] = defaultdict(list)
    with _WithoutCopies():
        saved = revert_weight_conversion(model, dict(tensors))
    owners = {_storage(tensor): name for name, tensor in tensors.items()}
    for hf, view in saved.items():
        name = owners.get(_storage(view))
        row = None if name is None else _row(view, tensors[name])
        if name is None or row is None:
            raise ValueError(f"transformers computes the tensor {hf} of {type(model).__name__}; no rows of a parameter hold it")
        parts[name].append(Part(hf, tuple(view.shape), row))
    found = []
    for name, tensor in tensors.items():
        rows, cols = shape_as_2d(tensor.shape)
        inside = sorted(parts[name], key=lambda part: part.row)
        boxes = [Box(part.row, part.row + shape_as_2d(part.shape)[0], 0, cols) for part in inside]
        check_tiling(Box(0, rows, 0, cols), boxes, name)
        linear = inside[0].hf == name and type(model.get_submodule(name.rpartition(".")[0])) is torch.nn.Linear
        linear = linear and name.endswith(".weight")
        found.append(OwnParameter(name, tuple(tensor.shape), tuple(inside), name in head, name in constants, linear))
    return tuple(found)


def constants_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Persistent buffers by name, which a checkpoint brings: corrections of experts' scores."""
    found = {}
    for prefix, part in model.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                found[f"{prefix}.{name}"] = buffer
    return found


def _names_of_head(model: PreTrainedModel) -> set[str]:
    decoder = {id(parameter) for parameter in model.base_model.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) not in decoder}


def _row(view: Tensor, whole: Tensor) -> int | None:
    """First row of `view` in its base tensor `whole`, both as matrices; None unless it is a block of whole rows."""
    (_, cols), (_, all_cols) = shape_as_2d(view.shape), shape_as_2d(whole.shape)
    row, rest = divmod(int(view.storage_offset()), all_cols)
    return row if cols == all_cols and rest == 0 and view.is_contiguous() else None


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # the same for all views; a meta tensor has no data pointer to compare


# The longest sequence of a batch chooses the table of angles, so packed neighbours would change it.
_ROPES_OF_LENGTH = ("longrope", "dynamic")
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def with_own_parameters(arch: ModelArch, path: str | Path, text: Mapping[str, Any] | None) -> ModelArch:
    """Return `arch`, of a family with experts, with the parameters (`own`) of transformers' class, and of its tower. text: as in
    `language_config_of`."""
    config = language_config_of(path, text)
    of_tower = () if arch.vision is None else (OwnParameter(*one, (Part(*one, 0),)) for one in arch.vision.tensors)
    return replace(arch, own=(*parameters_in_checkpoint(_on_meta(_causal_class(config), config)), *of_tower))


def describe_model(path: str | Path) -> ModelArch:
    """Read the architecture of a checkpoint directory that no family covers; config.json is enough.
    Shapes and names are exact; sizes of heads, MLP and experts are for estimates.
    ValueError, one line, if engine fsdp2 cannot run it; RunsNowhere if no other does."""
    config = language_config_of(path)
    for problem in _problems(config):
        raise type(problem)(f"{path}: {problem}")
    kind = _causal_class(config)
    model = _on_meta(kind, config)
    for problem in _class_problems(model):
        raise type(problem)(f"{path}: {problem}")
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
        max_positions=_max_positions(config),
        tied_embeddings=bool(config.tie_word_embeddings),
        norm_eps=float(getattr(config, "rms_norm_eps", None) or getattr(config, "layer_norm_eps", None) or 1e-5),
        rope=Rope(),
        moe=_experts(config, own, layers),
        own=own,
        keeps_scores=getattr(config, "attn_logit_softcapping", None) is not None or any("sinks" in one.name for one in own),
        **_windows(config, layers),
    )


def language_config_of(path: str | Path, text: Mapping[str, Any] | None = None) -> Any:
    """Read transformers' config of the language model in a checkpoint directory. text: `hf_config.text_config` of a model with a
    tower, whose language model is of the text-only class. ValueError, one line, if transformers cannot read it."""
    if text is not None:
        return CONFIG_MAPPING[text["model_type"]].from_dict(dict(text))
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


def _problems(config: Any) -> Iterator[ValueError]:
    """Yield the features of a config that packed sequences or log-probs cannot handle, one line each."""
    name = config.model_type
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "is_encoder_decoder", False):
        yield ValueError(f"transformers has no causal language model of type {name}")
    for kind in sorted(_rope_types(config) & {*_ROPES_OF_LENGTH}):
        yield RunsNowhere(
            f"rope type {kind!r} depends on the longest sequence, so that packed neighbours would change it; no engine runs it"
        )
    for kind in sorted({*(getattr(config, "layer_types", None) or ())} - _ATTENTION_LAYERS):
        yield RunsNowhere(f"{name} has layers of type {kind!r}, which see other sequences of a packed batch; no engine runs it")
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        yield RunsNowhere(
            f"final_logit_softcapping {cap} caps the logits of this {name} model, which log-probs leave out; no engine runs it"
        )
    if getattr(config, "max_position_embeddings", None) is None:
        yield ValueError(f"config.json of this {name} model has no max_position_embeddings, by which lengths are checked")


def _class_problems(model: PreTrainedModel) -> Iterator[ValueError]:
    name = type(model).__name__
    if any(isinstance(part, torch.nn.Conv1d) for part in model.modules()):
        yield RunsNowhere(
            f"{name} has convolutions over tokens, which run across the sequences of a packed batch; no engine runs it"
        )
    if not isinstance(getattr(model.base_model, "layers", None), torch.nn.ModuleList):
        yield ValueError(f"{name} has no list of its layers under the name `layers`, by which engine fsdp2 shards it")
    output: Any = model.get_output_embeddings()
    if getattr(output, "weight", None) is None or getattr(output, "bias", None) is not None:
        yield RunsNowhere(
            f"{name} has an output projection with a bias, or none, and the log-probs take a matrix alone; no engine runs it"
        )


def _max_positions(config: Any) -> int:
    given = (
        getattr(config, "rope_parameters", None) or {}
    )  # by layer type, of which none has a type itself, they are stretched already
    return positions_of(int(config.max_position_embeddings), given.get("rope_type"), given.get("factor"))


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
