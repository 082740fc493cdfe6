"""Target `tripy`: the state dict that a quantized `nvtripy` model loads, strictly, and the loader.

Tensors keep the checkpoint's names, which are those of Tripy's own examples, so an architecture needs no table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.dtypes import FLOATS, dtype
from bridge.errors import UsageError, nearest
from bridge.planning import Draft, Drafted, Plan
from bridge.targets._streamed import Streamed, main_dtype, write
from bridge.values import Format, Numeric, Program, Site, Structure, TensorSpec

if TYPE_CHECKING:
    from bridge.conversion import Conversion, Written
    from bridge.quant.scheme import Scheme


@dataclass(frozen=True)
class TripyOptions:
    """Options of target `tripy`."""

    dtype: str | None = field(
        default=None, metadata={"help": "fp32, fp16 or bf16 of the module; default: the source's"}
    )
    linear: bool = field(
        default=False, metadata={"help": "int4: refit in blocks along `out`, which plain tp.Linear holds, at a loss"}
    )


class Tripy(Streamed):
    """See `bridge.targets.Target`."""

    name = "tripy"
    writes = ("model.safetensors", "config.json")
    loads = writes
    metadata: Mapping[str, str] = {"format": "pt"}
    Options = TripyOptions
    loaded_by = (
        Program(
            "Tripy (`nvtripy`)",
            "0.1.7",
            "its own modules load the state dict, strictly, and trace it; its compiled runtime, which PyPI does not "
            "have, is a stand-in there: no engine was run",
            ("tests/targets/test_tripy_parity.py", "tests/tripy/test_parity.py", "tests/tripy/test_loading.py"),
        ),
    )

    def resolve(
        self, options: TripyOptions, structure: Structure, scheme: Scheme | None, specs: Mapping[str, TensorSpec]
    ) -> TripyOptions:
        chosen = dtype(options.dtype).name if options.dtype else main_dtype(specs)
        if chosen not in FLOATS:
            raise UsageError(f"dtype {chosen!r} cannot be a Tripy module's; {nearest(chosen, FLOATS)}")
        return dataclasses.replace(options, dtype=chosen)

    def refuse(self, format_: Format, options: TripyOptions) -> str:
        from bridge.tripy.formats import refuse

        return refuse(format_, options.linear)

    def refuse_kv(self, kv: Numeric, structure: Structure, options: TripyOptions) -> str:
        return "Tripy has no cache module, so nothing would read its scales; leave out kv"

    def keeps(self, format_: Format, site: Site) -> str:
        return "convolution: tp.Conv takes no quantization" if site.layout == "conv" else ""

    def draft(self, draft: Draft) -> Drafted:
        from bridge.tripy.ready import no_ready_module
        from bridge.tripy.steps import drafted

        return dataclasses.replace(drafted(draft), notes=[note for note in [no_ready_module(draft.config)] if note])

    def notes(self, structure: Structure, options: TripyOptions) -> tuple[str, ...]:
        return (
            "weights are floats on disk, as Tripy wants them: TensorRT makes the codes when the module is compiled",
        )

    def lint(self, directory: Path, plan: Plan) -> list[str]:
        from bridge.tripy.lint import lint

        return lint(directory)

    def audit(self, directory: Path) -> list[str]:
        from bridge.tripy.lint import audit

        return audit(directory)

    def runtime(self, directory: Path) -> Any:
        from bridge.tripy.runtime import Runtime

        return Runtime(directory)

    def write(self, conversion: Conversion, directory: Path) -> Written:
        from bridge.tripy.config import config_file

        config = config_file(conversion.plan, conversion.source.config)
        return write(conversion, directory, {"config.json": config})


def load(directory: str | Path, module: Any) -> None:
    """Fill a `tp.Module` with a directory that target `tripy` wrote; see `bridge.tripy.loading.load`."""
    from bridge.tripy.loading import load as fill

    fill(directory, module)


def build(directory: str | Path) -> Any:
    """Return the ready `tp.Module` of a written directory, loaded; UsageError names the architectures that have one."""
    from bridge.tripy.building import build as make
    from bridge.tripy.loading import load as fill

    module = make(directory)
    fill(directory, module)
    return module


TARGET = Tripy()
