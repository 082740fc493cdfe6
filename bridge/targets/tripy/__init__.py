"""Target `tripy`: state dict of a quantized `nvtripy` model, and its loader.

Tensors keep the checkpoint's names, which Tripy's own examples use as well, so an architecture needs no table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.values import Format, Numeric, Program, Site, Structure, TensorSpec
from bridge.planning.plan import Plan
from bridge.planning.target import Draft, Drafted
from bridge.targets.checkpoint import StreamedTarget, float_dtype, option, write_checkpoint
from bridge.targets.tripy.formats import why_unsupported

if TYPE_CHECKING:
    from bridge.quant.schemes.scheme import Scheme
    from bridge.streaming.context import ConversionContext, WriteResult


@dataclass(frozen=True)
class TripyOptions:
    """Options of target `tripy`."""

    dtype: str | None = option(None, "fp16, bf16, fp32 of the module; default: source's")
    linear: bool = option(False, "int4: quantize in blocks along `out`, which plain tp.Linear can hold, at a loss")


class Tripy(StreamedTarget):
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
            "its own modules load the state dict, strictly, and trace it; its compiled runtime, which is not on PyPI, "
            "was replaced by a stand-in: no engine was run",
            (
                "tests/targets/tripy/test_tripy_parity.py",
                "tests/targets/tripy/test_parity.py",
                "tests/targets/tripy/test_loading.py",
            ),
        ),
    )

    def resolve(
        self, options: TripyOptions, structure: Structure, scheme: Scheme | None, specs: Mapping[str, TensorSpec]
    ) -> TripyOptions:
        return dataclasses.replace(options, dtype=float_dtype(options.dtype, specs, "of Tripy modules"))

    def why_unsupported(self, format_: Format, options: TripyOptions) -> str:
        return why_unsupported(format_, options.linear)

    def why_kv_unsupported(self, kv: Numeric, structure: Structure, options: TripyOptions) -> str:
        return "Tripy has no cache module, so nothing would read the KV scales; leave out kv"

    def why_kept(self, format_: Format, site: Site) -> str:
        return "convolution: tp.Conv has no quantization" if site.layout == "conv" else ""

    def draft(self, draft: Draft) -> Drafted:
        from bridge.targets.tripy.models.build import no_ready_module
        from bridge.targets.tripy.steps import drafted

        return dataclasses.replace(drafted(draft), notes=[note for note in [no_ready_module(draft.config)] if note])

    def notes(self, structure: Structure, options: TripyOptions) -> tuple[str, ...]:
        return ("weights are floats on disk, as Tripy needs them: TensorRT quantizes them when the module is compiled",)

    def next_command(self, plan: Plan) -> str:
        return "python -c 'import bridge, sys; bridge.targets.tripy.build(sys.argv[1])' {out}"

    def lint(self, directory: Path, plan: Plan) -> list[str]:
        from bridge.targets.tripy.lint import lint

        return lint(directory)

    def audit(self, directory: Path) -> list[str]:
        from bridge.targets.tripy.lint import audit

        return audit(directory)

    def why_no_generator(self, directory: Path) -> str:
        return (
            "Tripy runs it on an NVIDIA GPU: bridge.targets.tripy.build and load make the module, and "
            "examples/tripy_generate.py generates with it"
        )

    def runtime(self, directory: Path) -> Any:
        from bridge.targets.tripy.runtime import Runtime

        return Runtime(directory)

    def write(self, context: ConversionContext, directory: Path) -> WriteResult:
        from bridge.targets.tripy.section import config_file

        config = config_file(context.plan, context.source.config)
        return write_checkpoint(context, directory, {"config.json": config})


def load(directory: str | Path, module: Any) -> None:
    """Load a directory that target `tripy` wrote into a `tp.Module`; see `bridge.targets.tripy.loading.load`."""
    from bridge.targets.tripy.loading import load as fill

    fill(directory, module)


def build(directory: str | Path) -> Any:
    """Return the ready `tp.Module` of a written directory, loaded; UsageError names the architectures that have one."""
    from bridge.targets.tripy.models.build import build as make

    module = make(directory)
    load(directory, module)
    return module


TARGET = Tripy()
