"""An asynchronous run on its ranks: the training half is a world of its own, in which the trainer runs unchanged, and the rollout
half has a loop of its own (`rollout/server.py`). Both meet in the whole world for weights and for responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from megappo.config.rank_ranges import ranks_of
from megappo.config.schema import TrainConfig
from megappo.engine.base import Engine
from megappo.parallel.consensus import raised_by_all, told_by
from megappo.rollout.build import RolloutElsewhere
from megappo.rollout.channel import Channel
from megappo.rollout.event_log import Event, EventLog, read_script
from megappo.rollout.half import IN_FLIGHT, RolloutHalf
from megappo.rollout.subworld import SubWorld
from megappo.rollout.types import Request, RolloutEngine, SamplingParams
from megappo.runtime.ending import input_accepted
from megappo.trainer.ahead import AheadLoader, canary_sampling
from megappo.trainer.assembly import Claimed
from megappo.trainer.experience.collect import canary_requests, evaluation_requests, requests_of_step
from megappo.trainer.prepare.data import RunData
from megappo.trainer.sampling import rollout_of, sampling_of_set, sampling_params

if TYPE_CHECKING:
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
    script = raised_by_all(lambda: _script(config, claimed, replay, leaders), ValueError)
    limit = timedelta(seconds=config.run.timeouts.meeting_s)
    group = dist.new_group(list(range(ranks[0])), timeout=limit, group_desc="training")  # collective over the world
    channel = _channel(leaders, config.run.timeouts.meeting_s)
    trains = isinstance(group, dist.ProcessGroup)
    try:
        if isinstance(group, dist.ProcessGroup):
            return _train_half(config, data, claimed, device, channel, SubWorld(group), train)
        with input_accepted():
            return _rollout_half(config, data, claimed, device, channel, script)
    except BaseException as error:
        channel.fail("training" if trains else "rollout", error)
        raise


def _channel(leaders: Sequence[int], limit_s: float) -> Channel:
    default: Any = dist.distributed_c10d._get_default_store()  # the method is missing in torch's stub
    # A connection of its own: a wait would hold that of other threads. A name of its own: one world may run many times.
    name = told_by(0, f"megappo.halves.{default.add('megappo.halves', 1)}" if dist.get_rank() == 0 else "")
    return Channel(dist.PrefixStore(name, default.clone()), dist.get_rank(), leaders, limit_s)


def _train_half(
    config: TrainConfig, data: RunData, claimed: Claimed, device: torch.device, channel: Channel, world: SubWorld, train: Train
) -> bool:
    rollout = config.rollout
    assert rollout.max_staleness is not None, "a synchronous run has no halves"
    loader = AheadLoader(data.loader, rollout.max_staleness, rollout.samples_per_prompt, data.total_steps)
    with world.installed() as outside:
        checkpoints = claimed.run_dir.checkpoints
        # A resume computes the cache of what ran, so a run that keeps it does so where a save is due: they stay equal.
        every = config.checkpoint.save_every if rollout.cache_after_push == "keep" else 0
        every = every if isinstance(every, int) else 0
        half = RolloutHalf(channel, outside, claimed.watchdog.sections, checkpoints, claimed.stop, every)

        def build(policy: Engine | None) -> RolloutEngine:
            return half.build(lambda: cast(RolloutElsewhere, rollout_of(config, data, policy, device)))

        finished = train(replace(data, loader=loader), replace(claimed, in_flight=half.snapshots), build)
        channel.tell("stop", finished=finished)
    return finished


def _rollout_half(
    config: TrainConfig, data: RunData, claimed: Claimed, device: torch.device, channel: Channel, script: Sequence[Event]
) -> bool:
    from megappo.rollout.server import serve  # it imports vLLM's side, which the training half never needs

    engine = cast("VllmEngine", rollout_of(config, data, None, device))
    path = _log_of(claimed.run_dir.root, channel.leaders.index(dist.get_rank())) if dist.get_rank() in channel.leaders else None
    source, sections = _source_of(config, data), claimed.watchdog.sections

    def between_steps() -> None:
        sections.advance()
        if claimed.stop.received is not None:
            channel.ask_to_stop(claimed.stop.received.name)

    training_ranks = ranks_of(config.rollout.ranks, dist.get_world_size())[0]
    events = EventLog(path, _header(config, claimed), script)
    with closing(engine):
        return serve(engine, channel, source, training_ranks, events, _in_flight_of, between_steps)


def _source_of(config: TrainConfig, data: RunData) -> RequestSource:
    from megappo.rollout.server import RequestSource

    n, seed, sampling = config.rollout.samples_per_prompt, config.run.seed, sampling_params(config.rollout, data.tokenizer)
    sets = {one.name: one for one in data.evaluations}

    def of_evaluation(name: str) -> tuple[Sequence[Request], SamplingParams]:
        prompts, settings = sets[name].prompts.prompts, sets[name].settings
        return evaluation_requests(prompts, settings.n, seed, name), sampling_of_set(settings, sampling)

    def of_canary(step: int, rows: Sequence[int]) -> tuple[Sequence[Request], SamplingParams]:
        return canary_requests(data.train.prompts, rows, seed, step), canary_sampling(sampling)

    def of_step(step: int, rows: Sequence[int]) -> Sequence[Request]:
        return requests_of_step(data.train.prompts, rows, n, seed, step)

    return RequestSource(of_step, of_evaluation, sampling, of_canary)


def _in_flight_of(checkpoint: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(Path(checkpoint).glob(IN_FLIGHT.format("*")))]


# ------------------------------------------------------------------------------------------------------------------- replays


def _log_of(run_dir: Path, replica: int) -> Path:
    return run_dir / "events" / f"replica-{replica}.log"


def _script(config: TrainConfig, claimed: Claimed, replay: Path | None, leaders: Sequence[int]) -> Sequence[Event]:
    """Read the events that this rank's replica repeats; empty without a replay, and on training ranks."""
    rank = dist.get_rank()
    if replay is None or rank < leaders[0]:
        return ()
    return read_script(_log_of(replay, (rank - leaders[0]) // config.rollout.tp), _header(config, claimed))


def _header(config: TrainConfig, claimed: Claimed) -> dict[str, Any]:
    """Return what a replay must share with its run, all that its numbers may depend on: dotted name -> JSON value."""
    keys = config.model_dump(mode="json", exclude={"run": True, "telemetry": True, "checkpoint": True})
    facts = {name: claimed.facts[name] for name in ("tokenizer", "versions")}
    facts |= {"run.seed": config.run.seed, "facts": {"data": claimed.facts["data"], "reward": claimed.facts["reward"]["code"]}}
    return dict(_leaves(json.loads(json.dumps({**keys, **facts}))))


def _leaves(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
