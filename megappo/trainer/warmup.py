"""The critic's warm-up: steps at the start of a run that train the critic alone, on returns of their own lambda.

With Monte Carlo returns (lambda 1) it is the value pretraining of VC-PPO (arXiv:2503.01491) and VAPO (arXiv:2504.05118): the policy
that samples stays as it is, and a critic that starts from a language model learns its values before they decide an update.
"""

from __future__ import annotations

from megappo.config.layout_checks import only_pretrains
from megappo.config.schema import AlgorithmConfig, TrainConfig
from megappo.trainer.state import TrainerState


class CriticWarmup:
    """Warm-up of a run. state: of the run; it keeps the step after which the warm-up ended early."""

    def __init__(self, config: TrainConfig, state: TrainerState) -> None:
        self._config, self._critic, self._state = config, config.critic, state

    def covers(self, step: int) -> bool:
        """True if PPO step `step`, from 1, trains the critic alone."""
        ended = self._state.warmup_ended
        return step <= self._critic.warmup_steps and not 0 < ended < step

    def algorithm(self, step: int) -> AlgorithmConfig:
        """Settings of the advantages and returns of a step."""
        algorithm, lam = self._config.algorithm, self._critic.warmup_lam
        if lam is None or not self.covers(step):
            return algorithm
        return algorithm.model_copy(update={"lam_value": lam})

    def end_if_fitted(self, step: int, explained_variance: float) -> bool:
        """End the warm-up after this step if its values explain enough of the returns; returns True if it ends now."""
        wanted = self._critic.warmup_explained_variance
        if wanted is None or not self.covers(step) or not explained_variance >= wanted:  # NaN: nothing to explain
            return False
        self._state.warmup_ended = step
        return True

    def last_step(self, total_steps: int) -> int:
        """Last step of the run: of one that only pretrains the critic, the one that fitted it."""
        ended = self._state.warmup_ended
        return ended if ended and only_pretrains(self._config) else total_steps
