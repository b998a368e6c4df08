"""Loads the prompts of one source by the keys of a configuration, and opens their cache."""

from __future__ import annotations

from megappo.config.run_sections import RunConfig
from megappo.config.schema import DataConfig
from megappo.data.cache import Cache
from megappo.data.prompt_rows import PromptRules, prompts_of
from megappo.data.prompts import PromptFormat, PromptSet
from megappo.data.sources import open_source
from megappo.data.tokenizers import Tokenizer
from megappo.runtime.permissions import apply_permissions


def open_cache(run: RunConfig) -> Cache:
    """Open the cache of prepared data, with the file permissions of the run."""
    apply_permissions(run.permissions)
    return Cache()


def load_prompts(data: DataConfig, source: str, tokenizer: Tokenizer, cache: Cache, limit: int | None = None) -> PromptSet:
    """Load the prompts of one source, formatted and filtered by the keys of `data`. ValueError as `prompts_of`."""
    rules = PromptRules(
        data.prompt_key,
        data.answer_key,
        PromptFormat(data.chat_template, data.system_prompt, data.prompt_suffix),
        data.max_prompt_tokens,
        data.overlong,
        limit,
    )
    return prompts_of(open_source(source), tokenizer, rules, cache)
