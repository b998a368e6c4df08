"""Architectures of the tests of memory: a llama of any size, and experts for it."""

from megappo.models.arch import ModelArch, MoeArch, Rope

MOE = MoeArch(8, 2, 96, True)


def llama(layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=384, vocab=64, tied=False, **more):
    return ModelArch(
        "llama", "LlamaForCausalLM", layers, hidden, heads, kv_heads, head_dim, ffn, vocab, 4096, tied, 1e-5, Rope(), **more
    )
