"""Facts of a run: other prompts are refused with the key that changed, other rewards and validation data are told."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from megappo.checkpoint.identity import notable_changes, require_same_run
from megappo.checkpoint.manifest import Manifest

SET = {"path": "math.jsonl", "sha256": "m" * 64, "settings": {"n": 4}, "reward": None}
FACTS: dict[str, Any] = {
    "reference": {"path": "m", "sha256": "r"},
    "tokenizer": "t",
    "reward_model": None,
    "engines": {"policy": "megatron"},
    "data": {
        "train": {"path": "train.jsonl", "sha256": "a" * 64},
        "eval": {"path": "eval.jsonl", "sha256": "b" * 64},
        "format": {"prompt_key": "prompt", "chat_template": True, "system_prompt": None, "prompt_suffix": ""},
        "template": "c" * 64,
        "kept": "k",
        "tokens": "i",
        "evaluations": {"math": SET},
    },
    "reward": {
        "parts": [{"name": "exact_match", "weight": 1.0}],
        "missing_eos_penalty": 0.0,
        "code": {"exact_match": "e"},
    },
    "environment": {"function": "play", "max_turns": 3, "code": "f"},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    facts = copy.deepcopy(FACTS)
    *parents, last = path.split("/")
    node = facts
    for part in parents:
        node = node[part]
    node[last] = value
    return facts


def resume(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    require_same_run(Manifest(step=3, world_size=1, model_only=False, facts=saved, files={}), now, "step-3")
    return notable_changes(saved, now, "step-3")


REFUSED = {
    "content": (
        changed("data/train/sha256", "f" * 64),
        "data.train = train.jsonl (SHA-256 aaaaaaaaaaaa), this run has train.jsonl (SHA-256 ffffffffffff)",
    ),
    "other file": (
        changed("data/train", {"path": "b.jsonl", "sha256": "f" * 64}),
        "data.train = train.jsonl (SHA-256 aaaaaaaaaaaa), this run has b.jsonl (SHA-256 ffffffffffff)",
    ),
    "key": (changed("data/format/prompt_key", "question"), 'data.prompt_key = "prompt", this run has "question"'),
    "template off": (changed("data/format/chat_template", False), "data.chat_template = true, this run has false"),
    "system prompt": (changed("data/format/system_prompt", "Be brief."), 'data.system_prompt = null, this run has "Be brief."'),
    "template": (
        changed("data/template", "d" * 64),
        "chat template of data.tokenizer with data.template_args = SHA-256 cccccccccccc, this run has",
    ),
    "filter": (changed("data/kept", "other"), "records kept under data.max_prompt_tokens and data.overlong = "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_prompts_are_refused_in_one_line(case: str) -> None:
    now, says = REFUSED[case]
    with pytest.raises(ValueError) as caught:
        resume(FACTS, now)
    text = str(caught.value)
    assert text.startswith(f"step-3 was written with {says}") and "\n" not in text
    assert text.endswith("; restore it, or start a new run in another directory")


@pytest.mark.parametrize("now", [None, {"path": "t", "sha256": "b" * 64}])
def test_another_teacher_or_none_is_refused_and_one_that_has_moved_is_not(now: Any) -> None:
    saved = changed("teacher", {"path": "t", "sha256": "a" * 64})
    assert resume(saved, changed("teacher", {"path": "elsewhere", "sha256": "a" * 64})) == resume(FACTS, FACTS) == []
    with pytest.raises(
        ValueError, match=r"^step-3 was written with teacher = t \(SHA-256 a{12}\), this run has .*; restore it, or start a new run"
    ):
        resume(saved, changed("teacher", now))


PTX = {"path": "t.jsonl", "sha256": "a" * 64, "text_key": "text", "max_tokens": 64}
OTHER_TEXTS: list[tuple[Any, Any, str]] = [
    (None, PTX, "algorithm.ptx.data = null, this run has t.jsonl (SHA-256 aaaaaaaaaaaa)"),
    (PTX, None, "algorithm.ptx.data = t.jsonl (SHA-256 aaaaaaaaaaaa), this run has null"),
    (
        PTX,
        {**PTX, "sha256": "f" * 64},
        "algorithm.ptx.data = t.jsonl (SHA-256 aaaaaaaaaaaa), this run has t.jsonl (SHA-256 ffffffffffff)",
    ),
    (PTX, {**PTX, "max_tokens": 32}, "algorithm.ptx.max_tokens = 64, this run has 32"),
    (PTX, {**PTX, "text_key": "body"}, 'algorithm.ptx.text_key = "text", this run has "body"'),
]


@pytest.mark.parametrize("saved, now, says", OTHER_TEXTS)
def test_other_texts_are_refused_in_one_line(saved: Any, now: Any, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        resume(changed("data/ptx", saved), changed("data/ptx", now))
    assert str(caught.value) == f"step-3 was written with {says}; restore it, or start a new run in another directory"


def test_the_same_texts_at_another_path_go_on() -> None:
    assert resume(changed("data/ptx", PTX), changed("data/ptx", {**PTX, "path": "moved.jsonl"})) == []


TOLD = {
    "eval": (changed("data/eval/sha256", "x"), ["data.eval has another content than at step-3"]),
    "code": (changed("reward/code/exact_match", "x"), ["the code of the reward rule exact_match has changed since step-3"]),
    "weight": (changed("reward/parts", [{"name": "exact_match", "weight": 2.0}]), ["reward.parts changed since step-3"]),
    "penalty": (changed("reward/missing_eos_penalty", 0.5), ["reward.missing_eos_penalty changed since step-3"]),
    "another rule": (changed("reward/code", {"has_eos": "x"}), []),  # parts name it
    "tokens": (changed("data/tokens", "x"), ["the prompts have other token ids than at step-3"]),
    "a set": (
        changed("data/evaluations", {"math": SET | {"sha256": "x"}}),
        ["evaluations.math has another content than at step-3"],
    ),
    "its settings": (
        changed("data/evaluations", {"math": SET | {"settings": {"n": 8}, "reward": {}}}),
        ["settings and reward than"],
    ),
    "a set is new": (changed("data/evaluations", {"math": SET, "new": SET}), []),
    "a set has gone": (changed("data/evaluations", {}), []),
    "eval is new": (changed("data/eval", None), []),
    "moved file": (changed("data/train/path", "elsewhere/train.jsonl"), []),
    "environment's code": (changed("environment/code", "x"), ["the code of rollout.environment has changed since step-3"]),
    "more turns": (changed("environment/max_turns", 4), ["rollout.environment.max_turns changed since step-3"]),
    "no environment": (changed("environment", None), ["rollout.environment: there was one until step-3, and there is none"]),
    "nothing": (FACTS, []),
}


@pytest.mark.parametrize("case", TOLD)
def test_what_may_change_is_told(case: str) -> None:
    now, says = TOLD[case]
    lines = resume(FACTS, now)
    assert len(lines) == len(says) and all(part in line for part, line in zip(says, lines)), lines


def test_another_reward_model_is_told() -> None:
    judge = {
        "model": {"path": "judge", "sha256": "j"},
        "tokenizer": "t",
        "chat_template": True,
        "center": 0.0,
        "scale": 1.0,
        "clip": None,
    }
    saved = changed("reward_model", judge)
    assert resume(saved, changed("reward_model", judge | {"model": {"path": "moved", "sha256": "j"}})) == []
    (line,) = resume(saved, changed("reward_model", judge | {"model": {"path": "judge", "sha256": "k"}, "center": 0.5}))
    assert line == "reward_model.model, reward_model.center changed since step-3: scores are not comparable"
    assert resume(FACTS, saved) == [], "reward.parts tells it"
