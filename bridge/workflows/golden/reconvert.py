"""Convert the model of a golden again, into a temporary directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge.api.verbs import convert
from bridge.core.addresses import check_length, check_local
from bridge.core.errors import GoldenError, UsageError, drop_notes
from bridge.core.output.names import CALIBRATION as OUTPUT_CALIBRATION
from bridge.core.output.temporary import temporary_directory
from bridge.core.progress import Progress
from bridge.planning.plan import PASSTHROUGH, Plan
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.catalog import is_scheme_name, kv_names
from bridge.quant.schemes.group_size import SIZES, with_group, with_zero_points
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Scheme
from bridge.workflows.golden.store import CALIBRATION, Golden, Rerun

ENGINE = ("engine", "profile")  # TensorRT builds it from the file that the golden records


def arguments(plan: Plan, directory: Path, quant: str | Path | None = None) -> tuple[Rerun, dict[str, bytes]]:
    """The arguments of `bridge.convert` that write `directory` again, and the files that they name.

    Args:
        quant: the recipe that it was converted with; built-in schemes are found by their digest.
    """
    check_local(quant=quant)
    files: dict[str, bytes] = {}
    if (directory / OUTPUT_CALIBRATION).is_file():
        files[CALIBRATION] = replace(Calibration.load(directory / OUTPUT_CALIBRATION), held_out=None).to_bytes()
    if plan.scheme in ("none", PASSTHROUGH):
        return Rerun("none" if plan.scheme == "none" else None, calibrated=bool(files)), files
    scheme = _scheme(plan, quant)
    if scheme is None:
        return Rerun(refused=f"scheme {plan.scheme} is a recipe that was not given: quant=, --quant PATH"), {}
    rerun = replace(scheme, calibrated=bool(files))
    if rerun.recipe:
        files[rerun.recipe] = Path(str(quant)).read_bytes()
    return rerun, files


def _scheme(plan: Plan, quant: str | Path | None) -> Rerun | None:
    """Name, KV cache and blocks of a plan's scheme; None if it is neither `quant` nor a built-in scheme."""
    recipes: list[str | Path] = [Path(quant)] if quant is not None and str(quant).endswith(".toml") else []
    for scheme in [*recipes, *([plan.scheme] if is_scheme_name(plan.scheme) else [])]:
        kvs = [] if load_scheme(scheme).kv else kv_names()
        for kv in (None, *kvs):
            for sized, group, zero_points in _in_sizes(load_scheme(scheme, kv)):
                if sized.digest == plan.scheme_digest:
                    return Rerun(Path(scheme).name, kv, group=group, zero_points=zero_points)
    if quant is not None:
        raise GoldenError(f"quant={str(quant)!r} did not make this model, {plan.scheme} did")
    return None


def _in_sizes(scheme: Scheme) -> Iterator[tuple[Scheme, int | None, bool]]:
    """A scheme as it is, and with the blocks that options give it."""
    yield scheme, None, False
    for group in (None, *SIZES):
        for zero_points in (False, True):
            with suppress(UsageError):  # it has no such blocks
                yield with_zero_points(with_group(scheme, group), zero_points), group, zero_points


@contextmanager
def converted(
    golden: Golden, model: Any, calib: Any, work: str | Path | None, progress: Progress, **source: Any
) -> Iterator[Path]:
    """Convert `model` with the golden's arguments into a directory that is removed when the block ends.

    Unless `calib` is given, the calibration is the golden's, so that neither ModelOpt nor the order of its sums
    matters.
    """
    rerun, made = golden.rerun, golden.snapshot.made
    if rerun.refused:
        raise GoldenError(f"this golden cannot be converted again: {rerun.refused}")
    options = {name: value for name, value in made.options.items() if name not in ENGINE and value is not None}
    check_length(work)
    if work is not None and not Path(work).is_dir():
        raise UsageError(f"work={str(work)!r} is not a directory; create it, or leave it out")
    with temporary_directory(work) as folder:
        for name, content in golden.extra_files.items():
            (folder / name).write_bytes(content)
        quant = folder / rerun.recipe if rerun.recipe else rerun.quant
        if calib is None and rerun.calibrated:
            calib = folder / CALIBRATION
        try:
            convert(
                model, made.target, quant, folder / "out", calib=calib, kv=rerun.kv, group=rerun.group,
                zero_points=rerun.zero_points, rotate=made.rotation or None, verify=False, progress=progress,
                **source, **options,
            )  # fmt: skip
        except BaseException as error:  # what an interrupted conversion keeps goes with this directory
            drop_notes(error, folder)
            raise
        yield folder / "out"
