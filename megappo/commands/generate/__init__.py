"""`megappo generate`: answer prompts with a checkpoint."""

from __future__ import annotations

import argparse
import sys

from megappo.commands.parser import AddCommand, positive_int


def add_command(command: AddCommand) -> None:
    generate = command("generate", main, "Answer prompts with a checkpoint.", config=None)
    generate.add_argument("model", metavar="MODEL", help="run (its export), Hugging Face checkpoint, or name on the hub")
    generate.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt (may be repeated; default: lines of stdin)")
    generate.add_argument(
        "--max-tokens", type=positive_int, metavar="N", help="longest response (default: 256, or as many as the model takes)"
    )
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    generate.add_argument("--tokenizer", metavar="PATH", help="tokenizer directory or SentencePiece .model (default: MODEL)")
    generate.add_argument("--engine", choices=("vllm", "megatron"), default="vllm", help="engine that generates")
    generate.add_argument("--dtype", choices=("bf16", "fp32"), help="of the weights (default: the checkpoint's)")
    generate.add_argument(
        "--template-args", metavar="YAML", help="variables of the chat template, as data.template_args: '{enable_thinking: false}'"
    )
    generate.add_argument("--raw", action="store_true", help="do not apply the chat template")


def main(args: argparse.Namespace) -> int:
    from megappo.commands.generate.inputs import find_model, find_tokenizer_of, template_args_of

    model = find_model(args.model)  # before the next import, which brings torch
    tokenizer = find_tokenizer_of(model, args.tokenizer)
    variables = template_args_of(args.template_args or "{}")
    prompts = args.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    from megappo.commands.generate.answer import Texts, answer

    answers = answer(
        model,
        prompts,
        Texts(not args.raw, tokenizer, variables),
        engine=args.engine,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        dtype=args.dtype,
    )
    for prompt, text in zip(prompts, answers):
        print(f"{prompt}\n{text}\n" if len(prompts) > 1 else text)
    return 0
