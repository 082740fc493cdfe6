"""NeMo's `Quantizer` writes what ModelOpt's own export writes, and refuses what NeMo refuses, with more words."""

from __future__ import annotations

import copy
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.needs import Lazy, needs

torch = pytest.importorskip("torch")
needs("modelopt")
mtq = Lazy("modelopt.torch.quantization")

from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import bridge  # noqa: E402
from bridge.compat import nemo  # noqa: E402
from bridge.compat.nemo import ExportConfig, QuantizationConfig, Quantizer  # noqa: E402
from bridge.core.errors import BridgeError, PlanError, SourceError, WriteError  # noqa: E402
from bridge.quant.calibration import Calibration  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from tests.models.export_families import tokens  # noqa: E402
from tests.oracles import trtllm_oracle as oracle  # noqa: E402
from tests.oracles.export_oracle import calibrated, load, save, unexplained  # noqa: E402

TINY = Path(__file__).parents[2] / "examples/models/tiny-llama"
DECODER = {
    "hidden_size": 60, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 10, "vocab_size": 112, "max_position_embeddings": 96,
}  # fmt: skip
IDS = torch.randint(0, 112, (2, 40), generator=torch.Generator().manual_seed(3))
OURS = ("bridge.json", "report.json", "report.html")  # they name the run's own path and seconds


def built(family: str, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(5)
    if family == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=60, n_layer=2, n_head=6, vocab_size=112, n_positions=96)).eval()
    return LlamaForCausalLM(LlamaConfig(**DECODER)).eval().to(dtype)


def loop(model: Any) -> None:
    model(IDS)


def oracles_loop(model: Any) -> None:
    for batch in tokens():
        model(batch)


def one(algorithm: str | None, path: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """NeMo 1's configs as its YAML has them; `changes` go to the config that has the key."""
    quantization = {
        "algorithm": algorithm, "decoder_type": "llama", "calib_dataset": "cnn_dailymail", "num_calib_size": 512,
        "awq_block_size": 128, "sq_alpha": 1.0, "enable_kv_cache": None,
    }  # fmt: skip
    export = {
        "decoder_type": "llama", "inference_tensor_parallel": 1, "inference_pipeline_parallel": 1, "dtype": "bf16",
        "save_path": str(path), "compress": False, "sample_output": True,
    }  # fmt: skip
    for config in (quantization, export):
        config.update({key: value for key, value in changes.items() if key in config})
    return quantization, export


def two(algorithm: str | None, path: Path, **changes: Any) -> tuple[QuantizationConfig, ExportConfig]:
    """NeMo 2's configs."""
    quantization, export = QuantizationConfig(algorithm), ExportConfig(path)
    for key, value in changes.items():
        setattr(quantization if hasattr(quantization, key) else export, key, value)
    return quantization, export


def contents(directory: Path) -> dict[str, bytes]:
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in sorted(files.items()) if name not in OURS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "algorithm", "kv", "configs", "changes"),
    [
        ("llama", "fp8", "fp8", two, {"inference_tp": 2}),
        pytest.param("llama", "fp8", "fp8", one, {"dtype": 16}, marks=pytest.mark.product),
        pytest.param("llama", "int8_sq", None, one, {}, marks=pytest.mark.product),
        ("llama", "int8", None, two, {}),
        ("llama-wide", "int4_awq", "fp8", two, {"dtype": "16"}),
        ("gpt2", "fp8", None, one, {"decoder_type": "gpt"}),
        ("gpt2", "int8_sq", None, one, {"decoder_type": "gpt"}),
    ],
)
def test_what_is_exported_equals_modelopts_export_of_its_own_calibration(
    family: str, algorithm: str, kv: str | None, configs: Callable[..., Any], changes: Mapping[str, Any], tmp_path: Path
) -> None:
    source = save(oracle.build(family, torch.bfloat16), tmp_path / "source")
    quantizer = Quantizer(*configs(algorithm, tmp_path / "ours", **changes))
    quantizer.export(quantizer.quantize(load(source), oracles_loop))
    algorithm = "int8_plain" if algorithm == "int8" else algorithm  # the oracle's name of INT8_DEFAULT_CFG
    answer = calibrated(source, algorithm, kv, tokens())
    if family == "gpt2":  # as NeMo does after mtq.quantize
        least = 0.01 * {"fp8": 448, "int8_sq": 127}[algorithm]
        mtq.postprocess_amax(answer.model, "*input_quantizer", lambda amax: torch.clamp(amax, min=least))
    dtype, tp = "bf16" if changes.get("dtype", "bf16") == "bf16" else "fp16", changes.get("inference_tp", 1)
    theirs = oracle.export(answer, tmp_path / "theirs", dtype, tp, 1)
    lines = oracle.compared(tmp_path / "ours", theirs)
    assert unexplained(lines, oracle.expected(family, algorithm, tp, 1)) == []


@pytest.mark.slow
@pytest.mark.parametrize("form", ["trtllm", "hf"])
def test_what_is_exported_equals_a_conversion_with_the_same_calibration(form: str, tmp_path: Path) -> None:
    model, scheme = built("llama", torch.bfloat16), load_scheme("fp8", kv="fp8")
    quantizer = Quantizer(*two("fp8", tmp_path / "door", export_format=form))
    report = quantizer.export(quantizer.quantize(model, loop))
    calibration = bridge.calibrate(model, scheme, loop)
    bridge.convert(model, form, scheme, tmp_path / "plain", calib=calibration, dtype="bf16")
    assert contents(tmp_path / "door") == contents(tmp_path / "plain")
    assert report.passed and report.out == str(tmp_path / "door")


@pytest.mark.parametrize(("algorithm", "scheme"), [("int4", "int4_wo"), ("int4_awq", "int4_awq")])
def test_int4_takes_the_blocks_that_a_conversion_by_name_takes(algorithm: str, scheme: str, tmp_path: Path) -> None:
    """128 does not divide 320. A size that is not the default is followed, and refused if it does not fit."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**DECODER | sizes | {"head_dim": 32})).eval()
    configs = two(algorithm, tmp_path / "door", export_format="hf", enable_kv_cache=False)
    quantizer = Quantizer(*configs)
    quantizer.export(quantizer.quantize(model, loop))
    calibration = None if algorithm == "int4" else bridge.calibrate(model, scheme, loop)
    bridge.convert(model, "hf", scheme, tmp_path / "plain", calib=calibration, dtype="bf16")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "door" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    if algorithm == "int4_awq":
        configs[0].awq_block_size, configs[1].path = 96, tmp_path / "other"
        with pytest.raises(BridgeError, match="does not divide into blocks of 96"):
            Quantizer(*configs).quantize(model, loop)


@pytest.mark.slow
def test_the_same_configs_may_come_from_omegaconf_or_as_objects(tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    quantization, export = one("fp8", tmp_path / "out")
    export["save_path"] = f"{tmp_path}/${{quantization.algorithm}}"  # as NeMo's YAML spells it
    yaml = omegaconf.OmegaConf.create({"quantization": quantization, "export": export})
    model = built("llama", torch.bfloat16)
    for configs in ((yaml.quantization, yaml.export), [SimpleNamespace(**c) for c in one("fp8", tmp_path / "object")]):
        quantizer = Quantizer(*configs)
        assert quantizer.quantization_config is configs[0] and quantizer.export_config is configs[1]
        quantizer.export(quantizer.quantize(model, loop))
    assert contents(tmp_path / "fp8") == contents(tmp_path / "object")


def quantized(family: str, algorithm: str, **said: Any) -> Any:
    return Quantizer({"algorithm": algorithm, **said}, None).quantize(built(family), loop)


@pytest.mark.parametrize(
    ("family", "algorithm", "said", "bits"),
    [
        ("llama", "fp8", {}, (4, 3)),
        ("llama", "int4", {}, (4, 3)),
        ("llama", "fp8", {"enable_kv_cache": False}, None),
        ("llama", "fp8", {"kv_cache_qformat": "nvfp4"}, (2, 1)),
        ("llama", "int8_sq", {}, None),
        ("llama", "int8_sq", {"enable_kv_cache": True}, 8),
        ("llama", "int8_sq", {"enable_kv_cache": True, "kv_cache_qformat": "fp8"}, (4, 3)),
        ("llama", "int8", {}, None),
        ("llama", "int8", {"enable_kv_cache": True}, (4, 3)),
        ("gpt2", "fp8", {}, None),
        ("gpt2", "fp8", {"enable_kv_cache": True}, (4, 3)),
    ],
)
def test_the_cache_is_quantized_by_nemos_rule(family: str, algorithm: str, said: dict[str, Any], bits: Any) -> None:
    found = [m for n, m in quantized(family, algorithm, **said).named_modules() if n.endswith("k_bmm_quantizer")]
    assert {module.num_bits for module in found if module.is_enabled} == ({bits} if bits else set())


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.5, 0.75])
def test_sq_alpha_is_modelopts_alpha(alpha: float) -> None:
    theirs = copy.deepcopy(mtq.INT8_SMOOTHQUANT_CFG) | {"algorithm": {"method": "smoothquant", "alpha": alpha}}
    expected = mtq.quantize(built("llama"), theirs, loop)
    ours = quantized("llama", "int8_sq", sq_alpha=alpha)
    names = [name for name, module in ours.named_modules() if name.endswith("_proj")]
    assert len(names) == 14
    for name in names:
        a, b = (model.get_submodule(name).input_quantizer for model in (ours, expected))
        assert torch.equal(a._pre_quant_scale, b._pre_quant_scale) and torch.equal(a.amax, b.amax), name


def test_nemo_2_does_not_read_its_sq_alpha(tmp_path: Path) -> None:
    expected = mtq.quantize(built("llama"), copy.deepcopy(mtq.INT8_SMOOTHQUANT_CFG), loop)
    ours = Quantizer(QuantizationConfig("int8_sq"), None).quantize(built("llama"), loop)
    with torch.no_grad():
        assert torch.equal(ours(IDS).logits, expected(IDS).logits)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["int4_awq", "w4a8_awq"])
def test_awq_block_size_is_modelopts_block_size(algorithm: str) -> None:
    preset = copy.deepcopy({"int4_awq": mtq.INT4_AWQ_CFG, "w4a8_awq": mtq.W4A8_AWQ_BETA_CFG}[algorithm])
    for entry in preset["quant_cfg"]:
        if entry.get("quantizer_name") == "*weight_quantizer":
            first = entry["cfg"][0] if isinstance(entry["cfg"], list) else entry["cfg"]
            first["block_sizes"][-1] = 20
    expected = mtq.quantize(built("llama"), preset, loop)
    ours = quantized("llama", algorithm, awq_block_size=20, enable_kv_cache=False)
    with torch.no_grad():
        assert torch.equal(ours(IDS).logits, expected(IDS).logits)
        assert not torch.equal(ours(IDS).logits, quantized("llama", algorithm, enable_kv_cache=False)(IDS).logits)


@pytest.mark.slow
def test_w4a8_of_gemma_is_searched_coarsely_as_in_nemo_2() -> None:
    torch.manual_seed(5)
    model = GemmaForCausalLM(GemmaConfig(**DECODER)).eval()
    preset = copy.deepcopy(mtq.W4A8_AWQ_BETA_CFG)
    found = Quantizer(QuantizationConfig("w4a8_awq", enable_kv_cache=False), None).quantize(model, loop)
    steps = [preset | {"algorithm": {"method": "awq_lite", "alpha_step": step}} for step in (1, 0.1)]
    theirs = [mtq.quantize(copy.deepcopy(model), step, loop) for step in steps]
    with torch.no_grad():
        coarse, fine = (torch.equal(found(IDS).logits, other(IDS).logits) for other in theirs)
    assert coarse and not fine


def test_inputs_of_a_gpt_are_calibrated_no_lower_than_nemo_does() -> None:
    found = quantized("gpt2", "fp8")
    amax = [float(m.amax) for n, m in found.named_modules() if n.endswith("input_quantizer") and m.is_enabled]
    assert len(amax) == 8 and min(amax) == float(np.float32(4.48))
    amax = [
        float(m.amax) for n, m in quantized("llama", "fp8").named_modules() if n.endswith("down_proj.input_quantizer")
    ]
    assert max(amax) < 4.48


def test_modelopt_quantizes_once_and_the_callers_model_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real, model = mtq.quantize, built("llama")
    monkeypatch.setattr(
        "modelopt.torch.quantization.quantize", lambda *args, **rest: calls.append(args) or real(*args, **rest)
    )
    with torch.no_grad():
        before = model(IDS).logits
        runs: list[Any] = []
        found = Quantizer({"algorithm": "int8_sq"}, None).quantize(model, lambda twin: runs.append(loop(twin)))
        assert len(calls) == 1 and len(runs) == 1
        assert torch.equal(model(IDS).logits, before) and not torch.equal(found(IDS).logits, before)


@pytest.mark.slow
def test_no_algorithm_changes_modelopts_presets() -> None:
    names = [name for name in dir(mtq) if name.endswith("_CFG")]
    before = {name: copy.deepcopy(getattr(mtq, name)) for name in names}
    for algorithm in nemo.SCHEMES:
        quantized("llama", algorithm, awq_block_size=20, sq_alpha=0.5, enable_kv_cache=True)
    assert {name: getattr(mtq, name) for name in names} == before


@pytest.mark.parametrize("configs", [one, two])
def test_a_null_algorithm_exports_the_model_as_it_is(configs: Callable[..., Any], tmp_path: Path) -> None:
    model, quantizer = built("llama", torch.bfloat16), Quantizer(*configs(None, tmp_path / "door"))
    if configs is two:
        assert quantizer.quantize(model, loop) is model
    else:
        with pytest.raises(AssertionError, match="algorithm is null: there is nothing to quantize"):
            quantizer.quantize(model, loop)
    quantizer.export(model)
    bridge.convert(model, "trtllm", None, tmp_path / "plain", dtype="bf16")
    assert contents(tmp_path / "door") == contents(tmp_path / "plain")


@pytest.mark.slow
def test_compress_writes_one_plain_tar(tmp_path: Path) -> None:
    model = built("llama", torch.bfloat16)
    for path, compress in (("model.qnemo", True), ("directory", False)):
        quantizer = Quantizer(*one("fp8", tmp_path / "new" / path, compress=compress, inference_pipeline_parallel=2))
        report = quantizer.export(quantizer.quantize(model, loop))
        assert report.out == str(tmp_path / "new" / path)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["directory", "model.qnemo"]
    with tarfile.open(tmp_path / "new/model.qnemo", "r:") as tar:
        assert all(name.startswith("./") for name in tar.getnames())
        tar.extractall(tmp_path / "unpacked", filter="data")
    assert contents(tmp_path / "unpacked") == contents(tmp_path / "new/directory")
    assert {"config.json", "rank0.safetensors", "rank1.safetensors"} <= contents(tmp_path / "unpacked").keys()
    assert json.loads((tmp_path / "unpacked/report.json").read_text())["out"] == str(tmp_path / "new/model.qnemo")


@pytest.mark.slow
def test_a_tar_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer = Quantizer(*one("fp8", tmp_path / "model.qnemo", compress=True))
    model = quantizer.quantize(built("llama", torch.bfloat16), loop)

    def full(directory: Path, archive: Path) -> None:
        archive.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(nemo, "_pack", full)
        with pytest.raises(WriteError, match=r"model.qnemo: No space left on device; nothing was kept"):
            quantizer.export(model)
    assert list(tmp_path.iterdir()) == []
    quantizer.export(model)
    with pytest.raises(WriteError, match="exists already"):
        quantizer.export(model)


@pytest.mark.slow
def test_without_a_loop_the_configs_text_calibrates_and_the_tokenizer_goes_along(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The bridge spans the river, and many people cross it. " * 200)
    sizes = {"calibration_dataset": str(text), "calibration_dataset_size": 6, "calibration_seq_len": 48}
    quantizer = Quantizer(*two("fp8", tmp_path / "out", **sizes))
    quantizer.export(quantizer.quantize(AutoModelForCausalLM.from_pretrained(TINY)))
    made = Calibration.load(tmp_path / "out/bridge/calibration.safetensors").provenance
    assert (made.samples, made.sequence) == (6, 48)
    assert (tmp_path / "out/tokenizer.json").is_file()


@pytest.mark.slow
def test_nemos_data_sets_stand_for_the_text_that_comes_with_bridge() -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY)
    twin = Quantizer(QuantizationConfig("fp8", enable_kv_cache=False), None).quantize(model)
    for name, amax in bridge.calibrate(model, "fp8", tokenizer=str(TINY)).input_amax.items():
        assert float(twin.get_submodule(name).input_quantizer.amax) == float(amax), name


def test_calls_out_of_order_are_errors(tmp_path: Path) -> None:
    model, quantizer = built("llama"), Quantizer(*two("fp8", tmp_path / "out"))
    with pytest.raises(AssertionError, match="nothing is quantized yet"):
        quantizer.export(model)
    quantizer.quantize(model, loop)
    with pytest.raises(AssertionError, match="this LlamaForCausalLM is not the model that quantize returned"):
        quantizer.export(model)
    without = Quantizer({"algorithm": "fp8"}, None)
    with pytest.raises(AssertionError, match="no export_config"):
        without.export(without.quantize(model, loop))
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_exported_is_refused_before_the_model_runs(tmp_path: Path) -> None:
    def never(model: Any) -> None:
        pytest.fail("ran")

    with pytest.raises(AssertionError, match="decoder_type is 'gpt', but LlamaForCausalLM is of type 'llama'"):
        Quantizer(*two("fp8", tmp_path / "out", decoder_type="gpt")).quantize(built("llama"), never)
    with pytest.raises(PlanError, match="heads"):
        Quantizer(*two("fp8", tmp_path / "out", inference_tp=4)).quantize(built("llama"), never)


def test_an_output_that_exists_is_refused_in_words_of_the_config(tmp_path: Path) -> None:
    model, quantizer = built("llama"), Quantizer(*two("fp8", tmp_path / "out"))
    twin = quantizer.quantize(model, loop)
    (tmp_path / "out").mkdir()
    for call in (lambda: quantizer.export(twin), lambda: quantizer.quantize(model, pytest.fail)):
        with pytest.raises(
            WriteError, match=r"exists already; remove it, or set another path \(save_path\) in"
        ) as caught:
            call()
        assert "overwrite" not in str(caught.value)


def test_what_a_forward_loop_raises_passes_through_and_nothing_is_quantized(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stopping(model: Any) -> None:
        raise Stop

    model, quantizer = built("llama"), Quantizer(*two("fp8", tmp_path / "out"))
    with pytest.raises(Stop):
        quantizer.quantize(model, stopping)
    assert not [name for name, _ in model.named_modules() if "quantizer" in name]
    with pytest.raises(AssertionError, match="nothing is quantized yet"):
        quantizer.export(model)


def test_int8_does_not_smooth_as_modelopts_preset_does_not() -> None:
    expected = mtq.quantize(built("llama"), copy.deepcopy(mtq.INT8_DEFAULT_CFG), loop)
    ours = quantized("llama", "int8")
    with torch.no_grad():
        assert torch.equal(ours(IDS).logits, expected(IDS).logits)


def test_modules_of_nemo_are_refused_in_words() -> None:
    kind = type("GPTModel", (torch.nn.Module,), {"__module__": "nemo.collections.llm.gpt.model.base"})
    with pytest.raises(
        SourceError, match="GPTModel: of the modules of NeMo and Megatron, only those that hold one GPTModel"
    ):
        Quantizer({"algorithm": "fp8"}, None).quantize(kind(), loop)
    with pytest.raises(SourceError, match="Linear in memory: not a transformers model"):
        Quantizer({"algorithm": "fp8"}, None).quantize(torch.nn.Linear(2, 3), loop)


def test_modify_model_config_sets_what_nemo_sets() -> None:
    expected = {"sequence_parallel": False, "layers": 3, "name": "modelopt", "apply_rope_fusion": False}
    plain: dict[str, Any] = {"sequence_parallel": True, "layers": 3}
    assert Quantizer.modify_model_config(plain) is plain and plain == expected
    assert vars(Quantizer.modify_model_config(SimpleNamespace(sequence_parallel=True, layers=3))) == expected
    assert "sequence_parallel" not in Quantizer.modify_model_config({})
    omegaconf = pytest.importorskip("omegaconf").OmegaConf
    closed = omegaconf.create({"sequence_parallel": True, "layers": 3})
    omegaconf.set_struct(closed, True)
    assert Quantizer.modify_model_config(closed) == expected
