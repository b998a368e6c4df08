"""Measure what 8 bits make of a model's log-probs: `python benchmarks/int8_error.py MODEL DATA.jsonl --tokenizer FILE [--rows
500]`.

The linear layers of MODEL's layers are rounded as `lora.base_bits: 8` rounds them, and beside that to bf16. Log-probs of every
token of the rows of DATA (prompt and answer) are compared with those of the model as it is, all by transformers in fp32 on one
core. No adapter: these are the numbers of the reference, and of a policy at its first step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megappo.data.tokenizers import load_tokenizer
from megappo.models.int8_linear import dequantise, quantise

HEADER = ["| weights | error of the weights | mean difference of a log-prob | largest | same first choice |", "|" + "---|" * 5]


def in_8_bits(weight: Tensor) -> Tensor:
    return dequantise(*quantise(weight), torch.float32)


def in_bf16(weight: Tensor) -> Tensor:
    return weight.bfloat16().float()


@torch.no_grad()
def logprobs_of(model: torch.nn.Module, sequences: list[list[int]]) -> Tensor:
    """Log-probs of the whole vocabulary at every token but the first of each sequence, [tokens, V] fp64."""
    rows = [model(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1) for ids in sequences]
    return torch.cat(rows)


@torch.no_grad()
def rounded(path: str, how: Callable[[Tensor], Tensor]) -> tuple[torch.nn.Module, float]:
    """(the model with rounded linear layers, the error of their weights relative to their norm)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    error = norm = 0.0
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            weight = how(module.weight)
            error += float((weight - module.weight).square().sum())
            norm += float(module.weight.square().sum())
            module.weight.copy_(weight)
    return model, (error / norm) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("data", help="jsonl with prompt and answer")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--rows", type=int, default=500)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    tokenizer = load_tokenizer(args.tokenizer)
    rows = [json.loads(line) for line in Path(args.data).read_text(encoding="utf-8").splitlines()[: args.rows]]
    sequences = [tokenizer.encode(row["prompt"] + row["answer"]) for row in rows]
    chosen = torch.tensor([token for ids in sequences for token in ids[1:]])[:, None]
    whole = logprobs_of(transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32), sequences)
    print(f"{args.model}, {len(chosen):,} tokens of {len(rows)} rows of {args.data}\n")
    print("\n".join(HEADER))
    for name, how in (("bf16", in_bf16), ("8 bits", in_8_bits)):
        model, error = rounded(args.model, how)
        found = logprobs_of(model, sequences)
        difference = (found.gather(1, chosen) - whole.gather(1, chosen)).abs()
        same = float((found.argmax(-1) == whole.argmax(-1)).double().mean())
        print(f"| {name} | {error:.2%} | {float(difference.mean()):.1e} | {float(difference.max()):.1e} | {same:.2%} |")


if __name__ == "__main__":
    main()
