"""What `bridge.sensitivity` measures is what ModelOpt, asked for one layer after the other, would measure."""

from __future__ import annotations

import copy
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.needs import Lazy, needs

torch = pytest.importorskip("torch")
needs("modelopt")
mtq = Lazy("modelopt.torch.quantization")

from click.testing import CliRunner  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
)

import bridge  # noqa: E402
from bridge.api import request as opening  # noqa: E402
from bridge.api.sensitivity.divergence import Prefix, Variant, kl, measure  # noqa: E402
from bridge.api.sensitivity.job import Question, make_job  # noqa: E402
from bridge.api.sensitivity.measure import Bench, make_bench  # noqa: E402
from bridge.calibration.data import Sampling  # noqa: E402
from bridge.calibration.job import CalibrationJob  # noqa: E402
from bridge.calibration.modelopt import fake_quantize  # noqa: E402
from bridge.cli.main import app  # noqa: E402
from bridge.core.errors import BridgeError, CalibrationError, SchemeError, UsageError  # noqa: E402
from bridge.core.progress import no_progress  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from tests.covering import usual  # noqa: E402
from tests.models.export_families import build, tokens  # noqa: E402
from tests.oracles.modelopt_oracle import ask  # noqa: E402

SLOW = pytest.mark.slow
MODEL = "examples/models/tiny-llama"
SMALL = {"samples": 4, "sequence": 64}  # one row of 64 tokens is held out


def bench(quant: Any, model: Any = MODEL, data: Any = None, **words: Any) -> Bench:
    job = make_job(open_source(model), Question(quant, **words))
    sizes = SMALL if data is None else {"samples": None, "sequence": None}
    return make_bench(job, opening.data_of(job.source, data, Sampling(**sizes)), None, no_progress)


def built(family: str) -> Any:
    model = build(family, torch.float32)
    model.config.architectures = [type(model).__name__]
    return model


def logits(model: Any, batch: Any) -> Any:
    with torch.no_grad():
        return model(**batch, use_cache=False).logits


@pytest.fixture(scope="module")
def int4() -> bridge.Sensitivity:
    return bridge.sensitivity(MODEL, "int4_wo", budget="kl=0.012", **SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", usual(["fp8", "int4_wo"], ["fp8", "int4_wo", "int4_awq", "int8"]))
def test_a_layer_costs_what_a_copy_says_in_which_modelopt_quantized_it_alone(scheme: str) -> None:
    made = bench(scheme)
    names = [unit.name for unit in made.job.units]
    some = [names[0], names[7], names[13]]
    found = made.measure([made.variant({name: 0}) for name in some])
    plain = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    (batch,) = made.data.held_out
    before = torch.log_softmax(logits(plain, batch).double(), -1)
    for name, nats in zip(some, found.nats, strict=True):
        others = [s.module for unit in made.job.units if unit.name != name for s in unit.sites]
        off = {f"{module}.*": {"enable": False} for module in others}
        alone = ask(plain, scheme, lambda model: [model(**b) for b in made.data.batches] and None, changes=off).model
        after = torch.log_softmax(logits(alone, batch).double(), -1)
        wanted = (
            torch.nn.functional.kl_div(after, before, log_target=True, reduction="sum") / batch["input_ids"].numel()
        )
        assert nats == pytest.approx(float(wanted), rel=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "scheme", "kv"),
    [
        ("llama", "int4_awq", "fp8"), ("gpt2", "int8_sq", None), ("mixtral", "fp8", None), ("phi", "int8", None),
        *(pytest.param(family, "int4_gptq", None, marks=pytest.mark.product) for family in ("llama", "gpt2")),
    ],
)  # fmt: skip
def test_with_every_unit_off_the_twin_is_the_model_and_with_all_on_what_modelopt_made(
    family: str, scheme: str, kv: str | None
) -> None:
    model = built(family)
    made = bench(scheme, model, tokens(), kv=kv)
    (batch,) = made.data.held_out
    if family == "gpt2":  # ModelOpt computes a Conv1D as a Linear, whose sums have another order
        assert torch.allclose(logits(made.base.model, batch), logits(model, batch), rtol=0, atol=1e-5)
    else:
        assert torch.equal(logits(made.base.model, batch), logits(model, batch))
    whole = fake_quantize(CalibrationJob(made.job.source, made.job.structure, made.job.schemes[0], made.data)).model
    with made.variant(dict.fromkeys(made.base.modules, 0)).on():
        assert torch.equal(logits(made.base.model, batch), logits(whole, batch))
    assert not torch.equal(logits(whole, batch), logits(model, batch))


@pytest.mark.slow
def test_a_recipe_made_for_a_divergence_has_it(int4: bridge.Sensitivity, tmp_path: Path) -> None:
    assert int4.choice
    assert 0 < int4.choice.measured <= 0.012 < int4.whole
    path = int4.save(tmp_path / "recipe.toml")
    source = open_source(MODEL)
    structure = opening.structure_of(source)
    data = opening.data_of(source, None, Sampling(**SMALL))
    quantized = fake_quantize(CalibrationJob(source, structure, load_scheme(path), data)).model
    (batch,) = data.held_out
    plain = logits(source.load_model(), batch)
    nats = kl(plain, logits(quantized, batch), torch.arange(64)) / 64
    assert nats == pytest.approx(int4.choice.measured, rel=1e-9)


@pytest.mark.slow
def test_a_fallback_takes_the_place_of_what_costs_most(tmp_path: Path) -> None:
    found = bridge.sensitivity(MODEL, "int4_awq", budget="5.5bits", fallback="fp8", **SMALL)
    assert found.choice
    assert found.choice.bits <= 5.5
    assert found.choice.measured < found.whole
    assert all(layer.formats[1].cost < layer.cost for layer in found.layers)
    source = open_source(MODEL)
    structure = opening.structure_of(source)
    data = opening.data_of(source, None, Sampling(**SMALL))
    scheme = load_scheme(found.save(tmp_path / "mixed.toml")).bound(structure.sites)
    (batch,) = data.held_out
    mixed = logits(fake_quantize(CalibrationJob(source, structure, scheme, data)).model, batch)
    nats = kl(logits(source.load_model(), batch), mixed, torch.arange(64)) / 64
    assert nats == pytest.approx(found.choice.measured, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["kl", pytest.param("block", marks=pytest.mark.product)])
def test_codes_that_gptq_chose_cost_something_in_every_layer(method: str) -> None:
    found = bridge.sensitivity(MODEL, "int4_gptq", method=method, **SMALL)
    assert len(found.layers) == 20 and all(layer.cost > 0 for layer in found.layers)


@pytest.fixture(scope="module")
def mixed() -> bridge.Sensitivity:
    return bridge.sensitivity(MODEL, ["int4_wo", "int8_wo", "fp8"], budget="5.5bits", **SMALL)


@pytest.mark.slow
def test_a_layer_costs_in_each_of_several_schemes_what_it_costs_in_that_scheme_alone(
    mixed: bridge.Sensitivity, int4: bridge.Sensitivity
) -> None:
    alone = {layer.name: layer.cost for layer in int4.layers}
    made = bench("fp8")
    names = [unit.name for unit in made.job.units][::7]
    fp8 = dict(zip(names, made.measure([made.variant({name: 0}) for name in names]).nats, strict=True))
    for layer in mixed.layers:
        costs = {it.scheme: it.cost for it in layer.formats}
        assert costs["int4_wo"] == alone[layer.name]
        assert layer.name not in fp8 or costs["fp8"] == fp8[layer.name]
    assert mixed.wholes[0].measured == int4.whole


@pytest.mark.slow
def test_a_choice_of_several_schemes_is_measured_as_modelopt_runs_its_recipe(
    mixed: bridge.Sensitivity, tmp_path: Path
) -> None:
    assert mixed.choice
    assert len(set(mixed.choice.formats.values())) > 1
    assert 5.4 < mixed.choice.bits <= 5.5
    source = open_source(MODEL)
    structure = opening.structure_of(source)
    data = opening.data_of(source, None, Sampling(**SMALL))
    scheme = load_scheme(mixed.save(tmp_path / "mixed.toml")).bound(structure.sites)
    (batch,) = data.held_out
    whole = logits(fake_quantize(CalibrationJob(source, structure, scheme, data)).model, batch)
    nats = kl(logits(source.load_model(), batch), whole, torch.arange(64)) / 64
    assert nats == pytest.approx(mixed.choice.measured, rel=1e-9)
    written = {scheme.name: scheme for scheme in map(load_scheme, mixed.schemes)}
    for layer in mixed.layers:
        wanted = written[mixed.choice.formats[layer.name]].format
        assert {scheme.format_of(site) for site in structure.sites if site.module in layer.modules} == {wanted}


@pytest.mark.slow
def test_several_schemes_within_a_divergence_take_fewer_bytes_than_one() -> None:
    one = bridge.sensitivity(MODEL, "int8_wo", budget="kl=0.01", **SMALL)
    several = bridge.sensitivity(MODEL, ["int4_wo", "int8_wo"], budget="kl=0.01", **SMALL)
    assert one.choice and several.choice
    assert several.choice.measured <= 0.01
    assert several.choice.bits < one.choice.bits
    with pytest.raises(SchemeError, match=r"cannot be met by quantizing anything: .* in (int4|int8)_wo, the"):
        bridge.sensitivity(MODEL, ["int4_wo", "int8_wo"], budget="kl=1e-12", **SMALL)


def test_the_result_is_plain_data_and_says_what_was_held(int4: bridge.Sensitivity) -> None:
    said = json.loads(int4.to_json())
    assert [layer["cost"] for layer in said["layers"]] == sorted((la.cost for la in int4.layers), reverse=True)
    assert {name for layer in said["layers"] for name in layer["modules"]} >= {"model.layers.4.mlp.down_proj"}
    assert (said["tokens"], said["cost_is"]) == (64, "nats a token")
    assert said["held"] == 64 * 4 * (1536 + 5 * 128)  # logits, and what five layers answer
    assert said["choice"]["expected"] == pytest.approx(
        sum(layer["cost"] for layer in said["layers"] if said["choice"]["formats"][layer["name"]] == "int4_wo")
    )


@pytest.mark.slow
def test_equal_runs_give_equal_results(int4: bridge.Sensitivity) -> None:
    again = bridge.sensitivity(MODEL, "int4_wo", budget="kl=0.012", **SMALL)
    assert again.to_json() == int4.to_json()


@pytest.mark.slow
def test_the_callers_model_stays_as_it_was() -> None:
    model = built("llama").train()
    before, kinds = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    found = bridge.sensitivity(model, "int4_awq", tokens(), fallback="int8_wo", budget="6bits")
    assert found.choice
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [type(module) for module in model.modules()] == kinds
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "scheme"), [("mixtral", "int8_wo"), ("phi", "fp8"), ("llama-tied", "int4_wo")])
def test_experts_untabled_architectures_and_tied_heads_are_measured(family: str, scheme: str, tmp_path: Path) -> None:
    quant: Any = scheme
    if family == "llama-tied":
        quant = tmp_path / "head.toml"
        quant.write_text(f'base = "{scheme}"\n[[rule]]\nmodules = ["lm_head"]\nquant = "int8_wo"\n')
    found = bridge.sensitivity(built(family), quant, tokens())
    assert all(layer.cost > 0 for layer in found.layers)
    if family == "mixtral":
        assert sum(layer.name.endswith(".experts.*") for layer in found.layers) == 2
    if family == "llama-tied":
        head = next(layer for layer in found.layers if layer.name == "lm_head")
        assert head.saved == -head.bytes  # it is stored as the embedding until it is quantized


@pytest.mark.slow
def test_the_kv_cache_is_measured_apart_and_counts_against_the_budget() -> None:
    made = bridge.sensitivity(MODEL, "int8_wo", kv="fp8", budget="kl=0.01", **SMALL)
    assert made.cache and made.choice
    assert made.choice.expected == pytest.approx(made.cache + sum(layer.cost for layer in made.layers))
    assert 'kv   = "fp8"' in made.recipe
    with pytest.raises(SchemeError, match=r"in addition to the .* of the KV cache"):
        bridge.sensitivity(MODEL, "int8_wo", kv="fp8", budget=f"kl={made.cache / 2}", **SMALL)


@pytest.mark.slow
def test_runs_that_start_late_answer_what_whole_runs_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench("fp8")
    names = [unit.name for unit in made.job.units]
    variants = [made.variant({name: 0}) for name in (names[0], names[9], names[-1])]
    calls = {"n": 0}
    first = made.base.model.get_submodule("model.layers.0.mlp")
    handle = first.register_forward_hook(lambda *_: calls.__setitem__("n", calls["n"] + 1))
    late = made.measure(variants)
    assert calls["n"] == 2  # recorded, and run for its own unit
    handle.remove()
    monkeypatch.setattr(Prefix, "first", lambda self, modules: 0)
    assert made.measure(variants).nats == late.nats


class Twice(torch.nn.Module):
    """Layers that run twice, or hand something to each other beside their answer."""

    def __init__(self, secret: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.secret, self.kept = secret, torch.zeros(4)

    def forward(self, x: Any) -> Any:
        for layer in self.layers if self.secret else [*self.layers, *self.layers]:
            x = layer(x)
        return x + (self.layers[0].seen if self.secret else 0)


@pytest.mark.parametrize("secret", [False, True])
def test_a_model_whose_layers_do_not_simply_follow_each_other_is_run_whole(secret: bool) -> None:
    model = Twice(secret)
    if secret:  # the first layer leaves a count behind
        model.layers[0].register_forward_pre_hook(
            lambda layer, _: setattr(layer, "seen", getattr(layer, "seen", 0) + 1)
        )
    prefix = Prefix(model, ["layers.0", "layers.2"])
    prefix.record(lambda batch: model(batch["x"]).detach(), {"x": torch.ones(1, 4)})
    assert not prefix.works
    assert prefix.nbytes == 0


@pytest.mark.slow
def test_what_a_switch_raises_leaves_every_unit_off() -> None:
    made = bench("int4_awq", fallback="int8_wo")
    (batch,) = made.data.held_out
    before = logits(made.base.model, batch)
    names = [unit.name for unit in made.job.units]
    with pytest.raises(KeyboardInterrupt), made.variant(dict.fromkeys(names[:3], 0) | dict.fromkeys(names[3:], 1)).on():
        assert not torch.equal(logits(made.base.model, batch), before)
        raise KeyboardInterrupt
    assert torch.equal(logits(made.base.model, batch), before)


def test_the_divergence_is_that_of_the_changed_model_from_the_plain_one() -> None:
    """Both directions agree to second order, so that small changes do not tell them apart."""
    plain, changed = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[3.0, 0.0, -1.0]])
    p, q = (torch.distributions.Categorical(logits=logits.double()) for logits in (plain, changed))
    wanted = torch.distributions.kl_divergence(p, q)
    assert kl(plain, changed, torch.arange(1)) == pytest.approx(float(wanted), rel=1e-12)


def test_padding_does_not_count_and_nan_costs_without_end() -> None:
    class Head(torch.nn.Module):
        shift = 0.0

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            made = torch.nn.functional.one_hot(input_ids, 5).float()
            made[..., 0] += self.shift * (1 + 99 * (1 - attention_mask))
            return (made,)

    Head.__name__ = "HeadForTest"
    model, ids = Head(), torch.tensor([[1, 2, 3, 4]])

    def shifted(by: float) -> Variant:
        @contextmanager
        def on() -> Any:
            model.shift = by
            yield
            model.shift = 0.0

        return Variant(on, ())

    def found(mask: list[int]) -> Any:
        batch = {"input_ids": ids, "attention_mask": torch.tensor([mask])}
        return measure(model, [shifted(0.5), shifted(float("nan"))], [batch], no_progress)

    full, cut = found([1, 1, 1, 1]), found([1, 1, 0, 0])
    assert (full.tokens, cut.tokens) == (4, 2)
    assert cut.nats[0] == pytest.approx(full.nats[0])
    assert full.nats[1] == float("inf")


def test_what_has_no_distribution_or_no_data_is_refused() -> None:
    with pytest.raises(CalibrationError, match="BertModel has no head"):
        bridge.sensitivity(built("bert"), "int8_wo", tokens())
    with pytest.raises(CalibrationError, match="nothing was held out"):
        bridge.sensitivity(built("llama"), "int8_wo")  # no tokenizer to read the embedded text with
    with pytest.raises(BridgeError, match="too few for a batch"):
        bridge.sensitivity(MODEL, "int8_wo", ["too short"])


@pytest.mark.slow
def test_a_divergence_below_what_the_cheapest_layer_costs_cannot_be_met() -> None:
    with pytest.raises(SchemeError, match=r"cannot be met by quantizing anything: model\.layers\..*, the cheapest"):
        bridge.sensitivity(MODEL, "int4_wo", budget="kl=1e-9", **SMALL)
    with pytest.raises(SchemeError, match=r"in int8_wo, all that gain by it, the divergence is \d"):
        bridge.sensitivity(MODEL, "int4_wo", budget="kl=1e-9", fallback="int8_wo", **SMALL)


@pytest.mark.slow
def test_modelopts_scores_rank_much_as_divergences_do(int4: bridge.Sensitivity) -> None:
    found = bridge.sensitivity(MODEL, "int4_wo", budget="8bits", method="modelopt", **SMALL)
    assert found.cost_is == "ModelOpt's gradient score"
    assert found.choice and found.choice.measured < found.whole == int4.whole
    order = {layer.name: at for at, layer in enumerate(int4.layers)}
    ranks = torch.tensor([[at, order[layer.name]] for at, layer in enumerate(found.layers)]).T.double()
    assert torch.corrcoef(ranks)[0, 1] > 0.8


@pytest.mark.slow
def test_the_command_writes_a_recipe_once(tmp_path: Path) -> None:
    out = tmp_path / "recipe.toml"
    words = ["sensitivity", MODEL, "--quant", "int4_wo", "--samples", "4", "--sequence", "64", "--out", str(out)]
    runner = CliRunner()
    done = runner.invoke(app, words)
    assert (done.exit_code, "needs --budget" in done.stderr) == (2, True)
    done = runner.invoke(app, [*words, "--budget", "8bits", "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["recipe"] == out.read_text()
    assert bridge.plan(MODEL, target="hf", quant=out)
    done = runner.invoke(app, [*words, "--budget", "8bits"])
    assert (done.exit_code, "exists already" in done.stderr) == (2, True)


@pytest.mark.slow
def test_compute_runs_the_model_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    real = Bench.divergence

    def divergence(self: Any, *given: Any) -> Any:
        ran.append(self.job.source.runs_in)
        return real(self, *given)

    monkeypatch.setattr(Bench, "divergence", divergence)
    for compute, dtype in (("fp32", "float32"), (None, "")):
        bridge.sensitivity(MODEL, "int8_wo", compute=compute, budget="kl=1", **SMALL)
        assert set(ran) == {dtype}, ran
        ran.clear()
    with pytest.raises(UsageError, match="compute='bf16'"):
        bridge.sensitivity(MODEL, "int8_wo", compute="bf16")
