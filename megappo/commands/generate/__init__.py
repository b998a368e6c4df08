"""`megappo generate`: answer prompts with a checkpoint."""

from __future__ import annotations

import argparse
import sys

from megappo.commands.parser import AddCommand, positive_int


def add_command(command: AddCommand) -> None:
    generate = command("generate", main, "Answer prompts with a checkpoint.", config=None)
    generate.add_argument("model", metavar="MODEL", help="Hugging Face checkpoint directory")
    generate.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt (may be repeated; default: lines of stdin)")
    generate.add_argument("--max-tokens", type=positive_int, default=256, metavar="N", help="longest response")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    generate.add_argument("--tokenizer", metavar="PATH", help="tokenizer directory or SentencePiece .model (default: MODEL)")
    generate.add_argument("--engine", choices=("vllm", "megatron"), default="vllm", help="engine that generates")
    generate.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    generate.add_argument("--raw", action="store_true", help="do not apply the chat template")


def main(args: argparse.Namespace) -> int:
    from megappo.commands.generate.answer import answer
    from megappo.trainer.prepare.hub import local_model

    prompts = args.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    answers = answer(
        local_model("MODEL", args.model),
        prompts,
        tokenizer_path=None if args.tokenizer is None else local_model("--tokenizer", args.tokenizer),
        engine=args.engine,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        chat_template=not args.raw,
        dtype=args.dtype,
    )
    for prompt, text in zip(prompts, answers):
        print(f"{prompt}\n{text}\n" if len(prompts) > 1 else text)
    return 0
