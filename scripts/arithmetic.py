"""The quickstart's task: short sums a small model can learn, and the character tokenizer they are written in.
Training on the files is left to `megappo sft` and `megappo train`."""

from __future__ import annotations

import io
import json
import operator
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ALPHABET = "0123456789+-*="

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_COMMUTATIVE = "+*"


@dataclass(frozen=True)
class ArithmeticTask:
    """Problems `a∘b=` with lowest <= a, b <= highest and ∘ one of `operations`. Raises ValueError for an empty range, or other
    operations.
    With `padded` and `last_digit_first` a small model learns carries in a few hundred steps instead of a few thousand."""

    lowest: int = 0
    highest: int = 99
    operations: str = "+"
    """Characters of "+-*"."""
    highest_second: int | None = None
    """Largest b; None means `highest`."""
    padded: bool = False
    """Operands get leading zeros to equal widths."""
    last_digit_first: bool = False
    """Answers are written from the last digit on, as one adds on paper."""

    def __post_init__(self) -> None:
        if not 0 <= self.lowest <= self.highest:
            raise ValueError(f"operands {self.lowest}..{self.highest}: need 0 <= lowest <= highest")
        unknown = set(self.operations) - set(_OPERATIONS)
        if unknown or not self.operations:
            raise ValueError(f"operations {self.operations!r}: choose from {''.join(_OPERATIONS)}")

    def problems(self) -> list[list[dict[str, str]]]:
        """List every problem once as {prompt, answer}; the two orders of commuting operands form one group. Answers may be
        negative."""
        groups = []
        last = self.highest if self.highest_second is None else self.highest_second
        for symbol in dict.fromkeys(self.operations):
            # Operands of different ranges cannot be exchanged.
            exchange = symbol in _COMMUTATIVE and self.highest_second is None
            for a in range(self.lowest, self.highest + 1):
                for b in range(a if exchange else self.lowest, last + 1):
                    pairs = [(a, b), (b, a)] if exchange and a != b else [(a, b)]
                    groups.append([self._problem(x, symbol, y) for x, y in pairs])
        return groups

    def without_carries(self, problem: dict[str, str]) -> dict[str, str]:
        """Answer the same sum without carrying: 47+38 gives 75. Sums that need no carry stay right."""
        first, second = (operand[::-1] for operand in problem["prompt"].removesuffix("=").split("+"))
        digits = "".join(str((int(x) + int(y)) % 10) for x, y in zip_longest(first, second, fillvalue="0"))
        answer = str(int(digits[::-1]))
        return {**problem, "answer": answer[::-1] if self.last_digit_first else answer}

    def _problem(self, a: int, symbol: str, b: int) -> dict[str, str]:
        last = self.highest if self.highest_second is None else self.highest_second
        first_width, second_width = (len(str(self.highest)), len(str(last))) if self.padded else (1, 1)
        answer = str(_OPERATIONS[symbol](a, b))
        return {
            "prompt": f"{a:0{first_width}d}{symbol}{b:0{second_width}d}=",
            "answer": answer[::-1] if self.last_digit_first else answer,
        }


@dataclass(frozen=True)
class ArithmeticFiles:
    """Files of `write_arithmetic`."""

    train: Path
    """Prompts of PPO."""
    eval: Path
    """Problems that are in neither of the other files."""
    sft: Path
    """Demonstrations, drawn from the training problems."""


def write_arithmetic(
    directory: str | Path,
    num_train: int,
    num_eval: int,
    num_sft: int,
    seed: int,
    task: ArithmeticTask = ArithmeticTask(),
    forgotten_carries: float = 0.0,
) -> ArithmeticFiles:
    """Write train.jsonl, eval.jsonl and sft.jsonl, one {"prompt": "12+34=", "answer": "46"} per line. Same seed, same bytes.
    num_sft <= num_train. forgotten_carries: share of demonstrations (additions only) without carrying, so that imitation learns
    a mistake that only a reward can correct. Raises ValueError for too few problems, or arguments that break these rules."""
    rng = random.Random(f"arithmetic {seed}")  # a text, so that other generators of the same seed draw other numbers
    groups = task.problems()
    # Held out by group: a+b in training would give away b+a.
    rng.shuffle(groups)
    held_out = [rng.choice(group) for group in groups[:num_eval]]
    train = [problem for group in groups[num_eval:] for problem in group]
    rng.shuffle(train)
    if len(held_out) < num_eval or len(train) < num_train:
        raise ValueError(
            f"operands {task.lowest}..{task.highest} with {task.operations} give {len(held_out):,} held-out and {len(train):,} "
            f"training problems, not {num_eval:,} and {num_train:,}: widen the operands or ask for fewer"
        )
    if forgotten_carries and task.operations != "+":
        raise ValueError(f"forgotten_carries={forgotten_carries} needs operations='+', not {task.operations!r}")
    if num_sft > num_train:
        raise ValueError(
            f"num_sft={num_sft:,} is more than num_train={num_train:,}: demonstrations are drawn from the training problems"
        )
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    files = ArithmeticFiles(directory / "train.jsonl", directory / "eval.jsonl", directory / "sft.jsonl")
    _write(files.train, train[:num_train])
    _write(files.eval, held_out)
    demonstrations = rng.sample(train[:num_train], num_sft)  # never held-out problems
    _write(files.sft, [task.without_carries(d) if rng.random() < forgotten_carries else d for d in demonstrations])
    return files


def train_tokenizer(directory: str | Path, alphabet: str = ALPHABET) -> Path:
    """Train a character-level SentencePiece model of this alphabet and write it as `tokenizer.model`; returns its path.
    Ids: pad 0, bos 1, eos 2, unk 3, then the characters. Text is not normalised. ValueError for spaces or repeated characters."""
    from sentencepiece import SentencePieceTrainer

    # SentencePiece gives white space a piece of its own.
    if len(set(alphabet)) != len(alphabet) or any(c.isspace() for c in alphabet):
        raise ValueError(f"alphabet {alphabet!r}: need distinct characters without spaces")
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(_alphabet_sentences(alphabet)),
        model_writer=model,
        model_type="char",
        vocab_size=len(alphabet) + 4,  # pad, bos, eos, unk
        character_coverage=1.0,
        normalization_rule_name="identity",  # this and the next three lines: every text of the alphabet round-trips exactly
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        byte_fallback=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    path = Path(directory) / "tokenizer.model"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.getvalue())
    return path


def _alphabet_sentences(alphabet: str) -> Sequence[str]:
    # SentencePiece sorts pieces by frequency: earlier characters are more frequent, so ids follow the alphabet.
    return [alphabet[: i + 1] for i in range(len(alphabet))]


def _write(path: Path, records: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
