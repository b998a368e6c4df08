"""What goes into and comes out of a generation engine. Token ids in, token ids out; text is decoded for rewards and logs only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, Sequence


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. temperature 0 is greedy. stop: strings; stop_token_ids: ids that end a response and are part of it."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """One response to draw. `seed` makes it reproducible whatever else is in the batch."""

    prompt: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Response:
    """Sampled token ids with the sampler's log-probs.

    tokens: sampled ids (the end-of-sequence token included when it was sampled). logprobs: one per token, natural log, under the
    distribution that was sampled from (after temperature, top-p, top-k). finish: "stop" (end of sequence or stop string) or
    "length" (cut). version: number of the weights that drew it.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]
    version: int


class RolloutEngine(Protocol):
    """Generates with the newest pushed weights. Every method is collective: all ranks of the world call it."""

    name: str

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Response]:
        """All ranks pass the same requests; all ranks get all responses, in the order of the requests."""

    def push_weights(self, version: int) -> dict[str, float]:
        """Bring the policy's present weights into the engine; returns metrics (seconds, bytes, whether verified)."""

    def close(self) -> None:
        """Free the engine; the default process group stays."""
