"""Preference optimisation of a policy without a reward model, by the log-probs of whole responses: DPO, IPO, KTO, SimPO, ORPO.
Those under the reference are of all examples once, kept with the prepared data, or of each batch by a model beside the policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from megappo.algo import preferences
from megappo.algo.aggregation import tokens_per_sequence
from megappo.config.supervised import DpoConfig, IpoLossConfig, KtoLossConfig, OrpoLossConfig, SimpoLossConfig
from megappo.data.cache import Cache, content_of, signature
from megappo.data.examples import Examples
from megappo.data.packing import PackedBatch
from megappo.data.preferences import Labelled, PreferenceSet, num_preferences
from megappo.engine.losses import LanguageOutput, LossOutput
from megappo.parallel.consensus import on_rank_zero
from megappo.parallel.shares import Shares
from megappo.telemetry.metrics import Metric, figures
from megappo.trainer.build_roles import Roles
from megappo.trainer.kinds.kind import Drawn, Kind, Share
from megappo.trainer.roles import LanguageModel


class Dpo(Kind[DpoConfig]):
    """Preference optimisation. Its reference is the policy as it starts, unless `reference.model` names another one."""

    reads = ("response_mask", "label", "ref_logprob", "nll_scale", "kl")
    columns = ("loss", "accuracy", "margin", "grad_norm", "lr")
    _kept: KeptReference | None = None

    def begin(self, sets: Iterable[Examples], note: Callable[[str], None]) -> None:
        """Compute the reference's log-probs of these examples, unless they are kept, while the policy has its first weights."""
        config = self.config
        if config.reads_reference and not config.reference.every_step:
            self._kept = KeptReference.of_run(config, self.roles, sets, note)

    def prepared(self, share: Share, drawn: Drawn) -> PackedBatch:
        loss, batch, count = self.config.loss, share.batch, len(drawn.numbers)
        tokens = tokens_per_sequence(batch["response_mask"], batch.cu_seqlens)
        fields = {"ref_logprob": torch.zeros(batch.num_sequences, dtype=torch.float64)}
        if self.config.reads_reference:
            if self._kept is not None:
                reference = self._kept.of(drawn)
            else:
                reference = logprobs_of(self.roles.reference, drawn, self.roles.shares["reference"])
            own = reference[share.places]
            fields["ref_logprob"] = own[:, 0] if isinstance(loss, KtoLossConfig) else own.flatten()
            if isinstance(loss, KtoLossConfig):
                policy = share.everywhere(mismatched_logprobs(self.role, drawn, share), count)
                kl = float((policy - reference[:, 1]).mean().clamp(min=0.0))
                fields["kl"] = torch.full((batch.num_sequences,), kl, dtype=torch.float64)
            elif loss.logprob == "mean":
                fields["ref_logprob"] = fields["ref_logprob"] / tokens.clamp(min=1)
        if loss.nll_coef:
            chosen = torch.arange(batch.num_sequences) % 2 == 0
            all_tokens = share.total(float(tokens[chosen].sum()))
            # The loss is divided by the pairs, their negative log-likelihood by the tokens of the chosen responses.
            fields["nll_scale"] = chosen * (loss.nll_coef * count / max(all_tokens, 1.0))
        return batch.with_fields(sequence_fields=fields)

    def count(self, batch: PackedBatch) -> float:
        return float(num_preferences(batch))

    def loss(self, output: LanguageOutput, micro: PackedBatch) -> LossOutput:
        settings, mask = self.config.loss, micro["response_mask"]
        tokens, _ = self.role.token_logprobs(output, micro, want_entropy=False)
        logprob = preferences.sequence_logprobs(tokens, mask, micro.cu_seqlens, mean=settings.logprob == "mean")
        ratio = logprob - micro["ref_logprob"]
        summed, sums = self._labelled(ratio, micro) if isinstance(settings, KtoLossConfig) else self._paired(ratio)
        sums["loss_sum"] = summed
        if "nll_scale" in micro:
            nll = -(torch.where(mask, tokens, 0.0) * micro.of_tokens(micro["nll_scale"])).sum()
            summed, sums["nll_sum"] = summed + nll, nll
        return LossOutput(loss_sum=summed.to(tokens.dtype), sums=sums)

    def _paired(self, ratio: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        settings, (chosen, rejected) = self.config.loss, preferences.pairs_of(ratio)
        if isinstance(settings, OrpoLossConfig):
            losses = settings.beta * preferences.odds_ratio_loss(chosen, rejected)
        elif isinstance(settings, IpoLossConfig):
            losses = preferences.ipo_loss(chosen - rejected, settings.beta)
        else:
            assert not isinstance(settings, KtoLossConfig), "not of pairs"
            target = settings.gamma if isinstance(settings, SimpoLossConfig) else 0.0
            losses = preferences.sigmoid_loss(chosen - rejected, settings.beta, settings.label_smoothing, target)
        return losses.sum(), preferences.response_sums(settings.beta * chosen, settings.beta * rejected)

    def _labelled(self, ratio: Tensor, micro: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        settings, label, kl = self.config.loss, micro["label"], micro["kl"]
        assert isinstance(settings, KtoLossConfig)
        weight = torch.where(label > 0, settings.desirable_weight, settings.undesirable_weight)
        losses = weight * preferences.kto_loss(ratio, label, kl, settings.beta)
        reward, good, bad = settings.beta * ratio.detach(), (label > 0).double(), (label < 0).double()
        return losses.sum(), {
            "chosen_sum": (good * reward).sum(),
            "rejected_sum": (bad * reward).sum(),
            "chosen_count_sum": good.sum(),
            "rejected_count_sum": bad.sum(),
            "accuracy_sum": torch.where(label == 0, 0.0, preferences.in_order(label * (ratio.detach() - kl))).sum(),
            "kl_sum": kl.sum(),
        }

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        chosen = sums["chosen_sum"] / max(sums.get("chosen_count_sum", count), 1.0)
        rejected = sums["rejected_sum"] / max(sums.get("rejected_count_sum", count), 1.0)
        named: dict[str, float] = {
            Metric.DPO_LOSS: (sums["loss_sum"] + sums.get("nll_sum", 0.0)) / count,
            Metric.DPO_ACCURACY: sums["accuracy_sum"] / count,
            Metric.DPO_MARGIN: chosen - rejected,
            Metric.DPO_CHOSEN: chosen,
            Metric.DPO_REJECTED: rejected,
        }
        if "kl_sum" in sums:
            named[Metric.DPO_KL] = sums["kl_sum"] / count
        if "nll_sum" in sums:
            named[Metric.DPO_NLL] = sums["nll_sum"] / count / self.config.loss.nll_coef
        return figures(named)


# ---------------------------------------------------------------------------------------------------------- the reference

FILE = "logprobs.npy"


def response_logprobs(model: LanguageModel | None, batch: PackedBatch) -> Tensor:
    """Return the summed log-prob of each response of this replica's share, [B] fp64; none on ranks without the model. On the rank
    that reports (`engine.base.PassResult`). Collective over the model's ranks."""
    logprob = None if model is None else model.logprobs(batch, want_entropy=False)[0]  # also of nothing: its peers have sequences
    if logprob is None or not batch.num_sequences:
        return torch.zeros(0, dtype=torch.float64)
    return preferences.sequence_logprobs(logprob, batch["response_mask"], batch.cu_seqlens, mean=False)


def mismatched_logprobs(model: LanguageModel | None, drawn: Drawn, share: Share) -> Tensor:
    """Return those of this share's prompts with responses to other ones, [E] fp64, as of `response_logprobs`."""
    assert isinstance(drawn.examples, PreferenceSet)
    return response_logprobs(model, drawn.examples.mismatched([drawn.numbers[place] for place in share.places.tolist()]))


def logprobs_of(model: LanguageModel | None, drawn: Drawn, shares: Shares) -> Tensor:
    """Return the log-probs of every response of a pass on every rank: [examples, 2] fp64, of chosen and rejected ones, or of a
    labelled response and of one that answers another prompt. Collective over the world. shares: how the model divides a batch."""
    share, count = drawn.share(shares), len(drawn.numbers)
    own = response_logprobs(model, share.batch)
    if isinstance(drawn.examples, Labelled):
        columns = own, mismatched_logprobs(model, drawn, share)
    else:
        columns = own[0::2], own[1::2]
    return torch.stack([share.everywhere(column, count) for column in columns], 1)


@dataclass
class KeptReference:
    """Tables of the reference's log-probs by the fingerprints of their examples: [N, 2] fp64 each, the same on every rank.
    identity: all else that decides them."""

    identity: Mapping[str, Any]
    tables: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of_run(cls, config: DpoConfig, roles: Roles, sets: Iterable[Examples], note: Callable[[str], None]) -> KeptReference:
        """Prepare the tables of all these examples by the reference, or by the policy with its first weights if it is the
        reference. Collective over the world."""
        by = "reference" if "reference" in roles.shares else "policy"
        section = config.reference if "reference" in roles.placements else config.policy
        model = config.reference.model or config.policy.model
        weights = on_rank_zero("hashing the reference", lambda: weights_of(model))
        role = cast("LanguageModel | None", roles.by_name.get(by))
        kept = cls({"weights": weights, "dtype": section.dtype, "engine": section.engine})
        for examples in sets:
            assert isinstance(examples, PreferenceSet)
            note(kept.prepare(examples, role, roles.shares[by], config.trainer.batch_size))
        return kept

    def prepare(self, examples: PreferenceSet, model: LanguageModel | None, shares: Shares, batch_size: int) -> str:
        """Read the table of these examples from the cache of prepared data, or make and keep it; return a line about it. Collective
        over the world. model: with the reference's weights."""
        cache, key = Cache(), {"reference": dict(self.identity), "examples": examples.fingerprint}

        def read() -> Any:
            folder = cache.find(key)
            return None if folder is None else numpy.load(folder / FILE)

        found = on_rank_zero("reading the reference's log-probs", read)
        if found is not None:
            self.tables[examples.fingerprint] = torch.from_numpy(found)
            return f"reference: log-probs of {len(examples):,} {examples.unit}s are kept from before"
        parts = [logprobs_of(model, drawn, shares) for drawn in Drawn.passes(examples, batch_size)]
        table = self.tables[examples.fingerprint] = torch.cat(parts)
        if not bool(table.isfinite().all()):
            raise ValueError("reference: log-probs of a response are NaN or infinite, so nothing can be learned against them")
        if dist.get_rank() == 0:
            cache.folder(key, lambda folder: numpy.save(Path(folder, FILE), table.numpy()))
        return f"reference: log-probs of {len(examples):,} {examples.unit}s computed, and kept with the prepared data"

    def of(self, drawn: Drawn) -> Tensor:
        """Return the rows of these examples, [examples, 2] fp64."""
        assert isinstance(drawn.examples, PreferenceSet)
        return self.tables[drawn.examples.fingerprint][torch.tensor(list(drawn.numbers), dtype=torch.long)]


SETTLED_S = 10.0  # a write within one tick of the file system's clock leaves the times of the write before


def weights_of(model: str) -> str:
    """Return the hash of a checkpoint's weights and configuration. It is remembered with the prepared data by path, size, times and
    inode of every file, once none has changed for SETTLED_S, so that the next start reads no weights. ValueError, one line, if a
    file changes meanwhile."""
    weights = sorted(Path(model).glob("*.safetensors")) or sorted(Path(model).glob("*.bin"))
    files = [*weights, Path(model, "config.json")]
    before = signature(files)

    def read() -> str:
        found = content_of(files)
        if signature(files) != before:
            raise ValueError(f"{model} was changed while it was read; start again when nobody writes to it")
        return found

    if time.time() - max(ctime for _, _, ctime, _ in before) / 1e9 < SETTLED_S:
        return read()
    return Cache().value({"weights": [str(file.resolve()) for file in files], "state": before}, read)
