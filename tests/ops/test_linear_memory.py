"""Peak memory of the linear ops against full logits, in a process of its own: its resident set, native allocations included."""

import ctypes
from pathlib import Path

import pytest
import torch

from tests.ops.linear_calls import linear_logprob
from tests.ops.test_linear_loss import clipped_linear_loss
from tests.worlds import spawn_world

TOKENS, HIDDEN, VOCAB = 640, 64, 32000
CLEAR_REFS = Path("/proc/self/clear_refs")
M_MMAP_THRESHOLD = -3


def resident(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def peak_of(run):
    """Bytes that `run` touched at most beyond what was resident before and what it returns."""
    run()  # what the libraries allocate once
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR_REFS.write_text("5")
    before = resident("VmRSS")
    held = run()
    return resident("VmHWM") - before - sum(x.numel() * x.element_size() for x in held)


def naive_logprob(h, w, target):
    log_p = (h @ w.t()).float().log_softmax(1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def measure(rank):
    # freed memory goes back at once, so that the resident set is what is alive
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    target = torch.randint(0, VOCAB, (TOKENS,))
    g = torch.randn(2, TOKENS)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        h, w = torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_(), torch.randn(VOCAB, HIDDEN).to(dtype).requires_grad_()

        def both(function):
            logprob, entropy = function(h, w, target)
            return logprob, entropy, *torch.autograd.grad((logprob * g[0] + entropy * g[1]).sum(), (h, w))

        def fused():
            return torch.autograd.grad(clipped_linear_loss(h, w, target, g[0], g[1], g[0].abs(), None, **where).loss, (h, w))

        where = {"vocab_start": 0, "num_valid": VOCAB}
        found[dtype] = {
            "naive": peak_of(lambda: both(naive_logprob)),
            "blocks": peak_of(lambda: both(lambda *inputs: linear_logprob(*inputs, None, **where))),
            "kept": peak_of(lambda: both(lambda *inputs: linear_logprob(*inputs, None, keep_logits=True, **where))),
            "fused": peak_of(fused),
        }
    return found


@pytest.fixture(scope="module")
def peaks():
    if not CLEAR_REFS.exists():
        pytest.skip("the kernel cannot reset the peak of the resident set")
    return spawn_world(measure, 1, timeout_s=180.0)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_need_less_than_a_tenth_of_the_naive_peak(peaks, dtype):
    logits = TOKENS * VOCAB * 4
    assert peaks[dtype]["naive"] > 3 * logits
    assert peaks[dtype]["blocks"] < 0.1 * peaks[dtype]["naive"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_logits_are_the_one_large_tensor_and_seen_by_the_measurement(peaks, dtype):
    logits = TOKENS * VOCAB * 4
    assert logits < peaks[dtype]["kept"] < 1.5 * logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_loss_holds_a_chunk_of_logits_and_the_weight_gradient(peaks, dtype):
    chunk, dweight = 512 * VOCAB * 4, VOCAB * HIDDEN * 4
    assert peaks[dtype]["fused"] < 1.8 * chunk + 2 * dweight
