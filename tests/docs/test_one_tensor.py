"""The page that follows one tensor: its values are recomputed, and the functions that it names run in its order."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.core.arrays import Buffers
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.planning.memory import working_set
from bridge.planning.plan import Plan, Step
from bridge.planning.structure import structure_of
from bridge.quant.codec.encode import Encoder
from bridge.quant.schemes.load import load_scheme
from bridge.reporting.report import Report
from bridge.sources.opening import open_source
from bridge.streaming.rows import Rows
from tests.blocks import ROOT
from tests.docs.site import PAGES

PAGE = (PAGES / "one-tensor.md").read_text(encoding="utf-8")
CODE = re.compile(r"`((?:bridge|kernels)/[\w/]+\.py):([\w.]+)`")  # path:function
FILES = re.compile(r"`((?:bridge|kernels|mappings|examples)/[\w/.-]+)(?::[\w.]+)?`")
ROWS = re.compile(r"^\| ([^|]+) \| (.+) \|$", re.MULTILINE)

MODEL = ROOT / "examples/models/tiny-llama"
NAME = "model.layers.0.self_attn.q_proj.weight"


def named() -> list[tuple[str, str, Any]]:
    """(path, name, the function or class) of every function that the page names, in its order."""
    found = []
    for path, name in CODE.findall(PAGE):
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        value: Any = importlib.import_module(f"bridge._{module}" if path.startswith("kernels/") else module)
        for attribute in name.split("."):
            value = getattr(value, attribute)
        found.append((path, name, value))
    return found


def test_every_file_and_function_on_the_page_exists() -> None:
    assert len(named()) > 20
    for path, name, value in named():
        assert not name.split(".")[-1].startswith("_"), f"{name} is private"
        assert Path(str(inspect.getsourcefile(inspect.unwrap(value)))).resolve() == (ROOT / path).resolve(), name
    missing = [path for path in FILES.findall(PAGE) if not (ROOT / path).exists()]
    assert not missing


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report, list[str]]:
    """The output, its report, and the calls of the Python functions that the page names, in order."""
    names, calls = {}, list[str]()
    for path, name, value in named():
        for member in vars(value).values() if inspect.isclass(value) else [value]:
            if code := getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None:
                names[code] = f"{path}:{name}"

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in names:
            calls.append(names[frame.f_code])

    out = tmp_path_factory.mktemp("one") / "out"
    threading.setprofile(called)
    sys.setprofile(called)
    try:
        report = bridge.convert(MODEL, "hf", "int8_wo", out, workers=1)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return out, report, calls


@pytest.mark.slow
def test_the_functions_run_in_the_order_of_the_page(converted: tuple[Path, Report, list[str]]) -> None:
    _, _, calls = converted
    at = 0
    for path, name, _ in named():
        if path.startswith("bridge/"):
            assert f"{path}:{name}" in calls, "does not run in this conversion"
            assert f"{path}:{name}" in calls[at:], "runs before the one that the page names before it"
            at = calls.index(f"{path}:{name}", at)


@pytest.mark.slow
def test_the_page_shows_the_values_of_this_code(converted: tuple[Path, Report, list[str]]) -> None:
    out, report, _ = converted
    shown = dict(ROWS.findall(PAGE))
    del shown["at this stop"]
    assert shown == {**planned(), **encoded(out), **compared(out, report)}


def planned() -> dict[str, str]:
    """The values that are known before a weight is read."""
    source, scheme, plan, step = open_source(MODEL), load_scheme("int8_wo"), make_plan(), the_step()
    spec, (file, at) = source.specs[NAME], source.place(NAME)
    site = next(site for site in structure_of(source).sites if site.weight == NAME)
    codes, scale = (output.spec for output in step.outputs)
    return {
        "spec": f"`{spec.shape}`, `{spec.dtype}`, {spec.nbytes:,} bytes",
        "place": f"`{file}`, byte {at:,}",
        "role": f"`{site.roles[0]}`",
        "site": f"module `{site.module}`, layer {site.layer}, layout `{site.layout}`",
        "format": f"`{scheme.weight[0].dtype}`, one scale per `{scheme.weight[0].per}`",
        "gate": f"cosine at least {scheme.gate_of(site).cosine}",
        "output 1": f"`{codes.name}` `{codes.shape}` `{codes.dtype}` = `{step.outputs[0].expression}`",
        "output 2": f"`{scale.name}` `{scale.shape}` `{scale.dtype}` = `{step.outputs[1].expression}`",
        "layout": f"`{step.layout}`",
        "bytes of the step": f"{step.nbytes:,}",
        "working set": f"{working_set(step, plan.sources):,} bytes",
    }


def encoded(out: Path) -> dict[str, str]:
    """The values of reading, encoding and writing, which are those of the formulas on the page."""
    ((first, (part,)),) = Rows(step := the_step(), source := open_source(MODEL), Buffers()).pieces()
    assert step.format
    weight, spec = part.bits.view(np.float32), source.specs[NAME]
    arrays = Encoder(step.format.weight, spec.dtype, spec.shape).rows(part.bits, first)
    codes, scale, amax = arrays["codes"], arrays["scale"], np.abs(weight).max(axis=1)
    assert np.array_equal(scale, amax / np.float32(127))
    assert np.array_equal(codes, np.rint(weight / scale[:, None]))
    file, raw = SafetensorsFile(out / "model.safetensors"), (out / "model.safetensors").read_bytes()
    bytes_of = []
    for output, array in zip(step.outputs, (codes, scale), strict=True):
        at, nbytes = file.offset(output.spec.name), output.spec.nbytes
        assert raw[at : at + nbytes] == array.tobytes()
        bytes_of.append(f"{nbytes:,} from byte {at:,}; the first are `{raw[at : at + 4].hex(' ')}`")
    return {
        "piece": f"rows {part.first} to {part.stop}",
        "weights [0, 0:4]": floats(weight[0, :4]),
        "amax of row 0": floats(amax[:1]),
        "scale of row 0": floats(scale[:1], 9),
        "codes [0, 0:4]": " ".join(map(str, codes[0, :4])),
        "bytes of the codes": bytes_of[0],
        "bytes of the scales": bytes_of[1],
    }


def compared(out: Path, report: Report) -> dict[str, str]:
    """The values of the comparison, which are those of float64 sums over the whole tensor, and of the report."""
    weight = open_source(MODEL).read(NAME).view(np.float32).astype(np.float64)
    codes, scale = (SafetensorsFile(out / "model.safetensors").read(output.spec.name) for output in the_step().outputs)
    decoded = codes.view(np.int8) * scale.view(np.float32)[:, None].astype(np.float64)
    parity = next(row for row in report.parity.tensors if row.name == NAME)
    own, written, error = (np.sqrt((each**2).sum()) for each in (weight, decoded, weight - decoded))
    figures = ((weight * decoded).sum() / own / written, written / own, 20 * np.log10(own / error))
    assert (parity.cosine, parity.norm_ratio, parity.sqnr) == pytest.approx(figures, rel=1e-6)
    rows = json.loads((out / "report.json").read_text(encoding="utf-8"))["parity"]["tensors"]
    row = next(row for row in rows if row["name"] == NAME)
    verdict = "passed" if row["passed"] else "failed"
    return {
        "decoded [0, 0:4]": floats(decoded[0, :4]),
        "cosine": f"{parity.cosine:.6f}",
        "norm ratio": f"{parity.norm_ratio:.6f}",
        "signal to noise": f"{parity.sqnr:.2f} dB",
        "row of the report": f"scheme `{row['scheme']}`, cosine {row['cosine']:.6f}, gate {row['gate']}, {verdict}",
        "report": f"{report.tensors} tensors, {report.quantized} quantized, {report.bytes:,} bytes",
    }


def floats(array: Any, digits: int = 7) -> str:
    return " ".join(f"{value:.{digits}f}" for value in array)


def make_plan() -> Plan:
    return bridge.plan(MODEL, "hf", "int8_wo")


def the_step() -> Step:
    return next(step for step in make_plan().steps if step.source == NAME)
