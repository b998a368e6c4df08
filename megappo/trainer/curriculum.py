"""Pass rates of the prompts of a run, from the scores of all ranks (`data.curriculum`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megappo.data.loader import PromptLoader
from megappo.rewards.compose import Scored
from megappo.telemetry.metrics import Metric
from megappo.trainer.experience.experience import Experience


def observe_pass_rates(loader: PromptLoader, rows: Sequence[int], experience: Experience, scored: Scored) -> None:
    """Tell the loader the scores of a round's responses, as many for each of these prompts. Collective over the world, with pass
    rates."""
    if loader.pass_rates is not None:
        count = experience.table.num_trajectories  # behind them come the sequences that trajectories went on from
        scores = experience.column(torch.tensor(scored.total, dtype=torch.float64))[:count].view(len(rows), -1)
        ends = experience.table.ends[:count].view(len(rows), -1)  # those that go on are counted when they end
        loader.pass_rates.observe(rows, [found[ended].tolist() for found, ended in zip(scores, ends)])


def curriculum_metrics(loader: PromptLoader) -> dict[str, float]:
    """Figures of the pass rates so far; empty without."""
    rates = loader.pass_rates
    return {} if rates is None else {Metric.PROMPTS_SEEN.value: rates.num_seen, Metric.PROMPTS_SKIPPED.value: rates.skipped}
