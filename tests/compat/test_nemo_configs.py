"""The configs of NeMo's `Quantizer`: the defaults are NeMo's, and all that is wrong with them is told at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridge.compat import QUANT_CFG_CHOICES, nemo, nemo_configs
from bridge.compat.nemo import ExportConfig, QuantizationConfig, Quantizer
from bridge.core.errors import UsageError

ONE = ({"algorithm": "fp8", "decoder_type": "llama"}, {"decoder_type": "llama", "save_path": "out"})  # NeMo 1's words
WRONG = [
    ({"algorithm": "fp9"}, {}, r"algorithm 'fp9' is unknown; known: block_fp8, fp8, .*; nearest: fp8; or null"),
    ({}, {"dtype": "32"}, r"dtype '32' is unknown; known: 16, '16', 'bf16'"),
    ({}, {"dtype": 32}, "dtype 32 is unknown"),
    (
        {},
        {"export_format": "nemo"},
        "is NeMo's checkpoint with ModelOpt's state, which is not written; 'hf' and 'trtllm' write",
    ),
    ({}, {"export_format": "onnx"}, "export_format 'onnx' is unknown"),
    (
        {},
        {"export_format": "hf", "inference_tensor_parallel": 2},
        "inference_tp: a Hugging Face checkpoint is not split",
    ),
    ({}, {"save_path": None}, "names no directory to write"),
    ({}, {"path": "elsewhere"}, "'save_path' and 'path' mean the same"),
    ({}, {"compres": True}, r"export_config: 'compres' is unknown; .*nearest: compress"),
    ({"kv_cache_qformat": "int8"}, {}, "kv_cache_qformat 'int8' is unknown; known: fp8, nvfp4"),
    ({"enable_kv_cache": "yes"}, {}, "enable_kv_cache is 'yes'"),
    ({"awq_block_size": "128"}, {}, "awq_block_size is '128'"),
    ({"sq_alpha": 2}, {}, r"sq_alpha is 2; expected a number in \(0, 1\]"),
    ({"decoder_type": "gpt"}, {}, "decoder_type is gpt and llama"),
    ({"num_calib_size": 0}, {}, "calibration_dataset_size is 0; expected a positive whole number"),
    ({"calib_dataset": ["a"]}, {}, r"calibration_dataset is \['a'\]; expected a file or a dataset id"),
    ({}, {"inference_tensor_parallel": "2"}, "inference_tp is '2'; expected a positive whole number"),
    ({}, {"inference_pipeline_parallel": 0}, "inference_pp is 0; expected a positive whole number"),
    ({}, {"save_path": 3}, r"export_config has the path 3: set path \(save_path in NeMo 1\)"),
    ({}, {"compress": "no"}, "compress is 'no'; expected true or false"),
    ({"algorithm": "mine.json"}, {}, r"algorithm 'mine.json': ModelOpt configs are not supported; write a recipe"),
    ({"algorithm": ["fp8"]}, {}, r"algorithm \['fp8'\] is unknown"),
]


@pytest.mark.parametrize(("quantization", "export", "said"), WRONG)
def test_a_wrong_config_is_an_assertion_and_a_usage_error(
    quantization: dict[str, Any], export: dict[str, Any], said: str
) -> None:
    with pytest.raises(AssertionError, match=said) as caught:
        Quantizer(ONE[0] | quantization, ONE[1] | export)
    assert isinstance(caught.value, UsageError) and len(str(caught.value).splitlines()) == 2


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(AssertionError) as caught:
        Quantizer(ONE[0] | {"algorithm": "fp9", "sq_alpha": 0}, ONE[1] | {"dtype": 32})
    assert len(str(caught.value).splitlines()) == 4
    with pytest.raises(AssertionError, match="quantization_config is None"):
        Quantizer(None, None)


@pytest.mark.parametrize("path", [3, None])
def test_a_path_that_is_none_is_told_with_the_rest(path: Any) -> None:
    with pytest.raises(AssertionError, match="set path") as caught:
        Quantizer(QuantizationConfig("fp9"), ExportConfig(path, inference_tp="2"))  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize(
    ("configs", "said"),
    [
        (("fp8", "out"), ("quantization_config (str) has no algorithm", "export_config (str) has no path")),
        (({}, {}), ("quantization_config has no algorithm", "export_config has no path (save_path in NeMo 1)")),
        (
            (ExportConfig("out"), QuantizationConfig()),
            ("quantization_config (ExportConfig) has no algorithm", "export_config (QuantizationConfig) has no path"),
        ),
    ],
)
def test_what_is_no_config_is_told_for_both(configs: tuple[Any, Any], said: tuple[str, str]) -> None:
    with pytest.raises(AssertionError) as caught:
        Quantizer(*configs)
    assert all(words in str(caught.value) for words in said)


def test_the_choices_are_modelopts_own_presets_by_nemos_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The assertions of NeMo's own tests of its constructor."""
    mtq = pytest.importorskip("modelopt.torch.quantization")
    assert QUANT_CFG_CHOICES is nemo.QUANT_CFG_CHOICES and QUANT_CFG_CHOICES.keys() == nemo_configs.SCHEMES.keys()
    assert QUANT_CFG_CHOICES["int8"] is mtq.INT8_DEFAULT_CFG
    assert (
        Quantizer(ONE[0] | {"algorithm": "int8", "enable_kv_cache": True}, None).quant_cfg == QUANT_CFG_CHOICES["int8"]
    )
    assert Quantizer(ONE[0] | {"algorithm": None}, None).quant_cfg is None
    with pytest.raises(AttributeError, match="no attribute 'CHOICES'"):
        _ = nemo.CHOICES


def test_a_changed_quant_cfg_is_refused_and_not_ignored() -> None:
    pytest.importorskip("modelopt.torch.quantization")
    quantizer = Quantizer({"algorithm": "fp8"}, None)
    quantizer.quant_cfg["algorithm"] = "awq_lite"
    with pytest.raises(AssertionError, match="quant_cfg was changed, which is not followed"):
        quantizer.quantize(None)
    assert QUANT_CFG_CHOICES["fp8"]["algorithm"] != "awq_lite"


def test_the_defaults_are_nemo_2s() -> None:
    assert vars(QuantizationConfig()) == {
        "algorithm": "fp8", "awq_block_size": 128, "sq_alpha": 0.5, "enable_kv_cache": None, "kv_cache_qformat": "fp8",
        "calibration_dataset": "cnn_dailymail", "calibration_dataset_size": 512, "calibration_batch_size": 64,
        "calibration_seq_len": 128,
    }  # fmt: skip
    assert vars(ExportConfig("x")) == {
        "path": Path("x"), "export_format": "trtllm", "dtype": "bf16", "decoder_type": None, "inference_tp": 1,
        "inference_pp": 1, "generate_sample": False,
    }  # fmt: skip
