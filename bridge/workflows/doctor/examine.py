"""Look through a checkpoint for every fault.

Headers, JSON and scalars are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from bridge.core.errors import SourceError
from bridge.planning.contract_files import load_runtime
from bridge.targets.hf.lint import ABSENT, lint
from bridge.verification.finite import with_values
from bridge.workflows.doctor import model, modules, scales, weight_scales
from bridge.workflows.doctor.checkpoint import Checkpoint, open_checkpoint
from bridge.workflows.doctor.finding import SERVING, Finding

RULES = (
    model.files, model.memory_names, modules.leftover, modules.parts, modules.ignore_lists, weight_scales.weight_scales,
    scales.global_scales, scales.input_scales, scales.cache_scales, model.draft_layers, model.output_head,
    modules.ranks,
)  # fmt: skip
SAID = ("index", "drafts", "ignore", "kv", "tensors", "input_scale", "leftover")  # codes of `bridge.targets.hf.lint`
_CODE, _SECOND = re.compile(r"error \[(.+?)\] "), re.compile(r"^error \[scale\] .*weight_scale_2: ")


def examine(checkpoint: Checkpoint) -> list[Finding]:
    """The findings of all rules, in their order."""
    found = [finding for rule in RULES for finding in rule(checkpoint)]
    clear = not any(finding.fatal or finding.rule == "unread" for finding in found)
    return found + ([*model.fit(checkpoint)] if clear else [])


def examined(directory: Path) -> list[Finding] | None:
    """The findings of a directory; None if its files cannot be read, which the linter reports."""
    try:
        return [finding.at(directory) for finding in examine(open_checkpoint(directory))]
    except SourceError:
        return None


def lines(checkpoint: Checkpoint) -> list[str]:
    """What the linter says beside the findings, and the tensors that hold NaN or infinity."""
    return others(with_values(lint(checkpoint.directory), checkpoint.files.values()))


def served(directory: Path) -> str:
    """Which programs load the formats of a directory, by their contracts, and why others do not; "" if it has none."""
    checkpoint = open_checkpoint(directory)
    formats = {weight.format for weight in checkpoint.modules.values()}
    if not formats:
        return ""
    spelled = {"fp8": "deepseek"}.get(checkpoint.method, checkpoint.method)
    architecture = str((checkpoint.config.get("architectures") or [""])[0])
    loading: list[str] = []
    refused: list[str] = []
    for runtime in map(load_runtime, SERVING):
        contract = next((c for c in runtime.contracts if c.target == "hf" and c.options.get("format") == spelled), None)
        unknown = runtime.mistakes.get(spelled, f"no contract is about {spelled}")
        why = contract.lacks(formats, architecture) if contract else unknown
        (refused if why else loading).append(f"{runtime.title}: {why}" if why else runtime.title)
    named = ", ".join(loading) or "no program that a contract is about"
    return "; ".join([f"loads in {named}", *(f"not in {text}" for text in refused)])


def others(told: Iterable[str]) -> list[str]:
    """The linter's lines on what no rule looks at; vLLM and SGLang read config.json before hf_quant_config.json."""
    told = [line for line in told if line != ABSENT]
    return [line for line in told if not ((code := _CODE.match(line)) and (code[1] in SAID or _SECOND.search(line)))]
