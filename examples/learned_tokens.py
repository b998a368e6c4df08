"""Print a demonstration of `megappo sft` as its run reads it, the learned tokens in brackets: learned_tokens.py CONFIG [NUMBER]."""

from __future__ import annotations

import sys

from megappo.config.loading import load_config
from megappo.config.supervised import SftConfig
from megappo.data.cache import Cache
from megappo.data.sources import open_sources
from megappo.trainer.prepare.data import tokenizer_of
from megappo.trainer.prepare.supervised import demonstrations


def main(path: str, number: int = 0) -> None:
    config = load_config(path, (), SftConfig)
    tokenizer = tokenizer_of(config)
    examples = demonstrations(config, open_sources(config.data.train), tokenizer, Cache())
    one, begin = examples[number], 0
    print(f"{one.id}: {len(one.tokens)} tokens")
    for first, last in zip(one.spans[::2], one.spans[1::2]):
        print(tokenizer.decode_all(one.tokens[begin:first]), end="")
        print(f"[{tokenizer.decode_all(one.tokens[first:last])}]", end="")
        begin = last
    print(tokenizer.decode_all(one.tokens[begin:]))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
