"""Task and class of a config.

`trust_remote_code` is never on: only architectures inside transformers are known.
"""

from __future__ import annotations

from typing import Any

from bridge.core.errors import UsageError
from bridge.core.text import nearest
from bridge.targets.tasks import Task, tasks, why_without


def choose_task(requested: str | None, architecture: str) -> str:
    """The task to export; UsageError if the checkpoint has no head for it."""
    own = next((name for name, task in tasks().items() if architecture.endswith(task.classes)), None)
    if requested is not None and requested not in tasks():
        raise UsageError(f"task {requested!r} is unknown; {nearest(requested, tasks())}")
    if requested is not None and own == "denoising" and requested != own:
        raise UsageError(f"task {requested!r}: {architecture} is a model of diffusers; leave task= (--task) out")
    if own is None and (why := why_without(architecture)):
        raise UsageError(f"{architecture} has no graphs: {why}; use target hf")
    if requested is None and own is None:
        raise UsageError(
            f"{architecture} is of no task that bridge writes graphs for ({', '.join(sorted(tasks()))}); use target "
            "hf, or give task= (--task) if the checkpoint has the weights of one"
        )
    if requested is not None and own is not None and requested not in (own, "feature-extraction"):
        raise UsageError(f"task {requested!r}: a checkpoint of {architecture} has no such head; use {own}")
    return requested or own or "feature-extraction"


def model_class(config: Any, task: str) -> Any:
    """Return the transformers class to build: the named architecture if it has the task's head, else the task's own."""
    heads, name = _classes(config, tasks()[task]), (getattr(config, "architectures", None) or [""])[0]
    if named := heads.get(name) or _named(config, name, task):
        return named
    if not heads:
        have = [known for known, entry in tasks().items() if _classes(config, entry)]
        raise UsageError(
            f"{config.model_type!r} has no {task} head in transformers; use one of: {', '.join(have) or 'none'}"
        )
    return next(iter(heads.values()))


def _named(config: Any, name: str, task: str) -> Any:
    """The class of the checkpoint's weights if transformers lists it for no task: T5EncoderModel, CLIPSeg's head."""
    import transformers

    cls = getattr(transformers, name, None) if name.endswith(tasks()[task].classes) else None
    return cls if getattr(cls, "config_class", None) is type(config) else None


def _classes(config: Any, task: Task) -> dict[str, Any]:
    from transformers.models.auto import modeling_auto

    classes = getattr(modeling_auto, task.auto).get(type(config), ()) if task.auto else ()
    return {c.__name__: c for c in (classes if isinstance(classes, tuple) else (classes,))}
