"""Language and value models as transformers' own classes, made to read packed sequences.

The architecture is as its authors wrote it: only attention is replaced, through transformers' registry of attention functions.
`check_packing` compares the model with itself, without the replacement, instead of a list of families that are known to work.
Parameters are made without memory, and have the names of the checkpoint.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from megappo.data.packing import pack
from megappo.data.positions import moved
from megappo.models.attention import PackedSequences, grouped_attention, varlen_attention
from megappo.models.flops import Recompute

OUTPUT_METHOD = "packed_output"
"""Method of both kinds of model: (tokens [T], cu_seqlens [B+1] on the host) -> final hidden states [1, T, H], or values [1, T, 1]
fp32. In the form of the decoder's output: FSDP2 wants no views."""
HIDDEN_METHOD = "hidden_states"
"""Method of value models, see `ValueModel`."""
# Names in transformers' registry: attention of packed sequences, and the same with its activations computed again in the backward.
_ATTENTION, _ATTENTION_AGAIN = "megappo_packed", "megappo_packed_again"
# Largest relative error of hidden states in which a sum in another order cannot be told from an architecture that needs more than
# its own sequence. Neighbours that are seen change them by 0.4 to 1.6 of their norm.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


class ValueModel(torch.nn.Module):
    """Decoder without output projection under a value head in fp32 (`score.weight` [1, H])."""

    def __init__(self, decoder: PreTrainedModel, hidden_size: int) -> None:
        super().__init__()
        self.model = decoder
        self.score = torch.nn.Linear(hidden_size, 1, bias=False, dtype=torch.float32)

    def packed_output(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        """See `OUTPUT_METHOD`."""
        return self.score(self.hidden_states(tokens, cu_seqlens).float())

    def hidden_states(self, tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """[1, T, H]; without `cu_seqlens` of one sequence, through transformers' own attention."""
        if cu_seqlens is None:
            return self.model(input_ids=tokens[None], use_cache=False).last_hidden_state
        return _hidden_states(self.model, tokens, cu_seqlens)


def build_on_meta(path: str, *, value_head: bool, dtype: torch.dtype, recompute: Recompute = "none") -> torch.nn.Module:
    """The model of a checkpoint directory, its parameters in `dtype` on the meta device (a value head in fp32).

    recompute: activations that a backward pass computes again: of core attention (selective), or of every layer (full).
    """
    AttentionInterface.register(_ATTENTION, packed_attention)
    AttentionInterface.register(_ATTENTION_AGAIN, _attention_again)
    config = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
    kind = AutoModel if value_head else AutoModelForCausalLM
    with torch.device("meta"):
        attention = _ATTENTION_AGAIN if recompute == "selective" else _ATTENTION
        model = kind.from_config(config, dtype=dtype, attn_implementation=attention)
        if recompute == "full":
            _recompute_layers(model)
        # transformers gives the embedding of the padding token no gradient; here no token is padding.
        model.get_input_embeddings().padding_idx = None
        if value_head:
            return ValueModel(model, config.hidden_size)
    model.tie_weights()
    setattr(model, OUTPUT_METHOD, types.MethodType(_language_output, model))
    return model


def _recompute_layers(model: PreTrainedModel) -> None:
    """Keep the input of every layer alone. Before `fully_shard`, whose hooks then gather a layer once for both of its forwards."""
    for layer in model.base_model.layers:
        forward = layer.forward
        layer.forward = functools.partial(_again, forward)


def _again(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` so that its backward calls it again instead of keeping its activations. It draws no random numbers."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def decoder_of(model: torch.nn.Module) -> Any:
    """The stack of layers inside, with its embedding."""
    return model.model if isinstance(model, ValueModel) else model.base_model


def output_weight(model: torch.nn.Module) -> Tensor:
    """Output projection [V, H] of a language model; the embedding if they are tied."""
    assert isinstance(model, PreTrainedModel)
    projection: Any = model.get_output_embeddings()
    return projection.weight


def fill_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Make the tables of rotary embeddings, which no checkpoint brings. ValueError for a model with other buffers."""
    decoder = decoder_of(model)
    for name, child in list(decoder.named_children()):
        if name == "rotary_emb":
            setattr(decoder, name, type(child)(config=decoder.config).to(device))
    left = [name for name, buffer in model.named_buffers() if buffer.is_meta or "rotary_emb" not in name]
    if left:
        raise ValueError(f"{type(model).__name__} has the buffer {left[0]}, which engine fsdp2 does not load; use engine megatron")


def _hidden_states(decoder: Any, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[1, T, H] of packed sequences."""
    lengths = cu_seqlens.long().diff()
    positions = torch.arange(int(cu_seqlens[-1])) - cu_seqlens[:-1].long().repeat_interleave(lengths)
    on_device = moved(cu_seqlens.to(torch.int32), tokens.device)
    longest = int(lengths.max())
    packed = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=on_device,
        cu_seqlens_kv=on_device,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        offsets=cu_seqlens,
    )
    inputs: Any = dict(position_ids=moved(positions, tokens.device)[None], use_cache=False, packed=packed)
    return decoder(input_ids=tokens[None], **inputs).last_hidden_state


def _language_output(model: PreTrainedModel, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    return _hidden_states(model.base_model, tokens, cu_seqlens)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedSequences,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence, in the form that transformers calls.

    query [1, heads, T, dim], key and value [1, kv_heads, T, dim] -> [1, T, heads, dim]. sliding_window: tokens that a token sees,
    itself included. ValueError for scores that are capped or have sinks.
    """
    if softcap is not None or s_aux is not None:
        what = "softcap" if softcap is not None else "attention sinks"
        raise ValueError(f"{type(module).__name__} has {what}, which packed attention leaves out; use another model")
    assert attention_mask is None, "packed sequences need no mask"
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    scale = q.size(-1) ** -0.5 if scaling is None else scaling
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        out = varlen_attention(q, k, v, packed, scale, sliding_window)
    else:
        out = grouped_attention(q, k, v, packed.grouping(), scale, sliding_window)
    return out[None], None


def _attention_again(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _again(packed_attention, *args, **kwargs)


# ------------------------------------------------------------------------------------------------------------ start-up check


def check_packing(model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Compare two packed sequences with each alone through transformers' own attention, and logits with the output projection.

    ValueError if they differ: layers carry state from token to token, or scale or cap the logits. Collective over the ranks of a
    sharded model, whose root stays gathered.
    """
    decoder = decoder_of(model)
    ids = torch.arange(1, 20) * 7919 % decoder.config.vocab_size
    parts = [ids[:7].tolist(), ids[7:].tolist()]
    batch = pack(parts)
    with torch.no_grad():
        packed = _rows(model, batch.tokens.to(device), batch.cu_seqlens)
        with _own_attention(decoder):
            alone = torch.cat([_rows(model, torch.tensor(part, device=device), None) for part in parts], dim=1)
    error = float((packed - alone).norm() / alone.norm())
    if not error <= _TOLERANCE[dtype]:
        raise ValueError(
            f"{type(decoder).__name__}: sequences packed together differ from each alone by {error:.1e} of their norm "
            f"(limit {_TOLERANCE[dtype]:g}); this architecture cannot run under engine fsdp2"
        )


def _rows(model: torch.nn.Module, tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Logits [1, T, V] or, of a value model, hidden states [1, T, H], fp32; without `cu_seqlens` as transformers computes them."""
    if not isinstance(model, PreTrainedModel):
        return getattr(model, HIDDEN_METHOD)(tokens, cu_seqlens).float()
    if cu_seqlens is None:
        return model(input_ids=tokens[None], use_cache=False).logits.float()
    return getattr(model, OUTPUT_METHOD)(tokens, cu_seqlens).float() @ output_weight(model).float().t()


@contextmanager
def _own_attention(decoder: Any) -> Iterator[None]:
    packed = decoder.config._attn_implementation
    decoder.config._attn_implementation = "sdpa"
    yield
    decoder.config._attn_implementation = packed
