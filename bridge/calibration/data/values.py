"""Values: calibration data, and how many rows of how many tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bridge.calibration.data.documents import CHARACTERS
from bridge.core.errors import UsageError

# On a 22 M encoder three times as many samples changed embeddings by less than 0.001: FP8 0.9979 both times, INT8
# (alpha 0.7) 0.9953 to 0.9947. `bridge.calibration.requirements` has what algorithms need beyond it.
SAMPLES = 32
SEQUENCE = 128  # a wrong RoPE permute shows after some twenty positions, so held-out rows must be longer
AUTO = "auto"  # `samples`: see `bridge.calibration.automatic`
MOST_SAMPLES = 512  # rows that "auto" chooses at most
PROMPTED = 8  # prompts that calibrate a denoiser, which sees each of them at every step
FP32 = "fp32"  # `compute`: see `bridge.calibration.requirements`
HELD_OUT = 8  # one row is held out for every so many that calibrate
BATCH = 8
EMBEDDED = "the embedded text"  # `Data.name` of the default
DEFAULT_TEXT = "Python's documentation"  # what that is


def check_compute(compute: str | None) -> None:
    """UsageError for another dtype to calibrate in than fp32, or None for the model's own."""
    if compute not in (None, FP32):
        raise UsageError(f"compute={compute!r} (--compute) is unknown; known: fp32; without it, the model's own dtype")


@dataclass(frozen=True)
class Data:
    """Batches to calibrate with and held-out batches, as {name: torch tensor}; `digest` covers the former.

    `name`: what they are made of, in words. `missing`: why the default text gives no batches; a scheme without
    statistics needs none. `forward_loop`: the user's own loop, which runs the model; `batches` is then empty.
    `warnings`: what a user should know before calibrating.
    `cut`: with samples="auto", the same text cut into another number of rows; `chosen`: why it has this number.
    `windows`: longer pieces of the text, of one length, which outputs are evaluated on, see `windows.marked`.
    """

    batches: tuple[dict[str, Any], ...] = ()
    held_out: tuple[dict[str, Any], ...] = ()
    digest: str = ""
    samples: int = 0
    sequence: int = 0
    missing: str = ""
    forward_loop: Callable[[Any], Any] | None = None
    warnings: tuple[str, ...] = ()
    cut: Callable[[int], Data] | None = None
    chosen: str = ""
    name: str = ""
    windows: tuple[tuple[int, ...], ...] = ()

    @property
    def text(self) -> str:
        """The text in words: Python's documentation by default, or the last part of a path or an id."""
        return DEFAULT_TEXT if self.name == EMBEDDED else self.name.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class Sampling:
    """How rows are cut from texts: their number, their tokens, and the field of a JSONL file that holds the text.

    `samples`: a number or "auto"; `default`: the number if it is None. `characters`: of a text file, read at most.
    `evaluate`: tokens that outputs are evaluated on, None for `windows.WINDOWS` windows.
    """

    samples: int | str | None = None
    sequence: int | None = None
    field: str | None = None
    default: int = SAMPLES
    characters: int = CHARACTERS
    evaluate: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("samples", self.samples), ("sequence", self.sequence), ("evaluate", self.evaluate)):
            auto = name == "samples" and value == AUTO
            if value is not None and not auto and (type(value) is not int or value < 1):
                or_auto = ', or "auto"' if name == "samples" else ""
                raise UsageError(f"{name}={value!r}; expected a positive whole number{or_auto}")

    @property
    def rows(self) -> int:
        """The number of rows to calibrate with."""
        return self.samples if isinstance(self.samples, int) else self.default


DEFAULT = Sampling()
