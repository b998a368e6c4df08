"""PPO with `engine: fsdp2` for all roles, and mixed with Megatron's: the numbers of the run that is Megatron's alone, checkpoints
that resume to the bit, and under the other engine to rounding, and the push into vLLM."""

from __future__ import annotations

import json
import math
import runpy
from itertools import groupby, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from PIL import Image

from megappo.data.images import IMAGE_BASE
from megappo.data.token_texts import response_text
from megappo.data.tokenizers import load_tokenizer
from megappo.models.hf_config import read_arch
from megappo.telemetry.jsonl import read_lines
from megappo.trainer.prepare.reward_model import check_classifier, check_head
from tests.models.vision_cases import EOS, IMAGE_TOKEN, PICTURES, write_questions, write_vision_checkpoint
from tests.trainer.preference_runs import run_all as run_preferences
from tests.trainer.preference_runs import run_config
from tests.trainer.small_run import (
    NUMBERS,
    bare,
    branch_off,
    check_same_numbers,
    run_many,
    set_keys,
    small_config,
    write_small_task,
)
from tests.worlds import spawn_world

STEPS, MINI_BATCH = 2, 16
FSDP2 = {f"{role}.engine": "fsdp2" for role in ("policy", "critic", "reference")} | {"policy.parallel": {}, "critic.parallel": {}}
CUT = {
    **FSDP2,
    "policy.parallel": {"tp": 2, "sequence_parallel": True},
    "critic.parallel": {"cp": 2},
    "reference.parallel": {"tp": 2},
}
RUNS: dict[str, dict[str, Any]] = {
    "megatron": {},
    "fsdp2": FSDP2,
    "mixed": {"critic.engine": "fsdp2", "critic.parallel": {}, "reference.engine": "fsdp2"},
    "cut": CUT,
    "vllm-cut": {**CUT, "rollout.engine": "vllm", "rollout.kv_cache_gib": 0.03},
    # Rank 1 has no role but the rollout's: it knows the policy's shards without its engine.
    "placed": {
        **FSDP2,
        "rollout.engine": "vllm",
        "rollout.kv_cache_gib": 0.03,
        "policy.ranks": "0",
        "critic.ranks": "1",
        "reference.ranks": "0",
    },
}
EXAMPLES = Path(__file__).parents[2] / "examples"
# A vision-language model with experts; its tower trains, in policy and critic.
VISION = "qwen3_vl_moe"
REWARD = """
def letters(sample):
    return (sum(map(ord, sample.response)) + len(sample.record["images"])) % 5 / 4
"""
SPARSE = {"tp": 2, "sequence_parallel": True, "ep": 2}
SEEING: dict[str, dict[str, Any]] = {"seeing-megatron": {"policy.parallel": SPARSE}, "seeing-fsdp2": FSDP2}


def config_of(folder: Path, name: str, kind: str) -> dict[str, Any]:
    optimizer = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.01}
    changes = {"rollout.engine": "megatron", "policy.optimizer": optimizer, "critic.optimizer": optimizer}
    changes |= {"algorithm.mini_batch_size": MINI_BATCH, **RUNS[kind]}
    config = bare(small_config(folder, name, steps=STEPS, **changes), saves=name in SAVES)
    config["checkpoint"]["export_at_end"] = name not in ("mixed", "cut", "vllm-cut", "placed")
    return config


def seeing_config(folder: Path, name: str) -> dict[str, Any]:
    changes = {
        "policy.model": str(folder / VISION),
        "teacher": {"model": str(folder / VISION), "dtype": "fp32"},
        "algorithm.distillation": {},
        "rollout": {"kv_cache_gib": 0.03, "samples_per_prompt": 2, "max_response_tokens": 6},
        "data": {"train": str(folder / "questions.jsonl"), "image_key": "images", "chat_template": False},
        "data.max_prompt_tokens": 64,
        "data.prompts_per_step": 4,
        "reward.parts": [{"path": str(folder / "letters.py"), "function": "letters"}],
        "algorithm.mini_batch_size": 4,
        "telemetry": {"trajectories_every": 1, "trajectories_per_step": 8},
        "trainer": {"steps": STEPS},
    }
    config = bare(small_config(folder, name, steps=STEPS, **changes, **SEEING[name]))
    config["checkpoint"]["export_at_end"] = True
    return config


TILED = "internvl"


def tiled_config(folder: Path) -> dict[str, Any]:
    """Of a model that sees an image in tiles, by a policy of tensor-parallel and a critic of pipeline ranks."""
    config = seeing_config(folder, "seeing-megatron")
    del config["teacher"], config["algorithm"]["distillation"]
    layout = {"tp": 2, "sequence_parallel": True}
    return set_keys(config, {"run.name": TILED, "policy.model": str(folder / TILED), "policy.parallel": layout})


# Whose environment draws at run time.
PLAYER = "qwen3_vl"


def playing_config(folder: Path, name: str) -> dict[str, Any]:
    """Three turns, with pictures of the data and of the environment; policy under Megatron, critic under fsdp2."""
    config = seeing_config(folder, "seeing-megatron")
    environment = {"path": str(EXAMPLES / "shown_guess.py"), "function": "show", "max_turns": 3, "images": 2}
    changes = {
        "run.name": name,
        "policy.model": str(folder / PLAYER),
        "policy.parallel": {"tp": 2, "sequence_parallel": True},
        "critic.engine": "fsdp2",
        "critic.parallel": {},
        "critic.value_head": "normal",
        "rollout.max_response_tokens": 64,
        "rollout.environment": environment,
        "checkpoint.save_every": 1,
    }
    del config["teacher"], config["algorithm"]["distillation"]
    return set_keys(config, changes)


def record_first_step(folder: Path, rank: int) -> Any:
    """Write what the models of this rank say of the samples of a run's first step."""
    from megappo.trainer.training_side import TrainingSide

    whole = TrainingSide.add_logprobs

    def recorded(side: TrainingSide, record: Any) -> None:
        whole(side, record)
        if not (file := folder / f"played {rank}.pt").exists():
            torch.save([record.batch.select([number]).to("cpu") for number in range(record.batch.num_sequences)], file)

    return mock.patch.object(TrainingSide, "add_logprobs", recorded)


def pairs_config(folder: Path, kind: str, engine: str) -> dict[str, Any]:
    """Two steps of DPO, or of a reward model, on pairs of answers to questions about pictures."""
    sizes = {"trainer": {"steps": STEPS, "batch_size": 4}, "data.max_tokens": 64, "data.image_key": "images"}
    changes = {"role.model": str(folder / VISION), "role.engine": engine, "data.train": str(folder / "pairs.jsonl")}
    config = run_config(folder, kind, f"{kind}-{engine}", **sizes, **changes)
    config["checkpoint"]["export_at_end"] = kind == "reward_model"
    del config["data"]["eval"], config["data"]["tokenizer"]
    return config


def write_pairs(folder: Path) -> None:
    lines = [
        {"prompt": "<image>How many?", "chosen": str(number), "rejected": "none", "images": f"{number}.png"} for number in range(4)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


SAVES = ("megatron", "fsdp2", "interrupted", "to-megatron")
# name -> the run whose first step it has, and the engine that resumes it there
INTERRUPTED = {"interrupted": ("fsdp2", "fsdp2"), "to-megatron": ("fsdp2", "megatron"), "to-fsdp2": ("megatron", "fsdp2")}


def run_all(rank: int, folder: Path) -> dict[str, list[str]]:
    """Name of an interrupted run -> lines that its resume logs about what has changed."""
    said: dict[str, list[str]] = {}
    run_many(rank, [(config_of(folder, name, name), False) for name in RUNS])
    run_many(rank, [(config, False) for config in (*(seeing_config(folder, name) for name in SEEING), tiled_config(folder))])
    run_preferences(rank, [(pairs_config(folder, *one), False) for one in product(("dpo", "reward_model"), ("megatron", "fsdp2"))])
    with record_first_step(folder, rank):
        run_many(rank, [(playing_config(folder, "playing"), False)])
    branch_off(folder, "playing", "playing-resumed", 1)
    run_many(rank, [(playing_config(folder, "playing-resumed"), True)])
    for name, (begins, resumes) in (INTERRUPTED | {"recut": ("fsdp2", "cut")}).items():
        branch_off(folder, begins, name, 1)
        with mock.patch("megappo.trainer.run_facts.warn_once", lambda _, __, line: said.setdefault(name, []).append(line)):
            run_many(rank, [(config_of(folder, name, resumes), True)])
    return said


def export_first_steps(rank: int, folder: Path) -> None:
    """Step 1 of two runs that both began under fsdp2, one of which has been Megatron's since."""
    from megappo.commands.export.export import export_checkpoint
    from megappo.parallel.device import start_distributed

    # The world is there, and the test's.
    alone = mock.patch("megappo.commands.export.export.start_alone", start_distributed)
    with alone, mock.patch("torch.distributed.destroy_process_group"):
        for name in ("interrupted", "to-megatron"):
            export_checkpoint(str(folder / "runs" / name), str(folder / f"{name} 1"), role="policy", step=1)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> tuple[Path, dict[str, list[str]]]:
    folder = tmp_path_factory.mktemp("fsdp2")
    write_small_task(folder)
    write_vision_checkpoint(folder / VISION, VISION)
    write_questions(folder)
    write_pairs(folder)
    (folder / "letters.py").write_text(REWARD)
    for kind in (PLAYER, TILED):
        write_vision_checkpoint(folder / kind, kind)
    # A quarter of all ids end a turn.
    (folder / PLAYER / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, *range(0, 256, 4)]}))
    return folder, spawn_world(run_all, 2, folder)[0]


@pytest.fixture(scope="module")
def folder(task) -> Path:
    return task[0]


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "policy/loss" in row]


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return weights_at(folder / "runs" / name / "export")


def weights_at(path: Path) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()


@pytest.mark.parametrize("name", ["fsdp2", "mixed", "cut"])
def test_it_gives_the_losses_of_the_megatron_run(folder: Path, name: str) -> None:
    ours, theirs = rows(folder, name), rows(folder, "megatron")
    assert len(ours) == len(theirs) == STEPS
    assert {row["policy/updates"] for row in ours} == {32 // MINI_BATCH}
    check_same_numbers(ours, theirs)
    assert min(abs(theirs[-1][k]) for k in ("policy/loss", "critic/loss", "policy/grad_norm")) > 1e-3, "something is compared"


def test_it_learns_and_its_export_is_the_policy(folder: Path) -> None:
    before = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    ours, theirs = weights(folder, "fsdp2"), weights(folder, "megatron")
    assert all(torch.allclose(ours[name], theirs[name], atol=2e-4) for name in before)
    assert max(float((ours[name] - tensor).abs().max()) for name, tensor in before.items()) > 1e-3


def test_a_checkpoint_resumes_to_the_same_bits(folder: Path) -> None:
    whole, resumed = weights(folder, "fsdp2"), weights(folder, "interrupted")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    last = {name: rows(folder, name)[-1] for name in ("fsdp2", "interrupted")}
    assert all(last["fsdp2"][name] == last["interrupted"][name] for name in NUMBERS)


def test_a_checkpoint_resumes_in_another_layout(folder: Path) -> None:
    """Saved from rows of two data-parallel ranks, read by tensor and context parallel ones, moments too."""
    whole, resumed = weights(folder, "fsdp2"), weights(folder, "recut")
    assert all(torch.allclose(whole[name], resumed[name], atol=2e-4) for name in whole)
    check_same_numbers(rows(folder, "recut")[-1:], rows(folder, "fsdp2")[-1:])


@pytest.mark.parametrize("name", ["to-megatron", "to-fsdp2"])
def test_a_run_resumes_under_the_other_engine(task, name: str) -> None:
    """The step after the change, and the export, are those of the run that never changed; the log says what changed."""
    (folder, said), (old, new) = task, INTERRUPTED[name]
    assert "interrupted" not in said, "the same engine is no news"
    for role, line in zip(("policy", "critic", "reference"), said[name], strict=True):
        assert f"{role}.engine was {old} until step-1 and is {new} from here" in line and "to rounding" in line
    found, wanted = rows(folder, name), rows(folder, "megatron")
    assert len(found) == STEPS
    check_same_numbers(found[-1:], wanted[-1:])
    ours, theirs = weights(folder, name), weights(folder, "megatron")
    assert all(torch.allclose(ours[key], theirs[key], atol=2e-4) for key in theirs)
    # Bit for bit would mean that the engine did not change.
    assert any(not torch.equal(ours[key], weights(folder, old)[key]) for key in ours)


def test_a_step_of_the_other_engine_is_exported(folder: Path) -> None:
    spawn_world(export_first_steps, 1, folder)
    fsdp2, megatron = (weights_at(folder / f"{name} 1") for name in ("interrupted", "to-megatron"))
    assert all(torch.equal(fsdp2[name], megatron[name]) for name in fsdp2)
    assert any(not torch.equal(fsdp2[name], tensor) for name, tensor in weights(folder, "interrupted").items())


def test_images_train_as_under_megatron(folder: Path) -> None:
    """The same responses of vLLM to prompts with pictures, and the same numbers of both roles' updates in each step."""
    ours, theirs = (rows(folder, name) for name in SEEING)
    assert len(ours) == len(theirs) == STEPS
    check_same_numbers(ours, theirs)
    for row in ours:
        assert 0 < row["reward/score_mean"] < 1 and row["policy/updates"] == row["critic/updates"] == 2
    for one in read_lines(folder / "runs" / "seeing-fsdp2" / "trajectories/step_000001.jsonl"):
        assert one["teacher_logprob"] == pytest.approx(one["logprob"], abs=1e-4), "the teacher is the policy as it starts, and sees"
    first, second = (read_lines(folder / "runs" / name / "trajectories/step_000002.jsonl") for name in SEEING)
    assert [one["response_tokens"] for one in first] == [one["response_tokens"] for one in second]
    # A thumbnail for each picture, and none for the question without one.
    shown = {(len(set(one["prompt_tokens"]) & set(map(int, one["images"]))), len(one["images"])) for one in first}
    assert shown <= {(0, 0), (1, 1), (2, 2)} and len(shown) > 1


def test_a_model_of_tiles_is_trained_and_sampled_alike(folder: Path) -> None:
    """vLLM says what the trainer says of the same tokens and pictures, also after a push of the tower that was trained."""
    found = rows(folder, TILED)
    assert len(found) == STEPS and all(row["rollout/prob_diff_max"] < 1e-5 for row in found)
    assert all(row[f"{role}/grad_norm"] > 0.1 for row in found for role in ("policy", "critic"))
    start, end = (
        transformers.InternVLForConditionalGeneration.from_pretrained(path)
        for path in (folder / TILED, folder / "runs" / TILED / "export")
    )
    moved = {name.split(".")[1] for (name, one), other in zip(start.named_parameters(), end.parameters()) if not one.equal(other)}
    assert {"vision_tower", "multi_modal_projector", "language_model"} <= moved, moved


def test_pictures_of_an_environment_are_seen_as_by_transformers(folder: Path) -> None:
    """Log-probs and values of trajectories, one at a time, on pixels that are drawn here again by the text of each turn."""
    tokenizer, game = load_tokenizer(folder / PLAYER), runpy.run_path(str(EXAMPLES / "shown_guess.py"))
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder / PLAYER, dtype=torch.float32)
    processor: Any = transformers.AutoImageProcessor.from_pretrained(folder / PLAYER, backend="pil")
    seed, hidden = playing_config(folder, "playing")["run"]["seed"], model.config.text_config.hidden_size
    head = torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed)) * (hidden + 1) ** -0.5  # as `fill_value_head`
    num_shown = 0
    for batch in (one for rank in (0, 1) for one in torch.load(folder / f"played {rank}.pt", weights_only=False)):
        tokens, mask = batch.tokens.tolist(), batch["response_mask"].tolist()
        runs = [
            (key, [token for token, _ in run])
            for key, run in groupby(zip(tokens, mask), key=lambda pair: (pair[1], pair[0] >= IMAGE_BASE and pair[0]))
        ]
        pictures, said = [], ""
        for (sampled, image), run in runs:
            if sampled:
                said = response_text(run, tokenizer)
            elif image:
                number = image - IMAGE_BASE
                pictures.append(
                    Image.open(folder / f"{number}.png").convert("RGB") if number < len(PICTURES) else game["picture"](said)
                )
        if pictures and IMAGE_TOKEN in tokens:
            continue  # a policy may sample it, and transformers takes it for a place
        ids = [IMAGE_TOKEN if one >= IMAGE_BASE else one for one in tokens]
        inputs = {"input_ids": torch.tensor([ids])}
        if pictures:
            inputs |= processor(images=pictures, return_tensors="pt")
            inputs["mm_token_type_ids"] = torch.tensor([[int(one >= IMAGE_BASE) for one in tokens]])
            num_shown += sum(one >= IMAGE_BASE + len(PICTURES) for one in set(tokens))
        with torch.no_grad():
            out = model(**inputs, use_cache=False)
            states = model.model(**inputs, use_cache=False).last_hidden_state[0]
        logprob = out.logits[0, :-1].log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
        value, sampled = (states @ head.t())[:-1, 0], batch["response_mask"][1:]
        assert (batch["logprob"][1:] - logprob)[sampled].abs().max() < 1e-5
        assert (batch["value"][1:] - value)[sampled].abs().max() < 1e-5
        assert (batch["rollout_logprob"][1:] - logprob)[sampled].abs().max() < 1e-4
    assert num_shown > 4


def test_a_run_with_pictures_of_an_environment_resumes_to_the_bit(folder: Path) -> None:
    whole, resumed = (rows(folder, name) for name in ("playing", "playing-resumed"))
    assert all(whole[-1][name] == resumed[-1][name] for name in NUMBERS) and len(whole) == STEPS
    first, second = (
        read_lines(folder / "runs" / name / "trajectories/step_000002.jsonl") for name in ("playing", "playing-resumed")
    )
    assert first == second, "thumbnails too"
    shown = [set(one["response_tokens"]) & set(map(int, one["images"])) for one in first]
    assert any(shown) and all("<image>" in one["response"] for one, numbers in zip(first, shown) if numbers)


@pytest.mark.parametrize("kind", ["dpo", "reward_model"])
def test_preferences_with_images_are_learned_as_under_megatron(folder: Path, kind: str) -> None:
    first, second = (read_lines(folder / "runs" / f"{kind}-{engine}" / "metrics.jsonl") for engine in ("megatron", "fsdp2"))
    for mine, theirs in zip(first, second, strict=True):
        names = [f"{kind}/{name}" for name in ("loss", "margin", "grad_norm")]
        assert [mine[name] for name in names] == pytest.approx([theirs[name] for name in names], rel=1e-4, abs=1e-5)
    before, after = (row[f"{kind}/loss"] for row in first)
    assert before == pytest.approx(math.log(2), abs=1e-4) and after < before - 1e-3


@pytest.mark.parametrize("engine", ["megatron", "fsdp2"])
def test_the_export_of_a_reward_model_with_pictures_is_one(folder: Path, engine: str) -> None:
    """Every tensor of transformers' class but its output projection, and a head, under a name that vLLM takes for a classifier."""
    export = folder / "runs" / f"reward_model-{engine}" / "export"
    check_classifier(export)
    check_head(export, read_arch(export).hidden_size)
    _, loading = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(export, output_loading_info=True)
    assert loading["missing_keys"] == {"lm_head.weight"} and loading["unexpected_keys"] == {"score.weight"}
    assert json.loads((export / "config.json").read_text())["architectures"] == ["Qwen3VLMoeForSequenceClassification"]
    assert (export / "preprocessor_config.json").is_file()


@pytest.mark.parametrize("name", SEEING)
def test_the_export_of_a_model_with_pictures_is_read_by_transformers(folder: Path, name: str) -> None:
    model_class = transformers.Qwen3VLMoeForConditionalGeneration
    before = model_class.from_pretrained(folder / VISION).state_dict()
    model, loading = model_class.from_pretrained(folder / "runs" / name / "export", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    moved = {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])}
    assert any("visual" in key for key in moved) and any("experts" in key for key in moved)


@pytest.mark.parametrize("name", ["vllm-cut", "placed", "playing", *SEEING])
def test_vllm_samples_with_the_pushed_weights(folder: Path, name: str) -> None:
    for row in rows(folder, name):
        assert row["rollout/push_verified"] == 1.0
        assert row["rollout/prob_diff_mean"] < 1e-4, "vLLM's probabilities are the policy's"
