"""Runs with trajectories that tests write by hand: every number is known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megappo.telemetry.jsonl import write_lines
from megappo.telemetry.trajectories.files import FORMAT

EOS = 2


def record(tokens: Sequence[int] = (5, 6, EOS), **changes: Any) -> dict[str, Any]:
    """A record with these response tokens, whose log-probs are -1, -2, ... and whose reference gives each 0.25 less."""
    count = len(tokens)
    logprob = [-float(i + 1) for i in range(count)]
    row = {
        "format": FORMAT,
        "sample": 0,
        "id": "train.jsonl#0",
        "prompt": "1+1=",
        "response": "".join(f"w{token} " for token in tokens if token != EOS),
        "answer": "2",
        "score": 1.0,
        "parts": {"exact_match": 1.0},
        "recipe": "",
        "finish": "stop",
        "version": 0,
        "kl_coef": 0.01,
        "prompt_tokens": [1, 4],
        "prompt_texts": ["<s>", "1+1="],
        "response_tokens": list(tokens),
        "response_texts": ["</s>" if token == EOS else f"w{token} " for token in tokens],
        "images": {},
        "special_tokens": [1, EOS],
        "response_mask": [1] * count,
        "logprob": logprob,
        "rollout_logprob": logprob,
        "ref_logprob": [number - 0.25 for number in logprob],
        "teacher_logprob": [number + 0.125 for number in logprob],
        "entropy": [0.5] * count,
        "value": [0.5] * count,
        "reward": [0.0] * count,
        "advantage": [(-1.0) ** i for i in range(count)],
        "returns": [1.0] * count,
    }
    return row | changes


def write_run(folder: Path, steps: dict[int, Sequence[dict[str, Any]]]) -> Path:
    (folder / "trajectories").mkdir(parents=True, exist_ok=True)
    for step, rows in steps.items():
        write_lines(folder / "trajectories" / f"step_{step:06d}.jsonl", [{"step": step, **row} for row in rows])
    return folder


WORDS = "We first add the tens , then ones carry so that is 7 + 5 = 12 therefore answer \\boxed{ 42 } .".split()
CODE = [
    "\n\n",
    "```python",
    "\n",
    "def",
    " add",
    "(a",
    ",",
    " b",
    "):",
    "\n",
    "    ",
    "return",
    " a",
    " +",
    " b",
    "\n",
    "```",
    "\n",
]


def long_run(folder: Path, *, steps: int = 6, per_step: int = 16, length: int = 120, seed: int = 0) -> Path:
    """Responses as of a larger model: prose, code, loops, cut ones, characters over several tokens, a tool's output."""
    draw = random.Random(seed)
    return write_run(
        folder,
        {10 * step: [_long_record(draw, step, index, length) for index in range(per_step)] for step in range(1, steps + 1)},
    )


def _long_record(draw: random.Random, step: int, index: int, length: int) -> dict[str, Any]:
    count = draw.randint(length // 4, length)
    texts = [" " + draw.choice(WORDS) for _ in range(count)]
    kind = index % 4
    if kind == 1:
        texts[5:5] = CODE
    if kind == 2:
        texts += ["", "", "", "😀", " naïve", "", "漢", "\u202e abc", "\t", "x"]
    is_cut = kind == 3
    if is_cut:
        texts += [" so", " that", " is"] * draw.randint(5, 25)
    else:
        texts.append("<|im_end|>")
    tokens = [EOS if text == "<|im_end|>" else 10 + sum(text.encode()) % 30000 for text in texts]
    mask = [0 if kind == 0 and 10 <= i < 16 else 1 for i in range(len(tokens))]
    logprob = [-(abs(draw.gauss(0, 0.8)) ** 2) for _ in tokens]
    ref = [number - draw.gauss(0.02 * step, 0.15) for number in logprob]
    score = 0.0 if is_cut else float(draw.random() < 0.3 + 0.1 * step)
    value = [score * i / len(tokens) + draw.gauss(0.2, 0.1) for i in range(len(tokens))]
    numbers = {
        "logprob": logprob,
        "rollout_logprob": [number + draw.gauss(0, 0.005) for number in logprob],
        "ref_logprob": ref,
        "entropy": [abs(draw.gauss(1.2 * (1 - i / len(tokens)) + 0.3, 0.3)) for i in range(len(tokens))],
        "value": value,
        "reward": [-0.01 * (a - b) for a, b in zip(logprob, ref)][:-1] + [score],
        "advantage": [draw.gauss(score - 0.5, 0.7) for _ in tokens],
        "returns": [score] * len(tokens),
    }
    return record(
        tokens,
        sample=index,
        id=f"gsm8k/train.jsonl#{step * 100 + index // 4}",
        prompt="Natalia sold clips to 48 of her friends in April, and then she sold half as many in May. How many in all?",
        answer="72",
        response="".join(texts),
        response_texts=texts,
        response_mask=mask,
        prompt_tokens=[1, 3, 50, 51, 52],
        prompt_texts=["<s>", "<|im_start|>", "user\n", "Natalia sold clips …", " How many in all?\n"],
        special_tokens=[1, EOS, 3],
        score=score,
        finish="length" if is_cut else "stop",
        version=10 * step - 1,
        parts={"math_verify": score, "format": float(kind != 3)},
        **{name: [round(x, 5) if seen else None for x, seen in zip(one, mask)] for name, one in numbers.items()},
    )
