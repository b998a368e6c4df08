"""Runs with images that cannot work are refused in one line, before a model is built; the others know their images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import yaml

from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.data.images import IMAGE_BASE
from megappo.data.tokenizers import load_tokenizer
from megappo.models.hf_config import read_arch
from megappo.rollout.environment import environment_of
from megappo.rollout.turn import Turn
from megappo.rollout.types import EnvironmentFault
from megappo.trainer.prepare.checks import check_run
from megappo.trainer.prepare.data import load_run_data
from tests.models.any_families import write_any_checkpoint, write_composite
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
    write_any_checkpoint(folder / "gemma3_text", "gemma3_text")
    write_composite(folder / "gemma3", folder / "gemma3_text")
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
        (
            {"policy__model": "gemma3"},
            "policy.model .*gemma3 .Gemma3ForConditionalGeneration. reads text alone here: tokens of its images see those behind "
            "them.*; remove it, or take a model with a tower: Qwen2_5_VL",
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
            {
                "rollout__environment": {"path": "game.py", "function": "step", "images": 1},
                "policy__model": "text",
                "critic__model": "text",
                "data__image_key": None,
            },
            "rollout.environment.images = 1: policy.model .*text .Qwen3ForCausalLM. reads text alone",
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


def shown_by(folder: Path, returns: str, **changes: Any) -> tuple[list[list[int]], Any]:
    """Observations of two turns of a sample in an environment that returns this, and the store of the run."""
    code = (
        "import io\nfrom PIL import Image\nRED = Image.new('RGB', (64, 32), (200, 0, 0))\nBLUE = RED.point(lambda one: 200 - one)\n"
    )
    (folder / "game.py").write_text(f"{code}def step(turn): return {returns}\n")
    environment = {"path": str(folder / "game.py"), "function": "step", "max_turns": 4, "images": 2}
    data = load_run_data(config_of(folder, rollout__environment=environment, **changes), read_arch(folder / "qwen3_vl"))
    assert data.environment is not None and data.images is not None
    play, memo, prompt = environment_of(data.environment, data.tokenizer), {}, data.train.prompts[0]
    said = numpy.array([65], numpy.int32)
    return [list(play(Turn(3, 0, index, said, said, 0, prompt, memo)) or ()) for index in (0, 1)], data.images.store


def test_an_environment_shows_images_beside_those_of_the_data_or_alone(folder: Path) -> None:
    """Two turns of sample 3, where a trajectory shows at most 2: the numbers follow those of the data."""
    ends = load_tokenizer(folder / "qwen3_vl").encode("ab")
    (folder / "plain.jsonl").write_text('{"prompt": "How many?", "answer": "1"}\n' * 4)
    for data, known in (({}, 5), ({"data__image_key": None, "data__train": str(folder / "plain.jsonl")}, 1)):
        content = "{'role': 'user', 'content': 'a<image>b', 'images': [BLUE if turn.index else RED]}"
        turns, store = shown_by(folder, content, **data)
        assert len(store) == known and store.num_tokens(known - 1) == 1, "a blank one is the last, for ranks without an image"
        base = IMAGE_BASE + known + 3 * 2
        for turn, ids in enumerate(turns):
            assert [one for one in ids if one >= IMAGE_BASE] == [base + turn] * 2 and [ids[0], ids[-1]] == ends
        red, blue = (store.pictures[base - IMAGE_BASE + turn] for turn in (0, 1))
        assert red.patches.reshape(-1, 3, 256)[:, 0].min() == 200 and blue.patches.reshape(-1, 3, 256)[:, 0].max() == 0
        assert store.content(base - IMAGE_BASE) == red.name != blue.name and store.most_tokens == 64
        own = store.pictures.end_batch(8)
        assert list(own) == [base - IMAGE_BASE, base - IMAGE_BASE + 1]
        assert store.pictures.show(red, 0, 0) == known + 8 * 2, "the next batch of the step has other numbers"
        store.begin_step()
        assert store.pictures.show(red, 0, 0) == known
        with pytest.raises(KeyError):
            store.pictures[base - IMAGE_BASE]


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        ("'images': [b'GIF89a']", "cannot identify image file"),
        ("'images': 'no.png'", "no.png is relative and the data set has no folder; set data.image_root"),
        ("'images': '/no/such.png'", "image /no/such.png does not exist"),
        ("'images': 'https://host/a.png'", "is a URL, which is never fetched"),
        ("'images': [7]", "int is no image; a path, bytes, or a data: URI is needed"),
        ("'images': [Image.new('RGB', (400, 1))]", "its sides 400 x 1 differ by more than 200 times"),
        ("'images': [RED, RED, RED]", "images 1 to 3 of a trajectory, more than rollout.environment.images 2"),
        ("'images': []", "1 <image> for 0 images"),
    ],
)
def test_an_image_that_cannot_be_shown_names_environment_sample_and_reason(folder: Path, shown: str, words: str) -> None:
    with pytest.raises(EnvironmentFault, match=words) as error:
        shown_by(folder, "{'role': 'user', 'content': 'a<image>b', " + shown + "}")
    text = str(error.value)
    assert "environment game.py: step returned" in text and "turn 0 of sample" in text and "questions.jsonl#0 (sample 3)" in text
    assert "\n" not in text


def test_a_model_with_a_tower_that_is_not_trained_reads_text(folder: Path) -> None:
    """tests/engine/test_any_family.py trains and exports it."""
    archs = check_run(config_of(folder, policy__model=str(folder / "gemma3"), data__image_key=None), 1, "cpu").archs
    assert archs["policy"].vision is None and archs["policy"].family == "gemma3_text"


def test_a_run_of_text_opens_no_images(folder: Path) -> None:
    lines = [{"prompt": "no", "answer": "1"}] * 4
    (folder / "text.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    config = config_of(folder, data__train=str(folder / "text.jsonl"), data__image_key=None)
    assert load_run_data(config, read_arch(folder / "qwen3_vl")).images is None
