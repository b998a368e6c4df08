"""Prompts of one source by the keys of a configuration."""

from __future__ import annotations

from dataclasses import replace

from megappo.config.schema import DataConfig
from megappo.data.prompts import PromptFormat, PromptSet, build_prompts
from megappo.data.sources import read_source
from megappo.data.tokenizers import Tokenizer


def load_prompts(data: DataConfig, source: str, tokenizer: Tokenizer, limit: int | None = None) -> PromptSet:
    """Load the prompts of one source, formatted and filtered by the keys of `data`."""
    read = read_source(source)
    built = build_prompts(
        read.records,
        tokenizer,
        source=source,
        prompt_key=data.prompt_key,
        answer_key=data.answer_key,
        prompt_format=PromptFormat(data.chat_template, data.system_prompt, data.prompt_suffix),
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong,
        limit=limit,
        lines=read.lines,
    )
    return replace(built, source_sha256=read.sha256)
