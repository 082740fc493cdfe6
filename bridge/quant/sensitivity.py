"""Which layers hurt: the damage each module does when it alone is quantized; changes no model, writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bridge.errors import CalibrationError
from bridge.quant.answers import runner
from bridge.quant.data import Data
from bridge.quant.modelopt import check_device, fake_quantized, quiet
from bridge.quant.scheme import Scheme
from bridge.values import Structure

if TYPE_CHECKING:
    from bridge.sources import Source

Progress = Callable[[int, int, str], None]


def sensitivity(
    source: Source,
    structure: Structure,
    scheme: Scheme,
    data: Data,
    *,
    device: str | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """How much each module alone damages the model: relative L2 error of output 0 with only it quantized, worst first.

    One run of the first held-out batch for each module.
    """
    from bridge.sources.live import live_names

    check_device(scheme, device or ("cuda" if scheme.simulation_needs_cuda else None))
    if not data.held_out:
        raise CalibrationError(f"sensitivity needs inputs to run: {data.missing}")
    scheme = scheme.bound(structure.sites)
    model, report = source.load_model(), progress or (lambda done, total, text: None)
    origins = live_names(model, source.specs)
    damage: dict[str, float] = {}
    with fake_quantized(model, scheme, structure, data, origins, device=device) as twin:
        quantizers = [m for m in twin.model.modules() if hasattr(m, "is_enabled") and m.is_enabled]
        by_site: dict[str, list[Any]] = {}
        for wire in twin.wires:
            names = [wire.weight_quantizer] + ([wire.input_quantizer] if wire.format.input else [])
            by_site.setdefault(wire.site.module, []).extend(twin.model.get_submodule(name) for name in names)
        run = runner(twin.model)
        with quiet():
            for quantizer in quantizers:
                quantizer.disable()
            plain = run(data.held_out[0])
            for at, (module, own) in enumerate(by_site.items(), 1):
                for quantizer in own:
                    quantizer.enable()
                damage[module] = float((run(data.held_out[0]) - plain).norm() / plain.norm())
                for quantizer in own:
                    quantizer.disable()
                report(at, len(by_site), "measure sensitivity")
    return dict(sorted(damage.items(), key=lambda item: -item[1]))
