"""Coefficient of the entropy bonus in each step: fixed, or steered towards the `target` of `algorithm.entropy`."""

from __future__ import annotations

import torch

from megappo.algo.objectives import steered
from megappo.config.schema import AlgorithmConfig
from megappo.parallel.totals import total
from megappo.trainer.experience.experience import Experience
from megappo.trainer.state import TrainerState


class EntropyBonus:
    """Coefficient of a run. state: of the run; it keeps the coefficient that is steered."""

    def __init__(self, algorithm: AlgorithmConfig, state: TrainerState) -> None:
        self._algorithm, self._state = algorithm, state

    def coef_of(self, experience: Experience) -> float:
        """Coefficient of the updates on a step's experience, with the field entropy; steers that of the next. Collective over the
        world; once a step."""
        bonus = self._algorithm.entropy
        if bonus.type == "bonus":
            return bonus.coef
        before = bonus.coef if self._state.entropy_coef is None else self._state.entropy_coef
        mask = experience.batch["response_mask"]
        sums = total(torch.stack((experience.batch["entropy"][mask].sum(dtype=torch.float64), mask.sum(dtype=torch.float64))))
        entropy, tokens = sums.tolist()
        acting, self._state.entropy_coef = steered(before, entropy / max(1.0, tokens), bonus.target, bonus.step)
        return acting
