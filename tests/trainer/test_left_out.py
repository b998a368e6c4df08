"""Samples without a score: they leave a step before anything can learn from them, all counts add up, and too many end the run."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megappo.algo.groups import are_equal
from megappo.algo.summaries import standard_error
from megappo.config.batch import SampleShare, UpdateSchedule
from megappo.config.prompt_sections import DynamicSamplingConfig
from megappo.config.reward_sections import EvaluationConfig
from megappo.config.schema import AlgorithmConfig
from megappo.data.loader import PromptLoader
from megappo.data.packing import PackedBatch, cu_seqlens_of
from megappo.data.prompts import Prompt
from megappo.data.tokenizers import Tokenizer
from megappo.rewards.base import TooFewVerdicts
from megappo.rewards.compose import Scored
from megappo.rollout.types import Played, Request, SamplingParams
from megappo.telemetry.trajectories.read import read_run
from megappo.trainer.advantages import GREEDY, add_advantages
from megappo.trainer.evaluation import Evaluation, Evaluator
from megappo.trainer.experience.collect import collect
from megappo.trainer.experience.experience import Experience
from megappo.trainer.left_out import LeftOut, left_out_of
from megappo.trainer.rounds import StepSamples, nothing_to_learn
from megappo.trainer.scoring import score_responses
from tests.rewards.samples import scorer_with
from tests.rollout.responses import answered
from tests.trainer.experiences import dealt
from tests.trainer.small_run import bare, run_many, set_keys, small_config, write_small_task
from tests.trainer.test_advantages_and_updates import LETTERS
from tests.worlds import spawn_world

GROUP = [0, 0, 0, 1, 1, 2, 2, 2]
SCORE = [1.0, 0.0, 0.5, 1.0, 0.0, 0.25, 0.75, 0.0]
LENGTHS = [3, 5, 4, 6, 3, 4, 5, 3]
FIELDS = ("logprob", "ref_logprob", "rollout_logprob", "value", "bootstrap")


def experience_of(chosen: list[int], previous: list[int] | None = None) -> Experience:
    """Samples of eight with one token of prompt each."""
    lengths, at = [LENGTHS[i] for i in chosen], [sum(LENGTHS[:i]) for i in chosen]
    places = torch.cat([torch.arange(start, start + length) for start, length in zip(at, lengths)])
    values = torch.randn(len(FIELDS), sum(LENGTHS), generator=torch.Generator().manual_seed(1))
    first = torch.cat([torch.arange(length) == 0 for length in lengths])
    of_samples = {"truncated": torch.zeros(len(chosen), dtype=torch.bool), "group": torch.tensor(GROUP)[chosen].int()}
    if previous is not None:
        of_samples["previous"] = torch.tensor(previous)
    of_samples["bootstrap"] = values[4, : len(LENGTHS)][chosen]
    of_tokens = {"response_mask": ~first, **{name: row[places] for name, row in zip(FIELDS[:4], values)}}
    return dealt(PackedBatch(places, cu_seqlens_of(lengths), of_tokens, of_samples))


def scored_of(chosen: list[int], reasons: dict[int, str]) -> Scored:
    found = Scored([str(i) for i in chosen], [SCORE[i] for i in chosen], {"mine": [SCORE[i] for i in chosen]})
    return found.without(reasons)


def left_of(reasons: dict[int, str], *, compares_groups: bool = False) -> LeftOut | None:
    return left_out_of(experience_of(list(range(8))), scored_of(list(range(8)), reasons), compares_groups=compares_groups)


def advantages(experience: Experience, scored: Scored, estimator: str, **keys: Any) -> PackedBatch:
    asked = AlgorithmConfig.model_validate({"estimator": {"type": estimator}, "kl": {"placement": "none"}, **keys})
    return add_advantages(experience, torch.tensor(scored.total), 0.0, asked).experience.batch


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


ESTIMATORS = {
    "gae": {"whiten_advantages": True},
    "grpo": {},
    "rloo": {},
    "reinforce_plus_plus": {"whiten_advantages": True},
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_others_learn_the_bits_of_a_step_that_never_had_those_samples(estimator: str) -> None:
    """So a model that learns to time out gains nothing by it: there is no advantage of such a response, and none of the others
    moves. Negative control: scored 0, as it was, it pulls the others up and is pushed down itself, or up."""
    keys, kept = ESTIMATORS[estimator], [0, 1, 3, 4, 5, 7]
    left = left_of({2: "undecided", 6: "died"}, compares_groups=estimator in ("grpo", "rloo"))
    assert left is not None and left.counts == {"undecided": 1, "died": 1} and left.numbers.tolist() == kept
    found = advantages(*left.rest(), estimator, **keys)
    alone = advantages(experience_of(kept), scored_of(kept, {}), estimator, **keys)
    assert torch.equal(found.tokens, alone.tokens)
    for name in ("advantage", "raw_advantage", "reward"):
        assert torch.equal(found[name], alone[name]) and not bool(found[name].isnan().any())
    zero = replace(scored_of(list(range(8)), {}), total=[0.0 if i in (2, 6) else SCORE[i] for i in range(8)])
    whole = advantages(experience_of(list(range(8))), zero, estimator, **keys)
    assert not torch.equal(whole.select(kept)["advantage"], alone["advantage"])


def test_a_group_with_fewer_than_two_scores_is_no_group() -> None:
    """But only for an estimator that compares; every sample has one reason, so the counts add up."""
    reasons = {4: "unreachable", 5: "died", 6: "unreachable"}
    left = left_of(reasons, compares_groups=True)
    assert left is not None and left.numbers.tolist() == [0, 1, 2]
    assert left.counts == {"unreachable": 2, "died": 1, "group": 2} and left.share == 5 / 8
    assert left.counts.total() + len(left.numbers) == 8
    assert left.describe() == "5 of 8 responses have no score: 1 died, 2 group, 2 unreachable"
    alone = left_of(reasons)
    assert alone is not None and alone.numbers.tolist() == [0, 1, 2, 3, 7]
    assert left_of({}, compares_groups=True) is None, "nothing is copied or exchanged of a step that has all scores"


def test_a_greedy_response_without_a_score_is_no_baseline() -> None:
    experience = experience_of(list(range(8)))
    greedy = torch.tensor([0.5, 0.5, 0.5, math.nan, math.nan, 0.25, 0.25, 0.25], dtype=torch.float64)
    left = left_out_of(experience.with_fields({}, {GREEDY: greedy}), scored_of(list(range(8)), {4: "died"}), compares_groups=False)
    assert left is not None and left.counts == {"baseline": 1, "died": 1} and left.numbers.tolist() == [0, 1, 2, 5, 6, 7]


def test_a_trajectory_of_several_sequences_goes_whole() -> None:
    """Samples 4 -> 5 -> 0 and 6 -> 2 and 7 -> 3: the trajectory that ends in 0 has no score."""
    previous = [5, -1, 6, 7, -1, 4, -1, -1]
    experience = experience_of(list(range(8)), previous)
    left = left_out_of(experience, scored_of(list(range(8)), {0: "undecided"}), compares_groups=False)
    assert left is not None and left.numbers.tolist() == [1, 2, 3, 6, 7]
    assert left.counts == {"undecided": 1} and left.share == 1 / 4
    rest, scored = left.rest()
    assert rest.table.previous.tolist() == [-1, 3, 4, -1, -1] and rest.table.num_trajectories == 3
    assert scored.texts == ["1", "2", "3", "6", "7"] and scored.no_verdict == []
    assert rest.batch.lengths.tolist() == rest.table.length.tolist() == [LENGTHS[i] for i in (1, 2, 3, 6, 7)]


def test_a_step_without_any_score_keeps_its_samples_and_teaches_nothing() -> None:
    left = left_of(dict.fromkeys(range(8), "undecided"))
    assert left is not None
    rest, scored = left.rest()
    assert rest.table.num_samples == 8 and scored.total == [0.0] * 8 and scored.no_verdict == ["undecided"] * 8
    assert nothing_to_learn(rest.table, left) == "8 of 8 responses have no score: 8 undecided"
    whole = experience_of([0, 1])
    assert nothing_to_learn(whole.table, None) == ""
    assert nothing_to_learn(replace(whole.table, sampled=torch.zeros(2)), None) == "none of the 2 responses has a sampled token"


def test_answers_that_cannot_be_read_do_not_end_a_run() -> None:
    left = left_of({0: "unusable", 1: "unusable", 2: "died", 3: "died", 4: "unusable", 5: "unusable"})
    assert left is not None and left.share == 6 / 8 and not left.exceeds(0.25) and left.exceeds(0.2)


@pytest.mark.parametrize("reason", ["died", "undecided", "judge_down"])
def test_a_trajectory_that_its_environment_ended_has_no_score(alone: None, reason: str) -> None:
    """It keeps its tokens, no rule's score counts, and the others are scored as ever."""
    played = [Played(2, (), False, False, no_verdict=one) for one in ("", reason)]
    responses = [replace(answered((2, 0)), number=number, played=one) for number, one in enumerate(played)]
    requests = [Request(number, (1,), 0) for number in range(2)]
    prompts = [Prompt(f"f#{number}", (1,), "?", "b", {}) for number in range(2)]
    scorer, letters = scorer_with({"exact_match": 1.0}), cast("Tokenizer", LETTERS)
    for lost, reasons in ((responses, ["", reason]), ([replace(one, played=played[0]) for one in responses], [])):
        found = score_responses(collect(requests, lost), prompts.__getitem__, letters, scorer)
        assert found.no_verdict == reasons and found.texts == ["b", "b"] and found.total[0] == 1.0
        assert math.isnan(found.total[1]) == bool(reasons) == math.isnan(found.parts["exact_match"][1])


def test_a_group_is_compared_by_its_scores_alone() -> None:
    reward = torch.tensor([1.0, math.nan, 1.0, math.nan, math.nan, 1.0, 0.0, math.nan])
    assert are_equal(reward, torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])).tolist() == [True, True, False]


@pytest.mark.parametrize("metric", [None, "mine"])
def test_places_with_fewer_than_two_scores_are_drawn_again(alone: None, metric: str | None) -> None:
    """Also where the part that is compared has a verdict, and another part none."""
    chosen = [0, 1, 3, 4, 5, 6]
    found = replace(scored_of(chosen, {}), total=[1.0, math.nan, 1.0, 0.0, 0.25, 0.75], no_verdict=["", "died", *[""] * 4])
    experience = experience_of(chosen)
    pairs = replace(experience.table, group=torch.tensor([0, 0, 1, 1, 2, 2]).int())
    samples = StepSamples(DynamicSamplingConfig(max_rounds=2, metric=metric), 3, 2)
    samples.add([7, 8, 9], replace(experience, table=pairs), found)
    assert samples.open.tolist() == [0], "the two responses of the others have scores that differ"


def evaluated(reasons: dict[int, str], name: str = "set") -> dict[str, float]:
    """Figures of four prompts with two responses each."""
    settings = EvaluationConfig(data="d.jsonl", n=2, temperature=1.0, pass_at=(1, 2), correct_score=0.75)
    evaluator = Evaluator(name, settings, [], SamplingParams(4), scorer_with({}), "exact_match", 0)
    experience, scored = experience_of(list(range(8))), scored_of(list(range(8)), reasons)
    return evaluator._scores(experience, scored, left_out_of(experience, scored, compares_groups=False))


def test_evaluations_count_the_responses_that_have_a_score(alone: None) -> None:
    """By hand: scores 1 0 | - 1 | - - | 0.75 0, of which at least 0.75 is right; every text is an answer of its own."""
    assert evaluated({2: "undecided", 4: "unreachable", 5: "unreachable"}) == {
        "mean@2": (1 + 0 + 1 + 0.75 + 0) / 5,
        "stderr": pytest.approx(standard_error([0.5, 1.0, 0.375])),
        "pass@1": (0.5 + 1 + 0.5) / 3,
        "pass@2": (1 + 1) / 2,
        "maj@2": (0.5 + 1 + 0.5) / 3,
        "no_verdict/undecided": 1,
        "no_verdict/unreachable": 2,
    }
    assert evaluated({0: "died"}, "") == {"score": sum(SCORE[1:]) / 7, "no_verdict/died": 1}
    assert "no_verdict" not in str(evaluated({}))


def test_an_evaluation_without_any_score_says_so_in_its_line(alone: None) -> None:
    found = evaluated(dict.fromkeys(range(8), "unreachable"))
    assert all(math.isnan(found[name]) for name in ("mean@2", "pass@1", "pass@2", "maj@2"))
    line = Evaluation("set", 4, 2, {**found, "length": 1.0, "truncated": 0.0}).describe()
    assert line.startswith("set: mean@2 nan,") and line.endswith(", 8 without a score (unreachable)")


@pytest.mark.parametrize(
    ("samples", "size", "part"),
    [(64, 16, SampleShare()), (57, 16, SampleShare()), (3, 16, SampleShare()), (57, 8, SampleShare(1, 2))],
)
def test_mini_batches_are_counted_as_they_are_cut(samples: int, size: int, part: SampleShare) -> None:
    numbers = torch.arange(part.index, samples, part.count)
    assert UpdateSchedule(1, size, "token-mean", part).mini_batches(samples) == len(numbers.split(size))


# ------------------------------------------------------------------------------------------------------------------- runs

# Every seventh prompt has no verdict, a third of them none on even samples, and a fifth at most one in a group of four.
REWARD = """
import os
from megappo.rewards.base import NoVerdict
def score(sample):
    row, number = int(sample.sample_id.split("#")[1].split()[0]), int(sample.sample_id.split("sample ")[1].rstrip(")"))
    if row % 7 == 0 or (row % 5 == 1 and number % 4): raise NoVerdict("judge")
    if row % 3 == 0 and number % 2 == 0: return None
    return {"score": 1.0 + row / 8 + number / 64, "parts": {"row": row}}
def nothing(sample):
    raise NoVerdict("down")
calls = 0
def play(turn, seen):
    row, number = int(turn.sample_id.split("#")[1].split()[0]), int(turn.sample_id.split("sample ")[1].rstrip(")"))
    reason = "no_tool" if row % 4 == 0 else "undecided" if row % 8 == 1 and number % 2 else ""
    with open(seen, "a") as file: file.write(f"{row} {number} {reason}\\n")
    if row % 4 == 0: raise NoVerdict("no_tool")
    while reason: pass
    return "3" if number % 3 else None
def warming(sample):
    global calls
    calls += 1
    if calls <= 20: raise NoVerdict("warming")
    return 1.0 / calls
def judged(sample, seen):
    if "train" in sample.sample_id: return 0.5
    with open(seen, "a+") as file:
        file.write(sample.sample_id + "\\n")
        file.seek(0)
        times = file.read().splitlines().count(sample.sample_id)
    if times == 2 and "#0 " not in sample.sample_id: raise NoVerdict("down")
    return (0.5, 1.0, 0.75)[times - 1]
def later(sample, first, mended):
    row = int(sample.sample_id.split("#")[1].split()[0])
    if row not in first and not os.path.exists(mended): raise NoVerdict("down")
    return len(sample.response) / 8
"""
STEPS = 2
RUNS: dict[str, dict[str, Any]] = {
    "gae": {"algorithm.mini_batch_size": 8},
    "grpo": {"algorithm.estimator": "grpo", "rollout.samples_per_prompt": 4, "data.prompts_per_step": 8},
    "rounds": {
        "algorithm.estimator": "rloo",
        "rollout.samples_per_prompt": 4,
        "data.prompts_per_step": 8,
        "algorithm.dynamic_sampling": {"max_rounds": 3},
        "data.curriculum": {"min_chance": 0.25},
    },
    "remax": {"algorithm.estimator": "remax", "policy.parallel": {}},
    "environment": {
        "rollout.stop": list("0123456789"),  # or few turns of a random model end
        "rollout.environment": {"function": "play", "max_turns": 2, "turn_tokens": 2, "workers": 2, "timeout_s": 1.0},
        "reward": {"parts": [{"name": "exact_match"}], "max_without_verdict": 0.9},
    },
    "partial": {"rollout.partial_rollout_tokens": 3, "algorithm.kl": {"coef": 0.01}},
}


def config_of(folder: Path, name: str, function: str = "score", **changes: Any) -> dict[str, Any]:
    config = bare(small_config(folder, name, steps=STEPS), saves=name in ("best", "halves", "stop", "redraw"))
    usual = {
        "rollout.engine": "megatron",
        "reward": {"parts": [{"path": str(folder / "mine.py"), "function": function}], "max_without_verdict": 0.9},
        "telemetry": {"trackers": [], "trajectories_every": 1, "trajectories_per_step": 32},
    }
    set_keys(config, {**usual, **changes})
    if changes.get("algorithm.estimator"):
        del config["critic"], config["algorithm"]["bootstrap_truncated"]
    if "rollout.environment" in changes:
        ours = {"path": str(folder / "mine.py"), "args": {"seen": str(folder / f"{name}.seen")}}
        config["rollout"]["environment"] = {**changes["rollout.environment"], **ours}
    if "rollout.partial_rollout_tokens" in changes:
        config["algorithm"].pop("bootstrap_truncated", None)
    return config


def run_all(rank: int, folder: Path) -> dict[str, str]:
    """Errors of the runs that end with one."""
    for name, changes in RUNS.items():
        run_many(rank, [(config_of(folder, name, **changes), False)])
    found = {}
    for name, above in (("stop", "stop"), ("redraw", "redraw")):
        config = config_of(folder, name, "nothing")
        config["reward"] |= {"max_without_verdict": 0.5, "above_max": above}
        try:
            run_many(rank, [(config, False)])
        except TooFewVerdicts as error:
            found[name] = str(error)
    config = config_of(folder, "redrawn", "warming")
    config["reward"] |= {"max_without_verdict": 0.5, "above_max": "redraw"}
    run_many(rank, [(config, False)])
    run_many(rank, [(best_config(folder), False)])
    return found | {"later": stopped_and_resumed(rank, folder)}


def best_config(folder: Path) -> dict[str, Any]:
    """A run whose second evaluation has a score on one of 20 responses, the best of all."""
    config = config_of(folder, "best", "judged", **{"data.eval": str(folder / "data" / "eval.jsonl"), "trainer.eval_every": 1})
    config["reward"]["parts"][0]["args"] = {"seen": str(folder / "best.seen")}
    return set_keys(config, {"trainer.keep_best": "eval/score", "checkpoint.asynchronous": False})


def stopped_and_resumed(rank: int, folder: Path) -> str:
    """Error and notes of a run whose reward is down after one step; it is mended, and the run resumed. Another is never stopped."""
    args = {"first": list(map(int, PromptLoader(60, 16, shuffle=True, seed=1).next_step())), "mended": str(folder / "mended")}
    part = {"path": str(folder / "mine.py"), "function": "later", "args": args}
    keys = {"reward": {"parts": [part]}, "checkpoint": {"save_every": "never", "export_at_end": False}}
    halves, whole = (config_of(folder, name, **keys) for name in ("halves", "whole"))
    with pytest.raises(TooFewVerdicts) as caught:
        run_many(rank, [(halves, False)])
    (folder / "mended").touch()
    run_many(rank, [(halves, True), (whole, False)])
    return f"{caught.value}\n{caught.value.__notes__[-1]}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("left_out")
    write_small_task(folder)
    (folder / "mine.py").write_text(REWARD)
    ours, theirs = spawn_world(run_all, 2, folder)
    assert ours.keys() == theirs.keys()
    return folder, ours


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "policy/updates" in row]


def records_of(folder: Path, name: str, step: int) -> list[dict[str, Any]]:
    file = folder / "runs" / name / "trajectories" / f"step_{step:06}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def expected(record: dict[str, Any]) -> float | str:
    row, number = int(record["id"].rpartition("#")[2]), record["sample"]
    if row % 7 == 0 or (row % 5 == 1 and number % 4):
        return "judge"
    return "undecided" if row % 3 == 0 and number % 2 == 0 else 1.0 + row / 8 + number / 64


@pytest.mark.parametrize("name", ["gae", "grpo"])
def test_each_sample_is_trained_on_or_left_out_by_a_reason(world: tuple[Path, Any], name: str) -> None:
    """By the records, which have all of them: with their prompts, numbers and texts, and what was learned from of the others."""
    folder, _ = world
    for step, row in enumerate(rows_of(folder, name), 1):
        records = records_of(folder, name, step)
        assert [one["sample"] for one in records] == list(range(32))
        counts = Counter(one.get("reason", "trained") for one in records)
        logged = {key.rpartition("/")[2]: value for key, value in row.items() if key.startswith("reward/no_verdict/")}
        trained = [one for one in records if "reason" not in one]
        assert logged == {reason: count for reason, count in counts.items() if reason != "trained"} and len(logged) >= 2
        assert row["reward/without_verdict"] == pytest.approx(1 - len(trained) / 32)
        assert sum(logged.values()) + len(trained) == 32
        for one in records:
            wanted = expected(one)
            assert one.get("reason") in (None, "group", wanted)
            assert one["score"] == (None if "reason" in one else wanted) and ("advantage" in one) == ("reason" not in one)
            assert ("reason" in one) or one["parts"]["mine.score.row"] == int(one["id"].rpartition("#")[2])
        scores = [one["score"] for one in trained]
        assert row["reward/score_mean"] == pytest.approx(sum(scores) / len(scores), abs=1e-6)
        assert row["reward/score_max"] == pytest.approx(max(scores))
        assert row["policy/updates"] == -(-len(trained) // (8 if name == "gae" else 16)) and row["policy/grad_norm"] > 0
        assert row["rollout/prob_diff_mean"] < 1e-4, "tokens and their log-probs were selected alike"
    assert (name == "grpo") == any("reward/no_verdict/group" in row for row in rows_of(folder, name))


@pytest.mark.parametrize("name", [name for name in RUNS if name not in ("gae", "grpo")])
def test_runs_of_every_kind_learn_from_the_rest(world: tuple[Path, Any], name: str) -> None:
    folder, _ = world
    rows = rows_of(folder, name)
    assert len(rows) == STEPS and all(row["policy/updates"] > 0 for row in rows)
    finite = ("policy/loss", "policy/grad_norm", "policy/entropy", "policy/advantage_mean")
    assert all(row[key] is not None and math.isfinite(row[key]) for row in rows for key in finite)
    assert any(row["reward/without_verdict"] > 0 for row in rows)


def test_trajectories_that_the_environment_ended_are_left_out_by_its_reasons(world: tuple[Path, Any]) -> None:
    """By what the environment wrote down before it raised or ran out of time; the two ranks of the policy ask it once a turn."""
    folder, _ = world
    seen = [line.split(" ") for line in (folder / "environment.seen").read_text().splitlines()]
    ended = {(int(row), int(number)): reason for row, number, reason in seen if reason}
    records = [one for step in (1, 2) for one in records_of(folder, "environment", step)]
    assert {(int(one["id"].rpartition("#")[2]), one["sample"]): one["reason"] for one in records if "reason" in one} == ended
    assert set(ended.values()) == {"no_tool", "undecided"} and len(ended) < len(records) == 32 * STEPS
    rows = rows_of(folder, "environment")
    for reason, count in Counter(ended.values()).items():
        assert sum(row.get(f"reward/no_verdict/{reason}", 0) for row in rows) == count
    late = sum(reason == "undecided" for reason in ended.values())
    assert sum(row["rollout/turns_late"] for row in rows) == pytest.approx(late / 32)


def test_readers_leave_out_what_has_no_score_and_say_so(world: tuple[Path, Any]) -> None:
    folder, _ = world
    found = read_run(folder / "runs" / "gae")
    assert all(math.isfinite(one.score) and "advantage" in one.fields for one in found.trajectories)
    (note,) = [note for note in found.notes if "have no score (" in note]
    assert " judge" in note and " undecided)" in note


def test_too_many_end_the_run_with_one_line_and_a_checkpoint(world: tuple[Path, Any]) -> None:
    folder, errors = world
    said = "step 1: 32 of 32 responses have no score: 32 down; reward.max_without_verdict is 0.5"
    saved = "emergency checkpoint: the state after step 1 is saved; --resume goes on from there"
    later = f"{said.replace('step 1', 'step 2')}\n{saved}"
    assert errors == {"stop": said, "redraw": f"{said} at the 4th draw", "later": later}
    halves, whole = rows_of(folder, "halves"), rows_of(folder, "whole")
    learned = [(row["reward/score_mean"], row["policy/loss"], row["policy/grad_norm"], row["critic/loss"]) for row in whole]
    assert [
        (row["reward/score_mean"], row["policy/loss"], row["policy/grad_norm"], row["critic/loss"]) for row in halves
    ] == learned


def test_a_checkpoint_is_not_the_best_by_a_few_responses(world: tuple[Path, Any]) -> None:
    folder, _ = world
    lines = (folder / "runs" / "best" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "eval/score" in row]
    assert [row["eval/score"] for row in rows] == [0.5, 1.0, 0.75]
    assert [row.get("eval/no_verdict/down") for row in rows] == [None, 19.0, None]
    assert (folder / "runs" / "best" / "checkpoints" / "BEST").read_text() == "step-2\n"


def test_a_step_that_is_drawn_again_counts_what_it_drew_in_vain(world: tuple[Path, Any]) -> None:
    """Two ranks have no verdict on their first 20 samples each: on all 32 of the first draw, and on 8 of the second."""
    folder, _ = world
    first, second = rows_of(folder, "redrawn")
    assert first["reward/no_verdict/redrawn"] == 32 and first["reward/no_verdict/warming"] == 8
    assert first["reward/without_verdict"] == 0.25 and first["policy/updates"] == 2
    assert second["reward/without_verdict"] == 0 and not [name for name in second if name.startswith("reward/no_verdict/")]
    rows = [{one["id"] for one in records_of(folder, "redrawn", step)} for step in (1, 2)]
    loader = PromptLoader(60, 16, shuffle=True, seed=1)
    draws = [{f"#{row}" for row in loader.next_step()} for _ in range(3)]
    assert [{"#" + one.rpartition("#")[2] for one in found} for found in rows] == draws[1:], "other prompts, and none twice"
