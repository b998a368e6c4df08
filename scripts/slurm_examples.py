"""Render the job scripts of scripts/slurm/ from the template of `megappo launch`; a test holds them equal to it.

python scripts/slurm_examples.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megappo.commands.launch.script import Job, render_by_hand

EXAMPLES = ROOT / "scripts" / "slurm"


def examples() -> dict[str, str]:
    jobs = {
        "one_node.sbatch": (Job(1, 8, gpus=True), "One node of 8 GPUs, one task per rank."),
        "many_nodes_srun.sbatch": (Job(8, 8, gpus=True), "8 nodes of 8 GPUs, one task per rank: srun starts all 64 ranks."),
        "many_nodes_torchrun.sbatch": (
            Job(8, 8, gpus=True, launcher="torchrun"),
            "8 nodes of 8 GPUs, one task per node: torchrun starts the ranks of each, c10d rendezvous.",
        ),
    }
    return {name: render_by_hand(job, f"scripts/slurm/{name}", purpose) for name, (job, purpose) in jobs.items()}


if __name__ == "__main__":
    for file_name, text in examples().items():
        (EXAMPLES / file_name).write_text(text, encoding="utf-8")
