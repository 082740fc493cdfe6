"""Places of tokens in time, row and column, as Qwen-VL counts them."""

from __future__ import annotations

import numpy as np

from bridge.core.errors import VerifyError


def image_places(ids: np.ndarray, mask: np.ndarray, grids: np.ndarray, token: int, merge: int) -> np.ndarray:
    """3, batch, sequence: texts count up in all three; the tokens of an image have its rows and columns.

    `grids`: height and width of each image in patches, `merge` x `merge` of which are a token. A text goes on behind
    the largest place of the image before it. Masked tokens are at 0.

    >>> ids = np.array([[5, 9, 9, 9, 9, 5]])
    >>> image_places(ids, np.ones_like(ids), np.array([[1, 4, 4]]), token=9, merge=2)[:, 0].tolist()
    [[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]
    """
    places = np.zeros((3, *ids.shape), np.int64)
    images = iter(grids)
    for row in range(len(ids)):
        at, following = int(mask[row].argmax()), 0
        while at < ids.shape[1]:
            if ids[row, at] != token:
                places[:, row, at] = following
                at, following = at + 1, following + 1
                continue
            frames, height, width = (int(extent) for extent in next(images))
            shape = (frames, height // merge, width // merge)
            own = np.indices(shape).reshape(3, -1)
            end = at + own.shape[1]
            if end > ids.shape[1] or (ids[row, at:end] != token).any():
                raise VerifyError(
                    f"row {row} of the text has fewer than {own.shape[1]} image tokens (id {token}) from token {at} "
                    f"on, where an image of {height} x {width} patches stands; place them as the processor does"
                )
            places[:, row, at:end] = own + following
            at, following = end, following + max(shape)
    return places
