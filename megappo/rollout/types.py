"""What goes into and comes out of a generation engine. Token ids in, token ids out; text is decoded for rewards and logs only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. temperature 0 is greedy. stop: strings; stop_token_ids: ids that end a response and are part of it.

    record_kept: each response says which ids top-k and top-p left for each of its tokens. ValueError for top_p without top_k,
    which leaves up to the whole vocabulary.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    record_kept: bool = False

    def __post_init__(self) -> None:
        if self.record_kept and self.truncates and self.top_k < 1:
            raise ValueError(f"top_p {self.top_p} leaves any number of ids to record; set top_k too, or do not record them")

    @property
    def truncates(self) -> bool:
        """Whether some of the vocabulary cannot be sampled."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0)

    @property
    def kept_width(self) -> int:
        """Ids recorded for a token at most; 0 where none are.

        Ties with the k-th best logit are all kept where vLLM runs on a CPU, and bf16 logits tie: from 16 to 32 they are 1/8 apart,
        and near the k-th best there are about k / 1.5 in an interval of 1, so that k / 12 are equal. The margin is several
        standard deviations beyond that; `trainer/sampler_check.py` counts what does not fit all the same.
        """
        return self.top_k + 16 + self.top_k // 8 if self.record_kept and self.truncates else 0


@dataclass(frozen=True)
class Request:
    """One response to draw. `seed` makes it reproducible whatever else is in the batch."""

    prompt: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class KeptIds:
    """The ids that each of some tokens was drawn from, its own among them, in no particular order.

    counts: int32, one for each token. ids: int32, those of the first token, of the second, ... Compact, for they travel between
    all ranks: with top-p most tokens are drawn from a few ids.
    """

    counts: array
    ids: array

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> KeptIds:
        return cls(array("i", map(len, rows)), array("i", (one for row in rows for one in row)))

    def first(self, num_tokens: int) -> KeptIds:
        """Those of the first tokens."""
        return KeptIds(self.counts[:num_tokens], self.ids[: sum(self.counts[:num_tokens])])


@dataclass(frozen=True)
class Response:
    """Sampled token ids with the sampler's log-probs.

    tokens: sampled ids (the end-of-sequence token included when it was sampled). logprobs: one per token, natural log, under the
    distribution that was sampled from (after temperature, top-p, top-k). finish: "stop" (end of sequence or stop string) or
    "length" (cut). version: number of the weights that drew it. kept: what the tokens were drawn from, if
    `SamplingParams.record_kept` asked for it and something was cut off.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]
    version: int
    kept: KeptIds | None = None


class RolloutEngine(Protocol):
    """Generates with the newest pushed weights. Every method is collective: all ranks of the world call it."""

    name: str

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Response]:
        """All ranks pass the same requests; all ranks get all responses, in the order of the requests."""

    def push_weights(self, version: int) -> dict[str, float]:
        """Bring the policy's present weights into the engine; returns metrics (seconds, bytes, whether verified)."""

    def sleep(self) -> None:
        """Nothing is generated before the next push: give back memory that the push brings back. May do nothing."""

    def close(self) -> None:
        """Free the engine; the default process group stays."""
