"""Run every benchmark of the ops, and compare them with their bars at the end: `python scripts/bench_ops.py [--check] ...`.

The bars compare figures of the same run, at the default shapes; missing figures are "not measured". `scripts/bench_step.py`
compares whole PPO steps with those of the references.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench.bars import bars
from scripts.bench.cli import run
from scripts.bench_gae import GAE, TOKEN_ADVANTAGES
from scripts.bench_linear_logprob import LINEAR_LOGPROB
from scripts.bench_linear_loss import LINEAR_LOSS
from scripts.bench_logprob import LOGPROB
from scripts.bench_losses import POLICY_LOSS, VALUE_LOSS, WHITEN_APPLY

BENCHMARKS = [LOGPROB, LINEAR_LOGPROB, LINEAR_LOSS, GAE, TOKEN_ADVANTAGES, POLICY_LOSS, VALUE_LOSS, WHITEN_APPLY]


def main(argv: Sequence[str] | None = None) -> int:
    return run("bench_ops", "All ops, and the bars that they have to reach.", BENCHMARKS, argv, bars)


if __name__ == "__main__":
    sys.exit(main())
