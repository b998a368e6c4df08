"""The quickstart's problems: right, disjoint, reproducible, and exactly representable by the tokenizer trained for them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megappo.data.tokenizers import load_tokenizer
from scripts.arithmetic import ALPHABET, ArithmeticTask, train_tokenizer, write_arithmetic

TASKS = [ArithmeticTask(), ArithmeticTask(10, 60, "+-"), ArithmeticTask(0, 50, "*-+")]


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def key_of(prompt: str) -> tuple:
    """The problem without the order of commuting operands, read off the text."""
    a, symbol, b = re.fullmatch(r"(\d+)([-+*])(\d+)=", prompt).groups()
    return (symbol, a, b) if symbol == "-" else (symbol, *sorted((int(a), int(b))))


@pytest.mark.parametrize("task", TASKS)
def test_files_hold_right_distinct_and_disjoint_problems(tmp_path: Path, task: ArithmeticTask) -> None:
    files = write_arithmetic(tmp_path, 1500, 500, 300, seed=1, task=task)
    train, held_out, sft = read(files.train), read(files.eval), read(files.sft)
    assert [len(train), len(held_out), len(sft)] == [1500, 500, 300]
    for record in train + held_out:
        assert record["answer"] == str(eval(record["prompt"].rstrip("="), {"__builtins__": {}}))  # Python is the oracle
    for records in (train, held_out, sft):
        assert len({r["prompt"] for r in records}) == len(records)
    held_out_keys = {key_of(r["prompt"]) for r in held_out}
    assert len(held_out_keys) == 500
    assert not held_out_keys & {key_of(r["prompt"]) for r in train + sft}
    assert {r["prompt"] for r in sft} <= {r["prompt"] for r in train}
    operands = [int(n) for r in train for n in re.findall(r"\d+", r["prompt"])]
    assert task.lowest <= min(operands) and max(operands) <= task.highest
    assert {c for r in train for c in r["prompt"] if c in "+-*"} == set(task.operations)


def test_exchanged_operands_count_as_the_same_problem() -> None:
    """Negative control of the disjointness check above: a naive split by text would let 1+2= and 2+1= part."""
    assert key_of("1+2=") == key_of("2+1=") and key_of("1-2=") != key_of("2-1=")


def test_all_problems_of_a_task_are_enumerated_once() -> None:
    prompts = [p["prompt"] for group in ArithmeticTask(3, 5, "+-").problems() for p in group]
    assert sorted(prompts) == sorted(f"{a}{s}{b}=" for s in "+-" for a in (3, 4, 5) for b in (3, 4, 5))


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    def written(name: str, seed: int) -> list[bytes]:
        files = write_arithmetic(tmp_path / name, 200, 50, 20, seed)
        return [files.train.read_bytes(), files.eval.read_bytes(), files.sft.read_bytes()]

    assert written("a", 0) == written("b", 0)
    assert all(x != y for x, y in zip(written("a", 0), written("c", 1)))


def test_every_problem_round_trips_character_by_character(tmp_path: Path) -> None:
    """No dummy prefix, no lost, merged or unknown character: one id each, in prompts and in responses on their own."""
    tokenizer = load_tokenizer(train_tokenizer(tmp_path))
    task = ArithmeticTask(0, 99, "+-*")
    for group in task.problems():
        for problem in group:
            for text in problem.values():
                ids = tokenizer.encode(text)
                assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == len(ALPHABET) + 4
    assert tokenizer.encode(ALPHABET) == list(range(4, 4 + len(ALPHABET)))
    # Negative control: a character outside the alphabet does not survive.
    assert tokenizer.decode(tokenizer.encode("7 7")) != "7 7"


def test_training_the_tokenizer_twice_writes_the_same_bytes(tmp_path: Path) -> None:
    assert train_tokenizer(tmp_path / "a").read_bytes() == train_tokenizer(tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda d: write_arithmetic(d, 100, 10, 5, 0, ArithmeticTask(0, 5)), "widen the operands or ask for fewer"),
        (lambda d: write_arithmetic(d, 100, 10, 101, 0), "num_sft=101 is more than num_train=100"),
        (lambda d: ArithmeticTask(5, 4), "need 0 <= lowest <= highest"),
        (lambda d: ArithmeticTask(0, 4, "+/"), "choose from +-*"),
        (lambda d: train_tokenizer(d, "1 2"), "distinct characters without spaces"),
        (lambda d: train_tokenizer(d, "121"), "distinct characters without spaces"),
    ],
)
def test_impossible_tasks_are_refused(tmp_path: Path, call, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        call(tmp_path)
    assert says in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_padding_and_last_digit_first_change_how_a_sum_is_written() -> None:
    task = ArithmeticTask(7, 10, padded=True, last_digit_first=True)
    problems = {p["prompt"]: p["answer"] for group in task.problems() for p in group}
    assert problems["07+08="] == "51" and problems["10+10="] == "02" and problems["07+10="] == "71"


@pytest.mark.parametrize(
    "prompt, without", [("47+38=", "75"), ("12+34=", "46"), ("61+83=", "44"), ("55+55=", "0"), ("7+95=", "92"), ("0+0=", "0")]
)
def test_forgotten_carries_add_digit_by_digit(prompt: str, without: str) -> None:
    assert ArithmeticTask().without_carries({"prompt": prompt, "answer": "?"})["answer"] == without
    assert (
        ArithmeticTask(last_digit_first=True).without_carries({"prompt": prompt, "answer": "?"})["answer"]
        == str(int(without))[::-1]
    )


def test_only_demonstrations_forget_carries_and_as_often_as_asked(tmp_path: Path) -> None:
    files = write_arithmetic(tmp_path, 4000, 500, 4000, seed=0, forgotten_carries=0.6)

    def wrong(path: Path) -> float:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        with_carry = [
            r for r in rows if ArithmeticTask().without_carries(r)["answer"] != str(sum(map(int, r["prompt"][:-1].split("+"))))
        ]
        return sum(r["answer"] != str(sum(map(int, r["prompt"][:-1].split("+")))) for r in with_carry) / len(with_carry)

    assert wrong(files.train) == wrong(files.eval) == 0.0
    # 2,700 sums with a carry: three standard deviations of a share of 0.6 are 0.03.
    assert abs(wrong(files.sft) - 0.6) < 0.03
    with pytest.raises(ValueError, match="operations"):
        write_arithmetic(tmp_path, 10, 5, 5, seed=0, task=ArithmeticTask(operations="-"), forgotten_carries=0.5)


def test_operands_of_different_ranges() -> None:
    task = ArithmeticTask(0, 99, highest_second=4, padded=True)
    problems = [p["prompt"] for group in task.problems() for p in group]
    assert len(problems) == len(set(problems)) == 100 * 5 and "07+4=" in problems and all(len(p) == 5 for p in problems)
