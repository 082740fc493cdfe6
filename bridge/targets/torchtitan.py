"""Target `torchtitan`: the distributed checkpoint that torchtitan starts to train from, in its own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.errors import UsageError
from bridge.planning import Draft, Drafted
from bridge.targets._dcp import HELP, DcpTarget, index_files, written_config
from bridge.targets._streamed import write
from bridge.values import Structure, TensorSpec

if TYPE_CHECKING:
    from bridge.conversion import Conversion, Written
    from bridge.quant.scheme import Scheme
    from bridge.tables.dialect import Dialect, DialectRow

ERAS = ("0.3", "0.2")
NO_BIAS = (
    "torchtitan's Qwen3-MoE has an expert_bias that balances experts in training; the model has none, nor has what "
    "torchtitan converts itself: load with allow_partial_load, or build the model with load_balance_coeff=None"
)


@dataclass(frozen=True)
class TorchtitanOptions:
    """Options of target `torchtitan`."""

    era: str = field(default=ERAS[0], metadata={"help": f"whose names: torchtitan {' or '.join(ERAS)}"})
    dtype: str | None = field(default=None, metadata={"help": HELP})


class Torchtitan(DcpTarget):
    """See `bridge.targets.Target`."""

    name = "torchtitan"
    loader = "torchtitan"
    writes = (".metadata", "__*.distcp", "config.json")
    loads = (".metadata", "__*.distcp")
    Options = TorchtitanOptions

    def resolve(
        self,
        options: TorchtitanOptions,
        structure: Structure,
        scheme: Scheme | None,
        specs: Mapping[str, TensorSpec],
    ) -> TorchtitanOptions:
        from bridge.tables.dialect import load_dialect

        if str(options.era) not in ERAS:
            raise UsageError(f"era {options.era!r} is unknown; known: {', '.join(ERAS)}")
        checked: TorchtitanOptions = self.checked(options, structure, load_dialect(self.name))
        return checked

    def draft(self, draft: Draft) -> Drafted:
        from bridge.dcp.steps import Drafting, as_written
        from bridge.tables.dialect import load_dialect
        from bridge.tables.structure import match_table

        matched, dialect = match_table(draft.config, draft.specs), load_dialect(self.name)
        word = dialect.architectures[matched.architecture]
        spelling = as_written if draft.options.era == ERAS[0] else lambda row: _of_old(row, dialect, word)
        return Drafting(draft, dialect, matched, spelling=spelling).drafted()

    def notes(self, structure: Structure, options: TorchtitanOptions) -> tuple[str, ...]:
        said = (f"names of torchtitan {options.era}, which looks for them in <dump>/checkpoint/step-<N>",)
        return said + (NO_BIAS,) * (structure.architecture == "Qwen3MoeForCausalLM")

    def write(self, conversion: Conversion, directory: Path) -> Written:
        config = written_config(conversion.plan, conversion.source.config)
        return write(conversion, directory, {"config.json": config, **index_files(conversion.plan)})


def _of_old(row: DialectRow, dialect: Dialect, word: str) -> DialectRow:
    """What torchtitan 0.2 called the same, which the table has to read it."""
    old = (other for other in dialect.rows if not other.written and other.only in ("", word))
    return next((other for other in old if other.roles == row.roles), row)


TARGET = Torchtitan()
