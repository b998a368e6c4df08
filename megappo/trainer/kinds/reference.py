"""Log-probs of preferences under the reference: of all examples once, kept with the prepared data, or of each batch by a model
beside the policy."""

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

from megappo.algo.preferences import sequence_logprobs
from megappo.config.supervised import DpoConfig
from megappo.data.cache import Cache, content_of, signature
from megappo.data.examples import Examples
from megappo.data.packing import PackedBatch
from megappo.data.preferences import LabelKeys, PreferenceSet
from megappo.parallel.consensus import on_rank_zero
from megappo.parallel.shares import Shares
from megappo.trainer.build_roles import Roles
from megappo.trainer.kinds.kind import Drawn, Share
from megappo.trainer.roles import LanguageModel

FILE = "logprobs.npy"


def response_logprobs(model: LanguageModel | None, batch: PackedBatch) -> Tensor:
    """Return the summed log-prob of each response of this replica's share, [B] fp64; none on ranks without the model. On the rank
    that reports (`engine.base.PassResult`). Collective over the model's ranks."""
    logprob = None if model is None else model.logprobs(batch, want_entropy=False)[0]  # also of nothing: its peers have sequences
    if logprob is None or not batch.num_sequences:
        return torch.zeros(0, dtype=torch.float64)
    return sequence_logprobs(logprob, batch["response_mask"], batch.cu_seqlens, mean=False)


def mismatched_logprobs(model: LanguageModel | None, drawn: Drawn, share: Share) -> Tensor:
    """Return those of this share's prompts with responses to other ones, [E] fp64, as of `response_logprobs`."""
    assert isinstance(drawn.examples, PreferenceSet)
    return response_logprobs(model, drawn.examples.mismatched([drawn.numbers[place] for place in share.places.tolist()]))


def logprobs_of(model: LanguageModel | None, drawn: Drawn, shares: Shares) -> Tensor:
    """Return the log-probs of every response of a pass on every rank: [examples, 2] fp64, of chosen and rejected ones, or of a
    labelled response and of one that answers another prompt. Collective over the world. shares: how the model divides a batch."""
    share, count = drawn.share(shares), len(drawn.numbers)
    own = response_logprobs(model, share.batch)
    assert isinstance(drawn.examples, PreferenceSet)
    if isinstance(drawn.examples.keys, LabelKeys):
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
