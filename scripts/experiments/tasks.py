"""Tasks of the experiments: data, a model that imitates a pupil who forgets to carry, a configuration, an environment.

All numbers are written from the last digit on. Each task is the quickstart's idea at another length: supervised training learns
the pupil's mistakes, and a reward at the end of the response is all that tells them.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megappo.data.tokenizers import Tokenizer
    from megappo.rollout.turns import Turn
    from megappo.rollout.types import RolloutEngine

ROOT = Path(__file__).resolve().parents[2]
REWARDS = ROOT / "scripts" / "experiments" / "rewards.py"
NUM_EVAL, FORGOTTEN_CARRIES, SEED = 500, 0.7, 0
END_OF_TURN = "+"
DIGITS, COUNT = 4, 6  # of the task long
SMALLER = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
"""What a model of a quarter of the quickstart's parameters has other than it."""
STEPS = 30
COMMON: Mapping[str, Any] = {
    "run.num_ranks": 1,
    "policy.parallel.tp": 1,
    "critic.parallel.pp": 1,
    "critic.micro_batch_tokens": 16384,
    "critic.warmup_steps": 0,
    "rollout.kv_cache_gib": 0.05,
    "trainer.steps": STEPS,
    "trainer.eval_every": STEPS,
    "trainer.eval_before": False,
    "checkpoint.save_strategy": "no",
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
    """`7430=` is answered by 2 x 347, twice that, and so on: COUNT numbers in a row."""
    rng = random.Random(f"doublings {SEED}")
    starts = list(range(10**DIGITS))
    rng.shuffle(starts)

    def record(number: int, forgets: Callable[[], bool]) -> dict[str, str]:
        text = written(number, DIGITS)
        for _ in range(COUNT):
            text += doubling(text[-DIGITS:], forgets)
        return {"prompt": f"{text[:DIGITS]}=", "answer": text[DIGITS:]}

    write_files(folder, rng, starts, record)


def write_two_sums(folder: Path) -> None:
    """`743+8=` is answered by its sum and `+`; `6=` comes back, and is answered by that sum and 6, modulo 1000."""
    rng = random.Random(f"two sums {SEED}")
    problems = [(a, b, rng.randrange(10)) for a in range(1000) for b in range(10)]
    rng.shuffle(problems)

    def record(problem: tuple[int, int, int], forgets: Callable[[], bool]) -> dict[str, str]:
        a, b, c = problem
        first = added(written(a, 3), b, forgets)
        second = added(first, c, forgets)
        return {
            "prompt": f"{written(a, 3)}+{b}=",
            "then": f"{c}=",
            "answer": second,
            "demonstration": f"{first}{END_OF_TURN}{c}={second}",
        }

    write_files(folder, rng, problems, record)


def write_files(folder: Path, rng: random.Random, problems: Sequence[Any], record: Callable[..., dict[str, str]]) -> None:
    """record(problem, forgets): a record whose pupil asks `forgets` at every carry. Answers are right but in sft.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out, train = problems[:NUM_EVAL], problems[NUM_EVAL:]
    records = {
        "eval": [record(problem, lambda: False) for problem in held_out],
        "train": [record(problem, lambda: False) for problem in train],
        "sft": [record(problem, lambda: rng.random() < FORGOTTEN_CARRIES) for problem in train],
    }
    for name, lines in records.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def written(number: int, digits: int) -> str:
    """The number from its last digit on."""
    return f"{number:0{digits}d}"[::-1]


def doubling(text: str, forgets: Callable[[], bool]) -> str:
    """Twice the number, of as many digits, by a pupil who may forget any carry."""
    digits, carry = "", 0
    for digit in map(int, text):
        digits += str((2 * digit + (carry and not forgets())) % 10)
        carry = 2 * digit // 10
    return digits


def added(text: str, other: int, forgets: Callable[[], bool]) -> str:
    """The number plus one of a digit, of as many digits, by a pupil who may forget any carry."""
    digits, carry = "", other
    for place, digit in enumerate(map(int, text)):
        total = digit + (carry if place == 0 or (carry and not forgets()) else 0)
        digits, carry = digits + str(total % 10), total // 10
    return digits


# ------------------------------------------------------------------------------------------------------------- environment


@cache
def observations(files: tuple[Path, ...]) -> dict[str, str]:
    """Prompt -> the text that comes back after the first turn."""
    lines = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    return {line["prompt"]: line["then"] for line in lines}


def two_turns(engine: RolloutEngine, folder: Path, tokenizer: Tokenizer) -> RolloutEngine:
    """The environment of `write_two_sums`: it names the second number."""
    from megappo.rollout.turns import TurnsRollout

    second = observations((folder / "train.jsonl", folder / "eval.jsonl"))

    def environment(turn: Turn) -> list[int]:
        text = tokenizer.decode(turn.context.tolist())
        return tokenizer.encode(second[text.partition("=")[0] + "="])

    return TurnsRollout(engine, environment, max_turns=2, turn_tokens=6, max_prompt_tokens=16)


TASKS: Mapping[str, Task] = {
    "sums": Task("sums of the quickstart, 4 tokens", 256, write_sums),
    "long": Task(
        f"{COUNT} doublings in a row, {DIGITS * COUNT} tokens, one score at the end",
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
        {"trainer.batch_size": 128, "trainer.steps": 200},
    ),
    "turns": Task(
        "two sums, the second number told after the first sum",
        256,
        write_two_sums,
        {
            "rollout.max_response_tokens": 16,
            "rollout.stop": [END_OF_TURN],
            "reward.parts": [{"path": str(REWARDS), "function": "last_sum"}],
            "algorithm.lam": 0.95,
            "policy.optimizer.lr": 5e-4,
        },
        two_turns,
        SMALLER,
    ),
}


# ------------------------------------------------------------------------------------------------------------------- model


def prepare(folder: Path, name: str) -> Path:
    """Make data, tokenizer and warmed-up model of a task below `folder`, unless they are there; returns their folder."""
    files, task = folder / name, TASKS[name]
    if (files / "sft" / "export").exists():
        return files
    from megappo.data.arithmetic import ALPHABET, train_tokenizer
    from scripts import quickstart_model

    config = quickstart_model.llama_config()
    config.update(task.model)
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
        "data.response_key": "demonstration" if task.wrap else "answer",
        **task.sft,
    }
    command = [sys.executable, "-m", "megappo", "sft", str(ROOT / "configs" / "quickstart_sft.yaml")]
    subprocess.run([*command, *(f"{key}={value}" for key, value in keys.items())], check=True, cwd=ROOT)
    return files
