"""A reference answer is needed where something reads it, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.models.hf_config import read_arch
from megappo.trainer.prepare.data import RunData, load_evaluation_data, load_run_data
from tests.trainer.small_run import set_keys, small_config, write_small_task

WITHOUT = [{"prompt": "1+2=", "gold": "3", "task": "free"}] * 40
SOME = [{"prompt": "1+2=", "answer": "3", "task": "sum"}, {"prompt": "3+4=", "answer": None, "task": "free"}] * 20
CODE = {
    "blind.py": "def score(sample):\n    return len(sample.response) / 9\n",
    "reads.py": "def score(sample):\n    return sample.response == sample.answer\n",
    "asks.py": "def score(sample):\n    return 0.5\nscore.requires = ('answer',)\n",
    "game.py": "def step(turn):\n    return None if turn.index else 'again'\n",
    "quiz.py": "def step(turn):\n    return None if turn.answer in turn.text else 'again'\n",
}


def own(name: str) -> dict[str, str]:
    return {"name": name, "path": f"{name}.py", "function": "score"}


BLIND: dict[str, Any] = {"reward.parts": [{"name": "has_eos"}, own("blind")]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    write_small_task(folder)
    for name, text in CODE.items():
        (folder / name).write_text(text)
    for name, lines in (("without", WITHOUT), ("some", SOME)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return folder


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch, train: Any = "without", **changes: Any) -> RunData:
    monkeypatch.chdir(folder)
    config = small_config(folder, "run", steps=1, **{"data.train": f"{train}.jsonl", "data.eval": None})
    del config["reward"]["parts"][0]
    Path("run.yaml").write_text(yaml.safe_dump(set_keys(config, {"trainer.eval_every": 1, **BLIND, **changes})))
    return load_run_data(load_config("run.yaml"), read_arch(str(folder / "model")))


def test_a_reward_that_reads_none_needs_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = loaded(folder, monkeypatch)
    assert [prompt.answer for prompt in data.train.prompts] == [""] * 40
    [note] = [note for note in data.notes if "reference answer" in note]
    count = "data.train: 40 of 40 records have no reference answer (data.answer_key=answer)"
    assert note == f"{count}, which is an empty text for the reward"
    some = loaded(folder, monkeypatch, "some")
    assert [prompt.answer for prompt in some.train.prompts] == ["3", ""] * 20 and "20 of 40 records" in "".join(some.notes)


def test_a_remote_reward_and_an_environment_need_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(folder, monkeypatch, **{"reward.parts": [{"url": "http://127.0.0.1:1/score", "name": "far"}]})
    game = {"path": "game.py", "function": "step", "max_turns": 2}
    loaded(folder, monkeypatch, **{"rollout.environment": game})
    with pytest.raises(ConfigError, match=r"^data\.answer_key=answer: .*without.jsonl#0 \(line 1\) .* quiz\.py: step reads it$"):
        loaded(folder, monkeypatch, **{"rollout.environment": game | {"path": "quiz.py"}})


@pytest.mark.parametrize(
    "part, reader",
    [
        ({"name": "exact_match"}, "exact_match"),
        ({"name": "gsm8k_flexible"}, "gsm8k_flexible"),
        ({"name": "math_verify"}, "math_verify"),
        (own("reads"), "reads"),
        (own("asks"), "asks"),
    ],
)
def test_what_reads_an_answer_says_where_there_is_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: dict[str, str], reader: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, monkeypatch, **{"reward.parts": [{"name": "has_eos"}, part]})
    place = f"{folder / 'without.jsonl'}#0 (line 1)"
    keys = "it has prompt, gold, task"
    assert str(caught.value) == f"data.answer_key=answer: {place} has no such key; {keys}; the reward {reader} reads it"
    loaded(folder, monkeypatch, **{"reward.parts": [part], "data.answer_key": "gold"})
    with pytest.raises(ConfigError, match=r"some\.jsonl#1 \(line 2\) holds null, not a string or a number; the reward"):
        loaded(folder, monkeypatch, "some", **{"reward.parts": [part]})


def test_only_records_whose_recipe_reads_it_need_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def route(of_free: str) -> dict[str, Any]:
        return {"reward": {"route": {"key": "task", "map": {"sum": [{"name": "exact_match"}], "free": [{"name": of_free}]}}}}

    loaded(folder, monkeypatch, "some", **{"reward.parts": [], **route("has_eos")})
    with pytest.raises(ConfigError, match="holds null.* the reward gsm8k_strict reads it"):
        loaded(folder, monkeypatch, "some", **{"reward.parts": [], **route("gsm8k_strict")})


def test_an_evaluation_has_a_reward_and_a_key_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"data": "without.jsonl", "reward": {"parts": [{"name": "exact_match"}]}}
    data = loaded(folder, monkeypatch, evaluations={"held": {**one, "answer_key": "gold"}})
    assert data.evaluations[0].prompts[0].answer == "3"
    blind = loaded(folder, monkeypatch, evaluations={"held": {**one, "reward": {"parts": [own("blind")]}, "answer_key": "none"}})
    assert any("have no reference answer (evaluations.held.answer_key=none)" in note for note in blind.notes)
    with pytest.raises(ConfigError, match=r"^evaluations\.held\.answer_key=none: .*#0 \(line 1\) has no such key; .* exact_match"):
        loaded(folder, monkeypatch, evaluations={"held": {**one, "answer_key": "none"}})
    with pytest.raises(ConfigError, match=r"of evaluations\.held\.data; check evaluations\.held\.answer_key, or name another"):
        loaded(
            folder,
            monkeypatch,
            evaluations={"held": {**one, "answer_key": "task", "reward": {"parts": [{"name": "gsm8k_flexible"}]}}},
        )
    says = r"^evaluations\.held: data\.answer_key=answer: .*without\.jsonl#0 \(line 1\) has no such key; .*; the reward exact_match"
    with pytest.raises(ConfigError, match=says):
        loaded(folder, monkeypatch, evaluations={"held": one})
    with pytest.raises(ConfigError, match=says):
        load_evaluation_data(load_config("run.yaml"), read_arch(str(folder / "model")))
