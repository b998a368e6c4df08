"""Read what PPO saw: one response of a run token by token, and its advantages computed once more from rewards and values.

    python examples/read_trajectory.py runs/quickstart/ppo [--step 40] [--sample 0]

A run writes samples in full every `telemetry.trajectories_every` steps, one JSON object per line (docs/telemetry.md). Lists have
one entry per token of the response; value, logprob and reward at an entry are about this token given everything before it. Numbers
have five digits. `megappo trajectories RUN` shows all samples of a run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megappo.config.loading import load_config
from megappo.telemetry.jsonl import read_lines

COLUMNS = ("logprob", "ref_logprob", "value", "reward", "returns")


def returns_by_hand(sample: dict[str, Any], gamma: float, lam: float) -> list[float]:
    """Value plus GAE (Schulman et al. 2016), from the last token to the first; no value follows the last one."""
    advantage, next_value, returns = 0.0, 0.0, []
    for reward, value in zip(reversed(sample["reward"]), reversed(sample["value"])):
        advantage = reward + gamma * next_value - value + gamma * lam * advantage
        next_value = value
        returns.append(value + advantage)
    return returns[::-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="directory of a run")
    parser.add_argument("--step", type=int, help="default: the last that was written")
    parser.add_argument("--sample", type=int, default=0)
    args = parser.parse_args()
    files = sorted((args.run / "trajectories").glob("step_*.jsonl" if args.step is None else f"step_{args.step:06d}.jsonl"))
    if not files:
        raise SystemExit(f"{args.run} has no trajectories of that step: train with telemetry.trajectories_every=1")
    sample = read_lines(files[-1])[args.sample]
    algorithm = load_config(str(args.run / "config.yaml"), []).algorithm

    what = f"step {sample['step']}, {sample['id']}: {sample['prompt']!r} -> {sample['response']!r}"
    if sample["score"] is None:  # it was not trained on: no values, no returns
        print(f"{what}, no score ({sample['reason']})")
        return
    print(f"{what}, score {sample['score']:g}")
    columns = [name for name in COLUMNS if name in sample]
    print("  token" + "".join(f"{name:>13}" for name in columns))
    for index, text in enumerate(sample["response_texts"]):
        print(f"{text!r:>7}" + "".join(f"{sample[name][index]:13.5f}" for name in columns))

    if sample["finish"] == "length" and algorithm.bootstrap_truncated:
        print("cut by the length limit: its returns start from the value after the last token, which is not recorded")
        return
    lam = algorithm.lam if algorithm.lam_value is None else algorithm.lam_value
    mine = returns_by_hand(sample, algorithm.gamma, lam)
    worst = max((abs(a - b) for a, b in zip(mine, sample["returns"])), default=0.0)
    print(f"returns computed here differ from the run's by at most {worst:.1e}")


if __name__ == "__main__":
    main()
