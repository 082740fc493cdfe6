"""Check existing outputs, memory and disk space before the start."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from bridge.core.addresses import is_remote
from bridge.core.output.replace import check_free, reserved
from bridge.core.remote.upload import check_replaceable, made_at
from bridge.core.text import size
from bridge.workflows.batch.job import failure
from bridge.workflows.batch.prepare.finished import unsent
from bridge.workflows.batch.prepare.plan import PlannedRow
from bridge.workflows.batch.values import FAILED, Outcome

REPLACING = "set `overwrite = true` in the row or in [defaults]"  # how a manifest allows to replace an output


def refuse(planned: PlannedRow, memory: int | None) -> Outcome | None:
    """The outcome of a row that cannot run, else None; an error of its output is raised. `memory`: limit of a job."""
    row = planned.row
    if memory is not None and planned.least > memory:
        text = f"needs {size(planned.least)} of memory, but gets {size(memory)} at most; give the batch more `memory`"
        if planned.key:
            text += ", or calibrate on a larger machine and pass the calibration (`calib`)"
        return Outcome(row.name, FAILED, text, "BatchError")
    if row.chain:  # the outputs of its steps were checked with it
        return None
    if is_remote(row.out):
        check_replaceable(row.out, row.overwrite, REPLACING)
    else:
        check_free(Path(row.out), row.overwrite, replacing=REPLACING)
    return None


def without_disk(pending: Sequence[PlannedRow]) -> dict[str, Outcome]:
    """The rows whose outputs do not fit on their disk after those of the rows before them."""
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
            text = f"{place}: needs {size(need)} of disk space, the rows before leave {size(free)}; free disk space"
            refused[one.row.name] = Outcome(one.row.name, FAILED, text, "BatchError")
    return refused
