"""Replay PPO steps under engine fsdp2 in several layouts: `python tests/parity/replay_fsdp2.py [--steps 20] [--ranks 1 2]`.

Every step has the recorded samples of tests/parity, whose suite replays two; the table is the one of docs/engines.md:
the largest relative difference to one rank of Megatron's engine of the policy's and the critic's parameters after the last step,
and of the curves of all steps; a minute or two on 2 cores. Needs the test requirements (`scripts/setup_env.sh --test`).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

LAYOUTS = {1: ["fsdp2"], 2: ["fsdp2", "fsdp2 tp2 sp", "fsdp2 cp2"]}
"""Ranks -> layouts, by their names in tests/parity/matrix.py."""
BASELINE = "megatron"


def world(rank: int, folder: str, steps: int) -> dict[str, Any]:
    """Name of a layout -> what was measured over all steps."""
    from megappo.commands.verify.recording import record_rollouts
    from megappo.parallel import cpu_patches
    from tests.parity.matrix import FSDP2, FSDP2_CASES, SEQUENCES, VOCABULARY, measure_case, roles_of
    from tests.parity.replay import REPLAY

    cpu_patches.install()
    size = dist.get_world_size()
    rollouts = record_rollouts(steps, sequences=SEQUENCES, vocab_size=VOCABULARY)
    changes: dict[str, Any] = {BASELINE: {}} if size == 1 else {}
    changes |= {name: FSDP2[name] for name in LAYOUTS[size]}
    found = {}
    for name, change in changes.items():
        with roles_of(FSDP2_CASES.get(name, {})) as roles:
            found[name] = measure_case(folder, roles, {**REPLAY, **change}, rollouts, gradients=False)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(LAYOUTS), choices=LAYOUTS, help="sizes of the worlds")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps {args.steps} is too few; at least 1")
    sizes = sorted({1, *args.ranks})  # the baseline is of one rank
    from tests.parity.matrix import write_models
    from tests.parity.page import after_all_steps, markdown
    from tests.parity.replay_fsdp2 import world as run
    from tests.worlds import spawn_world

    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), "llama")
        measured = {size: spawn_world(run, size, folder, args.steps)[0] for size in sizes}
    expected, rows = measured[1][BASELINE], []
    for size in sizes:
        for name in LAYOUTS[size]:
            rows.append((f"{name}, {size} rank{'s' * (size > 1)}", *after_all_steps(measured[size][name], expected)))
    print(f"{args.steps} steps, llama, fp32, CPU; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print(markdown((f"after {args.steps} steps", "policy", "critic", "curves"), rows))


if __name__ == "__main__":
    main()
