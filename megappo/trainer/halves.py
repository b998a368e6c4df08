"""An asynchronous run on its ranks: the training half is a world of its own, in which the trainer runs unchanged, and the rollout
half has a loop of its own (`rollout/server.py`). Both meet in the whole world for weights and for responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from megappo.config.errors import ConfigError
from megappo.config.keys import leaves
from megappo.config.rank_ranges import ranks_of
from megappo.config.schema import TrainConfig
from megappo.engine.base import Engine
from megappo.parallel.consensus import raised_by_all, told_by
from megappo.parallel.device import job_store
from megappo.rollout.build import Again, RolloutElsewhere
from megappo.rollout.channel import Channel
from megappo.rollout.environment import environment_of, limits_of
from megappo.rollout.event_log import Change, Event, EventLog, read_changes, read_script
from megappo.rollout.half import GREEDY, IN_FLIGHT, RolloutHalf
from megappo.rollout.meetings import Guests, Hosts, Seats
from megappo.rollout.subworld import SubWorld
from megappo.rollout.types import Request, RolloutEngine, SamplingParams
from megappo.runtime.ending import input_accepted
from megappo.runtime.sections import GENERATING, TRAINING_HALF
from megappo.trainer.ahead import canary_sampling
from megappo.trainer.assembly import Claimed
from megappo.trainer.experience.collect import SampleRequests, canary_requests, evaluation_requests, requests_of_step
from megappo.trainer.extras import greedy_requests, greedy_sampling
from megappo.trainer.prepare.data import RunData
from megappo.trainer.run_facts import run_facts
from megappo.trainer.sampling import engine_of, sampling_of_set, sampling_params, scorer_of
from megappo.trainer.scoring import RewardsBeside

if TYPE_CHECKING:
    from megappo.rollout.episodes import Episodes
    from megappo.rollout.server import RequestSource
    from megappo.rollout.vllm_engine import VllmEngine

Train = Callable[[RunData, Claimed, Callable[[Engine | None], RolloutEngine]], bool]
"""The training of a run on this rank, with what builds its engine; returns whether the run reached its end."""


def run_halves(
    config: TrainConfig, data: RunData, claimed: Claimed, device: torch.device, replay: Path | None, train: Train
) -> bool:
    """Run `train` on the training ranks, and answer its requests on the others; return as `trainer.main.train`. Collective over the
    world. replay: directory of a run whose order of events is repeated. ValueError on all ranks if its log does not fit."""
    ranks = ranks_of(config.rollout.ranks, dist.get_world_size())
    leaders = ranks[:: config.rollout.tp]
    script, changes = raised_by_all(lambda: _script(config, claimed, replay, leaders), ValueError)
    limit = timedelta(seconds=config.run.timeouts.meeting_s)
    group = dist.new_group(list(range(ranks[0])), timeout=limit, group_desc="training")  # collective over the world
    channel = _channel(leaders, config.run.timeouts.meeting_s)
    about = channel, seats_of(config, dist.get_world_size()), config.run.timeouts, claimed.watchdog
    if isinstance(group, dist.ProcessGroup):
        hosts = Hosts(*about, changes)
        with _told_to_others(channel, "training"):
            return _train_half(config, data, claimed, device, hosts, SubWorld(group), train)
    guests = Guests(*about)
    with _told_to_others(channel, "rollout", guests.end_if_lost), input_accepted():
        engine = cast("VllmEngine", engine_of(config, data, None, device))
        finished = _rollout_half(config, data, claimed, guests, engine, _events_of(config, claimed, channel, script))
    guests.leave()
    return finished


def seats_of(config: TrainConfig, world_size: int) -> Seats:
    """Return the ranks of an asynchronous run."""
    ranks = ranks_of(config.rollout.ranks, world_size)
    return Seats(ranks[0], config.rollout.tp, len(ranks) // config.rollout.tp)


def join_half(config: TrainConfig, data: RunData, claimed: Claimed, device: torch.device, rank: int, again: Again) -> bool:
    """Answer requests again on this rank of a replica that was lost, as the rollout half of `run_halves`; return if the run has
    finished. The replica is the world. rank: of the run. ValueError if the log of the replica is of another run."""
    seats, store = seats_of(config, again.world_size), job_store()
    leaders = [seats.of(replica)[0] for replica in range(seats.replicas)]
    channel = Channel(dist.PrefixStore(store.get(_CHANNEL).decode(), store), rank, leaders, config.run.timeouts.meeting_s)
    # The run waits for nothing of this: an error here is that of a rank that is still lost.
    engine = cast("VllmEngine", engine_of(config, data, None, device, again))
    guests = Guests(channel, seats, config.run.timeouts, claimed.watchdog, joins=True)
    events = _events_of(config, claimed, channel)
    events.begin_again()
    with _told_to_others(channel, "rollout", guests.end_if_lost), input_accepted():
        finished = _rollout_half(config, data, claimed, guests, engine, events, joins=True)
    guests.leave()
    return finished


@contextmanager
def _told_to_others(channel: Channel, half: str, first: Callable[[BaseException], None] = lambda error: None) -> Iterator[None]:
    """Leave an error of this rank to the other half. first: called before."""
    try:
        yield
    except BaseException as error:
        first(error)
        channel.fail(half, error)
        raise


def _channel(leaders: Sequence[int], limit_s: float) -> Channel:
    store = job_store()
    # A name of its own: one world may run many times.
    name = told_by(0, f"megappo.halves.{store.add('megappo.halves', 1)}" if dist.get_rank() == 0 else "")
    if dist.get_rank() == 0:
        store.set(_CHANNEL, name)
    return Channel(dist.PrefixStore(name, store), dist.get_rank(), leaders, limit_s)


_CHANNEL = "megappo.channel"  # key of the job's store: prefix of the messages between its halves


def _train_half(
    config: TrainConfig, data: RunData, claimed: Claimed, device: torch.device, hosts: Hosts, world: SubWorld, train: Train
) -> bool:
    rollout = config.rollout
    assert rollout.max_staleness is not None, "a synchronous run has no halves"
    with world.installed() as hosts.outside, closing(hosts):
        checkpoints = claimed.run_dir.checkpoints
        # A resume computes the cache of what ran, so a run that keeps it does so where a save is due: they stay equal.
        every = config.checkpoint.save_every if rollout.cache_after_push == "keep" else 0
        every = every if isinstance(every, int) else 0
        half = RolloutHalf(hosts, claimed.watchdog.sections, checkpoints, claimed.stop, rollout.max_staleness, every)

        def build(policy: Engine | None) -> RolloutEngine:
            return half.build(lambda: cast(RolloutElsewhere, engine_of(config, data, policy, device)))

        finished = train(data, replace(claimed, in_flight=half.snapshots), build)
        hosts.channel.tell("stop", finished=finished)
    return finished


def _rollout_half(
    config: TrainConfig, data: RunData, claimed: Claimed, guests: Guests, vllm: VllmEngine, events: EventLog, *, joins: bool = False
) -> bool:
    from megappo.rollout.episodes import Episodes  # both import vLLM's side, which the training half never needs
    from megappo.rollout.server import serve

    engine, channel = _player_of(config, data, vllm), guests.channel
    source, sections = _source_of(config, data), claimed.watchdog.sections

    def between_steps() -> None:
        # An idle loop is no progress: while a rank that trains hangs, no rank works.
        works = (engine.num_open if isinstance(engine, Episodes) else engine.num_unfinished) > 0
        sections.turn_to(GENERATING if works else TRAINING_HALF, advances=works)
        if claimed.stop.received is not None:
            channel.ask_to_stop(claimed.stop.received.name)

    rewards = _rewards_of(config, data) if channel.rank in channel.leaders else None
    with closing(engine), nullcontext() if rewards is None else closing(rewards):
        return serve(engine, guests, source, events, _in_flight_of, between_steps, rewards, joins=joins)


def _events_of(config: TrainConfig, claimed: Claimed, channel: Channel, script: Sequence[Event] = ()) -> EventLog:
    leads = channel.rank in channel.leaders
    path = _log_of(claimed.run_dir.root, channel.leaders.index(channel.rank)) if leads else None
    return EventLog(path, _header(config, claimed.facts), script)


def _rewards_of(config: TrainConfig, data: RunData) -> RewardsBeside | None:
    scorer = scorer_of(config.reward, data.reward_parts)
    if scorer.streams:
        return RewardsBeside(scorer, data.tokenizer, config.rollout.stop)
    scorer.close()
    return None


def _player_of(config: TrainConfig, data: RunData, engine: VllmEngine) -> VllmEngine | Episodes:
    from megappo.rollout.episodes import Episodes

    if data.environment is None:
        return engine
    environment = environment_of(data.environment, data.tokenizer, config.rollout.stop)
    return Episodes(engine, environment, **limits_of(data.environment, config, data.tokenizer))


def _source_of(config: TrainConfig, data: RunData) -> RequestSource:
    from megappo.rollout.server import RequestSource

    n, seed, sampling = config.rollout.samples_per_prompt, config.run.seed, sampling_params(config.rollout, data.tokenizer)
    sets = {one.name: one for one in data.evaluations}

    def of_evaluation(name: str) -> tuple[Sequence[Request], SamplingParams]:
        prompts, settings = sets[name].prompts.prompts, sets[name].settings
        return evaluation_requests(prompts, settings.n, seed, name), sampling_of_set(settings, sampling)

    def of_beside(name: str, step: int, rows: Sequence[int]) -> tuple[Sequence[Request], SamplingParams]:
        if name == GREEDY:
            return greedy_requests(of_step(step, rows, 0)), greedy_sampling(sampling)
        return canary_requests(data.train.prompts, rows, seed, step), canary_sampling(sampling)

    def of_step(step: int, rows: Sequence[int], num_before: int) -> SampleRequests:
        return requests_of_step(data.train.prompts, rows, n, seed, step, num_before)

    return RequestSource(of_step, of_evaluation, sampling, of_beside)


def _in_flight_of(checkpoint: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(Path(checkpoint).glob(IN_FLIGHT.format("*")))]


# ------------------------------------------------------------------------------------------------------------------- replays


def _log_of(run_dir: Path, replica: int) -> Path:
    return run_dir / "events" / f"replica-{replica}.log"


def check_replay(config: TrainConfig, data: RunData, replay: Path, world_size: int) -> None:
    """Read the logs of a run that is to be replayed, before ranks are started and a directory is claimed. ConfigError, in one line,
    if one is missing, cut, changed, or of another configuration, data or version."""
    header, replicas = _header(config, run_facts(config, data)), range(seats_of(config, world_size).replicas)
    try:
        changes = _changes(replay, replicas)
        for replica in replicas:
            _script_of(replay, replica, header, changes)
    except ValueError as error:
        raise ConfigError(f"--replay {replay}: {error}") from error


def _script(
    config: TrainConfig, claimed: Claimed, replay: Path | None, leaders: Sequence[int]
) -> tuple[Sequence[Event], Sequence[Change] | None]:
    """Read the events that this rank's replica repeats, none on training ranks, and which replicas were lost and have joined; (),
    None without a replay."""
    rank = dist.get_rank()
    if replay is None:
        return (), None
    changes = _changes(replay, range(len(leaders)))
    if rank < leaders[0]:
        return (), changes
    replica = (rank - leaders[0]) // config.rollout.tp
    return _script_of(replay, replica, _header(config, claimed.facts), changes), changes


def _changes(replay: Path, replicas: Iterable[int]) -> list[Change]:
    return read_changes([_log_of(replay, replica) for replica in replicas])


def _script_of(replay: Path, replica: int, header: Mapping[str, Any], changes: Sequence[Change]) -> list[Event]:
    was_lost = [not one.joins for one in changes if replica in one.replicas][-1:] == [True]
    return read_script(_log_of(replay, replica), header, was_lost=was_lost)


def _header(config: TrainConfig, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a replay must share with its run, all that its numbers may depend on: dotted name -> JSON value. facts: of the
    run."""
    keys = config.model_dump(mode="json", exclude={"run": True, "telemetry": True, "checkpoint": True})
    shared = {name: facts[name] for name in ("tokenizer", "versions")}
    shared |= {"run.seed": config.run.seed, "facts": {"data": facts["data"], "reward": facts["reward"]["code"]}}
    return dict(leaves(json.loads(json.dumps({**keys, **shared}))))
