"""Rules about the run itself: its time limits, the order of its data, and what it logs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.config.batch import step_arithmetic
from megappo.config.errors import problem
from megappo.config.run_sections import RunConfig
from megappo.config.schema import TrainConfig
from megappo.config.supervised import AnyConfig


def timeout_problems(run: RunConfig) -> Iterator[str]:
    """Yield problems of timeouts that would end a healthy run."""
    limits = run.timeouts
    # The first passes are the slowest (start_s); a rank that waits on the host may wait for a whole pass of another (meeting_s).
    for name, value in (("start_s", limits.start_s), ("meeting_s", limits.meeting_s)):
        if value < limits.pass_s:
            yield problem(
                f"run.timeouts.{name}", value, f"is below run.timeouts.pass_s = {limits.pass_s:g}; raise it, or lower pass_s"
            )
    # A waiting rank still sends heartbeats: the watchdog must catch a dead one before the meeting times out.
    if limits.heartbeat_s >= limits.meeting_s:
        fix = f"is not below run.timeouts.meeting_s = {limits.meeting_s:g}; lower it, or raise meeting_s"
        yield problem("run.timeouts.heartbeat_s", limits.heartbeat_s, fix)


def weight_problem(config: TrainConfig) -> str | None:
    data = config.data
    if data.weight_key is not None and not data.shuffle:
        fix = "weights draw at random, and the prompts come in the order of the data; set data.shuffle to true, or remove it"
        return problem("data.weight_key", data.weight_key, fix)
    return None


def trajectory_problem(config: TrainConfig) -> str | None:
    wanted, samples = config.telemetry.trajectories_per_step, step_arithmetic(config).samples
    # The default may exceed a small batch; only a written number is a mistake.
    explicit = "trajectories_per_step" in config.telemetry.model_fields_set
    if explicit and config.telemetry.trajectories_every and wanted > samples:
        return problem("telemetry.trajectories_per_step", wanted, f"a step has {samples} samples; lower it")
    return None


def tracker_names_problem(config: AnyConfig) -> str | None:
    named = config.telemetry.trackers
    twice = sorted({name for name in named if named.count(name) > 1})
    return problem("telemetry.trackers", list(named), f"{twice[0]} is there twice; keep one") if twice else None


def profile_problem(config: AnyConfig) -> str | None:
    """Refuse profiled steps that are named twice or come after the end, if `trainer.steps` is set."""
    asked, steps = config.telemetry.profile_steps, config.trainer.steps
    if len(set(asked)) < len(asked):
        return problem("telemetry.profile_steps", list(asked), "names a step twice; once is enough")
    if steps is not None and asked and max(asked) > steps:
        return problem("telemetry.profile_steps", list(asked), f"the run ends with step {steps}; name earlier ones")
    return None
