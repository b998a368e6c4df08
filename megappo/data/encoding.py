"""Encoding of many records on the cores of a node: results in the order of the records, whatever the number of processes.

The first records are encoded here, so that small files start no process. The rest goes in batches to `encoding_process.py`. A
process that dies ends the encoding with one error.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from megappo.data.tokenizers import Tokenizer
from megappo.runtime.helpers import deaf_to_stop

ALONE = 200_000  # records that are encoded here: a few times as long as other processes take to load a tokenizer
BATCH = 256
MOST_PROCESSES = 32  # one reader and writer of records feeds no more
_PACKAGE = Path(__file__).resolve().parents[2]

Context = TypeVar("Context")
Item = TypeVar("Item")
Result = TypeVar("Result")
Encode = Callable[[Tokenizer, Item], Result]
Batch = list[tuple[Context, Item]]


def usable_processes() -> int:
    """This rank's part of the cores that it may run on, at most MOST_PROCESSES."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0)) // ranks))


def encode_all(
    jobs: Iterable[tuple[Context, Item]], encode: Encode[Item, Result], tokenizer: Tokenizer, processes: int
) -> Generator[tuple[Context, Result], None, None]:
    """(context, encode(tokenizer, item)) of every job, in order; close the iterator if it is left early.

    encode, items and results are pickled; contexts stay here. ValueError of `encode` or of `jobs`: the first in their order.
    RuntimeError, one line, if a process ends.
    """
    remaining = iter(jobs)
    for context, item in islice(remaining, ALONE) if processes > 1 else remaining:
        yield context, encode(tokenizer, item)
    for first in islice(remaining, 1):
        with _Processes(processes, encode, tokenizer) as pool:
            yield from _in_order(chain((first,), remaining), pool, 4 * processes)


def _in_order(jobs: Iterator[tuple[Context, Any]], pool: _Processes, most: int) -> Iterator[tuple[Context, Any]]:
    """Results of the jobs. most: batches that are under way."""
    under_way: deque[tuple[list[Context], Future[tuple[list[Any], str | None]]]] = deque()
    failed: ValueError | None = None
    while True:
        while failed is None and len(under_way) < most:
            batch, failed = _next_batch(jobs)
            if not batch:
                break
            under_way.append(([context for context, _ in batch], pool.submit([item for _, item in batch])))
        if not under_way:
            break
        contexts, future = under_way.popleft()
        results, error = future.result()
        yield from zip(contexts, results)  # those before the error
        if error is not None:
            raise ValueError(error)
    if failed is not None:
        raise failed


def _next_batch(jobs: Iterator[tuple[Context, Item]]) -> tuple[Batch[Context, Item], ValueError | None]:
    """The next jobs, and the error that ended them: it is raised when the results before it are known."""
    batch: Batch[Context, Item] = []
    try:
        batch.extend(islice(jobs, BATCH))
    except ValueError as error:
        return batch, error
    return batch, None


class _Processes:
    """Processes that encode, and a thread for each that waits for its answer."""

    def __init__(self, count: int, encode: Encode[Any, Any], tokenizer: Tokenizer) -> None:
        self._all = [_Process(encode, tokenizer) for _ in range(count)]
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for process in self._all:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="encoding")

    def submit(self, items: Sequence[Any]) -> Future[tuple[list[Any], str | None]]:
        """(results of these items, error that ended them or None)."""
        return self._threads.submit(self._ask, items)

    def _ask(self, items: Sequence[Any]) -> tuple[list[Any], str | None]:
        process = self._idle.get()
        try:
            return process.ask(items)
        finally:
            self._idle.put(process)

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            process.kill()  # a thread that waits for its answer is told so
        self._threads.shutdown(cancel_futures=True)
        for process in self._all:
            process.close()


class _Process:
    """A process that encodes one batch at a time."""

    def __init__(self, encode: Encode[Any, Any], tokenizer: Tokenizer) -> None:
        self._errors = tempfile.TemporaryFile()
        # The same megappo as this process's; the processes are the parallelism.
        path = os.pathsep.join(filter(None, (str(_PACKAGE), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        with deaf_to_stop():  # a request to stop is the rank's business; the process ends when its input does
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "megappo.data.encoding_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environment,
            )
        self._opening: bytes | None = pickle.dumps((str(tokenizer.path), tokenizer.identity(), encode))

    def ask(self, items: Sequence[Any]) -> tuple[list[Any], str | None]:
        """(results, error) of a batch. RuntimeError if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            # Not when it is started: it reads only when it has imported what it needs, and the others start meanwhile.
            self._process.stdin.write((self._opening or b"") + pickle.dumps(items))
            self._process.stdin.flush()
            self._opening = None
            return pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            raise RuntimeError(self._end()) from None

    def _end(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").splitlines()
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        last = next((f": {line}" for line in reversed(said) if line.strip()), "")
        return f"data: process {self._process.pid}, which encoded records, {how}{last}; nothing is kept, start again"

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):  # what it did not take is lost with it
                assert stream is not None
                stream.close()
