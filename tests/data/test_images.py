"""Images of prompts: how records name them, the tokens that carry them, and what is refused."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from megappo.data.cache import Cache
from megappo.data.images import IMAGE_BASE, PromptImages, open_images
from megappo.data.preferences import PairKeys, PreferenceRules, preferences_of
from megappo.data.prompt_rows import PromptRules, prompts_of
from megappo.data.prompts import PromptFormat
from megappo.data.reward_text import RewardText
from megappo.data.sources import open_source
from megappo.data.tokenizers import load_tokenizer
from megappo.models.hf_config import read_arch
from megappo.models.vision_families import places_of
from tests.models.vision_cases import IMAGE_TOKEN, PICTURES, images_of, squares, write_questions, write_vision_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_questions(folder)
    write_vision_checkpoint(folder / "model", "qwen3_vl")
    return folder


def opened(
    folder: Path, records: list[dict[str, Any]], name: str, max_pixels: int | None = None, root: str | None = None
) -> PromptImages:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    source = open_source(str(file))
    return open_images(
        [source], "images", root, places_of(folder / "model", read_arch(folder / "model")), max_pixels, Cache(folder / "cache")
    )


def png(image: Image.Image, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, **{"format": "PNG", **options})
    return out.getvalue()


def test_pixels_are_the_processors(folder: Path) -> None:
    from transformers import AutoImageProcessor

    from megappo.models.vision import pixels_of

    store = images_of(folder / "model", folder / "questions.jsonl", folder / "cache").store
    processor: Any = AutoImageProcessor.from_pretrained(folder / "model", backend="pil")
    pictures = [squares(counts, size, seed=number) for number, (counts, size) in enumerate(PICTURES)]
    theirs = processor(images=pictures, return_tensors="pt")
    mine = pixels_of(store, range(len(store)), torch.device("cpu"), torch.float32)
    assert (mine - theirs["pixel_values"]).abs().max() < 1e-6
    assert [(1, *store.grid(one)) for one in range(len(store))] == [tuple(one) for one in theirs["image_grid_thw"].tolist()]


def test_tiles_are_as_many_as_the_processor_says(folder: Path) -> None:
    """InternVL's, for a table of sizes; its pixels are compared in tests/engine/test_images.py."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    write_vision_checkpoint(folder / "internvl", "internvl")
    sizes = [(32, 32), (64, 32), (32, 100), (90, 50), (300, 40), (64, 64), (10, 10), (31, 97), (128, 130)]
    lines = [
        {"prompt": "<image>", "images": base64_of(Image.new("RGB", size, (number, 9, 9)))} for number, size in enumerate(sizes)
    ]
    file = folder / "sizes.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    settings = json.loads((folder / "internvl/preprocessor_config.json").read_text()) | {"crop_to_patches": True}
    found = {}
    for limit, most in ((None, 4), (3 * 32**2 + 5, 3), (32**2, 1)):
        places = places_of(folder / "internvl", read_arch(folder / "internvl"))
        store = open_images([open_source(str(file))], "images", None, places, limit, Cache(folder / "cache")).store
        processor: Any = GotOcr2ImageProcessorPil(**settings | {"max_patches": most})
        theirs = [4 * processor.get_number_of_image_patches(height, width) for width, height in sizes]
        found[most] = [store.num_tokens(one) for one in range(len(sizes))]
        assert found[most] == theirs
    assert max(found[4]) == 5 * 4 and set(found[1]) == {4}
    with pytest.raises(ValueError, match="data.max_image_pixels 900 is less than the 1024 of"):
        open_images(
            [open_source(str(file))],
            "images",
            None,
            places_of(folder / "internvl", read_arch(folder / "internvl")),
            900,
            Cache(folder / "cache"),
        )
    other = replace(places_of(folder / "internvl", read_arch(folder / "internvl")), tile=64)
    with pytest.raises(ValueError, match="size.height 32 is not the 64 of config.json"):
        open_images([open_source(str(file))], "images", None, other, None, Cache(folder / "cache"))


def test_a_thumbnail_is_the_picture(folder: Path) -> None:
    store = images_of(folder / "model", folder / "questions.jsonl", folder / "cache").store
    pictures = [numpy.asarray(squares(counts, size, seed=number), float) for number, (counts, size) in enumerate(PICTURES)]
    found = [numpy.asarray(Image.open(io.BytesIO(store.thumbnail(one))), float) for one in range(len(store))]
    assert [one.shape for one in found] == [one.shape for one in pictures]  # none was resized, and none is larger than a thumbnail
    assert all(abs(mine - theirs).mean() < 3 for mine, theirs in zip(found, pictures))  # JPEG loses at the edges of squares
    assert abs(found[0] - pictures[0][:, ::-1]).mean() > 30, "negative control"
    large = opened(folder, [{"prompt": "<image>", "images": base64_of(squares({"red": 9}, (256, 224)))}], "large").store
    assert Image.open(io.BytesIO(large.thumbnail(0))).size == (192, 168)


def test_preferences_show_the_images_of_their_prompt(folder: Path) -> None:
    """As a text with markers, and as the parts of messages."""
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]
    records = [
        {"prompt": "<image>Many?", "chosen": "3", "rejected": "1", "images": ["1.png"]},
        {"prompt": parts, "images": ["0.png"]},
    ]
    records[1] |= {"chosen": [{"role": "assistant", "content": "2"}], "rejected": "0"}
    images, tokenizer = opened(folder, records, "pairs"), load_tokenizer(folder / "model")
    for record, chat_template in zip(records, (False, True)):
        file = folder / f"pairs {chat_template}.jsonl"
        file.write_text(json.dumps(record) + "\n")
        source = open_source(str(file))
        shown = replace(images, folders={source.spec: folder})
        rules = PreferenceRules(PairKeys("chosen", "rejected"), "prompt", PromptFormat(chat_template=chat_template), 99)
        batch = preferences_of(source, tokenizer, rules, Cache(folder / "cache"), shown).packed([0])
        for tokens, mask in zip(*(one.split(batch.lengths.tolist()) for one in (batch.tokens, batch["response_mask"]))):
            number = int(chat_template is False)
            store = images.store
            features = (tokens >= IMAGE_BASE).nonzero().flatten()
            assert len(features) == store.num_tokens(store.number(str((folder / f"{number}.png").absolute())))
            assert not mask[features].any() and mask.sum() == 2  # a digit and the end
    several = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    file = folder / "several.jsonl"
    file.write_text(json.dumps({**records[1], "chosen": several}) + "\n")
    with pytest.raises(
        ValueError, match="several.jsonl#0.*: a response of several messages beside 1 images; only texts go with images"
    ):
        rules = PreferenceRules(PairKeys("chosen", "rejected"), "prompt", PromptFormat(chat_template=True), 99)
        source = open_source(str(file))
        preferences_of(source, tokenizer, rules, Cache(folder / "cache"), replace(images, folders={source.spec: folder}))


def base64_of(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def test_an_image_is_known_by_its_content_or_path_once(folder: Path) -> None:
    picture = squares({"red": 1}, (64, 64), seed=9)
    content, uri = png(picture), base64_of(picture)
    records = [
        {"prompt": "<image><image>", "images": ["0.png", uri]},
        {"prompt": "<image>", "images": {"path": str(folder / "0.png"), "bytes": None}},
        {"prompt": "<image>", "images": uri},
        {"prompt": "none", "images": None},
    ]
    images = opened(folder, records, "forms")
    source = "x"
    images = replace(images, root=None, folders={source: folder})
    assert [images.of_record(one, f"{source}#0") for one in records] == [[0, 1], [0], [1], []]
    # A hub's images are bytes.
    assert images.of_record({"images": [{"bytes": content, "path": "elsewhere.png"}]}, f"{source}#0") == [1]


def test_tokens_carry_the_images(folder: Path) -> None:
    tokenizer, file = load_tokenizer(folder / "model"), folder / "questions.jsonl"
    images = images_of(folder / "model", file, folder / "cache")
    rules = PromptRules("prompt", "answer", PromptFormat(chat_template=False), max_prompt_tokens=40)
    prompts = prompts_of(open_source(str(file)), tokenizer, rules, Cache(folder / "cache"), images)
    two = prompts[2]
    assert two.text == "Two <image><image>" and two.answer == "1"
    runs = [IMAGE_BASE + 1] * 6 + [260, 259] + [IMAGE_BASE + 2] * 10
    assert list(two.tokens[4:]) == [259, *runs, 260]
    # Features count: sixteen of the largest picture.
    short = prompts_of(
        open_source(str(file)), tokenizer, PromptRules("prompt", "answer", rules.format, 20), Cache(folder / "cache"), images
    )
    assert [one.id.rpartition("#")[2] for one in short.prompts] == ["0", "1", "4"] and short.num_overlong == 2


def test_parts_of_messages_are_markers(folder: Path) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    records = [{"prompt": [{"role": "user", "content": parts}], "answer": "1", "images": ["0.png"]}]
    images = opened(folder, records, "parts")
    rules = PromptRules("prompt", "answer", PromptFormat(), max_prompt_tokens=60)
    source, cache = open_source(str(folder / "parts.jsonl")), Cache(folder / "cache")
    [prompt] = prompts_of(source, load_tokenizer(folder / "model"), rules, cache, images).prompts
    assert prompt.text == "<image>How many?" and prompt.tokens.count(IMAGE_BASE) == 4 and IMAGE_TOKEN not in prompt.tokens
    film = [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}, *parts[1:]]}]
    (folder / "films.jsonl").write_text(json.dumps({"prompt": film, "answer": "1"}) + "\n")
    with pytest.raises(ValueError, match="data.prompt_key=prompt: .*films.jsonl#0 .line 1.: a question shows a video"):
        prompts_of(open_source(str(folder / "films.jsonl")), load_tokenizer(folder / "model"), rules, cache, images)


def test_a_limit_makes_large_images_smaller(folder: Path) -> None:
    records = [{"prompt": "<image>", "images": "3.png"}]
    assert opened(folder, records, "whole").store.num_tokens(0) == 16
    assert opened(folder, records, "limited", max_pixels=64 * 64).store.num_tokens(0) == 4


def animated() -> bytes:
    return png(squares({}, (64, 64)), format="GIF", save_all=True, append_images=[squares({"red": 1}, (64, 64))])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("absent.png", "images#0 (line 1): image .*absent.png does not exist; correct it, or set data.image_root"),
        ("https://example.com/a.png", "is a URL, which is never fetched"),
        (7, "int is no image"),
        ("data:image/png;base64,!!", "not base64"),
        ("broken.png", "broken.png cannot be used: .*correct it or leave it out"),
        ("moves.gif", "it is animated"),
        ("print.jpg", "it is in CMYK; convert it to RGB"),
        ("line.png", "differ by more than 200 times"),
    ],
)
def test_a_bad_image_is_refused_in_one_line(folder: Path, value: Any, words: str) -> None:
    (folder / "broken.png").write_bytes(png(squares({}, (64, 64)))[:99])
    (folder / "moves.gif").write_bytes(animated())
    Image.new("CMYK", (64, 64)).save(folder / "print.jpg")
    Image.new("RGB", (900, 4)).save(folder / "line.png")
    records = [{"prompt": "<image>", "images": value}]
    with pytest.raises(ValueError, match=words.replace("images#0 (line 1)", r"bad.jsonl#0 \(line 1\)")) as error:
        opened(folder, records, "bad")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("prompt", "images", "words"),
    [
        ("<image>", ["0.png", "1.png"], "1 <image> for 2 images"),
        ("<image> and <image>", ["0.png"], "2 <image> for 1 images"),
        ("<image><|image_pad|>", ["0.png"], "2 image tokens .* for 1 <image>"),
        ("<image>" * 17, ["0.png"] * 17, "17 images in a prompt; 16 are the most"),
    ],
)
def test_every_image_has_its_marker(folder: Path, prompt: str, images: list[str], words: str) -> None:
    records = [{"prompt": prompt, "answer": "1", "images": images}]
    found = opened(folder, records, "markers")
    rules = PromptRules("prompt", "answer", PromptFormat(chat_template=False), max_prompt_tokens=60)
    with pytest.raises(ValueError, match=words):
        prompts_of(
            open_source(str(folder / "markers.jsonl")), load_tokenizer(folder / "model"), rules, Cache(folder / "cache"), found
        )


def test_a_key_that_no_record_has_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="data.image_key=images: no record names an image"):
        opened(folder, [{"prompt": "no", "answer": "1"}], "keyless")


def test_a_processor_of_other_patches_is_refused(folder: Path, tmp_path: Path) -> None:
    write_vision_checkpoint(tmp_path, "qwen3_vl")
    file = tmp_path / "preprocessor_config.json"
    file.write_text(file.read_text().replace('"patch_size": 16', '"patch_size": 14'))
    with pytest.raises(ValueError, match="patch_size 14 is not the 16 of config.json"):
        images_of(tmp_path, folder / "questions.jsonl", tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="has no preprocessor_config.json"):
        images_of(tmp_path, folder / "questions.jsonl", tmp_path)


def test_other_processes_map_the_same_files(folder: Path) -> None:
    import pickle

    store = images_of(folder / "model", folder / "questions.jsonl", folder / "cache").store
    sent = pickle.dumps(store)
    assert len(sent) < 1000
    assert numpy.array_equal(pickle.loads(sent).patches([2, 0]), store.patches([2, 0]))


def test_a_text_cut_to_a_reward_models_positions_has_whole_images(folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "model")
    ids = [1, 2, *[IMAGE_BASE] * 4, 3, *[IMAGE_BASE + 1] * 2, 4]
    for positions, left in (
        (10, ids),
        (9, ids[1:]),
        (8, ids[2:]),
        (7, ids[6:]),
        (4, ids[6:]),
        (3, ids[7:]),
        (2, ids[9:]),
        (1, ids[9:]),
    ):
        text = RewardText(tokenizer, True, "prompt", PromptFormat(True, "", ""), None, positions)
        assert text.fitted(ids) == left
