"""Logging of many ranks: rank 0 informs, the others only warn, and every line names its rank. Imports nothing of megappo."""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class RankFormatter(logging.Formatter):
    """Formats `12:34:56 rank 3 WARNING megappo.engine: text`; without the rank in a world of one process."""

    def __init__(self, rank: int, world_size: int) -> None:
        who = f"rank {rank} " if world_size > 1 else ""
        super().__init__(f"%(asctime)s {who}%(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")


def configure_logging(rank: int, world_size: int, stream: TextIO | None = None) -> None:
    """Set up this process's `megappo` logger, and no other; a second call replaces the first. stream: None for stderr."""
    logger = logging.getLogger("megappo")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(RankFormatter(rank, world_size))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False  # or a library's handler of the root logger prints every line again
