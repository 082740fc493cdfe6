"""Inputs that are quantized when a model runs: ours are those of compressed-tensors' and ModelOpt's own quantizers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bridge.calibration.quantizers import numeric_cfg  # noqa: E402
from bridge.core.values import Numeric  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.verification.simulated.inputs import InputCodes  # noqa: E402

ROUNDING = 2e-7  # of the largest value: float32 products in another order
# compressed-tensors' INT8 of a token is amax / 127.5, ours is amax / 127 as vLLM's and SGLang's kernels and ModelOpt's.
HALF_A_CODE = 0.5 / 127
# scheme -> llm-compressor's preset, and how far the values are from compressed-tensors' as a part of the largest
SCHEMES = {
    "int8_pc_pt": ("W8A8", HALF_A_CODE + 1 / 255),
    "fp8_pc_pt": ("FP8_DYNAMIC", ROUNDING),
    "fp8_block_dynamic": ("FP8_BLOCK", ROUNDING),
    "w4a8_fp8": ("W4AFP8", ROUNDING),
    "mxfp8": ("MXFP8", ROUNDING),
}


def inputs() -> Any:
    """Heavy tails, and tokens of very different size."""
    random = np.random.default_rng(3)
    x = random.standard_t(3, (24, 256)).astype(np.float32) * np.geomspace(0.01, 30, 24, dtype=np.float32)[:, None]
    return torch.from_numpy(x)


def ours(numeric: Numeric, x: Any) -> Any:
    return torch.from_numpy(InputCodes(numeric, 0.0, np.ones(1, np.float32)).values(x.numpy()))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inputs_are_those_of_compressed_tensors(scheme: str) -> None:
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp

    preset, tolerance = SCHEMES[scheme]
    args, numeric, x = preset_name_to_scheme(preset, []).input_activations, load_scheme(scheme).input, inputs()
    scale, zero = compute_dynamic_scales_and_zp(x[None], args, torch.nn.Linear(256, 8))
    theirs = fake_quantize(x[None], scale, zero, args)[0]
    assert numeric and float(((ours(numeric, x) - theirs) / x.abs().amax(-1, keepdim=True)).abs().max()) <= tolerance


def test_inputs_in_mxfp4_are_those_of_modelopt() -> None:
    """Of its quantized tensors: its fake quantizer needs CUDA; compressed-tensors rounds exponents otherwise."""
    from bridge.calibration.modelopt import modelopt

    modelopt()
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    x, numeric = inputs(), load_scheme("mxfp4").input
    codes, scale = MXFP4QTensor.quantize(x, block_size=32)
    theirs = codes.dequantize(dtype=torch.float32, scale=scale, block_sizes={-1: 32})
    assert numeric and torch.equal(ours(numeric, x), theirs.reshape(x.shape))


@pytest.mark.parametrize("scheme", ["int8_pc_pt", "fp8_pc_pt", "fp8_block_dynamic", "w4a8_fp8"])
def test_inputs_are_those_of_modelopt(scheme: str) -> None:
    """Batches of several shapes one after the other, the last of a width that its groups do not divide."""
    from bridge.calibration.modelopt import modelopt

    mtq, numeric = modelopt(), load_scheme(scheme).input
    assert numeric
    entries = [{"quantizer_name": "*", "enable": False}]
    entries += [{"quantizer_name": "*input_quantizer", "cfg": numeric_cfg(numeric, weight=False)}]
    model = mtq.quantize(
        torch.nn.Sequential(torch.nn.Linear(256, 8)), {"quant_cfg": entries, "algorithm": "max"}, lambda model: None
    )
    quantizer, x = model[0].input_quantizer, inputs()
    for batch in (x.reshape(2, 12, 256), x[None, :7], x[:, :192].reshape(4, 6, 192)):
        flat = batch.reshape(-1, batch.shape[-1]).contiguous()
        off = (ours(numeric, flat) - quantizer(batch).reshape(flat.shape)) / flat.abs().amax(-1, keepdim=True)
        assert float(off.abs().max()) <= ROUNDING
