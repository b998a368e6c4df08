"""Make preference pairs of a fine-tuned model's own answers to the quickstart's sums: a right answer against a wrong one.

python scripts/preference_pairs.py runs/pipeline
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from scripts.arithmetic import ALPHABET

SAMPLES = 4  # of each sum
# At 1 hardly a sum without a carry has a wrong answer, and a reward model learns that a carry is always better.
TEMPERATURE = 1.5
MAX_TOKENS = 6  # `rollout.max_response_tokens` of configs/quickstart.yaml
FILES = {"train.jsonl": "pairs.jsonl", "eval.jsonl": "held_out_pairs.jsonl"}
"""Sums -> their pairs. No sum is in both."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="has sft/export and data/, which receives " + ", ".join(FILES.values()))
    directory = parser.parse_args().directory
    sums = {name: read(directory / "data" / name) for name in FILES}
    prompts = [record["prompt"] for records in sums.values() for record in records for _ in range(SAMPLES)]
    answers = iter(sample(directory / "sft", prompts))
    for name, records in sums.items():
        pairs = list(pairs_of(records, [[next(answers) for _ in range(SAMPLES)] for _ in records]))
        path = directory / "data" / FILES[name]
        path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
        print(f"{path}: {len(pairs):,} pairs of {len(records):,} sums")


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def sample(run: Path, prompts: Sequence[str]) -> list[str]:
    """Return an answer to each prompt by `megappo generate`; equal prompts have different seeds."""
    options = ["--raw", "--temperature", str(TEMPERATURE), "--max-tokens", str(MAX_TOKENS)]
    command = [sys.executable, "-P", "-m", "megappo", "generate", str(run), *options]
    done = subprocess.run(command, input="".join(f"{prompt}\n" for prompt in prompts), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)  # it has said why
    return answers_of(done.stdout, prompts)


def answers_of(text: str, prompts: Sequence[str]) -> list[str]:
    """Read what `megappo generate` prints for several prompts: the prompt, its answer and an empty line for each."""
    lines = text.splitlines()
    if lines[0::3] != list(prompts) or any(lines[2::3]) or len(lines) != 3 * len(prompts):
        raise SystemExit(f"megappo generate printed {len(lines)} lines that are not {len(prompts)} prompts with their answers")
    return lines[1::3]


def pairs_of(records: Sequence[dict[str, str]], answers: Sequence[Sequence[str]]) -> Iterator[dict[str, str]]:
    """Yield {prompt, chosen, rejected} for each wrong answer to a sum that was answered rightly too; equal ones count once."""
    for record, sampled in zip(records, answers, strict=True):
        right = record["answer"]
        if right not in sampled:
            continue
        for answer in dict.fromkeys(sampled):
            # An empty answer is no response, and an id that stands for no character has no text to be learned.
            if answer and set(answer) <= set(ALPHABET) and answer != right:
                yield {"prompt": record["prompt"], "chosen": right, "rejected": answer}


if __name__ == "__main__":
    main()
