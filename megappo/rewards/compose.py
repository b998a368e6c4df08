"""Score of a response: the weighted sum of the parts of its recipe minus penalties, with every part kept for the logs.
Each rank composes the verdicts of its own samples."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from megappo.config.reward_sections import LengthPenaltyConfig
from megappo.rewards.base import RewardError
from megappo.rewards.verdict import LARGEST, Verdict

Row = TypeVar("Row")

MISSING_EOS = "missing_eos_penalty"
LENGTH = "length_penalty"
WHOLE = ""
"""Label of the only recipe if there is no route."""


@dataclass(frozen=True)
class Judged:
    """A finished response and the verdicts of its local parts, as ranks exchange it."""

    sample_id: str
    text: str
    label: str
    truncated: bool
    num_tokens: int
    verdicts: Mapping[str, Verdict]


@dataclass(frozen=True)
class Scored:
    """Texts and scores of some samples. [B] is one number per sample, in fp32."""

    texts: list[str]
    total: list[float]
    """Weighted sums of the parts minus penalties, [B]; NaN for a sample without a score."""
    parts: dict[str, list[float]]
    """Name -> [B]: a part's unweighted value, NaN if it has no verdict or the sample's recipe lacks it; a penalty as it enters the
    total (<= 0)."""
    no_verdict: list[str] = field(default_factory=list)
    """[B] reasons why a sample has no score, "" for one that has; empty if all have."""
    labels: list[str] = field(default_factory=list)
    """[B] labels of recipes; empty without a route."""
    per_token: list[list[float] | None] | None = None
    """[B] weighted rewards of the sampled tokens, not part of the total; None for a sample, or for all, that have none."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Part -> seconds of the samples that it scored, at most [B]."""
    model_total: list[float] | None = None
    """[B] share of the reward models in the total; None without any."""
    recipe_labels: tuple[str, ...] = ()
    early_s: float | None = None
    """Seconds of generation in which this rank computed rewards; None if no part streams."""
    model_lengths: list[int] = field(default_factory=list)
    """Tokens of each text that the reward model read."""
    retries: dict[str, int] = field(default_factory=dict)
    """Remote part -> requests that this rank sent again."""

    def with_parts(self, names: Sequence[str]) -> Scored:
        """Keep these parts only, in this order."""
        # A new part is a number inside another part, which no sample here has: 0, or NaN for a sample without that other part.
        return replace(self, parts={name: self.parts.get(name) or self._without(name) for name in names})

    def select(self, chosen: Sequence[int]) -> Scored:
        """Select samples in this order. Seconds, lengths and retries stay those of all that were scored."""

        def rows(values: list[Row] | None) -> list[Row] | None:
            return None if values is None else [values[i] for i in chosen]

        return replace(
            self,
            texts=[self.texts[i] for i in chosen],
            total=[self.total[i] for i in chosen],
            parts={name: [values[i] for i in chosen] for name, values in self.parts.items()},
            no_verdict=_of_any([self.no_verdict[i] for i in chosen]) if self.no_verdict else [],
            labels=[self.labels[i] for i in chosen] if self.labels else [],
            per_token=rows(self.per_token),
            model_total=rows(self.model_total),
        )

    def among(self, scored: Sequence[bool]) -> Scored:
        """Extend to all samples. scored: true for each that has a score here, in their order; the others get 0 and no part."""
        if all(scored):
            return self
        places = iter(range(len(self.total)))
        chosen = [next(places) if one else None for one in scored]

        def rows(values: list[Row], absent: Row) -> list[Row]:
            return [absent if i is None else values[i] for i in chosen]

        return replace(
            self,
            texts=rows(self.texts, ""),
            total=rows(self.total, 0.0),
            parts={name: rows(values, math.nan) for name, values in self.parts.items()},
            no_verdict=rows(self.no_verdict, "") if self.no_verdict else [],
            labels=rows(self.labels, "") if self.labels else [],
            per_token=None if self.per_token is None else rows(self.per_token, None),
            model_total=None if self.model_total is None else rows(self.model_total, 0.0),
        )

    def without(self, reasons: Mapping[int, str]) -> Scored:
        """Take their scores from some samples. reasons: place of the sample -> why it has none."""
        if not reasons:
            return self
        known = self.no_verdict or [""] * len(self.total)
        return replace(
            self,
            total=[math.nan if i in reasons else value for i, value in enumerate(self.total)],
            parts={name: [math.nan if i in reasons else x for i, x in enumerate(values)] for name, values in self.parts.items()},
            no_verdict=[reasons.get(i, reason) for i, reason in enumerate(known)],
        )

    def _without(self, name: str) -> list[float]:
        outer = next((values for part, values in self.parts.items() if name.startswith(f"{part}.")), None)
        return [math.nan if outer is None or math.isnan(outer[i]) else 0.0 for i in range(len(self.total))]


def joined(scores: Sequence[Scored]) -> Scored:
    """Join one or more scores of the same reward, one after the other; counts and retries are added up."""
    names = list(dict.fromkeys(name for one in scores for name in one.parts))
    scores = [one.with_parts(names) for one in scores]
    no_model = all(one.model_total is None for one in scores)
    seconds = list(dict.fromkeys(name for one in scores for name in one.seconds))
    early = [one.early_s for one in scores if one.early_s is not None]
    return replace(
        scores[0],
        texts=[text for one in scores for text in one.texts],
        total=[value for one in scores for value in one.total],
        parts={name: [value for one in scores for value in one.parts[name]] for name in names},
        no_verdict=_of_any([reason for one in scores for reason in one.no_verdict or [""] * len(one.total)]),
        labels=[label for one in scores for label in one.labels],
        per_token=_per_token_of_all(scores),
        seconds={name: [s for one in scores for s in one.seconds.get(name, [])] for name in seconds},
        # Without a sample of the reward models' recipes a round has none.
        model_total=None if no_model else [s for one in scores for s in one.model_total or [0.0] * len(one.total)],
        early_s=sum(early) if early else None,
        model_lengths=[length for one in scores for length in one.model_lengths],
        retries={name: sum(one.retries[name] for one in scores) for name in scores[0].retries},
    )


def _of_any(reasons: list[str]) -> list[str]:
    return reasons if any(reasons) else []


def _per_token_of_all(scores: Sequence[Scored]) -> list[list[float] | None] | None:
    if all(one.per_token is None for one in scores):
        return None
    return [values for one in scores for values in one.per_token or [None] * len(one.total)]


@dataclass(frozen=True)
class Composition:
    """Recipes and penalties, as `config.reward_checks` lets them pass. A part of weight 0 is only logged; a part's own numbers are
    logged as `part.inner`.
    score = sum of weight * part - missing_eos_penalty * [cut] - length_penalty.per_token * max(0, num_tokens - start)."""

    recipes: Mapping[str, Mapping[str, float]]
    """Label -> part -> weight; only `WHOLE` without a route."""
    missing_eos_penalty: float = 0.0
    length_penalty: LengthPenaltyConfig | None = None

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for recipe in self.recipes.values() for name in recipe))

    def compose(self, judged: Sequence[Judged], model_parts: Mapping[str, Mapping[int, Verdict]] | None = None) -> Scored:
        """Score [B] responses. Raises RewardError for a value or a sum that is not finite in fp32, unless a part of the sample has
        no verdict: such a sample has no score, for the first reason in the order of its recipe; a part of weight 0 takes none.
        model_parts: name -> response -> verdict of the parts that all ranks computed together, where the recipe has them."""
        verdicts = [self._verdicts(one, i, model_parts or {}) for i, one in enumerate(judged)]
        penalties = self._penalties(judged)
        reasons = [self._reason(one, found) for one, found in zip(judged, verdicts)]
        totals = []
        for i, (one, found) in enumerate(zip(judged, verdicts)):
            weights = {name: weight for name, weight in self.recipes[one.label].items() if weight or not found[name].reason}
            total = sum(weights[name] * found[name].score for name in weights) + sum(values[i] for values in penalties.values())
            if not reasons[i] and not abs(total) <= LARGEST:
                raise RewardError(f"the weighted rules add up to {total:g}, which fp32 does not hold; {_describe(one)}")
            totals.append(total)
        rules = {name: [found[name].score if name in found else math.nan for found in verdicts] for name in self.names}
        return Scored(
            texts=[one.text for one in judged],
            total=_fp32(totals),
            parts={name: _fp32(values) for name, values in {**rules, **self._inner_parts(verdicts), **penalties}.items()},
            no_verdict=_of_any(reasons),
            labels=[one.label for one in judged] if self.is_routed else [],
            per_token=self._per_token(judged, verdicts),
            seconds=_seconds(self.names, verdicts),
            model_total=_fp32([self._weighted(one, found, model_parts) for one, found in zip(judged, verdicts)])
            if model_parts
            else None,
            recipe_labels=tuple(self.recipes) if self.is_routed else (),
            model_lengths=_model_lengths(model_parts or {}),
        )

    @property
    def is_routed(self) -> bool:
        return list(self.recipes) != [WHOLE]

    def _reason(self, one: Judged, found: Mapping[str, Verdict]) -> str:
        weights = self.recipes[one.label]
        return next((reason for name, weight in weights.items() if weight and (reason := found[name].reason)), "")

    def _weighted(self, one: Judged, found: Mapping[str, Verdict], names: Collection[str]) -> float:
        return sum(weight * found[name].score for name, weight in self.recipes[one.label].items() if name in names)

    def _verdicts(self, one: Judged, index: int, model_parts: Mapping[str, Mapping[int, Verdict]]) -> dict[str, Verdict]:
        found = {}
        for name in self.recipes[one.label]:
            if name in model_parts:
                found[name] = model_parts[name][index]
                if not abs(value := found[name].score) <= LARGEST:
                    raise RewardError(f"reward part {name} gave {value}, not a finite number; {_describe(one)}")
            else:
                found[name] = one.verdicts[name]
        return found

    def _penalties(self, judged: Sequence[Judged]) -> dict[str, list[float]]:
        penalties: dict[str, list[float]] = {}
        if self.missing_eos_penalty:
            penalties[MISSING_EOS] = [-self.missing_eos_penalty if one.truncated else 0.0 for one in judged]
        if (penalty := self.length_penalty) is not None:
            excess = [max(0, one.num_tokens - penalty.start) for one in judged]
            penalties[LENGTH] = [-penalty.per_token * n for n in excess]
        return penalties

    def _inner_parts(self, verdicts: Sequence[Mapping[str, Verdict]]) -> dict[str, list[float]]:
        # 0 for a sample without that number, NaN for one without the part or its verdict.
        values: dict[str, list[float]] = {}
        for name in self.names:
            for inner in sorted({inner for found in verdicts if name in found for inner in found[name].parts}):
                values[f"{name}.{inner}"] = [_inner(found.get(name), inner) for found in verdicts]
        return values

    def _per_token(self, judged: Sequence[Judged], verdicts: Sequence[Mapping[str, Verdict]]) -> list[list[float] | None] | None:
        rewards: list[list[float] | None] = []
        for one, found in zip(judged, verdicts):
            weights = self.recipes[one.label]
            weighted = [
                [weights[name] * value for value in verdict.per_token]
                for name, verdict in found.items()
                if verdict.per_token is not None and weights[name]
            ]
            rewards.append([sum(values) for values in zip(*weighted)] if weighted else None)
            if not all(abs(value) <= LARGEST for value in rewards[-1] or ()):
                raise RewardError(f"the weighted rewards of a token are beyond fp32; {_describe(one)}")
        return rewards if any(values is not None for values in rewards) else None


def _inner(verdict: Verdict | None, name: str) -> float:
    return math.nan if verdict is None or verdict.reason else verdict.parts.get(name, 0.0)


def _seconds(names: Sequence[str], verdicts: Sequence[Mapping[str, Verdict]]) -> dict[str, list[float]]:
    return {name: [s for one in verdicts if name in one and (s := one[name].seconds) is not None] for name in names}


def _model_lengths(model_parts: Mapping[str, Mapping[int, Verdict]]) -> list[int]:
    # Parts of the same model share the verdicts of its pass.
    first: Mapping[int, Verdict] = next(iter(model_parts.values()), {})
    return [verdict.num_tokens for verdict in first.values() if verdict.num_tokens is not None]


def _fp32(values: Sequence[float]) -> list[float]:
    return torch.tensor(values, dtype=torch.float32).tolist()


def _describe(one: Judged) -> str:
    return f"sample {one.sample_id}, response {one.text[:200]!r}"
