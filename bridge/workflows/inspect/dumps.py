"""Write tensors of a run: one safetensors file a step and rank.

Each tensor goes to the disk when it is seen; at the end of the step the file is put together and appears by a rename.
Until the inspection is written, files are in NAME.dumps beside it, where a kill leaves those of whole steps.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.core.dtypes import DTYPES, FLOATS
from bridge.core.errors import InspectError, WriteError, disk_is_full, reason
from bridge.core.formats.safetensors import PIECE, RANK, layout
from bridge.core.output.directory import check_disk
from bridge.core.values import TensorSpec
from bridge.quant.codec.arrays import Array
from bridge.sources.memory import bits_of
from bridge.workflows.inspect.collect import Schemes
from bridge.workflows.inspect.layers import CONV, Layer
from bridge.workflows.inspect.routes import Options, Routing
from bridge.workflows.inspect.statistics.coding import Coder, Piece, fake_quantized
from bridge.workflows.inspect.statistics.quantization import Quantization

if TYPE_CHECKING:
    from torch import Tensor

FEATURE = "DumpTensors"
FOLDER = "dumps"  # in the directory of an inspection
STEPS = "step_*.safetensors"
TYPED = ("float8_e4m3fn", "float8_e5m2", "int8")  # dtypes of codes that a safetensors file knows; others are bytes
Stored = tuple[str, Array]  # dtype and storage array


class Dumps:
    """The files of a run. `add` takes tensors of any thread, `end` closes a step, `files` are those of whole steps.

    Files of other runs in the same folder stay; WriteError if one has the name of a step of this run, and if the disk
    is full.
    """

    def __init__(self, path: Path, rank: int = 0) -> None:
        """path: the folder of files, which appears with the first."""
        self.path, self._rank, self._lock = path, rank, threading.Lock()
        self.files: list[str] = []
        self.notes: list[str] = []
        self._step = _Step(self.folder)

    def check_from(self, first: int) -> None:
        """WriteError if a step from `first` on has a file of another run."""
        taken = [path for path in self.folder.glob(STEPS) if path.stem.removeprefix("step_") >= f"{first:06d}"]
        if taken:
            raise _taken(min(taken))

    def add(self, layer: Layer, name: str, tensor: Tensor, options: Options, schemes: Schemes) -> None:
        """Write a tensor; the second of a step with the same name gets _1 behind it."""
        with self._lock:
            for part, stored in _parts(layer, name, tensor, options, schemes):
                self._check(stored[1].nbytes)
                try:
                    self._step.add(f"{layer.name}_{name}", part, *stored)
                except OSError as error:
                    raise self._refused(error) from error
            self._step.seen(f"{layer.name}_{name}", _meaning(layer, name, options, schemes))

    def end(self, step: int) -> None:
        """Close the file of a step; none if nothing was added."""
        with self._lock:
            if self._step.specs:
                path = self.folder / f"step_{step:06d}.safetensors"
                name = f"{FOLDER}/{self.folder.name}/{path.name}"
                if path.exists() and name not in self.files:
                    raise _taken(path)
                try:
                    self._step.write(path)
                except OSError as error:
                    raise self._refused(error) from error
                self.files = [*dict.fromkeys([*self.files, name])]
            self._step.remove()
            self._step = _Step(self.folder)

    def drop(self) -> None:
        """Remove what an unfinished step wrote."""
        with self._lock:
            self._step.remove()
            self._step = _Step(self.folder)

    def gather(self, told: Sequence[tuple[list[str], str]], first: bool) -> None:
        """Collect the files of all ranks, with their machines. The `first` takes those that it sees."""
        if not first:
            self.files = sorted(file for files, _ in told for file in files)
            return
        self.files = []
        for files, machine in told:
            if files and not (self.path / Path(files[0]).relative_to(FOLDER)).exists():
                whose = Path(files[0]).parent.name
                self.notes.append(f"{FEATURE}: files of {whose} are on its own disk, in {FOLDER} there ({machine})")
            else:
                self.files = sorted([*self.files, *files])

    def move(self, directory: Path) -> None:
        """Hand `files` to the directory of an inspection, on the same file system."""
        for name in dict.fromkeys(Path(file).parent.name for file in self.files):
            (directory / FOLDER).mkdir(exist_ok=True)
            (self.path / name).rename(directory / FOLDER / name)

    def keep(self, out: Path) -> None:
        """Put files that the first rank did not take, since it has another disk, where it would have put them."""
        if any(self.folder.glob(STEPS)):
            to = out / FOLDER / self.folder.name
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(to, ignore_errors=True)  # is there with overwrite=True only
            self.folder.rename(to)

    def clear(self) -> None:
        """Remove the folders if they are empty."""
        for folder in (self.folder, self.path):
            with suppress(OSError):
                folder.rmdir()

    def remove(self) -> None:
        """Remove the files of this process that are left beside the inspection."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.clear()

    @property
    def folder(self) -> Path:
        """That of this process."""
        return self.path / f"rank_{self._rank}"

    def _check(self, nbytes: int) -> None:
        """Refuse a tensor that does not fit: it is written twice until its step ends."""
        check_disk(self.path, nbytes + self._step.size + nbytes, FEATURE)

    def _refused(self, error: OSError) -> WriteError:
        text = "the disk is full; free some space" if disk_is_full(error) else reason(error)
        return WriteError(f"{self.path}: a tensor cannot be written: {text}")


def writes(routing: Routing) -> bool:
    """Whether a config has tensors written."""
    return any(route.feature == FEATURE and not route.own for route in routing.routes)


def check_place(routing: Routing, out: Path | None) -> None:
    """InspectError if tensors are to be written and there is no directory."""
    if out is None and writes(routing):
        raise InspectError(f"{FEATURE}: writes the tensors into a directory; pass out= (--out)")


def dumps_of(routing: Routing, out: Path | None, overwrite: bool) -> Dumps | None:
    """Where a session writes tensors; None if it writes none."""
    if out is None or not writes(routing):
        return None
    made = Dumps(out.absolute().with_name(f"{out.name}.{FOLDER}"), rank())
    if not overwrite and (kept := out / FOLDER / made.folder.name).exists():
        raise WriteError(f"{kept}: is of another run; move it away, or overwrite=True")
    if made.folder.exists():
        if not overwrite:
            raise WriteError(f"{made.path}: is left from a loop that was killed; move it away, or overwrite=True")
        shutil.rmtree(made.folder)
    return made


def rank() -> int:
    """This process among those that torch has joined."""
    import torch.distributed as ranks

    return ranks.get_rank() if ranks.is_available() and ranks.is_initialized() else 0


def _taken(path: Path) -> WriteError:
    return WriteError(f"{path}: is of another run, and of a step that this run comes to; move it away")


class _Step:
    """The tensors of one step: bytes by dtype, as the format wants wide ones first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.specs: list[TensorSpec] = []
        self.size = 0
        self._places: list[tuple[int, int, int]] = []  # dtype, begin, bytes of each tensor
        self._files: dict[int, Any] = {}
        self._unfinished: set[Path] = set()
        self._times: Counter[str] = Counter()
        self._about: dict[str, str] = {}

    def add(self, name: str, part: str, dtype: str, bits: Any) -> None:
        kind = RANK[DTYPES[dtype].safetensors]
        if kind not in self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files[kind] = self._begun(self._folder / f".unfinished.{kind}").open("w+b")
        file = self._files[kind]
        begin = file.tell()
        file.write(bits.tobytes())
        self._places.append((kind, begin, bits.nbytes))
        self.specs.append(TensorSpec(f"{self._numbered(name)}.{part}", tuple(bits.shape), dtype))
        self.size += bits.nbytes

    def seen(self, name: str, about: Mapping[str, Any]) -> None:
        self._about[self._numbered(name)] = json.dumps(dict(about), sort_keys=True)
        self._times[name] += 1

    def write(self, path: Path) -> None:
        head, offsets, _ = layout(self.specs, self._about)
        unfinished = self._begun(path.with_name(f".{path.name}"))
        with unfinished.open("wb") as out:
            out.write(head)
            order = sorted(
                zip(self.specs, self._places, strict=True), key=lambda row: (offsets[row[0].name], row[1][2])
            )
            for _, (kind, begin, nbytes) in order:
                self._files[kind].seek(begin)
                for first in range(0, nbytes, PIECE):
                    out.write(self._files[kind].read(min(PIECE, nbytes - first)))
        unfinished.rename(path)

    def remove(self) -> None:
        for file in self._files.values():
            file.close()
        for path in self._unfinished:
            path.unlink(missing_ok=True)

    def _begun(self, path: Path) -> Path:
        """A file that goes at the end of the step."""
        self._unfinished.add(path)
        return path

    def _numbered(self, name: str) -> str:
        return f"{name}_{self._times[name]}" if self._times[name] else name


def _parts(layer: Layer, name: str, tensor: Tensor, options: Options, schemes: Schemes) -> Iterator[tuple[str, Stored]]:
    """What is written of one tensor."""
    own = str(tensor.dtype).removeprefix("torch.")
    if options.high_precision_tensor:
        known = own in DTYPES and DTYPES[own].bits >= 8
        kind = own if known else "float32"
        yield "high_precision", (kind, bits_of(tensor if known else tensor.float(), kind))
    under = schemes.under(options.scheme, layer, name) if options.quantized_tensor else None
    if under and tensor.ndim:
        kind = own if own in FLOATS else "float32"
        bits = bits_of(tensor if own in FLOATS else tensor.float(), kind)
        rows = bits.reshape(len(bits), -1) if layer.kind == CONV else bits
        for part, (dtype, array) in coded(rows, kind, under.how, under.amax).items():
            whole = part in ("quantized", "codes") and array.size == math.prod(bits.shape)
            yield part, (dtype, array.reshape(bits.shape) if whole else array)


def _meaning(layer: Layer, name: str, options: Options, schemes: Schemes) -> dict[str, Any]:
    """The file's word on one tensor, as JSON in its metadata."""
    about: dict[str, Any] = {"layer": layer.name, "role": layer.role, "tensor": name}
    under = schemes.under(options.scheme, layer, name) if options.quantized_tensor else None
    if under:
        session = schemes.session.name if schemes.session else ""
        about |= {"scheme": options.scheme or session, "codes": [numeric.dtype for numeric in under.how.numeric]}
    return about


def coded(bits: Array, dtype: str, how: Quantization, amax: float | None = None) -> Mapping[str, Stored]:
    """The `quantized` float32 values of a tensor of any shape, its `codes`, one byte each, and their `scales`.

    quantized = codes * scales; each scale is of as many rows and columns as there are codes for it. `scale_2` is what
    formats of two steps (int4 in FP8) have besides; ggml's blocks hold their scales, and have no `scales`. Numbers that
    are not finite stay as they are in `quantized`, and have the code of zero.

    bits: its storage array.  amax: static; without it, `how.amax`, or that of the tensor.
    """
    codes: list[Array] = []
    scales: list[Array] = []
    above: Array | None = None

    def see(by: Coder, piece: Piece) -> None:
        """Copy what a piece has: its arrays are reused by the next."""
        nonlocal above
        codes.append(np.array(piece.codes).reshape(len(piece.bits), -1))
        if piece.scale.size and (by.blocks.down < by.blocks.rows or not scales):  # one of all rows comes with each
            scales.append(np.array(by.factors(piece)))
        above = piece.above

    values = fake_quantized(bits, dtype, how, amax, see)
    first = how.numeric[0]
    kind = first.dtype if first.dtype in TYPED else "uint8"
    whole = np.concatenate(codes)
    shape = bits.shape if math.prod(bits.shape) == whole.size else whole.shape
    found: dict[str, Stored] = {
        "quantized": ("float32", values),
        "codes": (kind, whole.view(np.int8 if kind == "int8" else np.uint8).reshape(shape)),
    }
    if scales:
        found["scales"] = ("float32", np.concatenate(scales).astype(np.float32))
    if len(how.numeric) > 1 and above is not None:
        found["scale_2"] = ("float32", np.asarray(above, np.float32).reshape(1, 1))
    return found
