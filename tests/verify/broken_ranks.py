"""Measuring ranks with a fault, in place of `megappo.verify.rank`: `python -m tests.verify.broken_ranks FOLDER NAME...`.

VERIFY_FAULT names the fault. Both act only where a layout gives them something to break, or in the run that has one.
"""

from __future__ import annotations

import os
import sys


def forget_sequence_parallel_sums() -> None:
    """Norms, biases and the value head keep the gradient of their own part of the tokens."""
    import megatron.core.distributed  # noqa: F401  (the package shows the function of this name in place of the module)

    module = sys.modules["megatron.core.distributed.finalize_model_grads"]
    assert callable(module._allreduce_non_tensor_model_parallel_grads)
    module._allreduce_non_tensor_model_parallel_grads = lambda *_, **__: None


def forget_right_shift() -> None:
    """Values stand at the token that they follow and not at the one that they precede, except on one rank."""
    from megappo.trainer import roles

    aligned = roles.align_values
    if os.environ["WORLD_SIZE"] != "1":
        roles.align_values = lambda raw, cu_seqlens: (raw, aligned(raw, cu_seqlens)[1])


FAULTS = {function.__name__: function for function in (forget_sequence_parallel_sums, forget_right_shift)}

if __name__ == "__main__":
    from megappo.platform.quiet import quiet_libraries

    quiet_libraries()
    FAULTS[os.environ["VERIFY_FAULT"]]()
    from megappo.verify.world import main

    main(sys.argv[1], sys.argv[2:])
