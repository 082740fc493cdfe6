"""Graphs in float16 and bfloat16 of hybrids and of models that see, against transformers' models in float32.

What verify runs is a float32 copy of the file: weights are rounded, and constants such as the factor of attention. The
model that it is held to has its weights rounded alike, so that constants alone differ: by a unit roundoff at most.
Of float16 ONNX Runtime also has the kernels, and the file itself is run: it rounds after every operation, in few layers
by less than eight unit roundoffs together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bridge
from bridge.core.errors import UsageError
from bridge.targets.onnx.files import MODEL
from bridge.targets.onnx.run.multimodal import load_multimodal
from bridge.targets.onnx.run.runtime import FEEDS, Runtime, open_session
from bridge.verification.outputs import relative_l2
from tests.sweep import seeing
from tests.sweep.build import build
from tests.targets.onnx.export import onnx_parity as parity

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graphs_once")]
ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
FILE = 8 * ROUNDOFF["fp16"]
LATER = pytest.mark.product


class File(Runtime):
    """A float16 file itself, of which `Runtime` runs a float32 copy."""

    def __init__(self, file: Path) -> None:
        self.session, self.substitute = open_session(file, optimize=True)
        assert not self.substitute
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = [value.name for value in self.session.get_outputs()]

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        full = {name: array for name, array in feeds.items() if name in self.inputs}
        self._complete(full)
        types = FEEDS | {"tensor(float16)": "float16"}
        given = {name: array.astype(types[self.inputs[name].type]) for name, array in full.items()}
        return dict(zip(self.outputs, self.session.run(self.outputs, given), strict=True))


def written(name: str, dtype: str, out: Path) -> Any:
    """transformers' model with rounded weights, in float32; the output passes its verification, and so the linter."""
    report = bridge.convert(build(name, torch.float32), "trt", None, out, dtype=dtype, progress=False)
    assert report.passed
    return build(name, DTYPES[dtype]).float()


@pytest.mark.product
def test_codes_in_a_half_hybrid_and_its_cache_are_as_near_to_the_float_model_as_in_its_copy(
    tmp_path: Path,
) -> None:
    """A value that float16 rounds may get the next code, which is as right as the other."""
    model, out = build("BambaForCausalLM", torch.float32), tmp_path / "out"
    data = [{"input_ids": torch.randint(5, 300, (4, 32), generator=torch.Generator().manual_seed(1))}]
    report = bridge.convert(model, "trt", "fp8", out, kv="fp8", dtype="fp16", data=data, progress=False)
    assert report.passed
    ids, mask = parity.padded_batch()
    want = parity.torch_logits(model, ids, mask)[mask == 1]
    copy, file = (
        relative_l2(parity.in_chunks(runtime.session, ids, mask, [5, 7, 7])[mask == 1], want)
        for runtime in (Runtime(out), File(out / MODEL))
    )
    assert 0.01 < file < 1.1 * copy < 0.2


def test_convolutions_of_bfloat16_choose_an_opset_that_has_them() -> None:
    model = build("BambaForCausalLM")
    assert bridge.plan(model, "trt", None, dtype="bf16").options["opset"] == 22
    assert bridge.plan(model, "trt", None, dtype="fp16").options["opset"] == 21
    with pytest.raises(UsageError, match="21 is not possible: older ones have no convolution of bfloat16; use 22 to"):
        bridge.plan(model, "trt", None, dtype="bf16", opset=21)


@pytest.mark.parametrize("dtype", [pytest.param("fp16", marks=LATER), "bf16"])  # the other kind below has fp16
@pytest.mark.parametrize(
    "name",
    [
        "BambaForCausalLM",
        *(
            pytest.param(f"{kind}ForCausalLM", marks=LATER)
            for kind in ("FalconH1", "GraniteMoeHybrid", "Jamba", "Lfm2", "NemotronH", "Qwen3Next")
        ),
    ],
)
def test_half_graphs_of_hybrids_equal_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    model = written(name, dtype, tmp_path / "out")
    ids, mask = parity.padded_batch()
    want = parity.torch_logits(model, ids, mask)[mask == 1]
    limits = {Runtime(tmp_path / "out"): ROUNDOFF[dtype]}
    limits |= {File(tmp_path / "out" / MODEL): FILE} if dtype == "fp16" else {}
    for runtime, limit in limits.items():
        for sizes in ([19], [5, 7, 7], [1] * 19):
            got = parity.in_chunks(runtime.session, ids, mask, sizes)[mask == 1]
            assert relative_l2(got, want) < limit, (type(runtime).__name__, sizes)


@pytest.mark.parametrize("dtype", ["fp16", pytest.param("bf16", marks=LATER)])
@pytest.mark.parametrize(
    "name",
    [
        "LlavaForConditionalGeneration",
        *(
            pytest.param(f"{kind}ForConditionalGeneration", marks=LATER)
            for kind in ("Gemma3", "PaliGemma", "Qwen2_5_VL", "Qwen3VL")
        ),
    ],
)
def test_half_graphs_of_models_that_see_equal_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    model = written(name, dtype, tmp_path / "out")
    far = seeing.distances(model, tmp_path / "out")
    assert all(error < ROUNDOFF[dtype] for error in far.values()), far
    if dtype == "bf16":
        return
    graphs = load_multimodal(tmp_path / "out")
    looked = {key: tensor.numpy() for key, tensor in seeing.seen(model, torch.Generator().manual_seed(3)).items()}
    rows = len(graphs.features(graphs.read(looked))["image_features"]) // 2
    ids = np.random.default_rng(4).integers(5, 300, (2, rows + 8))
    ids[:, 4 : 4 + rows] = graphs.token
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), **looked}
    fed = {**graphs.feeds(inputs), **graphs.first_row(inputs, ids.shape[1])}
    assert set(fed) == {file.name for file in (tmp_path / "out").glob("*.onnx")}
    for file, given in fed.items():
        want, got = Runtime(tmp_path / "out" / file).run(given), File(tmp_path / "out" / file).run(given)
        assert all(relative_l2(got[key].astype(np.float32), want[key]) < FILE for key in want), file
