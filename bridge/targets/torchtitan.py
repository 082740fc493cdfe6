"""Target `torchtitan`: the distributed checkpoint that torchtitan starts to train from, in its own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.errors import UsageError
from bridge.planning import Draft, Drafted
from bridge.targets._dcp import HELP, DcpTarget, written_config
from bridge.targets._streamed import write
from bridge.values import Program, Structure, TensorSpec

if TYPE_CHECKING:
    from bridge.conversion import Conversion, Written
    from bridge.quant.scheme import Scheme

ERAS = ("0.3", "0.2")
ZERO_BIAS = "expert_bias is written as zeros: torchtitan balances experts with it in training, the model has none"


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
    loaded_by = (
        Program(
            "torchtitan",
            "0.3.0, and 0.2.2 with `--era 0.2`",
            "its own state-dict adapters make the same tensors; torch 2.13's distributed checkpoint loads them",
            ("tests/targets/test_torchtitan.py",),
        ),
    )

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
        from bridge.dcp.steps import Drafting, as_written, spelled_also
        from bridge.tables.dialect import load_dialect
        from bridge.tables.structure import match_table

        matched, dialect = match_table(draft.config, draft.specs), load_dialect(self.name)
        word = dialect.architectures[matched.architecture]
        spelling = as_written if draft.options.era == ERAS[0] else spelled_also(dialect, "", word)
        drafted = Drafting(draft, dialect, matched, spelling=spelling, biased=True).drafted()
        drafted.notes += [ZERO_BIAS] * any(not step.source for step in drafted.steps)
        return drafted

    def notes(self, structure: Structure, options: TorchtitanOptions) -> tuple[str, ...]:
        return (f"names of torchtitan {options.era}, which looks for them in <dump>/checkpoint/step-<N>",)

    def write(self, conversion: Conversion, directory: Path) -> Written:
        from bridge.dcp.index import index_files

        config = written_config(conversion.plan, conversion.source.config)
        return write(conversion, directory, {"config.json": config, **index_files(conversion.plan.files)})


TARGET = Torchtitan()
