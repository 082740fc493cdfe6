"""The state of a training on disk.

A state is written aside and renamed; the last two are kept. It is safetensors, so that nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.errors import WriteError, reason
from bridge.core.formats.safetensors import file_pieces
from bridge.core.output.temporary import write_whole

if TYPE_CHECKING:
    from torch import Tensor

KEPT = 2  # the newest may be of a step whose loss is not finite


@dataclass
class History:
    """What a training has done. `losses`: step, loss. `held_out`: step, KL, perplexity. Seconds of all runs."""

    losses: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float, float]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    teacher_seconds: float = 0.0
    teacher_perplexity: float = 0.0


def save_state(directory: Path, step: int, tensors: Mapping[str, Tensor], history: History) -> Path:
    """Write the state after `step` steps; remove all but the last two."""
    path = directory / f"state-{step:08d}.safetensors"
    arrays = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()}
    try:
        write_whole(path, file_pieces(arrays, {"step": str(step), "history": json.dumps(asdict(history))}))
    except OSError as error:
        raise WriteError(f"{path}: the state of the training cannot be written: {reason(error)}") from error
    for old in states(directory)[:-KEPT]:
        old.unlink()
    return path


def states(directory: Path) -> list[Path]:
    """The states in a directory, the newest last."""
    return sorted(directory.glob("state-*.safetensors"))


def load_state(directory: Path) -> tuple[int, dict[str, Tensor], History] | None:
    """The newest state; None without one."""
    from safetensors import safe_open

    found = states(directory)
    if not found:
        return None
    with safe_open(found[-1], "pt") as file:
        told: Mapping[str, str] = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    history: dict[str, Any] = json.loads(told["history"])
    rows = {name: [tuple(row) for row in history[name]] for name in ("losses", "held_out")}
    return int(told["step"]), tensors, History(**history | rows)
