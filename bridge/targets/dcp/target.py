"""Base class of targets that write distributed checkpoints for training programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge.core.dtypes import FLOATS, dtype
from bridge.core.errors import CannotRun, PlanError, SourceError, UsageError, VerifyError
from bridge.core.text import nearest
from bridge.core.values import Format, Numeric, Structure
from bridge.planning.drafts import without_promise
from bridge.planning.plan import Plan
from bridge.targets.checkpoint import StreamedTarget
from bridge.targets.config_json import config_json, with_dtype

DRAFTS = "draft layers (MTP): keep, drop; default: keep if {} has them"
HELP = "fp16, bf16, fp32 of all weights; default: each its own"


class DcpTarget(StreamedTarget):
    """See `bridge.targets.Target`; `loader` is the program that loads the checkpoint for training."""

    name: str
    loader: str
    align = 64

    def why_unsupported(self, format_: Format, options: Any) -> str:
        return f"{self.loader} loads plain weights only; convert with quant='none'"

    def why_kv_unsupported(self, kv: Numeric, structure: Structure, options: Any) -> str:
        return f"{self.loader} reads no KV scales; leave out kv"

    def lint(self, directory: Path, plan: Plan) -> list[str]:
        """Findings; VerifyError if the tensors are not those of the plan, since nothing can be compared then."""
        from bridge.streaming.written_dcp import Checkpoint

        try:
            written = Checkpoint(directory, (output.spec for output in plan.outputs))
            differing = written.differing(self.objects(plan))
            findings = written.damaged()
        except SourceError as error:
            differing, findings = [], [str(error)]
        if differing:
            raise VerifyError("\n  ".join([f"{directory} is not what the plan wrote; convert again:", *differing]))
        return [f"error [files] {text}" for text in findings]

    def objects(self, plan: Plan) -> Iterable[str]:
        """Names of objects in the checkpoint that are not tensors."""
        return ()

    def runtime(self, directory: Path) -> Any:
        raise CannotRun(f"only {self.loader} runs this checkpoint, and it is not part of this program")

    def why_no_generator(self, directory: Path) -> str:
        return (
            f"{self.loader} loads this checkpoint to train, and generates no text here; convert the model with "
            "--target hf and run that"
        )

    def resolve(self, options: Any, structure: Structure, scheme: Any, specs: Any) -> Any:
        """Options with the dtype's full name; PlanError if the target's dialect has no layout for the model."""
        from bridge.tables.dialects.dialect import load_dialect
        from bridge.targets.dialect_steps import ANY_CLASS, chosen_drafts

        dialect = load_dialect(self.name)
        if structure.architecture not in dialect.architectures:
            raise PlanError(
                f"{dialect.file.name} has no layout for {structure.architecture}; "
                f"{nearest(structure.architecture, dialect.architectures)}; {ANY_CLASS}"
            )
        chosen = dtype(options.dtype).name if options.dtype else None
        if chosen not in (None, *FLOATS):
            raise UsageError(f"dtype {chosen!r} is not a dtype for trained weights; use fp32, bf16 or fp16")
        why = self.why_no_drafts(bool(dialect.draft_rows(structure.architecture)), options)
        return replace(options, dtype=chosen, drafts=chosen_drafts(options.drafts, scheme, why))

    def why_no_drafts(self, known: bool, options: Any) -> str:
        """Why draft layers have no place here, "" if they have; `known`: the target's dialect has names for them."""
        return "" if known else f"{self.loader}'s model of this class has no place for draft layers"


def written_config(plan: Plan, config: Mapping[str, Any]) -> bytes:
    """The source's config.json, with the dtype of the weights if one was requested."""
    chosen = plan.options["dtype"]
    config = without_promise(config, (output.spec.name for output in plan.outputs))
    return config_json(with_dtype({**config, "dtype": chosen}, chosen) if chosen else config, None, False)
