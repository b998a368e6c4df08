"""Run every benchmark of the ops, and compare them with their bars at the end: `python benchmarks/bench_ops.py [--check] ...`.

The bars compare figures of the same run, at the default shapes; missing figures are "not measured". `benchmarks/bench_step.py`
compares whole PPO steps with those of the references.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_gae import GAE, TOKEN_ADVANTAGES
from benchmarks.bench_linear_logprob import LINEAR_LOGPROB
from benchmarks.bench_linear_loss import LINEAR_LOSS
from benchmarks.bench_logprob import LOGPROB
from benchmarks.bench_losses import POLICY_LOSS, VALUE_LOSS
from benchmarks.harness.bars import bars
from benchmarks.harness.cli import run

BENCHMARKS = [LOGPROB, LINEAR_LOGPROB, LINEAR_LOSS, GAE, TOKEN_ADVANTAGES, POLICY_LOSS, VALUE_LOSS]


def main(argv: Sequence[str] | None = None) -> int:
    return run("bench_ops", "All ops, and the bars that they have to reach.", BENCHMARKS, argv, bars)


if __name__ == "__main__":
    sys.exit(main())
