"""Look through a checkpoint for every fault that its headers, JSON and scalars show."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from bridge.core.errors import SourceError
from bridge.workflows.doctor import model, modules, scales
from bridge.workflows.doctor.checkpoint import Checkpoint, open_checkpoint
from bridge.workflows.doctor.finding import Finding

RULES = (
    model.files, model.memory_names, modules.leftover, modules.parts, modules.ignore_lists, scales.global_scales,
    scales.input_scales, scales.cache_scales, model.draft_layers, model.output_head, modules.ranks,
)  # fmt: skip
# what `bridge.targets.hf.lint` says of the same faults, in fewer words
_SAID = re.compile(r"error \[(index|drafts|ignore|kv|tensors)\] |.*: input_scale is missing|error \[scale\] .*input_")


def examine(checkpoint: Checkpoint) -> list[Finding]:
    """The findings of all rules, in their order."""
    return [finding for rule in RULES for finding in rule(checkpoint)]


def examined(directory: Path) -> list[Finding]:
    """The findings of a directory; none if its files cannot be read, which the linter reports."""
    try:
        return examine(open_checkpoint(directory))
    except SourceError:
        return []


def others(lines: Iterable[str], findings: Iterable[Finding]) -> list[str]:
    """The linter's lines that no finding says."""
    return [line for line in lines if not (any(findings) and _SAID.match(line))]
