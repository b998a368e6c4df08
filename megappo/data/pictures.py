"""Images that an environment shows while responses are drawn (`rollout.environment.images`), beside those that the data names.
Their numbers follow from the sample and the place in it, so no rank asks another for one; a step begins without any."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

IMAGE_BASE = 1 << 24
"""Ids from here on are features of images; every vocabulary is smaller, and 2^31 is far."""
MARKER = "<image>"
"""Place of an image in a question or an observation."""


class Picture:
    """An image as a tower gets it. patches: [rows x cols, 3 x patch x patch] uint8, in the order of the processor."""

    def __init__(self, patches: NDArray[numpy.uint8], grid: tuple[int, int]) -> None:
        self.patches, self.grid = patches, grid

    @cached_property
    def name(self) -> str:
        """Hash of the content."""
        return hashlib.sha256(repr(self.grid).encode() + self.patches.tobytes()).hexdigest()


class Pictures:
    """Images of a step by number, from `first`, behind those of the data. most: of a trajectory; 0: no environment shows any."""

    def __init__(self, first: int, most: int) -> None:
        self._first, self.most = first, most
        self.clear()

    def clear(self) -> None:
        """Forget all; numbers begin again."""
        self._base, self._held, self._own = self._first, dict[int, Picture](), dict[int, Picture]()

    def __getitem__(self, number: int) -> Picture:
        return self._held[number]

    def show(self, picture: Picture, sample: int, place: int) -> int:
        """Add the picture that a sample of this batch shows as its number `place`; return its number."""
        number = self._base + sample * self.most + place
        self._own[number] = self._held[number] = picture
        return number

    def take(self, pictures: Mapping[int, Picture]) -> None:
        """Add pictures that other ranks show."""
        self._held |= pictures

    def among(self, tokens: Iterable[int]) -> dict[int, Picture]:
        """Return the pictures among these tokens."""
        numbers = {one - IMAGE_BASE for one in tokens if one >= IMAGE_BASE}
        return {one: self._held[one] for one in sorted(numbers) if one >= self._first}

    def end_batch(self, num_samples: int) -> dict[int, Picture]:
        """Return what this rank alone has shown; the next batch gets other numbers."""
        own, self._own = self._own, {}
        self._base += num_samples * self.most
        return own
