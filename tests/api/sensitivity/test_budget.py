"""Units, budgets and recipes of `bridge.api.sensitivity`: arithmetic and text, no model is run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bridge
from bridge.api.sensitivity.budget import parse_automatic, parse_budget
from bridge.api.sensitivity.candidates import Destination
from bridge.api.sensitivity.choose import choose
from bridge.api.sensitivity.job import Question, make_job
from bridge.api.sensitivity.recipe import recipe, recipe_base
from bridge.api.sensitivity.units import units_of
from bridge.core.errors import BridgeError, CalibrationError, SchemeError, UsageError
from bridge.core.values import Format
from bridge.quant.schemes.load import load_scheme
from bridge.sources.opening import open_source
from bridge.tables.architectures.structure import structure
from tests.models.sources_made import made_llama

MODEL = "examples/models/tiny-llama"


@pytest.mark.parametrize(
    ("text", "kind", "limit"),
    [("6.5bits", "bits", 6.5), ("4 bit", "bits", 4), ("kl=1e-2", "kl", 0.01), ("KL<=0.1", "kl", 0.1),
     ("7GB", "bytes", 7e9), ("512 MiB", "bytes", 2**29)],
)  # fmt: skip
def test_a_budget_is_read_as_it_is_written(text: str, kind: str, limit: float) -> None:
    assert (parse_budget(text).kind, parse_budget(text).limit) == (kind, limit)


@pytest.mark.parametrize(
    "text", ["", "6.5", "kl", "kl=", "kl=-1", "nanbits", "infbits", "0bits", "bits", "7XB", "kl=0"]
)
def test_a_budget_without_a_sense_is_refused_with_the_ways_to_write_one(text: str) -> None:
    with pytest.raises(UsageError, match=r"6\.5bits.*7GB.*kl=0\.01"):
        parse_budget(text)


def test_parts_that_promise_too_much_are_tightened_until_the_whole_fits() -> None:
    job: Any = make_job(open_source(MODEL), Question("int4_wo", budget="kl=0.05"))
    names = [unit.name for unit in job.units]
    costs = {(name, 0): 0.001 * (n + 1) for n, name in enumerate(names)}

    def divergence(formats: Any) -> float:  # the whole is three times the sum of its parts
        return 3 * sum(costs[name, at] for name, at in formats.items())

    found: Any = SimpleNamespace(alone=costs, cache=None)
    pick, choice = choose(job, found, divergence)
    assert choice.measured == pytest.approx(3 * choice.expected)
    assert choice.measured <= 0.05
    assert choice.rounds > 1
    # with one layer more, it would be above the budget
    more = min(cost for (name, _), cost in costs.items() if pick.formats[name])
    assert 3 * (choice.expected + more) > 0.05


def test_parts_that_promise_too_little_are_raised_while_the_whole_fits() -> None:
    job: Any = make_job(open_source(MODEL), Question("int4_wo", budget="kl=0.05"))
    costs = {(unit.name, 0): 0.01 for unit in job.units}
    found: Any = SimpleNamespace(alone=costs, cache=None)
    _, choice = choose(job, found, lambda formats: 0.006 * len(formats))
    assert Counter(choice.formats.values()) == {"int4_wo": 8, "none": 12}


def test_units_are_what_runtimes_fuse_and_hold_every_quantized_matrix_once() -> None:
    source = made_llama()
    arch = structure(source.config, source.specs)
    scheme = load_scheme("fp8").bound(arch.sites)
    units = units_of(arch, scheme, source.specs)
    modules = [site.module for unit in units for site in unit.sites]
    assert sorted(modules) == sorted(s.module for s in arch.sites if isinstance(scheme.format_of(s), Format))
    at = "model.layers.0"
    assert [unit.name for unit in units[:4]] == [
        f"{at}.self_attn.{{q_proj,k_proj,v_proj}}", f"{at}.self_attn.o_proj", f"{at}.mlp.{{gate_proj,up_proj}}",
        f"{at}.mlp.down_proj",
    ]  # fmt: skip


def test_a_scheme_that_leaves_modules_out_fits_none_of_them() -> None:
    question = Question(["int8_wo", "nvfp4_mlp_only"], budget="6bits")
    names = {one.name: one for one in make_job(open_source(MODEL), question).candidates.formats}
    assert names["nvfp4_mlp_only"].bytes and not any("self_attn" in unit for unit in names["nvfp4_mlp_only"].bytes)
    assert any("self_attn" in unit for unit in names["int8_wo"].bytes)
    with pytest.raises(SchemeError, match=r"fallback nvfp4_mlp_only does not fit.*(.|\n)*self_attn"):
        make_job(open_source(MODEL), Question("int8_wo", fallback="nvfp4_mlp_only", budget="6bits"))


@pytest.mark.parametrize(
    "start", ["int4_awq", "int8-weight-only", 'base = "fp8"\n\n[[rule]]\nlayers = [0]\nquant = "fp8_pc_pt"\n']
)
def test_a_recipe_reads_back_as_what_was_chosen(start: str, tmp_path: Path) -> None:
    quant: Any = start
    if "\n" in start:
        quant = tmp_path / "start.toml"
        quant.write_text(start)
    source = open_source(MODEL)
    arch = structure(source.config, source.specs)
    before = load_scheme(quant).bound(arch.sites)
    units = units_of(arch, before, source.specs)
    lifted = units[1::3]
    modules = [site.module for site in arch.sites]
    path = tmp_path / "made.toml"
    path.write_text(recipe(recipe_base(quant, "fp8"), ["said"], [("int8_wo", lifted)], modules))
    after = load_scheme(path).bound(arch.sites)
    names = {site.module for unit in lifted for site in unit.sites}
    wanted = load_scheme("int8_wo").format
    for site in arch.sites:
        assert after.format_of(site) == (wanted if site.module in names else before.format_of(site)), site.module
    assert after.kv is not None
    assert bridge.plan(MODEL, target="hf", quant=path)


def test_experts_of_a_layer_are_one_unit_and_one_glob(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.models.export_families import build

    model = build("mixtral")
    model.config.architectures = [type(model).__name__]
    job = make_job(open_source(model), Question("int8_wo", budget="9bits"))
    experts = [unit for unit in job.units if unit.name.endswith(".experts.*")]
    assert [len(unit.sites) for unit in experts] == [9, 9]  # three matrices of three experts, in two layers
    text = recipe(job.base, [], [("none", experts[:1])], [site.module for site in job.structure.sites])
    assert '"model.layers.0.block_sparse_moe.experts.*"' in text
    (tmp_path / "r.toml").write_text(text)
    after = load_scheme(tmp_path / "r.toml").bound(job.structure.sites)
    kept = {site.module for site in job.structure.sites if str(after.format_of(site)).startswith("recipe")}
    assert kept == {site.module for site in experts[0].sites}


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"quant": "none"}, UsageError, "needs a scheme"),
        ({"method": "modelo"}, UsageError, "nearest: modelopt"),
        ({"budget": "5"}, UsageError, "6.5bits"),
        ({"budget": "4.1bits"}, SchemeError, r"everything in int4_wo takes 4\.25 bits a weight, 2\.\d+ MB"),
        ({"budget": "1MB"}, SchemeError, "cannot be met: everything in int4_wo takes"),
        ({"budget": "32bits"}, SchemeError, "everything unquantized takes 32.00"),
        ({"budget": "9bits", "fallback": "int8_wo"}, SchemeError, "everything in int8_wo takes 8"),
        ({"quant": "int8_wo", "fallback": "int4_wo"}, SchemeError, "swap the two"),
        ({"fallback": "fp9"}, UsageError, "nearest: fp8"),
        ({"quant": "int4_awq", "method": "modelopt"}, UsageError, "method='kl'"),
        ({"method": "modelopt", "budget": "kl=0.1"}, UsageError, "not in nats"),
        ({"method": "modelopt", "fallback": "fp8"}, UsageError, "no fallback"),
    ],
)  # fmt: skip
def test_what_headers_can_tell_is_refused_before_the_model_is_loaded(changes: Any, error: Any, said: str) -> None:
    words = {"quant": "int4_wo", "budget": None, "fallback": None, "method": "kl", "kv": None} | changes
    with pytest.raises(error, match=said):
        make_job(open_source(MODEL), Question(**words))


def test_a_scheme_that_modelopt_simulates_on_a_gpu_only_is_refused_without_one() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for words in ({"quant": "nvfp4_mse", "fallback": None}, {"quant": "int4_wo", "fallback": "mxfp8"}):
        with pytest.raises(CalibrationError, match="without CUDA"):
            make_job(open_source(MODEL), Question(**words))  # type: ignore[arg-type]


def test_a_unit_of_which_one_module_does_not_fit_stays_whole_and_the_fallback_is_not_asked_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def incompatibilities_of(source: Any, structure: Any, *_: Any) -> list[tuple[str, str]]:
        name = "model.layers.1.self_attn.k_proj"
        return [(name, "is odd")] if name in {site.module for site in structure.sites} else []

    monkeypatch.setattr("bridge.api.plans.incompatibilities_of", incompatibilities_of)
    job = make_job(open_source(MODEL), Question("int4_wo", budget="6bits", fallback="fp8"))
    assert [unit.name for unit in job.candidates.kept] == ["model.layers.1.self_attn.{q_proj,k_proj,v_proj}"]
    why = "model.layers.1.self_attn.q_proj, model.layers.1.self_attn.v_proj: has the same format as "
    assert f"{why}model.layers.1.self_attn.k_proj" in job.candidates.why
    (tmp_path / "base.toml").write_text(job.base)
    read = load_scheme(tmp_path / "base.toml").bound(job.structure.sites)
    for site in job.structure.sites:
        assert isinstance(read.format_of(site), Format) == isinstance(job.schemes[0].format_of(site), Format), (
            site.module
        )
    assert len(job.units) == 19


def test_what_hf_refuses_and_another_target_takes_is_planned_for_that_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "bridge.api.plans.incompatibilities_of", lambda *words: [("KV cache", "no")] * (words[2] != "trt")
    )
    job = make_job(open_source(MODEL), Question("int8_wo"))
    assert (job.candidates.destination.target, job.candidates.kept) == ("trt", ())
    monkeypatch.setattr("bridge.api.plans.incompatibilities_of", lambda *_: [("KV cache", "no")])
    with pytest.raises(SchemeError, match=r"hf:\n  KV cache: no"):
        make_job(open_source(MODEL), Question("int8_wo"))


def test_a_source_that_cannot_be_run_is_refused() -> None:
    with pytest.raises(CalibrationError, match="cannot be run here"):
        make_job(open_source(made_llama()), Question("int8_wo"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('base = "fp8"\nrule = [{layers = [0], quant = "none"}]\n', "has its rules in one list"),
        (Path("mappings/schemes/fp8.toml").read_text(), "whole scheme"),
    ],
)
def test_a_recipe_that_no_rule_can_follow_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(BridgeError, match=said):
        recipe_base(path, None)


SEVERAL = ["int4_wo", "fp8", "int8_wo"]


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"quant": []}, UsageError, "names no scheme"),
        ({"quant": ["fp8", "fp8"]}, UsageError, "'fp8' is there twice"),
        ({"quant": ["fp8", "int4_woo"]}, UsageError, "nearest: int4_wo"),
        ({"quant": ["fp8", "own.toml"]}, BridgeError, "no such file"),
        ({"fallback": "int8_wo"}, UsageError, "add it to them"),
        ({"method": "modelopt"}, UsageError, "use method='kl' for several"),
        ({"budget": "3bits"}, SchemeError, r"smallest format of int4_wo, fp8, int8_wo takes 4\.25 bits a weight"),
        ({"budget": "32bits"}, SchemeError, "everything unquantized takes 32.00"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_several_schemes_is_refused_before_work(changes: Any, error: Any, said: str) -> None:
    words = {"quant": SEVERAL, "budget": None, "fallback": None, "method": "kl", "kv": None} | changes
    with pytest.raises(error, match=said):
        make_job(open_source(MODEL), Question(**words))


def several(where: Destination, schemes: list[str] = SEVERAL, model: Any = MODEL) -> Any:
    return make_job(open_source(model), Question(schemes, budget="6bits"), where)


def test_every_scheme_has_the_same_units_and_each_may_stay_unquantized() -> None:
    job = several(Destination())
    (menu,) = job.candidates.menus
    names = frozenset(unit.name for unit in job.units)
    assert [candidate.name for candidate in job.candidates.formats] == [*SEVERAL, "none"]
    assert {at: frozenset(written) for at, written in menu.bytes.items()} == dict.fromkeys(range(4), names)
    assert len(names) == 20


@pytest.mark.slow
def test_a_program_that_reads_one_format_for_all_modules_gets_menus_of_one() -> None:
    menus = several(Destination("hf", {}, "vllm")).candidates.menus
    assert any(menu.bytes.keys() >= {0, 1} for menu in menus)  # compressed-tensors mixes
    assert any(menu.bytes.keys() & {0, 1, 2} == {0} for menu in menus)  # GPTQ does not
    job = several(Destination("hf", {"format": "gptq"}, "vllm"), ["int4_wo", "int8_wo"])
    assert [sorted(menu.bytes) for menu in job.candidates.menus] == [[0, 2], [1, 2]]
    assert {menu.target for menu in job.candidates.menus} == {"hf"}


@pytest.mark.slow
def test_a_scheme_that_a_program_does_not_load_is_refused_by_name() -> None:
    with pytest.raises(SchemeError, match=r"(?s)llama\.cpp takes these schemes for no matrix.*\n  fp8: "):
        several(Destination("llama.cpp"), ["fp8", "q8_0"])


@pytest.mark.parametrize("quant", ["auto:4.8bits", "auto:kl=0.01:fp8,int8_wo"])
def test_a_verb_that_cannot_measure_tells_the_command_that_can(quant: str) -> None:
    with pytest.raises(UsageError, match=r"only `convert` chooses.*`qbridge sensitivity MODEL --quant .*--out recipe"):
        bridge.plan(MODEL, "hf", quant)


@pytest.mark.parametrize(
    "quant", ["auto:", "auto:4.8", "auto:kl=-1", "auto:nanbits", "auto:4.8bits:", "auto:4.8bits:fp8,,int8_wo"]
)
def test_a_choice_without_a_sense_is_refused_with_the_way_to_write_one(quant: str) -> None:
    with pytest.raises(UsageError, match=r"^quant='auto:.*auto:\S+"):
        parse_automatic(quant)
