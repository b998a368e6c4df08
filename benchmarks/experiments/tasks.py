"""Tasks of the experiments: data, a model that imitates a pupil who forgets to carry, a configuration, an environment.

All numbers are written from the last digit on. Each task is the quickstart's idea at another length: supervised training learns
the pupil's mistakes, and a reward at the end of the response is all that tells them.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megappo.data.tokenizers import Tokenizer
    from megappo.rollout.turn import Turn
    from megappo.rollout.types import RolloutEngine

ROOT = Path(__file__).resolve().parents[2]
REWARDS = ROOT / "benchmarks" / "experiments" / "rewards.py"
NUM_EVAL, FORGOTTEN_CARRIES, SEED = 500, 0.7, 0
END_OF_TURN = "+"
DIGITS, COUNT = 4, 6  # of a number; numbers in an answer of the task long
SMALLER = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
"""What a model of a quarter of the quickstart's parameters has other than it."""
SHORT_WARM_UP = {"trainer.batch_size": 128, "trainer.steps": 200}
STEPS = 24
COMMON: Mapping[str, Any] = {
    "run.num_ranks": 1,
    "policy.parallel.tp": 1,
    "critic.parallel.pp": 1,
    "critic.micro_batch_tokens": 16384,
    "critic.warmup": None,
    "rollout.kv_cache_gib": 0.05,
    "trainer.steps": STEPS,
    "trainer.eval_every": 60,  # after the last step alone; a multiple of every `rollout.push_every`
    "trainer.eval_before": False,
    "checkpoint.save_every": "never",
    "checkpoint.export_at_end": False,
    "telemetry.trackers": [],
    "telemetry.trajectories_every": 0,
    "telemetry.summary_every": 0,
}
"""Over configs/quickstart.yaml, in every task: one rank, no warm-up of the critic, nothing on disk but metrics."""


@dataclass(frozen=True)
class Task:
    """samples: responses of a step. write: makes train.jsonl, eval.jsonl and sft.jsonl in a folder. keys: of the configuration over
    COMMON. wrap(engine, folder, tokenizer): what samples around the rollout engine. model: settings other than those of the
    quickstart's model. sft: keys of its warm-up. goal: mean reward that the tables count steps to.
    """

    title: str
    samples: int
    write: Callable[[Path], object]
    keys: Mapping[str, Any] = field(default_factory=dict)
    wrap: Callable[[RolloutEngine, Path, Tokenizer], RolloutEngine] | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    sft: Mapping[str, Any] = field(default_factory=dict)
    goal: float = 0.9


# -------------------------------------------------------------------------------------------------------------------- data


def write_sums(folder: Path) -> None:
    """The quickstart's data."""
    from scripts import quickstart_model

    quickstart_model.write_sums(folder)


def write_doublings(folder: Path) -> None:
    """`=7430` is answered by 2 x 347, twice that, and so on: COUNT numbers in a row."""

    def record(number: int, forgets: Callable[[], bool]) -> dict[str, str]:
        text = written(number)
        for _ in range(COUNT):
            text += doubling(text[-DIGITS:], forgets)
        return {"prompt": f"={text[:DIGITS]}", "answer": text[DIGITS:]}

    write_files(folder, "doublings", FORGOTTEN_CARRIES, record)


def write_two_turns(folder: Path) -> None:
    """`=7430` is answered by 2 x 347 and END_OF_TURN; `=5120` comes back, and is answered by 2 x 215."""

    def record(number: int, forgets: Callable[[], bool]) -> dict[str, str]:
        second = written(random.Random(f"second number of {number}").randrange(10**DIGITS))
        first = doubling(written(number), forgets)
        answer = f"{first}{END_OF_TURN}={second}{doubling(second, forgets)}"
        return {"prompt": f"={written(number)}", "then": f"={second}", "answer": answer}

    # Both sums must be right: more forgotten carries would leave hardly a reward to begin with.
    write_files(folder, "two turns", 0.5, record)


def write_files(folder: Path, name: str, forgotten: float, record: Callable[[int, Callable[[], bool]], dict[str, str]]) -> None:
    """Write a record for every number, `record(number, forgets)`: its pupil asks `forgets` at every carry. Answers are right, but
    a share `forgotten` of the carries is missing in sft.jsonl."""
    rng = random.Random(f"{name} {SEED}")
    numbers = list(range(10**DIGITS))
    rng.shuffle(numbers)
    held_out, train = numbers[:NUM_EVAL], numbers[NUM_EVAL:]
    records = {
        "eval": [record(number, lambda: False) for number in held_out],
        "train": [record(number, lambda: False) for number in train],
        "sft": [record(number, lambda: rng.random() < forgotten) for number in train],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for file, lines in records.items():
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def written(number: int) -> str:
    """The number from its last digit on."""
    return f"{number:0{DIGITS}d}"[::-1]


def doubling(text: str, forgets: Callable[[], bool]) -> str:
    """Twice the number, of as many digits, by a pupil who may forget any carry."""
    digits, carry = "", 0
    for digit in map(int, text):
        digits += str((2 * digit + (carry and not forgets())) % 10)
        carry = 2 * digit // 10
    return digits


# ------------------------------------------------------------------------------------------------------------- environment


@cache
def observations(files: tuple[Path, ...]) -> dict[str, str]:
    """Prompt -> the text that comes back after the first turn."""
    lines = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    return {line["prompt"]: line["then"] for line in lines}


def second_number(engine: RolloutEngine, folder: Path, tokenizer: Tokenizer) -> RolloutEngine:
    """The environment of `write_two_turns`: it names the second number."""
    from megappo.rollout.turns import TurnsRollout

    second = observations((folder / "train.jsonl", folder / "eval.jsonl"))

    def environment(turn: Turn) -> list[int]:
        text = tokenizer.decode(turn.context.tolist())  # the prompt and the first turn
        return tokenizer.encode(second[text[: 1 + DIGITS]])

    return TurnsRollout(engine, environment, max_turns=2, turn_tokens=6, max_prompt_tokens=16)


TASKS: Mapping[str, Task] = {
    "sums": Task("sums of the quickstart, answers of 4 tokens", 256, write_sums, goal=0.8),
    "long": Task(
        f"{COUNT} doublings in a row, answers of {DIGITS * COUNT + 1} tokens: the share of numbers that are right, told at the end",
        128,
        write_doublings,
        {
            "rollout.max_response_tokens": DIGITS * COUNT + 2,
            "reward.parts": [{"path": str(REWARDS), "function": "doubled", "args": {"digits": DIGITS, "count": COUNT}}],
            "algorithm.lam": 0.95,
            "policy.optimizer.lr": 5e-4,
        },
        None,
        SMALLER,
        SHORT_WARM_UP,
        0.3,
    ),
    "turns": Task(
        "a doubling in each of two turns, the second number told between them: 1 if both are right, told at the end",
        128,
        write_two_turns,
        {
            "rollout.max_response_tokens": 16,
            "rollout.stop": [END_OF_TURN],
            "reward.parts": [{"path": str(REWARDS), "function": "both_turns"}],
            "algorithm.lam": 0.95,
            "policy.optimizer.lr": 5e-4,
        },
        second_number,
        SMALLER,
        SHORT_WARM_UP,
        0.5,
    ),
}


# ------------------------------------------------------------------------------------------------------------------- model


def prepare(folder: Path, name: str) -> Path:
    """Make data, tokenizer and warmed-up model of a task below `folder`, unless they are there; returns their folder."""
    files, task = folder / name, TASKS[name]
    if (files / "sft" / "export").exists():
        return files
    from scripts import quickstart_model
    from scripts.arithmetic import ALPHABET, train_tokenizer

    config = quickstart_model.llama_config()
    config.update(dict(task.model))
    quickstart_model.write_model(files / "model", config)
    train_tokenizer(files / "model", ALPHABET)
    task.write(files / "data")
    keys = {
        "run.output_dir": files,
        "run.num_ranks": 1,
        "policy.parallel.tp": 1,
        "policy.model": files / "model",
        "data.train": files / "data" / "sft.jsonl",
        "data.tokenizer": files / "model" / "tokenizer.model",
        **task.sft,
    }
    command = [sys.executable, "-m", "megappo", "sft", str(ROOT / "configs" / "quickstart_sft.yaml")]
    subprocess.run([*command, *(f"{key}={value}" for key, value in keys.items())], check=True, cwd=ROOT)
    return files
