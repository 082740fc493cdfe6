"""Changed GEMMs: what each takes under features, bit for bit, and when."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import linear  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402

import bridge  # noqa: E402
from bridge.quant.calibration import Calibration, Provenance  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.workflows.inspect.changes.layer_changes import LayerChanges, add_features  # noqa: E402
from bridge.workflows.inspect.collect import Schemes  # noqa: E402
from bridge.workflows.inspect.layers import Layer  # noqa: E402
from bridge.workflows.inspect.routes import TAKES  # noqa: E402
from bridge.workflows.inspect.te.resolve import load_routing  # noqa: E402
from tests.workflows.inspect.formats_in_torch import (  # noqa: E402
    E4M3,
    E5M2,
    Quantize,
    by_row,
    config,
    disable,
    divided,
    e4m3,
    equal,
    fake,
    fp8,
    int4_blocks,
    int8,
    mx,
    nvfp4,
    same,
    stats,
    whole,
)  # fmt: skip

PLACES = [(gemm, name) for gemm, names in TAKES.items() for name in names]
# options -> what becomes of a weight (and its gradient), and of the others
FORMATS: dict[tuple[str, str], tuple[Quantize, Quantize]] = {
    ("quant_format", "FP8E4M3"): (fp8(E4M3), fp8(E4M3)),
    ("quant_format", "FP8E5M2"): (fp8(E5M2), fp8(E5M2)),
    ("quant_format", "MXFP8E4M3"): (mx(E4M3), mx(E4M3)),
    ("quant_format", "MXFP8E5M2"): (mx(E5M2), mx(E5M2)),
    ("scheme", "fp8"): (divided(whole, e4m3, 448), divided(whole, e4m3, 448)),
    ("scheme", "fp8_pc_pt"): (divided(by_row, e4m3, 448), divided(by_row, e4m3, 448)),
    ("scheme", "int8"): (divided(by_row, int8, 127), divided(whole, int8, 127)),
    ("scheme", "int8_wo"): (divided(by_row, int8, 127), same),
    ("scheme", "int4_wo"): (int4_blocks, same),
    ("scheme", "mxfp8"): (mx(E4M3), mx(E4M3)),
    ("scheme", "nvfp4"): (nvfp4, nvfp4),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def made(kind: str, dtype: Any, seed: int = 0) -> tuple[Any, Any, Any]:
    """A model of one layer, its input and the gradient of its output: 2 x 3 tokens, 256 -> 128."""
    torch.manual_seed(seed)
    layer = torch.nn.Linear(256, 128) if kind == "linear" else Conv1D(128, 256)
    torch.nn.init.normal_(layer.weight, std=0.3)
    model = torch.nn.ModuleDict({"layer": layer}).to(dtype)
    model.forward = lambda x: layer(x)
    return model, torch.randn(2, 3, 256, dtype=dtype), torch.randn(2, 3, 128, dtype=dtype)


def run(model: Any, x: Any, gradient: Any) -> tuple[Any, Any, Any]:
    """output, dgrad, wgrad (out, in)."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = model(x)
    out.backward(gradient)
    turned = isinstance(model["layer"], Conv1D)
    weight = model["layer"].weight.grad
    return out.detach(), x.grad, weight.t() if turned else weight


def wanted(model: Any, x: Any, gradient: Any, quantize: Callable[[str, str, Any], Any]) -> tuple[Any, Any, Any]:
    layer = model["layer"]
    weight = layer.weight.detach()
    weight = weight.t() if isinstance(layer, Conv1D) else weight
    rows, grad = x.reshape(6, 256), gradient.reshape(6, 128)
    out = linear(
        quantize("fprop", "activation", rows).view(2, 3, 256), quantize("fprop", "weight", weight), layer.bias.detach()
    )
    dgrad = quantize("dgrad", "gradient", grad) @ quantize("dgrad", "weight", weight)
    wgrad = quantize("wgrad", "gradient", grad).t() @ quantize("wgrad", "activation", rows)
    return (
        quantize("fprop", "output", out.view(6, 128)).view(2, 3, 128),
        quantize("dgrad", "dgrad", dgrad).view(2, 3, 256),
        quantize("wgrad", "wgrad", wgrad),
    )


def chosen_places(seed: int) -> list[tuple[str, str]]:
    """Some of the nine; all of them for seed 0."""
    keep = torch.rand(9, generator=torch.Generator().manual_seed(seed)) < 0.6
    return [place for place, kept in zip(PLACES, keep, strict=True) if kept or not seed]


def covering() -> list[Any]:
    """Each format with each dtype; kinds of layers and chosen places vary along."""
    cases = []
    for number, (form, dtype) in enumerate(product(FORMATS, DTYPES)):
        kind = ("linear", "conv1d")[number % 2]
        cases.append(pytest.param(form, dtype, kind, number % 7, id=f"{form[1]}-{str(dtype)[6:]}-{kind}-{number % 7}"))
    return cases


@pytest.mark.parametrize(("form", "dtype", "kind", "seed"), covering())
def test_fake_quant_is_the_formats_formula_in_each_gemm(form: Any, dtype: Any, kind: str, seed: int) -> None:
    model, x, gradient = made(kind, dtype, seed)
    places = chosen_places(seed)
    gemms = {gemm: [name for where, name in places if where == gemm] for gemm in TAKES}

    def quantize(gemm: str, name: str, tensor: Any) -> Any:
        if (gemm, name) not in places:
            return tensor
        return FORMATS[form][name not in ("weight", "wgrad")](tensor.float()).to(dtype).contiguous()

    given = fake({gemm: names for gemm, names in gemms.items() if names}, **dict([form]))
    with bridge.inspecting(model, config(given)) as session:
        found = run(model, x, gradient)
        session.step()
    for ours, theirs, what in zip(
        found, wanted(model, x, gradient, quantize), ("output", "dgrad", "wgrad"), strict=True
    ):
        assert torch.equal(ours, theirs), (what, (ours - theirs).abs().max())


# a scheme, and what takes layers out of it


@pytest.mark.parametrize("scheme", ["mxfp8", "int8_wo", "fp8", "nvfp4"])
@pytest.mark.parametrize("out", [(), ("fprop",), ("dgrad", "wgrad"), ("fprop", "dgrad", "wgrad")], ids=str)
def test_the_scheme_of_the_session_is_in_every_gemm_that_is_not_disabled(scheme: str, out: tuple[str, ...]) -> None:
    """Gradients are not quantized: dgrad takes the quantized weight, wgrad the quantized activation."""
    model, x, gradient = made("linear", torch.bfloat16)

    def quantize(gemm: str, name: str, tensor: Any) -> Any:
        if gemm in out or name not in ("weight", "activation"):
            return tensor
        return FORMATS["scheme", scheme][name != "weight"](tensor.float()).to(tensor.dtype).contiguous()

    features = stats("output") | (disable(*out) if out else {})
    with bridge.inspecting(model, config(features), quant=scheme) as session:
        found = run(model, x, gradient)
        session.step()
    assert equal(found, wanted(model, x, gradient, quantize))
    assert session.inspection.records[0].value == pytest.approx(
        float(found[0].float().square().mean().sqrt()), rel=1e-5
    )


def test_a_layer_that_is_disabled_has_its_own_forward() -> None:
    model, x, gradient = made("linear", torch.float32)
    plain = run(model, x, gradient)
    with bridge.inspecting(model, config(disable()), quant="int4_wo"):
        assert "forward" not in vars(model["layer"]) and equal(run(model, x, gradient), plain)
    with bridge.inspecting(model, config(disable("fprop"))) as session:
        assert "forward" not in vars(model["layer"]) and equal(run(model, x, gradient), plain)
        session.step()
    assert session.schemes.note_lines() == [
        "DisableQuantizationGEMM has no effect: nothing is quantized there (quant=): 1 layer (layer)"
    ]


def test_fake_quant_takes_its_gemm_out_of_the_scheme_and_says_so_where_one_operand_is_named() -> None:
    model, x, gradient = made("linear", torch.float32)

    def quantize(gemm: str, name: str, tensor: Any) -> Any:
        if gemm == "fprop":
            return fp8(E5M2)(tensor) if name == "weight" else tensor
        return mx(E4M3)(tensor) if name in ("weight", "activation") else tensor

    features = fake({"fprop": ["weight"]}, quant_format="FP8E5M2")
    with bridge.inspecting(model, config(features), quant="mxfp8") as session:
        found = run(model, x, gradient)
        session.step()
    assert equal(found, wanted(model, x, gradient, quantize))
    assert session.schemes.note_lines() == [
        "FakeQuant changes weight of fprop alone, and the other operand is not quantized: 1 layer (layer)"
    ]


def test_per_tensor_scaling_replaces_a_static_amax() -> None:
    model, x, gradient = made("linear", torch.float32)
    static = divided(lambda _: torch.tensor(1.5), e4m3, 448)
    both = {"enabled": True, "gemms": ["fprop", "dgrad"], "tensors": ["activation", "gradient"]}

    def quantize(scaled: bool) -> Callable[[str, str, Any], Any]:
        def of(gemm: str, name: str, tensor: Any) -> Any:
            if scaled and (gemm, name) == ("fprop", "activation"):
                return fp8(E4M3)(tensor)
            if scaled and (gemm, name) == ("dgrad", "gradient"):
                return fp8(E5M2)(tensor)
            return {"activation": static, "weight": divided(whole, e4m3, 448)}.get(name, same)(tensor)

        return of

    calibration = Calibration(Provenance("", "", "", "", "", "", 0, 0), {"layer": np.array(1.5, np.float32)})
    for scaled in (False, True):
        features = stats("output") | ({"PerTensorScaling": both} if scaled else {})
        with bridge.inspecting(model, config(features), quant="fp8", calib=calibration):
            found = run(model, x, gradient)
        assert equal(found, wanted(model, x, gradient, quantize(scaled))), scaled


def test_per_tensor_scaling_leaves_a_layer_that_the_scheme_leaves() -> None:
    words = {"enabled": True, "gemms": "fprop", "tensors": "activation"}
    routing = load_routing(config({"PerTensorScaling": words}), [Layer("lm_head")], load_scheme("fp8"))
    schemes = Schemes(load_scheme("fp8"))
    changes = LayerChanges(Layer("lm_head"))
    add_features(changes, routing.routes, schemes)
    assert not changes.needed
    assert schemes.note_lines() == [
        "PerTensorScaling replaces no static scale: quant= leaves the inputs as they are: 1 layer (lm_head)"
    ]
