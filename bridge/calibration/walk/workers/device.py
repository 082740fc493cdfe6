"""Choose the device of a process."""

from __future__ import annotations

import os

from bridge.calibration.requirements import model_in_memory
from bridge.sources.source import Source


def device_of(device: str | None, neighbour: int) -> str | None:
    """Return the device of a process; `neighbour`: its position among those of this machine.

    "cuda" is the process's own: LOCAL_RANK of torchrun, else its position. Ray and Slurm show each process one device.
    """
    if device != "cuda":
        return device
    import torch

    local = os.environ.get("LOCAL_RANK", "")
    index = int(local) if local.isdecimal() else neighbour
    return f"cuda:{index % max(1, torch.cuda.device_count())}"


def home_of(source: Source) -> str | None:
    """Return the device of a model in memory, where a walk runs unless another is asked for; None for other sources."""
    found = model_in_memory(source)
    return str(next(found.load_model().parameters()).device) if found else None
