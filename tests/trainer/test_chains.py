"""Trajectories of several sequences: stage 5 against loops in fp64, on one rank and drawn by several; how they enter a step."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import yaml

from benchmarks.reliability.compare import compare
from megappo.algo.chains import turn_starts
from megappo.commands.eval import evaluate
from megappo.commands.plan.run import plan_run
from megappo.config.evaluations import TURNS as TURN_FIGURES
from megappo.config.loading import load_config
from megappo.config.schema import AlgorithmConfig
from megappo.data.packing import PackedBatch, cu_seqlens_of
from megappo.data.tokenizers import load_tokenizer
from megappo.parallel.totals import place_in_world
from megappo.rollout.turn import Turn
from megappo.rollout.turns import Compaction, TurnsRollout
from megappo.rollout.types import Context, EnvironmentFault, Request, Response, RolloutEngine, SamplingParams, Segment
from megappo.trainer import assembly, evaluation, main, training_side
from megappo.trainer.advantages import add_advantages
from megappo.trainer.evaluation import metrics_of
from megappo.trainer.experience.collect import collect
from megappo.trainer.experience.experience import Experience
from megappo.trainer.prepare.evaluate import plan_evaluation
from tests.rollout.compaction import keep_ends
from tests.rollout.test_turns import asked_of_replica
from tests.trainer.small_run import set_keys, small_config, write_small_task
from tests.worlds import spawn_world

# Sequences: prompt and (given, sampled) turns; and the sequence that each goes on from.
SEQUENCES = [
    (2, [(0, 3)]),
    (1, [(0, 2), (1, 2)]),
    (3, [(0, 4)]),
    (2, [(0, 1), (2, 2)]),
    (1, [(0, 3)]),
    (4, [(0, 2)]),
    (1, [(0, 0)]),
]
PREVIOUS = [-1, 3, -1, 5, 6, -1, -1]  # 0; 5 -> 3 -> 1; 2; 6 -> 4, whose first has no sampled token
CHAINS = [[0], [5, 3, 1], [2], [6, 4]]
SCORE = {0: 1.0, 1: -0.5, 2: 0.25, 4: 2.0}
CUT = {2, 1}
KL = 0.3


def whole_batch() -> PackedBatch:
    mask = [flag for p, turns in SEQUENCES for flag in [False] * p + [f for g, s in turns for f in [False] * g + [True] * s]]
    generator = torch.Generator().manual_seed(6)
    names = ("logprob", "ref_logprob", "rollout_logprob", "entropy", "value")
    fields = {name: (-1.0) ** (name != "entropy") * torch.rand(len(mask), generator=generator) for name in names}
    nan = torch.full((len(mask),), torch.nan)
    return PackedBatch(
        tokens=torch.arange(len(mask)),
        cu_seqlens=cu_seqlens_of([p + sum(map(sum, turns)) for p, turns in SEQUENCES]),
        token_fields={
            "response_mask": torch.tensor(mask),
            **{name: torch.where(torch.tensor(mask), x, nan) for name, x in fields.items()},
        },
        sequence_fields={
            "truncated": torch.tensor([i in CUT for i in range(len(SEQUENCES))]),
            "bootstrap": torch.rand(len(SEQUENCES), generator=generator),
            "previous": torch.tensor(PREVIOUS, dtype=torch.int32),
        },
    )


def by_hand(a: AlgorithmConfig, per_token: dict[int, list[float]] | None = None) -> dict[str, list[float]]:
    """The sampled tokens of all sequences of a trajectory in a row, a sum over later TD errors for each; without any scan."""
    batch = whole_batch()
    starts, mask = batch.cu_seqlens.tolist(), batch["response_mask"].tolist()
    found = {name: [0.0] * batch.num_tokens for name in ("reward", "raw_advantage", "returns")}
    for chain in CHAINS:
        places = [t for i in chain for t in range(starts[i], starts[i + 1]) if mask[t]]
        if not places:
            continue
        reward = [-KL * (float(batch["logprob"][t]) - float(batch["ref_logprob"][t])) for t in places]
        reward[-1] += SCORE[chain[-1]]
        if per_token and chain[-1] in per_token:
            own = per_token[chain[-1]]
            for i, extra in enumerate(own):
                reward[len(reward) - len(own) + i] += extra
        first = set(turn_starts(batch["response_mask"], batch.cu_seqlens).nonzero().flatten().tolist())
        if a.by_turns:  # one step for each turn; all its tokens have its numbers
            steps = [
                [i for i, t in enumerate(places) if t >= s and not any(s < o <= t for o in first)] for s in places if s in first
            ]
            # a turn ends with its sequence, though the packed batch may go on with another one
            steps = [[i for i in step if _sequence(starts, places[i]) == _sequence(starts, places[step[0]])] for step in steps]
        else:
            steps = [[i] for i in range(len(places))]
        value = [float(batch["value"][places[step[0]]]) for step in steps]
        rewards = [sum(reward[i] for i in step) for step in steps]
        after = 0.0
        if chain[-1] in CUT and a.bootstrap_truncated:
            after = value[-1] if a.bootstrap_truncated == "last" else float(batch["bootstrap"][chain[-1]])
        lam = max(0.0, 1 - 1 / (a.lam_length_alpha * len(steps))) if a.lam_length_alpha else a.lam
        lam_value = a.lam if a.lam_value is None else a.lam_value
        deltas = [r + a.gamma * n - v for r, v, n in zip(rewards, value, [*value[1:], after])]
        for number, step in enumerate(steps):
            for i in step:
                t = places[i]
                found["reward"][t] = reward[i]
                found["raw_advantage"][t] = sum((a.gamma * lam) ** k * d for k, d in enumerate(deltas[number:]))
                found["returns"][t] = value[number] + sum((a.gamma * lam_value) ** k * d for k, d in enumerate(deltas[number:]))
    return found


def _sequence(starts: list[int], token: int) -> int:
    return sum(start <= token for start in starts)


def of_samples(values: dict[int, Any], numbers: list[int], absent: Any) -> list[Any]:
    return [values.get(i, absent) for i in numbers]


def shaped(a: AlgorithmConfig, experience: Experience, per_token: dict[int, list[float]] | None = None) -> Experience:
    numbers = experience.numbers.tolist()
    score = torch.tensor(of_samples(SCORE, numbers, 0.0))
    return add_advantages(experience, score, KL, a, of_samples(per_token, numbers, None) if per_token else None).experience


def error(batch: PackedBatch, wanted: dict[str, list[float]]) -> float:
    return max(float((batch[name].double() - torch.tensor(x)).abs().max()) for name, x in wanted.items())


CASES = [
    {},
    {"gamma": 0.9, "lam": 0.8, "lam_value": 1.0, "bootstrap_truncated": True},
    {"gamma": 0.9, "bootstrap_truncated": "last", "lam_length_alpha": 0.4},
    {"gamma": 0.9, "estimator": {"type": "gae", "level": "turn"}, "bootstrap_truncated": "last"},
]
PER_TOKEN = {0: [0.1, 0.2, 0.3], 1: [0.5, -0.5, 0.25, 1.0]}


@pytest.mark.parametrize("per_token", [None, PER_TOKEN], ids=["scores", "rewards of tokens"])
@pytest.mark.parametrize("changes", CASES, ids=range(len(CASES)))
def test_advantages_go_over_all_sequences_of_a_trajectory(changes, per_token):
    a = AlgorithmConfig(**changes)
    assert error(shaped(a, Experience.of_whole(whole_batch()), per_token).batch, by_hand(a, per_token)) < 1e-6


def test_sequences_by_themselves_or_in_another_order_are_noticed():
    """Negative control."""
    a = AlgorithmConfig(gamma=0.9)
    for previous in ([-1] * len(PREVIOUS), [-1, 5, -1, 1, 6, -1, -1]):
        batch = whole_batch().with_fields({}, {"previous": torch.tensor(previous, dtype=torch.int32)})
        score = torch.tensor(of_samples(SCORE, list(range(len(SEQUENCES))), 0.0))
        found = add_advantages(Experience.of_whole(batch), score, KL, a).experience.batch
        assert error(found, by_hand(a)) > 1e-2


def test_an_estimator_without_a_critic_is_refused():
    with pytest.raises(ValueError, match="trajectories of several sequences need a critic"):
        shaped(AlgorithmConfig(estimator={"type": "reinforce_plus_plus"}), Experience.of_whole(whole_batch()))


# ------------------------------------------------------------------------------------------------------- as a rollout gives them


def segment(count: int, first: int, version: int = 3) -> Segment:
    return Segment(numpy.arange(first, first + count, dtype=numpy.int32), -numpy.ones(count, numpy.float32), version)


def responses_of(rank: int, world: int) -> tuple[list[Request], list[Response]]:
    """Four requests, answered by rank number % world: the second left two contexts, the third one."""
    requests = [Request(i, [90 + i], seed=i, group=i // 2) for i in range(4)]
    contexts = {
        1: (
            Context(numpy.array([91], numpy.int32), (segment(2, 10),)),
            Context(numpy.array([91, 11], numpy.int32), (segment(3, 20),)),
        ),
        2: (Context(numpy.array([92], numpy.int32), (segment(4, 30, version=2),)),),
    }
    prompts = {1: numpy.array([91, 22], numpy.int32), 2: numpy.array([92, 33], numpy.int32)}
    answers = [
        Response(i, (segment(i + 1, 40 + 10 * i),), "stop", contexts=contexts.get(i, ()), prompt=prompts.get(i)) for i in range(4)
    ]
    return requests, [one for one in answers if one.number % world == rank]


def collected() -> dict[str, Any]:
    rank, world = place_in_world()
    experience = collect(*responses_of(rank, world))
    table, own = experience.table, set(experience.numbers.tolist())
    together = all((i in own) == (int(before) in own) for i, before in enumerate(table.previous.tolist()) if before >= 0)
    everything, batch = experience.everywhere(), experience.batch
    # the same wherever a token lies
    fields = {name: -(batch.tokens % 7).float() / 7 - k for k, name in enumerate(("logprob", "ref_logprob", "value"))}
    given = experience.with_fields(fields, {"bootstrap": torch.zeros(batch.num_sequences)})
    score = torch.tensor([float(i) if i < 4 else 0.0 for i in experience.numbers.tolist()])
    found = add_advantages(given, score, KL, AlgorithmConfig(gamma=0.9)).experience.everywhere(
        ["raw_advantage", "advantage", "returns"]
    )
    return {
        "table": {name: getattr(table, name).tolist() for name in ("previous", "sampled", "prompt", "oldest", "group")},
        "ends": table.ends.tolist(),
        "trajectories": table.num_trajectories,
        "tokens": everything.tokens.tolist(),
        "together": together,
        "fields": {name: found[name].tolist() for name in ("raw_advantage", "advantage", "returns")},
    }


def on_rank(rank: int) -> dict[str, Any]:
    requests, responses = responses_of(rank, 2)
    said = ""
    try:
        collect(requests, [replace(one, fault="no tool" if one.number == 3 else None) for one in responses])
    except EnvironmentFault as error:
        said = str(error)
    asked = {"asked": asked_of_replica(rank), "asked alone": asked_of_replica(rank, agrees=False)}
    return {**collected(), "said": said, **asked}


def test_contexts_are_samples_behind_those_of_the_requests():
    found = collected()
    assert found["table"]["previous"] == [-1, 5, 6, -1, -1, 4, -1] and found["trajectories"] == 4
    assert found["ends"] == [True] * 4 + [False] * 3
    assert found["table"]["sampled"] == [1, 2, 3, 4, 2, 3, 4] and found["table"]["prompt"] == [1, 2, 2, 1, 1, 2, 1]
    assert found["table"]["oldest"] == [3] * 6 + [2] and found["table"]["group"] == [0, 0, 1, 1, 0, 0, 1]
    assert found["tokens"][:5] == [90, 40, 91, 22, 50] and found["tokens"][-5:] == [92, 30, 31, 32, 33]


def test_ranks_that_drew_parts_have_the_advantages_of_one():
    alone = collected()
    for rank in spawn_world(on_rank, 2):
        assert rank.pop("said") == "rank 1: no tool", "one rank's environment failed, and all raise it"
        assert rank.pop("asked") == [0, 1, 2, 3] * 3, "turns go on together once those of all ranks are answered"
        assert rank.pop("asked alone") == [0, 1, 2, 3, 0, 2], "negative control: those of rank 0 do not wait for rank 1"
        assert rank["together"] and {k: v for k, v in rank.items() if k != "fields"} == {
            k: v for k, v in alone.items() if k != "fields"
        }
        for name, values in alone["fields"].items():
            assert rank["fields"][name] == pytest.approx(values, abs=1e-6) and not any(map(math.isnan, values))


# ---------------------------------------------------------------------------------------------------------------- whole runs

STEPS, SAMPLES, TURNS, LIMIT = 2, 8, 3, 9
OBSERVATION = (5, 6)
ENDS = range(2, 28)  # ids that end a turn: most, as the model writes at random
EXAMPLES = Path(__file__).parents[2] / "examples"
OWN = """
def observe(turn, ids=()):
    seen = turn.memo.setdefault("seen", [])
    seen.append(turn.index)
    assert seen == list(range(turn.index + 1)) and turn.prompt.answer.isdecimal() or turn.prompt.answer[0] == "-"
    return ids
"""
BY_KEY = {
    "path": "own.py",
    "function": "observe",
    "interface": "ids",
    "args": {"ids": list(OBSERVATION)},
    "max_turns": TURNS,
    "turn_tokens": 3,
    "workers": 2,
    "join": "each",
    "compaction": {"max_tokens": LIMIT, "keep_first": 6, "keep_last": 2},
}
GUESSES = {"path": "second_guess.py", "function": "hint", "max_turns": TURNS, "turn_tokens": 3}
CRITIC_B = {"dtype": "fp32", "optimizer": {"lr": 5e-4}, "value_head": "normal"}


def wrapped(seen: list[tuple[int, int]]) -> Any:
    def environment(turn: Turn) -> tuple[int, ...]:
        seen.append((turn.number, turn.index))
        return OBSERVATION

    def wrap(engine: RolloutEngine) -> RolloutEngine:
        compaction = Compaction(LIMIT, keep_ends(6, 2))
        return TurnsRollout(engine, environment, max_turns=TURNS, turn_tokens=3, max_prompt_tokens=12, compaction=compaction)

    return wrap


class Killed(BaseException):
    """The end of a rank, which nothing in the trainer catches."""


def run_turns(
    rank: int, folder: Path, name: str, wrap: Any = lambda engine: engine, resume: bool = False, killed_in: int = 0, **changes: Any
) -> list[dict[str, Any]]:
    """What stage 5 made of each step of a run, in `folder`, on all its samples. killed_in: of the steps of this call, the one in
    which all ranks end, once it has generated; 0 for none."""
    config = small_config(folder, name, steps=STEPS)
    usual = {
        "rollout": {"engine": "megatron", "samples_per_prompt": 1, "max_response_tokens": 16},
        "data.prompts_per_step": SAMPLES,
        "data.max_prompt_tokens": 8,
        "algorithm": {"mini_batch_size": 4, "gamma": 0.9, "lam_value": 1.0, "kl": {"coef": 0.01}},
        "telemetry": {"trajectories_every": 1, "trajectories_per_step": SAMPLES},
        "trainer.eval_every": STEPS,
        "checkpoint.export_at_end": False,
    }
    path = folder / f"{name}.{rank}.yaml"
    path.write_text(yaml.safe_dump(set_keys(config, {**usual, **changes})))
    loaded, found = load_config(str(path), []), []
    plain = training_side.add_advantages

    def shape(experience: Experience, score: torch.Tensor, *rest: Any) -> Any:
        if len(found) + 1 == killed_in:
            raise Killed
        result = plain(experience, score, *rest)
        names = ["response_mask", "reward", "value", "raw_advantage", "returns"]
        names += [one for one in ("value.b", "returns.b") if one in result.experience.batch]
        batch = result.experience.everywhere(names)
        found.append(
            {
                "previous": experience.table.previous.tolist(),
                "prompt": experience.table.prompt.tolist(),
                "truncated": experience.table.truncated.tolist(),
                "score": experience.column(score).tolist(),
                "cu_seqlens": batch.cu_seqlens.tolist(),
                "tokens": batch.tokens.tolist(),
                **{name: batch[name].tolist() for name in names},
            }
        )
        return result

    stops = assembly.sampling_params

    def ending(*given: Any) -> SamplingParams:
        return replace(stops(*given), stop_token_ids=tuple(ENDS))

    with (
        mock.patch.object(training_side, "add_advantages", shape),
        mock.patch.object(assembly, "sampling_params", ending),
        suppress(Killed),
    ):
        main.train(loaded, plan_run(loaded, 2, "cpu", resume=resume).data, resume=resume, wrap_rollout=wrap)
    return found


def run_all(rank: int, folder: Path) -> dict[str, Any]:
    """By an entry of Python, by the key, with two critics; and the example, a text in place of ids, in one update of a step."""
    os.chdir(folder)  # the user's: code is named from there
    seen: list[tuple[int, int]] = []
    one_update = {"mini_batch_size": SAMPLES, "whiten_advantages": False, "gamma": 0.9}
    reward = {"parts": [{"path": "second_guess.py", "function": "last_guess"}]}
    short = {"trainer.steps": 1, "trainer.eval_before": False}
    return {
        "seen": seen,
        "turns": run_turns(rank, folder, "turns", wrapped(seen)),
        "critics": run_turns(rank, folder, "critics", **{**short, "rollout.environment": BY_KEY, "critics": {"b": CRITIC_B}}),
        "guesses": run_turns(
            rank,
            folder,
            "guesses",
            **{**short, "rollout.environment": GUESSES, "algorithm": one_update, "reward": reward},
        ),
        "evaluated": evaluated_again(rank, folder),
        **killed_and_resumed(rank, folder),
    }


def killed_and_resumed(rank: int, folder: Path) -> dict[str, Any]:
    """A whole run whose turns are answered by workers, and one that is killed in its second step, with checkpoints before."""
    environment = {**BY_KEY, "join": "together"}
    changes = {"rollout.environment": environment, "checkpoint.save_every": 1, "checkpoint.asynchronous": False}
    return {
        "whole": run_turns(rank, folder, "whole", **changes),
        "killed": run_turns(rank, folder, "halves", killed_in=2, **changes),
        "resumed": run_turns(rank, folder, "halves", resume=True, **changes),
    }


def evaluated_again(rank: int, folder: Path) -> tuple[dict[str, float], list[tuple[int, bool]]]:
    """Metrics of `megappo eval` on the last checkpoint of the example's run, by its configuration; and of each trajectory that this
    rank drew its turns, counted in its tokens, and if it was cut."""
    config, stops = load_config(str(folder / f"guesses.{rank}.yaml"), []), assembly.sampling_params
    plain, drawn = evaluation.generate, list[tuple[int, bool]]()

    def ending(*given: Any) -> SamplingParams:
        return replace(stops(*given), stop_token_ids=tuple(ENDS))

    def generating(*given: Any) -> list[Response]:
        responses = plain(*given)
        for one in responses:
            edges = numpy.diff(numpy.concatenate(([0], one.sampled.astype(int)))) == 1
            drawn.append((int(edges.sum()), one.finish == "length"))
        return responses

    planned = plan_evaluation(config, str(folder / "runs" / "guesses"), [], 2, "cpu")
    with mock.patch.object(evaluate, "sampling_params", ending), mock.patch.object(evaluation, "generate", generating):
        return metrics_of(evaluate.evaluate_checkpoint(planned)), drawn


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("turns")
    write_small_task(folder)
    (folder / "own.py").write_text(OWN)
    (folder / "second_guess.py").write_text((EXAMPLES / "second_guess.py").read_text())
    return folder, spawn_world(run_all, 2, folder, timeout_s=600)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def turns_of(step: dict[str, Any]) -> list[int]:
    """Turns of each trajectory: its runs of sampled ids, over all sequences."""
    mask, starts = step["response_mask"], step["cu_seqlens"]
    of_sequences = [
        sum(mask[t] and (t == begin or not mask[t - 1]) for t in range(begin, end)) for begin, end in zip(starts, starts[1:])
    ]
    return [sum(of_sequences[i] for i in chain) for chain, _ in trajectories(step)]


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [row for row in read_lines(folder / "runs" / name / "metrics.jsonl") if "policy/loss" in row]


def test_a_run_trains_on_compacted_trajectories(run):
    folder, (ours, theirs) = run
    assert ours["turns"] == theirs["turns"] and len(ours["turns"]) == STEPS
    assert len(ours["seen"]) + len(theirs["seen"]) > 2 * SAMPLES, "either rank asks for its own turns"
    for row, step in zip(rows_of(folder, "turns"), ours["turns"], strict=True):
        count = len(step["previous"])
        assert row["rollout/sequences"] == pytest.approx(count / SAMPLES) and count > SAMPLES
        assert row["policy/updates"] == math.ceil(count / 4) and 0 < row["policy/grad_norm"] < math.inf
        assert row["rollout/prob_diff_mean"] < 1e-4, "each sequence was drawn as the trainer reads it"
        assert row["reward/score_mean"] == pytest.approx(sum(step["score"][:SAMPLES]) / SAMPLES)
        turns = turns_of(step)
        assert row["rollout/turns_mean"] == pytest.approx(sum(turns) / SAMPLES) and row["rollout/turns_max"] == max(turns)
        cut = step["truncated"][:SAMPLES]
        limited = [count == TURNS and not is_cut for count, is_cut in zip(turns, cut, strict=True)]
        assert row["rollout/turns_limited"] == pytest.approx(sum(limited) / SAMPLES) and row["rollout/turns_late"] == 0
        assert 0 < row["timing/environment/mean_s"] <= row["timing/environment/max_s"] < row["timing/environment/total_s"] < 60


def test_the_environment_of_a_key_draws_what_that_of_the_entry_does(run):
    """By processes that answer beside generation, each at once, where the entry's is called by the ranks."""
    _, (ours, _) = run
    names = ("tokens", "response_mask", "previous", "truncated", "cu_seqlens", "prompt")
    for name in names:  # of the first step, which both draw by the same weights
        assert ours["critics"][0][name] == ours["turns"][0][name]


def test_two_critics_learn_from_compacted_trajectories(run):
    folder, (ours, _) = run
    (row,), (step,) = rows_of(folder, "critics"), ours["critics"]
    assert row["critic/grad_norm"] > 1e-3 and row["critic_b/grad_norm"] > 1e-3 and row["critics/disagreement"] > 1e-3
    places = [t for t, is_sampled in enumerate(step["response_mask"]) if is_sampled]
    apart = sum(abs(step["value"][t] - step["value.b"][t]) / 2 for t in places) / len(places)
    assert row["critics/disagreement"] == pytest.approx(apart, rel=1e-4)


def trajectories(step: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
    """Samples of each trajectory of a step, in their order, and the places of all their sampled tokens."""
    starts = step["cu_seqlens"]
    for end in range(SAMPLES):
        chain = [end]
        while step["previous"][chain[0]] >= 0:
            chain.insert(0, step["previous"][chain[0]])
        yield chain, [t for i in chain for t in range(starts[i], starts[i + 1]) if step["response_mask"][t]]


@pytest.mark.parametrize("name, suffixes", [("turns", [""]), ("critics", ["", ".b"])])
def test_returns_of_a_run_go_over_all_sequences(run, name, suffixes):
    """The definition, from the rewards that the run recorded: `lam_value` 1 and a discount of each sampled token."""
    _, (ours, _) = run
    compacted = 0
    for step in ours[name]:
        starts = step["cu_seqlens"]
        for chain, places in trajectories(step):
            compacted += len(chain) > 1
            left = 0.0
            for t in reversed(places):
                left = step["reward"][t] + 0.9 * left
                for suffix in suffixes:
                    assert step[f"returns{suffix}"][t] == pytest.approx(left, abs=1e-5)
            for before, after in zip(chain, chain[1:]):
                ids, begin = step["tokens"][starts[before] : starts[before + 1]], starts[after]
                kept = step["tokens"][begin : begin + 8]
                assert kept[:6] == ids[:6] and tuple(kept[6:]) == OBSERVATION, "the first six ids, and the observation"
    assert compacted > SAMPLES / 2


def test_observations_of_the_example_are_read_and_carry_no_loss(run):
    """Where turns and observations lie follows from the rules of the example, read from the tokens; what the losses of the one
    update are, from these places."""
    folder, (ours, _) = run
    (step,) = ours["guesses"]
    tokenizer = load_tokenizer(folder / "model" / "tokenizer.model")
    answers = {
        tuple(tokenizer.encode_prompt(one["prompt"])): int(one["answer"]) for one in read_lines(folder / "data" / "train.jsonl")
    }
    starts, places, turns, observed = step["cu_seqlens"], [], [], []
    for i, begin in enumerate(starts[:-1]):
        ids, prompt = step["tokens"][begin : starts[i + 1]], step["prompt"][i]
        answer, at, count = answers[tuple(ids[:prompt])], prompt, 0
        while at < len(ids):
            end = next((t + 1 for t in range(at, len(ids)) if ids[t] in ENDS or t + 1 == at + 3), len(ids))
            places += range(begin + at, begin + end)
            said, at, count = tokenizer.decode(ids[at:end]).strip(), end, count + 1
            if at < len(ids):
                guess = int(said) if re.fullmatch(r"[+-]?[0-9]+", said) else None
                expected = tokenizer.encode("+" if guess is None or guess < answer else "-")
                assert guess != answer and ids[at : at + len(expected)] == expected
                observed += range(begin + at, begin + at + len(expected))
                at += len(expected)
        turns.append(count)
    assert places == [t for t, is_sampled in enumerate(step["response_mask"]) if is_sampled]
    assert len(observed) > SAMPLES / 2 and max(turns) > 1
    # Before the first update the ratio is 1: the policy's loss is the mean advantage, the critic's half the mean squared error.
    (row,) = rows_of(folder, "guesses")
    advantage = sum(step["raw_advantage"][t] for t in places) / len(places)
    error = sum((step["value"][t] - step["returns"][t]) ** 2 for t in places) / len(places) / 2
    assert row["policy/loss"] == pytest.approx(-advantage, abs=1e-5) and row["critic/loss"] == pytest.approx(error, rel=1e-4)
    everywhere = len(places) + len(observed)
    assert row["policy/loss"] != pytest.approx(-advantage * len(places) / everywhere, abs=1e-4), "the negative control"


def test_an_evaluation_of_a_checkpoint_plays_the_turns_of_the_runs_own(run):
    folder, (ours, theirs) = run
    (found, mine), (same, others) = ours["evaluated"], theirs["evaluated"]
    assert found == same
    (row,) = [one for one in read_lines(folder / "runs" / "guesses" / "metrics.jsonl") if "eval/length" in one and one["step"] == 1]
    names = ("eval/score", "eval/length", "eval/truncated", *(f"eval/{name}" for name in TURN_FIGURES))
    assert {name: found[name] for name in names} == pytest.approx({name: row[name] for name in names}, abs=1e-6)
    mean_s, max_s, total_s = (found[f"timing/environment/eval/{name}_s"] for name in ("mean", "max", "total"))
    assert 0 < mean_s <= max_s <= total_s < 60
    drawn, turns = [*mine, *others], [count for count, _ in [*mine, *others]]
    assert len(mine) > 0 < len(others) and len(drawn) == 20 and found["eval/turns_late"] == 0
    assert (found["eval/turns_mean"], found["eval/turns_max"]) == (pytest.approx(sum(turns) / 20), max(turns))
    assert found["eval/turns_limited"] == pytest.approx(sum(count == TURNS and not cut for count, cut in drawn) / 20)


def test_a_killed_run_whose_turns_workers_answer_resumes_to_the_bit(run):
    folder, (ours, theirs) = run
    for rank in (ours, theirs):
        assert len(rank["whole"]) == STEPS and len(rank["killed"]) == len(rank["resumed"]) == 1, "its second step is done again"
        assert [*rank["killed"], *rank["resumed"]] == rank["whole"], "tokens, rewards, values and returns of all samples"
    compared = compare(folder / "runs" / "whole", folder / "runs" / "halves")
    assert compared.step == STEPS and compared.tensors > 20 and compared.values > 100 and not compared.differing
    metrics = shutil.copytree(folder / "runs" / "halves", folder / "runs" / "other") / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"critic/loss": ', '"critic/loss": 1', 1))
    (found,) = compare(folder / "runs" / "whole", folder / "runs" / "other").differing
    assert found.startswith("critic/loss of step 1 "), "another run is another"
