"""Language and value models as transformers' own classes, made to read packed sequences.

Only attention is replaced, through transformers' registry of attention functions. `check_packing` compares the model with itself
without the replacement, so there is no list of families that work. Parameters start on the meta device, under checkpoint names.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModel, AutoModelForCausalLM, PreTrainedModel

from megappo.data.images import ImageStore
from megappo.data.packing import moved, pack
from megappo.models.any_model import language_config_of
from megappo.models.arch import VisionArch
from megappo.models.attention import PackedSequences, attend, by_length
from megappo.models.flops import Recompute
from megappo.models.hf_config import read_config, text_config
from megappo.models.rope import tables_of
from megappo.models.vision import features_of, mixed_angles, placed, plain_positions, positions_of, seen_in, tower_of
from megappo.parallel.context import ContextShard, context_shard
from megappo.parallel.groups import ProcessGroups

# Shaped like the decoder's output: FSDP2 wants no views.
OUTPUT_METHOD = "packed_output"
"""Method of both kinds of model: (tokens [T], cu_seqlens [B+1] on the host, context) -> final hidden states [1, T, H], or values
[1, T, 1] fp32, of this rank's tokens (T / cp under context parallel, and / tp under sequence parallel)."""
HIDDEN_METHOD = "hidden_states"
"""Method of `ValueModel`."""
COMPILER = "inductor"
"""Backend of torch.compile: C++ on the CPU, Triton on a GPU."""
# Names in transformers' registry: attention of packed sequences, and the same recomputed in the backward.
_ATTENTION, _ATTENTION_AGAIN = "megappo_packed", "megappo_packed_again"
# Largest relative error of hidden states that another order of summation explains. Neighbours that are seen change them by 0.4 to
# 1.6 of their norm.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


@dataclass
class Tower:
    """Tower of a vision-language model as its language or value model holds it: `module`, which is `visual` beside the decoder.
    images: that tokens name; None: they name none. shards: ranks that its weights are sharded over. tp: group of sequence parallel,
    or None."""

    vision: VisionArch
    module: torch.nn.Module
    images: ImageStore | None = None
    shards: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None


def tower_in(model: torch.nn.Module) -> Tower | None:
    """Return the tower of a model that `build_on_meta` made; None if it reads text alone."""
    return getattr(model, "tower", None)


class ValueModel(torch.nn.Module):
    """Decoder without output projection under a value head in fp32, `score.weight` [head_rows, H]."""

    def __init__(self, decoder: PreTrainedModel, hidden_size: int, head_rows: int) -> None:
        super().__init__()
        self._prefix = decoder.base_model_prefix  # of the decoder's tensors in a checkpoint of the language model
        self.add_module(self._prefix, decoder)
        self.score = torch.nn.Linear(hidden_size, head_rows, bias=False, dtype=torch.float32)

    @property
    def decoder(self) -> Any:
        return getattr(self, self._prefix)

    def packed_output(self, tokens: Tensor, cu_seqlens: Tensor, context: ContextShard | None = None) -> Tensor:
        return self.score(self.hidden_states(tokens, cu_seqlens, context).float())

    def hidden_states(self, tokens: Tensor, cu_seqlens: Tensor | None, context: ContextShard | None = None) -> Tensor:
        """Return [1, T, H]. Without `cu_seqlens`: of one sequence, through transformers' own attention."""
        if cu_seqlens is None:
            return self.decoder(input_ids=tokens[None], use_cache=False).last_hidden_state
        return _hidden_states(self, tokens, cu_seqlens, context)


def build_on_meta(
    path: str,
    *,
    head_rows: int,
    dtype: torch.dtype,
    recompute: Recompute = "none",
    inputs_on_host: bool = False,
    draws: bool = False,
    compiled: bool = False,
    vision: VisionArch | None = None,
) -> torch.nn.Module:
    """Build the model of a checkpoint directory, its parameters in `dtype` on the meta device (a value head in fp32).

    head_rows: outputs of a value head, 0 for a language model. recompute: the backward recomputes core attention (selective) or
    every layer (full), whose inputs wait in host memory with inputs_on_host. draws: the layers draw random numbers, and
    recomputation repeats them. compiled: the layers are compiled at their first passes. vision: of a vision-language model, whose
    language model is then of the text-only class.
    """
    AttentionInterface.register(_ATTENTION, packed_attention)
    AttentionInterface.register(_ATTENTION_AGAIN, _attention_again)
    config = language_config_of(path, None if vision is None else text_config(read_config(path)))
    kind = AutoModel if head_rows else AutoModelForCausalLM
    with torch.device("meta"):
        attention = _ATTENTION_AGAIN if recompute == "selective" else _ATTENTION
        model = kind.from_config(config, dtype=dtype, attn_implementation=attention)
        _keep_states_apart(model)
        if compiled:
            _compile_layers(model)
        if recompute == "full":
            _recompute_layers(model, draws, inputs_on_host)
        # transformers gives the embedding of the padding token no gradient; here no token is padding.
        model.get_input_embeddings().padding_idx = None
        whole: torch.nn.Module = ValueModel(model, config.hidden_size, head_rows) if head_rows else model
    if vision is not None:
        _add_tower(whole, vision, dtype)
    if not head_rows:
        model.tie_weights()
        setattr(model, OUTPUT_METHOD, types.MethodType(_hidden_states, model))
    return whole


def _keep_states_apart(model: PreTrainedModel) -> None:
    """Let delta nets see each sequence of a packed batch alone."""
    for layer in decoder_of(model).layers:
        if (net := getattr(layer, "linear_attn", None)) is not None:
            net.forward = functools.partial(_by_sequence, net.forward)


@torch.compiler.disable  # reads lengths on the host
def _by_sequence(
    forward: Callable[..., Tensor], hidden_states: Tensor, packed: PackedSequences | None = None, **_: object
) -> Tensor:
    """Apply a delta net to hidden states [1, T, H]; without `packed` of one sequence."""
    if packed is None:
        return forward(hidden_states)
    # What a sequence is padded with comes after it, and a delta net looks back alone.
    return by_length((hidden_states[0],), packed.grouping(), forward)[None]


def _add_tower(model: torch.nn.Module, vision: VisionArch, dtype: torch.dtype) -> None:
    """Add a tower beside a decoder, which takes positions [3, T] of time, height and width then, and features after layers."""
    decoder = decoder_of(model)
    if vision.sections:
        decoder.rotary_emb.forward = functools.partial(_table_of_axes, decoder.rotary_emb, vision)
    for number in range(vision.deepstack):
        decoder.layers[number].register_forward_hook(functools.partial(_add_features, number), with_kwargs=True)
    model.visual = tower_of(vision, dtype, torch.device("meta"))
    setattr(model, "tower", Tower(vision, model.visual))


def _table_of_axes(rotary: Any, vision: VisionArch, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Make cos and sin [1, T, head_dim] of positions [3, T], or [1, T] of text."""
    angles = mixed_angles(position_ids.expand(3, -1)[:, :, None].float() * rotary.inv_freq, vision)
    cos, sin = tables_of(angles, rotary.attention_scaling, x.dtype)
    return cos.transpose(0, 1), sin.transpose(0, 1)


def _add_features(number: int, _layer: object, _inputs: object, inputs: Mapping[str, Any], hidden: Tensor) -> Tensor:
    # Outside the layer's forward, so recomputation does not come back through the tower.
    late = inputs["packed"].late if "packed" in inputs else ()
    return hidden + late[number] if late else hidden


def _compile_layers(model: PreTrainedModel) -> None:
    """Compile every layer's forward and backward, in two parts round attention."""
    # All roles share the graphs of a layer's class: with and without gradients, each kind of attention, adapters on and off, each
    # dtype. Past the default limit a layer would silently run uncompiled.
    torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit = 64, True
    for layer in decoder_of(model).layers:
        # Before `fully_shard`, whose hooks stay outside: a layer is gathered when its code runs.
        # dynamic: micro-batches differ in their number of tokens, and one graph serves them all.
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=COMPILER)


def _recompute_layers(model: PreTrainedModel, draws: bool, on_host: bool) -> None:
    # Before `fully_shard`, whose hooks then gather a layer once for both of its forwards.
    again = _again_from_host if on_host else _again
    for layer in decoder_of(model).layers:
        layer.forward = functools.partial(again, layer.forward, draws)


def _again(function: Callable[..., Any], draws: bool, *args: Any, **kwargs: Any) -> Any:
    """Call `function`; its backward calls it again instead of keeping activations. draws: with the same random numbers."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=draws, **kwargs)


def _again_from_host(function: Callable[..., Any], draws: bool, *args: Any, **kwargs: Any) -> Any:
    """Recompute as `_again` does; the tensors that are kept, its `args`, wait in host memory until the backward."""
    # torch's save_on_cpu would wait for its copies to the host.
    with torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host):
        return _again(function, draws, *args, **kwargs)


def _to_host(kept: Tensor) -> tuple[torch.device, Tensor]:
    # On the CPU a copy too, for the tests.
    copy = torch.empty(kept.shape, dtype=kept.dtype, device="cpu", pin_memory=kept.is_cuda)
    return kept.device, copy.copy_(kept, non_blocking=kept.is_cuda)


def _from_host(moved_away: tuple[torch.device, Tensor]) -> Tensor:
    device, copy = moved_away
    return copy.to(device, non_blocking=True)


def decoder_of(model: torch.nn.Module) -> Any:
    """Return the stack of layers inside, with its embedding."""
    return model.decoder if isinstance(model, ValueModel) else model.base_model


def output_weight(model: torch.nn.Module) -> Tensor:
    """This tp rank's rows of a language model's output projection [V, H]; the embedding if tied."""
    assert isinstance(model, PreTrainedModel)
    projection: Any = model.get_output_embeddings()
    return projection.weight.to_local() if isinstance(projection.weight, DTensor) else projection.weight


def tokens_of_all_tp_ranks(x: Tensor, groups: ProcessGroups) -> Tensor:
    """Gather [T / tp, ...] to [T, ...] on every tp rank under sequence parallel; else `x` has all tokens. Collective over tp."""
    if not groups.layout.sequence_parallel:
        return x
    # Every tp rank computes the same loss from all tokens, so the backward takes this rank's slice without a sum.
    return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=groups.tp)


def names_of_embeddings(model: torch.nn.Module) -> tuple[str, str]:
    """Names of a language model's embedding weight and output weight (as it would be if untied)."""
    assert isinstance(model, PreTrainedModel)
    names = {id(part): f"{name}.weight" for name, part in model.named_modules()}
    return names[id(model.get_input_embeddings())], names[id(model.get_output_embeddings())]


def fill_buffers(model: torch.nn.Module) -> None:
    """Compute the buffers that a class derives from its config, such as rotary angles, by transformers' initialisation.
    Constants that the checkpoint brings are zero until they are read. ValueError if the initialisation leaves a buffer out."""
    tower = tower_in(model)
    of_tower: set[torch.nn.Module] = set() if tower is None else set(tower.module.modules())
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # the initialisation passes these by
    for part in model.modules():
        owner: Any = tower.module if tower is not None and part in of_tower else decoder_of(model)
        buffers = dict(part.named_buffers(recurse=False))
        for buffer in buffers.values():
            buffer.fill_(torch.nan if buffer.is_floating_point() else -1)
        if buffers:
            owner._init_weights(part)
        for name, buffer in buffers.items():
            if name not in part._non_persistent_buffers_set:
                buffer.zero_()
            elif buffer.dtype == torch.bool or bool((buffer.isnan() if buffer.is_floating_point() else buffer == -1).any()):
                raise ValueError(f"{type(owner).__name__} has the buffer {name}, which nothing fills; engine fsdp2 cannot run it")


def _hidden_states(model: torch.nn.Module, tokens: Tensor, cu_seqlens: Tensor, context: ContextShard | None = None) -> Tensor:
    decoder, tower, lengths = decoder_of(model), tower_in(model), cu_seqlens.long().diff()
    on_device = moved(cu_seqlens.to(torch.int32), tokens.device)
    longest = int(lengths.max())
    packed = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=on_device,
        cu_seqlens_kv=on_device,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        offsets=cu_seqlens,
        context=context,
    )
    if tower is not None and tower.images is not None:
        inputs = _with_images(decoder, tower, tower.images, tokens, packed)
    else:
        places = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
        positions = moved(places - cu_seqlens[:-1].long().repeat_interleave(lengths), tokens.device)
        if context is not None:
            tokens, positions = context.take(tokens), context.take(positions)
        inputs = {"input_ids": tokens[None], "position_ids": positions[None]}
    return decoder(**inputs, use_cache=False, packed=packed).last_hidden_state


def _with_images(decoder: Any, tower: Tower, images: ImageStore, tokens: Tensor, packed: PackedSequences) -> dict[str, Tensor]:
    """Return the decoder's arguments for tokens [T], of which this rank's are embedded, with features in their places. `packed`
    gets those of later layers. Collective: every tp and cp rank computes the features of all images."""
    on_host, context = tokens.cpu(), packed.context
    assert packed.offsets is not None
    of_axes = bool(tower.vision.sections)
    positions = positions_of(on_host, packed.offsets, images) if of_axes else plain_positions(on_host, packed.offsets)[None]
    seen = seen_in(on_host, images)
    positions, rows = moved(positions, tokens.device), moved(seen.rows, tokens.device)
    words = tokens.masked_fill(rows >= 0, tower.vision.image_token)
    if context is not None:
        words, rows = context.take(words), context.take(rows)
        positions = context.take(positions.t().contiguous()).t()
    embedded: Tensor = decoder.embed_tokens(words[None])[0]
    # All ranks of the role gather the tower's blocks and reduce their gradients: one without an image computes the smallest, whose
    # features take no token's place.
    features = features_of(tower.module, images, seen.images or [images.smallest], embedded.dtype, tower.shards)
    embedded, later = placed(features, rows, embedded)
    if tower.tp is not None:
        # The layers have a part of the tokens. The backward gathers: each tp rank has the whole gradient of all features.
        later = [scatter_to_sequence_parallel_region(one, group=tower.tp) for one in later]
    packed.late = [one[None] for one in later]
    return {"inputs_embeds": embedded[None], "position_ids": positions}


@torch.compiler.disable  # reads lengths on the host, and exchanges tokens
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
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence, in the form that transformers calls.

    query [1, heads, T, dim], key and value [1, kv_heads, T, dim] -> [1, T, heads, dim]; values, and so the result, may have fewer
    channels than keys. T / cp tokens under context parallel: tokens are exchanged for heads (DeepSpeed-Ulysses, arXiv:2309.14509).
    sliding_window: tokens that a token sees, itself included. softcap: cap of the scores. others: s_aux, sink of each head [heads].
    """
    assert attention_mask is None, "packed sequences need no mask"
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    out = attend(q, k, v, packed, scale, window=sliding_window, softcap=softcap, sinks=others.get("s_aux"))
    return out[None], None


@torch.compiler.disable
def _attention_again(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _again(packed_attention, False, *args, **kwargs)


# ------------------------------------------------------------------------------------------------------------ start-up check


def check_packing(model: torch.nn.Module, dtype: torch.dtype, device: torch.device, groups: ProcessGroups) -> float:
    """Compare two packed sequences with each alone in transformers' own attention, and logits with the output projection.
    Return the factor by which the model scales its logits, of those that its config names (1.0 for a value model). ValueError if
    they differ: layers carry state between sequences, or cap the logits. Collective over the ranks; the root stays gathered."""
    decoder, layout = decoder_of(model), groups.layout
    # Lengths that context and sequence parallel can cut.
    multiple = 2 * layout.cp * layout.tp if layout.cp * layout.tp > 1 else 1
    first, second = (-(-length // multiple) * multiple for length in (7, 12))
    ids = torch.arange(first + second) * 7919 % decoder.config.vocab_size
    parts = [ids[:first].tolist(), ids[first:].tolist()]
    batch = pack(parts)
    context = context_shard(batch.cu_seqlens, groups.cp, device)
    with torch.no_grad():
        packed = _rows(model, batch.tokens.to(device), batch.cu_seqlens, groups, context)
        with _own_attention(decoder):
            # The reference runs uncompiled.
            with torch.compiler.set_stance("force_eager"):
                alone = torch.cat([_rows(model, torch.tensor(part, device=device), None, groups) for part in parts])
    alone = alone if context is None else context.take(alone)
    # Summed over the tokens and logits of all ranks, so that all ranks refuse or none.
    scales = _logit_scales(model)
    squares = torch.stack([one.double().square().sum() for one in (alone, *(scale * packed - alone for scale in scales))])
    dist.all_reduce(squares, group=groups.everyone)
    error, scale = min(zip((squares[1:] / squares[0]).sqrt().tolist(), scales))
    if not error <= _TOLERANCE[dtype]:
        raise ValueError(
            f"{type(decoder).__name__}: sequences packed together differ from each alone by {error:.1e} of their norm "
            f"(limit {_TOLERANCE[dtype]:g}); this architecture cannot run under engine fsdp2"
        )
    return scale


def _logit_scales(model: torch.nn.Module) -> list[float]:
    # Classes multiply (cohere2) or divide (granite) by the same keys.
    config: Any = decoder_of(model).config
    named = [getattr(config, key, None) for key in ("logit_scale", "logits_scaling")] if isinstance(model, PreTrainedModel) else []
    return [1.0, *(factor for value in named if value for factor in (float(value), 1.0 / value))]


def _rows(
    model: torch.nn.Module,
    tokens: Tensor,
    cu_seqlens: Tensor | None,
    groups: ProcessGroups,
    context: ContextShard | None = None,
) -> Tensor:
    """Logits [T, V / tp], or hidden states [T, H] of a value model, fp32; without `cu_seqlens` by transformers' own attention."""
    if isinstance(model, PreTrainedModel) and cu_seqlens is None:
        return model(input_ids=tokens[None], use_cache=False).logits[0].float()
    method = OUTPUT_METHOD if isinstance(model, PreTrainedModel) else HIDDEN_METHOD
    hidden = tokens_of_all_tp_ranks(getattr(model, method)(tokens, cu_seqlens, context)[0], groups)
    return hidden.float() @ output_weight(model).float().t() if isinstance(model, PreTrainedModel) else hidden.float()


@contextmanager
def _own_attention(decoder: Any) -> Iterator[None]:
    packed = decoder.config._attn_implementation
    decoder.config._attn_implementation = "eager"  # the one that has sinks and caps
    yield
    decoder.config._attn_implementation = packed
