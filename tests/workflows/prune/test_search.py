"""`bridge.search`: budgets are kept exactly, errors come before a run, and measured costs choose."""

from __future__ import annotations

import itertools
import json
import math
import random
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import bridge
from bridge.calibration.importance import measure
from bridge.core.errors import CalibrationError, PlanError, UsageError
from bridge.sources.opening import open_source
from bridge.sources.pruned.opening import whole_of
from bridge.workflows.prune.rounds import least_costs
from bridge.workflows.prune.searched import Searched
from bridge.workflows.prune.sizes import Sizer, ladders_of, parse_budget
from bridge.workflows.prune.trial import Trial
from tests.models.decoder_families import build

LLAMA = "examples/models/tiny-llama"
FEW: dict[str, Any] = {"samples": 16, "sequence": 64, "progress": False}


@pytest.fixture(scope="module")
def found() -> Searched:
    return bridge.search(LLAMA, {"parameters": "70%"}, dims=["ffn", "heads", "kv_heads", "layers"], **FEW)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> str:
    """tiny-llama with two of its five layers: a repair takes as long as it has layers."""
    out = tmp_path_factory.mktemp("short") / "tiny-llama"
    bridge.convert(bridge.pruned(LLAMA, {}, drop_layers=[1, 2, 3]), "hf", None, out, verify=False)
    return str(out)


@pytest.mark.slow  # as are the others that search
def test_the_budget_is_kept_by_the_tensors_of_the_smaller_model(found: Searched) -> None:
    values = sum(spec.size for spec in found.pruned.specs.values())
    whole = sum(spec.size for spec in open_source(LLAMA).specs.values())
    assert found.size == values <= found.limit == int(whole * 0.7)
    assert found.whole == whole
    assert sum(p.numel() for p in found.pruned.load_model().parameters()) == values
    assert sum(spec.size for spec in bridge.pruned(LLAMA, found.keep, importance="weights" if "layers" not in
               found.keep else found.scores).specs.values()) == values  # fmt: skip


@pytest.mark.slow
def test_the_best_is_the_least_measured_cost_of_what_fits(found: Searched) -> None:
    fitting = [one for one in found.tried if one.fits]
    assert found.cost == min(one.cost for one in fitting)
    assert all(one.fits == (one.size <= found.limit) for one in found.tried)
    alone = {tuple(one.keep): one for one in found.tried if one.expected is None and len(one.keep) == 1}
    assert {("ffn",), ("layers",), ("heads",)} <= alone.keys()
    before, after = found.perplexity
    assert math.isclose(math.log(after / before), found.cost, abs_tol=1e-9)


@pytest.mark.slow
def test_the_same_parts_are_kept_again_with_the_scores(found: Searched, tmp_path: Path) -> None:
    assert found.scores
    path = found.scores.save(tmp_path / "scores.safetensors")
    again = bridge.pruned(LLAMA, found.keep, importance=path)
    assert again.fingerprint == found.pruned.fingerprint
    assert f"--importance {path}" in found.command(str(path))
    with pytest.raises(UsageError, match="dims: hidden: the scores that were given have none"):
        bridge.search(LLAMA, {"parameters": "70%"}, dims=["hidden"], importance=path)


@pytest.mark.slow
def test_the_measured_cost_is_that_of_transformers(found: Searched) -> None:
    """The loss of transformers' own model on the rows that measured."""
    from bridge.api.request import data_of
    from bridge.calibration.data import Sampling
    from bridge.workflows.prune.trial import split

    data = data_of(open_source(LLAMA), None, Sampling(16, 64))
    trial, measuring = Trial(whole_of(open_source(LLAMA)), data, "output", False, None), split(data)[1].held_out
    assert found.scores
    trial.prepare(None, found.scores.scores)

    def loss(model: Any) -> float:
        with torch.no_grad():
            pairs = [(model(input_ids=b["input_ids"]).logits[:, :-1], b["input_ids"][:, 1:]) for b in measuring]
        losses = [torch.nn.functional.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none") for x, y in pairs]
        return float(torch.cat(losses).double().mean())

    rise = loss(trial.model(found.keep).load_model()) - loss(open_source(LLAMA).load_model())
    assert math.isclose(rise, found.cost, abs_tol=1e-5)  # float32 logits
    assert found.tokens == sum(b["input_ids"][:, 1:].numel() for b in measuring)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        *(pytest.param(more, marks=pytest.mark.product) for more in ([], ["--importance", "weights"], ["--repair"])),
        ["--scores", "SCORES"],
    ],
)
def test_the_printed_command_writes_the_very_model(more: list[str], short: str, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from bridge.cli.main import app

    text = tmp_path / "own.txt"
    text.write_text(Path("README.md").read_text(encoding="utf-8"), encoding="utf-8")
    more = [str(tmp_path / "scores.safetensors") if word == "SCORES" else word for word in more]
    samples, sequence = (48, 96) if "--repair" in more else (12, 48)
    runs = ["--data", str(text), "--samples", str(samples), "--sequence", str(sequence)]
    shown = CliRunner().invoke(app, ["search", short, "--parameters", "85%", "--dims", "ffn", *runs, *more, "--json"])
    assert shown.exit_code == 0, shown.output
    made = json.loads(shown.stdout)
    command = [*shlex.split(made["next"])[1:], "--out", str(tmp_path / "out"), "--no-verify", "--quiet"]
    assert CliRunner().invoke(app, command).exit_code == 0, command
    words: dict[str, Any] = {"repair": True} if "--repair" in more else {}
    words |= {"importance": "weights"} if "weights" in more else {}
    words |= {"data": text, "samples": samples, "sequence": sequence, "progress": False}
    found = bridge.search(short, {"parameters": "85%"}, dims=["ffn"], **words)
    bridge.convert(found.pruned, "hf", None, tmp_path / "again", verify=False)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again")]
    assert files[0] == files[1]
    assert made["keep"] == found.keep


@pytest.mark.slow
def test_what_lies_in_memory_has_no_command(tmp_path: Path) -> None:
    source = bridge.pruned(LLAMA, {"ffn": 256}, importance="weights")
    words: dict[str, Any] = {"dims": ["ffn"], "progress": False}
    rows = [{"input_ids": torch.arange(32 * n, 32 * n + 32)[None]} for n in range(8)]
    of_pruned = bridge.search(source, {"parameters": "90%"}, samples=8, sequence=32, **words)
    own_rows = bridge.search(LLAMA, {"parameters": "90%"}, data=rows, **words)
    for found in (of_pruned, own_rows):
        assert found.command() == ""
        assert json.loads(found.to_json())["next"].startswith("bridge.convert(FOUND.pruned, ")
    assert of_pruned.command("scores.safetensors") == ""
    assert own_rows.command("scores.safetensors").endswith("--importance scores.safetensors")


@pytest.mark.slow
def test_bytes_are_those_that_are_written() -> None:
    words: dict[str, Any] = {"dims": ["ffn", "layers"], "quant": "int8_wo", **FEW, "samples": 8, "sequence": 32}
    found = bridge.search(LLAMA, {"bytes": "75%"}, **words)
    plan = bridge.plan(LLAMA, "hf", "int8_wo", keep=found.keep)
    assert found.size == sum(output.spec.nbytes for output in plan.outputs) <= found.limit
    number = bridge.search(LLAMA, {"bytes": found.limit}, **words)
    assert number.keep == found.keep


def test_latency_counts_the_experts_of_one_token() -> None:
    model = build("MixtralForCausalLM", torch.float32)
    whole = whole_of(open_source(model))
    sizer, config = Sizer(whole, "latency", None), model.config
    experts = sum(p.nbytes for name, p in model.named_parameters() if "experts" in name)
    table = model.get_input_embeddings().weight.nbytes
    other = sum(p.nbytes for p in model.parameters()) - experts - table
    expected = other + table // config.vocab_size + experts * config.num_experts_per_tok / config.num_local_experts
    assert sizer.whole == math.ceil(expected)
    fewer = sizer.exact(whole.to({"experts": config.num_experts_per_tok}))
    router = sum(p.nbytes for name, p in model.named_parameters() if name.endswith("gate.weight"))
    assert sizer.whole - fewer == router * (1 - config.num_experts_per_tok / config.num_local_experts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parameters", "bytes", "latency"])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_the_estimate_of_a_size_is_close_to_it(name: str, kind: str) -> None:
    whole = whole_of(open_source(f"examples/models/{name}"))
    sizer = Sizer(whole, kind, None)
    for ladder in ladders_of(whole, None, lambda keep: _legal(whole, keep)):
        for keep in ladder[1:]:
            assert math.isclose(sizer.estimate(keep), sizer.exact(whole.to(keep)), rel_tol=1e-3), keep


def _legal(whole: Any, keep: Any) -> bool:
    try:
        whole.to(keep)
    except PlanError:
        return False
    return True


def test_widths_and_heads_that_change_together_are_one_ladder() -> None:
    whole = whole_of(open_source("examples/models/tiny-gpt2"))
    ladders = ladders_of(whole, None, lambda keep: _legal(whole, keep))
    assert any(rung == {"hidden": 96, "heads": 3} for ladder in ladders for rung in ladder)


def test_branch_and_bound_finds_the_least_sums() -> None:
    numbers = random.Random(0)
    for _ in range(30):
        costs = [[0.0, *sorted(numbers.random() for _ in range(4))] for _ in range(3)]
        shares = [sorted((numbers.random() for _ in range(5)), reverse=True) for _ in range(3)]

        def size(chosen: Any, shares: Any = shares) -> float:
            return math.prod(shares[dim][at] for dim, at in enumerate(chosen))

        limit = numbers.random() * size((0, 0, 0))
        every = [chosen for chosen in itertools.product(range(5), repeat=3) if size(chosen) <= limit]
        totals = sorted(sum(costs[dim][at] for dim, at in enumerate(chosen)) for chosen in every)
        best = least_costs(costs, size, lambda chosen, size=size, limit=limit: size(chosen) <= limit, limit, 6)
        assert [sum(costs[dim][at] for dim, at in enumerate(c)) for c in best] == pytest.approx(totals[:6])


@pytest.mark.parametrize(
    ("budget", "words", "error", "said"),
    [
        ({"parameters": "1%"}, {}, PlanError, r"the smallest that the search reaches has [\d,]+ values \(\d+\.\d%\)"),
        ({"parameters": "100%"}, {}, PlanError, "the whole model has 1,541,504 values, which fits; give less"),
        ({"bytes": "9GB"}, {}, PlanError, "which fits; give less"),
        ({"parameters": "70%"}, {"dims": ["width"]}, UsageError, "dims: this model has no dim 'width'; known: ffn"),
        ({"parameters": "70%"}, {"dims": ["experts"]}, UsageError, "this model has no dim 'experts'"),
        ({"parameters": "70%", "bytes": "1MB"}, {}, UsageError, "parameters and bytes are two limits"),
        ({}, {}, UsageError, "budget: {} names no limit"),
        ("60%", {}, UsageError, "'60%' names no limit"),
        ({"params": "60%"}, {}, UsageError, "nearest: parameters"),
        ({"parameters": "many"}, {}, UsageError, "'many' is not a share or a size above"),
        ({"bytes": "-1%"}, {}, UsageError, "is not a share or a size above zero"),
        ({"parameters": "70%"}, {"importance": "taylor"}, UsageError, "known: minitron, output, weights"),
        ({"parameters": "70%"}, {"importance": "weights", "repair": True}, UsageError, "needs scores of a run"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_a_run(
    budget: Any, words: Any, error: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("measure_scores", "perplexity_of"):
        monkeypatch.setattr(measure, name, lambda *_, **__: pytest.fail("the model was run"))
    with pytest.raises(error, match=said):
        bridge.search(LLAMA, budget, **words)


def test_sizes_that_the_scheme_cannot_have_are_left_out_of_every_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "__init__", lambda *_: pytest.fail("data were prepared"))
    with pytest.raises(PlanError, match="in = 60 does not divide into blocks of 16"):
        bridge.search(build("MixtralForCausalLM", torch.float32), {"parameters": "80%"}, quant="nvfp4")
    whole = whole_of(open_source(LLAMA))
    sizer = Sizer(whole, "parameters", "int4_wo")
    assert sizer.exact(whole.to({"ffn": 256})) == Sizer(whole, "parameters", None).exact(whole.to({"ffn": 256}))
    with pytest.raises(PlanError, match="in = 208 does not divide into blocks of 128"):
        sizer.exact(whole.to({"ffn": 208}))


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "few"), [(16, True), (64, False)])
def test_few_tokens_to_judge_by_are_told_of(samples: int, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "prepare", lambda *_: (_ for _ in ()).throw(InterruptedError))
    with warnings.catch_warnings(record=True) as told, pytest.raises(InterruptedError):
        warnings.simplefilter("always")
        bridge.search(LLAMA, {"parameters": "85%"}, samples=samples, sequence=64)
    texts = [str(one.message) for one in told]
    assert any("by 630 tokens, of which costs are uncertain by 0.06 nats" in text for text in texts) == few, texts
    assert any("Python's documentation; text like yours is better: data=" in text for text in texts)
    assert not any("calibrat" in text or "scales" in text for text in texts)


@pytest.mark.slow
def test_too_few_rows_for_a_repair_are_refused_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    words: dict[str, Any] = {"dims": ["ffn"], "repair": True, "sequence": 64}
    with monkeypatch.context() as patched:
        patched.setattr(Trial, "prepare", lambda *_: pytest.fail("the model was run"))
        with pytest.raises(CalibrationError, match=r"needs 5 a channel, 1760: give samples=64 \(--samples 64\)"):
            bridge.search(LLAMA, {"parameters": "85%"}, samples=16, **words)
    monkeypatch.setattr(Trial, "prepare", lambda *_: (_ for _ in ()).throw(InterruptedError))
    with pytest.raises(InterruptedError):  # so many rows are enough
        bridge.search(LLAMA, {"parameters": "85%"}, samples=64, **words)


@pytest.mark.parametrize(
    ("name", "said"),
    [("scores.txt", "a file of scores ends in .safetensors"), ("no/scores.safetensors", "is not a directory; make it"),
     ("there.safetensors", "exists already")],
)  # fmt: skip
def test_a_file_of_scores_that_cannot_be_written_is_refused_before_work(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from bridge.cli.main import app

    monkeypatch.setattr(bridge, "search", lambda *_, **__: pytest.fail("it began"), raising=False)
    (tmp_path / "there.safetensors").touch()
    shown = CliRunner().invoke(app, ["search", LLAMA, "--parameters", "85%", "--scores", str(tmp_path / name)])
    assert shown.exit_code == 2
    assert said in shown.output


def test_one_batch_cannot_score_and_measure() -> None:
    with pytest.raises(CalibrationError, match="cannot both calibrate and be held out"):
        bridge.search(LLAMA, {"parameters": "70%"}, data=[{"input_ids": torch.arange(64)[None]}])


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    bridge.convert(LLAMA, "hf", "int8_wo", tmp_path / "out", verify=False)
    with pytest.raises(PlanError, match='it is quantized; convert it with quant="none" first'):
        bridge.search(tmp_path / "out", {"parameters": "70%"})


@pytest.mark.slow
def test_each_candidate_is_repaired_if_asked(short: str) -> None:
    words = {"dims": ["ffn"], "samples": 64, "sequence": 64, "progress": False}
    repaired = bridge.search(short, {"parameters": "80%"}, repair=True, **words)
    plain = bridge.search(short, {"parameters": "80%"}, **words)
    assert repaired.cost < plain.cost
    assert len(repaired.pruned.repaired) == 2
    assert repaired.scores is None
    assert "--repair --samples 64 --sequence 64" in repaired.command()


@pytest.mark.slow
def test_the_command_prints_a_table_and_the_next_command(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from bridge.cli.main import app

    words = ["search", LLAMA, "--parameters", "80%", "--dims", "ffn", "--samples", "8", "--sequence", "32"]
    path = tmp_path / "scores.safetensors"
    shown = CliRunner().invoke(app, [*words, "--scores", str(path)])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.rstrip().splitlines()[-1].startswith(f"next     qbridge prune {LLAMA} --keep ffn=")
    assert path.is_file()
    made = json.loads(CliRunner().invoke(app, [*words, "--json", "--quiet"]).stdout)
    assert made["size"] <= made["limit"]
    refused = CliRunner().invoke(app, [*words, "--latency", "70%"])
    assert refused.exit_code == 2


def test_a_budget_is_read() -> None:
    assert parse_budget({"bytes": "3GB"}).limit(10**10) == 3 * 10**9
    assert parse_budget({"parameters": 1_000_000}).limit(5) == 1_000_000
    assert parse_budget({"latency": "70%"}).limit(1000) == 700
