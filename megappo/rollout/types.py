"""Interface of a generation engine. Token ids in, token ids out; text is decoded for rewards and logs only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings. temperature 0 is greedy. stop: strings. stop_token_ids: ids that end a response and are part of it.

    record_kept: record the ids that top-k and top-p left for each token. ValueError for top_p without top_k, which leaves up to
    the whole vocabulary.
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
        """True if a part of the vocabulary cannot be sampled."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0)

    @property
    def kept_width(self) -> int:
        """Maximal number of ids recorded for a token; 0 if none are. `trainer/sampler_check.py` counts overflows."""
        # vLLM on a CPU keeps all ties with the k-th best logit, and bf16 logits tie: from 16 to 32 they are 1/8 apart, and near
        # the k-th best there are about k / 1.5 in an interval of 1, so that k / 12 are equal. The margin is several standard
        # deviations above that.
        return self.top_k + 16 + self.top_k // 8 if self.record_kept and self.truncates else 0


@dataclass(frozen=True)
class Request:
    """One response to draw; `seed` makes it reproducible in any batch."""

    prompt: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class KeptIds:
    """Ids that each token of a response was drawn from, its own included, in no particular order.

    counts: int32 per token. ids: int32, concatenated over the tokens. Compact, because all ranks exchange them: with top-p most
    tokens are drawn from a few ids.
    """

    counts: array
    ids: array

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> KeptIds:
        return cls(array("i", map(len, rows)), array("i", (one for row in rows for one in row)))

    def first(self, num_tokens: int) -> KeptIds:
        """Ids of the first `num_tokens` tokens."""
        return KeptIds(self.counts[:num_tokens], self.ids[: sum(self.counts[:num_tokens])])


@dataclass(frozen=True)
class Response:
    """Sampled token ids with the sampler's log-probs.

    tokens: sampled ids, the end-of-sequence token included if it was sampled. logprobs: one per token, natural log, under the
    sampled distribution (after temperature, top-p, top-k). finish: "stop" (end of sequence or stop string) or "length" (cut).
    version: of the weights. kept: ids that the tokens were drawn from, if `SamplingParams.record_kept` is set and top-k or top-p
    cut the vocabulary.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]
    version: int
    kept: KeptIds | None = None


class RolloutEngine(Protocol):
    """Generator with the newest pushed weights. Every method is collective: all ranks of the world call it."""

    name: str

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Response]:
        """Generate. All ranks pass the same requests and get all responses, in the order of the requests."""
        ...

    def push_weights(self, version: int) -> dict[str, float]:
        """Copy the policy's current weights into the engine; returns metrics (seconds, bytes, verified)."""
        ...

    def sleep(self) -> None:
        """Release memory until the next push, before which nothing is generated. May do nothing."""
        ...

    def close(self) -> None:
        """Free the engine; the default process group stays."""
        ...
