"""Tokenizers of roles that read the policy's ids; the refusals from end to end are in `tests/test_bad_input.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megappo.config.loading import validated
from megappo.config.schema import TrainConfig
from megappo.data.tokenizers import load_tokenizer
from megappo.trainer.prepare.data import check_vocabularies, turn_notes
from scripts.arithmetic import train_tokenizer
from tests.config.examples import train_config
from tests.data.tokenizer_files import write_hf_tokenizer
from tests.trainer.small_run import set_keys


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabularies")
    for name, alphabet in (("policy", "0123+="), ("same", "0123+="), ("longer", "0123+=-"), ("other", "1023+=")):
        (folder / name).mkdir()
        train_tokenizer(folder / name, alphabet)
    (folder / "bare").mkdir()
    return folder


def notes(models: Path, **roles: str) -> list[str]:
    keys = {f"{role}.model": str(models / name) for role, name in {"policy": "policy", **roles}.items()}
    teaches = {"algorithm.distillation.placement": "reward"} if "teacher" in roles else {}
    config = validated(set_keys({"data": {"train": "t.jsonl"}}, keys | teaches), TrainConfig)
    return list(check_vocabularies(config, load_tokenizer(models / "policy")))


@pytest.mark.parametrize("name", ["policy", "same", "longer"])
def test_the_same_pieces_pass_and_so_do_further_ones(models: Path, name: str) -> None:
    assert notes(models, critic=name, reference=name, teacher=name) == []


def test_a_model_without_a_tokenizer_is_told(models: Path) -> None:
    (line,) = notes(models, critic="bare")
    assert line == "critic.model has no tokenizer that can be read: its vocabulary is taken to be that of data.tokenizer"


@pytest.mark.parametrize(
    "key, role", [("critic", "critic"), ("reference", "reference"), ("teacher", "teacher"), ("critics.b", "critic_b")]
)
def test_pieces_in_another_order_are_refused(models: Path, key: str, role: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^{key}.model = .*other.*: id 4 of its tokenizer is '1', of the policy's '0': the {role}"
    ):
        notes(models, **{key: "other"})


def test_a_reward_model_may_have_its_own(models: Path) -> None:
    assert notes(models, reward_model="other") == []


def test_pieces_of_both_kinds_of_tokenizers(models: Path, tmp_path: Path) -> None:
    sentencepiece = load_tokenizer(models / "policy")
    assert sentencepiece.pieces()[3:] == ["<unk>", "0", "1", "2", "3", "+", "="]
    hugging_face = load_tokenizer(write_hf_tokenizer(tmp_path / "t"))
    found = hugging_face.pieces()
    assert len(found) == hugging_face.vocab_size and found[hugging_face.eos_id] == "</s>"


@pytest.mark.parametrize(
    "ids, overrides, notes",
    [([4, 2], [], 0), ([2], [], 1), ([2], ['rollout.stop=["<|im_end|>"]'], 0), ([2], ["data.chat_template=false"], 0)],
)
def test_a_template_that_closes_turns_with_what_ends_no_response_is_noted(tmp_path: Path, ids: list, overrides: list, notes: int):
    """ChatML's <|im_end|> (id 4) beside the eos </s> (id 2)."""
    directory = write_hf_tokenizer(tmp_path / "t")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    found = list(turn_notes(train_config(tmp_path, overrides), load_tokenizer(directory)))
    assert len(found) == notes
    assert all("closes a turn with '<|im_end|>', and responses end with '</s>': add its id" in note for note in found), found
