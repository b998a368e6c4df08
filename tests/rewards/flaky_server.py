"""A reward server that fails one request in ten at random, as one that is overloaded does. It compares response and answer.

python -m tests.rewards.flaky_server        # serves until it is ended; `docs/rewards.md` has the quickstart's figures with it
"""

from __future__ import annotations

import json
import random
import threading
from typing import Any

from tests.rewards.faulty_server import Behaviour, FaultyServer, Handler, serving

FAILING = 0.1


def same_text(sample: dict[str, Any]) -> float:
    return float(sample["response"] == sample["answer"])


class FlakyServer(FaultyServer):
    """Requests without samples, by which a run asks if the server is there, are answered always."""

    score = staticmethod(same_text)

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(1)

    def take(self, handler: Handler) -> Behaviour:
        with self.lock:
            fails = bool(handler.asked["samples"]) and self._random.random() < FAILING
        return self._overloaded if fails else self._scored

    @staticmethod
    def _overloaded(handler: Handler) -> None:
        handler.answer(503, b"overloaded")

    def _scored(self, handler: Handler) -> None:
        handler.answer(200, json.dumps({"scores": [self.score(one) for one in handler.asked["samples"]]}).encode())


if __name__ == "__main__":
    with serving(make=FlakyServer) as running:
        print(running.url, flush=True)
        threading.Event().wait()
