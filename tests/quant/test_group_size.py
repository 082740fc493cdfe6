"""INT4 blocks of a scheme by name divide every matrix of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.core.values import Format, Site, Structure, TensorSpec
from bridge.quant.schemes.group_size import with_dividing_blocks
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Scheme


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


def recipe(directory: Path, text: str) -> Scheme:
    (path := directory / "recipe.toml").write_text(text)
    return load_scheme(path)


def test_a_recipe_has_the_size_of_what_it_quantizes(tmp_path: Path) -> None:
    """The module that asked for smaller blocks may be one that a rule keeps."""
    structure, specs = model(256, 192, 96)
    kept = '[[rule]]\nmodules = ["layers.{}"]\nquant = "{}"\n'
    scheme = recipe(tmp_path, 'base = "int4_wo"\n' + kept.format(2, "none"))
    changed = with_dividing_blocks(scheme.bound(structure.sites), structure, specs)
    assert [one.block for one in changed.weight] == [(64,)] and "layers.1 has in = 192" in changed.note
    scheme = recipe(tmp_path, 'base = "int4_wo"\n' + kept.format("[12]", "int8_wo"))
    assert with_dividing_blocks(scheme, structure, specs) is scheme


def test_rules_have_the_one_size_of_a_checkpoint(tmp_path: Path) -> None:
    structure, specs = model(256, 96)
    rule = '[[rule]]\nmodules = ["layers.1"]\nquant = "int4_wo"\n'
    int4, mixed = (recipe(tmp_path, f'base = "{base}"\n{rule}') for base in ("int4_awq", "fp8_pc_pt"))
    for scheme in (int4, mixed):
        changed = with_dividing_blocks(scheme, structure, specs)
        formats = [form for site in structure.sites if isinstance(form := changed.format_of(site), Format)]
        assert {one.block for form in formats for one in form.weight if one.dtype == "int4"} == {(32,)}
