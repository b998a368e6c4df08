"""Notes on what a reward cannot read: of the records once, then of the cache, and anew when anything that decides them changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megappo.config.errors import ConfigError
from megappo.config.loading import validated
from megappo.config.reward_sections import RewardConfig
from megappo.data.cache import Cache
from megappo.data.prompt_rows import PromptRules, StoredPrompts, prompts_of
from megappo.data.prompts import Prompt, PromptFormat, PromptSet
from megappo.data.sources import open_source
from megappo.data.tokenizers import load_tokenizer
from megappo.trainer.prepare.reward_notes import reward_notes
from megappo.trainer.prepare.reward_parts import load_parts
from scripts.arithmetic import train_tokenizer

STRICT = validated({"parts": [{"name": "gsm8k_strict"}]}, RewardConfig)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train_tokenizer(tmp_path)
    return tmp_path


def stored(folder: Path, *answers: str) -> PromptSet:
    file = folder / "t.jsonl"
    file.write_text("".join(json.dumps({"prompt": "1=", "answer": answer}) + "\n" for answer in answers))
    rules = PromptRules("prompt", "answer", PromptFormat(chat_template=False), 6)
    return prompts_of(open_source(str(file)), load_tokenizer(folder), rules, Cache(folder / "cache"))


def notes(prompts: PromptSet, cache: Cache, reward: RewardConfig = STRICT) -> list[str]:
    return reward_notes(reward, load_parts(reward), {"data.train": prompts}, cache)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every prompt that is made of its row."""
    read, make = [], StoredPrompts._make

    def counting(self: StoredPrompts, index: int) -> Prompt:
        read.append(index)
        return make(self, index)

    monkeypatch.setattr(StoredPrompts, "_make", counting)
    return read


def test_the_second_start_reads_no_record(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, read = stored(folder, "#### 7", "seven"), count_reads(monkeypatch)
    first = notes(prompts, Cache(folder / "cache"))
    assert "gsm8k_strict cannot read 1 of 2 answers" in first[0] and read
    read.clear()
    assert notes(prompts, Cache(folder / "cache")) == first and not read


def test_another_reward_and_other_data_are_read_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = count_reads(monkeypatch)
    notes(stored(folder, "#### 7", "seven"), Cache(folder / "cache"))
    other: dict[str, Any] = {"parts": [{"name": "gsm8k_strict", "weight": 2.0}]}
    for prompts, reward in ((stored(folder, "7", "8"), STRICT), (stored(folder, "7", "8"), validated(other, RewardConfig))):
        read.clear()
        assert notes(prompts, Cache(folder / "cache"), reward) == [] and read


def test_a_refusal_is_not_kept(folder: Path) -> None:
    prompts = stored(folder, "seven")
    for _ in range(2):
        with pytest.raises(ConfigError, match="gsm8k_strict"):
            notes(prompts, Cache(folder / "cache"))


def test_a_later_rank_without_a_cache_leaves_answers_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = PromptSet((Prompt("t#0", (1,), "?", "7", {}), Prompt("t#1", (1,), "?", "seven", {})), 2, 0, 8)
    assert len(notes(prompts, Cache())) == 1
    monkeypatch.setenv("RANK", "1")
    assert notes(prompts, Cache()) == []


def test_a_later_rank_with_a_cache_may_be_the_one_that_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is first keeps the notes of all: those of rank 0 too."""
    prompts = stored(folder, "#### 7", "seven")
    monkeypatch.setenv("RANK", "3")
    assert len(notes(prompts, Cache(folder / "cache"))) == 1
