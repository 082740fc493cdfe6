"""Target `megatron`: the distributed checkpoint (`torch_dist`) that Megatron-Core and Megatron-Bridge load."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bridge.errors import UsageError, nearest
from bridge.planning import Draft, Drafted, Plan
from bridge.targets._dcp import HELP, DcpTarget, written_config
from bridge.targets._streamed import write
from bridge.values import Program, Structure, TensorSpec

if TYPE_CHECKING:
    from pathlib import Path

    from bridge.conversion import Conversion, Written
    from bridge.quant.scheme import Scheme

SPECS = ("te", "local")
# What a loader looks for beside the weights; `checkpoint_version` says that QKV is interleaved by groups.
BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
COMMON = {"checkpoint_version": 3.0, "iteration": 0}


@dataclass(frozen=True)
class MegatronOptions:
    """Options of target `megatron`."""

    vocab_multiple: int = field(
        default=128, metadata={"help": "the vocabulary is padded to a multiple of this, times the ranks that share it"}
    )
    spec: str = field(
        default=SPECS[0], metadata={"help": "whose modules have a state: te (Transformer Engine) or local"}
    )
    dtype: str | None = field(default=None, metadata={"help": HELP})


class Megatron(DcpTarget):
    """See `bridge.targets.Target`."""

    name = "megatron"
    loader = "Megatron-Core"
    writes = (".metadata", "__*.distcp", "common.pt", "metadata.json", "run_config.yaml", "config.json")
    loads = (".metadata", "__*.distcp", "common.pt", "metadata.json")
    Options = MegatronOptions
    loaded_by = (
        Program(
            "Megatron-Core",
            "0.16.1",
            "`dist_checkpointing.load`, strict, on gloo and a CPU; its own forward answers as the model did",
            ("tests/targets/test_megatron.py",),
        ),
        Program(
            "Megatron-Bridge",
            "0.3.1",
            "its own mapping of names gives the same tensors, and its run_config.yaml says the same of the model",
            ("tests/targets/test_megatron.py",),
        ),
    )

    def resolve(
        self, options: MegatronOptions, structure: Structure, scheme: Scheme | None, specs: Mapping[str, TensorSpec]
    ) -> MegatronOptions:
        from bridge.tables.dialect import load_dialect

        multiple = options.vocab_multiple
        if not isinstance(multiple, int) or isinstance(multiple, bool) or multiple < 1:
            raise UsageError(f"vocab_multiple={multiple!r} must be a whole number, at least 1")
        if options.spec not in SPECS:
            raise UsageError(f"spec {options.spec!r} is unknown; {nearest(options.spec, SPECS)}")
        checked: MegatronOptions = self.checked(options, structure, load_dialect(self.name))
        return checked

    def draft(self, draft: Draft) -> Drafted:
        from bridge.dcp.megatron import Layout

        return Layout(draft.config, draft.specs, draft.options.vocab_multiple).drafted(draft)

    def notes(self, structure: Structure, options: MegatronOptions) -> tuple[str, ...]:
        states = "of Transformer Engine's" if options.spec == "te" else "of Megatron-Core's own"
        return (f"_extra_state is written for the modules {states} spec, empty: a strict load asks for it",)

    def objects(self, plan: Plan) -> Iterable[str]:
        from bridge.dcp.megatron import extra_states

        return extra_states(plan)

    def lint(self, directory: Path, plan: Plan) -> list[str]:
        from bridge.dcp.megatron import lint

        return [*super().lint(directory, plan), *lint(directory)]

    def write(self, conversion: Conversion, directory: Path) -> Written:
        from bridge.dcp.index import index_files
        from bridge.dcp.items import object_item
        from bridge.dcp.megatron import Layout

        plan, source = conversion.plan, conversion.source
        layout = Layout(source.config, source.specs, plan.options["vocab_multiple"])
        beside: dict[str, bytes] = {
            "common.pt": object_item(COMMON),
            "metadata.json": json.dumps(BACKENDS).encode(),
            "config.json": written_config(plan, source.config),
            "run_config.yaml": layout.run_config(plan),
        }
        return write(conversion, directory, beside | index_files(plan.files, self.objects(plan)))


TARGET = Megatron()
