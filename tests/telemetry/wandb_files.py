"""Records of a `.wandb` file of an offline run, read without wandb's own service: a log of LevelDB's form after seven bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEAD = 32768, struct.Struct("<IHB")
FULL, LAST = 1, 4  # kinds of chunk that end a record


def messages(path: Path) -> Iterator[bytes]:
    data = path.read_bytes()
    assert data.startswith(b":W&B")
    position, record = 7, b""
    while position + HEAD.size <= len(data):
        if (left := BLOCK - position % BLOCK) < HEAD.size:
            position += left
            continue
        _, size, kind = HEAD.unpack_from(data, position)
        if kind == 0:
            break
        record += data[position + HEAD.size : position + HEAD.size + size]
        position += HEAD.size + size
        if kind in (FULL, LAST):
            yield record
            record = b""


def read_wandb(path: Path) -> tuple[Any, dict[int, dict[str, Any]]]:
    """(wandb's record of the run, step -> logged values; those of nested names as `a.b`)."""
    from wandb.proto.wandb_internal_pb2 import Record

    run, rows = None, {}
    for message in messages(path):
        record: Any = Record.FromString(message)
        if record.WhichOneof("record_type") == "run":
            run = record.run
        elif record.WhichOneof("record_type") == "history":
            row = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            assert record.history.step.num not in rows, "a step is logged once"
            rows[record.history.step.num] = row
    return run, rows
