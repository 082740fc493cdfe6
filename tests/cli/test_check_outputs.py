"""`qbridge check` of outputs without bridge.json, of which only their names and their operators tell the target."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

import bridge
from bridge.cli.check import check_path
from bridge.core.errors import SourceError
from bridge.core.formats.gguf import GgufFile
from bridge.core.output.names import MANIFEST
from tests import once
from tests.blocks import ROOT

pytestmark = pytest.mark.usefixtures("graphs_once")


def copied(target: str, quant: str, tmp_path: Path) -> Path:
    def make(at: Path) -> None:
        bridge.convert(ROOT / "examples" / "models" / "tiny-llama", target, quant, at / "out", verify=False)

    out = Path(shutil.copytree(once.directory(f"checked-{target}-{quant}", make) / "out", tmp_path / "out"))
    (out / MANIFEST).unlink()
    return out


@pytest.mark.parametrize(
    ("target", "quant"),
    [
        *(("gguf", quant) for quant in ("none", "mxfp4_wo", "q4_0")),
        pytest.param("ort", "int4_wo", marks=pytest.mark.slow),
    ],
)
def test_an_output_without_its_manifest_is_known_by_its_files(target: str, quant: str, tmp_path: Path) -> None:
    out = copied(target, quant, tmp_path)
    assert not check_path(out)
    assert not check_path(next(path for path in out.iterdir() if path.suffix in (".gguf", ".onnx")))


def test_operators_of_onnx_runtime_are_no_error(tmp_path: Path) -> None:
    """They are one in a graph of no known reader, whose domain is another."""
    for domain, wrong in (("com.microsoft", False), ("com.example", True)):
        node = onnx.helper.make_node("QuickGelu", ["x"], ["y"], domain=domain)
        x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy")
        opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(domain, 1)]
        graph = onnx.helper.make_graph([node], "g", [x], [y])
        onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "model.onnx")
        assert any(problem.fatal for problem in check_path(tmp_path)) == wrong, check_path(tmp_path)


def test_what_is_wrong_in_a_gguf_file_is_told(tmp_path: Path) -> None:
    file = copied("gguf", "none", tmp_path) / "model.gguf"
    at, data = GgufFile(file).offsets["output_norm.weight"], bytearray(file.read_bytes())
    data[at : at + 4] = np.float32(np.nan).tobytes()
    file.write_bytes(data)
    (problem,) = check_path(file.parent)
    assert problem.fatal and "output_norm.weight: holds NaN" in problem.text
    file.write_bytes(data[:2000])
    (problem,) = check_path(file)
    assert problem.fatal and "[files]" in problem.text
    with pytest.raises(SourceError, match="no such file"):
        check_path(tmp_path / "absent.gguf")
