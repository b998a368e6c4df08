"""Layouts that fit a model, and the sizes that messages recommend."""

import dataclasses

import pytest

from megappo.models.arch import check_cp, check_tp, padded_vocab, vocab_shard
from megappo.models.hf_config import arch_of
from tests.models.cases import LLAMA


def test_tp_that_does_not_fit_names_the_largest_that_does():
    arch = arch_of({**LLAMA, "num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96, "intermediate_size": 128})
    check_tp(arch, 2)
    with pytest.raises(
        ValueError, match="tp 4 neither divides the 6 KV heads nor is a multiple of them.*largest tp that works is 2"
    ):
        check_tp(arch, 4)
    with pytest.raises(ValueError, match="tp 3 does not divide the 128 MLP columns.*largest tp that works is 2"):
        check_tp(arch, 3)


def test_tp_may_be_a_multiple_of_the_kv_heads():
    arch = arch_of({**LLAMA, "num_attention_heads": 12, "num_key_value_heads": 2, "hidden_size": 96})
    for tp, copies, held in ((1, 1, 2), (2, 1, 2), (4, 2, 4), (12, 6, 12)):
        check_tp(arch, tp)
        assert (arch.kv_copies(tp), arch.as_held(tp).num_kv_heads) == (copies, held)
    with pytest.raises(ValueError, match="tp 3 neither divides the 2 KV heads nor.*largest tp that works is 12"):
        check_tp(arch, 3)
    check_cp(arch, 4, 3, "local")  # a tp rank has 3 heads and one KV head, which its cp ranks share


def test_vocabulary_is_padded_to_equal_rows():
    arch = arch_of(LLAMA)
    assert [padded_vocab(arch, tp) for tp in (1, 2, 4, 131)] == [131, 132, 132, 131]
    assert [vocab_shard(arch, 2, rank) for rank in range(2)] == [(0, 66), (66, 65)]
    assert [vocab_shard(arch_of({**LLAMA, "vocab_size": 5}), 4, rank) for rank in range(4)] == [(0, 2), (2, 2), (4, 1), (6, 0)]


# query heads, KV heads, tp, cp, sizes that work or None if it fits
CP_CASES = [
    (12, 4, 2, 2, None),
    (12, 4, 2, 3, "1, 2, 6"),
    (12, 4, 1, 8, "1, 2, 4, 12"),
    (8, 2, 2, 4, None),
    (12, 6, 1, 4, "1, 2, 3, 6, 12"),
]


@pytest.mark.parametrize("heads, kv_heads, tp, cp, sizes", CP_CASES)
def test_cp_that_does_not_fit_the_heads_names_the_sizes_that_do(heads, kv_heads, tp, cp, sizes):
    arch = arch_of({**LLAMA, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 96})
    check_cp(arch, tp, cp, "transformer_engine")  # a ring has no such limit
    if sizes is None:
        check_cp(arch, tp, cp, "local")
        return
    wanted = rf"cp {cp} does not divide.*{heads // tp} attention heads and {kv_heads // tp} KV.*that work are {sizes}$"
    for limited, implementation in ((arch, "local"), (dataclasses.replace(arch, sliding_window=4), "transformer_engine")):
        with pytest.raises(ValueError, match=wanted):
            check_cp(limited, tp, cp, implementation)
