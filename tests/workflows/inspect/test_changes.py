"""Changed GEMMs: what each takes under features, bit for bit, and when."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import linear  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402

import bridge  # noqa: E402
from bridge.workflows.inspect.changes.gemms import GEMMS  # noqa: E402

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
PLACES = [(gemm, name) for gemm, names in GEMMS.items() for name in names]
Quantize = Callable[[Any], Any]


# what each format is, in torch alone: float32 in and out


def fp8(code: Any) -> Quantize:
    """Transformer Engine's: one scale that multiplies."""
    bound = torch.finfo(code).max

    def quantize(x: Any) -> Any:
        factor = bound / x.abs().max()
        return (x * factor).clamp(-bound, bound).to(code).float() * (1 / factor)

    return quantize


def mx(code: Any) -> Quantize:
    bound = torch.finfo(code).max

    def quantize(x: Any) -> Any:
        blocks = x.reshape(-1, 32)
        scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(1, keepdim=True).double() / bound))).float()
        return ((blocks / scale).clamp(-bound, bound).to(code).float() * scale).reshape(x.shape)

    return quantize


def divided(largest: Callable[[Any], Any], code: Callable[[Any], Any], bound: float) -> Quantize:
    """ModelOpt's: a scale amax / bound that divides."""

    def quantize(x: Any) -> Any:
        scale = largest(x) / bound
        return code(x / scale) * scale

    return quantize


def whole(x: Any) -> Any:
    return x.abs().max()


def by_row(x: Any) -> Any:
    return x.abs().amax(-1, keepdim=True)


def e4m3(x: Any) -> Any:
    return x.clamp(-448, 448).to(E4M3).float()


def int8(x: Any) -> Any:
    return x.round().clamp(-128, 127)


def int4_blocks(x: Any) -> Any:
    blocks = x.reshape(-1, 128)
    return divided(by_row, lambda c: c.round().clamp(-8, 7), 7)(blocks).reshape(x.shape)


def nvfp4(x: Any) -> Any:
    blocks, above = x.reshape(-1, 16), x.abs().max() / (6 * 448)
    scale = (by_row(blocks) / (6 * above)).clamp(2**-9, 448).to(E4M3).float() * above
    distance = ((blocks / scale).abs()[..., None] - FP4).abs().double()
    nearest = (distance + 1e-12 * torch.tensor([0, 1] * 4)).argmin(-1)  # of two, the even code
    return (blocks.sign() * FP4[nearest] * scale).reshape(x.shape)


def same(x: Any) -> Any:
    return x


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


def fake(gemms: dict[str, list[str]], **options: Any) -> dict[str, Any]:
    entries = [{"gemm": gemm, "tensors": names} for gemm, names in gemms.items()]
    return {"FakeQuant": {"enabled": True, "gemms_struct": entries, **options}}


def config(features: dict[str, Any], layers: Any = None) -> dict[str, Any]:
    return {"s": {"enabled": True, "layers": layers or {"layer_types": ["all"]}, "transformer_engine": features}}


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
    gemms = {gemm: [name for where, name in places if where == gemm] for gemm in GEMMS}

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
