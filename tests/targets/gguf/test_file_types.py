"""File types of llama.cpp by name: the types are llama-quantize's, the blocks those of its library.

llama_quantize.json has what libllama itself chose, see tests/oracles/llama_quantize_golden.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import bridge
from bridge.core.errors import PlanError, SchemeError, UsageError
from bridge.core.formats.gguf import TYPES
from bridge.core.mappings import mappings
from bridge.planning.plan import Plan
from bridge.quant.codec.kquants import quantized
from bridge.quant.schemes.catalog import scheme_names
from bridge.quant.schemes.load import load_scheme
from bridge.targets.gguf.file_types import FILE_TYPES, ModelFacts, Place, is_values, tensor_type
from tests.models.gguf_families import save
from tests.oracles.llama_cpp import divergence
from tests.oracles.llama_quantize_golden import KEPT, LETTERS, MODELS

CHOSEN: dict[str, Any] = json.loads(KEPT.read_text())
ROUNDED = 5e-4  # of 17 layers, whose inputs llama.cpp rounds to 8 bits; see test_kquants.py
NAMED = [name for name in FILE_TYPES if name in scheme_names() and load_scheme(name).file_type]


def _facts(model: str, weighted: bool) -> ModelFacts:
    """As the golden's models are made."""
    rows = CHOSEN[model]["rows"]
    layers = 1 + max(int(name.split(".")[1]) for name in rows if name.startswith("blk."))
    grouped = {"grouped": 4, "narrow": 3}.get(model, 2)
    experts = MODELS[model][1].get("num_local_experts", 5 if model == "experts" else 0)
    values = tuple(int(name.split(".")[1]) for name in rows if is_values(name))
    return ModelFacts(layers, grouped, experts, "output.weight" not in rows, weighted=weighted, values=values)


@pytest.mark.parametrize("model", CHOSEN)
def test_the_type_of_each_tensor_is_that_of_llama_quantize(model: str) -> None:
    assert {*CHOSEN[model]["types"]} == {name + end for name in FILE_TYPES for end in ("", "+")}
    for file_type, letters in CHOSEN[model]["types"].items():
        known = _facts(model, file_type.endswith("+"))
        ours = {
            name: tensor_type(file_type.rstrip("+"), name, width, known)
            for name, width in CHOSEN[model]["rows"].items()
        }
        assert ours == dict(zip(ours, (LETTERS[letter] for letter in letters), strict=True)), file_type


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save(family, root / name, **changed) for name, (family, changed) in MODELS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("model", CHOSEN)
def test_a_plan_has_these_types(model: str, models: dict[str, Path]) -> None:
    for name in ("Q4_K_M", "q3_k_m", "iq4_xs:imatrix", "q5_0:imatrix"):
        plan = bridge.plan(str(models[model]), "gguf", name)
        letters = CHOSEN[model]["types"][name.lower().replace(":imatrix", "+")]
        assert _kinds(plan, CHOSEN[model]["rows"]) == [LETTERS[letter] for letter in letters], name


def _kinds(plan: Plan, rows: dict[str, int]) -> list[str]:
    found = {output.spec.name: output.spec.dtype for output in plan.outputs}
    return [found[name] for name in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name", "number"),
    [
        ("grouped", "Q4_K_M", 15), ("tied", "q2_k", 10), ("narrow", "Q5_K_S", 16), ("eight", "iq4_xs", 30),
        ("experts", "q3_k_l", 13), ("joined", "iq4_nl", 25), ("narrow", "q4_1", 3),
    ],
)  # fmt: skip
def test_blocks_are_those_of_the_library_and_llama_cpp_runs_them(
    model: str, name: str, number: int, models: dict[str, Path], tmp_path: Path
) -> None:
    source, out = models[model], tmp_path / "out"
    report = bridge.convert(str(source), "gguf", name, out, progress=False, runtime="llama.cpp")
    assert report.passed and not report.findings
    bridge.convert(str(source), "gguf", out=tmp_path / "plain", dtype="fp32", verify=False, progress=False)
    reader = gguf.GGUFReader(out / "model.gguf")
    assert reader.fields["general.file_type"].contents() == number
    written = {tensor.name: tensor for tensor in reader.tensors}
    plain = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "plain" / "model.gguf").tensors}
    for tensor in CHOSEN[model]["rows"]:
        kind = next(key for key, value in TYPES.items() if value == written[tensor].tensor_type)
        rows = plain[tensor].reshape(-1, plain[tensor].shape[-1])
        theirs = _library(rows, kind)
        assert np.array_equal(written[tensor].data.reshape(len(rows), -1), theirs), tensor
    if model not in ("eight", "experts"):  # the oracle of computations knows one type of all experts
        assert divergence(source, out, tmp_path) <= ROUNDED


def _library(rows: np.ndarray, kind: str) -> np.ndarray:
    if kind == "q8_0":
        return gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
    return quantized(rows, kind)


def test_the_first_and_last_eighth_and_every_third_layer_between_have_more_bits() -> None:
    more = [at for at in range(32) if Place(at, 32).more_bits]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]


def test_rows_that_no_block_divides_are_half() -> None:
    assert tensor_type("q4_k_m", "blk.0.ffn_up.weight", 100, _facts("narrow", False)) == "float16"
    assert tensor_type("q5_0", "blk.0.ffn_up.weight", 100, _facts("narrow", False)) == ""


def test_a_seventy_billion_model_has_values_in_q5_k() -> None:
    known = ModelFacts(80, 8, seventy=True, values=tuple(range(80)))
    assert tensor_type("q4_k_s", "blk.40.attn_v.weight", 8192, known) == "q5_k"
    assert tensor_type("q4_k_m", "blk.79.attn_v.weight", 8192, known) == "q6_k"


def test_names_are_taken_in_any_case_and_each_has_a_rule_for_an_importance_matrix() -> None:
    assert load_scheme("Q4_K_M") == load_scheme("q4_k_m")
    for name in NAMED:
        plain, weighted = load_scheme(name), load_scheme(f"{name.upper()}:imatrix")
        assert plain.weight[0].dtype == FILE_TYPES[name].kind and not plain.needs_calibration
        assert weighted.format.weighted and not weighted.needs_modelopt and weighted.name == f"{name}:imatrix"
    assert len({load_scheme(name).digest for name in NAMED}) == len(NAMED) == 13
    with pytest.raises(UsageError, match="'q8_0' is no layout that has rules"):
        load_scheme("q8_0:imatrix")


def test_a_recipe_starts_from_a_file_type_and_its_rules_name_one_type(models: dict[str, Path], tmp_path: Path) -> None:
    recipe = tmp_path / "mix.toml"
    rule = '[[rule]]\nroles = ["attn.q.weight"]\nquant = "{}"\n'
    recipe.write_text('base = "q4_k_m"\n' + rule.format("q8_0"))
    plan = bridge.plan(str(models["grouped"]), "gguf", recipe)
    kinds = {output.spec.name: output.spec.dtype for output in plan.outputs}
    assert (kinds["blk.1.attn_q.weight"], kinds["blk.0.attn_v.weight"]) == ("q8_0", "q6_k")
    recipe.write_text('base = "q4_k_m"\n' + rule.format("q5_k_m"))
    with pytest.raises(SchemeError, match=r"rule 1: quant = 'q5_k_m' is llama.cpp's choice of a type for each tensor"):
        bridge.plan(str(models["grouped"]), "gguf", recipe)


def test_a_rule_about_a_tied_head_is_one_about_the_embedding(models: dict[str, Path], tmp_path: Path) -> None:
    recipe = tmp_path / "head.toml"
    recipe.write_text('base = "q4_k_m"\n[[rule]]\nroles = ["head.weight"]\nquant = "q5_0"\n')
    plan = bridge.plan(str(models["tied"]), "gguf", recipe)
    assert {output.spec.name: output.spec.dtype for output in plan.outputs}["token_embd.weight"] == "q5_0"
    with pytest.raises(PlanError, match="is the embedding here, which --vocabulary quantize quantizes"):
        bridge.plan(str(models["tied"]), "gguf", recipe, vocabulary="keep")


@pytest.mark.parametrize("matched", ['roles = ["embed.tokens.weight"]', 'modules = ["model.embed_tokens"]'])
def test_a_rule_about_the_embedding_says_what_quantizes_it(
    matched: str, models: dict[str, Path], tmp_path: Path
) -> None:
    recipe = tmp_path / "embedding.toml"
    recipe.write_text(f'base = "int8_wo"\n[[rule]]\n{matched}\nquant = "int8_wo"\n')
    for target in ("hf", "gguf", "ort"):
        with pytest.raises(SchemeError, match=r"an embedding is looked up, not multiplied.*--vocabulary quantize"):
            bridge.plan(str(models["narrow"]), target, recipe)


def test_an_unknown_file_type_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    own = (mappings() / "schemes" / "q4_k_m.toml").read_text().replace('file_type = "q4_k_m"', 'file_type = "q4_k_n"')
    (tmp_path / "own.toml").write_text(own)
    with pytest.raises(PlanError, match=r"file_type = 'q4_k_n'; known: iq4_nl, .*q4_k_m"):
        bridge.plan(str(models["narrow"]), "gguf", tmp_path / "own.toml")


def test_other_targets_and_too_narrow_rows_are_refused_in_words(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(SchemeError, match="target hf cannot express scheme q4_k_m"):
        bridge.plan(str(models["narrow"]), "hf", "q4_k_m")
    odd = save("llama", tmp_path / "odd", intermediate_size=100)
    with pytest.raises(PlanError, match="in = 100 is no multiple of Q5_0's 32"):
        bridge.plan(str(odd), "gguf", "q5_0")
