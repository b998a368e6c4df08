"""Reader of a Hugging Face config.json into a `ModelArch`: JSON only, without remote code; a role under engine fsdp2 may be of
any class that transformers has (`any_model.py`). A feature that the model does not implement is an error. `family.py` has the
differences between families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from megappo.models.arch import ModelArch, Rope, positions_of
from megappo.models.families.registry import FAMILIES, family_of, wrapped_families
from megappo.models.family import NotImplementedByFamilies, RunsNowhere, StackedExperts, Values, Window
from megappo.models.fp8 import read_fp8
from megappo.models.vision_families import VISION_FAMILIES, language_config, language_of, read_vision
from megappo.runtime.messages import parse_object


def read_config(path: str | Path) -> dict[str, Any]:
    """Read config.json of a checkpoint directory. ValueError if it is missing, unreadable or not JSON."""
    file = Path(path) / "config.json"
    try:
        if not file.is_file() and Path(path).is_dir():
            raise ValueError(f"{path} has no config.json; a Hugging Face checkpoint directory is needed")
        if not file.is_file():
            how = f"`hf download OWNER/NAME --local-dir {path}` fetches a checkpoint; its name on the hub, OWNER/NAME, does as well"
            raise ValueError(f"{path} is not a directory; {how}")
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    return parse_object(content, str(file))


# `auto_map` names Python files beside the checkpoint, the other key a repository of kernels (CVE-2026-4372, which transformers
# before 5.3 follows even if remote code is off). vLLM reads the same file: it is refused before any library sees it.
_CODE_KEYS = ("auto_map", "_attn_implementation_internal")
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Rope type -> the keys that it reads.
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's part of a config as a text-only config, without quantization_config."""
    # The weights that are trained, sampled from and exported are dequantised: quantization_config does not apply to them.
    architecture = _architecture(config)
    if (vision := VISION_FAMILIES.get(architecture)) is not None:
        text = {key: value for key, value in language_config(config, vision).items() if key != "quantization_config"}
        name = language_of(config, vision)
        named = {"architectures": [FAMILIES[name].architecture()], "model_type": name}
        return _with_outer_keys({**text, **named}, config)
    families = {family.name: family for family in wrapped_families().get(architecture, [])}
    if not families and not isinstance(config.get("text_config"), Mapping):
        return {key: value for key, value in config.items() if key != "quantization_config"}
    text = {key: value for key, value in (config.get("text_config") or {}).items() if key != "quantization_config"}
    if not families:  # known to transformers alone; the caller names the text-only architecture
        return _with_outer_keys({**text, "architectures": [architecture]}, config)
    (default,) = {family.composite.model_type for family in families.values() if family.composite is not None}
    name = text.get("model_type", default)
    if name not in families:
        raise ValueError(f"{architecture} with text_config.model_type {name!r}: supported are {', '.join(families)}")
    return _with_outer_keys({**text, "architectures": [families[name].architecture()]}, config)


def _with_outer_keys(text: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    # True: transformers' default for every config class that has none of its own.
    text.setdefault("tie_word_embeddings", config.get("tie_word_embeddings", True))
    for key in ("dtype", "torch_dtype", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id"):
        if key in config:
            text.setdefault(key, config[key])
    return text


def read_arch(path: str | Path) -> ModelArch:
    """Read the architecture of the checkpoint directory `path`. ValueError names the key and value that is not supported."""
    try:
        return arch_of(read_config(path))
    except ValueError as error:
        kind = NotImplementedByFamilies if isinstance(error, NotImplementedByFamilies) else ValueError
        raise kind(f"{path}: {error}" if str(path) not in str(error) else str(error)) from None


def arch_of(config: Mapping[str, Any]) -> ModelArch:
    """Read the architecture from a parsed config.json. ValueError as from `read_arch`."""
    if key := _code_key(config):
        fix = "use a built-in architecture, and remove the key if this is one"
        raise ValueError(f"config.json has {key} (remote code), which is never run; {fix}")
    text = text_config(config)
    family = family_of(_architecture(text))
    read_fp8(config, mxfp4=isinstance(family.experts, StackedExperts))
    values = Values(text, family)
    _refuse_unimplemented(values)
    hidden, heads = values.positive("hidden_size"), values.positive("num_attention_heads")
    kv_heads = values.positive_or("num_key_value_heads", family.num_kv_heads, heads)
    if heads % kv_heads:
        num_heads, num_kv_heads = values.spelled("num_attention_heads"), values.spelled("num_key_value_heads")
        raise ValueError(f"{num_heads} {heads} is not a multiple of {num_kv_heads} {kv_heads}")
    head_dim = values.positive_or("head_dim", family.head_dim, hidden // heads)
    if head_dim % 2:
        raise ValueError(f"{values.spelled('head_dim')} {head_dim} is odd; rotary embeddings need an even one")
    num_layers, rope = values.positive("num_hidden_layers"), _read_rope(values, head_dim, _FULL)
    max_positions = positions_of(values.positive("max_position_embeddings"), rope.type, rope.factor)
    window, sliding_layers = _read_window(values, num_layers, max_positions)
    arch = ModelArch(
        family=family.name,
        architecture=_architecture(config),
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=values.positive("intermediate_size"),
        vocab_size=values.positive("vocab_size"),
        max_positions=max_positions,
        tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        norm_eps=values.number("rms_norm_eps", family.norm_eps),
        rope=rope,
        sliding_rope=None if family.local_theta is None else _read_rope(values, head_dim, _SLIDING),
        activation=family.activation,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        sliding_window=window,
        sliding_layers=sliding_layers,
    )
    arch = family.details(values, arch)
    vision = VISION_FAMILIES.get(arch.architecture)
    return arch if vision is None else replace(arch, vision=read_vision(config, vision))


def _code_key(config: Mapping[str, Any]) -> str | None:
    # transformers would run code of the checkpoint for such a key at any depth.
    waiting: list[Any] = [config]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            if found := next((key for key in _CODE_KEYS if key in value), None):
                return found
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return None


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or ["(none: config.json has no architectures)"]
    return names[0]


def _refuse_unimplemented(values: Values) -> None:
    activation, ours = values.get("hidden_act"), values.family.activation
    if activation not in (None, ours) and (activation, ours) != ("swish", "silu"):
        raise NotImplementedByFamilies(f"{values.spelled('hidden_act')} {activation!r} is not supported; only {ours} is")
    # A family with biases of its own on q, k and v says so by its rules, and its files may say it by this key too.
    for key in ("mlp_bias",) if values.family.qkv_bias else ("attention_bias", "mlp_bias"):
        if values.get(key):
            raise NotImplementedByFamilies(f"{key} = true is not supported (biases on o_proj or the MLP)")
    if dropout := values.get("attention_dropout"):
        raise ValueError(f"attention_dropout {dropout} is not supported; set it to 0 in config.json")
    if values.get("pretraining_tp") not in (None, 1):
        raise ValueError(f"pretraining_tp {values.get('pretraining_tp')} is not supported; set it to 1 in config.json")


def _read_window(values: Values, num_layers: int, max_positions: int) -> tuple[int | None, tuple[bool, ...]]:
    """Return (tokens that a token sees, itself included; one entry per layer, true with the window); (None, ()) if all see all.
    ValueError if the config contradicts itself, or if transformers and vLLM would read it differently."""
    family = values.family
    style = family.window or Window()
    window = values.get("sliding_window", style.default)
    if style.switched and not values.get("use_sliding_window", False):
        window = None
    if window is None:
        if style.by_layer and _SLIDING in (values.get("layer_types") or ()):
            raise ValueError(f"layer_types has {_SLIDING}, but sliding_window is null or use_sliding_window is false; set both")
        return None, ()
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ValueError(f"sliding_window {window!r}: a positive integer is needed, or null for none")
    if window >= max_positions:  # hides nothing from any token
        return None, ()
    if family.window is None:
        raise ValueError(f"sliding_window {window}: {family.name} models have no sliding attention; set it to null")
    layers = _sliding_layers(values, style, num_layers, window)
    return (window, layers) if any(layers) else (None, ())


def _sliding_layers(values: Values, style: Window, num_layers: int, window: int) -> tuple[bool, ...]:
    kinds = values.get("layer_types")
    if kinds and style.by_layer:
        unknown = sorted(set(kinds) - {_FULL, _SLIDING})
        if unknown:
            raise ValueError(f"layer_types has {unknown[0]!r}, which is not supported; supported are {_FULL} and {_SLIDING}")
        if len(kinds) != num_layers:
            raise ValueError(f"layer_types has {len(kinds)} entries for num_hidden_layers {num_layers}")
        return tuple(kind == _SLIDING for kind in kinds)
    if kinds and set(kinds) != {_SLIDING}:
        readings = f"transformers' {values.family.name} has the window in every layer, vLLM in the named ones"
        raise ValueError(f"sliding_window {window} with layer_types: {readings}; set one of them to null")
    if style.pattern is not None:
        pattern = values.positive_or("sliding_window_pattern", style.pattern, style.pattern)
        return tuple((layer + 1) % pattern != 0 for layer in range(num_layers))
    first = 0 if style.first_layer is None else values.get("max_window_layers", style.first_layer)
    return tuple(layer >= first for layer in range(num_layers))


def _rope_keys(values: Values, layers: str) -> dict[str, Any]:
    """Keys of the rotary embedding of the layers of this kind, with its base. ValueError if a family of one embedding has two."""
    parameters = values.get("rope_parameters") or {}
    by_kind = any(isinstance(value, Mapping) for value in parameters.values())
    if values.family.local_theta is None:
        if by_kind:
            raise NotImplementedByFamilies("rope_parameters per layer type are not supported")
        return {"rope_theta": values.get("rope_theta"), **(values.get("rope_scaling") or parameters)}
    found = dict(parameters.get(layers) or {}) if by_kind else {}
    if layers == _FULL:  # older files scale and name these alone
        return {"rope_theta": values.get("rope_theta"), **(values.get("rope_scaling") or {}), **found}
    return {"rope_theta": values.get("rope_local_base_freq", values.family.local_theta), **found}


def _read_rope(values: Values, head_dim: int, layers: str) -> Rope:
    """Read the rotary embedding of the layers of this kind, which all layers share in most families."""
    given = _rope_keys(values, layers)
    older_name = given.pop("type", None)
    kind = given.pop("rope_type", None) or older_name or "default"
    if kind not in _ROPE_KEYS:
        raise NotImplementedByFamilies(f"rope type {kind!r} is not supported; supported are {', '.join(_ROPE_KEYS)}")
    theta = given.pop("rope_theta", None) or 10000.0
    partial, share = given.pop("partial_rotary_factor", values.get("partial_rotary_factor")), values.family.partial_rotary
    if share is None and partial not in (None, 1, 1.0):
        raise NotImplementedByFamilies(f"partial_rotary_factor {partial} is not supported; the whole head must be rotated")
    channels = None if share is None else int(head_dim * (share if partial is None else partial))
    for key in ("max_position_embeddings", "mrope_section", "mrope_interleaved"):
        # A second copy in ministral3 configs, which no library reads; which channels are turned by the places of an image, all of
        # them alike in a text.
        given.pop(key, None)
    beta = given.pop("llama_4_scaling_beta", None)
    original = given.pop("original_max_position_embeddings", None)
    if (beta is not None) != values.family.scaled_queries:
        scaled = " and ".join(family.name for family in FAMILIES.values() if family.scaled_queries)
        raise ValueError(f"rope llama_4_scaling_beta is {beta}; {scaled} needs it and no other family has it")
    if beta is not None and original is None:
        raise ValueError("rope original_max_position_embeddings is missing; llama_4_scaling_beta needs it")
    used = _ROPE_KEYS[kind]
    # A key of another rope type is harmless if null; with a value it would change the model in an unknown way.
    unknown = sorted(key for key, value in given.items() if key not in used and value is not None)
    if unknown:
        raise ValueError(f"rope key {unknown[0]!r} is not known for rope type {kind!r}")
    fields = {key: given[key] for key in used if given.get(key) is not None}
    if kind in ("llama3", "yarn"):
        original = values.get("original_max_position_embeddings") or original or values.positive("max_position_embeddings")
    if kind == "yarn" and "factor" not in fields:
        fields["factor"] = values.positive("max_position_embeddings") / original
    missing = [key for key in ("factor", "low_freq_factor", "high_freq_factor") if key in used and key not in fields]
    if missing:
        raise ValueError(f"rope type {kind!r} needs the key {missing[0]!r}")
    return Rope(type=kind, theta=float(theta), original_max_positions=original, llama4_beta=beta, channels=channels, **fields)


def arch_for(path: str | Path, engine: Literal["megatron", "fsdp2"], head_rows: int = 1) -> ModelArch:
    """Read the architecture of the checkpoint directory `path`; under fsdp2 of any causal language model of transformers.
    head_rows: see `ModelArch`. ValueError, one line, for a model that the engine does not run."""
    arch = _arch_for(path, engine)
    return arch if head_rows == 1 else replace(arch, head_rows=head_rows)


def _arch_for(path: str | Path, engine: Literal["megatron", "fsdp2"]) -> ModelArch:
    try:
        arch = read_arch(path)
    except NotImplementedByFamilies as error:
        if engine == "megatron":
            raise ValueError(f"{error}; {_other_engine(path)}") from None
        # Imports transformers, which families do without.
        from megappo.models.any_model import describe_model

        return describe_model(path)
    if engine == "megatron" or (arch.moe is None and arch.delta is None):
        return arch
    from megappo.models.any_model import with_own_parameters

    return with_own_parameters(arch, path, None if arch.vision is None else text_config(read_config(path)))


def _other_engine(path: str | Path) -> str:
    """Say whether engine fsdp2 runs a model of which megappo's own layers do not have everything."""
    from megappo.models.any_model import describe_model

    try:
        describe_model(path)
    except RunsNowhere as error:
        return str(error).removeprefix(f"{path}: ")
    except ValueError:
        pass  # a fault of the checkpoint, or of this model under fsdp2
    return "engine fsdp2 runs any causal language model of transformers"
