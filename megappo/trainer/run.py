"""Steps of a run, of which the first may train the critic alone, and the parts that every kind of run has. With lambda 1 such a
warm-up is the value pretraining of VC-PPO (arXiv:2503.01491) and VAPO (arXiv:2504.05118)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megappo.config.layout_checks import only_pretrains
from megappo.config.role_sections import CriticConfig
from megappo.config.schema import AlgorithmConfig, TrainConfig
from megappo.config.supervised import AnyConfig
from megappo.telemetry.runlog import RunLog
from megappo.trainer.checkpoints import Checkpoints
from megappo.trainer.instruments import Instruments
from megappo.trainer.state import TrainerState


class Steps:
    """Steps of a run. state: records when the critic's warm-up ended early. total: of the configuration."""

    def __init__(self, config: AnyConfig, state: TrainerState, total: int) -> None:
        of_ppo = isinstance(config, TrainConfig)  # only PPO has a warm-up
        self._critic = config.critic if of_ppo else CriticConfig()
        self._algorithm = config.algorithm if of_ppo else AlgorithmConfig()
        self._only_pretrains = only_pretrains(config)
        self._state, self.total = state, total

    @property
    def last(self) -> int:
        """Last step of the run; if it only pretrains the critic, the step that fitted it."""
        ended = self._state.warmup_ended
        return ended if ended and self._only_pretrains else self.total

    def is_due(self, step: int, interval: int) -> bool:
        """Return True at every multiple of the interval and after the last step; never with interval 0."""
        return interval > 0 and (step % interval == 0 or step == self.last)

    def warm_up(self, step: int) -> bool:
        """Return True if PPO step `step`, from 1, trains the critic alone."""
        ended = self._state.warmup_ended
        return step <= self._critic.warmup_steps and not 0 < ended < step

    def algorithm(self, step: int) -> AlgorithmConfig:
        """Return the settings of the advantages and returns of a step."""
        warmup = self._critic.warmup
        if warmup is None or warmup.lam is None or not self.warm_up(step):
            return self._algorithm
        return self._algorithm.model_copy(update={"lam_value": warmup.lam})

    def end_warm_up_if_fitted(self, step: int, explained_variance: float) -> bool:
        """End the warm-up after this step if the values explain enough of the returns; return True if it ends now."""
        wanted = None if self._critic.warmup is None else self._critic.warmup.explained_variance
        if wanted is None or not self.warm_up(step) or not explained_variance >= wanted:  # NaN: nothing to explain
            return False
        self._state.warmup_ended = step
        return True


@dataclass(frozen=True)
class Run:
    """Parts of a run of any kind. settle: called after a step that has updated every role."""

    steps: Steps
    state: TrainerState
    log: RunLog
    checkpoints: Checkpoints
    instruments: Instruments
    settle: Callable[[], None]


class StepLoop:
    """A loop whose steps generate nothing. stopped: as in `ppo.PPO`."""

    def __init__(self, run: Run) -> None:
        self.steps, self.state, self.log, self.settle = run.steps, run.state, run.log, run.settle
        self.checkpoints, self.instruments, self.stopped = run.checkpoints, run.instruments, False

    def run(self) -> None:
        """Take the remaining steps, or until the last one moves or a stop. Collective over the world."""
        while self.state.step < self.steps.last and not self.stopped:
            with self.instruments.step(self.state.step + 1), self.checkpoints.guard_step():
                self.step()
            self.settle()

    def step(self) -> None:
        """Take the next step. Collective over the world."""
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing: no workers are running, as those of rewards in `ppo.PPO`."""
