"""A part of the reward that a server scores: batches of samples, several requests at once (`server.py` asks the server).
One thread per part runs the requests of this rank. Samples that wait while all requests are under way go out together."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from megappo.rewards.base import UNREACHABLE, NoVerdict, Result, RewardError, RewardInput
from megappo.rewards.server import Asker, Server, ServerDown

_CLOSING_S = 5.0
Outcome = Result | NoVerdict

logger = logging.getLogger(__name__)


class RemotePart:
    """Part of a reward whose samples a server scores.
    A server that is down for the retry budget leaves the samples of the request without a verdict. Any other fault fails everything
    that waits: it ends the run, so there is no reason to wait for the others."""

    streams = True

    def __init__(self, server: Server) -> None:
        """Raises ValueError, one line, for settings that no client can be made of."""
        self.server = server
        self.num_retries = 0
        self._asker = Asker(server, self._retried)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # The rest is the thread's alone.
        self._waiting: deque[tuple[RewardInput, Future[Outcome]]] = deque()
        self._open: set[Future[Outcome]] = set()
        self._workers: set[asyncio.Task[None]] = set()
        self._is_down = False
        """A request used up its budget and none has been answered since: those that wait are tried once each."""
        self._unanswered = 0
        """Requests that used up theirs since nothing waited last."""
        self._retries_before = 0
        """Retries when nothing waited last: the first after that is told, and their number when nothing waits again."""

    def start(self, samples: Sequence[RewardInput]) -> Sequence[Future[Outcome]]:
        """Begin to score the samples; returns a future for each, in order. A failed one holds a RewardError."""
        futures: list[Future[Outcome]] = [Future() for _ in samples]
        if futures:
            self._running_loop().call_soon_threadsafe(self._take_in, list(zip(samples, futures)))
        return futures

    def close(self) -> None:
        """End requests and connections; open futures fail."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self._loop = self._thread = None
        try:
            asyncio.run_coroutine_threadsafe(self._end(), loop).result(_CLOSING_S)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_CLOSING_S)
        loop.close()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:  # with the first samples: a thread started before would be missing in a forked rank
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name=f"reward {self.server.name}", daemon=True)
            self._thread.start()
        return self._loop

    # ------------------------------------------------------------------------------------------------------- in the thread

    def _take_in(self, entries: Sequence[tuple[RewardInput, Future[Outcome]]]) -> None:
        self._waiting.extend(entries)
        self._open.update(future for _, future in entries)
        self._start_workers()

    def _start_workers(self) -> None:
        settings = self.server.settings
        batches = -(-len(self._waiting) // settings.batch_size)
        for _ in range(min(settings.concurrency - len(self._workers), batches)):
            worker = asyncio.get_running_loop().create_task(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._ended)

    async def _work(self) -> None:
        settings = self.server.settings
        while batch := self._next_batch(settings.batch_size):
            try:
                budget_s = 0.0 if self._is_down else settings.retry_budget_s
                results: Sequence[Outcome] = await self._asker.results([sample for sample, _ in batch], budget_s)
                self._is_down = False
            except ServerDown as down:
                if not self._unanswered:  # once for all that waits, also if the server is back in between
                    logger.warning("%s; what it does not answer has no verdict", down)
                self._is_down, self._unanswered = True, self._unanswered + 1
                self._retries_before = self.num_retries  # the warning says how often
                results = [NoVerdict(UNREACHABLE)] * len(batch)
            except Exception as error:  # whatever it is, these samples have no score: their futures say why, and the run ends
                self._fail(error)
                return
            for (_, future), result in zip(batch, results):
                self._open.discard(future)
                future.set_result(result)

    def _next_batch(self, size: int) -> list[tuple[RewardInput, Future[Outcome]]]:
        batch: list[tuple[RewardInput, Future[Outcome]]] = []
        while self._waiting and len(batch) < size:
            sample, future = self._waiting.popleft()
            # From here on the sample cannot be cancelled.
            if future.set_running_or_notify_cancel():
                batch.append((sample, future))
            else:
                self._open.discard(future)
        return batch

    def _fail(self, error: Exception) -> None:
        for future in self._open:
            if future.running() or future.set_running_or_notify_cancel():
                future.set_exception(error)
        self._open.clear()
        self._waiting.clear()
        self._retries_before = self.num_retries  # the error says how often
        for worker in self._workers - {asyncio.current_task()}:
            worker.cancel()

    def _ended(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        self._start_workers()  # samples may have come in after a failure
        if not self._workers:
            if self._unanswered > 1:
                logger.warning("reward %s: %d requests in all were not answered", self.server.name, self._unanswered)
            self._is_down, self._unanswered = False, 0  # the next samples, of another step, are worth the whole budget
        if not self._workers and (count := self.num_retries - self._retries_before):
            logger.warning("reward %s: %d requests were sent again, then all was scored", self.server.name, count)
            self._retries_before = self.num_retries

    def _retried(self, reason: str) -> None:
        if self.num_retries == self._retries_before:  # once for all that waits, not for each request
            name, url, budget_s = self.server.name, self.server.url, self.server.settings.retry_budget_s
            logger.warning("reward %s: %s: %s; trying again for up to %g s", name, url, reason, budget_s)
        self.num_retries += 1

    async def _end(self) -> None:
        workers = list(self._workers)
        self._fail(RewardError(f"reward {self.server.name} was closed before all samples were scored"))
        await asyncio.gather(*workers, return_exceptions=True)
        await self._asker.close()
