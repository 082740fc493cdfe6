"""Metadata of a model card: the lines on top, for the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from bridge.reporting.report import Report
from bridge.targets.tasks import tasks

FENCE = "---"
_KEY = re.compile(r"([A-Za-z_][\w-]*):")
_HUB_ID = re.compile(r"(?!\.)[\w.-]+/(?!\.)[\w.-]+(@[\w./-]+)?")
_CACHED = re.compile(r"/models--(?P<org>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/")
LIBRARIES = {"hf": "transformers", "mlx": "mlx"}  # of the hub's list; the files of other targets are no library's
# The hub's word for a task of mappings/tasks.toml, if it is another one. Source: huggingface.js, `pipelines.ts`.
PIPELINES = {
    "causal-lm": "text-generation", "seq2seq-lm": "text-generation", "speech-seq2seq": "automatic-speech-recognition",
    "ctc": "automatic-speech-recognition", "semantic-segmentation": "image-segmentation",
    "universal-segmentation": "image-segmentation", "pose-estimation": "keypoint-detection",
    "sequence-classification": "text-classification", "masked-lm": "fill-mask",
}  # fmt: skip
NONE = ("masked-image-modeling", "masked-autoencoding", "denoising", "zero-shot-audio-classification",
        "zero-shot-image-segmentation")  # fmt: skip


def metadata(report: Report) -> dict[str, str]:
    """What the hub should know of a written model: its base if that is on the hub, its task, who quantized it."""
    base = hub_id(report.made_from.get("source", ""))
    known = {
        "base_model": base,
        "base_model_relation": "quantized" if base and report.quantized else "",
        "library_name": LIBRARIES.get(report.target, ""),
        "pipeline_tag": pipeline(report.made_from.get("architecture", "")),
        "quantized_by": "qbridge" if report.quantized else "",
    }
    return {name: value for name, value in known.items() if value}


def hub_id(source: str) -> str:
    """The id on the hub of a source that was named so, or lies in the hub's cache; "" for others.

    >>> hub_id("org/name@main"), hub_id("~/.cache/huggingface/hub/models--org--name/snapshots/1a2b")
    ('org/name', 'org/name')
    """
    if cached := _CACHED.search(source):
        return f"{cached['org']}/{cached['name']}"
    return source.partition("@")[0] if _HUB_ID.fullmatch(source) and not Path(source).exists() else ""


def pipeline(architecture: str) -> str:
    """The hub's word for what a class does; "" for one that has none.

    >>> pipeline("LlamaForCausalLM"), pipeline("BertForMaskedLM"), pipeline("Unknown")
    ('text-generation', 'fill-mask', '')
    """
    endings = ((name, ending) for name, task in tasks().items() for ending in task.classes)
    name = next((name for name, ending in endings if architecture.endswith(ending)), "")
    return "" if name in NONE else PIPELINES.get(name, name)


def with_metadata(card: str, values: Mapping[str, str]) -> str:
    """A card whose metadata have these values; all other lines stay, the license of the source among them.

    >>> with_metadata("---\\nlicense: mit\\n---\\n# A", {"quantized_by": "qbridge"})
    '---\\nlicense: mit\\nquantized_by: qbridge\\n---\\n# A'
    """
    top, text = _parted(card)
    kept, own = [], False
    for line in top:
        key = _KEY.match(line)
        own = key[1] in values if key else own and (not line.strip() or line[0] in " -")
        kept += [] if own else [line]
    lines = [FENCE, *kept, *(f"{name}: {_scalar(value)}" for name, value in values.items()), FENCE]
    return "\n".join(lines) + "\n" + text if kept or values else card


def _parted(card: str) -> tuple[list[str], str]:
    """The lines of a card's metadata, and the text after them."""
    lines = card.removeprefix("\ufeff").splitlines(keepends=True)
    if not lines or lines[0].rstrip() != FENCE:
        return [], card
    end = next((at for at, line in enumerate(lines[1:], 1) if line.rstrip() == FENCE), None)
    if end is None:
        return [], card
    return [line.rstrip("\r\n") for line in lines[1:end]], "".join(lines[end + 1 :])


def _scalar(value: str) -> str:
    """A string of YAML: as it is if it cannot be read as anything else."""
    return value if re.fullmatch(r"[A-Za-z][\w./-]*", value) and value.lower() not in _WORDS else json.dumps(value)


_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")  # of YAML 1.1
