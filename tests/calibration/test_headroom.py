"""`nvfp4_act_headroom`: the scale above the blocks of activations is that of ModelOpt's own calibrator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bridge
from bridge.core.errors import SchemeError
from bridge.quant.schemes.load import load_scheme
from bridge.sources.opening import open_source

torch = pytest.importorskip("torch")
SOURCE = Path("examples/models/tiny-llama")


@pytest.mark.slow
def test_amax_of_inputs_is_what_modelopts_calibrator_makes_of_them() -> None:
    """It is fed with the inputs that transformers' model sees; the plain scheme has their largest value."""
    calibrator = pytest.importorskip("modelopt.torch.quantization.calib.nvfp4_act_headroom")
    rows = torch.randint(3, 80, (8, 64), generator=torch.Generator().manual_seed(5))
    batches = [rows[:4], rows[4:], rows[:4]]  # the last is held out
    ours = bridge.calibrate(SOURCE, quant="nvfp4_act_headroom", data=batches).input_amax
    plain = bridge.calibrate(SOURCE, quant="nvfp4", data=batches).input_amax
    model = open_source(SOURCE).load_model()
    seen = {name: calibrator.NVFP4ActHeadroomCalibrator() for name in ours}
    for name, one in seen.items():
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, one=one: one.collect(args[0]))
    with torch.no_grad():
        for batch in batches[:-1]:
            model(batch)
    assert len(ours) == 35
    for name, one in seen.items():
        assert np.float32(ours[name]) == pytest.approx(float(one.compute_amax()), rel=1e-6)
        assert ours[name] > 10 * plain[name]


def test_the_rule_is_about_measured_inputs_of_nvfp4(tmp_path: Path) -> None:
    gate = "cosine = 0.8\nnorm = [0.5, 1.5]"
    path = tmp_path / "own.toml"
    path.write_text(
        f'summary = "own"\nalgorithm = "nvfp4_act_headroom"\n[[weight]]\ndtype = "int8"\nper = "channel"\n'
        f"[parity.tensor]\n{gate}\n[parity.output]\n{gate}\n"
    )
    with pytest.raises(SchemeError, match=r"is for \[input\] of NVFP4 whose amax is measured"):
        load_scheme(path)
