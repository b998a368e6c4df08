"""Real engines on some ranks of a world, beside ranks without vLLM that train meanwhile.

The oracle is the same engine in a world of that size alone: tokens and log-probs are equal bit for bit. One world of four ranks
runs both placements, one of two the oracle; in the third a rank of an engine dies.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megappo.bridge.sync import Route, WeightSync
from megappo.config.run_sections import TimeoutsConfig
from megappo.models.hf_config import read_arch
from megappo.parallel.groups import meet
from megappo.parallel.layout import ParallelLayout
from megappo.rollout.generation import generate
from megappo.rollout.subworld import SubWorld, prepare_rollout_world
from megappo.rollout.turn import Turn
from megappo.rollout.turns import Compaction, TurnsRollout
from megappo.rollout.types import Request, Response, SamplingParams
from megappo.rollout.vllm_engine import VllmEngine
from tests.bridge.engines import HeldPolicy, policy_tensors, read_checkpoint
from tests.models.checkpoints import write_checkpoint
from tests.rollout.compaction import keep_ends
from tests.rollout.engines import make_engine
from tests.rollout.responses import generate_all
from tests.rollout.test_turns import Beside
from tests.worlds import WorldError, spawn_world

RANKS = 4
SEEDED = SamplingParams(max_tokens=12, temperature=0.9)
ENDING = SamplingParams(max_tokens=24, temperature=0.9, stop_token_ids=tuple(range(0, 131, 2)))
REQUESTS = [Request(i, tuple(range(3 + i, 40 + 7 * i)), seed=i) for i in range(6)]
# name -> (world ranks of the engine, tp)
CASES = {"two replicas": ((1, 3), 1), "one replica of tp 2": ((2, 3), 2)}
TIMEOUTS = TimeoutsConfig(start_s=60, pass_s=20, meeting_s=60)


# ------------------------------------------------------------------------------------------------------------- in the world


def fill(engine: VllmEngine, path: str, alone: dist.ProcessGroup) -> None:
    """Fill this rank's part of the engine from the checkpoint. alone: a group of this rank, which is the policy too."""
    arch, layout = read_arch(path), ParallelLayout(1)
    policy = HeldPolicy(arch, layout, policy_tensors(arch, layout, 0, read_checkpoint(path)))
    rank = (dist.get_rank(),)
    route = Route(arch, policy.pieces(), rank, rank, engine_tp=1)
    WeightSync(policy, engine, route, engine.device, alone).push(0)


def groups_of_one() -> dist.ProcessGroup:
    """Group of this rank alone. Collective."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def answers(engine: VllmEngine) -> list[tuple]:
    with engine.in_world():
        responses = generate_all(engine, REQUESTS, SEEDED)
    return [(tuple(one.tokens.tolist()), tuple(one.logprobs.tolist()), one.finish) for one in responses]


def train(group: dist.ProcessGroup, passes: int = 3) -> float:
    """Exchanges of ranks that do not generate."""
    gradient = torch.full((1000,), float(dist.get_rank()))
    for _ in range(passes):
        dist.all_reduce(gradient, group=group)
    return float(gradient[0])


def work_of_the_world() -> list[Any]:
    """What all ranks do together between generations: groups, reductions, objects; the same on every rank."""
    mine = torch.tensor(dist.get_rank())
    dist.all_reduce(mine, group=dist.new_group(list(range(RANKS))))
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, (dist.get_rank(), dist.get_world_size()))
    dist.barrier()
    return [int(mine), gathered]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_case(rank: int, path: str, ranks: Sequence[int], tp: int, alone: dist.ProcessGroup) -> dict[str, Any]:
    others = [other for other in range(RANKS) if other not in ranks]
    trainers = dist.new_group(others)
    found: dict[str, Any] = {"resident": [resident_bytes()], "answers": [], "world": [work_of_the_world()]}
    world = prepare_rollout_world(ranks, TIMEOUTS)
    if world is None:
        for _ in range(3):
            found["trained"] = train(trainers)
            found["world"].append(work_of_the_world())
    else:
        run_engine(path, tp, world, alone, found)
    found["resident"].append(resident_bytes())
    found["imported"] = "vllm" in sys.modules
    return found


def run_engine(path: str, tp: int, world: SubWorld, alone: dist.ProcessGroup, found: dict[str, Any]) -> None:
    """Two generations, with the weights asleep in between; all ranks meet after each and after the end."""
    with contextlib.closing(make_engine(path, tp, sleep="all", subworld=world, timeouts=TIMEOUTS)) as engine:
        for _ in range(2):
            fill(engine, path, alone)
            found["answers"].append(answers(engine))
            engine.sleep()
            found["world"].append(work_of_the_world())
    found["world"].append(work_of_the_world())
    found["left"] = [path.name for path in Path("/dev/shm").glob(f"{engine._identity}*")]


def in_world(rank: int, path: str) -> dict[str, Any]:
    alone = groups_of_one()
    return {name: run_case(rank, path, ranks, tp, alone) for name, (ranks, tp) in CASES.items()}


def in_own_world(rank: int, path: str) -> dict[str, Any]:
    """The oracle. And trajectories of several turns in each case, with every turn drawn again as a request of its own."""
    alone, found = groups_of_one(), {"turns": {}}
    for name, (_, tp) in CASES.items():
        with contextlib.closing(make_engine(path, tp)) as engine:
            fill(engine, path, alone)
            found[name] = answers(engine)
            found["turns"][name] = play(engine)
    return found


def play(engine: VllmEngine) -> dict[str, Any]:
    """Trajectories of which some are compacted, the environment's calls on this rank, the engine's requests, and their answers
    when they are asked one by one, of this rank's replica."""
    asked, called, submit = [], [], engine.submit

    def environment(turn: Turn) -> list[int]:
        called.append((turn.number, turn.index))
        return [5, 6 + turn.number]

    def recorded(requests: Sequence[Request], sampling: SamplingParams) -> None:
        asked.extend(requests)
        submit(requests, sampling)

    limits = {"max_turns": 3, "turn_tokens": 4, "max_prompt_tokens": 80, "compaction": Compaction(60, keep_ends(20, 10))}
    with mock.patch.object(engine, "submit", recorded):
        drawn = generate_all(TurnsRollout(engine, environment, **limits), REQUESTS, ENDING)
    beside: dict[str, list[list]] = {"together": [], "each": []}
    for join in beside:
        for order in (1, -1):
            slow = Beside(lambda turn: [5, 6 + turn.number], lambda turn: 0.01 * (order * (turn.number + turn.index) % 5))
            rollout = TurnsRollout(engine, slow, together=join == "together", **limits)
            beside[join].append(of_trajectories(generate_all(rollout, REQUESTS, ENDING)))
            slow.close()
    again = []
    with engine.serving():
        for request in asked:
            submit([Request(0, request.tokens, request.seed, max_tokens=request.max_tokens)], ENDING)
            while engine.num_unfinished:
                again += [one.tokens.tolist() for one in engine.poll()]
    sequences = [[(c.prompt.tolist(), c.segments) for c in (*one.contexts, one)] for one in drawn if one.contexts]
    sequences += [[(None, one.segments)] for one in drawn if not one.contexts]
    given = [[(p, [(s.tokens.tolist(), s.logprobs is not None) for s in parts]) for p, parts in one] for one in sequences]
    turns = sorted(tokens for one in given for _, parts in one for tokens, is_sampled in parts if is_sampled)
    return {
        "asked": [one.tokens.tolist() for one in asked],
        "again": again,
        "given": given,
        "turns": turns,
        "called": called,
        "drawn": of_trajectories(drawn),
        "beside": beside,
    }


def of_trajectories(drawn: Sequence[Response]) -> list:
    """(tokens, log-probs) of all sequences of each trajectory."""
    return [
        [
            [(s.tokens.tolist(), None if s.logprobs is None else s.logprobs.tolist()) for s in c.segments]
            for c in (*one.contexts, one)
        ]
        for one in drawn
    ]


def with_a_death(rank: int, path: str, folder: str) -> None:
    """Rank 2 ends in the middle of a generation. What the others are told is left in the folder."""
    alone, world = groups_of_one(), prepare_rollout_world((1, 2), TIMEOUTS)
    try:
        if world is None:
            meet("the update of the policy", TIMEOUTS.meeting_s)
        else:
            engine = make_engine(path, 1, subworld=world, timeouts=TIMEOUTS)
            fill(engine, path, alone)
            if rank == 2:
                engine._llm.llm_engine.step = lambda: os._exit(0)
            generate(engine, REQUESTS, SEEDED)
    except RuntimeError as error:
        Path(folder, f"told {rank}").write_text(f"{type(error).__name__} {error}")
    # As a program ends after such an error. With 0, for the harness would end the others at once.
    os._exit(int(world is None))


# ------------------------------------------------------------------------------------------------------------------ tests


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "llama", head_dim=32)
    return str(folder)


@pytest.fixture(scope="module")
def world(checkpoint) -> list[dict[str, Any]]:
    # Rank 0 must not have imported vLLM, and rank 1 shows what that takes; the others may have it from the server.
    return spawn_world(in_world, RANKS, checkpoint, method=("spawn", "spawn", "forkserver", "forkserver"))


@pytest.fixture(scope="module")
def own_world(checkpoint) -> list[dict[str, Any]]:
    return spawn_world(in_own_world, 2, checkpoint)


@pytest.fixture(scope="module")
def oracle(own_world) -> dict[str, Any]:
    return own_world[0]


@pytest.mark.parametrize("name", CASES)
def test_an_engine_on_some_ranks_answers_as_in_a_world_of_its_own(world, oracle, name):
    for rank in CASES[name][0]:
        assert world[rank][name]["answers"] == [oracle[name]] * 2
    assert len({tokens for tokens, _, _ in oracle[name]}) == len(REQUESTS), "the answers differ from each other"


def test_the_answers_show_how_the_model_was_cut(oracle):
    one, two = (oracle[name] for name in CASES)
    assert [tokens for tokens, _, _ in one] == [tokens for tokens, _, _ in two]
    assert [logprobs for _, logprobs, _ in one] != [logprobs for _, logprobs, _ in two], "negative control: bits tell tp apart"


@pytest.mark.parametrize("name", CASES)
def test_turns_are_what_the_engine_answers_to_each_alone(own_world, name):
    ours, theirs = (rank["turns"][name] for rank in own_world)
    assert ours["given"] == theirs["given"] and len(ours["turns"]) > 2 * len(REQUESTS)
    assert sorted(ours["again"] + theirs["again"]) == ours["turns"]
    assert any(len(sequences) > 1 for sequences in ours["given"]) and any(len(one) == 1 for one in ours["given"])
    if name == "one replica of tp 2":
        assert ours["asked"] == theirs["asked"], "the ranks of a replica submit the same"
        assert ours["turns"] == own_world[0]["turns"]["two replicas"]["turns"], "which replica plays changes no token"
    called = [{number for number, _ in rank["called"]} for rank in (ours, theirs)]
    assert all(called) and called[0].isdisjoint(called[1]), "one rank asks the environment of a trajectory"


@pytest.mark.parametrize("name", CASES)
def test_turns_that_are_answered_beside_generation_are_the_same(own_world, name):
    for rank in own_world:
        found = rank["turns"][name]

        def tokens(trajectories: list) -> list:
            return [[[part[0] for part in sequence] for sequence in one] for one in trajectories]

        (first, second), each = found["beside"]["together"], found["beside"]["each"]
        assert first == second, "to the last bit of every log-prob, whatever is answered first"
        assert all(tokens(one) == tokens(found["drawn"]) for one in (first, *each))


@pytest.mark.parametrize("name", CASES)
def test_the_whole_world_works_before_between_and_after(world, name):
    everyone = [(rank, RANKS) for rank in range(RANKS)]
    for result in world:
        assert result[name]["world"] == [[6, everyone]] * 4


@pytest.mark.parametrize("name", CASES)
def test_the_other_ranks_are_free_of_vllm(world, name):
    ranks, _ = CASES[name]
    for rank, result in enumerate(world):
        before, after = result[name]["resident"]
        if rank in ranks:
            assert result[name]["left"] == []
        elif rank == 0:  # in neither engine
            assert not result[name]["imported"] and after - before < 32 << 20
    hosts = {rank for ranks, _ in CASES.values() for rank in ranks}
    assert {rank for rank, result in enumerate(world) if result["one replica of tp 2"]["imported"]} == hosts
    before, after = world[1]["two replicas"]["resident"]
    assert after - before > 128 << 20, "negative control: vLLM's own memory is seen"


def test_the_death_of_a_rank_is_told_to_its_engine_and_to_the_others(checkpoint, tmp_path):
    with pytest.raises(WorldError):
        spawn_world(with_a_death, 3, checkpoint, str(tmp_path))
    of_trainer, of_engine = (Path(tmp_path, f"told {rank}").read_text() for rank in (0, 1))
    assert "by peer" in of_engine and "by peer" in of_trainer, "not by a limit"
    assert "RankIsLate rank 1 waited for rank 2 before the end of generation" in of_engine, "ranks of the world, not of the engine"
    assert "RankIsLate rank 0 waited for" in of_trainer and "before the update of the policy" in of_trainer
