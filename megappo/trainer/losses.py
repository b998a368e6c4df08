"""The losses of policy and critic over the tokens of a micro-batch, as their sections choose them: PPO's surrogate, GSPO's, CISPO's
(`algorithm.loss`) or that of DIS; squared or Huber's error of values, or the cross-entropy of a categorical head.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megappo.algo.objectives import cispo_loss, dis_loss, sequence_log_ratio, token_kl_sum
from megappo.algo.value_losses import ValueBins, categorical_loss, huber_loss
from megappo.config.role_sections import AnyCriticConfig
from megappo.config.schema import AlgorithmConfig
from megappo.data.packing import PackedBatch
from megappo.ops.losses import policy_loss, value_loss

SEQUENCE_RATIO = "sequence_log_ratio"
"""Field of GSPO's loss: the log-ratio of the token's sequence."""


def separates(algorithm: AlgorithmConfig) -> bool:
    """True if the loss of a token depends on no other token: then it is computed while the logits of a chunk exist."""
    return algorithm.loss.type != "gspo"


def fields_of_sequences(
    algorithm: AlgorithmConfig, micro: PackedBatch, fields: Mapping[str, Tensor], logprob: Tensor
) -> dict[str, Tensor]:
    """The fields that GSPO's `surrogate` reads beside `fields`. micro: whole sequences. fields, logprob: of all its tokens, [T]."""
    old = fields[algorithm.old_logprob]
    return {SEQUENCE_RATIO: sequence_log_ratio(logprob, old, fields["weight"], micro.cu_seqlens)}


def surrogate(algorithm: AlgorithmConfig, fields: Mapping[str, Tensor], logprob: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(sum of weight * loss, metrics) of some tokens, differentiable with respect to `logprob`; metrics: `algo.losses.POLICY_SUMS`.

    fields: of the same tokens, `algorithm.old_logprob`, advantage, weight; for GSPO those of `fields_of_sequences` too.
    """
    a, advantage, weight = algorithm.loss, fields["advantage"], fields["weight"]
    old = fields[algorithm.old_logprob]
    if a.type == "dis":
        return dis_loss(logprob, old, advantage, weight, a.low, a.high)
    if a.type == "cispo":
        return cispo_loss(logprob, old, advantage, weight, a.clip_low, a.clip_high)
    clip = {"clip_low": a.clip_low, "clip_high": a.clip_high, "dual_clip": a.dual_clip}
    if a.type == "ppo":
        return policy_loss(logprob, old, advantage, weight, **clip)
    # The value of the sequence's ratio with the gradient of the token's own (arXiv:2507.18071, eq. 14). Against zeros, so that all
    # tokens of a sequence have the same bits: GSPO's clip ranges are of 1e-4.
    of_sequence = fields[SEQUENCE_RATIO] + (logprob - logprob.detach())
    loss, metrics = policy_loss(of_sequence, old.new_zeros(old.shape), advantage, weight, **clip)
    return loss, {**metrics, "approx_kl_sum": token_kl_sum(logprob, old, weight)}


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
