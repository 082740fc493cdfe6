"""Target `megatron`: the distributed checkpoint (`torch_dist`) that Megatron-Core and Megatron-Bridge load."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.core.errors import UsageError
from bridge.core.text import nearest
from bridge.core.values import Program, Structure
from bridge.planning.plan import Plan
from bridge.planning.target import Draft, Drafted
from bridge.targets.checkpoint import option, write_checkpoint
from bridge.targets.dcp.target import DRAFTS, HELP, DcpTarget, written_config

if TYPE_CHECKING:
    from pathlib import Path

    from bridge.streaming.context import ConversionContext, WriteResult

SPECS = ("te", "local")
# What a loader reads besides the weights. `checkpoint_version` 3 means that QKV is interleaved by groups.
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

    vocab_multiple: int = option(128, "pad the vocabulary to a multiple of this, times the ranks that share it")
    spec: str = option(SPECS[0], "layer spec whose modules get _extra_state: te or local")
    dtype: str | None = option(None, HELP)
    drafts: str | None = option(None, DRAFTS.format("its model"))


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
            "`dist_checkpointing.load`, strict, on gloo and a CPU; its own forward gives the model's outputs",
            ("tests/targets/dcp/test_megatron.py",),
        ),
        Program(
            "Megatron-Bridge",
            "0.3.1",
            "its own name mapping gives the same tensors, and its run_config.yaml describes the same model",
            ("tests/targets/dcp/test_megatron.py",),
        ),
    )

    def resolve(self, options: MegatronOptions, structure: Structure, scheme: Any, specs: Any) -> Any:
        multiple = options.vocab_multiple
        if not isinstance(multiple, int) or isinstance(multiple, bool) or multiple < 1:
            raise UsageError(f"vocab_multiple={multiple!r} must be a whole number, at least 1")
        if options.spec not in SPECS:
            raise UsageError(f"spec {options.spec!r} is unknown; {nearest(options.spec, SPECS)}")
        return super().resolve(options, structure, scheme, specs)

    def next_command(self, plan: Plan) -> str:
        return "torchrun pretrain_gpt.py --load {out} --ckpt-format torch_dist --finetune ..."

    def draft(self, draft: Draft) -> Drafted:
        from bridge.targets.dcp.megatron_layout import Layout

        return Layout(draft.config, draft.specs, draft.options.vocab_multiple).drafted(draft)

    def notes(self, structure: Structure, options: MegatronOptions) -> tuple[str, ...]:
        owner = "Transformer Engine's" if options.spec == "te" else "Megatron-Core's own"
        return (f"_extra_state is written, empty, for the modules of {owner} spec: a strict load needs it",)

    def objects(self, plan: Plan) -> Iterable[str]:
        from bridge.targets.dcp.megatron_layout import extra_states

        return extra_states(plan)

    def lint(self, directory: Path, plan: Plan) -> list[str]:
        from bridge.targets.dcp.megatron_layout import lint

        return [*super().lint(directory, plan), *lint(directory)]

    def write(self, context: ConversionContext, directory: Path) -> WriteResult:
        from bridge.core.formats.dcp_index import index_files
        from bridge.core.formats.dcp_items import object_item
        from bridge.targets.dcp.megatron_layout import Layout

        plan, source = context.plan, context.source
        layout = Layout(source.config, source.specs, plan.options["vocab_multiple"])
        metadata_files: dict[str, bytes] = {
            "common.pt": object_item(COMMON),
            "metadata.json": json.dumps(BACKENDS).encode(),
            "config.json": written_config(plan, source.config),
            "run_config.yaml": layout.run_config(plan),
        }
        return write_checkpoint(context, directory, metadata_files | index_files(plan.files, self.objects(plan)))


TARGET = Megatron()
