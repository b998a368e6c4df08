"""Oracle: the rotary modules of transformers, bit for bit."""

import itertools

import pytest
import torch

from megappo.models.hf_config import read_arch
from megappo.models.rope import inverse_frequencies, query_scale, rotary_table, rotate
from tests.models.checkpoints import CASES, write_checkpoint

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
EXTRA = {
    "yarn_attention_factor": ("llama", {**YARN, "attention_factor": 0.7}),
    "yarn_no_truncate": ("llama", {**YARN, "truncate": False}),
    "yarn_betas": ("qwen3", {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}),
    "yarn_no_original": ("qwen3", {"rope_type": "yarn", "factor": 2.0}),
    "theta": ("mistral", {"rope_type": "default", "rope_theta": 1e6}),
}


@pytest.mark.parametrize("name", [*CASES, *EXTRA])
def test_tables_equal_transformers_bit_for_bit(name, tmp_path):
    case, rope = EXTRA.get(name, (name, None))
    changes = {} if rope is None else {"rope_parameters": {"rope_theta": 10000.0, **rope}}
    model = write_checkpoint(tmp_path, case, **changes)
    arch = read_arch(tmp_path)
    positions = torch.arange(300)
    ropes = [((), arch.rope)]
    if arch.sliding_rope is not None:
        ropes = [(("full_attention",), arch.rope), (("sliding_attention",), arch.sliding_rope)]
    for dtype, (kind, rope) in itertools.product((torch.float32, torch.bfloat16), ropes):
        cos, sin = rotary_table(positions, *inverse_frequencies(rope, rope.channels or arch.head_dim), dtype)
        expected_cos, expected_sin = model.model.rotary_emb(torch.zeros(1, dtype=dtype), positions[None], *kind)
        assert torch.equal(cos[:, 0], expected_cos[0]) and torch.equal(sin[:, 0], expected_sin[0])


def test_query_scale_equals_transformers(tmp_path):
    from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

    write_checkpoint(tmp_path, "ministral3_tied")
    rope, positions = read_arch(tmp_path).rope, torch.arange(300)
    expected = get_llama_4_attn_scale(positions[None], rope.llama4_beta, rope.original_max_positions)[0, 0]
    assert torch.equal(query_scale(positions, rope, torch.float32)[:, 0], expected)
    assert expected[0] == 1 and expected[-1] > 1.2


def test_rotation_equals_complex_multiplication():
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    angles = torch.randn(5, 1, 4, dtype=torch.float64)
    both = torch.cat((angles, angles), dim=-1)
    out = rotate(x, both.cos(), both.sin())
    expected = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(out, torch.cat((expected.real, expected.imag), dim=-1))
