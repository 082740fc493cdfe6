"""Who reads what, on models of a few lines that hold one trap each."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bridge.core.values import InputGroup
from bridge.planning.trace_inputs import input_reads

WIDTH = 6


class OneRMSNorm(nn.RMSNorm):
    """Multiplies by 1 + weight."""

    def forward(self, x: Any) -> Any:
        return nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight)


class Model(nn.Module):
    """An embedding, two norms, three matrices; `flow` is what happens between them."""

    main_input_name = "input_ids"

    def __init__(self, flow: Callable[[Any, Any], Any], norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=False)
        self.embed = nn.Embedding(11, WIDTH)
        self.norm, self.other = norm(), nn.LayerNorm(WIDTH)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.flow = flow

    def forward(self, input_ids: Any) -> Any:
        return SimpleNamespace(logits=self.flow(self, self.embed(input_ids)))


def groups(flow: Callable[[Any, Any], Any], norm: Callable[[], nn.Module] = lambda: nn.LayerNorm(WIDTH)) -> Any:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = Model(flow, norm)
    return input_reads(model, mode).groups


def plain(m: Any, x: Any) -> Any:
    x = m.norm(x)
    return m.a(x) + m.b(x)


def residual(m: Any, x: Any) -> Any:
    x = m.norm(x)
    return x + m.a(x) + m.b(x)


def idle(m: Any, x: Any) -> Any:
    """Casts, copies and dropouts that do nothing hand on the same object."""
    x = nn.functional.dropout(m.norm(x).to(x.dtype).contiguous(), 0.5, training=False)
    return (m.a(x) + m.b(x)) * x.shape[-1]


def in_place(m: Any, x: Any) -> Any:
    x = m.norm(x)
    x += 1
    return m.a(x) + m.b(x)


def twice(m: Any, x: Any) -> Any:
    """What the norm makes the second time goes elsewhere."""
    return plain(m, x) + m.norm(x)


def two_norms(m: Any, x: Any) -> Any:
    """A pre-scale of `a` cannot be folded into one of the norms before it."""
    return plain(m, x) + m.a(m.other(x))


def returned(m: Any, x: Any) -> Any:
    x = m.norm(x)
    m.a(x), m.b(x)
    return x


def viewed(m: Any, x: Any) -> Any:
    x = m.norm(x)
    return m.a(x.view(-1, WIDTH)) + m.b(x.view(-1, WIDTH))


def repeated(m: Any, x: Any) -> Any:
    """Layers that share their weights: the same group, run twice."""
    return plain(m, plain(m, x))


def bare(m: Any, x: Any) -> Any:
    return m.b(x) + m.c(x) + m.a(m.norm(x))


AB = ("a", "b")


@pytest.mark.parametrize(
    ("flow", "want"),
    [
        (plain, [InputGroup(AB, "norm", True)]),
        (residual, [InputGroup(AB, "norm", False)]),
        (idle, [InputGroup(AB, "norm", True)]),
        (in_place, [InputGroup(AB, "norm", False)]),
        (twice, [InputGroup(AB, "norm", False)]),
        (two_norms, [InputGroup(AB, "norm", False)]),
        (returned, [InputGroup(AB, "norm", False)]),
        (viewed, []),
        (repeated, [InputGroup(AB, "norm", True)]),
        (bare, [InputGroup(("b", "c"))]),
    ],
)
def test_who_reads_a_tensor_is_seen_whatever_stands_between(flow: Any, want: list[InputGroup]) -> None:
    assert list(groups(flow)) == want


def test_a_norm_that_adds_one_is_told_by_what_it_does() -> None:
    assert groups(plain, lambda: OneRMSNorm(WIDTH)) == (InputGroup(AB, "norm", True, True),)
    assert groups(plain, lambda: nn.RMSNorm(WIDTH)) == (InputGroup(AB, "norm", True, False),)
    assert groups(plain, lambda: nn.LayerNorm(WIDTH, elementwise_affine=False)) == (
        InputGroup(AB, "norm", True, False),
    )


def multiplied(m: Any, x: Any) -> Any:
    """As Mamba reads its `dt_proj`: the product is the model's own."""
    return m.a(x) + x @ m.b.weight.T


def through_a_view(m: Any, x: Any) -> Any:
    """As LFM2 reads its convolution."""
    return m.a(x) + nn.functional.conv1d(x.mT, m.conv.weight.squeeze(1)[:, None], groups=WIDTH).mT


def run_too(m: Any, x: Any) -> Any:
    """As T5 asks a weight for its dtype, and as DeepSeek multiplies by one that runs elsewhere."""
    return m.a(x.to(m.a.weight.dtype)) + m.b(x) + x @ m.b.weight.T


def only_asked(m: Any, x: Any) -> Any:
    return m.a(x.to(m.b.weight.dtype)) * m.c.weight.shape[0]


def tied(m: Any, x: Any) -> Any:
    m.b.weight = m.a.weight
    return m.a(x)


@pytest.mark.parametrize(
    ("flow", "want"),
    [(multiplied, ("b",)), (through_a_view, ("conv",)), (run_too, ()), (only_asked, ()), (tied, ())],
)
def test_a_module_whose_weight_is_read_but_that_never_runs_is_found(flow: Any, want: tuple[str, ...]) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = Model(flow, lambda: nn.LayerNorm(WIDTH))
        model.conv = nn.Conv1d(WIDTH, WIDTH, 1, groups=WIDTH)
    assert input_reads(model, mode).never_run == want


def test_no_hook_is_left() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = Model(lambda m, x: m.a(m.norm(x).missing), lambda: nn.LayerNorm(WIDTH))
    with pytest.raises(AttributeError, match="missing"):
        input_reads(model, mode)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
