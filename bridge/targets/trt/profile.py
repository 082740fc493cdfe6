"""Optimization profiles, and the same build as a command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.core.errors import UsageError
from bridge.core.text import fold_layers, nearest
from bridge.sources.configs.positions import context_length, image_positions
from bridge.targets.onnx.run.runtime import WRITE_INDICES

Range = tuple[int, int, int]
# Axes of denoisers: tokens of a prompt, and of a packed image (1024 x 1024 has 4096).
DENOISER: dict[str, Range] = {"text_tokens": (1, 77, 512), "image_tokens": (1, 4096, 16384)}
# At 16 kHz: from 50 ms over ten seconds to half a minute; of spectra, a hundred frames a second.
SOUND: dict[str, Range] = {"samples": (800, 160_000, 480_000), "spectrum_frames": (5, 500, 1500)}
# Rows of features that stand for images or sound in a text; none in a text alone.
ROWS: dict[str, Range] = {"image_rows": (0, 576, 9216), "audio_rows": (0, 750, 3000)}
# Of images of any size. Pixels: multiples of both 28 and 32, and Mistral 3's processor makes sides of up to 1540.
# Patches: SigLIP 2's processor makes 256, of up to 1024 that it was trained with.
SIGHT: dict[str, Range] = {
    "image_tiles": (1, 5, 37),  # LLaVA-OneVision has up to 6 x 6, and the image itself
    "image_patches": (16, 1024, 4096),  # attention of 16,384 takes half a gigabyte in a tiny model
    "image_height": (224, 448, 1568),
    "image_width": (224, 448, 1568),
    "patches": (1, 256, 1024),
}
IMAGES: Range = (1, 1, 4)  # of a row, for layers of cross-attention; a text alone has one of zeros
SCANNED = 128  # the longest sequence of a graph with Scan: 512 took 12.8 GB in a tiny Qwen3-Next
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Profile:
    """Minimum, optimum and maximum extent of every dynamic axis, by the axis names of our graphs.

    `encoder_sequence`: of the states that a decoder reads. `others`: axes of other names. `total_sequence` follows from
    `past_sequence` and `sequence` unless `others` has it. `image_positions`: keys that layers of cross-attention have
    of an image.
    """

    batch: Range = (1, 1, 8)
    sequence: Range = (1, 128, 512)
    past_sequence: Range = (0, 128, 1024)
    encoder_sequence: Range = (1, 128, 512)
    image_positions: int = 0
    others: Mapping[str, Range] = field(default_factory=dict)

    @property
    def ranges(self) -> dict[str, Range]:
        total = tuple(a + b for a, b in zip(self.past_sequence, self.sequence, strict=True))
        own = {name: getattr(self, name) for name in FIELDS}
        own |= {**dict.fromkeys(BATCHES, self.batch), "images": IMAGES}
        least, optimum, most = (count * self.image_positions for count in IMAGES)
        own["image_positions"] = (least, optimum, most)
        return {**own, **SOUND, **DENOISER, **ROWS, **SIGHT, "total_sequence": total, **self.others}


FIELDS = ("batch", "sequence", "past_sequence", "encoder_sequence")  # of a profile; other axes go to `others`
BATCHES = {"text_batch", "image_batch", "audio_batch"}  # axes that have the range of `batch`
POSITIVE = {"batch", "sequence", "encoder_sequence"}  # none of these may be empty
HOW = "write an axis as in sequence=1:128:2048 (min:opt:max)"


def parse_ranges(given: str | Mapping[str, Sequence[int]]) -> dict[str, Range]:
    """Ranges of axes as a user gives them: "batch=1:4:16,past_sequence=0:512:4095", or a mapping; UsageError if not.

    >>> parse_ranges("batch=1:4:16")
    {'batch': (1, 4, 16)}
    """
    if isinstance(given, str):
        pairs = [
            (name.strip(), range_.split(":")) for name, _, range_ in (pair.partition("=") for pair in given.split(","))
        ]
    elif isinstance(given, Mapping) and all(isinstance(range_, Sequence) for range_ in given.values()):
        pairs = [(name, [str(bound) for bound in range_]) for name, range_ in given.items()]
    else:
        raise UsageError(f"profile={given!r}: give a text or a mapping of ranges; {HOW}")
    ranges: dict[str, Range] = {}
    for name, words in pairs:
        if name == "total_sequence":
            raise UsageError(
                "profile total_sequence (--profile): it is past_sequence and sequence together; give these"
            )
        shown = f"profile {name}={':'.join(words)} (--profile)"
        if name in ranges:
            raise UsageError(f"{shown}: the axis is given twice")
        if not name or len(words) != 3 or not all(re.fullmatch(r"\s*\d{1,10}\s*", word) for word in words):
            raise UsageError(f"{shown}: {HOW}")
        low, best, high = map(int, words)
        if not (name in POSITIVE) <= low <= best <= high or not high:
            raise UsageError(f"{shown}: a range needs min <= opt <= max; max, and min of {name}, above zero")
        ranges[name] = (low, best, high)
    return ranges


def load_graph(path: Path) -> Any:
    """The graph of an ONNX file, without its weights."""
    import onnx

    return onnx.load(path, load_external_data=False).graph


def check_axes(ranges: Mapping[str, Range], known: Iterable[str]) -> None:
    """UsageError if a range is for an axis that no graph has. known: axes of graphs."""
    names = {*known, *(["batch"] if BATCHES & {*known} else [])}
    if unknown := [name for name in ranges if name not in names]:
        raise UsageError(f"profile: no graph has a dynamic axis {unknown[0]!r}; {nearest(unknown[0], names)}")


def dynamic_axes(graph: Any) -> set[str]:
    """The names of the axes of a graph's inputs that may have any extent."""
    return {dim.dim_param for value in graph.input for dim in value.type.tensor_type.shape.dim if dim.dim_param}


def profiles_of(config: Mapping[str, Any], graph: Any, given: Mapping[str, Range] = {}) -> tuple[Profile, ...]:
    """The engine's default shapes, limited by the model's positions, which past and sequence share.

    given: ranges instead of the default ones, of axes that the graph has. UsageError if there are fewer positions.

    A decoder with a cache has two, which share its weights: for the prompt, and for one token after the other. A model
    that scans its tokens keeps a state of each step, and gets shorter ones. Buffers have one length and no range.
    """
    known = dynamic_axes(graph)
    asked = {name: given[name] for name in given if name in known or (name == "batch" and known & BATCHES)}
    buffer = _buffer_of(graph)
    cache, scans = bool(buffer) or "past_sequence" in known, any(node.op_type == "Scan" for node in graph.node)
    most, batch = (SCANNED, (1, 1, 1)) if scans else (512, (1, 1, 8))
    left = 1024
    limit = context_length(config)
    if limit is not None:
        most = min(most, max(limit // 2, 1) if cache else limit)
        left = min(1024, limit - most)
    most = min(most, buffer or most)
    sequence = asked.get("sequence", (1, min(128, most), most))
    past = before = asked.get("past_sequence", (0, min(128, left), left))
    check_positions(asked, limit)
    if limit is not None:
        least, best, largest = (min(bound, max(limit - sequence[2], 1)) for bound in past)
        before = (least, best, largest)
    if buffer and sequence[2] > buffer:
        raise UsageError(f"profile sequence: {sequence[2]} tokens are more than the {buffer} of the graph's buffers")
    others = {name: asked[name] for name in asked if name not in FIELDS}
    encoder = asked.get("encoder_sequence", (1, min(128, most), most))
    prompt = Profile(asked.get("batch", batch), sequence, before, encoder, image_positions(config), others)
    token = replace(prompt, sequence=(1, 1, 1), past_sequence=past)
    return (prompt, token) if cache and sequence[2] > 1 else (token if cache else prompt,)


def _buffer_of(graph: Any) -> int:
    """Tokens that the buffers of a decoder's cache hold; 0 if it has none. graph: ONNX's."""
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in graph.input}
    return shapes["attention_mask"][1] if WRITE_INDICES in shapes else 0


def check_positions(ranges: Mapping[str, Range], limit: int | None) -> None:
    """UsageError if ranges have more tokens than a model has positions, `limit`, which may be unknown."""
    for name, more in (("sequence", 0), ("past_sequence", 1)):  # a token follows the past
        if limit is not None and name in ranges and (tokens := ranges[name][2] + more) > limit:
            raise UsageError(f"profile {name}: {tokens} tokens are more than the {limit} positions of the model")


def profile_shapes(onnx_path: Path, profile: Profile) -> dict[str, Shapes]:
    """Return input -> (min, opt, max) for every input with a dynamic axis; UsageError if an axis has no range."""
    from bridge.targets.onnx.lint.model import axes

    inputs = {value.name: axes(value.type.tensor_type) for value in load_graph(onnx_path).input}
    ranges = profile.ranges
    wrong = [
        f"{n}: {', '.join(map(str, r))}" for n, r in ranges.items() if len(r) != 3 or not 0 <= r[0] <= r[1] <= r[2]
    ]
    if wrong:
        raise UsageError(f"profile: a range needs 0 <= min <= opt <= max; wrong: {'; '.join(wrong)}")
    dynamic = {
        name: shape for name, shape in inputs.items() if shape is None or not all(isinstance(a, int) for a in shape)
    }
    known = {axis for shape in dynamic.values() for axis in shape or () if isinstance(axis, str)}
    problems = [f"{name}: axis {axis}" for name, shape in dynamic.items() for axis in _unknown(shape, ranges)]
    if problems:
        raise UsageError(
            f"{onnx_path.name}: no range for {', '.join(fold_layers(problems))}; "
            'give one: Profile(others={"NAME": (min, opt, max)})'
        )
    check_axes(profile.others, known)
    return {name: _bounds(shape or (), ranges) for name, shape in dynamic.items()}


def _unknown(shape: tuple[int | str | None, ...] | None, ranges: Mapping[str, Range]) -> list[str]:
    if shape is None:
        return ["(no shape)"]
    return [axis or "(no name)" for axis in shape if not isinstance(axis, int) and axis not in ranges]


def _bounds(shape: tuple[int | str | None, ...], ranges: Mapping[str, Range]) -> Shapes:
    least, optimum, most = (
        tuple(axis if isinstance(axis, int) else ranges[str(axis)][bound] for axis in shape) for bound in range(3)
    )
    return least, optimum, most


def trtexec_line(onnx_path: Path, profile: Profile, engine: str = "model.engine") -> str:
    """Return the `trtexec` command of the same build, to be run in the directory of the ONNX file.

    Since TensorRT 11 every network is strongly typed, and `--stronglyTyped` can be left out.

    >>> trtexec_line(Path("model.onnx"), Profile())  # doctest: +SKIP
    'trtexec --onnx=model.onnx --saveEngine=model.engine --stronglyTyped --minShapes=input_ids:1x1 ...'
    """
    words = ["trtexec", f"--onnx={onnx_path.name}", f"--saveEngine={engine}", "--stronglyTyped"]
    shapes = profile_shapes(onnx_path, profile)
    for number, bound in enumerate(("min", "opt", "max")):
        if shapes:
            extents = ",".join(f"{name}:{'x'.join(map(str, bounds[number]))}" for name, bounds in shapes.items())
            words.append(f"--{bound}Shapes={extents}")
    return shlex.join(words)
