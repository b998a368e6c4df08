"""Responses that go on over several steps: what a step asks for, trains on, scores and keeps; a resumed run to the bit.

Stage 5 is compared with loops in fp64. In whole runs every request and answer is recorded, and an oracle plays the steps again in
plain Python.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import yaml

from benchmarks.reliability.compare import MEASURED
from megappo.config.batch import UpdateSchedule
from megappo.config.errors import ConfigError
from megappo.config.schema import AlgorithmConfig
from megappo.data.loader import PromptLoader
from megappo.data.packing import PackedBatch, cu_seqlens_of
from megappo.parallel.shares import Shares
from megappo.rollout.types import Segment
from megappo.trainer import rollout_side
from megappo.trainer.advantages import add_advantages
from megappo.trainer.experience.experience import Experience
from megappo.trainer.partial_rollouts import Begun, PartialRollouts, Unfinished, resume_partial_rollouts
from megappo.trainer.prepare.data import sampling_notes
from megappo.trainer.state import TrainerState
from megappo.trainer.updates import Counting, mini_batches, targets_of
from tests.config.examples import train_config
from tests.trainer.small_run import bare, branch_off, run_many, set_keys, small_config, write_small_task
from tests.worlds import spawn_world

# Prompt, tokens of earlier steps, tokens of this one, and how the response stands: it ends, is cut, or goes on.
RESPONSES = [(2, 3, 2, "ends"), (1, 0, 4, "goes on"), (3, 2, 3, "cut"), (2, 4, 1, "goes on"), (1, 0, 2, "ends"), (2, 0, 3, "cut")]
SCORE = [1.0, 0.0, -0.5, 0.0, 2.0, 0.25]
KL = 0.3


def batch_of_windows() -> PackedBatch:
    window = [flag for p, e, s, _ in RESPONSES for flag in [False] * (p + e) + [True] * s]
    whole = [flag for p, e, s, _ in RESPONSES for flag in [False] * p + [True] * (e + s)]
    generator = torch.Generator().manual_seed(5)
    names = ("logprob", "ref_logprob", "rollout_logprob", "entropy", "value")
    fields = {name: (-1.0) ** (name != "entropy") * torch.rand(len(whole), generator=generator) for name in names}
    nan = torch.full((len(whole),), torch.nan)  # nothing of the prompts may be read
    return PackedBatch(
        tokens=torch.arange(len(whole)),
        cu_seqlens=cu_seqlens_of([p + e + s for p, e, s, _ in RESPONSES]),
        token_fields={
            "response_mask": torch.tensor(window),
            "whole_mask": torch.tensor(whole),
            **{name: torch.where(torch.tensor(whole), x, nan) for name, x in fields.items()},
        },
        sequence_fields={
            "truncated": torch.tensor([how == "cut" for *_, how in RESPONSES]),
            "unfinished": torch.tensor([how == "goes on" for *_, how in RESPONSES]),
            "bootstrap": torch.rand(len(RESPONSES), generator=generator),
        },
    )


def by_hand(a: AlgorithmConfig, per_token: list[list[float] | None] | None) -> dict[str, list[float]]:
    """Advantages at the tokens of the step; rewards and returns at the whole responses, returns of those that do not go on."""
    batch, start = batch_of_windows(), 0
    size = batch.num_tokens
    found = {name: [0.0] * size for name in ("reward", "raw_advantage", "returns")}
    found["value_mask"] = [0.0] * size
    for b, (p, e, s, how) in enumerate(RESPONSES):
        places = range(start + p, start + p + e + s)
        start += p + e + s
        value = [float(batch["value"][t]) for t in places]
        reward = []
        for i, t in enumerate(places):
            kl = float(batch["logprob"][t]) - float(batch["ref_logprob"][t])
            extra = per_token[b][i] if per_token and per_token[b] is not None else 0.0
            reward.append(-KL * kl + extra + (SCORE[b] if i == e + s - 1 else 0.0))
        after = 0.0
        if how == "goes on" or (how == "cut" and a.bootstrap_truncated):
            after = float(batch["bootstrap"][b]) if a.bootstrap_truncated is True else value[-1]
        lam = max(0.0, 1 - 1 / (a.lam_length_alpha * (e + s))) if a.lam_length_alpha else a.lam
        lam_value = a.lam if a.lam_value is None else a.lam_value
        for i, t in enumerate(places):
            # the definition: a sum of all later TD errors, each weighed by its distance
            deltas = [reward[j] + a.gamma * (value[j + 1] if j + 1 < len(value) else after) - value[j] for j in range(len(value))]
            found["reward"][t] = reward[i]
            if i >= e:
                found["raw_advantage"][t] = sum((a.gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(value)))
            found["returns"][t] = value[i] + sum((a.gamma * lam_value) ** (j - i) * deltas[j] for j in range(i, len(value)))
            found["value_mask"][t] = float(how != "goes on")
    return found


def shaped(a: AlgorithmConfig, per_token: list[list[float] | None] | None = None) -> Experience:
    experience = Experience.of_whole(batch_of_windows())
    return add_advantages(experience, torch.tensor(SCORE), KL, a, per_token).experience


def error(experience: Experience, wanted: dict[str, list[float]]) -> float:
    return max(float((experience.batch[name].double() - torch.tensor(x)).abs().max()) for name, x in wanted.items())


CASES = [
    {},
    {"lam_value": 1.0, "lam": 0.8},
    {"bootstrap_truncated": True, "gamma": 0.9},
    {"bootstrap_truncated": "last", "gamma": 0.9},
    {"lam_length_alpha": 0.5, "lam_value": 1.0},
]
PER_TOKEN = [[0.1 * (i + 1) for i in range(e + s)] if how == "ends" else None for _, e, s, how in RESPONSES]


@pytest.mark.parametrize("per_token", [None, PER_TOKEN], ids=["scores", "rewards of tokens"])
@pytest.mark.parametrize("changes", CASES, ids=range(len(CASES)))
def test_advantages_of_a_window_and_returns_of_whole_responses_are_those_of_the_loops(changes, per_token):
    a = AlgorithmConfig(**changes)
    assert error(shaped(a, per_token), by_hand(a, per_token)) < 1e-6


@pytest.mark.parametrize("changes, other", [(CASES[0], CASES[2]), (CASES[2], CASES[3]), (CASES[0], {"lam": 1.0})])
def test_another_bootstrap_or_lambda_is_noticed(changes, other):
    """Negative control."""
    assert error(shaped(AlgorithmConfig(**changes)), by_hand(AlgorithmConfig(**other), None)) > 1e-2


def test_advantages_are_whitened_over_the_tokens_of_the_step():
    batch = shaped(AlgorithmConfig()).batch
    kept = batch["raw_advantage"][batch["response_mask"]].double()
    want = (kept - kept.mean()) / kept.std()
    torch.testing.assert_close(batch["advantage"][batch["response_mask"]].double(), want, rtol=1e-5, atol=1e-5)
    assert not batch["advantage"][~batch["response_mask"]].any()


def test_the_critic_passes_what_ends_and_the_policy_all():
    experience, alone = shaped(AlgorithmConfig()), Shares.of_ranks([0])
    table = experience.table
    assert table.earlier.tolist() == [e for _, e, _, _ in RESPONSES] and table.sampled.tolist() == [s for _, _, s, _ in RESPONSES]
    assert table.ends.tolist() == [how != "goes on" for *_, how in RESPONSES]
    assert table.truncated.tolist() == [how == "cut" for *_, how in RESPONSES]
    schedule = UpdateSchedule(1, 1, "token-mean")
    minis = list(mini_batches(experience, alone, None, schedule, 9, 7, Counting(targets=targets_of("critic", experience))))
    assert sorted(int(mini.denominator) for mini in minis) == sorted(e + s for _, e, s, how in RESPONSES if how != "goes on")
    assert all(int(mini.share["weight"].sum()) == mini.denominator for mini in minis)
    minis = list(mini_batches(experience, alone, None, schedule, 9, 7, Counting(targets=targets_of("policy", experience))))
    assert sorted(int(mini.denominator) for mini in minis) == sorted(s for _, _, s, _ in RESPONSES)


def test_what_is_unfinished_survives_json():
    parts = [[(3, 1)], [(2, 1), (2, 2)], []]
    begun = tuple(
        Begun(row, tuple(Segment(numpy.arange(n, dtype=numpy.int32), -numpy.random.rand(n).astype("f"), v) for n, v in segments))
        for row, segments in enumerate(parts)
    )
    one = Unfinished(begun, 7, 2)
    state = json.loads(json.dumps(one.encoded()))
    again = Unfinished.decoded(state)
    assert again[1:] == (7, 2) and again.encoded() == state and [b.row for b in again.begun] == [0, 1, 2]
    for mine, theirs in zip(begun, again.begun, strict=True):
        for a, b in zip(mine.segments, theirs.segments, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist() and (a.logprobs == b.logprobs).all() and a.version == b.version


def state_with(lengths: Sequence[int], left: int = 0) -> TrainerState:
    """As a step with one window of these responses leaves it; `left` more responses of prompt 9 are to begin."""
    begun = tuple(Begun(row, (Segment(numpy.full(n, row, "i4"), numpy.zeros(n, "f4"), 0),)) for row, n in enumerate(lengths))
    return TrainerState(step=1, unfinished=Unfinished(begun, 9 if left else -1, left).encoded())


def settings(**rollout: Any) -> Any:
    """The keys that windows read."""
    usual = {"partial_rollout_tokens": 4, "max_response_tokens": 10, "samples_per_prompt": 3}
    return SimpleNamespace(
        rollout=SimpleNamespace(**{**usual, **rollout}), run=SimpleNamespace(seed=1), data=SimpleNamespace(prompts_per_step=2)
    )


def test_a_step_with_fewer_places_than_responses_lets_the_others_wait():
    prompts = [SimpleNamespace(tokens=[row]) for row in range(20)]
    windows = PartialRollouts(settings(), prompts, PromptLoader(20, 2, shuffle=False, seed=1), state_with([1, 2, 3, 9, 4, 5, 6, 7]))
    rows, requests = windows.draw(2)
    assert rows == [0, 1, 2, 3, 4, 5] and [one.max_tokens for one in requests] == [4, 4, 4, 1, 4, 4]
    assert [one.goes_on for one in requests] == [True, True, True, False, True, True]
    assert [one.row for one in windows._waiting] == [6, 7]


def test_responses_to_a_prompt_begin_in_several_steps():
    prompts = [SimpleNamespace(tokens=[row]) for row in range(20)]
    loader = PromptLoader(20, 2, shuffle=False, seed=1)
    windows = PartialRollouts(settings(), prompts, loader, state_with([1, 1], left=2))
    rows, requests = windows.draw(2)
    assert rows == [0, 1, 9, 9, 0, 0] and windows._open == (0, 1) and loader.index == 1, "the loader's first prompt has one to come"
    assert [len(one.before) for one in requests] == [1, 1, 0, 0, 0, 0]
    windows = PartialRollouts(settings(), prompts, loader, state_with([1] * 5, left=2))
    assert windows.draw(2)[0][5:] == [9] and windows._open == (9, 1) and loader.index == 1, "and none is drawn while one is open"


def test_the_plan_says_how_many_steps_a_response_takes(tmp_path):
    config = train_config(tmp_path, ["rollout.partial_rollout_tokens=200"])
    (note,) = sampling_notes(config, PromptLoader(600, 256, shuffle=False, seed=1))
    assert "rollout.partial_rollout_tokens = 200: a response takes up to 3 steps in one of the 256 places" in note, (
        "ceil(512 / 200)"
    )


def test_a_resume_with_shorter_responses_is_refused_and_one_without_windows_drops_them():
    notes: list[str] = []
    log: Any = SimpleNamespace(note=notes.append)
    with pytest.raises(ConfigError, match="rollout.max_response_tokens = 10: .* unfinished response of 12 tokens; use at least 13"):
        resume_partial_rollouts(settings(), state_with([2, 12]), log)
    resume_partial_rollouts(settings(), state_with([2, 9]), log)
    resume_partial_rollouts(settings(), TrainerState(), log)
    assert notes == []
    state = state_with([2, 12])
    resume_partial_rollouts(settings(partial_rollout_tokens=None), state, log)
    assert state.unfinished is None
    assert notes == ["rollout.partial_rollout_tokens is null: 2 responses that the checkpoint left unfinished are dropped"]


# ---------------------------------------------------------------------------------------------------------------- whole runs

STEPS, HALF, WINDOW, LONGEST, N, PROMPTS_PER_STEP, PROMPTS = 7, 3, 2, 7, 3, 4, 60
SAMPLES = N * PROMPTS_PER_STEP


def config_of(folder: Path, name: str) -> dict[str, Any]:
    config = bare(small_config(folder, name, steps=STEPS), saves=True)
    telemetry = {"trackers": [], "trajectories_every": 1, "trajectories_per_step": SAMPLES}
    if name in RECIPES:
        return set_keys(small_recipe(config, name), {"telemetry": telemetry})
    usual = {
        "rollout": {"engine": "megatron", "samples_per_prompt": N, "max_response_tokens": LONGEST},
        "rollout.partial_rollout_tokens": WINDOW,
        "data.prompts_per_step": PROMPTS_PER_STEP,
        "algorithm": {"mini_batch_size": SAMPLES // 2, "lam_value": 1.0, "kl": {"coef": 0.01}},
        "telemetry": telemetry,
        "checkpoint.save_every": HALF,
    }
    return set_keys(config, usual)


RECIPES = {"t_ppo": 4, "turn_ppo": 2, "ppo": 2}
"""Recipe of configs/recipes -> steps that it runs here."""


def small_recipe(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The recipe with model, data, reward and sizes of a small run; what its algorithm is stays."""
    recipe = yaml.safe_load((Path(__file__).parents[2] / "configs" / "recipes" / f"{name}.yaml").read_text())
    changes = {
        "run": config["run"],
        "data": config["data"],
        "reward": config["reward"],
        "rollout.samples_per_prompt": N,
        "rollout.max_response_tokens": LONGEST,
        "data.prompts_per_step": PROMPTS_PER_STEP,
        "algorithm.mini_batch_size": SAMPLES // 2,
        "trainer.steps": RECIPES[name],
        "checkpoint": {"save_every": "never", "export_at_end": False},
    }
    del recipe["trainer"]["eval_every"]
    for role in ("policy", "critic"):
        changes |= {f"{role}.model": config["policy"]["model"], f"{role}.dtype": "fp32", f"{role}.micro_batch_tokens": 64}
        recipe[role]["optimizer"].pop("warmup_steps", None)
    if name == "t_ppo":  # with vLLM, as it is
        changes |= {"rollout.partial_rollout_tokens": WINDOW, "critic.warmup.steps": 2}
    else:
        changes["rollout.engine"] = "megatron"
        recipe["trainer"].pop("evaluate_with", None)
    if name == "ppo":
        changes["reference.dtype"] = "fp32"
    if name == "turn_ppo":
        code = Path(__file__).parents[2] / recipe["rollout"]["environment"]["path"]
        short = {"path": str(code), "args": {}, "turn_tokens": WINDOW}
        changes |= {f"rollout.environment.{key}": value for key, value in short.items()}
    return set_keys(recipe, changes)


@contextmanager
def recorded(steps: list[dict[str, Any]]) -> Iterator[None]:
    """Requests of every step, and the answers that this rank has."""
    plain = rollout_side.collect

    def collect(requests: Sequence[Any], responses: Sequence[Any], **how: Any) -> Experience:
        asked = [
            {"prompt": list(one.prompt), "before": one.tokens.tolist()[len(one.prompt) :], "most": one.max_tokens, "seed": one.seed}
            for one in requests
        ]
        answers = {one.number: (one.tokens.tolist(), one.logprobs.tolist(), one.finish) for one in responses}
        steps.append({"asked": asked, "answers": answers})
        return plain(requests, responses, **how)

    with mock.patch.object(rollout_side, "collect", collect):
        yield


def run_all(rank: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for name in ("whole", "halves", *RECIPES):
        found[name] = []
        if name == "halves":
            branch_off(folder, "whole", name, HALF)
            found[name] += copy.deepcopy(found["whole"][:HALF])
        with recorded(found[name]):
            run_many(rank, [(config_of(folder, name), name == "halves")])
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("windows")
    write_small_task(folder)
    ours, theirs = spawn_world(run_all, 2, folder)
    for name, steps in ours.items():
        for mine, other in zip(steps, theirs[name], strict=True):
            assert mine["asked"] == other["asked"], "every rank asks for the same"
            assert not mine["answers"].keys() & other["answers"].keys()
            mine["answers"] |= other["answers"]
    return folder, ours


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "policy/updates" in row]


def trajectories(folder: Path, name: str, step: int) -> list[dict[str, Any]]:
    path = next((folder / "runs" / name / "trajectories").glob(f"*{step:06}*"))
    return [json.loads(line) for line in path.read_text().splitlines()]


def played(steps: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Each step by the book: what goes on first, then new responses to the loader's prompts, each of which is visited N times."""
    loader = PromptLoader(PROMPTS, 1, shuffle=True, seed=1)
    pool: list[dict[str, Any]] = []
    queue: list[int] = []
    for step in steps:
        samples = pool
        while len(samples) < SAMPLES:
            if not queue:
                queue = loader.next_step() * N
            samples = [*samples, {"row": queue.pop(0), "windows": []}]
        for number, sample in enumerate(samples):
            tokens, logprobs, finish = step["answers"][number]
            before = [token for window in sample["windows"] for token in window[0]]
            sample |= {"before": before, "most": min(WINDOW, LONGEST - len(before))}
            sample["windows"] = [*sample["windows"], (tokens, logprobs)]
            sample["response"] = [*before, *tokens]
            sample["goes on"] = finish == "length" and len(sample["response"]) < LONGEST
            sample["finish"] = "window" if sample["goes on"] else finish
        yield [dict(sample) for sample in samples]
        pool = [{"row": sample["row"], "windows": sample["windows"]} for sample in samples if sample["goes on"]]


@pytest.mark.parametrize("name", ["whole", "t_ppo"])
def test_a_response_goes_on_from_what_was_drawn_in_the_place_of_a_new_one(world, name):
    folder, found = world
    going_on = []
    for number, (samples, step) in enumerate(zip(played(found[name]), found[name], strict=True), 1):
        assert [one["before"] for one in samples] == [one["before"] for one in step["asked"]]
        assert [one["most"] for one in samples] == [one["most"] for one in step["asked"]]
        assert all(len(one["response"]) - len(one["before"]) <= one["most"] for one in samples)
        rows = trajectories(folder, name, number)
        assert [int(row["id"].rpartition("#")[2]) for row in rows] == [one["row"] for one in samples]
        for row, one, asked in zip(rows, samples, step["asked"], strict=True):
            assert row["prompt_tokens"] == asked["prompt"] and row["response_tokens"] == one["response"]
            assert row["finish"] == one["finish"]
            assert row["response_mask"] == [0] * len(one["before"]) + [1] * (len(one["response"]) - len(one["before"]))
            if one["goes on"]:
                assert row["score"] == 0 and row["parts"] == {}
            else:
                ends = one["response"][-1] == 2  # has_eos, of weight 0.5
                assert row["score"] == row["parts"]["exact_match"] + 0.5 * ends and row["parts"]["has_eos"] == ends
        going_on.append(sum(1 for one in samples if one["before"]))
    assert any(going_on) and len({one["seed"] for step in found[name] for one in step["asked"]}) == len(found[name]) * SAMPLES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_with_its_algorithm(world, name):
    folder, _ = world
    rows = metrics(folder, name)
    assert len(rows) == RECIPES[name]
    for row in rows[2:] if name == "t_ppo" else rows:  # two steps of the critic alone
        assert row["policy/updates"] == 2 and 0 < row["policy/grad_norm"] < math.inf
    assert any(row["critic/updates"] for row in rows) and all(row["rollout/prob_diff_mean"] < 1e-4 for row in rows)
    assert ("kl/per_token" in rows[0]) == (name == "ppo") and ("rollout/windows_mean" in rows[0]) == (name == "t_ppo")


def mean(numbers: Sequence[float]) -> Any:
    """As metrics.jsonl has it: null of nothing."""
    return pytest.approx(sum(numbers) / len(numbers)) if numbers else None


def test_metrics_count_what_ends_and_what_goes_on(world):
    folder, found = world
    begun: set[int] = set()
    seen = 0
    for number, (samples, row) in enumerate(zip(played(found["whole"]), metrics(folder, "whole"), strict=True), 1):
        ended = [one for one in samples if not one["goes on"]]
        assert row["rollout/going_on"] == pytest.approx(sum(1 for one in samples if one["before"]) / SAMPLES)
        assert row["rollout/unfinished"] == pytest.approx(1 - len(ended) / SAMPLES)
        assert row["rollout/windows_mean"] == mean([len(one["windows"]) for one in ended])
        assert row["rollout/windows_max"] == max((len(one["windows"]) for one in ended), default=0)
        assert row["lengths/response_mean"] == mean([len(one["response"]) for one in ended])
        assert row["lengths/truncated"] == pytest.approx(sum(one["finish"] == "length" for one in ended) / max(1, len(ended)))
        scores = [one["score"] for one, mine in zip(trajectories(folder, "whole", number), samples) if not mine["goes on"]]
        assert row["reward/score_mean"] == mean(scores)
        # a window of a response that is in its k-th was drawn k - 1 steps ago, then k - 2, ...
        ages = [age for one in samples for age, w in enumerate(reversed(one["windows"])) for _ in w[0]]
        assert row["rollout/token_age_mean"] == pytest.approx(sum(ages) / len(ages))
        assert row["rollout/token_age_max"] == max(ages) and row["rollout/age_max"] == 0
        assert row["rollout/prob_diff_mean"] < 1e-4, "of the tokens of the step alone"
        begun |= {one["row"] for one in samples}
        assert row["rollout/prompts_begun"] == len(begun) - seen
        seen = len(begun)
        mini = SAMPLES // 2
        assert row["policy/updates"] == 2 and row["critic/updates"] == min(2, row["critic/updates"])
        assert (row["critic/updates"] == 0) == (not ended) and (len(ended) <= mini or row["critic/updates"] == 2)
    state = json.loads((folder / "runs" / "whole" / "checkpoints" / f"step-{STEPS}" / "state.json").read_text())
    assert state["loader"]["index"] == len(begun), "each prompt is consumed once, however many steps its responses take"
    all_steps = list(played(found["whole"]))
    assert state["trainer"]["tokens"] == sum(len(one["response"]) - len(one["before"]) for step in all_steps for one in step)
    assert state["trainer"]["episodes"] == sum(not one["goes on"] for step in all_steps for one in step)
    assert [one.row for one in Unfinished.decoded(state["trainer"]["unfinished"]).begun] == [
        one["row"] for one in all_steps[-1] if one["goes on"]
    ]


def test_returns_are_the_scores_of_whole_responses(world):
    """`lam_value: 1` and gamma 1: the return of a token is what is left of the reward; a response that goes on has none."""
    folder, found = world
    for number, samples in enumerate(played(found["whole"]), 1):
        for row, one in zip(trajectories(folder, "whole", number), samples, strict=True):
            sampled = [t for t, drawn in enumerate(row["response_mask"]) if drawn]
            rewards = [row["reward"][t] for t in sampled]
            kl = [0.01 * (row["logprob"][t] - row["ref_logprob"][t]) for t in sampled]
            # The file has five significant digits of each number.
            assert rewards == pytest.approx([-k for k in kl[:-1]] + [row["score"] - kl[-1]], rel=5e-5, abs=1e-5)
            if not one["goes on"]:
                left = [sum(rewards[i:]) for i in range(len(rewards))]
                assert [row["returns"][t] for t in sampled] == pytest.approx(left, abs=2e-4)


def test_a_resumed_run_goes_on_to_the_last_bit(world):
    folder, found = world
    assert found["whole"] == found["halves"]
    whole, halves = (folder / "runs" / name / "checkpoints" / f"step-{STEPS}" for name in ("whole", "halves"))
    state = json.loads((halves.parent / f"step-{HALF}" / "state.json").read_text())["trainer"]["unfinished"]
    between = Unfinished.decoded(state)
    assert between.begun and between.left > 0, "responses go on, and a prompt is half begun"
    assert (whole / "state.json").read_text() == (halves / "state.json").read_text()
    shards = sorted(path.relative_to(whole) for path in whole.rglob("models/*/*.safetensors"))
    assert shards and all((whole / name).read_bytes() == (halves / name).read_bytes() for name in shards)
    rows = [
        [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in metrics(folder, n)] for n in ("whole", "halves")
    ]
    assert all(
        mine.keys() == theirs.keys() and all(a == b or math.isnan(a) for a, b in zip(mine.values(), theirs.values()))
        for mine, theirs in zip(*rows, strict=True)
    )


def test_a_response_that_starts_anew_is_noticed(world):
    """Negative control: the oracle sees a prefix that is lost, and a prompt that is taken twice."""
    _, found = world
    steps = [dict(step) for step in found["whole"]]
    at = next(i for i, step in enumerate(steps) if any(one["before"] for one in step["asked"]))
    steps[at - 1] = {**steps[at - 1], "answers": {n: (t, p, "stop") for n, (t, p, _) in steps[at - 1]["answers"].items()}}
    assert [one["before"] for one in list(played(steps))[at]] != [one["before"] for one in steps[at]["asked"]]
