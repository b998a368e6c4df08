"""Runs with images that cannot work are refused in one line, before a model is built; the others know their images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.data.images import IMAGE_BASE
from megappo.models.hf_config import read_arch
from megappo.trainer.prepare.checks import check_run
from megappo.trainer.prepare.data import load_run_data
from tests.models.checkpoints import write_checkpoint
from tests.models.vision_cases import write_questions, write_vision_checkpoint

COMPACTION = {"max_tokens": 66, "keep_first": 8, "keep_last": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_questions(folder)
    write_vision_checkpoint(folder / "qwen3_vl", "qwen3_vl")
    write_vision_checkpoint(folder / "qwen2_5_vl", "qwen2_5_vl")
    shutil.copytree(folder / "qwen3_vl", folder / "other pixels")
    processor = folder / "other pixels" / "preprocessor_config.json"
    processor.write_text(json.dumps(json.loads(processor.read_text()) | {"image_mean": [0.1, 0.1, 0.1]}))
    write_checkpoint(folder / "text", "qwen3")
    write_checkpoint(folder / "judge", "qwen3", head="SequenceClassification", num_labels=1)
    return folder


def config_of(folder: Path, **changes: Any) -> Any:
    sections: dict[str, Any] = {
        "run": {"name": "images", "output_dir": str(folder / "out"), "device": "cpu"},
        "policy": {"model": str(folder / "qwen3_vl"), "dtype": "fp32"},
        "critic": {"dtype": "fp32"},
        "reference": {"dtype": "fp32"},
        "rollout": {"engine": "megatron", "samples_per_prompt": 1, "max_response_tokens": 4},
        "data": {
            "train": str(folder / "questions.jsonl"),
            "image_key": "images",
            "prompts_per_step": 4,
            "chat_template": False,
            "max_prompt_tokens": 64,
        },
        "reward": {"parts": [{"name": "exact_match"}]},
        "reward_model": {},
        "algorithm": {"mini_batch_size": 4},
        "trainer": {"steps": 1},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        sections[section][key] = value
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(sections))
    return load_config(file)


def test_all_prompts_of_a_run_share_one_store(folder: Path) -> None:
    other = folder / "other.jsonl"
    lines = [{"prompt": "<image>", "answer": "1", "images": name} for name in ("3.png", "0.png")]
    other.write_text("".join(json.dumps(one) + "\n" for one in lines))
    config = config_of(folder, data__eval=str(other), critic__engine="fsdp2")
    checked = check_run(config, 1, "cpu")
    data = load_run_data(config, checked.archs["policy"])
    assert data.images is not None and len(data.images.store) == 4
    [evaluation] = data.evaluations
    # By the first record that names them, the training's first.
    assert [min(one for one in prompt.tokens if one >= IMAGE_BASE) - IMAGE_BASE for prompt in evaluation.prompts.prompts] == [3, 0]
    assert any("4 images of 4 to 16 tokens" in note for note in data.notes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy__model": "text"}, "data.image_key = .*images.*policy.model .*text .Qwen3ForCausalLM. reads text alone"),
        ({"critic__model": "text"}, "critic.model .*text .* reads text alone"),
        (
            {"critic__model": "other pixels"},
            "critic.model = .*has image_mean .0.1, 0.1, 0.1., that of policy .0.5, 0.4, 0.6.: both see the same pixels",
        ),
        ({"critic__model": "qwen2_5_vl"}, "critic.model = .*its tower differs from that of policy .patch 14, not 16."),
        (
            {"policy__lora": {}, "reference__model": "qwen3_vl", "rollout__engine": "vllm", "rollout__adapter": "separate"},
            "rollout.adapter.*Qwen3VLFor.*merged",
        ),
        (
            {"critic__parallel": {"pp": 4}},
            "critic.parallel.pp = 4: the first stage has 1 layers, and features of images enter the first 2",
        ),
        ({"data__image_key": None, "data__max_image_pixels": 4096}, "data.max_image_pixels.*data.image_key is not set"),
        (
            {"rollout__environment": {"path": "game.py", "function": "step", "max_turns": 2, "compaction": COMPACTION}},
            "images with rollout.environment.compaction.keep_first, which may cut one, are not there",
        ),
        (
            {"reward__parts": [{"model": "reward_model"}], "reward_model__model": "judge"},
            "data.image_key = .images.: reward_model.model .*judge .Qwen3ForSequenceClassification. reads text alone",
        ),
    ],
)
def test_what_cannot_work_is_refused(folder: Path, changes: dict[str, Any], words: str) -> None:
    for key in ("policy__model", "critic__model", "reference__model", "reward_model__model"):
        if key in changes:
            changes = {**changes, key: str(folder / changes[key])}
    with pytest.raises((ConfigError, ValueError), match=words) as error:
        check_run(config_of(folder, **changes), 4 if "critic__parallel" in changes else 1, "cpu")
    assert "\n" not in str(error.value)


def test_a_run_of_text_opens_no_images(folder: Path) -> None:
    lines = [{"prompt": "no", "answer": "1"}] * 4
    (folder / "text.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    config = config_of(folder, data__train=str(folder / "text.jsonl"), data__image_key=None)
    assert load_run_data(config, read_arch(folder / "qwen3_vl")).images is None
