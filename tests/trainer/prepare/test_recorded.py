"""Recorded trajectories as data of a run: what is packed of them, what does not fit, and the returns that follow."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.config.errors import ConfigError
from megappo.config.layout_checks import placements_in_use, reads_trajectories, roles_in_use, trained_sections
from megappo.config.loading import validated
from megappo.config.schema import AlgorithmConfig, TrainConfig
from megappo.data.token_texts import token_texts
from megappo.data.tokenizers import load_tokenizer
from megappo.trainer.prepare.recorded import RecordedData, describe, load_recorded_data
from megappo.trainer.recorded import with_returns
from scripts.arithmetic import train_tokenizer
from tests.commands.trajectories.runs import record, write_run

ARCHS: Any = {"critic": SimpleNamespace(vocab_size=16)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, alphabet in (("own", "0123+="), ("other", "1023+=")):
        (folder / name).mkdir()
        train_tokenizer(folder / name, alphabet)
    return folder


def config_of(models: Path, run: Path, tokenizer: str = "own", **changes: Any) -> TrainConfig:
    tree = {
        "policy": {"model": str(models / tokenizer)},
        "critic": {"warmup": {"steps": 4, "trajectories": str(run)}, "ranks": changes.pop("ranks", "all")},
        "data": {"train": "absent.jsonl", "max_prompt_tokens": 4, "prompts_per_step": changes.pop("prompts", 2), "shuffle": False},
        "rollout": {"max_response_tokens": changes.pop("longest", 4), "samples_per_prompt": 1},
        "trainer": {"steps": 4},
        **changes,
    }
    return validated(tree, TrainConfig)


def written(models: Path, folder: Path, **changes: Any) -> Path:
    """A run of two steps with three trajectories; `changes` are of the first one."""
    tokenizer = load_tokenizer(models / "own")

    def row(sample: int, prompt: list[int], tokens: list[int], **more: Any) -> dict[str, Any]:
        texts = token_texts([*prompt, *tokens], tokenizer)
        of_texts = {"prompt_texts": texts[: len(prompt)], "response_texts": texts[len(prompt) :]}
        return record(tokens, sample=sample, prompt_tokens=prompt, **{**of_texts, **more})

    first = row(0, [1, 4, 8], [5, 6, 2], **{"reward": [0.25, None, 0.75], "response_mask": [1, 0, 1], **changes})
    second = row(3, [1, 5], [4, 4], reward=[0.0, -0.5], finish="length", score=-0.5)
    return write_run(folder, {1: [first, second], 2: [row(1, [1], [2], reward=[1.0]), row(2, [1], [4], finish="window")]})


def load(models: Path, run: Path, **changes: Any) -> RecordedData:
    return load_recorded_data(config_of(models, run, **changes), ARCHS)


def test_trajectories_are_packed_in_the_order_of_steps(models: Path, tmp_path: Path) -> None:
    data = load(models, written(models, tmp_path))
    batch = data.samples.batch
    assert batch.tokens.tolist() == [1, 4, 8, 5, 6, 2, 1, 5, 4, 4, 1, 2] and batch.cu_seqlens.tolist() == [0, 6, 10, 12]
    assert batch["response_mask"].int().tolist() == [0, 0, 0, 1, 0, 1, 0, 0, 1, 1, 0, 1]
    assert batch["token_reward"].tolist() == [0, 0, 0, 0.25, 0, 0.75, 0, 0, 0, -0.5, 0, 1]
    assert batch["truncated"].tolist() == [False, True, False] and batch["score"].tolist() == [1.0, -0.5, 1.0]
    assert [data.loader.next_step() for _ in range(2)] == [[0, 1], [2, 0]], "of two, over the end of a pass"
    assert data.notes == ("critic.warmup.trajectories: 1 responses go on in a later step, without a score yet; they are left out",)
    assert describe(data, 2) == f"3 trajectories of {tmp_path} (steps 1 to 2), 5 sampled tokens; 4 steps of 2 = 2.67 passes"


def test_what_is_trained_on_has_one_hash(models: Path, tmp_path: Path) -> None:
    one, same = (load(models, written(models, tmp_path / name)).samples.sha256 for name in ("one", "same"))
    other = load(models, written(models, tmp_path / "other", response_mask=[1, 0, 0], reward=[0.25, None, None])).samples.sha256
    assert one == same != other


@pytest.mark.parametrize(
    "record, changes, said",
    [
        ({}, {"longest": 1}, "has 6 tokens, and data.max_prompt_tokens + rollout.max_response_tokens is 5; raise rollout.max_resp"),
        ({}, {"prompts": 4}, "holds 3 trajectories, and a step takes 4 (data.prompts_per_step 4 x rollout.samples_per_prompt 1)"),
        ({}, {"tokenizer": "other"}, "token 1 (id 4) of sample 0 of step 1 was '0', and data.tokenizer reads '1'; use the tok"),
        ({"prompt_tokens": [1, 16, 8]}, {}, "sample 0 of step 1 has the token 16, and the critic knows 16; use a model with"),
        ({"reward": [0.25, None, None]}, {}, "sample 0 of step 1 has a reward that is not finite; remove that record"),
        ({"reward": [1.0]}, {}, "step_000001.jsonl, line 1: reward has 1 entries for 3 tokens of the response"),
        ({"format": 3}, {}, "line 1: format is 3, and this megappo reads 1"),
    ],
)
def test_what_does_not_fit_is_one_line(models: Path, tmp_path: Path, record: Any, changes: Any, said: str) -> None:
    run = written(models, tmp_path)
    file = run / "trajectories" / "step_000001.jsonl"
    if record:
        first, *others = file.read_text().splitlines()
        file.write_text("\n".join([json.dumps({**json.loads(first), **record}), *others]) + "\n")
    with pytest.raises(ConfigError) as caught:
        load(models, run, **changes)
    assert (
        str(caught.value).startswith("critic.warmup.trajectories") and said in str(caught.value) and "\n" not in str(caught.value)
    )


def test_a_record_without_rewards(models: Path, tmp_path: Path) -> None:
    run = written(models, tmp_path)
    for file in (run / "trajectories").iterdir():
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "reward"}) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="sample 0 of step 1 has no rewards of its tokens"):
        load(models, run)


def test_critics_alone_are_built(models: Path, tmp_path: Path) -> None:
    config = config_of(models, tmp_path, critics={"b": {}}, reward={"parts": [{"model": "reward_model"}]})
    assert reads_trajectories(config)
    assert list(roles_in_use(config)) == list(trained_sections(config)) == list(placements_in_use(config)) == ["critic", "critic_b"]
    sampled = config.model_copy(
        update={
            "critic": config.critic.model_copy(update={"warmup": config.critic.warmup.model_copy(update={"trajectories": None})})
        }
    )
    assert (
        not reads_trajectories(sampled) and list(placements_in_use(sampled))[-1] == "rollout" and "policy" in roles_in_use(sampled)
    )


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_targets_are_monte_carlo_returns_of_the_recorded_rewards(models: Path, tmp_path: Path, gamma: float) -> None:
    """Against sums written out: values enter after a cut response alone, and tokens that were not sampled not at all."""
    samples = load(models, written(models, tmp_path)).samples
    values, after = torch.linspace(-3, 3, samples.batch.num_tokens), torch.tensor([10.0, 2.0, 10.0])
    batch = samples.batch.with_fields({"value": values}, {"bootstrap": after})
    settings = {"gamma": gamma, "lam": 0.5, "lam_value": 1.0, "kl": {"placement": "none"}, "bootstrap_truncated": True}
    found = with_returns(batch, AlgorithmConfig(**settings))["returns"]
    wanted = [0.25 + gamma * 0.75, 0.75, gamma * (-0.5 + gamma * 2), -0.5 + gamma * 2, 1.0]
    assert found[batch["response_mask"]].tolist() == pytest.approx(wanted, 1e-6)
    assert not found[~batch["response_mask"]].any()
    control = with_returns(batch, AlgorithmConfig(**{**settings, "lam_value": 0.5}))["returns"]
    assert control[batch["response_mask"]].tolist() != pytest.approx(wanted, 1e-2), "another lambda reads the values"
