"""Read an importance matrix that llama.cpp's llama-imatrix wrote.

`TENSOR.in_sum2` has sums of x^2 by expert and `in`, `TENSOR.counts` the tokens of each expert (tools/imatrix).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from bridge.calibration.policies import Measured, settle_importance
from bridge.core.errors import CalibrationError, SourceError
from bridge.core.formats.gguf import GgufFile
from bridge.core.text import fold_problems
from bridge.planning.plan import Plan, Step
from bridge.quant.calibration import Calibration, Provenance, of_expert
from bridge.quant.schemes.scheme import Scheme

SUFFIXES = (".gguf", ".dat")


def read_imatrix(path: Path, plan: Plan, scheme: Scheme) -> Calibration:
    """The statistics of a plan's matrices; CalibrationError lists what the file lacks or has in another shape.

    Tensors of the file that the plan does not code with an importance are not used.
    """
    if path.suffix == ".dat":
        raise CalibrationError(
            f"{path}: llama.cpp's old format of importance matrices; convert it: llama-imatrix --in-file {path} "
            f"-o {path.with_suffix('.gguf')}"
        )
    try:
        file = GgufFile(path)
    except (SourceError, OSError) as cause:
        raise CalibrationError(f"{path}: not an importance matrix: {cause}") from cause
    if file.metadata.get("general.type") != "imatrix":
        raise CalibrationError(f"{path}: general.type is {file.metadata.get('general.type')!r}; expected 'imatrix'")
    measured: dict[str, Measured] = {}
    problems: list[tuple[str, str]] = []
    for step in (step for step in plan.quantized if step.format and step.format.weighted):
        found = _of_step(file, step)
        if isinstance(found, str):
            problems.append((step.outputs[0].spec.name, found))
        else:
            measured |= found
    if problems:
        lines = fold_problems(problems)
        raise CalibrationError("\n  ".join([f"{path} is not of {plan.architecture} as it is planned:", *lines]))
    squares, applied = settle_importance(measured, scheme.policies)
    provenance = Provenance(
        scheme=scheme.name,
        scheme_digest=scheme.digest,
        architecture=plan.architecture,
        model="",  # the file does not say; names and lengths were compared
        dtype="float32",
        data_digest=hashlib.sha256(path.read_bytes()).hexdigest(),
        samples=_number(file.metadata.get("imatrix.chunk_count")),
        sequence=_number(file.metadata.get("imatrix.chunk_size")),
    )
    return Calibration(provenance, input_square=squares, applied=applied)


def _of_step(file: GgufFile, step: Step) -> dict[str, Measured] | str:
    """Module -> what was measured; or what is wrong."""
    assert step.site
    name, shape = step.outputs[0].spec.name, step.outputs[0].spec.shape
    sums, counts = f"{name}.in_sum2", f"{name}.counts"
    if lost := [wanted for wanted in (sums, counts) if wanted not in file.specs]:
        return f"has no {' and no '.join(one.removeprefix(f'{name}.') for one in lost)} there"
    matrices = shape[0] if len(shape) > 2 else 1
    for wanted, size in ((sums, matrices * shape[-1]), (counts, matrices)):
        spec = file.specs[wanted]
        if spec.dtype != "float32" or spec.size != size:
            return (
                f"{wanted.removeprefix(f'{name}.')} is {spec.dtype} of {spec.size} values; expected float32 of {size}"
            )
    by_expert, tokens = file.read(sums).reshape(matrices, shape[-1]), file.read(counts).reshape(-1)
    if not (np.isfinite(by_expert).all() and np.isfinite(tokens).all() and (by_expert >= 0).all() and min(tokens) >= 0):
        return "has a value that is not finite or below zero"
    modules = list(dict.fromkeys(of_expert(part.module or step.site.module, part.expert) for part in step.inputs))
    if matrices == 1:
        return dict.fromkeys(modules, Measured(by_expert[0].astype(np.float64), float(tokens[0]), expert=False))
    assert len(modules) == matrices, f"{name}: {len(modules)} modules in a stack of {matrices}"
    return {
        module: Measured(row.astype(np.float64), float(count), expert=True)
        for module, row, count in zip(modules, by_expert, tokens, strict=True)
    }


def _number(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0
