"""Calibrate block by block, with the bytes of the whole model.

Each block is read, runs every batch, leaves its statistics and is dropped. ModelOpt's code runs on each with the
activations that the whole model has there.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from bridge.calibration.algorithms.codes import made_for
from bridge.calibration.data import Data
from bridge.calibration.modelopt import provenance_of
from bridge.calibration.reference_outputs import Answers, held_out_of
from bridge.calibration.statistics import settle_statistics
from bridge.calibration.walk.gauge import Options, Watch
from bridge.calibration.walk.resume import Partial, identity_of, kept
from bridge.calibration.walk.states import Spill
from bridge.calibration.walk.walk import Walk
from bridge.core.machine import returning_pages
from bridge.core.progress import Progress
from bridge.core.values import Structure
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.source import Source


def calibrate_by_blocks(
    source: Source,
    structure: Structure,
    scheme: Scheme,
    data: Data,
    device: str | None,
    report: Progress,
    needed: Collection[str] | None = None,
    partial: Path | None = None,
    options: Options = Options(),  # noqa: B008, frozen
) -> Calibration:
    """Return the calibration of `source`, with one block of its weights in memory at a time.

    `partial`: a directory for the finished blocks, so that a killed run goes on; it is removed at the end.
    """
    scheme, device = scheme.bound(structure.sites), device or "cpu"
    identity = identity_of(source, scheme, data, device, options.workers) if partial else ""

    def walk_of(left: Partial | None) -> Walk:
        return Walk(source, structure, scheme, data, device, report, options, left)

    with torch.no_grad(), returning_pages(), kept(partial, identity) as left:
        walk = walk_of(left)
        if not walk.run():
            assert left
            left.start_again()
            walk = walk_of(left)
            walk.run()
    attention = walk.attention.values()
    statistics, applied = settle_statistics(walk.seen, walk.bindings, attention, scheme, source.specs, needed)
    provenance = provenance_of(source, structure, scheme, data, walk.plain.model)
    provenance = made_for(provenance, source, structure, statistics)
    held = held_out_of(data.held_out, walk.source_answers, walk.answers) if data.held_out else None
    return Calibration(provenance=provenance, **statistics, applied=tuple(applied), held_out=held)


def watch_by_blocks(
    source: Source,
    structure: Structure,
    scheme: Scheme,
    data: Data,
    device: str | None,
    report: Progress,
    watch: Watch,
    spill: Spill | None = None,
) -> tuple[Any, Answers]:
    """Run the data through the unquantized model for `watch`; return the model, without weights, and its answers."""
    with torch.no_grad(), returning_pages():
        walk = Walk(source, structure, scheme, data, device or "cpu", report, Options(watch=watch, spill=spill))
        walk.run()
    return walk.plain.model, walk.source_answers
