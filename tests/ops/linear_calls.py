"""The linear ops with their options as keywords, as the tests write them."""

from megappo.ops import linear_logprob as logprob_op
from megappo.ops import linear_loss as loss_op
from megappo.ops.linear_logprob import LinearOptions


def linear_logprob(hidden, weight, target, group, **options):
    return logprob_op.linear_logprob(hidden, weight, target, group, LinearOptions(**options))


def linear_token_loss(hidden, weight, target, token_loss, group, **options):
    return loss_op.linear_token_loss(hidden, weight, target, group, LinearOptions(**options), token_loss)
