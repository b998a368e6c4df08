"""Loaded before every test module: makes Triton's library functions interpretable in this process.

tl.sum, tl.max and the like are interpreted only if Triton was first imported under TRITON_INTERPRET=1; torch, Megatron-core and
vLLM import it some time, so nothing may come before this. With a GPU they stay compiled, and the interpreter's tests are for the
machine without one. Worlds that tests start do not inherit the variable.
"""

import importlib
import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("triton.language")
