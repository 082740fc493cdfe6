"""Which head of an architecture is exported: the one table of tasks, and a config's task and class; builds no model.

`trust_remote_code` is never on: only architectures inside transformers are known here.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from bridge.errors import ExportError, UsageError, nearest


@dataclass(frozen=True)
class Task:
    """One exported head: the auto-mapping in transformers that lists its classes, its inputs and its outputs."""

    mapping: str
    inputs: tuple[str, ...]  # those that the model's `forward` lacks are left out
    outputs: tuple[str, ...]  # those that the model does not return are left out
    cached: bool = False


_DECODER = ("input_ids", "attention_mask", "position_ids")
_TEXT = ("input_ids", "attention_mask", "token_type_ids")
TASKS: dict[str, Task] = {
    "causal-lm": Task("MODEL_FOR_CAUSAL_LM_MAPPING", _DECODER, ("logits",), cached=True),
    "sequence-classification": Task("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", _TEXT, ("logits",)),
    "token-classification": Task("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING", _TEXT, ("logits",)),
    "question-answering": Task("MODEL_FOR_QUESTION_ANSWERING_MAPPING", _TEXT, ("start_logits", "end_logits")),
    "masked-lm": Task("MODEL_FOR_MASKED_LM_MAPPING", _TEXT, ("logits",)),
    "image-classification": Task("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", ("pixel_values",), ("logits",)),
    "feature-extraction": Task(
        "MODEL_MAPPING", (*_TEXT, "pixel_values"), ("last_hidden_state", "pooler_output")
    ),
}  # fmt: skip


def resolve_config(config: Any) -> Any:
    """Return a private copy of a transformers config; a dict is what `config.json` holds."""
    import transformers
    from transformers import CONFIG_MAPPING, PretrainedConfig

    if isinstance(config, PretrainedConfig):
        return copy.deepcopy(config)
    kind = config.get("model_type")
    if kind is None:
        raise ExportError(
            "config has no `model_type`: transformers cannot tell the architecture; add it to config.json"
        )
    if kind not in CONFIG_MAPPING:
        raise ExportError(
            f"model_type {kind!r} is not in transformers {transformers.__version__}, which is installed here; "
            "upgrade transformers if the architecture is newer (code from the hub is never run)"
        )
    # An infinity is no JSON: config.json has {"__float__": "Infinity"} in its place.
    return CONFIG_MAPPING[kind].from_dict(PretrainedConfig._decode_special_floats(dict(config)))


def infer_task(config: Any, task: str | None) -> str:
    """Return `task` checked, or the task whose auto-mapping lists the config's first architecture."""
    if task is not None:
        if task not in TASKS:
            raise UsageError(f"task {task!r} is unknown; {nearest(task, TASKS)}")
        return task
    name = (getattr(config, "architectures", None) or [None])[0]
    if name is None:
        raise UsageError(f"the config names no `architectures`, so give the task; known: {', '.join(sorted(TASKS))}")
    for known, entry in TASKS.items():
        if name in _classes(config, entry):
            return known
    raise UsageError(
        f"architecture {name!r} ({config.model_type}) belongs to no task that can be exported; "
        f"known: {', '.join(sorted(TASKS))}"
    )


def model_class(config: Any, task: str) -> Any:
    """Return the transformers class to build: the named architecture where the task lists it, else the task's own."""
    listed = _classes(config, TASKS[task])
    if not listed:
        have = [known for known, entry in TASKS.items() if _classes(config, entry)]
        raise UsageError(
            f"{config.model_type!r} has no {task} head in transformers; it has: {', '.join(have) or 'none'}"
        )
    name = (getattr(config, "architectures", None) or [None])[0]
    return listed.get(name) or next(iter(listed.values()))


def _classes(config: Any, task: Task) -> dict[str, Any]:
    from transformers.models.auto import modeling_auto

    found = getattr(modeling_auto, task.mapping).get(type(config), ())
    return {c.__name__: c for c in (found if isinstance(found, tuple) else (found,))}
