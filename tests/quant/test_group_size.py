"""INT4 blocks of a scheme by name divide every matrix of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import bridge
from bridge.core.errors import PlanError, SourceError, UsageError
from bridge.core.values import Format, Site, Structure, TensorSpec
from bridge.quant.codec import zero_points
from bridge.quant.schemes.group_size import with_dividing_blocks
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Scheme

SOURCE = "examples/models/tiny-llama"


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


def test_a_recipe_without_rules_has_blocks_that_divide_and_a_scheme_of_ones_own_those_that_it_says(
    tmp_path: Path,
) -> None:
    (tmp_path / "base.toml").write_text('base = "int4:signround"\n[options]\nsteps = 20\n')
    structure, specs = model(192, 384)
    scheme = load_scheme(tmp_path / "base.toml")
    assert with_dividing_blocks(scheme.bound(structure.sites), structure, specs).weight[0].block == (64,)
    own = Path("mappings/schemes/int4_wo.toml").read_text()
    (tmp_path / "own.toml").write_text(own)
    scheme = load_scheme(tmp_path / "own.toml")
    assert with_dividing_blocks(scheme.bound(structure.sites), structure, specs).weight[0].block == (128,)


def test_rules_have_the_one_size_of_a_checkpoint(tmp_path: Path) -> None:
    structure, specs = model(256, 96)
    rule = '[[rule]]\nmodules = ["layers.1"]\nquant = "int4_wo"\n'
    int4, mixed = (recipe(tmp_path, f'base = "{base}"\n{rule}') for base in ("int4_awq", "fp8_pc_pt"))
    for scheme in (int4, mixed):
        changed = with_dividing_blocks(scheme, structure, specs)
        formats = [form for site in structure.sites if isinstance(form := changed.format_of(site), Format)]
        assert {one.block for form in formats for one in form.weight if one.dtype == "int4"} == {(32,)}


def test_a_size_that_is_asked_for_stays() -> None:
    """Without it tiny-llama would keep 128, and a model of other widths get what divides them."""
    plan = bridge.plan(SOURCE, "hf", "int4:gptq", group=32, runtime="vllm")
    assert {step.format.weight[0].block for step in plan.quantized if step.format} == {(32,)}
    assert plan.program == "vllm" and plan.options["format"] == "compressed-tensors"
    assert bridge.plan(SOURCE, "hf", "int4:gptq").scheme_digest != plan.scheme_digest


def test_a_recipe_sizes_its_base_and_its_rules(tmp_path: Path) -> None:
    recipe = tmp_path / "sized.toml"
    recipe.write_text(
        'base = "int4_wo"\ngroup = 64\n[[rule]]\nmodules = ["*.down_proj"]\nquant = "ct:W8A16"\ngroup = 32\n'
    )
    plan = bridge.plan(SOURCE, "hf", recipe, format="compressed-tensors", allow_split=True)
    found = {(step.format.weight[0].dtype, step.format.weight[0].block) for step in plan.quantized if step.format}
    assert found == {("int4", (64,)), ("int8", (32,))}


@pytest.mark.parametrize(
    ("quant", "group", "words"),
    [
        ("int4_wo", 48, r"group=48 \(--group\): blocks have 32, 64 or 128 values"),
        ("fp8", 64, "scheme fp8 has no integer weights in blocks"),
        ("nvfp4_wo", 32, "scheme nvfp4_wo has no integer weights in blocks"),
        ("int8_wo", 64, "scheme int8_wo has no integer weights in blocks"),
        (None, 64, "group=64 needs a scheme too"),
    ],
)
def test_a_size_that_nothing_can_have_is_one_error(quant: str | None, group: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        bridge.plan(SOURCE, "hf", quant, group=group)


def test_a_size_that_does_not_divide_is_refused_and_not_replaced(tmp_path: Path) -> None:
    from tests.oracles import llm_compressor_golden

    narrow = {**llm_compressor_golden.SHAPES, "intermediate_size": 192}
    with patch.dict(llm_compressor_golden.MODELS, llama=narrow):
        source = llm_compressor_golden.write_source(tmp_path / "source")
    assert "INT4 blocks of 64 instead of 128" in " ".join(bridge.plan(source, "hf", "int4_wo").notes)
    with pytest.raises(PlanError, match="in = 192 does not divide into blocks of 128"):
        bridge.plan(source, "hf", "int4_wo", group=128)


@pytest.mark.parametrize(
    ("words", "why"), [({"zero_points": "yes"}, "give True or False"), ({"group": 0}, "32, 64 or")]
)
def test_words_that_are_no_option_of_blocks_are_refused(words: dict[str, Any], why: str) -> None:
    for quant in ("int4_wo", None):
        with pytest.raises(UsageError, match=why):
            bridge.plan("examples/models/tiny-llama", "hf", quant, **words)


def test_a_scale_of_a_range_that_its_dtype_does_not_hold_is_named() -> None:
    values = np.zeros((1, 128), np.float32)
    values[0, :2] = -2e6, 2e6
    with pytest.raises(SourceError, match="m: a scale does not fit its dtype"):
        zero_points.encoded(values, "int4", 128, "float32", "float16", "m")
