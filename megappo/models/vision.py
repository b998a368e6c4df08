"""Computes what images add to a packed batch: positions, the tower's features, and their places among the embeddings.

A batch's tokens carry the images (`data/images.py`). The tower is transformers' own module, which keeps images apart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megappo.data.images import IMAGE_BASE, ImageStore
from megappo.data.packing import moved
from megappo.models.arch import ModelArch, VisionArch
from megappo.models.rope import inverse_frequencies, tables_of
from megappo.parallel.context import ContextShard


class Span(NamedTuple):
    """Tokens start..end - 1 of a batch, which are features of one image."""

    start: int
    end: int
    image: int


def spans_of(tokens: Tensor, images: ImageStore | None) -> list[Span]:
    """Find every image in tokens [T], on the host, in order. One that stands twice in a row has two spans."""
    found: list[Span] = []
    places = (tokens >= IMAGE_BASE).nonzero().flatten().tolist()
    if places:
        assert images is not None, "tokens of images, and a model without images"
    at = 0
    while at < len(places) and images is not None:
        start, image = places[at], int(tokens[places[at]]) - IMAGE_BASE
        count = images.num_tokens(image)
        same = tokens[start : start + count] == IMAGE_BASE + image
        assert len(same) == count and bool(same.all()), f"image {image} has not {count} tokens in a row from token {start}"
        found.append(Span(start, start + count, image))
        at += count
    return found


def plain_positions(tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return [T] int64 positions of tokens in their packed sequences. On the host."""
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    return torch.arange(len(tokens)) - starts.repeat_interleave(ends - starts)


def positions_of(tokens: Tensor, cu_seqlens: Tensor, images: ImageStore | None) -> Tensor:
    """Return [3, T] int64 positions (time, height, width) of packed sequences: of a token of text all three are equal, and an image
    counts for the larger of its features' rows and columns. tokens, cu_seqlens: on the host.
    As Qwen2-VL has them (arXiv:2409.12191)."""
    ends, plain = cu_seqlens[1:].long(), plain_positions(tokens, cu_seqlens)
    found = spans_of(tokens, images)
    if not found:
        return plain.expand(3, -1)
    assert images is not None
    positions = plain.repeat(3, 1)
    sequence = torch.bucketize(torch.tensor([span.start for span in found]), ends, right=True).tolist()
    for (start, end, image), number in zip(found, sequence):
        rows, cols = (size // images.merge for size in images.grid(image))
        first, last = int(positions[0, start]), int(ends[number])
        height, width = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
        positions[:, start:end] = first
        positions[1, start:end] += height.flatten()
        positions[2, start:end] += width.flatten()
        # What follows the image in its sequence counts on from its larger side.
        positions[:, end:last] -= (end - start) - max(rows, cols)
    return positions


def table_of_axes(axes: Tensor, context: ContextShard | None, arch: ModelArch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Make the rotary table (`rope.rotary_table`) of positions [3, T], of this rank's tokens under context parallel."""
    assert arch.vision is not None
    inv_freq, factor = inverse_frequencies(arch.rope, arch.head_dim)
    axes = axes if context is None else context.take(axes.t().contiguous()).t()
    return tables_of(mixed_angles(axes[:, :, None].float() * moved(inv_freq, axes.device), arch.vision), factor, dtype)


def mixed_angles(angles: Tensor, vision: VisionArch) -> Tensor:
    """Choose the axis of every channel: [3, T, channels / 2] angles by time, height and width -> [T, channels / 2]."""
    if not vision.interleaved:
        return torch.cat([part[axis] for axis, part in enumerate(angles.split(list(vision.sections), dim=-1))], dim=-1)
    out = angles[0].clone()
    for axis in (1, 2):
        channels = slice(axis, 3 * vision.sections[axis], 3)
        out[:, channels] = angles[axis][:, channels]
    return out


class Seen(NamedTuple):
    """Images of a batch, each once, and for every token the row of its feature among theirs, -1 for a token of text."""

    images: list[int]
    rows: Tensor  # [T] int64


def seen_in(tokens: Tensor, images: ImageStore | None) -> Seen:
    """Find the images of tokens [T] on the host."""
    found = spans_of(tokens, images)
    starts: dict[int, int] = {}
    total = 0
    for start, end, image in found:
        if image not in starts:
            starts[image] = total
            total += end - start
    rows = torch.full((len(tokens),), -1)
    for start, end, image in found:
        rows[start:end] = torch.arange(starts[image], starts[image] + end - start)
    return Seen(list(starts), rows)


def tower_of(vision: VisionArch, dtype: torch.dtype, device: torch.device | int | None = None) -> torch.nn.Module:
    """Build the tower in transformers' own class, which keeps images apart in its attention."""
    from transformers import AutoConfig, AutoModel  # here: text-only models do without

    fields = json.loads(vision.config)
    kind = type(AutoConfig.for_model(fields.pop("model_type")))
    with torch.device(device) if device is not None else nullcontext():
        if vision.tile:
            return _tower_of_tiles(kind, fields, vision, dtype)
        return AutoModel.from_config(kind.sub_configs["vision_config"](**fields), dtype=dtype, attn_implementation="sdpa")


def _tower_of_tiles(kind: Any, fields: dict[str, Any], vision: VisionArch, dtype: torch.dtype) -> torch.nn.Module:
    """Build InternVL's tower and projector, as transformers' class has them beside the language model."""
    from transformers import AutoModel

    # The smallest language model, of which nothing is kept.
    text = {"model_type": "qwen2", "hidden_size": fields["out_hidden_size"], "num_hidden_layers": 0, "vocab_size": 1}
    inner = {name: value for name, value in fields.items() if name not in ("depth", "num_heads", "in_channels", "tile")}
    inner |= {"image_size": vision.tile, "patch_size": vision.patch}
    config = kind(vision_config=inner, text_config=text, projector_hidden_act=fields["projector_hidden_act"])
    tower: Any = AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa")
    del tower.language_model
    tower.forward = partial(_features_of_tiles, tower, vision)
    return tower


def _features_of_tiles(tower: Any, vision: VisionArch, pixels: Tensor, grid_thw: Tensor, return_dict: bool = True) -> Any:
    """Compute features of patches in the order of a store [patches, 3 x patch x patch]."""
    out = tower.get_image_features(pixel_values=tiles_of(pixels, vision), return_dict=return_dict)
    out.pooler_output = out.pooler_output.flatten(0, 1)
    return out


def tiles_of(pixels: Tensor, vision: VisionArch) -> Tensor:
    """Put patches in the order of a store, [patches, 3 x patch x patch], together to tiles [tiles, 3, side, side]."""
    side, merge, patch = vision.tile // vision.patch // vision.merge, vision.merge, vision.patch
    pieces = pixels.view(-1, side, side, merge, merge, 3, patch, patch)
    return pieces.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, vision.tile, vision.tile)


def blocks_of(tower: torch.nn.Module) -> Any:
    """Return the list of a tower's blocks."""
    inner: Any = tower
    return inner.blocks if hasattr(inner, "blocks") else inner.vision_tower.encoder.layer


def pixels_of(images: ImageStore, numbers: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the tower's input of these images, [patches, 3 x frames x patch x patch]. Normalised as by vLLM's own layer: in fp32,
    one product and one sum for each value."""
    patches = moved(torch.from_numpy(images.patches(numbers)), device)
    scale, shift = (torch.tensor(one, dtype=torch.float32, device=device).view(1, 3, 1) for one in images.scaling)
    normalised = (patches.view(len(patches), 3, -1) * scale + shift).to(dtype)
    return normalised[:, :, None].expand(-1, -1, images.frames, -1).reshape(len(patches), -1)


def features_of(
    tower: torch.nn.Module,
    images: ImageStore,
    numbers: Sequence[int],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Compute the features of these images, [M, H]: those that replace embeddings, then those of every layer of deepstack.

    A tower that is frozen as a whole has no graph. It computes an image alone, so that its features have the same bits in every
    micro-batch, and once a step for all roles with the same weights. group: ranks over which the tower's weights are sharded;
    collective over it. Without: every rank has them whole.
    """
    if any(one.requires_grad for one in tower.parameters()):
        return one_pass(tower, images, numbers, dtype)
    memory = images.features
    with torch.no_grad():
        if tower not in memory.towers:
            memory.towers[tower] = _contents(tower, group)
        contents = memory.towers[tower]
        known: dict[int, Any] = {one: memory.kept.get((contents, one)) for one in numbers}
        missing = [one for one in numbers if known[one] is None]
        passes = _most_of_ranks(len(missing), group, next(tower.parameters()).device)
        for image in [*missing, *[images.smallest] * (passes - len(missing))]:  # as often as a peer that misses more
            features = one_pass(tower, images, [image], dtype)
            if image in missing:
                known[image] = features
                if (size := sum(one.nbytes for one in features)) <= memory.free:
                    memory.kept[contents, image], memory.free = features, memory.free - size
        return [torch.cat(parts) for parts in zip(*known.values())]


def one_pass(tower: torch.nn.Module, images: ImageStore, numbers: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Pass the tower once, for all these images together; returns as `features_of`."""
    device = next(tower.parameters()).device
    grids = torch.tensor([(1, *images.grid(one)) for one in numbers], device=device)
    out: Any = tower(pixels_of(images, numbers, device, dtype), grid_thw=grids, return_dict=True)
    return [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]


def _contents(tower: torch.nn.Module, group: dist.ProcessGroup | None) -> tuple[object, ...]:
    """Return a value that another tower, or the same on other ranks, hardly has: with a sum of 64 bits of every parameter."""
    sums = torch.stack([_weighted_sum(one.to_local() if isinstance(one, DTensor) else one) for one in tower.parameters()])
    kind = str(cast(Any, tower).config), *(str(one.dtype) for one in tower.parameters())
    if group is None:
        return (*kind, *sums.tolist())
    all_sums = [torch.empty_like(sums) for _ in range(group.size())]
    dist.all_gather(all_sums, sums, group=group)
    return (*dist.get_process_group_ranks(group), *kind, *torch.cat(all_sums).tolist())


def _weighted_sum(weights: Tensor) -> Tensor:
    """Sum the bytes of weights, as integers of two, each times an odd number of its place. int64, on their device."""
    numbers = weights.detach().contiguous().flatten().view(torch.int16).long()
    places = torch.arange(len(numbers), device=numbers.device)
    return (numbers * (places * 0x1E3779B97F4A7C15 | 1)).sum()


def _most_of_ranks(here: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    if group is None or group.size() == 1:
        return here
    most = torch.tensor(here, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return int(most)


def placed(features: Sequence[Tensor], rows: Tensor, embedded: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Put features (of `features_of`) in their places: embeddings [T, H], and what every layer of deepstack adds, [T, H] each.
    rows: as in `Seen`. embedded: [T, H] of the tokens."""
    there, rows = (rows >= 0)[:, None], rows.clamp_min(0)
    first, *later = (one[rows].to(embedded.dtype) for one in features)
    return torch.where(there, first, embedded), [torch.where(there, one, 0.0) for one in later]


class Deferred(torch.autograd.Function):
    """(leaves, embeddings, *features) -> embeddings. Later layers add the leaves, which are `features` cut from the graph; in the
    backward `features` get the gradient that the leaves have by then.

    Otherwise layers that are recomputed one by one would each go back through the tower.
    """

    @staticmethod
    def forward(ctx: Any, leaves: list[Tensor], embeddings: Tensor, *features: Tensor) -> Tensor:
        ctx.leaves = leaves
        return embeddings.view_as(embeddings)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, grads[0], *(leaf.grad for leaf in ctx.leaves))
