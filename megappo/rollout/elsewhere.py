"""The rollout engine as seen on a rank that it does not live on: the policy's weights go out from here, nothing is generated."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

from megappo.bridge.adapter_sync import AdapterSync
from megappo.bridge.sync import WeightSync
from megappo.rollout.types import Replica, Request, Response, SamplingParams


class RolloutElsewhere:
    """Stand-in of an engine on other ranks (see `rollout.types.RolloutEngine`). sync: None if no weights are pushed."""

    replica: Replica | None = None

    def __init__(self, name: str, sync: WeightSync | AdapterSync | None) -> None:
        self.name = name
        self._sync = sync

    def push_weights(self, version: int) -> dict[str, float]:
        """Send this rank's part of the policy. Collective over the world."""
        return {} if self._sync is None else self._sync.push(version)

    def sleep(self) -> None:
        """No memory of its own to release."""

    def close(self) -> None:
        """No resources of its own to free."""

    def meet(self, before: str) -> NoReturn:
        self._refuse()

    def serving(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    @property
    def num_unfinished(self) -> int:
        return 0

    @property
    def num_running(self) -> int:
        return self.num_unfinished

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        self._refuse()

    def poll(self) -> list[Response]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AssertionError(f"no {self.name} engine lives on this rank")
