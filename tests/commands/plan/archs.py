"""Architectures of the tests of memory: a llama of any size, and experts for it."""

from dataclasses import replace

from megappo.models.arch import Clamp, Delta, Latent, ModelArch, MoeArch, Rope

MOE = MoeArch(8, 2, 96, True)
SIGMOIDS = MoeArch(8, 2, 96, True, sigmoid=True, groups=4, top_groups=2, scaling=2.5, shared_size=96)


def llama(layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=384, vocab=64, tied=False, **more):
    return ModelArch(
        "llama", "LlamaForCausalLM", layers, hidden, heads, kv_heads, head_dim, ffn, vocab, 4096, tied, 1e-5, Rope(), **more
    )


def glm(layers, *shape):
    """Experts by sigmoids beside shared ones, and llama's attention with everything that it may have."""
    return replace(llama(layers, *shape), family="glm4_moe", qk_norm=True, qkv_bias=True, rope=Rope(channels=16), moe=SIGMOIDS)


def deepseek(layers, *shape):
    """The same experts and latent attention."""
    latent = dict(latent=Latent(48, 32, 32, 16, 24), head_dim=24, rope=Rope(channels=16), softmax_scale=0.1)
    arch = llama(layers, *shape)
    return replace(arch, family="deepseek_v3", num_kv_heads=arch.num_heads, moe=SIGMOIDS, **latent)


def oss(layers, *shape):
    """Sinks, whose scores stay in memory, a window in every other layer, biases and clamped experts."""
    window = dict(sliding_window=40, sliding_layers=tuple(layer % 2 == 0 for layer in range(layers)))
    moe = replace(MOE, clamp=Clamp(1.702, 7.0))
    return replace(llama(layers, *shape), family="gpt_oss", qkv_bias=True, output_bias=True, keeps_scores=True, moe=moe, **window)


def gemma(layers, *shape):
    """Layers with a window in turn, and norms round every block."""
    slides = tuple(layer % 2 == 0 for layer in range(layers))
    windows = dict(sliding_window=16, sliding_layers=slides, sliding_rope=Rope(theta=100.0))
    others = dict(qk_norm=True, centred_norms=True, sandwich=True, activation="gelu_pytorch_tanh", embedding_scale=10.0)
    return replace(llama(layers, *shape), family="gemma3_text", tied_embeddings=True, softmax_scale=0.1, **windows, **others)


def gated(layers, *shape):
    """Attention with gates of its output, and experts beside a gated shared one."""
    moe = replace(MOE, shared_size=96, shared_gate=True)
    others = dict(qk_norm=True, centred_norms=True, output_gate=True, rope=Rope(channels=8))
    return replace(llama(layers, *shape), family="qwen3_next", moe=moe, **others)


def delta_nets(layers, *shape):
    """The same with a gated delta net in every layer."""
    return replace(gated(layers, *shape), delta=Delta(2, 4, 24, 16, 4, (True,) * layers, by_key_head=True))
