"""Every Triton kernel compiles to machine code of a GPU, on a machine without one."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def kernels_in_the_source():
    """Names of the functions under @triton.jit that are launched, as `_name[grid](...)`."""
    launched = set()
    for file in (ROOT / "megappo/ops/triton").glob("*.py"):
        calls = (node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
        launched |= {call.value.id for call in calls if isinstance(call, ast.Subscript) and isinstance(call.value, ast.Name)}
    return launched


def test_every_kernel_that_is_launched_compiles():
    pytest.importorskip("triton")
    environ = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(ROOT / "build/triton")}
    command = [sys.executable, "-m", "tests.ops.compile_triton", "90"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = {line.split()[1] for line in done.stdout.splitlines()}
    assert {"_policy_loss", "_value_loss"} <= compiled
    assert compiled == kernels_in_the_source()
