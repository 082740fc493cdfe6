"""The blocks of rows in which a tensor is merged."""

from __future__ import annotations

from bridge.sources.adapted.match import Delta

# Rows that are multiplied at once, at the same places whatever is read: a product of few rows has other last bits in
# torch's matrix library than the same rows of a large one (seen up to 11 rows; from 64 on equal in 150 shapes).
BLOCK, LEAST = 256, 64


def blocks(rows: int) -> list[tuple[int, int]]:
    """The ranges of rows that are multiplied at once; the last one takes what would be too few.

    >>> blocks(300), blocks(330)
    ([(0, 300)], [(0, 256), (256, 330)])
    """
    starts = list(range(0, rows, BLOCK))
    if len(starts) > 1 and rows - starts[-1] < LEAST:
        starts.pop()
    return list(zip(starts, [*starts[1:], rows], strict=True))


def by_rows(delta: Delta) -> bool:
    """Whether a block of stored rows can be merged without the others: not where DoRA's norm goes over all rows."""
    if delta.kind == "conv" or delta.part is not None:
        return False
    if delta.kind == "parameter":
        return len(delta.shape) == 2
    return not delta.magnitude or delta.kind == "linear"
