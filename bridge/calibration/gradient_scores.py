"""Rank modules by ModelOpt's estimate of the loss from quantizing each."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridge.calibration.modelopt import FakeQuantized, copy_modules, modelopt, quiet
from bridge.calibration.quantizers import numeric_cfg
from bridge.core.errors import CalibrationError
from bridge.core.text import fold_layers


def gradient_scores(
    quantized: FakeQuantized,
    units: Sequence[Sequence[str]],
    batches: Sequence[Mapping[str, Any]],
    loss: Callable[..., Any],
) -> list[float]:
    """Return ModelOpt's estimate of the loss from quantizing each of `units` (live modules): (dloss/dy * error of y)^2.

    One forward and backward per batch for all units. The bindings of `quantized` have one format, calibrated by max; it
    is not changed. A unit that ModelOpt does not score is a CalibrationError.
    """
    mtq = modelopt()
    form, inside = quantized.bindings[0].format, {name for unit in units for name in unit}
    device = next(quantized.model.parameters()).device
    fake = copy_modules(quantized.plain).to(device)
    entries = [{"quantizer_name": "*weight_quantizer*", "cfg": numeric_cfg(form.weight[0], weight=True)}]
    if form.input:
        entries.append({"quantizer_name": "*input_quantizer*", "cfg": numeric_cfg(form.input, weight=False)})
    config = {"quant_cfg": [{"quantizer_name": "*", "enable": False}, *entries], "algorithm": {"method": "max"}}
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        _, state = mtq.auto_quantize(
            fake,
            {"effective_bits": 16.0},  # its own choice is not used
            [config],
            data_loader=[{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches],
            forward_step=lambda model, batch: model(**batch, use_cache=False).logits,
            loss_func=loss,
            num_calib_steps=len(batches),
            num_score_steps=len(batches),
            disabled_layers=[name for name, _ in fake.named_modules() if name and name not in inside],
        )
    scored = {name: stats for stats in state["candidate_stats"].values() for name in stats["module_names"]}
    if lost := inside - set(scored):
        raise CalibrationError(f"ModelOpt does not score {', '.join(fold_layers(sorted(lost)))}; use method='kl'")
    groups = [{id(scored[name]): scored[name] for name in unit}.values() for unit in units]
    return [sum(float(stats["scores"][0]) for stats in group) for group in groups]
