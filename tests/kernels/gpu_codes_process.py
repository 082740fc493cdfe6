"""What Triton's interpreter makes of weights, for test_gpu_codes: it is chosen before Triton is imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bridge.compat import fp8_casts
from bridge.core.errors import SourceError
from bridge.quant.codec import on_device, torch_codes
from bridge.quant.codec.on_device import HOST, TRITON, encode
from tests.kernels.gpu_cases import CODINGS, DTYPES, SCHEMES, as_bits, casts, same_bytes, weight

SHAPES = {"fp8_block": (130, 146), "fp8": (33, 146)}  # of several programs


def _cases() -> list[tuple[str, str, int]]:
    """A scheme, a dtype, a coding by its number: all of bfloat16, three of each other dtype."""
    rows = [(scheme, "bfloat16", number) for scheme in SCHEMES for number in range(len(CODINGS[scheme]))]
    few = {scheme: {0, len(codings) // 2, len(codings) - 1} for scheme, codings in CODINGS.items()}
    return rows + [
        (scheme, dtype, number) for scheme in SCHEMES for dtype in ("float16", "float32") for number in few[scheme]
    ]


def _problem(scheme: str, dtype: str, number: int) -> str:
    """ "" if the bytes are those of the CPU."""
    w, coding = weight(SHAPES.get(scheme, (6, 146)), dtype), CODINGS[scheme][number]
    try:
        same_bytes(encode(w, SCHEMES[scheme], coding=coding), w, SCHEMES[scheme], coding=coding)
    except Exception as error:  # the test shows it
        return repr(error)
    return ""


def _refused(scheme: str) -> str:
    w = weight((6, 256), "bfloat16")
    w[5, 200] = float("nan")
    with pytest.raises(SourceError) as refused:
        encode(w, SCHEMES[scheme], name="layers.0", amax=3.0)
    return str(refused.value)


def _casts() -> dict[str, str]:
    """The casts of `groups.py` of each dtype: "" if all bytes are those of the CPU."""
    found = {}
    for dtype in DTYPES:
        w = weight((130, 146), dtype)
        made = []
        for way in (HOST, TRITON):
            fp8_casts.best_way = lambda tensor, way=way: way
            made.append(casts(w))
        equal = [(as_bits(a) == as_bits(b)).all() for a, b in zip(*made, strict=True)]
        found[f"casts {dtype}"] = "" if all(equal) else str(equal)
    return found


def _main(out: str) -> None:
    on_device.best_way = lambda weight: TRITON
    unfused: list[str] = []
    plain = torch_codes.coded

    def counted(*what: object) -> object:
        unfused.append(str(what[2]))
        return plain(*what)  # type: ignore[arg-type]

    torch_codes.coded = counted  # type: ignore[assignment]
    by_groups = _casts()
    found = {" ".join(map(str, case)): _problem(*case) for case in _cases()}
    refused = {scheme: _refused(scheme) for scheme in ("fp8", "int8", "nvfp4", "fp8_block")}
    Path(out).write_text(json.dumps({"problems": found | by_groups, "refused": refused, "unfused": unfused}))


if __name__ == "__main__":
    _main(sys.argv[1])
