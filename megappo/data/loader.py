"""Resumable order in which a run visits its prompts: shuffled, by weights, by pass rates. Every rank has the same loader."""

from __future__ import annotations

import base64
import hashlib
import math
import random
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from megappo.data.cache import Cache
from megappo.data.prompts import Prompt, PromptSet, record_field

_COUNTS = "<i4"  # of pass rates in a checkpoint


class PassRates:
    """Responses and passes of N prompts so far. A response passes if its score is at least pass_score.
    A prompt of pass rate p is visited with chance max(min_chance, 4 p (1 - p)), a prompt without responses always. min_chance:
    in (0, 1], so at least one in 1 / min_chance prompts is visited on average."""

    def __init__(self, num_prompts: int, pass_score: float, min_chance: float, seed: int) -> None:
        self.pass_score, self.min_chance, self._seed = pass_score, min_chance, seed
        self.responses = numpy.zeros(num_prompts, numpy.int32)
        self.passes = numpy.zeros(num_prompts, numpy.int32)
        self.skipped = 0  # prompts passed over so far

    @property
    def num_seen(self) -> int:
        return int((self.responses > 0).sum())

    def observe(self, rows: Sequence[int], scores: Sequence[Sequence[float]]) -> None:
        """Count the scores of the responses to these prompts; a prompt may occur several times."""
        for row, found in zip(rows, scores, strict=True):
            self.responses[row] += len(found)
            self.passes[row] += sum(score >= self.pass_score for score in found)

    def chance(self, row: int) -> float:
        if not self.responses[row]:
            return 1.0
        rate = float(self.passes[row]) / float(self.responses[row])
        return max(self.min_chance, 4.0 * rate * (1.0 - rate))

    def takes(self, row: int, epoch: int, index: int) -> bool:
        """Decide whether a prompt is visited at this place of the epoch, which seeds the draw; count it as skipped if not."""
        taken = random.Random(f"curriculum {self._seed} {epoch} {index}").random() < self.chance(row)
        self.skipped += not taken
        return taken

    def state_dict(self) -> dict[str, Any]:
        # Compressed: mostly zeros where few prompts were seen.
        counts = numpy.stack([self.responses, self.passes]).astype(_COUNTS).tobytes()
        return {"skipped": self.skipped, "counts": base64.b64encode(zlib.compress(counts, 1)).decode()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        counts = numpy.frombuffer(zlib.decompress(base64.b64decode(state["counts"])), _COUNTS).reshape(2, len(self.responses))
        self.responses, self.passes = (row.astype(numpy.int32) for row in counts)
        self.skipped = state["skipped"]


class PromptLoader:
    """Prompts of each step: an endless, resumable walk through seeded orders, one per epoch.

    No prompt is dropped: a step at the end of an epoch takes the rest from the next one. Without weights and pass rates every
    prompt is visited exactly once per epoch. An order depends on (seed, epoch, weights) alone; without shuffle it is that of the
    data. weights: [N] fp64, how often to visit each prompt (`weighted`), with shuffle.
    pass_rates: skip some prompts. Raises ValueError for fewer prompts than prompts_per_step.
    """

    def __init__(
        self,
        num_prompts: int,
        prompts_per_step: int,
        shuffle: bool,
        seed: int,
        *,
        weights: numpy.ndarray | None = None,
        pass_rates: PassRates | None = None,
    ) -> None:
        if prompts_per_step > num_prompts:
            raise ValueError(
                f"data.prompts_per_step={prompts_per_step} is more than the {num_prompts:,} prompts: lower it or add data"
            )
        self.num_prompts = num_prompts
        self.prompts_per_step = prompts_per_step
        self.shuffle = shuffle
        self.seed = seed
        self.pass_rates = pass_rates
        self._weights = weights
        self._weights_sha256 = "" if weights is None else hashlib.sha256(weights.tobytes()).hexdigest()
        self.epoch = 0
        self.index = 0
        self._order = self._order_of(0)

    def num_steps(self, epochs: int = 1) -> int:
        """Fewest steps of `epochs * num_prompts` visits: ceil(epochs * num_prompts / prompts_per_step)."""
        # The last step may reach into the next epoch.
        return -(-epochs * self.num_prompts // self.prompts_per_step)

    @property
    def epochs_done(self) -> int:
        return self.epoch + (self.index == self.num_prompts)

    @property
    def num_weighted(self) -> int:
        return self.num_prompts if self._weights is None else int((self._weights > 0).sum())

    @property
    def most_visits(self) -> int:
        if self._weights is None:
            return 1
        relative = self._weights / self._weights.max()
        return math.ceil(self.num_prompts / float(relative.sum()))

    @property
    def steps_per_epoch(self) -> int:
        return self.num_steps(1)

    def next_step(self, count: int | None = None) -> list[int]:
        """Advance the cursor and return indices of `count` prompts, by default those of a step."""
        wanted = self.prompts_per_step if count is None else count
        chosen: list[int] = []
        while len(chosen) < wanted:
            if self.index == self.num_prompts:
                self.epoch, self.index = self.epoch + 1, 0
                self._order = self._order_of(self.epoch)
            begin, most = self.index, wanted - len(chosen)
            turns = self._order[begin : begin + most]
            self.index += len(turns)
            chosen += [int(row) for at, row in enumerate(turns, begin) if self._takes(int(row), at)]
        return chosen

    def _takes(self, row: int, index: int) -> bool:
        return self.pass_rates is None or self.pass_rates.takes(row, self.epoch, index)

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible cursor, the settings that it is valid for, and pass rates."""
        return {
            "epoch": self.epoch,
            "index": self.index,
            "num_prompts": self.num_prompts,
            "shuffle": int(self.shuffle),
            "seed": self.seed,
            **({"weights": self._weights_sha256} if self._weights_sha256 else {}),
            **({"pass_rates": self.pass_rates.state_dict()} if self.pass_rates is not None else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the saved run's last prompt. Raises ValueError if data, shuffle, seed or weights changed.
        prompts_per_step and the curriculum may change; pass rates start anew if the state has none."""
        for name, option in (("num_prompts", "data.train"), ("shuffle", "data.shuffle"), ("seed", "run.seed")):
            mine = int(getattr(self, name))
            if state[name] != mine:
                raise ValueError(
                    f"cannot resume: {option} changed ({name} was {state[name]}, is {mine}); restore it or start a new run"
                )
        if steps := len(state.get("ahead", {}).get("rows", ())):
            raise ValueError(
                f"cannot resume: rollout.max_staleness is null, and the responses of {steps} steps have begun; set it to {steps}"
            )
        if state.get("weights", "") != self._weights_sha256:
            raise ValueError("cannot resume: data.weight_key changed, or the weights in its field; restore it or start a new run")
        self.epoch, self.index = state["epoch"], state["index"]
        self._order = self._order_of(self.epoch)
        if self.pass_rates is not None and "pass_rates" in state:
            self.pass_rates.load_state_dict(state["pass_rates"])

    def _order_of(self, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(self.num_prompts)
        if self._weights is None:
            return shuffled(self.num_prompts, self.seed, epoch)  # 0.6 s for a million
        return weighted(self._weights, self.seed, epoch)


def shuffled(num_prompts: int, seed: int, epoch: int) -> array:
    """Random permutation of the prompts, [N] of 32 bits."""
    order = array("i", range(num_prompts))  # 4 bytes a prompt; a list takes 36
    # Seeding by a string hashes all of it (SHA-512); random.Random keeps its sequence across Python versions.
    random.Random(f"prompts {seed} {epoch}").shuffle(order)  # pyright: ignore[reportArgumentType]  no MutableSequence
    return order


def weighted(weights: numpy.ndarray, seed: int, epoch: int) -> array:
    """Draw [N] visits of N prompts, 32-bit: prompt i gets floor or ceil of N w_i / sum(w) visits, with that mean over the epochs.
    weights: [N] fp64, >= 0, not all 0; equal weights give one visit each. Systematic sampling (Madow 1949) over a permutation,
    whose visits are then shuffled: of all ways to draw in proportion to weights it leaves the least to chance."""
    count, generator = len(weights), random.Random(f"weights {seed} {epoch}")
    order = numpy.frombuffer(shuffled(count, seed, epoch), numpy.int32)
    # Relative to the largest: a sum of weights near the limit of fp64 would be infinite.
    ends = numpy.cumsum(weights[order] / weights.max())
    ends = numpy.where(ends == ends[-1], count, ends * (count / ends[-1]))  # exact where only weights of 0 follow
    # Visit k is of the prompt whose interval has the point k + u; rounding may not push the last one out.
    points = numpy.minimum(numpy.arange(count) + generator.random(), numpy.nextafter(count, 0.0))
    visits = array("i", order[numpy.searchsorted(ends, points, side="right")].tobytes())
    generator.shuffle(visits)  # pyright: ignore[reportArgumentType]  no MutableSequence
    return visits


def weights_of(prompts: PromptSet, key: str, cache: Cache) -> numpy.ndarray:
    """Weights [N] fp64 in the field `key` of the prompts' records; read once for each file, choice of prompts and key.
    Raises ValueError, one line: a record without the field, a weight that is no number of 0 or more, or nothing but zeros."""

    def read() -> numpy.ndarray:
        weights = numpy.array([_weight(prompt, key) for prompt in prompts.prompts])
        if not weights.any():
            raise ValueError(f"data.weight_key={key}: all {len(weights):,} prompts have weight 0, so none would be drawn")
        return weights

    if not prompts.fingerprint:
        return read()
    folder = cache.folder({"weights": key, "prompts": prompts.fingerprint}, lambda folder: numpy.save(folder / "array.npy", read()))
    return numpy.load(folder / "array.npy", mmap_mode="r")


def _weight(prompt: Prompt, key: str) -> float:
    value = record_field(prompt.record, key, "data.weight_key", prompt.place)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"data.weight_key={key}: {prompt.place} holds {value!r:.80}, not a finite number of 0 or more")
    return float(value)
