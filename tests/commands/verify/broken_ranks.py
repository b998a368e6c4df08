"""Measuring ranks with a fault, in place of `megappo.commands.verify.rank`: `python -m tests.commands.verify.broken_ranks FOLDER
NAME...`."""

from __future__ import annotations

import sys

from megappo.runtime.libraries import quiet_libraries


def forget_sequence_parallel_sums() -> None:
    """Norms, biases and the value head keep the gradient of their own part of the tokens; acts under sequence parallel only."""
    import megatron.core.distributed  # noqa: F401  (the package shows the function of this name in place of the module)

    module = sys.modules["megatron.core.distributed.finalize_model_grads"]
    assert callable(module._allreduce_non_tensor_model_parallel_grads)
    module._allreduce_non_tensor_model_parallel_grads = lambda *_, **__: None


if __name__ == "__main__":
    quiet_libraries()
    forget_sequence_parallel_sums()
    from megappo.commands.verify.world import main

    main(sys.argv[1], sys.argv[2:])
