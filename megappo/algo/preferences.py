"""Losses of preferences: by the log-probs of whole responses (DPO and its kin) or by the scores of a reward model. Differentiable
by autograd, fp32 or fp64; one value for each pair, response or sequence, so the caller sums them and divides by the count of the
whole batch. A pair is two neighbours of a packed batch: the chosen response at an even index, the rejected one after it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megappo.algo.losses import check_per_token


def sequence_logprobs(logprob: Tensor, mask: Tensor, cu_seqlens: Tensor, *, mean: bool) -> Tensor:
    """Sum, or mean, of logprob [T] over the true entries of mask [T] bool in each sequence: [B] fp64, differentiable.
    A sequence without such a token has 0, and a token outside the mask is ignored, even if NaN. cu_seqlens: [B+1]."""
    kept = torch.stack((torch.where(mask, logprob, 0.0).double(), mask.double()), 1)
    # One sum for each sequence: a running sum over the batch would round each by its neighbours.
    sums = torch.segment_reduce(kept, "sum", offsets=cu_seqlens.long(), initial=0.0, unsafe=True)
    return sums[:, 0] / sums[:, 1].clamp(min=1.0) if mean else sums[:, 0]


ROUNDING = 1e-5
"""Difference of two rewards that is one of rounding: a policy that has not learned yet gives none."""


def pairs_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values of the (chosen, rejected) responses, [P] each, of values [B]. A last one without a partner is padding, left out."""
    pairs = values[: len(values) // 2 * 2].view(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def sigmoid_loss(margin: Tensor, beta: float, label_smoothing: float = 0.0, target: float = 0.0) -> Tensor:
    """-log sigmoid(z) for z = beta * margin - target, [P].

    margin: [P], how much more the log-prob of the chosen response exceeds the reference's than that of the rejected one does: DPO
    (Rafailov et al. 2023, arXiv:2305.18290, eq. 7). Without a reference, of mean log-probs and with a target: SimPO (Meng et al.
    2024, arXiv:2405.14734, eq. 6). label_smoothing: probability e that a label is wrong, for (1 - e) l(z) + e l(-z): conservative
    DPO (Mitchell 2023).
    """
    z = beta * margin - target
    return -(1.0 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z)


def ipo_loss(margin: Tensor, beta: float) -> Tensor:
    """(margin - 1 / (2 beta))^2, [P]; margin as of `sigmoid_loss` (Azar et al. 2023, arXiv:2310.12036, eq. 17)."""
    return (margin - 0.5 / beta).square()


def odds_ratio_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid of the log odds ratio of mean log-probs [P], odds p / (1 - p) (ORPO, Hong et al. 2024, arXiv:2403.07691, eq. 7).
    A response of probability 1 has infinite odds; its log-prob counts as at most -1e-6."""

    def log_odds(mean: Tensor) -> Tensor:
        below = mean.clamp(max=-1e-6)
        return below - torch.log(-torch.expm1(below))

    return -logsigmoid(log_odds(chosen) - log_odds(rejected))


def kto_loss(log_ratio: Tensor, label: Tensor, kl: float | Tensor, beta: float) -> Tensor:
    """1 - sigmoid(beta * label * (log_ratio - kl)), [B] (KTO, Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7).

    log_ratio: [B], log-prob of a response beyond the reference's. label: [B], 1 of a desirable response, -1 of an undesirable one
    and 0 of padding, whose loss is 0. kl: one or [B], estimate of KL(policy || reference), at least 0: the mean log-ratio of
    responses to other prompts.
    """
    return torch.where(label == 0, 0.0, torch.sigmoid(-beta * label * (log_ratio - kl)))


def response_sums(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Metrics of the rewards [P] of pairs, as fp64 sums: both rewards, and the pairs in the right order."""
    first, second = chosen.detach().double(), rejected.detach().double()
    return {"chosen_sum": first.sum(), "rejected_sum": second.sum(), "accuracy_sum": in_order(first - second).sum()}


def in_order(difference: Tensor) -> Tensor:
    """1 where the better response is ahead by this difference, 0 where it is behind, one half where both are equal."""
    return torch.where(difference.abs() < ROUNDING, 0.5, (difference > 0).double())


def ranking_loss(score: Tensor, unit: Tensor, place: Tensor, margin: Tensor, tie_margin: float | None = None) -> Tensor:
    """Loss of every sequence against those of its unit that are ranked below it, [B]: minus the log-likelihood of the ranking.

    score: [B]. unit: [B], equal for the responses of one record; 0 is padding, whose loss is 0. place: [B], smaller is better.
    margin: [B], of the sequence against those above it. Pairs are Bradley and Terry's (Ouyang et al. 2022, arXiv:2203.02155, eq. 1;
    margins: Touvron et al. 2023, arXiv:2307.09288, eq. 2), longer units Plackett and Luce's. tie_margin: log of the threshold of
    Rao and Kupper's model of ties, where a pair of equal places is a tie (Liu et al. 2024, arXiv:2410.05328); None without ties.
    """
    check_per_token(score=score, margin=margin)
    others = (unit[:, None] == unit) & (unit > 0) & ~torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    below = others & (place[:, None] <= place)
    beyond = 0.0 if tie_margin is None else tie_margin
    # Differences first: scores far from 0 would leave few digits in a logsumexp of the scores themselves.
    behind = torch.where(below, score - score[:, None] + margin + beyond, -math.inf)
    loss = torch.cat((behind.new_zeros(len(unit), 1), behind), 1).logsumexp(1)
    if tie_margin is None:
        return loss
    tied = (below & below.T).any(1)
    return loss - torch.where(tied, 0.5 * math.log(math.expm1(2.0 * tie_margin)), 0.0)  # half of it at each of the two


def centring_loss(score: Tensor, unit: Tensor) -> Tensor:
    """Square of twice the mean score of a unit, shared evenly by its sequences, [B]: of a pair (chosen + rejected)^2 (Eisenstein et
    al. 2023, arXiv:2312.09244, eq. 2). score, unit: as of `ranking_loss`."""
    same = ((unit[:, None] == unit) & (unit > 0)).to(score.dtype)
    size = same.sum(1).clamp(min=1.0)
    return (2.0 * (same @ torch.where(unit > 0, score, 0.0)) / size).square() / size


BINS = 10
"""Bins of a calibration error: of the probability of the order that a model prefers, from one half to 1."""


def ranking_sums(score: Tensor, unit: Tensor, place: Tensor) -> dict[str, Tensor]:
    """Metrics of a ranking as fp64 sums: ordered pairs within units, those with the better one ahead (an equal score is half),
    their differences, sequences, scores and their squares, and the pairs and correct pairs of each bin of the calibration."""
    score = score.detach().double()
    better = (unit[:, None] == unit) & (unit > 0) & (place[:, None] < place)
    difference = score[:, None] - score
    correct = in_order(difference)
    probability = torch.sigmoid(difference.abs())
    real = unit > 0
    held = torch.where(real, score, 0.0)
    sums = {
        "pairs_sum": better.sum(dtype=torch.float64),
        "accuracy_sum": torch.where(better, correct, 0.0).sum(),
        "margin_sum": torch.where(better, difference, 0.0).sum(),
        "sequences_sum": real.sum(dtype=torch.float64),
        "score_sum": held.sum(),
        "score_squared_sum": held.square().sum(),
    }
    number = ((probability - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    for index in range(BINS):
        inside = better & (number == index)
        sums[f"bin_{index}_surplus_sum"] = torch.where(inside, probability - correct, 0.0).sum()
    return sums


def calibration_error(sums: Mapping[str, float]) -> float:
    """Expected calibration error of summed `ranking_sums`: mean over pairs of |mean probability - share of correct pairs| of their
    bin (Guo et al. 2017, arXiv:1706.04599, eq. 5); nan without pairs."""
    gaps = sum(abs(sums[f"bin_{index}_surplus_sum"]) for index in range(BINS))
    return gaps / sums["pairs_sum"] if sums["pairs_sum"] else math.nan
