"""The interpreter of the CUDA torch, or the reason why there is none."""

from __future__ import annotations

import pytest

from tests.host_cuda.world import python_of_cuda_torch


@pytest.fixture(scope="session")
def cuda_python() -> str:
    python, how = python_of_cuda_torch()
    if python is None:
        pytest.skip(how)
    return python
