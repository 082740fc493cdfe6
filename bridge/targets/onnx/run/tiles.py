"""Features of an image's tiles, in their order in a text.

LLaVA-NeXT and LLaVA-OneVision. The processor reads an image whole, and as tiles of a larger one that borders fill up.
The tiles' features follow line by line without the borders, each line ends with the feature of a new line, and those of
the whole image stand before them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bridge.core.errors import VerifyError
from bridge.targets.onnx.files import TILE_ROWS, TILE_WEIGHTS

SIZES, COUNTS = "image_sizes", "batch_num_images"
_MORE = 1.1  # times the features that are kept, from which on OneVision resamples


@dataclass(frozen=True)
class Tiling:
    """`sizes` of enlarged images; pixels and features of a tile's side; `most` tiles of features are kept (0: all)."""

    sizes: tuple[tuple[int, int], ...]
    pixels: int
    side: int
    most: int

    def count(self, size: Sequence[int]) -> int:
        """How many tiles an image of this height and width has, with itself."""
        height, width = self.enlarged(size)
        return 1 + math.ceil(height / self.pixels) * math.ceil(width / self.pixels)

    def enlarged(self, size: Sequence[int]) -> tuple[int, int]:
        """Which of `sizes` the processor chose: it shows most of the image, and wastes least."""
        height, width = map(int, size)

        def rank(possible: tuple[int, int]) -> tuple[int, int]:
            scale = min(possible[1] / width, possible[0] / height)
            shown = min(int(width * scale) * int(height * scale), width * height)
            return shown, shown - possible[0] * possible[1]

        return max(self.sizes, key=rank)  # the first of equals, as transformers takes it

    def rows(self, size: Sequence[int], tiles: int) -> tuple[np.ndarray, np.ndarray]:
        """For each row in the text the features that are added (rows, 1 or 4), and their weights.

        Features are numbered through all `tiles`; that of a new line is the last.
        """
        area = self.side**2
        whole, line = np.arange(area), tiles * area
        if tiles == 1:
            return _alone(np.append(whole, line), 4 if self.most else 1)
        height, width = self.enlarged(size)
        down, across = height // self.pixels * self.side, width // self.pixels * self.side
        top, left = self._borders(size, down, across)
        lines, columns = np.arange(top, down - top), np.arange(left, across - left)
        high, wide = len(lines), len(columns)
        if self.most and (ratio := math.sqrt(high * wide / (self.most * area))) > _MORE:
            high, wide = int(high // ratio), int(wide // ratio)
        index, weights = [], []
        for row, upright in _near(lines, high):
            for column, level in _near(columns, wide):
                index.append(self._feature(row[:, None], column[None, :], across))
                weights.append(upright[:, None] * level[None, :])
        parts = 4 if self.most else 1
        ended = np.pad(np.stack(index[:parts], -1), ((0, 0), (0, 1), (0, 0)), constant_values=line)
        weighted = np.pad(np.stack(weights[:parts], -1), ((0, 0), (0, 1), (0, 0)))
        weighted[:, -1, 0] = 1
        first = _alone(whole, parts)
        return (
            np.concatenate([first[0], ended.reshape(-1, parts)]),
            np.concatenate([first[1], weighted.reshape(-1, parts)]),
        )

    def _feature(self, row: np.ndarray, column: np.ndarray, across: int) -> np.ndarray:
        """The number of the feature at a row and a column of all tiles."""
        side = self.side
        tile = 1 + row // side * (across // side) + column // side
        return np.asarray(tile * side**2 + row % side * side + column % side)

    def _borders(self, size: Sequence[int], down: int, across: int) -> tuple[int, int]:
        """How many lines of features at the top, or columns at the left, fill the image up."""
        height, width = map(int, size)
        if width / height > across / down:
            return (down - int(round(height * (across / width), 7))) // 2, 0
        return 0, (across - int(round(width * (down / height), 7))) // 2

    def images(self, inputs: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """What the tower is fed of each image: its tiles, and the rows of its features."""
        if SIZES not in inputs:
            raise VerifyError(f"{SIZES} (height, width) are missing beside pixel_values; the processor gives them")
        pixels, sizes = inputs["pixel_values"], inputs[SIZES]
        together = [n for n in inputs.get(COUNTS, np.ones(len(sizes), np.int64)).tolist() for _ in range(n)]
        for image, size, beside in zip(pixels, sizes, together, strict=True):
            tiles = self.count(size) if beside == 1 else 1
            rows, weights = self.rows(size, tiles)
            more = {TILE_WEIGHTS: weights.astype(np.float32)} if self.most else {}
            yield {"pixel_values": image[:tiles], TILE_ROWS: rows, **more}


def tiling_entries(text: Mapping[str, Any], pixels: Any) -> dict[str, Any]:
    """What `tiling_of` reads, from entries of a model's config and the pixels of a tile's side."""
    most = str(text.get("vision_aspect_ratio", "")).removeprefix("anyres_max_")
    return {
        "tile_sizes": text["image_grid_pinpoints"],
        "tile_pixels": int(pixels),
        "tile_side": int(pixels) // int(text["patch_size"]),
        "tile_features": int(most or 0),
    }


def tiling_of(vision: Mapping[str, Any]) -> Tiling | None:
    """The tiling that `genai_config.json` tells of the tower."""
    if "tile_sizes" not in vision:
        return None
    sizes = tuple((int(height), int(width)) for height, width in vision["tile_sizes"])
    return Tiling(sizes, int(vision["tile_pixels"]), int(vision["tile_side"]), int(vision["tile_features"]))


def _alone(features: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Each feature as it is, as a sum of so many."""
    weights = np.zeros((len(features), parts))
    weights[:, 0] = 1
    return np.repeat(features[:, None], parts, 1), weights


def _near(places: np.ndarray, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two neighbours among `places`, and their weights, of each of `count` points between them."""
    at = np.maximum((np.arange(count) + 0.5) * (len(places) / max(count, 1)) - 0.5, 0)
    first = at.astype(np.int64)
    second = np.minimum(first + 1, len(places) - 1)
    return [(places[first], 1 - (at - first)), (places[second], at - first)]
