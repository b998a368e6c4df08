"""Memory that a rank frees is there for its next allocation."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Pages of 16 blocks of 4 MiB that the system clears, when a process allocates them for the third time.
PROGRAM = """
import resource
from megappo.runtime.freed_memory import keep_freed_memory

{call}
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * (4 << 20) for _ in range(16)]
    cleared = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del blocks
print(cleared)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="malloc's rules are glibc's")
def test_pages_that_were_freed_are_not_cleared_anew() -> None:
    def cleared(call: str) -> int:
        return int(subprocess.check_output([sys.executable, "-c", PROGRAM.format(call=call)], text=True))

    assert cleared("assert keep_freed_memory()") < 100
    assert cleared("") > 5000, "by malloc's own rule 64 MiB are cleared again"
