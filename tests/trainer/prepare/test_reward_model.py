"""A reward model that cannot score is one line before a model is built: its head, its labels, a tokenizer that does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megappo.config.errors import ConfigError
from megappo.config.loading import validated
from megappo.config.schema import DataConfig, TrainConfig
from megappo.data.cache import Cache
from megappo.data.prompts import Prompt, PromptSet
from megappo.trainer.prepare.layouts import check_layouts, check_weights, read_archs
from megappo.trainer.prepare.reward_model import labels_of, load_reward_text
from tests.data.tokenizer_files import TEMPLATE
from tests.models.checkpoints import write_checkpoint
from tests.trainer.reward_models import config_of, write_reward_model


@pytest.fixture
def model(tmp_path) -> Path:
    write_checkpoint(tmp_path / "policy", "llama")
    return write_reward_model(tmp_path / "reward", "llama3_tied")


def config_for(model: Path, **section: Any) -> TrainConfig:
    return validated(config_of(model.parent, model, {}, **section), TrainConfig)


def change_config(model: Path, **changes: Any) -> None:
    file = model / "config.json"
    config = {key: value for key, value in (json.loads(file.read_text()) | changes).items() if value is not None}
    file.write_text(json.dumps(config))


def change_tensors(model: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or remove (None) tensors, in one file."""
    tensors = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in (*model.glob("*.safetensors"), model / "model.safetensors.index.json"):
        file.unlink()
    save_file({name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}, model / "model.safetensors")


def refused(config: TrainConfig) -> str:
    with pytest.raises(ConfigError) as error:
        check_weights(config, read_archs(config))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_classifier_of_one_label_without_a_language_model_head_is_taken(model) -> None:
    config = config_for(model)
    archs = read_archs(config)
    assert set(archs) == {"policy", "critic", "reference", "reward_model"}
    check_layouts(config, archs, 2)  # its vocabulary and positions are not the policy's


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "is a LlamaForCausalLM and has no score of a sequence; use a checkpoint of Llama",
        ),
        ({"architectures": ["LlamaForTokenClassification"]}, "has no score of a sequence"),
        (
            {"id2label": {str(i): name for i, name in enumerate("abcdef")}, "label2id": None},
            "has 6 labels (a, b, c, d, ...); a reward model has one (num_labels = 1 in config.json)",
        ),
        ({"id2label": None, "label2id": None}, "has 2 labels (LABEL_0, LABEL_1)"),
        ({"id2label": None, "num_labels": 3}, "has 3 labels"),
    ],
)
def test_another_head_is_named_with_its_labels(model, changes, message) -> None:
    change_config(model, **changes)
    text = refused(config_for(model))
    assert text.startswith(f'reward_model.model = "{model}": ') and message in text


def test_the_labels_are_those_of_transformers(model) -> None:
    from transformers import AutoConfig

    for changes in (
        {},
        {"id2label": None, "label2id": None},
        {"id2label": {"0": "a", "1": "b"}, "label2id": None},
        {"num_labels": 3},
    ):
        change_config(model, **changes)
        assert len(labels_of(json.loads((model / "config.json").read_text()))) == AutoConfig.from_pretrained(model).num_labels


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"score.weight": None}, "holds no score.weight, the head that gives the score; export the whole classifier"),
        ({"score.weight": torch.zeros(2, 64)}, "tensor score.weight has shape [2, 64], config.json asks for [1, 64]"),
        ({"score.bias": torch.ones(1)}, "holds score.bias, which transformers' sequence classifiers do not have"),
    ],
)
def test_a_head_that_does_not_fit_is_one_line(model, tensors, message) -> None:
    change_tensors(model, tensors)
    assert message in refused(config_for(model))
    read_archs(config_for(model))  # of a plan of shapes nothing is read


def prompts(config: TrainConfig, *questions: Any) -> dict[str, tuple[PromptSet, DataConfig]]:
    made = [Prompt(f"train.jsonl#{i}", (1,), str(q), "", {"prompt": q}, i + 1) for i, q in enumerate(questions)]
    return {"data.train": (PromptSet(tuple(made), len(made), 0, 99), config.data)}


def refused_text(config: TrainConfig, *questions: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load_reward_text(config, prompts(config, *questions), Cache())
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_tokenizer_that_does_not_fit_is_one_line(model, tmp_path) -> None:
    other = write_reward_model(tmp_path / "plain", "llama", template=None)
    plain = config_for(other, chat_template=False)
    assert load_reward_text(plain, prompts(plain, "1"), Cache()) is not None
    text = refused_text(config_for(other), "1")
    assert (
        text
        == f"reward_model.chat_template = true: the tokenizer {other} has none; set it to false for plain text, or name a "
        + ("tokenizer with a template")
    )
    absent = refused_text(config_for(model, tokenizer=str(tmp_path / "absent")), "1")
    assert absent.startswith(f'reward_model.tokenizer = "{tmp_path}/absent": ') and "set reward_model.tokenizer to" in absent
    change_config(model, vocab_size=200)
    assert "ids and reward_model.model only 200; use the tokenizer of the model" in refused_text(config_for(model), "1")


def test_a_prompt_that_the_model_cannot_take_is_named(model) -> None:
    tool = [{"role": "tool", "content": "1"}]
    text = refused_text(config_for(model), "1", tool)
    assert text.startswith("reward_model: the chat template of") and "no tools here; train.jsonl#1 (line 2) of data.train" in text
    long = refused_text(config_for(model), "1", "x" * 300)
    assert "train.jsonl#1 (line 2) of data.train takes" in long and "of the 256 positions of the reward model" in long
    turns = [{"role": "user", "content": "1"}]
    assert "needs reward_model.chat_template=true" in refused_text(config_for(model, chat_template=False), turns)


def test_a_longest_response_beyond_the_positions_is_a_note(model) -> None:
    config = config_for(model)
    loaded = load_reward_text(config, prompts(config, "1"), Cache())
    assert loaded is not None and loaded.notes == ()
    longer = load_reward_text(config, prompts(config, "x" * 200), Cache())
    assert longer is not None and "the front of a longer text is cut, and counted" in longer.notes[0]


def test_its_template_gets_the_variables_that_it_reads(tmp_path) -> None:
    """The policy's template may read others, and refuses those that it does not."""
    write_checkpoint(tmp_path / "policy", "llama")
    model = write_reward_model(tmp_path / "reward", "llama3_tied", template=TEMPLATE + "{{ style }}")
    plain = config_for(model)
    config = validated(
        plain.model_dump() | {"data": plain.data.model_dump() | {"template_args": {"style": "!", "depth": 3}}}, TrainConfig
    )
    texts = []
    for one in (plain, config):
        text = load_reward_text(one, prompts(one, "1+2"), Cache()).text
        assert text is not None
        texts.append(text.tokenizer.decode_all(text.encode(prompts(one, "1+2")["data.train"][0].prompts[0], "3")))
    assert texts[1] == texts[0] + "!" and "3" in texts[0]


def test_the_text_ends_at_the_token_that_transformers_reads(model) -> None:
    """Its rule for sequence_lengths: the last token that is not pad_token_id."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model).apply_chat_template(
        [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}], return_dict=False
    )
    for pad, left_out in ((None, 0), (0, 0), (ids[-1], 1)):
        file = model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token_id": pad}))
        config = config_for(model)
        config = config.model_copy(update={"data": config.data.model_copy(update={"system_prompt": None, "prompt_suffix": ""})})
        loaded = load_reward_text(config, asked := prompts(config, "1"), Cache())
        assert loaded is not None
        assert loaded.text.encode(asked["data.train"][0][0], "2") == ids[: len(ids) - left_out]
    assert TEMPLATE.count("im_end") == 1, "the text does not end with eos"
