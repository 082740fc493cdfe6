"""What the targets share that write a distributed checkpoint for a training program: plain floats, index, proof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.dtypes import FLOATS, dtype
from bridge.errors import CannotRun, PlanError, SourceError, UsageError, VerifyError, nearest
from bridge.planning import Plan
from bridge.targets._streamed import Streamed
from bridge.unified.config import config_json
from bridge.values import Format, Numeric, Site, Structure

if TYPE_CHECKING:
    from bridge.tables.dialect import Dialect

HELP = "fp32, bf16 or fp16 for all weights; default: each keeps its own"


class DcpTarget(Streamed):
    """See `bridge.targets.Target`; `loader` is the program that trains what is written."""

    loader = ""
    metadata: Mapping[str, str] = {}
    align = 64

    def refuse(self, format_: Format, options: Any) -> str:
        return f"{self.loader} loads plain weights only; convert with quant='none'"

    def refuse_kv(self, kv: Numeric, structure: Structure, options: Any) -> str:
        return f"{self.loader} reads no scales of it; leave out kv"

    def keeps(self, format_: Format, site: Site) -> str:
        return ""

    def lint(self, directory: Path, plan: Plan) -> list[str]:
        """Findings; VerifyError where tensors are not those of the plan: there is nothing to compare then."""
        from bridge.dcp.checkpoint import Checkpoint

        try:
            written = Checkpoint(directory, (output.spec for output in plan.outputs))
            differing = written.differing(self.objects(plan))
            found = written.damaged()
        except SourceError as error:
            differing, found = [], [str(error)]
        if differing:
            raise VerifyError("\n  ".join([f"{directory} is not what the plan wrote; convert again:", *differing]))
        return [f"error [files] {text}" for text in found]

    def objects(self, plan: Plan) -> Iterable[str]:
        """Names of what is written besides that is no tensor."""
        return ()

    def runtime(self, directory: Path) -> Any:
        raise CannotRun(f"{self.loader} runs what it loads, and is not part of this program")

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
