"""An engine to aim plans at, written twice: as tensors cut out of the checkpoint with cat and narrow, and as pieces.

The tensor form follows vLLM's documentation of its parallel layers (column parallel rows, row parallel columns, KV heads
replicated when there are fewer than ranks, vocabulary padded to a multiple of 64, the experts of a layer stacked) and shares no
code with the bridge; it is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from megappo.bridge.destination import Destination, Fill, Shape
from megappo.models.arch import ModelArch, MoeArch, Rope
from megappo.models.pieces import Box, Piece, PieceMap, as_2d, rectangle
from megappo.models.weight_map import hf_tensors, local_shapes, megatron_pieces, piece_map
from megappo.parallel.layout import ParallelLayout


def arch_like(family: str, **changes: object) -> ModelArch:
    values = dict(
        family=family,
        architecture="any",
        num_layers=4,
        hidden_size=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        ffn_size=24,
        vocab_size=54,
        max_positions=256,
        tied_embeddings=False,
        norm_eps=1e-6,
        rope=Rope(),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        moe=MoeArch(8, 2, 12, True, dense_layers=(1,)) if family == "qwen3_moe" else None,
    )
    return ModelArch(**{**values, **changes})


def random_checkpoint(arch: ModelArch, seed: int) -> dict[str, Tensor]:
    """Values that are exact in bf16 and differ almost everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16().float() for name, shape in hf_tensors(arch).items()}


def read_checkpoint(folder: str | Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint directory, by the names in its files."""
    return {name: tensor for file in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(file).items()}


def policy_tensors(arch: ModelArch, layout: ParallelLayout, rank: int, checkpoint: dict[str, Tensor]) -> dict[str, Tensor]:
    """Part of a checkpoint on a Megatron rank; padding of the vocabulary is NaN so that nobody can send it unnoticed."""
    shapes = local_shapes(arch, layout, rank)
    tensors = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    for piece in megatron_pieces(arch, layout, rank):
        box = piece.box
        place = as_2d(tensors[piece.local])[piece.row : piece.row + box.rows, piece.col : piece.col + box.cols]
        place.copy_(as_2d(checkpoint[piece.hf])[box.r0 : box.r1, box.c0 : box.c1])
    return tensors


class HeldPolicy:
    """A `bridge.sync.WeightSource` of given tensors (`tensors`, to be changed or exchanged), laid out as a Megatron policy.

    rename: of Hugging Face names in its map.
    """

    def __init__(
        self,
        arch: ModelArch,
        layout: ParallelLayout,
        tensors: dict[str, Tensor] | None = None,
        rename: Callable[[str], str] | None = None,
    ) -> None:
        self.arch, self.layout, self.rename = arch, layout, rename
        self.tensors = {} if tensors is None else tensors

    def merged_parameters(self) -> dict[str, Tensor]:
        return self.tensors

    def pieces(self) -> PieceMap:
        pieces = piece_map(self.arch, self.layout)
        return pieces if self.rename is None else renamed(pieces, self.rename)


def renamed(pieces: PieceMap, rename: Callable[[str], str]) -> PieceMap:
    """The same pieces of other Hugging Face tensors, which may differ from layer to layer."""
    return PieceMap.of({rank: [piece._replace(hf=rename(piece.hf)) for piece in held] for rank, held in pieces.items()})


def engine_tensors(arch: ModelArch, checkpoint: dict[str, Tensor], tp: int, rank: int) -> dict[str, Tensor]:
    """The oracle: parameters of one engine rank, by vLLM's names."""
    rows = lambda tensor: tensor.chunk(tp, 0)[rank]
    first_kv = rank * arch.num_kv_heads // tp
    num_kv = max(1, arch.num_kv_heads // tp)
    kv = lambda tensor: tensor[first_kv * arch.head_dim : (first_kv + num_kv) * arch.head_dim]

    def vocab(tensor: Tensor) -> Tensor:
        padding = -tensor.shape[0] % 64
        return rows(torch.cat([tensor, tensor.new_zeros(padding, tensor.shape[1])]))

    embedding, norm = "model.embed_tokens.weight", "model.norm.weight"
    out = {embedding: vocab(checkpoint[embedding]), norm: checkpoint[norm]}
    if not arch.tied_embeddings:
        out["lm_head.weight"] = vocab(checkpoint["lm_head.weight"])
    for layer in range(arch.num_layers):
        prefix = f"model.layers.{layer}."
        hf = {name.removeprefix(prefix): tensor for name, tensor in checkpoint.items() if name.startswith(prefix)}
        for kind in ("weight", "bias") if arch.qkv_bias else ("weight",):
            parts = [rows(hf[f"self_attn.q_proj.{kind}"]), kv(hf[f"self_attn.k_proj.{kind}"]), kv(hf[f"self_attn.v_proj.{kind}"])]
            out[f"{prefix}self_attn.qkv_proj.{kind}"] = torch.cat(parts)
        if arch.kind(layer).sparse:
            out[f"{prefix}mlp.gate.weight"] = hf["mlp.gate.weight"]
            out |= {f"{prefix}{EXPERTS}{name}": tensor for name, tensor in stacked_experts(arch, hf, tp, rank).items()}
        else:
            out[f"{prefix}mlp.gate_up_proj.weight"] = torch.cat([rows(hf[f"mlp.{x}_proj.weight"]) for x in ("gate", "up")])
            out[f"{prefix}mlp.down_proj.weight"] = hf["mlp.down_proj.weight"].chunk(tp, 1)[rank]
        out[f"{prefix}self_attn.o_proj.weight"] = hf["self_attn.o_proj.weight"].chunk(tp, 1)[rank]
        for name in hf:
            if "norm" in name:
                out[prefix + name] = hf[name]
    return out


EXPERTS = "mlp.experts.routed_experts."
"""Place of the experts of a layer in vLLM."""


def stacked_experts(arch: ModelArch, hf: Mapping[str, Tensor], tp: int, rank: int) -> dict[str, Tensor]:
    """Of one layer, by names inside it: [experts, gate rows above up rows, hidden] and [experts, hidden, columns]."""
    experts = range(arch.moe.num_experts)
    part = lambda expert, name, dim: hf[f"mlp.experts.{expert}.{name}_proj.weight"].chunk(tp, dim)[rank]
    return {
        "w13_weight": torch.stack([torch.cat([part(e, "gate", 0), part(e, "up", 0)]) for e in experts]),
        "w2_weight": torch.stack([part(e, "down", 1) for e in experts]),
    }


def engine_pieces(arch: ModelArch, tp: int, rank: int) -> Iterator[Piece]:
    """The same as pieces, by arithmetic."""
    hidden, dim = arch.hidden_size, arch.head_dim
    query, kv = arch.num_heads // tp * dim, max(1, arch.num_kv_heads // tp) * dim
    kv_row, ffn, heads = rank * arch.num_kv_heads // tp * dim, arch.ffn_size // tp, arch.num_heads // tp * dim
    vocab = -(-arch.vocab_size // 64) * 64 // tp
    expert_ffn = arch.moe.ffn_size // tp if arch.moe else 0
    for name, shape in hf_tensors(arch).items():
        head, _, leaf = name.rpartition("self_attn." if "self_attn." in name else "mlp." if "mlp." in name else "model.")
        cols = shape[1] if len(shape) == 2 else 1
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            start, end = rank * vocab, min((rank + 1) * vocab, arch.vocab_size)
            if start < end:
                yield Piece(name, Box(start, end, 0, hidden), name, 0, 0)
        elif leaf.startswith("q_proj"):
            yield Piece(name, Box(rank * query, (rank + 1) * query, 0, cols), name.replace("q_proj", "qkv_proj"), 0, 0)
        elif leaf.startswith(("k_proj", "v_proj")):
            row = query + kv * leaf.startswith("v")
            yield Piece(name, Box(kv_row, kv_row + kv, 0, cols), name.replace(leaf[:6], "qkv_proj"), row, 0)
        elif leaf.startswith("experts."):
            _, expert, kind, _ = leaf.split(".")
            start, end = rank * expert_ffn, (rank + 1) * expert_ffn
            if kind == "down_proj":
                yield Piece(name, Box(0, hidden, start, end), f"{head}{EXPERTS}w2_weight", 0, 0, int(expert))
            else:
                row = expert_ffn * (kind == "up_proj")
                yield Piece(name, Box(start, end, 0, hidden), f"{head}{EXPERTS}w13_weight", row, 0, int(expert))
        elif leaf.startswith(("gate_proj", "up_proj")):
            target = f"{head}mlp.gate_up_proj.weight"
            yield Piece(name, Box(rank * ffn, (rank + 1) * ffn, 0, hidden), target, ffn * leaf.startswith("up"), 0)
        elif leaf.startswith(("o_proj", "down_proj")):
            width = heads if leaf.startswith("o") else ffn
            yield Piece(name, Box(0, hidden, rank * width, (rank + 1) * width), name, 0, 0)
        else:
            yield Piece(name, Box(0, shape[0], 0, cols), name, 0, 0)


def engine_destination(arch: ModelArch, tp: int, rank: int, dtype: torch.dtype) -> Destination:
    """Pieces, padding and shapes of one engine rank."""
    blank = {name: torch.zeros(shape, device="meta") for name, shape in hf_tensors(arch).items()}
    shapes = {name: Shape.of(tensor.shape) for name, tensor in engine_tensors(arch, blank, tp, rank).items()}
    pieces = tuple(engine_pieces(arch, tp, rank))
    fills = []
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in shapes:
            filled = sum(piece.box.rows for piece in pieces if piece.local == name)
            if filled < shapes[name].rows:
                fills.append(Fill(name, 0, Box(filled, shapes[name].rows, 0, arch.hidden_size), 0.0))
    return Destination(pieces, tuple(fills), shapes, dtype)


def layout_mistakes(destination: Destination, arch: ModelArch, checkpoint: Mapping[str, Tensor], tp: int, rank: int) -> list[str]:
    """Parameters that an engine's description of itself and the oracle make differently of a checkpoint, padding included."""
    want = engine_tensors(arch, dict(checkpoint), tp, rank)
    mistakes = sorted(want.keys() ^ destination.shapes.keys())
    for name, tensor in want.items():
        got = torch.full_like(tensor, float("nan"))
        for p in (p for p in destination.pieces if p.local == name):
            box = p.box
            source = as_2d(checkpoint[p.hf])[box.r0 : box.r1, box.c0 : box.c1]
            rectangle(got, p.slot, p.row, p.col, box.rows, box.cols).copy_(source)
        for fill in (fill for fill in destination.fills if fill.target == name):
            rectangle(got, fill.slot, fill.box.r0, fill.box.c0, fill.box.rows, fill.box.cols).fill_(fill.value)
        if not torch.equal(got, tensor):
            mistakes.append(name)
    return mistakes
