"""Two models module by module: the error of a matrix is its own, and what follows only passes it on."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bridge.sources.opening import open_source  # noqa: E402
from bridge.workflows.inspect.changes.gemms import why_fixed  # noqa: E402
from bridge.workflows.inspect.side_by_side import ROWS, Difference, difference, rows_of, side_by_side  # noqa: E402

LLAMA = "examples/models/tiny-llama"


def batches(padded: bool = False) -> list[dict[str, Any]]:
    ids = torch.randint(3, 1500, (4, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[:, :20] = 0
    return [{"input_ids": ids[:2], "attention_mask": mask[:2]}, {"input_ids": ids[2:], "attention_mask": mask[2:]}]


def pair() -> tuple[Any, Any, dict[str, str]]:
    one, other = (open_source(LLAMA).load_model() for _ in range(2))
    return one, other, {name: "role" for name, module in one.named_modules() if not why_fixed(module)}


def test_equal_models_have_no_difference() -> None:
    one, other, matrices = pair()
    rows = side_by_side(one, other, batches(), matrices)
    assert {row.module for row in rows} >= {*matrices, "model.layers.0", "model.norm", "lm_head"}
    assert all(row.accumulated.sqnr is None and row.accumulated.norm_ratio == 1 for row in rows)
    assert {row.module for row in rows if row.alone} == {row.module for row in rows if row.role} == set(matrices)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in (*one.modules(), *other.modules()))


def test_a_matrix_whose_scale_is_halved_is_the_worst_alone_and_later_ones_are_not() -> None:
    one, other, matrices = pair()
    wrong = "model.layers.2.mlp.down_proj"
    other.get_submodule(wrong).weight.data.mul_(0.5)
    rows = {row.module: row for row in side_by_side(one, other, batches(), matrices)}
    alone = {name: rows[name].alone for name in matrices}
    assert alone[wrong] is not None and alone[wrong].sqnr == pytest.approx(6.02, abs=0.01)  # 20 log10 2
    assert alone[wrong].norm_ratio == pytest.approx(0.5)
    assert all(found is not None and found.sqnr is None for name, found in alone.items() if name != wrong)
    order = list(rows)
    assert all(rows[name].accumulated.sqnr is None for name in order[: order.index(wrong)])
    assert all(rows[f"model.layers.{n}"].accumulated.sqnr is not None for n in (2, 3, 4))


def test_the_error_of_a_module_is_that_of_its_whole_output() -> None:
    """All tokens are compared where there are few."""
    one, other, _ = pair()
    for param in other.parameters():
        param.data += 0.01 * torch.randn(param.shape, generator=torch.Generator().manual_seed(2))
    few = [{"input_ids": torch.arange(5, 25)[None]}]
    (row,) = [row for row in side_by_side(one, other, few, {}) if row.module == "lm_head"]
    with torch.no_grad():
        x, y = (model(**few[0]).logits.double() for model in (one, other))
    sqnr = 10 * torch.log10(x.square().sum() / (y - x).square().sum())
    assert row.accumulated.sqnr == pytest.approx(float(sqnr), rel=1e-6)
    assert row.accumulated.cosine == pytest.approx(float((x * y).sum() / (x.norm() * y.norm())), rel=1e-9)


@pytest.mark.parametrize("padded", [False, True])
def test_rows_are_spread_over_all_batches_without_padding(padded: bool) -> None:
    chosen = rows_of(batches(padded))
    assert ROWS <= sum(map(len, chosen)) < 2 * ROWS
    assert all(len(rows) for rows in chosen)
    if padded:
        assert all(bool((rows % 40 >= 20).all()) for rows in chosen)


def test_differences_of_zeros_and_of_values_that_are_not_finite() -> None:
    zero, one, bad = torch.zeros(2, 3), torch.ones(2, 3), torch.full((2, 3), float("nan"))
    assert difference([zero], [zero]) == Difference(None, 1.0, 1.0)
    assert difference([one], [bad]).sqnr == float("-inf")
    assert difference([zero], [one]).sqnr == float("-inf")
