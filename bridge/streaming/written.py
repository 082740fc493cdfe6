"""Read the tensors of a finished output, whole or by rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bridge.core.arrays import Buffers
from bridge.core.errors import VerifyError
from bridge.core.formats.gguf import COMPUTED, GgufFile
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.output.names import DISTCP, GGUF
from bridge.core.text import fold_layers
from bridge.planning.plan import Output, Plan
from bridge.quant.codec.arrays import Array

if TYPE_CHECKING:
    from bridge.streaming.written_dcp import Checkpoint


class OutputReader:
    """The tensors of a plan in the files of a directory; VerifyError if one is missing or is not the plan's."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self._files = {name: open_written(directory / name, plan) for name in plan.files}
        for name, file in self._files.items():
            planned = {spec.name: spec for spec in plan.files[name]}
            missing = [tensor for tensor in planned if tensor not in file.specs]
            more = [tensor for tensor in file.specs if tensor not in planned and tensor not in COMPUTED]
            if missing or more:
                both = {"lacks": missing, "also holds": more}
                problems = [f"{verb} {', '.join(fold_layers(names)[:8])}" for verb, names in both.items() if names]
                raise VerifyError(f"{directory / name} {' and '.join(problems)}: not what the plan wrote")

    def read(self, output: Output) -> Array:
        """The storage array of one tensor."""
        return self._files[output.file].read(output.spec.name)

    def rows(self, output: Output, first: int, stop: int, of: int, buffers: Buffers) -> Array:
        """The bytes of rows `first` to `stop` of a tensor of `of` equal rows; the next call reuses their memory."""
        begin, end = (output.spec.nbytes * row // max(of, 1) for row in (first, stop))
        out = buffers.take(f"written {output.part}", (end - begin,), np.uint8)
        return self._files[output.file].read_bytes(output.spec.name, begin, end, out)


def open_written(path: Path, plan: Plan) -> SafetensorsFile | GgufFile | Checkpoint:
    """Open one weight file of a plan to read its tensors by name."""
    if path.suffix == GGUF:
        return GgufFile(path)
    if path.suffix != DISTCP:
        return SafetensorsFile(path)
    from bridge.streaming.written_dcp import Checkpoint  # and with it the readers of foreign checkpoints

    return Checkpoint(path.parent, plan.files[path.name])
