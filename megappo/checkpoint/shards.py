"""State of one engine in the files of its ranks (safetensors): boxes of named tensors, read back in any layout. Every rank writes
one file. An entry `KEY@ROW,COL` names its tensor and its first element there; a reader of any layout reads only the rows of entries
that overlap with its boxes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from megappo.checkpoint.image import FileImage
from megappo.checkpoint.manifest import POSITION, SHARD, UnsafeCheckpoint
from megappo.checkpoint.state import ModelState, Shape, StateBox, StatefulModel
from megappo.parallel.consensus import on_every_rank, raised_by_all

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""safetensors' names of the dtypes that state is made of."""


class ShardFiles:
    """Files of one engine on this rank, below `folder`, as images that share memory with the state. group: its ranks."""

    def __init__(self, folder: str, group: dist.ProcessGroup) -> None:
        self._folder, self._group = folder, group
        self._boxes: Sequence[StateBox] = ()
        self._content: list[bytes | torch.Tensor] = []

    def images(self, state: ModelState) -> list[FileImage]:
        """Return the files of `state`. Not collective: each rank knows its own part."""
        if self._boxes is not state.boxes or not self._content:  # an engine whose tensors stay where they are gives the same boxes
            self._boxes, self._content = state.boxes, _content(state.boxes)
        images = [FileImage(f"{self._folder}/{dist.get_rank():05d}{SHARD}", self._content)]
        if self._group.rank() == 0:
            images.append(FileImage(f"{self._folder}/{POSITION}", [json.dumps(dict(state.position)).encode()]))
        return images


def _content(boxes: Sequence[StateBox]) -> list[bytes | torch.Tensor]:
    # Widest dtype first, so that each entry lies at a multiple of its item size, as readers of the format want it.
    boxes = sorted(boxes, key=lambda box: -box.values.element_size())
    header, at = {}, 0
    for box in boxes:
        name, end = f"{box.key}@{box.row},{box.col}", at + box.values.nbytes
        assert name not in header, f"{name} is written twice"
        header[name] = {"dtype": _DTYPES[box.values.dtype], "shape": list(box.values.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *(box.values for box in boxes)]


class _Entry(NamedTuple):
    row: int
    col: int
    rows: int
    cols: int
    file: str
    name: str


class StoredTensors:
    """Tensors in the folder of one engine. shapes: of the whole tensors by name. position: plain numbers of their writer. group:
    ranks that share the reading of the file headers, collectively; None: this process alone. On every rank UnsafeCheckpoint if a
    file is not megappo's, RankFault if one cannot be read."""

    def __init__(self, directory: Path, group: dist.ProcessGroup | None = None) -> None:
        self._directory = directory
        size, rank = (1, 0) if group is None else (group.size(), group.rank())

        def mine() -> tuple[list[tuple[str, _Entry]], dict[str, int]] | UnsafeCheckpoint:
            files = sorted(path.name for path in directory.iterdir() if path.name.endswith(SHARD))
            try:
                entries = [entry for file in files[rank::size] for entry in _entries(directory / file)]
                return entries, _position(directory / POSITION)
            except UnsafeCheckpoint as error:
                return error

        found = [mine()] if group is None else on_every_rank("reading the checkpoint's index", mine, group)
        if unsafe := [one for one in found if isinstance(one, UnsafeCheckpoint)]:
            raise unsafe[0]
        everyone = [one for one in found if not isinstance(one, UnsafeCheckpoint)]
        self.position = everyone[0][1]
        self._entries: dict[str, list[_Entry]] = {}
        for theirs, _ in everyone:
            for key, entry in theirs:
                self._entries.setdefault(key, []).append(entry)
        self.shapes: dict[str, Shape] = {
            key: (max(one.row + one.rows for one in entries), max(one.col + one.cols for one in entries))
            for key, entries in self._entries.items()
        }

    def fill(self, boxes: Iterable[StateBox]) -> None:
        """Read every box into its values, of any dtype on any device. OSError; ValueError if parts of a box are stored never or
        twice; UnsafeCheckpoint."""
        by_key: dict[str, list[StateBox]] = {}
        for box in boxes:
            by_key.setdefault(box.key, []).append(box)
        reads: dict[str, list[tuple[_Entry, list[StateBox]]]] = {}
        for key, wanted in by_key.items():
            found = 0
            for entry in self._entries.get(key, ()):
                here = [part for box in wanted if (part := _within(box, entry)) is not None]
                found += sum(part.values.numel() for part in here)
                if here:
                    reads.setdefault(entry.file, []).append((entry, here))
            if found != (asked := sum(box.values.numel() for box in wanted)):
                raise ValueError(f"{self._directory}: {key} holds {found} of {asked} numbers that are read from it")
        for file, entries in reads.items():
            try:
                _read(self._directory / file, entries)
            except SafetensorError as error:
                raise UnsafeCheckpoint(
                    f"{self._directory / file} is not readable ({error}); the file is not from megappo"
                ) from None


def _read(path: Path, entries: Iterable[tuple[_Entry, list[StateBox]]]) -> None:
    with safe_open(path, framework="pt", device="cpu") as file:
        for entry, boxes in entries:
            stored = file.get_slice(entry.name)
            for box in boxes:
                row, col = box.row - entry.row, box.col - entry.col
                box.values.copy_(stored[row : row + box.values.shape[0], col : col + box.values.shape[1]])


def _entries(path: Path) -> list[tuple[str, _Entry]]:
    """Return (tensor, entry) for everything in a file. UnsafeCheckpoint if the file is not megappo's."""
    found = []
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():
                key, _, place = name.rpartition("@")
                row, col = map(int, place.split(","))
                rows, cols = file.get_slice(name).get_shape()
                found.append((key, _Entry(row, col, rows, cols, path.name, name)))
    except (SafetensorError, ValueError) as error:
        raise UnsafeCheckpoint(f"{path} is not readable ({error}); the file is not from megappo") from None
    return found


def _position(path: Path) -> dict[str, int]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise UnsafeCheckpoint(f"{path} is not readable ({type(error).__name__}); the file is not from megappo") from None
    if not isinstance(found, dict) or not all(type(value) is int for value in found.values()):
        raise UnsafeCheckpoint(f"{path} holds other things than numbers; the file is not from megappo")
    return found


def _within(box: StateBox, entry: _Entry) -> StateBox | None:
    rows, cols = box.values.shape
    r0, r1 = max(box.row, entry.row), min(box.row + rows, entry.row + entry.rows)
    c0, c1 = max(box.col, entry.col), min(box.col + cols, entry.col + entry.cols)
    if r0 >= r1 or c0 >= c1:
        return None
    return StateBox(box.key, r0, c0, box.values[r0 - box.row : r1 - box.row, c0 - box.col : c1 - box.col])


def load_engine(engine: StatefulModel, directory: Path, *, with_optimizer: bool, with_head: bool = True) -> None:
    """Load the state of one engine, in any layout, saved by any engine. Collective over the engine's ranks. Without `with_head` the
    engine keeps its own head, and the checkpoint may have another one or none. ValueError or RankFault on all of them if the state
    does not fit."""
    stored = StoredTensors(directory, engine.host_group)
    try:
        boxes = engine.boxes_to_load(stored.shapes, with_optimizer=with_optimizer, with_head=with_head)
    except ValueError as error:
        raise ValueError(f"{directory} does not fit the model: {error}") from None
    on_every_rank("reading the checkpoint", lambda: stored.fill(boxes), engine.host_group)
    engine.boxes_loaded(stored.position if with_optimizer else {})


Models = Mapping[str, StatefulModel | None]
"""Name of an engine -> the engine; None on ranks that it does not live on. Same names in the same order on every rank."""


def on_engines(models: Models, action: Callable[[str, StatefulModel], None], *kinds: type[Exception]) -> None:
    """Run `action` for every engine on its ranks, which raise its errors of `kinds` together; then raise the first on all ranks.
    Collective over the world. Engines on different ranks run at the same time."""

    def own() -> None:
        faults: list[Exception] = []
        failed: list[set[int]] = []
        for name, engine in models.items():
            ranks = set() if engine is None else set(dist.get_process_group_ranks(engine.host_group))
            # Skip engines whose ranks all know of a fault; other engines' ranks would wait for this one.
            if engine is None or any(ranks <= others for others in failed):
                continue
            try:
                action(name, engine)
            except kinds as error:
                faults.append(error)
                failed.append(ranks)
        if faults:
            raise faults[0]

    raised_by_all(own, *kinds)
