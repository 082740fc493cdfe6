"""What the targets share that write a distributed checkpoint for a training program: plain floats, index, proof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.dcp.index import Chunk, Stored, Tensor, index, slab_of
from bridge.dcp.items import laid_out, object_item
from bridge.dtypes import dtype
from bridge.errors import CannotRun, PlanError, SourceError, UsageError, nearest
from bridge.planning import Plan
from bridge.unified.config import config_json
from bridge.values import Format, Numeric, Site, Structure

if TYPE_CHECKING:
    import numpy as np

    from bridge.sources import Source
    from bridge.tables.dialect import Dialect

FLOATS = ("float32", "bfloat16", "float16")
OBJECTS = "__0_1.distcp"  # what is no tensor
INDEX = ".metadata"
HELP = "fp32, bf16 or fp16 for all weights; default: each keeps its own"


class DcpTarget:
    """See `bridge.targets.Target`; `loader` is the program that trains what is written."""

    loader = ""
    metadata: Mapping[str, str] = {}
    align = 64
    runs = False
    base_memory = 64 << 20  # the index of 30,000 items while it is pickled

    def refuse(self, format_: Format, options: Any) -> str:
        return f"{self.loader} loads plain weights only; convert without quant, or to another target"

    def refuse_kv(self, kv: Numeric, structure: Structure, options: Any) -> str:
        return f"KV cache: {self.loader} reads no scales of it; leave out kv"

    def keeps(self, format_: Format, site: Site) -> str:
        return ""

    def lint(self, directory: Path, plan: Plan) -> list[str]:
        from bridge.dcp.checkpoint import Checkpoint

        try:
            found = Checkpoint(directory, (output.spec for output in plan.outputs)).damaged()
        except SourceError as error:
            found = [str(error)]
        return [f"error [files] {text}" for text in found]

    def audit(self, directory: Path) -> list[str]:
        return []

    def runtime(self, directory: Path) -> Any:
        raise CannotRun(f"{self.loader} runs what it loads, and is not part of this program")

    def damage(
        self, directory: Path, plan: Plan, source: Source, batch: Mapping[str, np.ndarray]
    ) -> tuple[tuple[str, float], ...]:
        return ()

    def checked(self, options: Any, structure: Structure, dialect: Dialect) -> Any:
        """Options with the dtype by its full name; PlanError where the dialect has no layout for the model."""
        if structure.architecture not in dialect.architectures:
            raise PlanError(
                f"{dialect.file.name} has no layout for {structure.architecture}; "
                f"{nearest(structure.architecture, dialect.architectures)}"
            )
        chosen = dtype(options.dtype).name if options.dtype else None
        if chosen not in (None, *FLOATS):
            raise UsageError(f"dtype {chosen!r} is none that weights are trained in; known: fp32, bf16, fp16")
        return replace(options, dtype=chosen)


def written_config(plan: Plan, config: Mapping[str, Any]) -> bytes:
    """config.json of the source, which says what the weights do not; its dtype where another was asked for."""
    chosen = plan.options["dtype"]
    said = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype") or not chosen}
    return config_json(said | ({"dtype": chosen} if chosen else {}), None, False)


def index_files(plan: Plan, objects: Iterable[str] = ()) -> dict[str, bytes]:
    """The index, and the file of objects: each of those is `[None]`, which all share."""
    tensors: dict[str, Tensor] = {}
    for file, specs in plan.files.items():
        for spec, at, item in laid_out(specs):
            slab = slab_of(spec.name)
            offsets = (slab.number, *[0] * (len(spec.shape) - 1))
            chunk = Chunk(offsets, spec.shape, file, at, item.length)
            before = tensors.get(slab.whole, Tensor(slab.of(spec.shape), spec.dtype, ()))
            tensors[slab.whole] = replace(before, chunks=(*before.chunks, chunk))
    content = object_item([None])
    stored = {name: Stored(OBJECTS, 0, len(content)) for name in objects}
    return ({OBJECTS: content} if stored else {}) | {INDEX: index(tensors, stored)}
