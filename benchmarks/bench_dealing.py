"""Simulate how replicas of an engine end that share a batch: `python benchmarks/bench_dealing.py`.

Responses of skewed lengths (log-normal over prompts, and again over the samples of one) are drawn by replicas that run a fixed
number at once; a decoding step takes longer the more run. `megappo/rollout/generation.py` itself decides who takes what: in the
batch's order, and longest first by the mean of as many earlier responses to the same prompt, and by the lengths themselves, which
nobody knows. Printed is when the last replica ends, as a multiple of the ideal: the work of all, divided. Means over seeds.
"""

from __future__ import annotations

import heapq
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness.model import Mistake, Parser
from megappo.rollout.generation import deal

PER_RUNNING = 0.5  # a step of a full replica takes 1.5 times as long as one of a single request
ORDERS = ("in order", "by earlier responses", "by the lengths themselves")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 2 for wrong arguments."""
    parser = Parser(prog="bench_dealing", description="When the last of the replicas ends that share a batch.")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--running", type=int, default=64, help="requests that a replica runs at once")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--seeds", type=int, default=10)
    try:
        args = parser.parse_args(argv)
        if min(args.replicas - 1, args.running, args.samples, args.seeds) < 1:
            raise Mistake("--replicas is at least 2, --running, --samples and --seeds at least 1")
    except Mistake as error:
        print(f"bench_dealing: {error}", file=sys.stderr)
        return 2
    print(report(args.replicas, args.running, args.samples, args.seeds))
    return 0


def drawn_lengths(num_prompts: int, samples: int, seed: int, over_prompts: float, over_samples: float) -> tuple[NDArray, NDArray]:
    """Lengths [prompts * samples] of a batch, and what the mean of as many earlier responses to each prompt predicts."""
    rng = numpy.random.default_rng(seed)
    of_prompt = rng.lognormal(6.0, over_prompts, (num_prompts, 1))
    now, earlier = (numpy.minimum(of_prompt * rng.lognormal(0.0, over_samples, (num_prompts, samples)), 8192) for _ in range(2))
    return now.reshape(-1).round().clip(1), earlier.mean(1).repeat(samples)


def end_of_last(lengths: NDArray, predicted: NDArray | None, replicas: int, size: int) -> float:
    """Time at which the last replica has answered its requests; a step takes 1 to 1 + PER_RUNNING."""
    told = None if predicted is None else predicted.tolist()
    deals = [deal(len(lengths), replicas, index, size, told) for index in range(replicas)]
    left = [[lengths[number] for number in one.own] for one in deals]
    waiting = iter(deals[0].shared)
    clocks = [(0.0, index) for index in range(replicas)]
    ended = 0.0
    while clocks:
        now, index = heapq.heappop(clocks)  # the replica that is free first takes first
        running = left[index]
        running += [lengths[number] for _, number in zip(range(size - len(running)), waiting)]
        if not running:
            ended = max(ended, now)
            continue
        steps = min(running)
        left[index] = [length - steps for length in running if length > steps]
        heapq.heappush(clocks, (now + steps * step_s(len(running), size), index))
    return ended


def step_s(running: int, size: int) -> float:
    return 1.0 + PER_RUNNING * running / size


def ideal(lengths: NDArray, replicas: int, size: int) -> float:
    """Time of full replicas among which the tokens are divided; no less than the longest response takes."""
    return max(lengths.sum() / replicas / size * step_s(size, size), lengths.max() * step_s(1, size))


def report(replicas: int, size: int, samples: int, seeds: int) -> str:
    """Format a line for each number of requests and skew."""
    choices: dict[str, Callable[[NDArray, NDArray], NDArray | None]] = dict(
        zip(ORDERS, (lambda now, earlier: None, lambda now, earlier: earlier, lambda now, earlier: now))
    )
    lines = [
        f"{replicas} replicas of {size} at once, {samples} samples of a prompt; end of the last / ideal, mean of {seeds} seeds",
        f"{'requests':>9}{'spread of prompts, samples':>28}" + "".join(f"{name:>27}" for name in ORDERS),
    ]
    for waves in (1.5, 2, 4, 8):
        for over_prompts, over_samples in ((0.5, 0.3), (1.0, 0.3), (0.5, 1.0)):
            count = int(waves * replicas * size) // samples * samples
            ends: dict[str, list[float]] = {name: [] for name in ORDERS}
            for seed in range(seeds):
                now, earlier = drawn_lengths(count // samples, samples, seed, over_prompts, over_samples)
                for name, choose in choices.items():
                    end = end_of_last(now, choose(now, earlier), replicas, size)
                    ends[name].append(end / ideal(now, replicas, size))
            figures = "".join(f"{statistics.mean(values):>27.2f}" for values in ends.values())
            lines.append(f"{count:>9}{over_prompts:>21}, {over_samples:<5}{figures}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
