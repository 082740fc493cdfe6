"""Whether rows have room, asked before any of them starts: outputs that are there, memory of each, disk of all."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from bridge.batches.finished import unsent
from bridge.batches.job import failure
from bridge.batches.planning import Planned
from bridge.batches.values import FAILED, Outcome
from bridge.remote.address import is_remote
from bridge.remote.outgoing import check_replaceable, made_at
from bridge.show import size
from bridge.visible import check_free, reserved

REPLACING = "set `overwrite = true` in the row or in [defaults]"  # how a manifest has an output replaced


def refuse(planned: Planned, memory: int | None) -> Outcome | None:
    """Why a row cannot run, None where it can; an error of its output is raised. `memory`: what one job may have."""
    row = planned.row
    if memory is not None and planned.least > memory:
        text = f"needs {size(planned.least)} of memory and gets {size(memory)} at most; give the batch more `memory`"
        if planned.key:
            text += ", or calibrate on a larger machine and pass its calibration (`calib`)"
        return Outcome(row.name, FAILED, text, "BatchError")
    if is_remote(row.out):
        check_replaceable(row.out, row.overwrite, REPLACING)
    else:
        check_free(Path(row.out), row.overwrite, replacing=REPLACING)
    return None


def without_disk(pending: Sequence[Planned]) -> dict[str, Outcome]:
    """The rows, taken in order, whose outputs do not fit on their disk beside those before them."""
    left: dict[int, int] = {}
    refused = {}
    for one in pending:
        try:
            out = made_at(one.row.out)
            place = next(path for path in out.parents if path.exists())
            disk, need = place.stat().st_dev, 0 if unsent(one) else max(one.disk - reserved(out), 0)
            free = left.setdefault(disk, shutil.disk_usage(place).free)
        except OSError as error:
            refused[one.row.name] = failure(one.row.name, error)
            continue
        if need <= free:
            left[disk] = free - need
        else:
            text = f"{place}: the row needs {size(need)} of disk, and the rows before it leave {size(free)}; free some"
            refused[one.row.name] = Outcome(one.row.name, FAILED, text, "BatchError")
    return refused
