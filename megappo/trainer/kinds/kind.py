"""Interface of a kind of supervised training: its loss, the denominator and the figures, for training and evaluation alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from megappo.config.supervised import SupervisedConfig
from megappo.data.examples import Examples
from megappo.data.packing import PackedBatch
from megappo.engine.losses import LossOutput
from megappo.parallel.shares import Shares, partition_balanced, parts_balanced
from megappo.parallel.totals import total
from megappo.trainer.build_roles import Roles
from megappo.trainer.experience.table import Owners

ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)


@dataclass(frozen=True)
class Drawn:
    """Examples of one pass, the same on every rank, which reads the tokens of its share alone. numbers: in the loader's order."""

    examples: Examples
    numbers: Sequence[int]

    @classmethod
    def passes(cls, examples: Examples, size: int) -> Iterator[Drawn]:
        """Yield all these examples in passes of at most `size`."""
        for begin in range(0, len(examples), size):
            yield cls(examples, range(begin, min(begin + size, len(examples))))

    @cached_property
    def lengths(self) -> list[tuple[int, ...]]:
        """Tokens of every sequence of every example."""
        return self.examples.lengths(self.numbers)

    @property
    def sequence_lengths(self) -> Tensor:
        """Tokens of all sequences, [M] int64."""
        return torch.tensor([length for lengths in self.lengths for length in lengths], dtype=torch.long)

    def owners(self, shares: Shares) -> Owners:
        """Return which share has each example, as `share` deals them out."""
        lengths = numpy.array([sum(lengths) for lengths in self.lengths], dtype=numpy.int64)
        return Owners(torch.from_numpy(parts_balanced(lengths, shares.count)).long(), shares)

    def share(self, shares: Shares) -> Share:
        """Read this rank's share of a role's pass: whole examples, balanced by tokens; empty on ranks without the role."""
        index = shares.index_of(dist.get_rank())
        parts = partition_balanced([sum(lengths) for lengths in self.lengths], shares.count)
        mine = [] if index is None else parts[index]
        sizes = tuple(len(self.lengths[place]) for place in mine)
        return Share(
            self.examples.packed([self.numbers[place] for place in mine]),
            () if max(sizes, default=1) == 1 else sizes,
            index is not None and dist.get_rank() in shares.reporters,
            torch.tensor(mine, dtype=torch.long),
        )


@dataclass(frozen=True)
class Share:
    """Examples of a rank. together: sequences of each example, which share a micro-batch; empty if all have one. reports: this rank
    counts them for its replica. places: [E] int64, their places among all examples of the pass."""

    batch: PackedBatch
    together: Sequence[int]
    reports: bool
    places: Tensor

    def total(self, mine: float) -> float:
        """Add a number of this share over all shares. Collective over the world."""
        return float(total(torch.tensor([mine if self.reports else 0.0], dtype=torch.float64)))

    def everywhere(self, values: Tensor, count: int) -> Tensor:
        """Gather one number per example: [count] fp64 of the whole pass on every rank, from this share's [E]. Collective over the
        world."""
        column = torch.zeros(count, dtype=torch.float64)
        if self.reports:
            column[self.places] = values.double().cpu()
        return total(column)


class Kind(ABC, Generic[ConfigT]):
    """Learning from examples: loss, denominator and figures. Built on every rank, with the roles that live there.

    reads: fields of a batch that the loss reads. columns: metrics of the console's table, without the kind's name.
    """

    reads: ClassVar[tuple[str, ...]]
    columns: ClassVar[tuple[str, ...]] = ("loss", "grad_norm", "lr")

    def __init__(self, config: ConfigT, roles: Roles) -> None:
        self.config, self.roles = config, roles

    @property
    def role(self) -> Any:
        """The role that learns (`build_roles.Role`); None on ranks where it does not live."""
        return self.roles.by_name.get(self.config.learner)

    def begin(self, sets: Iterable[Examples], note: Callable[[str], None]) -> None:
        """Prepare for these examples while models have their first weights, before a checkpoint is resumed; `note` tells the log.
        Collective over the world."""

    def prepared(self, share: Share, drawn: Drawn) -> PackedBatch:
        """Return the batch with what other roles compute for it, such as log-probs of the reference. Collective over the world."""
        return share.batch

    @abstractmethod
    def count(self, batch: PackedBatch) -> float:
        """Return the part of a share in the loss's denominator, which is the sum over all shares."""

    @abstractmethod
    def loss(self, output: Any, micro: PackedBatch) -> LossOutput:
        """Compute the loss of a micro-batch, undivided, and the sums of its figures. output: `LanguageOutput`, or values of a head.
        micro: padded; padding has fields 0 or False, and may add a last sequence."""

    @abstractmethod
    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Return figure -> value of a pass from the sums of `loss` over all examples, `loss` and those of
        `SupervisedConfig.figures` among them. count: of all examples."""
