"""The reward model as a role: the scores of transformers in every layout, its own text, normalisation; wrong models in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from megappo.config.loading import validated
from megappo.config.schema import TrainConfig
from megappo.data.images import IMAGE_BASE, PromptImages
from megappo.data.prompts import Prompt
from megappo.rewards.base import RewardError
from megappo.rewards.compose import Judged
from megappo.rewards.verdict import Verdict
from megappo.trainer.model_outputs import NonFiniteOutput
from tests.models.vision_cases import (
    IMAGE_TOKEN,
    KINDS,
    Sample,
    as_classifier,
    images_of,
    inputs_of,
    write_questions,
    write_vision_checkpoint,
)
from tests.models.vision_cases import QUESTIONS as PICTURED
from tests.trainer.reward_models import (
    EOS_AT_END,
    QUESTIONS,
    RESPONSES,
    SUFFIX,
    config_of,
    messages_of,
    scores_of_transformers,
    write_reward_model,
)
from tests.worlds import spawn_world

TOLERANCE = 1e-4
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tp": 2},
    "tp2 sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
}
# name -> (case of models/checkpoints.py, keys of write_reward_model)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama3_tied", {}),
    "qwen2": ("qwen2_tied", {"pad": None}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral_window", {}),
    # transformers takes an eos that is the padding's id too for padding, and reads the score before it.
    "pad is eos": ("llama", {"pad": 2, "template": EOS_AT_END}),
}
EP2 = {"ep": 2}
# Every layout once, and every family in two: the layers are those of the critic, which other tables cover.
TABLE = [("llama", layout) for layout in LAYOUTS] + [(model, layout) for model in MODELS for layout in ("tp2 sp", "pp2")][2:]
# Classifiers of the newer families, whose layers too are those of the critic.
NEWER = {"gemma3": "tp2 sp", "deepseek_v3": "tp2 sp", "gpt_oss": "pp2", "qwen3_next": "pp2", "qwen3_5": "tp2 sp"}
NEWER |= {"mixtral": "tp2 sp"}
MODELS |= {case: (case, {}) for case in NEWER}
TABLE += NEWER.items()
# Reward models that see the pictures of prompts: model, name, section.
SEES: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen2_5_vl", "tp2", {"parallel": {"tp": 2, "sequence_parallel": True}}),
    ("qwen3_vl", "pp2", {"parallel": {"pp": 2}}),
    ("qwen3_vl", "fsdp2", {"parallel": {}, "engine": "fsdp2"}),
]
SEEING = tuple(dict.fromkeys(model for model, *_ in SEES))
# A response with the text of a picture's place has a token of text there.
SEEN = ("Three.", "None <image>, <|image_pad|>.", "One and four", "", "3")


def prompts() -> list[Prompt]:
    texts = [q if isinstance(q, str) else q[-1]["content"] for q in QUESTIONS]
    return [Prompt(f"p#{i}", (1,), text, "", {"prompt": q}) for i, (q, text) in enumerate(zip(QUESTIONS, texts))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reward_models")
    for name, (case, keys) in MODELS.items():
        write_reward_model(folder / name, case, **keys)
    write_questions(folder)
    for name in SEEING:
        write_vision_checkpoint(folder / name, name)
        as_classifier(folder / name)
        pictured(folder, name)  # the ranks find the store made
    write_reward_model(folder / "moe", "qwen3_moe")
    write_reward_model(folder / "other head", "llama3_tied")
    head = {"score.weight": torch.randn(1, 64, generator=torch.Generator().manual_seed(8))}
    for file in (folder / "other head").glob("*.safetensors"):
        if "score.weight" in (tensors := load_file(file)):
            save_file(tensors | head, file, metadata={"format": "pt"})
    return folder


def scorer_of(section: Mapping[str, Any], folder: Path, model: str, asked: list[Prompt], images: Any = None) -> tuple[Any, Any]:
    """(scorer as in a run, factory of its engine)"""
    from megappo.config.run_sections import TimeoutsConfig
    from megappo.data.cache import Cache
    from megappo.data.prompts import PromptSet
    from megappo.engine.build import RoleEngines
    from megappo.parallel.device import select_device, start_distributed
    from megappo.trainer.build_roles import build_role
    from megappo.trainer.prepare.reward_model import load_reward_text
    from megappo.trainer.reward_model import ModelScorer

    config = validated(config_of(folder, folder / model, **section), TrainConfig)
    loaded = load_reward_text(config, {"data.train": (PromptSet(tuple(asked[:1]), 1, 0, 99), config.data)}, Cache(), images)
    assert loaded is not None
    device = select_device("cpu")
    start_distributed(device, TimeoutsConfig())
    engines = RoleEngines(config.model, TimeoutsConfig(), device)
    role = build_role(config, "reward_model", engines, None, images=None if images is None else images.store)
    return ModelScorer(role, role.engine.shares, loaded.text, config.reward_model), engines


def scored(scorer: Any, asked: list[Prompt], responses: Sequence[str] = RESPONSES) -> list[Verdict]:
    judged = [Judged(f"{one.id} (sample {i})", text, "", False, 1, {}) for i, (one, text) in enumerate(zip(asked, responses))]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shares: list = [None] * world_size
    dist.all_gather_object(shares, scorer(asked[rank::world_size], judged[rank::world_size]))
    return [shares[i % world_size][i // world_size] for i in range(len(asked))]


def raw(verdicts: list[Verdict]) -> list[float]:
    return [verdict.parts["raw"] for verdict in verdicts]


def values(verdicts: list[Verdict]) -> list[float]:
    return [verdict.score for verdict in verdicts]


def cut(verdicts: list[Verdict]) -> list[float]:
    return [verdict.parts["cut"] for verdict in verdicts]


def run_scores(rank: int, folder: Path, jobs: list[tuple[str, str, dict[str, Any]]]) -> dict[str, Any]:
    """Name of a job -> its scores; of what failed, the message."""
    found: dict[str, Any] = {}
    for name, model, section in jobs:
        if model in SEEING:
            found |= with_images(name, model, section, folder)
            continue
        asked = plain(prompts()) if section.get("chat_template") is False else prompts()
        scorer, engines = scorer_of(section, folder, model, asked)
        found[name] = scored(scorer, asked)
        if name == "offload":
            found["storage"] = sum(p.untyped_storage().nbytes() for p in scorer.model.engine.named_parameters().values())
        if name == "whole batch":
            found |= with_faults(scorer)
        engines.close()
    return found


def with_faults(scorer: Any) -> dict[str, Any]:
    """Scores of broken code (negative controls), and what is said of a text that has no score."""
    from megappo.data.reward_text import RewardText

    whole, short = RewardText.fitted, replace(scorer.text, max_tokens=12)
    found: dict[str, Any] = {"cut": scored(replace(scorer, text=short), prompts())}
    found["cut ids"] = [len(short.encode(prompt, response)) for prompt, response in zip(prompts(), RESPONSES)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RewardText, "fitted", lambda self, ids: whole(self, ids)[:-1])
        found["one token early"] = scored(scorer, prompts())
    tool = [*prompts()[:3], replace(prompts()[3], record={"prompt": [{"role": "tool", "content": "1"}]})]
    with pytest.raises(RewardError) as error:
        scored(scorer, tool)
    found["refused"] = str(error.value)
    with pytest.raises(NonFiniteOutput) as nan, pytest.MonkeyPatch.context() as patch:
        sound = scorer.model.scores
        patch.setattr(scorer.model, "scores", lambda batch: sound(batch).index_fill(0, torch.tensor([1]), torch.nan))
        scored(scorer, prompts())
    found["nan"] = str(nan.value)
    return found


def with_images(name: str, model: str, section: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Scores of prompts with pictures, and of the same without a tower (a negative control)."""
    from megappo.models import gpt, hf_classes

    asked, images = pictured(folder, model)
    scorer, engines = scorer_of(section, folder, model, asked, images)
    found = {name: scored(scorer, asked, SEEN)}
    module: Any = hf_classes if section.get("engine") == "fsdp2" else gpt
    features = module.features_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "features_of", lambda *args: [0.0 * one for one in features(*args)])
        found[f"{name}, blind"] = scored(scorer, asked, SEEN)
    engines.close()
    return found


def pictured(folder: Path, model: str) -> tuple[list[Prompt], PromptImages]:
    images = images_of(folder / model, folder / "questions.jsonl", folder / "cache")
    asked = []
    for number, (text, shown) in enumerate(PICTURED):
        tokens = [IMAGE_BASE + one for one in shown for _ in range(images.store.num_tokens(one))]
        asked.append(Prompt(f"p#{number}", tuple(tokens), text, "", {"prompt": text}))
    return asked, images


def plain(asked: list[Prompt]) -> list[Prompt]:
    """Those that are no list of chat messages."""
    return [prompt for prompt in asked if isinstance(prompt.record["prompt"], str)]


@pytest.fixture(scope="module")
def scores(folder) -> dict[str, Any]:
    jobs = [(f"{model} {layout}", model, {"parallel": LAYOUTS[layout]}) for model, layout in TABLE]
    jobs += [(f"{model} {name}", model, section) for model, name, section in SEES]
    jobs += [
        ("moe ep2", "moe", {"parallel": EP2}),
        ("other head", "other head", {"parallel": {"tp": 2}}),
        ("normalised", "llama", {"parallel": {"pp": 2}, "center": -0.3, "scale": 2.0, "clip": 0.1}),
        ("offload", "llama", {"parallel": {"tp": 2}, "offload": ["parameters"]}),
        ("bf16", "llama", {"parallel": {"pp": 2}, "dtype": "bf16"}),
        ("whole batch", "llama", {"parallel": {"tp": 2}, "micro_batch_tokens": 4096}),
        ("no template", "llama", {"parallel": {"tp": 2}, "chat_template": False}),
    ]
    first, second = spawn_world(run_scores, 2, folder, jobs)
    assert first == second, "every rank has all scores"
    return first


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, list[float]]:
    chats = [messages_of(question) for question in QUESTIONS]
    return {name: scores_of_transformers(folder / name, chats, RESPONSES) for name in (*MODELS, "moe")}


@pytest.mark.parametrize("model, layout", TABLE)
def test_the_scores_are_those_of_transformers(scores, expected, model: str, layout: str) -> None:
    assert raw(scores[f"{model} {layout}"]) == pytest.approx(expected[model], abs=TOLERANCE)
    assert min(abs(a - b) for i, a in enumerate(expected[model]) for b in expected[model][:i]) > 10 * TOLERANCE, "all differ"


@pytest.mark.parametrize("model, name", [one[:2] for one in SEES])
def test_scores_of_prompts_with_pictures_are_those_of_transformers(scores, folder, model: str, name: str) -> None:
    """Of its own class, whose backbone has the head behind it: transformers has no sequence classifier that sees."""
    images, head = pictured(folder, model)[1], load_file(folder / model / "model.safetensors")["score.weight"]
    backbone = KINDS[model][1].from_pretrained(folder / model, dtype=torch.float32, attn_implementation="eager").model
    tokenizer, expected = transformers.AutoTokenizer.from_pretrained(folder / model), []
    for (question, shown), response in zip(PICTURED, SEEN):
        turns = messages_of(question.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>"))
        ids = tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": response}], return_dict=False)
        numbers, coded = iter(shown), []
        for one in ids:
            number = next(numbers, None) if one == IMAGE_TOKEN else None
            coded += [one] if number is None else [IMAGE_BASE + number] * images.store.num_tokens(number)
        with torch.no_grad():
            last = backbone(**inputs_of(Sample.of(coded, shown), images)).last_hidden_state[0, -1]
        expected.append(float(head[0] @ last))
    found = raw(scores[f"{model} {name}"])
    assert found == pytest.approx(expected, abs=1e-5) and len(set(found)) == len(expected)
    blind = raw(scores[f"{model} {name}, blind"])
    assert [abs(a - b) > 1e-3 for a, b in zip(blind, expected)] == [bool(shown) for _, shown in PICTURED], "negative control"


def test_experts_over_ranks_and_other_settings_give_the_same_scores(scores, expected) -> None:
    assert raw(scores["moe ep2"]) == pytest.approx(expected["moe"], abs=TOLERANCE)
    for name in ("offload", "whole batch"):
        assert raw(scores[name]) == pytest.approx(expected["llama"], abs=TOLERANCE)
    assert raw(scores["bf16"]) == pytest.approx(expected["llama"], abs=0.2)
    assert raw(scores["bf16"]) != pytest.approx(expected["llama"], abs=TOLERANCE), "bf16 was used"


def test_a_plain_text_is_the_prompt_and_the_response_behind_it(scores, folder) -> None:
    texts = [prompt.text + SUFFIX for prompt in plain(prompts())]
    expected = scores_of_transformers(folder / "llama", texts, RESPONSES[: len(texts)])
    assert raw(scores["no template"]) == pytest.approx(expected, abs=TOLERANCE)


def test_values_are_centred_scaled_and_clipped(scores, expected) -> None:
    wanted = [max(-0.1, min(0.1, (number + 0.3) / 2.0)) for number in expected["llama"]]
    assert values(scores["normalised"]) == pytest.approx(wanted, abs=TOLERANCE)
    assert raw(scores["normalised"]) == pytest.approx(expected["llama"], abs=TOLERANCE)
    assert any(abs(value) == 0.1 for value in wanted) and any(abs(value) < 0.1 for value in wanted), "some are clipped"
    assert values(scores["llama tp2"]) == raw(scores["llama tp2"]), "and by default nothing is changed"


def test_a_wrong_place_or_head_would_be_seen(scores, expected) -> None:
    """Negative controls of the table above."""
    for broken in ("one token early", "other head"):
        assert max(abs(a - b) for a, b in zip(raw(scores[broken]), expected["llama"])) > 100 * TOLERANCE, broken
    assert values(scores["normalised"]) != pytest.approx(expected["llama"], abs=0.1)


def test_the_front_of_a_text_beyond_the_positions_is_cut_and_counted(scores, expected) -> None:
    lengths = scores["cut ids"]
    assert cut(scores["cut"]) == [float(length > 12) for length in lengths]
    assert max(lengths) > 12
    assert raw(scores["cut"]) != pytest.approx(expected["llama"], abs=TOLERANCE)
    assert cut(scores["whole batch"]) == [0.0] * len(RESPONSES)


def test_a_fault_names_rank_and_sample(scores) -> None:
    assert scores["refused"].startswith("rank 1: reward_model: the chat template of") and "no tools here" in scores["refused"]
    assert scores["refused"].endswith("sample p#3 (sample 3)")
    assert "score of the reward_model is NaN or infinite for 1 of 5 responses, the first sample p#2 (sample 2)" in scores["nan"]
    assert "computed by ranks 0-1 (stage 0)" in scores["nan"]


def test_offloaded_weights_are_gone_between_the_passes(scores) -> None:
    assert scores["storage"] == 0
