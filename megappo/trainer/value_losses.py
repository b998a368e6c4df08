"""The critic's loss as its section chooses it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megappo.algo.value_losses import ValueBins, categorical_loss, huber_loss
from megappo.config.role_sections import AnyCriticConfig
from megappo.ops.losses import value_loss


def bins_of(critic: AnyCriticConfig) -> ValueBins | None:
    """Bins of a categorical head; None for a head that gives the value itself."""
    if critic.loss == "mse" or critic.loss == "huber":
        return None
    assert critic.value_low is not None and critic.value_high is not None, "the configuration is refused"
    return ValueBins(critic.loss, critic.bins, critic.value_low, critic.value_high)


def value_surrogate(
    critic: AnyCriticConfig, value_clip: float | None, output: Tensor, fields: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """(sum of weight * loss, metrics). output: of the head, aligned with the tokens, [T] or [T, bins]. fields: value (the old one),
    returns and weight, [T]."""
    old, returns, weight = fields["value"], fields["returns"], fields["weight"]
    if (bins := bins_of(critic)) is not None:
        return categorical_loss(output, returns, weight, bins)
    if critic.loss == "huber":
        return huber_loss(output, old, returns, weight, value_clip, critic.huber_delta)
    return value_loss(output, old, returns, weight, clip=value_clip)
