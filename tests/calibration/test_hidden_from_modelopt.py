"""What ModelOpt would break is out of its sight while it makes modules quantizable, and back afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.needs import Lazy, needs

torch = pytest.importorskip("torch")
needs("modelopt")
custom = Lazy("modelopt.torch.quantization.plugins.custom")

from torch import nn  # noqa: E402
from torch.nn.utils.parametrizations import weight_norm  # noqa: E402

from bridge.calibration.quantizers import (  # noqa: E402
    hidden_from_modelopt,
    known_formats,
    registering,
    without_deprecations,
)
from bridge.core.values import Format, Site  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402


class DbrxFFN(nn.Module):
    """Has the name of a module whose experts ModelOpt cuts wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Linear(3, 5)


def model() -> Any:
    return nn.ModuleDict({"conv": weight_norm(nn.Conv1d(3, 5, 2)), "ffn": DbrxFFN(), "plain": nn.Linear(3, 5)})


def bindings(*modules: str) -> Any:
    return cast(Any, [SimpleNamespace(module=name) for name in modules])


def test_computed_weights_and_experts_of_dbrx_are_out_of_sight() -> None:
    root = model()
    before = {name for name, _ in root.named_modules()}
    with hidden_from_modelopt(root, bindings("plain")):
        inside = {name for name, _ in root.named_modules()}
        assert root["ffn"].experts.in_features == 3  # attributes can be read
    assert inside == {"", "conv", "ffn", "plain"}
    assert {name for name, _ in root.named_modules()} == before


def test_a_module_that_holds_a_site_stays() -> None:
    root = model()
    with hidden_from_modelopt(root, bindings("ffn.experts")):
        assert "ffn.experts" in dict(root.named_modules())


def test_modules_are_back_after_an_error() -> None:
    root = model()
    with pytest.raises(KeyError), hidden_from_modelopt(root, ()):
        raise KeyError
    assert "conv.parametrizations" in dict(root.named_modules())


def test_attention_is_made_quantizable_for_the_cache_alone() -> None:
    def found() -> bool:
        return any("attentions" in one.__name__ for one in custom.CUSTOM_MODEL_PLUGINS)

    with registering(custom.CUSTOM_MODEL_PLUGINS, cache=True):
        assert found()
    with registering(custom.CUSTOM_MODEL_PLUGINS, cache=False):
        assert not found()
    assert found()


@pytest.mark.parametrize(("scheme", "seen"), [("int4_awq", False), ("nvfp4_wo", False), ("fp8", True), ("int8", True)])
def test_convolutions_in_blocks_of_weights_are_written_by_no_target(scheme: str, seen: bool) -> None:
    sites = [Site("conv", "conv.weight", "conv"), Site("plain", "plain.weight", "out_in")]
    formats = known_formats(sites, load_scheme(scheme))
    assert isinstance(formats["plain"], Format)
    assert isinstance(formats["conv"], Format) == seen


def test_pre_scales_of_our_codes_are_those_of_modelopt_s_scheme() -> None:
    sites = [Site("plain", "plain.weight", "out_in")]
    assert known_formats(sites, load_scheme("int4:awq")) == known_formats(sites, load_scheme("int4_awq"))


def test_attention_whose_arguments_transformers_renamed_is_seen_without_the_decorator() -> None:
    from transformers.utils.deprecation import deprecate_kwarg

    class Attention(nn.Module):
        @deprecate_kwarg("past_key_values", "99.0", new_name="cache")
        def forward(self, rows: Any, cache: Any = None) -> Any:
            return rows

    decorated: Any = Attention.forward
    with without_deprecations(nn.Sequential(Attention(), nn.Linear(3, 5))):
        assert Attention.forward is decorated.__wrapped__
    assert Attention.forward is decorated
