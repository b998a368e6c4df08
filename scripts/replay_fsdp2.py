"""Replay twenty PPO steps under engine fsdp2 in several layouts: `python scripts/replay_fsdp2.py` (a minute or two on 2 cores).

Every step has the recorded samples of tests/parity, whose suite keeps one layout of these; the table is the one of docs/engines.md:
the largest relative difference to one rank of Megatron's engine of the policy's and the critic's parameters after the last step,
and of the curves of all steps. Needs the test requirements (`scripts/setup_env.sh --test`).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

LAYOUTS = {1: ["fsdp2"], 2: ["fsdp2", "fsdp2 tp2 sp", "fsdp2 cp2"]}
"""Ranks -> layouts, by their names in tests/parity/matrix.py."""
BASELINE = "megatron"


def world(rank: int, folder: str) -> dict[str, Any]:
    """Name of a layout -> what was measured over all steps."""
    from megappo.platform import cpu
    from megappo.verify.recording import record_rollouts
    from tests.parity.matrix import FSDP2, FSDP2_CASES, SEQUENCES, VOCABULARY, measure_case, roles_of
    from tests.parity.replay import REPLAY, STEPS

    cpu.install()
    size = dist.get_world_size()
    rollouts = record_rollouts(STEPS, sequences=SEQUENCES, vocab_size=VOCABULARY)
    changes: dict[str, Any] = {BASELINE: {}} if size == 1 else {}
    changes |= {name: FSDP2[name] for name in LAYOUTS[size]}
    found = {}
    for name, change in changes.items():
        with roles_of(FSDP2_CASES.get(name, {})) as roles:
            found[name] = measure_case(folder, roles, {**REPLAY, **change}, rollouts, gradients=False)
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n\n")[0]).parse_args()  # there is nothing to choose
    from scripts.parity import after_all_steps, markdown
    from scripts.replay_fsdp2 import world as run
    from tests.parity.matrix import write_models
    from tests.parity.replay import STEPS
    from tests.worlds import spawn_world

    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), "llama")
        measured = {size: spawn_world(run, size, folder, timeout_s=900)[0] for size in LAYOUTS}
    expected, rows = measured[1][BASELINE], []
    for size, names in LAYOUTS.items():
        for name in names:
            rows.append((f"{name}, {size} rank{'s' * (size > 1)}", *after_all_steps(measured[size][name], expected)))
    print(f"{STEPS} steps, llama, fp32, CPU; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print(markdown((f"after {STEPS} steps", "policy", "critic", "curves"), rows))


if __name__ == "__main__":
    main()
