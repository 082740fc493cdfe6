"""Converts once more what a golden was recorded of: which arguments that takes, and doing it; keeps nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge.errors import GoldenError, UsageError
from bridge.golden.store import CALIBRATION, Golden
from bridge.golden.values import Rerun
from bridge.paths import check_length
from bridge.planning import CALIBRATION as BESIDE
from bridge.planning import Plan
from bridge.progress import Progress
from bridge.quant.calibration import Calibration
from bridge.quant.scheme import kv_names, load_scheme, scheme_names
from bridge.quant.stored import NAME as STORED
from bridge.remote.address import check_here
from bridge.scratch import scratch

ENGINE = "engine"  # is built by TensorRT from the file that the golden is about


def arguments(plan: Plan, directory: Path, quant: str | Path | None = None) -> tuple[Rerun, dict[str, bytes]]:
    """What `bridge.convert` must be given to write `directory` again, and the files that this names.

    Args:
        quant: the recipe that it was converted by; schemes that ship are found by their digest.
    """
    check_here(quant=quant)
    beside: dict[str, bytes] = {}
    if (directory / BESIDE).is_file():
        beside[CALIBRATION] = replace(Calibration.load(directory / BESIDE), held_out=None).to_bytes()
    if plan.scheme in ("none", STORED):
        return Rerun("none" if plan.scheme == "none" else None, calibrated=bool(beside)), beside
    found = _scheme(plan, quant)
    if found is None:
        return Rerun(refused=f"scheme {plan.scheme} is a recipe that was not given: quant=, --quant PATH"), {}
    again = Rerun(*found, calibrated=bool(beside))
    if again.recipe:
        beside[again.recipe] = Path(str(quant)).read_bytes()
    return again, beside


def _scheme(plan: Plan, quant: str | Path | None) -> tuple[str, str | None] | None:
    """Name and KV cache of the scheme that a plan was made by; None where it is neither `quant` nor one that ships."""
    given: list[str | Path] = [Path(quant)] if quant is not None and str(quant).endswith(".toml") else []
    for one in [*given, *(name for name in scheme_names() if name == plan.scheme)]:
        kvs = [] if load_scheme(one).kv else kv_names()
        for kv in (None, *kvs):
            if load_scheme(one, kv).digest == plan.scheme_digest:
                return Path(one).name, kv
    if quant is not None:
        raise GoldenError(f"quant={str(quant)!r} is not what this model was converted by, which was {plan.scheme}")
    return None


@contextmanager
def converted(
    golden: Golden, model: Any, calib: Any, work: str | Path | None, progress: Progress, **source: Any
) -> Iterator[Path]:
    """Convert `model` as the golden says into a directory that is gone when the block ends.

    The calibration is the golden's own, so that neither ModelOpt nor the order of its sums matters, unless `calib` is
    given.
    """
    import bridge

    again, made = golden.rerun, golden.snapshot.made
    if again.refused:
        raise GoldenError(f"this golden cannot be converted again: {again.refused}")
    options = {name: value for name, value in made.options.items() if name != ENGINE and value is not None}
    check_length(work)
    if work is not None and not Path(work).is_dir():
        raise UsageError(f"work={str(work)!r} is no directory; make it first, or leave it out")
    with scratch(work) as here:
        for name, content in golden.beside.items():
            (here / name).write_bytes(content)
        quant = here / again.recipe if again.recipe else again.quant
        kept = here / CALIBRATION if again.calibrated else None
        bridge.convert(
            model, made.target, quant, here / "out", calib=kept if calib is None else calib, kv=again.kv,
            verify=False, progress=progress, **source, **options,
        )  # fmt: skip
        yield here / "out"
