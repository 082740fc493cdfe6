"""Weights whose codes GPTQ chose: those of ModelOpt in every target, and refused for other weights."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
needs("modelopt")

import bridge  # noqa: E402
from bridge.core.errors import CalibrationError, SchemeError  # noqa: E402
from bridge.core.files.matrices import FileMatrix  # noqa: E402
from bridge.core.formats.safetensors import SafetensorsFile  # noqa: E402
from bridge.core.mappings import find_table_file  # noqa: E402
from bridge.quant.calibration import Calibration  # noqa: E402
from bridge.verification.counts import CHOSEN, NEAREST  # noqa: E402
from tests import once  # noqa: E402
from tests.blocks import ROOT  # noqa: E402
from tests.covering import grid  # noqa: E402
from tests.models.export_families import build, tokens  # noqa: E402
from tests.oracles import export_oracle as oracle  # noqa: E402

LLAMA = ROOT / "examples" / "models" / "tiny-llama"
PLAIN = {"int4_gptq": "int4_wo", "nvfp4_gptq": "nvfp4"}
OUTPUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("hf", "int4_gptq", {"format": "modelopt"}),
    ("hf", "int4_gptq", {"format": "compressed-tensors"}),
    ("hf", "int4_gptq", {"format": "awq"}),
    ("hf", "int4_gptq", {"format": "gptq"}),
    ("trtllm", "int4_gptq", {}),
    ("gguf", "int4_gptq", {}),
    ("tripy", "int4_gptq", {}),
    ("hf", "nvfp4_gptq", {"format": "modelopt"}),
    ("hf", "nvfp4_gptq", {"format": "compressed-tensors"}),
    ("hf", "nvfp4_local_hessian", {"format": "compressed-tensors"}),
]
GRAPHS = [("trt", "int4_gptq"), ("ort", "int4_gptq")]


def calibration(scheme: str) -> Path:
    """The saved calibration of tiny-llama, made once a run."""

    def make(part: Path) -> None:
        made = bridge.calibrate(LLAMA, scheme, samples=8, sequence=64, progress=False)
        made.save(part / "calibration.safetensors")
        (part / "digest").write_text(made.digest)

    return once.directory(f"gptq-{scheme.replace(':', '-by-')}", make) / "calibration.safetensors"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "scheme", "options"), [*OUTPUTS, *(pytest.param(*row, {}, marks=pytest.mark.product) for row in GRAPHS)]
)
def test_chosen_codes_are_written_and_proved(target: str, scheme: str, options: dict[str, Any], tmp_path: Path) -> None:
    report = bridge.convert(
        LLAMA, target, scheme, tmp_path / "out", calib=calibration(scheme), progress=False, **options
    )
    assert report.passed and not report.findings
    assert report.parity
    counts = {count.what: (count.n, count.of) for count in report.parity.counts}
    checked = CHOSEN if "gptq" in scheme else NEAREST
    assert counts[checked][0] == counts[checked][1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["gptq", pytest.param("local_hessian", marks=pytest.mark.product)])
def test_an_own_scheme_of_nvfp4_weights_alone_is_calibrated_on_any_machine(algorithm: str, tmp_path: Path) -> None:
    words = find_table_file("schemes", "nvfp4_wo").read_text(encoding="utf-8")
    words = words.replace("cosine = 0.99", "cosine = 0.96").replace("[0.98, 1.02]", "[0.96, 1.04]")
    (tmp_path / "own.toml").write_text(words.replace('algorithm = "max"', f'algorithm = "{algorithm}"'))
    scheme, out = str(tmp_path / "own.toml"), tmp_path / "out"
    report = bridge.convert(
        LLAMA, "hf", scheme, out, samples=4, sequence=32, progress=False, format="compressed-tensors"
    )
    assert report.passed and not report.findings
    assert any(count.what in (CHOSEN, NEAREST) and count.n == count.of > 0 for count in report.parity.counts)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", PLAIN)
def test_an_output_has_the_tensors_and_config_of_the_plain_scheme(scheme: str, tmp_path: Path) -> None:
    bridge.convert(LLAMA, "hf", scheme, tmp_path / "own", calib=calibration(scheme), verify=False, progress=False)
    calib = calibration(scheme) if "nvfp4" in scheme else None
    bridge.convert(LLAMA, "hf", PLAIN[scheme], tmp_path / "plain", calib=calib, verify=False, progress=False)
    assert (tmp_path / "own" / "config.json").read_bytes() == (tmp_path / "plain" / "config.json").read_bytes()
    own, plain = (SafetensorsFile(tmp_path / name / "model.safetensors") for name in ("own", "plain"))
    assert own.specs == plain.specs
    scales = [name for name in own.specs if "scale" in name]
    assert scales and all(own.read(name).tobytes() == plain.read(name).tobytes() for name in scales)


@grid({"family": ["llama", "gpt2"], "dtype": ["fp32", "bf16"]})
def test_decoded_weights_are_those_of_modelopts_model(family: str, dtype: str, tmp_path: Path) -> None:
    directory = oracle.source(family, dtype)
    answer = oracle.calibrated(directory, "int4_gptq", None, tokens())
    batches = [*tokens(), tokens()[0]]  # the last is held out
    bridge.convert(directory, "hf", "int4_gptq", tmp_path / "own", calib=batches, verify=False, progress=False)
    bridge.convert(tmp_path / "own", "hf", "none", tmp_path / "decoded", verify=False, progress=False, dtype=dtype)
    decoded = oracle.load(tmp_path / "decoded").state_dict()
    # ModelOpt divides a code by 7 / amax, the checkpoint multiplies it by amax / 7; the scale is in the model's dtype
    within = 2.0**-22 if dtype == "fp32" else 2.0**-7
    for ours, live in answer.live.items():
        if not answer.model.get_submodule(live).weight_quantizer.is_enabled:
            continue
        weight = decoded[f"{live}.weight"].float().numpy()
        theirs = answer.weight(ours)
        theirs = theirs if theirs.shape == weight.shape and family != "gpt2" else theirs.T
        np.testing.assert_allclose(weight, theirs, rtol=within, atol=0)


@pytest.mark.slow
def test_codes_stay_in_the_file_of_a_calibration() -> None:
    loaded = Calibration.load(calibration("int4_gptq"))
    loaded.check()
    assert loaded.digest == calibration("int4_gptq").with_name("digest").read_text()
    codes = loaded.weight_codes["model.layers.1.mlp.down_proj"]
    assert isinstance(codes, FileMatrix) and codes.shape == (128, 192)
    again = pickle.loads(pickle.dumps(loaded)).weight_codes["model.layers.1.mlp.down_proj"]
    assert np.array_equal(again[3:9], SafetensorsFile(calibration("int4_gptq")).read(
        "weight_codes/model.layers.1.mlp.down_proj"
    )[3:9])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, -1])
def test_codes_of_other_weights_are_refused(row: int, tmp_path: Path) -> None:
    shutil.copytree(LLAMA, tmp_path / "tuned")
    file = tmp_path / "tuned" / "model.safetensors"
    data = bytearray(file.read_bytes())
    stored = SafetensorsFile(file)
    spec = stored.specs["model.layers.2.mlp.up_proj.weight"]
    data[stored.offset(spec.name) + row % spec.shape[0] * spec.nbytes // spec.shape[0]] ^= 1
    file.write_bytes(data)
    with pytest.raises(CalibrationError, match="made for other weights"):
        bridge.convert(
            tmp_path / "tuned", "hf", "int4_gptq", tmp_path / "out", calib=calibration("int4_gptq"), progress=False
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_calibration_without_codes_is_refused_before_work_starts(tmp_path: Path) -> None:
    other = bridge.calibrate(LLAMA, "fp8", samples=2, sequence=16, progress=False)
    with pytest.raises(CalibrationError, match="codes chosen by gptq"):
        bridge.convert(LLAMA, "hf", "int4_gptq", tmp_path / "out", calib=other, progress=False)


@pytest.mark.slow
def test_a_code_that_calibration_did_not_choose_fails_the_proof(tmp_path: Path) -> None:
    bridge.convert(LLAMA, "hf", "int4_gptq", tmp_path, calib=calibration("int4_gptq"), verify=False, progress=False,
                   overwrite=True)  # fmt: skip
    assert bridge.verify(tmp_path, against=LLAMA, progress=False).passed
    file = tmp_path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[SafetensorsFile(file).offset("model.layers.2.mlp.up_proj.weight")] ^= 1  # the next code
    file.write_bytes(data)
    report = bridge.verify(tmp_path, against=LLAMA, progress=False)
    assert not report.passed and report.parity
    assert [t.why for t in report.parity.tensors if t.why] == ["1 code of 49,152 that calibration did not choose"]


@pytest.mark.slow
def test_experts_are_rounded_to_nearest(tmp_path: Path) -> None:
    oracle.save(build("qwen3-moe", torch.bfloat16), tmp_path / "source")
    report = bridge.convert(tmp_path / "source", "hf", "int4_gptq", tmp_path / "own", calib=tokens(), progress=False)
    assert report.passed and any("experts are rounded to nearest" in note for note in report.notes)
    chosen = Calibration.load(tmp_path / "own" / "bridge" / "calibration.safetensors").weight_codes
    assert chosen and not any("experts" in module for module in chosen)
    bridge.convert(tmp_path / "source", "hf", "int4_wo", tmp_path / "plain", verify=False, progress=False)
    own, plain = (SafetensorsFile(tmp_path / name / "model.safetensors") for name in ("own", "plain"))
    for name in own.specs:
        module = name.rpartition(".")[0]
        assert (own.read(name).tobytes() == plain.read(name).tobytes()) == (
            module not in chosen or not name.endswith("weight")
        ), name


def test_gptq_takes_one_weight_in_blocks_along_in(tmp_path: Path) -> None:
    text = (ROOT / "mappings" / "schemes" / "int4_gptq.toml").read_text()
    recipe = tmp_path / "mine.toml"
    recipe.write_text(text.replace('per   = "block"\nblock = [128]', 'per   = "channel"'))
    with pytest.raises(SchemeError, match=r"'gptq' is for one \[\[weight\]\] of INT4 or FP4"):
        bridge.plan(LLAMA, "hf", recipe)
