"""INT4 blocks of a scheme by name divide every matrix of the model."""

from __future__ import annotations

import pytest

from bridge.core.values import Site, Structure, TensorSpec
from bridge.quant.schemes.group_size import with_dividing_blocks
from bridge.quant.schemes.load import load_scheme


def model(*widths: int) -> tuple[Structure, dict[str, TensorSpec]]:
    sites = tuple(Site(f"layers.{at}", f"layers.{at}.weight", "out_in", layer=at) for at in range(len(widths)))
    specs = {site.weight: TensorSpec(site.weight, (96, w), "bfloat16") for site, w in zip(sites, widths, strict=True)}
    return Structure("Tiny", sites, (), {}, {}), specs


@pytest.mark.parametrize(
    ("widths", "size"), [((256, 384), 128), ((256, 192), 64), ((96, 256), 32), ((256, 72), 128), ((), 128)]
)
def test_the_largest_size_that_divides_all_is_taken(widths: tuple[int, ...], size: int) -> None:
    scheme = with_dividing_blocks(load_scheme("int4_awq"), *model(*widths))
    assert [one.block for one in scheme.weight] == [(size,)]
    assert bool(scheme.note) == (size != 128)


def test_the_first_matrix_that_asks_for_it_is_told() -> None:
    note = with_dividing_blocks(load_scheme("int4_wo"), *model(256, 192)).note
    assert note.startswith("INT4 blocks of 64 instead of 128: layers.1 has in = 192")


def test_schemes_without_blocks_of_int4_stay() -> None:
    scheme = load_scheme("nvfp4_wo")
    assert with_dividing_blocks(scheme, *model(192)) is scheme
