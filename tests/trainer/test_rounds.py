"""Rounds of a step in whole runs: what is drawn, replaced, trained on and counted; a resumed run goes on with the same bits.

Every round is recorded in the run. The oracle below plays the rounds again in plain Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch

from benchmarks.reliability.compare import MEASURED
from megappo.data.loader import PassRates, PromptLoader
from megappo.trainer.rounds import StepSamples
from tests.trainer.small_run import bare, branch_off, run_many, set_keys, small_config, write_small_task
from tests.worlds import spawn_world

STEPS, HALF, PLACES, PROMPTS = 4, 2, 8, 60
ROUNDS = {"grpo": 3, "gae": 2, "part": 2}
SAMPLES = {"grpo": 4, "gae": 2, "part": 2}


def config_of(folder: Path, name: str) -> dict[str, Any]:
    n = SAMPLES[name]
    config = bare(small_config(folder, name, steps=STEPS), saves=True)
    usual = {
        "rollout.engine": "megatron",
        "rollout.samples_per_prompt": n,
        "data.prompts_per_step": PLACES,
        "algorithm.mini_batch_size": PLACES * n,
        "algorithm.dynamic_sampling": {"max_rounds": ROUNDS[name]},
        "telemetry": {"trackers": [], "trajectories_every": 1, "trajectories_per_step": PLACES * n},
        "checkpoint.save_every": HALF,
    }
    if name == "grpo":
        del config["critic"], config["algorithm"]["bootstrap_truncated"]
        usual["algorithm.estimator"] = "grpo"
    else:
        usual |= {"policy.parallel": {}, "algorithm.dynamic_sampling.metric": {"gae": None, "part": "exact_match"}[name]}
    return set_keys(config, usual)


@contextmanager
def recorded(rounds: list[dict[str, Any]]) -> Iterator[None]:
    """Every round that is added: rows, and all samples' scores, of the part that is compared too."""
    plain = StepSamples.add

    def add(self: StepSamples, rows: list[int], experience: Any, scored: Any) -> None:
        total, part = (
            experience.column(torch.tensor(x, dtype=torch.float64)).tolist() for x in (scored.total, scored.parts["exact_match"])
        )
        sampled = experience.table.sampled.tolist()
        is_first = not self.num_drawn
        plain(self, rows, experience, scored)
        rounds.append({"rows": rows, "score": total, "part": part, "sampled": sampled, "first": is_first, "left": self.num_open})

    with mock.patch.object(StepSamples, "add", add):
        yield


WEIGHTS = [0.0, 10.0, 10.0, 10.0, *[1.0] * (PROMPTS - 4)]
RESUMED = {"grpo": "halves", "chosen": "chosen_halves"}


def chosen_config(folder: Path) -> dict[str, Any]:
    """Prompts by weight and pass rate, and rounds too."""
    changes = {
        "run.name": "chosen",
        "data.train": str(folder / "data" / "weighted.jsonl"),
        "data.weight_key": "weight",
        "data.curriculum": {"min_chance": 0.25},
    }
    return set_keys(config_of(folder, "grpo"), changes)


def write_weights(folder: Path) -> None:
    records = [json.loads(line) for line in (folder / "data" / "train.jsonl").read_text().splitlines()]
    lines = [json.dumps({**record, "weight": weight}) for record, weight in zip(records, WEIGHTS, strict=True)]
    (folder / "data" / "weighted.jsonl").write_text("\n".join(lines) + "\n")


def run_all(rank: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    configs = {name: config_of(folder, name) for name in SAMPLES} | {"chosen": chosen_config(folder)}
    for name, config in configs.items():
        found[name] = []
        with recorded(found[name]):
            run_many(rank, [(config, False)])
    for whole, name in RESUMED.items():
        branch_off(folder, whole, name, HALF)
        found[name] = [one for step in steps_of(found[whole])[:HALF] for one in step]
        with recorded(found[name]):
            run_many(rank, [(set_keys(configs[whole], {"run.name": name}), True)])
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, list[dict[str, list[dict[str, Any]]]]]:
    folder = tmp_path_factory.mktemp("dynamic")
    write_small_task(folder)
    write_weights(folder)
    return folder, spawn_world(run_all, 2, folder)


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "policy/loss" in row]


def replayed(rounds: Sequence[Mapping[str, Any]], n: int, max_rounds: int, compared: str) -> dict[str, Any]:
    """One step by the book: the rounds' prompts into the open places, one after the other, while their scores are alike."""
    rows, scores, places = [-1] * PLACES, [0.0] * (PLACES * n), list(range(PLACES))
    drawn = replaced_tokens = left = 0
    for number, one in enumerate(rounds, 1):
        assert len(one["rows"]) == len(places)
        drawn, still_open = drawn + len(places), []
        for at, place in enumerate(places):
            group = slice(at * n, at * n + n)
            rows[place], scores[place * n : place * n + n] = one["rows"][at], one["score"][group]
            if len(set(one[compared][group])) == 1:
                if number < max_rounds:
                    still_open.append(place)
                    replaced_tokens += sum(one["sampled"][group])
                else:
                    left += 1
        places = still_open
    assert not places, "the last round leaves none open"
    return {"rows": rows, "scores": scores, "drawn": drawn, "tokens": replaced_tokens, "left": left, "rounds": len(rounds)}


def steps_of(rounds: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    starts = [i for i, one in enumerate(rounds) if one["first"]] + [len(rounds)]
    return [list(rounds[a:b]) for a, b in zip(starts, starts[1:])]


def oracle(rounds: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    compared = "part" if name == "part" else "score"
    return [replayed(one, SAMPLES[name], ROUNDS[name], compared) for one in steps_of(rounds)]


def trajectories(folder: Path, name: str, step: int) -> list[dict[str, Any]]:
    path = next((folder / "runs" / name / "trajectories").glob(f"*{step:06}*"))
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_trained_on_is_what_the_rounds_leave(world, name: str) -> None:
    folder, (ours, theirs) = world
    assert ours[name] == theirs[name], "every rank decides alike"
    expected, n = oracle(ours[name], name), SAMPLES[name]
    assert len(expected) == STEPS and any(one["rounds"] > 1 for one in expected)
    for step, (one, row) in enumerate(zip(expected, metrics(folder, name), strict=True), 1):
        assert row["rollout/rounds"] == one["rounds"] and row["rollout/prompts_drawn"] == one["drawn"]
        assert row["rollout/prompts_replaced"] == one["drawn"] - PLACES and row["rollout/equal_left"] == one["left"]
        assert row["rollout/tokens_replaced"] == one["tokens"]
        assert row["reward/score_mean"] == pytest.approx(sum(one["scores"]) / len(one["scores"]))
        assert row["rollout/prob_diff_mean"] < 1e-4, "tokens and their log-probs were merged alike"
        if name == "grpo":
            assert row["reward/equal_groups"] == pytest.approx(one["left"] / PLACES)
        samples = trajectories(folder, name, step)
        assert [sample["sample"] for sample in samples] == list(range(PLACES * n))
        assert [int(sample["id"].rpartition("#")[2]) for sample in samples] == [row for row in one["rows"] for _ in range(n)]
        assert [sample["score"] for sample in samples] == pytest.approx(one["scores"])
        for sample in samples:
            text = "".join(sample["prompt_texts"]).replace("▁", " ")
            assert sample["prompt"] in text, "the tokens are those of the prompt"
            answer = [text for text in sample["response_texts"] if text not in ("<s>", "</s>", "<pad>", "<unk>")]
            assert "".join(answer).replace("▁", " ").strip() == sample["response"].strip()


@pytest.mark.parametrize("name", SAMPLES)
def test_prompts_come_in_the_loaders_order_and_are_counted_once(world, name: str) -> None:
    folder, (ours, _) = world
    drawn = [row for one in ours[name] for row in one["rows"]]
    assert drawn == in_order(len(drawn))
    cursor = json.loads((folder / "runs" / name / "checkpoints" / f"step-{STEPS}" / "state.json").read_text())["loader"]
    assert cursor["epoch"] * PROMPTS + cursor["index"] == len(drawn)


def in_order(count: int) -> list[int]:
    loader = PromptLoader(PROMPTS, 1, shuffle=True, seed=1)
    return [loader.next_step()[0] for _ in range(count)]


@pytest.mark.parametrize("names", RESUMED.items())
def test_a_resumed_run_goes_on_to_the_last_bit(world, names: tuple[str, str]) -> None:
    folder, (ours, _) = world
    whole, halves = (folder / "runs" / name / "checkpoints" / f"step-{STEPS}" for name in names)
    assert ours[names[0]] == ours[names[1]]
    assert (whole / "state.json").read_text() == (halves / "state.json").read_text()
    shards = sorted(path.relative_to(whole) for path in whole.rglob("models/*/*.safetensors"))
    assert shards and all((whole / name).read_bytes() == (halves / name).read_bytes() for name in shards)
    volatile = (*MEASURED, "rollout/push_verified")
    rows = [[{k: v for k, v in row.items() if not k.startswith(volatile)} for row in metrics(folder, name)] for name in names]
    assert rows[0] == rows[1]


def test_prompts_are_chosen_by_weight_and_by_the_pass_rates_of_all_ranks(world) -> None:
    """A loader that is told the recorded scores chooses the recorded prompts; one that is told others does not."""
    folder, (ours, theirs) = world
    assert ours["chosen"] == theirs["chosen"]

    def choices(scale: float) -> tuple[list[list[int]], PromptLoader]:
        rates = PassRates(PROMPTS, 0.5, 0.25, seed=1)
        loader, n, found = PromptLoader(PROMPTS, PLACES, True, 1, weights=numpy.array(WEIGHTS), pass_rates=rates), 4, []
        for one in ours["chosen"]:
            found.append(loader.next_step(len(one["rows"])))
            scores = [[scale * x for x in one["score"][i * n : i * n + n]] for i in range(len(one["rows"]))]
            rates.observe(found[-1], scores)
        return found, loader

    found, loader = choices(1.0)
    assert found == [one["rows"] for one in ours["chosen"]]
    state = json.loads((folder / "runs" / "chosen" / "checkpoints" / f"step-{STEPS}" / "state.json").read_text())
    assert state["loader"] == loader.state_dict()
    last = metrics(folder, "chosen")[-1]
    assert loader.pass_rates is not None and last["rollout/prompts_skipped"] == loader.pass_rates.skipped > 0
    assert last["rollout/prompts_seen"] == loader.pass_rates.num_seen
    visits = [row for one in ours["chosen"] for row in one["rows"]]
    assert 0 not in visits and visits.count(1) + visits.count(2) + visits.count(3) > len(visits) / 5, "weight 0, and 10"
    assert choices(0.0)[0] != found, "negative control"


def test_generated_tokens_count_in_the_speed_and_the_work(world) -> None:
    folder, _ = world
    for row in metrics(folder, "gae"):
        trained = PLACES * SAMPLES["gae"] * row["lengths/response_mean"]
        generated = row["throughput/generated_tokens_per_s"] * row["timing/generate_s"]
        assert generated == pytest.approx(trained + row["rollout/tokens_replaced"])
        passed = row["perf/tokens_per_s/logprobs"] * row["timing/logprobs_s"]
        decoded = row["perf/tokens_per_s/generate"] * row["timing/generate_s"]
        assert (decoded > passed * 1.01) == (row["rollout/tokens_replaced"] > 0)


def test_other_rounds_are_noticed(world) -> None:
    """Negative control: the oracle would see a wrong row replaced, or prompts that a resume draws twice."""
    folder, (ours, _) = world
    first = steps_of(ours["grpo"])[0]
    right = replayed(first, 4, 3, "score")
    wrong = [dict(first[0]), *({**one, "rows": list(reversed(one["rows"]))} for one in first[1:])]
    assert len(first) > 1 and replayed(wrong, 4, 3, "score")["rows"] != right["rows"]
    drawn = [row for one in ours["grpo"] for row in one["rows"]]
    assert drawn[:PLACES] + drawn[:PLACES] != in_order(2 * PLACES)
