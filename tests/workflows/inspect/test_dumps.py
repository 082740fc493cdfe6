"""DumpTensors: what the files hold, when they appear, and what a kill or a full disk leaves."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import bridge  # noqa: E402
from bridge.core.dtypes import SEARCHED  # noqa: E402
from bridge.core.errors import InspectError, WriteError  # noqa: E402
from bridge.core.values import AFFINE  # noqa: E402
from bridge.quant.schemes.catalog import named_scheme, scheme_names  # noqa: E402
from bridge.workflows.inspect.dumps import coded  # noqa: E402
from bridge.workflows.inspect.statistics.coding import fake_quantized  # noqa: E402
from bridge.workflows.inspect.statistics.quantization import of_recipe, of_scheme  # noqa: E402
from tests.workflows.inspect.test_session import LLAMA, SIX, config  # noqa: E402

BOTH = {"high_precision_tensor": True, "quantized_tensor": True}


def linear(dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 32, dtype=dtype))


def run(model: Any, words: dict[str, Any], out: Path, steps: int = 1, quant: str | None = None, **options: Any) -> Any:
    dtype = next(model.parameters()).dtype
    inputs = [torch.randn(5, 64, dtype=dtype, requires_grad=True) for _ in range(steps)]
    with bridge.inspecting(model, words, quant=quant, out=out, **options) as session:
        for x in inputs:
            model(x).square().sum().backward()
            session.step()
    return session.inspection, inputs


def test_a_file_a_step_has_the_six_tensors_as_they_were(tmp_path: Path) -> None:
    model = linear(torch.bfloat16)
    words = config("DumpTensors", tensors=SIX, high_precision_tensor=True, freq=2)
    seen, inputs = run(model, words, tmp_path / "seen", steps=3)
    assert seen.dumps == ("dumps/rank_0/step_000000.safetensors", "dumps/rank_0/step_000002.safetensors")
    assert json.loads((tmp_path / "seen" / "inspect.json").read_text())["dumps"] == [*seen.dumps]
    for name, x in zip(seen.dumps, inputs[::2], strict=True):
        tensors = load_file(tmp_path / "seen" / name)
        assert {*tensors} == {f"0_{tensor}.high_precision" for tensor in SIX}
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        assert torch.equal(tensors["0_activation.high_precision"], x)
        assert torch.equal(tensors["0_weight.high_precision"], model[0].weight)
        assert torch.equal(tensors["0_dgrad.high_precision"], x.grad)
    assert [path.name for path in tmp_path.iterdir()] == ["seen"]  # nothing is left beside it


def test_the_quantized_tensor_is_codes_times_scales_and_that_of_statistics(tmp_path: Path) -> None:
    words = config("DumpTensors", tensors=["activation", "weight"], **BOTH)
    seen, _ = run(linear(), words, tmp_path / "seen", quant="mxfp8")
    with safe_open(tmp_path / "seen" / seen.dumps[0], "pt") as file:
        about = json.loads(file.metadata()["0_weight"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    assert about == {"layer": "0", "role": "", "tensor": "weight", "scheme": "mxfp8", "codes": ["float8_e4m3fn"]}
    for name in ("activation", "weight"):
        x, codes = tensors[f"0_{name}.high_precision"], tensors[f"0_{name}.codes"]
        how = of_scheme(named_scheme("mxfp8"), name)
        assert how and codes.dtype == torch.float8_e4m3fn and codes.shape == x.shape
        expected = torch.from_numpy(fake_quantized(x.numpy(), "float32", how))
        assert torch.equal(tensors[f"0_{name}.quantized"], expected) and not torch.equal(expected, x)
        scales = tensors[f"0_{name}.scales"]
        wide = scales.repeat_interleave(-(-x.shape[0] // scales.shape[0]), 0)[: x.shape[0]]
        wide = wide.repeat_interleave(x.shape[1] // scales.shape[1], 1)
        assert torch.equal(codes.float() * wide, expected)


@pytest.mark.parametrize("scheme", [*scheme_names(), "fp8_current_scaling", "fp8_block_scaling"])
@pytest.mark.parametrize("tensor", ["weight", "activation"])
def test_every_scheme_has_codes_and_the_values_of_fake_quantization(scheme: str, tensor: str) -> None:
    how = of_recipe(scheme, tensor) if scheme.endswith("_scaling") else of_scheme(named_scheme(scheme), tensor)
    if how is None:
        return
    x = np.random.default_rng(0).standard_normal((3, 7, 512), np.float32)
    x[0, 0, 0] = np.nan
    found = coded(x, "float32", how)
    np.testing.assert_array_equal(found["quantized"][1], fake_quantized(x, "float32", how))
    assert len(found["codes"][1].reshape(-1)) <= x.size
    assert ("scales" in found) == (how.numeric[0].dtype not in (*SEARCHED, *AFFINE))  # between codes, or beside biases
    assert ("scale_2" in found) == (len(how.numeric) > 1)


def test_a_scheme_of_its_own_needs_no_quant(tmp_path: Path) -> None:
    words = config("DumpTensors", tensors="weight", quantized_tensor=True, scheme="int8")
    seen, _ = run(linear(), words, tmp_path / "seen")
    tensors = load_file(tmp_path / "seen" / seen.dumps[0])
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "0_weight.quantized": torch.float32, "0_weight.codes": torch.int8, "0_weight.scales": torch.float32,
    }  # fmt: skip
    with pytest.raises(InspectError, match="quantized_tensor: names no scheme, and the session has none; write scheme"):
        run(linear(), config("DumpTensors", tensors="weight", quantized_tensor=True), tmp_path / "none")


def test_microbatches_are_numbered_and_the_weight_is_written_once(tmp_path: Path) -> None:
    model = linear()
    words = config("DumpTensors", tensors=["activation", "weight"], high_precision_tensor=True)
    with bridge.inspecting(model, words, out=tmp_path / "seen") as session:
        inputs = [torch.randn(n, 64) for n in (2, 3)]
        for x in inputs:
            model(x)
        session.step()
    tensors = load_file(tmp_path / "seen" / session.inspection.dumps[0])
    assert {*tensors} == {"0_activation.high_precision", "0_activation_1.high_precision", "0_weight.high_precision"}
    assert torch.equal(tensors["0_activation_1.high_precision"], inputs[1])


def test_convolutions_and_masked_rows_are_written_whole(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))
    words = config("DumpTensors", tensors="weight", scheme="int8", **BOTH)
    with bridge.inspecting(model, words, out=tmp_path / "seen") as session:
        model(torch.randn(1, 3, 8, 8))
        session.step()
    tensors = load_file(tmp_path / "seen" / session.inspection.dumps[0])
    assert tensors["0_weight.quantized"].shape == tensors["0_weight.codes"].shape == (4, 3, 3, 3)
    words = config("DumpTensors", {"modules": ["*.0.mlp.down_proj"]}, tensors="activation", high_precision_tensor=True)
    seen = bridge.inspect(LLAMA, words, samples=4, steps=1, out=tmp_path / "llama", progress=False)
    (tensor,) = load_file(tmp_path / "llama" / seen.dumps[0]).values()
    assert tensor.ndim == 3 and not seen.records


def test_it_needs_a_directory_and_says_so_before_the_model_is_loaded() -> None:
    words = config("DumpTensors", tensors="weight", high_precision_tensor=True)
    with pytest.raises(InspectError, match=r"DumpTensors: writes the tensors into a directory; pass out= \(--out\)"):
        bridge.inspect(LLAMA, words, progress=False)
    with pytest.raises(InspectError, match="pass out="), bridge.inspecting(linear(), words):
        raise AssertionError


def test_whole_steps_survive_a_kill_and_block_the_next_run(tmp_path: Path) -> None:
    model = linear()
    words = config("DumpTensors", tensors="weight", high_precision_tensor=True)
    with bridge.inspecting(model, words, out=tmp_path / "seen") as session:
        model(torch.randn(2, 64))
        session.step()
        model(torch.randn(2, 64))
        shutil.copytree(tmp_path / "seen.dumps", tmp_path / "killed")  # as a kill would leave it
    files = {path.name for path in (tmp_path / "killed" / "rank_0").iterdir()}
    assert {name for name in files if name.endswith(".safetensors")} == {"step_000000.safetensors"}
    assert len(load_file(tmp_path / "killed" / "rank_0" / "step_000000.safetensors")) == 1
    assert [*(tmp_path / "seen" / "dumps" / "rank_0").iterdir()] == [
        tmp_path / "seen" / "dumps" / "rank_0" / "step_000000.safetensors"  # the unfinished step is dropped
    ]
    (tmp_path / "killed").rename(tmp_path / "again.dumps")
    with pytest.raises(WriteError, match=r"again\.dumps: is left from a loop that was killed; move it away"):
        run(model, words, tmp_path / "again")
    run(model, words, tmp_path / "again", overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"seen", "again"}


def test_a_full_disk_is_told_before_it_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = namedtuple("free", "total used free")(1 << 30, 0, 12_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    words = config("DumpTensors", tensors="weight", high_precision_tensor=True)
    with pytest.raises(WriteError, match=r"has 12 kB free, DumpTensors needs 16.4 kB"):
        run(linear(), words, tmp_path / "seen")  # 8 kB, once when it is seen and once at the end of the step
    assert not [*tmp_path.iterdir()]
