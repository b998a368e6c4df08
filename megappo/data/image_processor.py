"""The bytes of an image as patches for a model's tower, by the image processor of its checkpoint (transformers') on Pillow."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megappo.runtime.messages import first_line, parse_object

if TYPE_CHECKING:  # numpy is imported where pixels are read: a command with a wrong key ends before
    import numpy
    from numpy.typing import NDArray

PROCESSOR = "preprocessor_config.json"
"""File of a checkpoint that says how its model sees images."""
_MOST_SIDE_RATIO = 200  # of the processor


@dataclass(frozen=True)
class Places:
    """What a model's checkpoint says of images in a prompt. processor: directory of preprocessor_config.json. text: of an image in
    a prompt, with `token` once, where its features come. tile: as in `VisionArch`."""

    processor: Path
    text: str
    token: int
    patch: int
    merge: int
    frames: int
    tile: int = 0


class ImageProcessor:
    """Processor of a checkpoint. max_pixels: larger images are made smaller; None: the processor's own limit. ValueError, one line,
    if transformers cannot build it or it does not fit the model. identity: all that decides its pixels."""

    def __init__(self, places: Places, max_pixels: int | None) -> None:
        import PIL
        import transformers

        file = places.processor / PROCESSOR
        if not file.is_file():
            raise ValueError(
                f"{places.processor} has no {file.name}, which says how its model sees images; take it from the checkpoint"
            )
        settings = parse_object(file.read_bytes(), str(file))
        try:
            own: Any = transformers.AutoImageProcessor.from_pretrained(
                str(places.processor), trust_remote_code=False, local_files_only=True, backend="pil"
            )
        except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
            raise ValueError(f"transformers cannot build the image processor of {file}: {first_line(error)}") from error
        if places.tile:
            sizes = {"size.height": (own.size["height"], places.tile), "size.width": (own.size["width"], places.tile)}
        else:
            sizes = {
                "patch_size": (own.patch_size, places.patch),
                "merge_size": (own.merge_size, places.merge),
                "temporal_patch_size": (own.temporal_patch_size, places.frames),
            }
        for name, (mine, theirs) in sizes.items():
            if mine != theirs:
                raise ValueError(f"{file}: {name} {mine} is not the {theirs} of config.json; take both from one checkpoint")
        if places.tile:
            own.crop_to_patches = True  # as the processor of text and images has it, whatever the file says
        # In pixels of the whole image, as longest_edge.
        least = own.min_patches * places.tile**2 if places.tile else own.size["shortest_edge"]
        if max_pixels is not None:
            if max_pixels < least:
                raise ValueError(f"data.max_image_pixels {max_pixels} is less than the {least} of {file}; raise it")
            if places.tile:
                own.max_patches = min(own.max_patches, max_pixels // places.tile**2)
            else:
                own.size = {"shortest_edge": least, "longest_edge": max_pixels}
        versions = {"transformers": transformers.__version__, "pillow": PIL.__version__}
        self.identity = {"processor": settings, "max_pixels": max_pixels, "versions": versions}
        self.mean, self.std = list(own.image_mean), list(own.image_std)
        self._own, self._places = own, places

    @property
    def most_tokens(self) -> int:
        """Most tokens of an image."""
        places = self._places
        if not places.tile:
            return self._own.size["longest_edge"] // (places.patch * places.merge) ** 2
        return (self._own.max_patches + 1) * (places.tile // places.patch // places.merge) ** 2

    def patches(self, content: bytes) -> tuple[NDArray[numpy.uint8], tuple[int, int]]:
        """Return an image's patches [patches, 3 x patch x patch], and their rows and columns. OSError, ValueError or
        SyntaxError for bytes that are no image, and for one that is animated, in CMYK or too narrow."""
        import numpy

        places = self._places
        out = self._own(images=[_decoded(content)], do_rescale=False, do_normalize=False, return_tensors="np")
        pixels = numpy.asarray(out["pixel_values"])
        if places.tile:
            # Tiles [tiles, 3, side, side], one below the other, in the order of other processors: the patches of a feature follow
            # each other, and each has its channels apart.
            side, merge, patch = places.tile // places.patch, places.merge, places.patch
            pieces = pixels.reshape(-1, 3, side // merge, merge, patch, side // merge, merge, patch)
            rows, cols, pixels = len(pixels) * side, side, pieces.transpose(0, 2, 5, 3, 6, 1, 4, 7)
        else:
            _, rows, cols = out["image_grid_thw"][0].tolist()
            pixels = pixels.reshape(rows * cols, 3, places.frames, -1)[:, :, 0]
        return numpy.clip(numpy.rint(pixels), 0, 255).astype(numpy.uint8).reshape(rows * cols, -1), (rows, cols)


def _decoded(content: bytes) -> Any:
    from PIL.Image import open as open_image
    from PIL.ImageOps import exif_transpose

    image = open_image(io.BytesIO(content))
    if getattr(image, "n_frames", 1) > 1:
        raise ValueError(f"it is animated ({image.n_frames} frames)")  # type: ignore[attr-defined]
    if image.mode == "CMYK":
        raise ValueError("it is in CMYK; convert it to RGB")
    if max(image.size) > _MOST_SIDE_RATIO * min(image.size):
        raise ValueError(f"its sides {image.size[0]} x {image.size[1]} differ by more than {_MOST_SIDE_RATIO} times")
    return exif_transpose(image).convert("RGB")
