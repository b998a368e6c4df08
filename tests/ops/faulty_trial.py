"""`megappo.ops.trial` with kernels that have faults: TEST_FAULTS = "policy_loss cpp hangs, whiten_apply cpp aborts"."""

import os
import signal
import sys
import time

import torch

from megappo.ops import dispatch, trial

ORDER = os.environ.get("TEST_ORDER")
FAULTS = {tuple(words[:2]): words[2] for words in map(str.split, os.environ["TEST_FAULTS"].split(","))}


def spoiled(result):
    first = result if isinstance(result, torch.Tensor) else next(x for x in result if x.dim())
    first.flatten()[first.numel() // 2] += 0.03 * first.abs().amax()
    return result


def make_unusable(*_):
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore about it")


def with_fault(fault, right):
    def run(*args):
        if fault == "hangs":
            time.sleep(3600)
        if fault == "aborts":
            os.abort()
        if fault == "segfaults":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "raises":
            raise torch.OutOfMemoryError("CUDA out of memory")
        result = right(*args)
        if fault == "leaves":  # the device unusable, which the next wait for it is told
            trial.wait_for = make_unusable
        if fault == "spoils_in_place":
            spoiled(args[0])
        return spoiled(result) if fault == "differs" else result

    return run


right_lookup = dispatch._lookup


def lookup(candidate, name):
    found = right_lookup(candidate, name)
    return with_fault(FAULTS[name, candidate], found) if (name, candidate) in FAULTS else found


if __name__ == "__main__":
    dispatch._lookup = lookup
    if ORDER:
        dispatch.ORDER["cpu"] = tuple(ORDER.split())
    trial.main(sys.argv[1])
