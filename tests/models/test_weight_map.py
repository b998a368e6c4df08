"""The pieces describe every element of the checkpoint and of every rank exactly once. Oracle: slices of whole HF tensors."""

import time
from collections import Counter

import pytest
import torch

from megappo.models.arch import ModelArch, Rope, padded_vocab
from megappo.models.pieces import as_2d
from megappo.models.weight_map import hf_tensors, local_shapes, megatron_pieces
from tests.models.cases import place


def arch_of(family, tied=False, vocab=131, **changes):
    facts = dict(
        family=family,
        architecture="X",
        num_layers=4,
        hidden_size=48,
        num_heads=8,
        num_kv_heads=4,
        head_dim=10,
        ffn_size=72,
        vocab_size=vocab,
        max_positions=64,
        tied_embeddings=tied,
        norm_eps=1e-6,
        rope=Rope(),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )
    return ModelArch(**{**facts, **changes})


ARCHS = [arch_of(f, tied) for f in ("llama", "qwen2", "qwen3", "mistral", "ministral3") for tied in (False, True)]
ARCHS += [arch_of("qwen2", num_kv_heads=2), arch_of("qwen3", num_kv_heads=1)]  # fewer than ranks
LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 4)]
HEADS = [False, True]


def whole_tensors(arch, value_head):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in hf_tensors(arch, value_head).items()}


def fill(arch, tensors, tp, pp, rank, stage, value_head, pieces=None):
    """Local tensors of one rank from the pieces; counts how often each element is written."""
    shapes = local_shapes(arch, *place(tp, pp, rank, stage), value_head)
    local, writes = ({n: torch.zeros(s) for n, s in shapes.items()} for _ in range(2))
    for piece in pieces if pieces is not None else megatron_pieces(arch, *place(tp, pp, rank, stage), value_head):
        box = piece.box
        at = slice(piece.row, piece.row + box.rows), slice(piece.col, piece.col + box.cols)
        as_2d(local[piece.local])[at] = as_2d(tensors[piece.hf])[box.r0 : box.r1, box.c0 : box.c1]
        as_2d(writes[piece.local])[at] += 1
    return local, writes


def expected_local(arch, tensors, tp, pp, rank, stage, value_head):
    """The same by Megatron's layout written out: chunks of whole tensors."""

    def padded(name):
        whole = torch.zeros(padded_vocab(arch, tp), arch.hidden_size)
        whole[: arch.vocab_size] = tensors[name]
        return whole.chunk(tp)[rank]

    out = {}
    if stage == 0:
        out["embedding.word_embeddings.weight"] = padded("model.embed_tokens.weight")
    for index in range(arch.num_layers // pp):
        layer_number = stage * (arch.num_layers // pp) + index
        prefix, local = f"model.layers.{layer_number}.", f"decoder.layers.{layer_number}"
        hf = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in hf:
                held = max(arch.num_kv_heads, tp)
                q, k, v = (hf[f"self_attn.{x}_proj.{kind}"] for x in "qkv")
                k, v = (  # a KV head for each group of query heads, which may be the same
                    [heads.chunk(arch.num_kv_heads)[group * arch.num_kv_heads // held] for group in range(held)] for heads in (k, v)
                )
                groups = [torch.cat(parts) for parts in zip(q.chunk(held), k, v)]
                per_rank = held // tp
                mine = torch.cat(groups[rank * per_rank : (rank + 1) * per_rank])
                out[f"{local}.self_attention.linear_qkv.{kind}"] = mine
        gate, up = (hf[f"mlp.{x}_proj.weight"].chunk(tp)[rank] for x in ("gate", "up"))
        layer = {
            "input_layernorm.weight": hf["input_layernorm.weight"],
            "pre_mlp_layernorm.weight": hf["post_attention_layernorm.weight"],
            "self_attention.linear_proj.weight": hf["self_attn.o_proj.weight"].chunk(tp, dim=1)[rank],
            "mlp.linear_fc1.weight": torch.cat((gate, up)),
            "mlp.linear_fc2.weight": hf["mlp.down_proj.weight"].chunk(tp, dim=1)[rank],
        }
        if arch.qk_norm:
            layer |= {f"self_attention.{x}_layernorm.weight": hf[f"self_attn.{x}_norm.weight"] for x in "qk"}
        out |= {f"{local}.{name}": tensor for name, tensor in layer.items()}
    if stage == pp - 1:
        out["decoder.final_layernorm.weight"] = tensors["model.norm.weight"]
        if value_head:
            out["value_head.weight"] = tensors["score.weight"]
        elif pp > 1 or not arch.tied_embeddings:
            out["output_layer.weight"] = padded("model.embed_tokens.weight" if arch.tied_embeddings else "lm_head.weight")
    return out


@pytest.mark.parametrize("arch", ARCHS, ids=lambda a: f"{a.family}{'_tied' * a.tied_embeddings}")
def test_pieces_fill_every_rank_as_megatron_lays_it_out(arch):
    for tp, pp in LAYOUTS:
        for value_head in HEADS:
            tensors = whole_tensors(arch, value_head)
            for stage in range(pp):
                for rank in range(tp):
                    local, writes = fill(arch, tensors, tp, pp, rank, stage, value_head)
                    expected = expected_local(arch, tensors, tp, pp, rank, stage, value_head)
                    assert {n: t.shape for n, t in local.items()} == {n: t.shape for n, t in expected.items()}
                    for name, tensor in expected.items():
                        assert torch.equal(local[name], tensor), name
                        padding = (
                            0
                            if "embedding" not in name and "output" not in name
                            else max(0, (rank + 1) * local[name].size(0) - arch.vocab_size) * arch.hidden_size
                        )
                        assert writes[name].max() == 1 and int((writes[name] == 0).sum()) == padding, name


@pytest.mark.parametrize("arch", ARCHS, ids=lambda a: f"{a.family}{'_tied' * a.tied_embeddings}")
def test_a_tp_group_covers_every_hf_element_once(arch):
    """Replicated tensors (norms, value head) once per rank, KV heads once per copy, all others once; a tied embedding once more on
    the last stage.
    """
    for tp, pp in LAYOUTS:
        for value_head in HEADS:
            counts = {name: as_2d(torch.zeros(shape)) for name, shape in hf_tensors(arch, value_head).items()}
            for stage in range(pp):
                for rank in range(tp):
                    for piece in megatron_pieces(arch, *place(tp, pp, rank, stage), value_head):
                        counts[piece.hf][piece.box.r0 : piece.box.r1, piece.box.c0 : piece.box.c1] += 1
            for name, count in counts.items():
                tied_copy = name == "model.embed_tokens.weight" and arch.tied_embeddings and pp > 1 and not value_head
                copies = tp if "norm" in name or name == "score.weight" else 1 + tied_copy
                copies = max(1, tp // arch.num_kv_heads) if "k_proj" in name or "v_proj" in name else copies
                assert bool((count == copies).all()), name


@pytest.mark.parametrize("fault", ["swap gate and up", "shift a piece", "drop a piece", "write twice"])
def test_the_oracle_detects_wrong_pieces(fault):
    """Negative control: each fault must differ from the expected local tensors or be written not exactly once."""
    arch = arch_of("llama")
    tensors = whole_tensors(arch, False)
    pieces = megatron_pieces(arch, *place(2, 1, 0, 0))
    if fault == "swap gate and up":
        swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        kinds = [piece.hf.split(".")[-2] for piece in pieces]
        pieces = [p._replace(hf=p.hf.replace(kind, swap[kind])) if kind in swap else p for p, kind in zip(pieces, kinds)]
    elif fault == "shift a piece":
        at = next(i for i, p in enumerate(pieces) if "q_proj" in p.hf)
        box = pieces[at].box
        pieces[at] = pieces[at]._replace(box=box._replace(r0=box.r0 + 1, r1=box.r1 + 1))
    elif fault == "drop a piece":
        del pieces[3]
    else:
        pieces.append(pieces[3])
    local, writes = fill(arch, tensors, 2, 1, 0, 0, False, pieces)
    expected = expected_local(arch, tensors, 2, 1, 0, 0, False)
    wrong = [name for name, tensor in expected.items() if not torch.equal(local[name], tensor)]
    uneven = [name for name in writes if writes[name].max() > 1 or writes[name].min() < 1]
    assert wrong or uneven


def test_layouts_that_do_not_fit_are_refused():
    arch = arch_of("llama")
    with pytest.raises(ValueError, match="tp 16 does not divide the 8 attention heads .* largest tp that works is 8"):
        megatron_pieces(arch, *place(16, 1, 0, 0))
    with pytest.raises(ValueError, match="4 layers are not divisible by pp 3"):
        local_shapes(arch, *place(1, 3, 0, 0))


def test_a_rank_may_hold_padding_only():
    arch = arch_of("llama", vocab=5, num_kv_heads=4)
    counts = Counter(piece.local for rank in range(4) for piece in megatron_pieces(arch, *place(4, 1, rank, 0)))
    assert counts["output_layer.weight"] == 3  # rows 2+2+1+0


def test_llama_7b_has_its_published_number_of_parameters():
    arch = arch_of(
        "llama", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=32, head_dim=128, ffn_size=11008, vocab=32000
    )
    assert sum(torch.Size(s).numel() for s in local_shapes(arch, *place(1, 1, 0, 0)).values()) == 6_738_415_616


def test_pieces_of_70b_on_64_ranks_take_less_than_a_second_of_processor_time():
    arch = arch_of(
        "llama", num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=128, ffn_size=28672, vocab=128256
    )
    start = time.process_time()
    for tp, pp in ((8, 4), (1, 1)):
        for rank in range(64):
            megatron_pieces(arch, *place(tp, pp, rank % tp, rank // tp % pp))
    assert time.process_time() - start < 2.0, "for two layouts"
