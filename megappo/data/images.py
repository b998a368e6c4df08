"""Images of a run. Its tokens carry them: one id for each feature of an image, `IMAGE_BASE` + the image's number. So nothing else
of a batch knows of images, no pixel travels between ranks, and an image token that a policy samples is a token like any other.

Every image of a run's sources is resized once, by the model's own processor, and kept as bytes in the cache of prepared data,
where all ranks map it. Models normalise the bytes that they need (`models/vision.py`); vLLM gets the same bytes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from megappo.data.cache import Cache, digest
from megappo.data.image_processor import ImageProcessor, Places
from megappo.data.pictures import IMAGE_BASE, MARKER, Picture, Pictures
from megappo.data.sources import Joined, Source, parts_of
from megappo.runtime.messages import first_line

if TYPE_CHECKING:  # numpy is imported where pixels are read: a command with a wrong key ends before
    import numpy
    from numpy.typing import NDArray

MOST_IMAGES = 16
"""Of one prompt, or one observation: vLLM plans its buffers by it."""
THUMBNAIL = 192
"""Pixels of a thumbnail's longer side: 1 to 8 KB as JPEG."""
FEATURE_BYTES = 2**30
"""Most bytes of features that a rank keeps through a step (`Features`)."""
_PIXELS, _INDEX, _META = "pixels.u8", "index.npy", "meta.json"
_BLANK = "blank"


class Features:
    """Features of images that frozen towers have computed on this rank since the step began (`models/vision.py`). What comes when
    they are full is computed each time."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything: the weights of frozen towers change between steps alone."""
        self.towers: WeakKeyDictionary[Any, Hashable] = WeakKeyDictionary()
        """Tower -> contents of its weights."""
        self.kept: dict[tuple[Hashable, int], Any] = {}
        """(contents of a tower, image) -> its features."""
        self.free = FEATURE_BYTES


class ImageStore:
    """Images of a run by number, from 0 in the order in which the sources name them. folder: of the cache. most_shown: images that
    an environment shows in a trajectory."""

    def __init__(self, folder: Path, most_shown: int = 0) -> None:
        import numpy

        self._folder = folder
        self._meta: Mapping[str, Any] = json.loads((folder / _META).read_text(encoding="utf-8"))
        self.merge, self.frames = int(self._meta["merge"]), int(self._meta["frames"])
        # [images, 3] int64: first patch, rows and columns of patches.
        self._index = numpy.load(folder / _INDEX)
        self.features = Features()
        self.pictures = Pictures(len(self._index), most_shown)

    def begin_step(self) -> None:
        """Forget what the step before has computed and shown."""
        self.features.clear()
        self.pictures.clear()

    def __reduce__(self) -> tuple[type[ImageStore], tuple[Path, int]]:
        return ImageStore, (self._folder, self.pictures.most)  # other processes map the files too

    def __len__(self) -> int:
        return len(self._index)

    @property
    def sha256(self) -> str:
        """Hash of all pixels as the tower gets them, in order."""
        return self._meta["sha256"]

    @property
    def name(self) -> str:
        """Hash of the images, their order, and how they were processed."""
        return self._folder.name

    @property
    def num_bytes(self) -> int:
        return (self._folder / _PIXELS).stat().st_size

    def number(self, reference: str) -> int:
        return self._meta["numbers"][reference]

    def grid(self, image: int) -> tuple[int, int]:
        """Rows and columns of an image's patches."""
        if image >= len(self):
            return self.pictures[image].grid
        _, rows, cols = self._index[image].tolist()
        return rows, cols

    def content(self, image: int) -> str:
        """Return a name that no other image of the run has: for what is kept longer than a step."""
        return str(image) if image < len(self) else self.pictures[image].name

    @property
    def most_tokens(self) -> int:
        """Most tokens of an image, also of one that an environment shows."""
        return max(self._meta.get("most_tokens", 0), int(self._index[:, 1:].prod(axis=1).max()) // self.merge**2)

    @cached_property
    def smallest(self) -> int:
        """An image of the fewest tokens."""
        return int(self._index[:, 1:].prod(axis=1).argmin())

    def num_tokens(self, image: int) -> int:
        rows, cols = self.grid(image)
        return rows * cols // self.merge**2

    @cached_property
    def _pixels(self) -> NDArray[numpy.uint8]:
        import numpy

        return numpy.memmap(self._folder / _PIXELS, numpy.uint8, "r").reshape(-1, self._meta["width"])

    def patches(self, images: Sequence[int]) -> NDArray[numpy.uint8]:
        """Copy the patches of these images, one after the other: [patches, 3 x patch x patch], in the order of the processor."""
        import numpy

        def of(image: int) -> NDArray[numpy.uint8]:
            if image >= len(self):
                return self.pictures[image].patches
            first, rows, cols = self._index[image].tolist()
            return self._pixels[first : first + rows * cols]

        return numpy.concatenate([of(one) for one in images])

    def thumbnail(self, image: int) -> bytes:
        """Return an image, as the tower sees it, as a JPEG of at most THUMBNAIL pixels a side."""
        from PIL import Image

        rows, cols = (size // self.merge for size in self.grid(image))
        side = math.isqrt(self._meta["width"] // 3)
        # The processor's order: patches of a feature follow each other, and each has its channels apart.
        patches = self.patches([image]).reshape(rows, cols, self.merge, self.merge, 3, side, side)
        pixels = patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * self.merge * side, cols * self.merge * side, 3)
        picture, content = Image.fromarray(pixels), io.BytesIO()
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
        picture.save(content, "JPEG", quality=70)
        return content.getvalue()

    @property
    def scaling(self) -> tuple[list[float], list[float]]:
        """Factor and summand of a byte of each channel, red, green and blue, that make it the tower's input."""
        std, mean = self._meta["std"], self._meta["mean"]
        return [1 / 255 / one for one in std], [-centre / one for centre, one in zip(mean, std)]


@dataclass(frozen=True)
class PromptImages:
    """Images of a run. key: `data.image_key`; None: prompts have none. root: see `references`. folders: of the sources' files, by
    source. most: images of a record, at most. max_pixels: see `open_images`."""

    key: str | None
    root: str | None
    folders: Mapping[str, Path | None]
    store: ImageStore
    places: Places
    most: int
    max_pixels: int | None = None

    @cached_property
    def _processor(self) -> ImageProcessor:
        return ImageProcessor(self.places, self.max_pixels)

    def picture(self, value: Any) -> Picture:
        """Process an image that an environment returns: an image of PIL, or as a record names one, where a path is absolute or
        relative to `root`. ValueError says why it cannot be used."""
        if callable(getattr(value, "save", None)):
            file = io.BytesIO()
            value.save(file, "PNG")
            value = file.getvalue()
        reference = _reference(value, None if self.root is None else Path(self.root))
        return Picture(*self._processor.patches(reference.read()))

    def of_record(self, record: Mapping[str, Any], name: str) -> list[int]:
        """Return the numbers of a record's images. name: as in messages, behind its source. ValueError as `references`."""
        if self.key is None:
            return []
        folder = self.folders[name.rpartition("#")[0]]
        return [self.store.number(one.name) for one in references(record, self.key, self.root, folder, name)]

    def shown_in(self, tokens: Sequence[int]) -> list[int]:
        """Return the numbers of the images in tokens, in order."""
        features, found = [one - IMAGE_BASE for one in tokens if one >= IMAGE_BASE], []
        while features:
            found.append(features[0])
            del features[: self.store.num_tokens(features[0])]
        return found

    def encoded(
        self,
        question: Any,
        numbers: Sequence[int],
        encode: Callable[[Any], list[int]],
        name: str = "",
        *,
        is_answered: bool = False,
    ) -> list[int]:
        """Encode a question with the images in the places of its markers. encode: question -> ids, with one image token for each
        place. is_answered: the ids go on with a response, whose image tokens are of text. ValueError, with the record's name if it
        is given, if there are more or fewer markers than images."""
        name = name and f"{name}: "
        texts = [question] if isinstance(question, str) else [message["content"] for message in question]
        marked = sum(text.count(MARKER) for text in texts)
        if marked != len(numbers):
            fix = f"every image has its place at one {MARKER} in the question, or is a part {{type: image}} of it"
            of_key = f" of data.image_key={self.key or 'null'}" if name else ""
            raise ValueError(f"{name}{marked} {MARKER} for {len(numbers)} images{of_key}: {fix}")
        if marked > MOST_IMAGES:
            raise ValueError(f"{name}{marked} images in a prompt; {MOST_IMAGES} are the most, leave the record out")
        if isinstance(question, str):
            ids = encode(question.replace(MARKER, self.places.text))
        else:
            ids = encode([{**one, "content": one["content"].replace(MARKER, self.places.text)} for one in question])
        found = ids.count(self.places.token)
        if found < marked or (found > marked and not is_answered):
            what = f"{found} image tokens (id {self.places.token}) for {marked} {MARKER}"
            raise ValueError(f"{name}the prompt has {what}: write {MARKER} where an image stands, and no such tokens")
        images = iter(numbers)
        spread = ([one] if one != self.places.token else self._features(next(images, None)) for one in ids)
        return [one for part in spread for one in part]

    def _features(self, number: int | None) -> list[int]:
        return [self.places.token] if number is None else [IMAGE_BASE + number] * self.store.num_tokens(number)


def key_of_images(images: PromptImages | None) -> dict[str, Any]:
    """Return what the images of prompts add to the key of their rows."""
    return {} if images is None else {"images": [images.key, images.store.name]}


def with_markers(question: Any, name: str) -> Any:
    """Return a list of chat messages with text contents: an image part of a content becomes a marker. Others stay as they are.
    ValueError, which begins with `name`, for a part with a video."""
    if not isinstance(question, list) or not all(isinstance(message, Mapping) for message in question):
        return question
    return [{**message, "content": _flat(message.get("content"), name)} for message in question]


def _flat(content: Any, name: str) -> Any:
    if not isinstance(content, list):
        return content
    if any(part and part.get("type") in ("video", "video_url") for part in content):
        raise ValueError(f"{name}: a question shows a video, which is not read; give frames of it as images, or leave it out")
    parts = [MARKER if part.get("type") in ("image", "image_url") else part.get("text") for part in content if part]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else content


# ------------------------------------------------------------------------------------------------------- references of records


@dataclass(frozen=True)
class Reference:
    """An image that a record names. name: path of its file, or the SHA-256 of its bytes. content: the bytes; None: of the file."""

    name: str
    content: bytes | None = None

    def read(self) -> bytes:
        return Path(self.name).read_bytes() if self.content is None else self.content


def references(record: Mapping[str, Any], key: str, root: str | None, folder: Path | None, name: str) -> list[Reference]:
    """Return the images of a record under `key`: a path, {bytes or path}, bytes, a data: URI of base64, or a list of such; none
    if it is null or missing. Paths are relative to `root`, or to `folder`, of the source's file. ValueError names the record."""
    value = record.get(key)
    if value is None:
        return []
    found = []
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, Mapping):
            one = one.get("bytes") or one.get("path")
        try:
            found.append(_reference(one, Path(root) if root is not None else folder))
        except ValueError as error:
            raise ValueError(f"data.image_key={key}: {name}: {error}") from None
    return found


def _reference(value: Any, folder: Path | None) -> Reference:
    if isinstance(value, str) and value.startswith("data:"):
        try:
            value = base64.b64decode(value.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise ValueError(f"a data: URI that is not base64 ({error})") from None
    if isinstance(value, bytes):
        return Reference(hashlib.sha256(value).hexdigest(), value)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{type(value).__name__} is no image; a path, bytes, or a data: URI is needed")
    if "://" in value and not value.startswith("file://"):
        raise ValueError(f"{value[:60]} is a URL, which is never fetched; download it and name the file")
    path = Path(value.removeprefix("file://"))
    if not path.is_absolute():
        if folder is None:
            raise ValueError(f"{path} is relative and the data set has no folder; set data.image_root")
        path = folder / path
    if not path.is_file():
        raise ValueError(f"image {path} does not exist; correct it, or set data.image_root")
    return Reference(str(path.absolute()))


def _blank() -> Reference:
    """Return what a tower computes on a rank without an image, where no record has one: some white pixels."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("L", (16, 16), 255).save(file, "PNG")
    return Reference(_BLANK, file.getvalue())


def folder_of(source: Source) -> Path | None:
    """Return the folder of a source's file; None for a dataset of a hub."""
    return source.files[0].absolute().parent if source.files else None


# ------------------------------------------------------------------------------------------------------------ building a store


def open_images(
    sources: Iterable[Source | Joined],
    key: str | None,
    root: str | None,
    places: Places,
    max_pixels: int | None,
    cache: Cache,
    *,
    most_shown: int = 0,
) -> PromptImages:
    """Open the images of these sources, processed at the first call. max_pixels: larger ones are made smaller; None: the
    processor's own limit. most_shown: so many others may an environment show in a trajectory; the store then ends with a blank
    one. ValueError, one line, naming record and file: an image that is missing, broken, animated, in CMYK or too narrow; a
    processor that transformers cannot build or that does not fit the model."""
    where: dict[str, str] = {}
    found: dict[str, Reference] = {}
    folders: dict[str, Path | None] = {}
    most = 0
    for source in sources if key is not None else ():
        assert key is not None
        for part in parts_of(source):
            folders[part.spec] = folder_of(part)
            for named, name in _of_source(part, key, root):
                most = max(most, len(named))
                for reference in named:
                    found.setdefault(reference.name, reference)
                    where.setdefault(reference.name, name)
    if not found and key is not None:
        raise ValueError(f"data.image_key={key}: no record names an image; correct the key, or leave it out")
    processor = ImageProcessor(places, max_pixels)
    if most_shown:
        found[_BLANK] = _blank()
    states = [[name, *_state(one)] for name, one in found.items()]
    build = partial(_build, list(found.values()), where, processor, places)
    folder = cache.folder({"images": states, **processor.identity}, build)
    return PromptImages(key, root, folders, ImageStore(folder, most_shown), places, most, max_pixels)


def _of_source(source: Source, key: str, root: str | None) -> Iterator[tuple[list[Reference], str]]:
    folder, row = folder_of(source), 0
    for batch in source.batches():
        for record, line in source.records(source.spec, batch):
            name = f"{source.spec}#{row}" + (f" (line {line})" if line is not None else "")
            yield references(record, key, root, folder, name), name
            row += 1


def _state(reference: Reference) -> list[int]:
    if reference.content is not None:
        return []
    stat = os.stat(reference.name)
    return [stat.st_size, stat.st_mtime_ns]


def _build(
    references: Sequence[Reference], where: Mapping[str, str], processor: ImageProcessor, places: Places, folder: Path
) -> None:
    index, first, content = [], 0, hashlib.sha256()
    process = partial(_processed, where, processor)
    workers = os.cpu_count() or 1
    with (folder / _PIXELS).open("wb") as file, ThreadPoolExecutor(workers) as pool:
        waiting = iter(references)
        while some := list(islice(waiting, 8 * workers)):  # so many decoded images are in memory
            for rows, grid in pool.map(process, some):
                file.write(rows.tobytes())
                content.update(repr(grid).encode() + rows.tobytes())
                index.append((first, *grid))
                first += len(rows)
    mean, std = processor.mean, processor.std
    meta = {"width": 3 * places.patch**2, "merge": places.merge, "frames": places.frames, "mean": mean, "std": std}
    if references[-1].name == _BLANK:
        meta["most_tokens"] = processor.most_tokens
    meta["sha256"] = digest({"pixels": content.hexdigest(), "mean": mean, "std": std})
    _write_index(folder, index, meta | {"numbers": {one.name: number for number, one in enumerate(references)}})


def _write_index(folder: Path, index: Sequence[tuple[int, int, int]], meta: Mapping[str, Any]) -> None:
    import numpy

    numpy.save(folder / _INDEX, numpy.array(index, dtype=numpy.int64))
    (folder / _META).write_text(json.dumps(meta), encoding="utf-8")


def write_store(folder: Path, pixels: NDArray[numpy.uint8], index: Sequence[tuple[int, int, int]], **meta: Any) -> None:
    """Write a store of given patches [patches, 3 x patch x patch]. index: first patch, rows and columns of every image. meta:
    merge, frames, mean and std."""
    folder.mkdir()
    pixels.tofile(folder / _PIXELS)
    _write_index(folder, index, {"width": pixels.shape[1], **meta})


def _processed(
    where: Mapping[str, str], processor: ImageProcessor, reference: Reference
) -> tuple[NDArray[numpy.uint8], tuple[int, int]]:
    what = reference.name if reference.content is None else "image"
    try:
        return processor.patches(reference.read())
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(
            f"{where[reference.name]}: {what} cannot be used: {first_line(error)}; correct it or leave it out"
        ) from error
