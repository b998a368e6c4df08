"""Questions to one reward server, tried again for a while: `request.py` is one request, `wire.py` its JSON."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megappo.config.reward_sections import RemoteConfig
from megappo.rewards.base import Result, RewardError, RewardInput, describe
from megappo.rewards.request import MIB, Refused, TryAgain, make_client, post
from megappo.rewards.wire import BadScore, request_body, results_of

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 5.0  # doubled in between; a wait is this times 0.5 to 1
_LAST_TRY_S = 1.0  # least limit of the try at the end of the budget


@dataclass(frozen=True)
class Server:
    """A reward server."""

    name: str
    """Name of the part."""
    url: str
    settings: RemoteConfig
    token: str | None = field(default=None, repr=False)
    """Sent with every request, and kept out of reprs and records; None for none."""


class ServerDown(RewardError):
    """A server that gave no answer within the retry budget."""


class Asker:
    """Client of a server, for one event loop. retried: called with the reason before a request is sent again."""

    def __init__(self, server: Server, retried: Callable[[str], None] = lambda reason: None) -> None:
        """Raises ValueError, one line, for a `ca_file` that cannot be read."""
        self._server, self._retried = server, retried
        self._client = make_client(server.url, server.settings, server.token)
        self._random = random.Random()  # of its own: the run's is seeded, and the same on every rank

    async def results(self, samples: Sequence[RewardInput], retry_budget_s: float) -> list[Result]:
        """Score the samples in one request; results in order. Raises RewardError with server, tries, reason and sample; ServerDown
        at the end of the budget."""
        settings, began = self._server.settings, time.monotonic()
        try:
            body = request_body(samples, settings.send)
        except ValueError as error:
            raise RewardError(f"reward {self._server.name}: {error}{_described(samples)}") from error
        tries, give_up, wait_s = 0, float("inf"), _FIRST_WAIT_S
        while True:
            tries += 1
            limit_s = min(settings.timeout_s, max(give_up - time.monotonic(), _LAST_TRY_S))
            try:
                answer = await post(self._client, self._server.url, body, limit_s, _most_bytes(samples))
                return results_of(answer, len(samples))
            except (Refused, ValueError) as error:
                one = samples[error.index : error.index + 1] if isinstance(error, BadScore) else samples
                raise RewardError(self._said(str(error), tries, began, one)) from error
            except TryAgain as error:
                now = time.monotonic()
                give_up = min(give_up, now + retry_budget_s)
                left_s = give_up - now
                if left_s <= 0:
                    raise ServerDown(self._said(str(error), tries, began, samples)) from error
                if error.after_s > left_s:
                    reason = f"{error}; it asks to wait {error.after_s:.0f} s, and {left_s:.0f} s of remote.retry_budget_s are left"
                    raise ServerDown(self._said(reason, tries, began, samples)) from error
                self._retried(str(error))
                await asyncio.sleep(min(left_s, max(error.after_s, wait_s * self._random.uniform(0.5, 1.0))))
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def close(self) -> None:
        await self._client.aclose()

    def _said(self, reason: str, tries: int, began: float, samples: Sequence[RewardInput]) -> str:
        often = f" after {tries} tries in {time.monotonic() - began:.1f} s" if tries > 1 else ""
        return f"reward {self._server.name}: {self._server.url}{often}: {reason}{_described(samples)}"


def _most_bytes(samples: Sequence[RewardInput]) -> int:
    """Return the size of the largest answer that is read: a score of each token takes up to 26 bytes; parts are numbers too."""
    return MIB + sum(1024 + 32 * one.num_tokens for one in samples)


def _described(samples: Sequence[RewardInput]) -> str:
    if not samples:
        return ""
    first = describe(samples[0])
    return f"; {len(samples)} samples, the first: {first}" if len(samples) > 1 else f"; {first}"
