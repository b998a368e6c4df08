"""Triton's interpreter combines the elements of an `associative_scan` one by one, in Python: 10 ms each. This does it in log2(n)
steps over whole blocks, which an associative combination allows, so that kernels with scans can be tested at all."""

import numpy as np


def scan_in_steps(self, inputs):
    """Replaces `triton.runtime.interpreter.ScanOps.generic_scan` for blocks of one dimension."""
    (size,) = inputs[0].handle.data.shape
    place, data = np.arange(size), [x.handle.data for x in inputs]
    for step in (1 << k for k in range((size - 1).bit_length())):
        shifted = [np.roll(d, step) for d in data]
        before, here = ([self.to_tensor(d, x.dtype) for d, x in zip(part, inputs)] for part in (shifted, data))
        combined = self.combine_fn.fn(*before, *here)
        data = [np.where(place >= step, new.handle.data, old) for new, old in zip(combined, data)]
    return [self.to_tensor(d, x.dtype) for d, x in zip(data, inputs)]
