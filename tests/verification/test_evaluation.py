"""What a written language model costs on held-out text: the figures, and the windows that they rest on."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from bridge.calibration.data.windows import free_places
from bridge.calibration.source_logits import InFile, OfHead, source_logits
from bridge.core.errors import VerifyError
from bridge.verification.evaluation import Reference, batches_of, evaluated, reference_of

MODEL = "examples/models/tiny-llama"
TINY = {
    "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 3, "vocab_size": 70,
    "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 64,
}  # fmt: skip


def model_of(kind: str, **more: object) -> torch.nn.Module:
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**TINY, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def batches(rows: int = 3, tokens: int = 33) -> list[dict[str, np.ndarray]]:
    ids = np.random.default_rng(5).integers(0, 70, (rows, 1, tokens))
    return [{"input_ids": one, "attention_mask": np.ones_like(one)} for one in ids]


def tensors(some: list[dict[str, np.ndarray]]) -> list[dict[str, torch.Tensor]]:
    return [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in some]


@pytest.mark.parametrize(
    ("kind", "more"),
    [("Llama", {}), ("Gemma2", {"final_logit_softcapping": 0.1}), ("Cohere", {"logit_scale": 7.0}),
     ("Granite", {"logits_scaling": 5.0})],
)  # fmt: skip
def test_logits_are_computed_again_of_the_inputs_of_the_head(kind: str, more: dict[str, float]) -> None:
    model, given = model_of(kind, **more), tensors(batches())
    logits = source_logits(model, given)
    assert isinstance(logits, OfHead) and logits.count == 3
    with torch.no_grad():
        want = model(given[2]["input_ids"]).logits[0, 5:9]
    assert torch.allclose(logits.piece(2, slice(5, 9)), want, rtol=1e-5, atol=1e-6)


def test_logits_of_an_unknown_head_lie_in_a_file_that_ends_where_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = model_of("Llama"), tensors(batches())
    plain = model.forward
    model.forward = lambda *a, **k: (torch.sin(plain(*a, **k).logits),)  # type: ignore[method-assign]
    logits = source_logits(model, given)
    assert isinstance(logits, InFile) and logits.count == 3
    with torch.no_grad():
        want = model.forward(given[1]["input_ids"])[0][0, 5:9]
    assert torch.equal(logits.piece(1, slice(5, 9)), want)
    monkeypatch.setattr("bridge.calibration.source_logits.SCRATCH", 33 * 70 * 4 * 2)
    assert source_logits(model, given).count == 2


def test_figures_are_those_of_torch() -> None:
    plain, other, given = model_of("Llama"), model_of("Llama"), batches()
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    given[0]["attention_mask"][0, 20:] = 0

    def run(batch: dict[str, np.ndarray]) -> torch.Tensor:
        return other(torch.from_numpy(batch["input_ids"])).logits.detach()

    found = evaluated(run, Reference(given, source_logits(plain, tensors(given)), True))
    kl, losses, same, rows = [], [], [], []
    for batch in given:
        ids = torch.from_numpy(batch["input_ids"])
        keep = int(batch["attention_mask"].sum()) - 1
        with torch.no_grad():
            p, q = (
                m(ids, attention_mask=torch.from_numpy(batch["attention_mask"])).logits[0, :keep]
                for m in (plain, other)
            )
        p_log, q_log = p.double().log_softmax(-1), q.double().log_softmax(-1)
        kl.append(torch.nn.functional.kl_div(q_log, p_log, reduction="none", log_target=True).sum(-1))
        losses.append(
            [torch.nn.functional.cross_entropy(x.double(), ids[0, 1 : keep + 1], reduction="none") for x in (p, q)]
        )
        same.append((p.argmax(-1) == q.argmax(-1)).double())
        rows.append(float((losses[-1][1] - losses[-1][0]).sum()))
    count = sum(map(len, kl))
    assert found.tokens == count == 19 + 32 + 32 and found.window == 33
    assert found.kl == pytest.approx(float(torch.cat(kl).mean()), rel=1e-6)
    assert found.agreement == pytest.approx(float(torch.cat(same).mean()))
    source, written = (float(torch.cat([pair[at] for pair in losses]).mean()) for at in (0, 1))
    assert (found.source_perplexity, found.perplexity) == pytest.approx((math.exp(source), math.exp(written)), rel=1e-6)
    assert found.difference == pytest.approx(written - source, rel=1e-5) and found.difference_error > 0


def test_outputs_without_finite_values_fail() -> None:
    """One position of many is enough: an average would hide it."""
    model, given = model_of("Llama"), batches(1)
    logits = np.zeros((1, 33, 70), np.float32)
    logits[0, 7, 3] = np.nan
    with pytest.raises(VerifyError, match="its outputs are NaN or infinite on the text"):
        evaluated(lambda batch: logits, Reference(given, source_logits(model, tensors(given)), True))


def test_windows_lie_between_the_rows_that_calibrate() -> None:
    places = free_places(1000, [0, 300, 600], content=40, length=100, count=4)
    taken = {*range(40), *range(300, 340), *range(600, 640)}
    assert len(places) == 4 and not taken & {number for at in places for number in range(at, at + 100)}


def test_rows_that_are_held_out_join_where_the_text_has_few_windows() -> None:
    from bridge.quant.calibration import HeldOut

    held = {"input_ids": np.zeros((2, 128), np.int64)}
    none = np.empty((0, 0), np.float32)
    few = HeldOut((held,), none, none, none, none, windows=((1,) * 512,))
    assert [batch["input_ids"].shape for batch in batches_of(few, 1000)] == [(1, 512), (2, 128)]
    many = HeldOut((held,), none, none, none, none, windows=((1,) * 512,) * 8)
    assert len(batches_of(many, 1000)) == 8 and len(batches_of(many, 10**10)) == 5
    assert len(batches_of(many, 10**10, whole=True)) == 8


@pytest.mark.parametrize(("noise", "allowed", "windows"), [(0.2, 60.0, 12), (0.002, 60.0, 8), (0.2, 0.0, 8)])
def test_an_evaluation_goes_on_while_its_error_is_large(
    noise: float, allowed: float, windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KL and the change of the loss are of all windows; the perplexity of the source stays that of the first eight."""
    from bridge.quant.calibration import HeldOut
    from bridge.sources.opening import open_source

    monkeypatch.setattr("bridge.calibration.data.windows.SECONDS", allowed)
    source = open_source(MODEL)
    limit = source.config["vocab_size"]
    ids = np.random.default_rng(2).integers(0, limit, (12, 300)).tolist()
    none = np.empty((0, 0), np.float32)
    held = HeldOut((), none, none, none, none, windows=tuple(map(tuple, ids)))
    model, make = source.load_model(), torch.Generator().manual_seed(1)

    def run(batch: dict[str, np.ndarray]) -> torch.Tensor:
        logits = model(torch.from_numpy(batch["input_ids"])).logits.detach()
        make.manual_seed(int(batch["input_ids"].sum()))
        return logits + noise * torch.randn((), generator=make) * torch.randn(logits.shape, generator=make)

    found, every = evaluated(run, reference_of(source, held)), evaluated(run, reference_of(source, held, whole=True))
    assert found.tokens == windows * 299 and every.tokens == 12 * 299
    few = windows == 12 and found.difference_error > 0.01
    assert found.few == few and every.few is False
    if windows == 12:
        assert (found.kl, found.difference) == (every.kl, every.difference)
        first = evaluated(run, reference_of(source, replace(held, windows=held.windows[:8]), whole=True))
        assert found.source_perplexity == first.source_perplexity != every.source_perplexity
        assert found.perplexity == pytest.approx(found.source_perplexity * math.exp(found.difference))


def test_an_evaluation_goes_through_a_calibration_and_a_report(tmp_path: Path) -> None:
    import bridge
    from bridge.quant.calibration import Calibration
    from bridge.reporting.report import report_from_dict

    calibration = bridge.calibrate(MODEL, "fp8", samples=4, progress=False)
    assert re.search(r"; perplexity [\d.]+ -> [\d.]+ of 127 tokens held out$", calibration.lines()[1])
    calibration.save(tmp_path / "fp8.safetensors")
    held = Calibration.load(tmp_path / "fp8.safetensors").held_out
    assert held and held.windows and held.windows == calibration.held_out.windows
    report = bridge.convert(MODEL, "hf", "fp8", tmp_path / "out", calib=calibration, evaluate="3k", progress=False)
    found = report.parity.evaluation
    assert found and re.search(r"; [\d,]+ tokens of Python's documentation$", found.line())
    assert found.tokens >= 2048 and found.computed == "float32, inputs quantized" and 0 < found.bound < 0.2
    import json

    assert report_from_dict(json.loads(report.to_json())) == report
    assert report.verdicts == {"file": "passed", "cost": "passed"}
    again = bridge.verify(tmp_path / "out", MODEL, progress=False).parity.evaluation
    assert again and again.kl == pytest.approx(found.kl, rel=1e-6)


def test_the_line_names_the_text(tmp_path: Path) -> None:
    import bridge

    bridge.convert(MODEL, "hf", "int8_wo", tmp_path / "out", verify=False, progress=False)
    own = tmp_path / "mine.txt"
    own.write_text(Path("bridge/calibration/data/default_text.txt").read_text()[:9000])
    for data, line in (
        (None, r"; 4,088 tokens of Python's documentation$"),
        (own, r"; \d+ tokens of mine.txt, all that is held out$"),
    ):
        found = bridge.verify(tmp_path / "out", MODEL, data=data, progress=False).parity.evaluation
        assert found and re.search(line, found.line())


def test_all_verbs_measure_a_source_on_the_same_windows_by_default(tmp_path: Path) -> None:
    import bridge
    from bridge.calibration.data import Sampling, prepare
    from bridge.sources.opening import open_source

    report = bridge.convert(MODEL, "hf", "int8_wo", tmp_path / "out", evaluate="4k", progress=False)
    pruned = bridge.pruned(MODEL, {"ffn": "50%"}, progress=False)
    assert report.parity.evaluation and pruned.perplexity
    distilled = bridge.distill(
        MODEL, MODEL, out=tmp_path / "d", steps=1, batch=1, lr=1e-9, pairs=None, verify=False, progress=False
    ).distillation
    assert report.parity.evaluation.source_perplexity == pytest.approx(pruned.perplexity[0], rel=1e-5)
    assert distilled and distilled.teacher_perplexity == pytest.approx(pruned.perplexity[0], rel=1e-5)
    source, plain = open_source(MODEL), prepare(None, open_source(MODEL))
    for sampling in (Sampling(4), Sampling(64, 256), Sampling(128), Sampling(16, 512)):
        found = prepare(None, source, sampling)
        assert found.windows[:8] == plain.windows[:8] and 8 <= len(plain.windows) <= 32, sampling
        texts = [" ".join(map(str, row.tolist())) for batch in found.batches for row in batch["input_ids"]]
        parts = [" ".join(map(str, w[at : at + 32])) for w in found.windows for at in range(0, 512, 32)]
        assert sum(any(part in text for text in texts) for part in parts) <= 1, sampling  # the text has a phrase twice


def test_tokens_that_do_not_count_change_nothing() -> None:
    """Scored at the first half alone, figures are those of the first half."""
    model, given = model_of("Llama"), batches(1)
    logits = source_logits(model, tensors(given))
    noise = torch.Generator().manual_seed(0)
    other = model(**tensors(given)[0]).logits.detach()
    other = other + torch.randn(other.shape, generator=noise)
    scored = [np.arange(33)[None] < 17]
    half = evaluated(lambda batch: other.numpy(), Reference(given, logits, True, scored=scored))
    cut = evaluated(lambda batch: other.numpy(), Reference(given, logits, True))
    assert (half.tokens, cut.tokens) == (16, 32) and half.computed == "answers alone" and not cut.computed
    p, q = (torch.log_softmax(one[0, :16].double(), -1) for one in (model(**tensors(given)[0]).logits, other))
    assert half.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-5)
