"""Two verdicts: of damaged models and of sound ones, and of models that were pruned or cost too much."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import bridge
from bridge.core.errors import UsageError
from bridge.quant.schemes.bounds import LEAST, MOST, divergence_bound
from bridge.quant.schemes.catalog import scheme_names
from bridge.quant.schemes.quality import REAL, read_quality
from bridge.reporting.report import Report
from bridge.sources.pruned.summary import Pruning
from bridge.workflows.chain.result import ChainReport, StepDone

MODEL = "examples/models/tiny-llama"
LAYER = "model.layers.1."
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def text() -> list[dict[str, torch.Tensor]]:
    """Two batches of text: little, since each verdict runs the model."""
    from bridge.api.request import unwarned_data_of
    from bridge.sources.opening import open_source

    (batch, *_) = unwarned_data_of(open_source(MODEL), None).batches
    return [{name: rows[:2] for name, rows in batch.items()}, {name: rows[2:4] for name, rows in batch.items()}]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("written")

    def make(scheme: str) -> Path:
        out = folder / scheme.replace(":", "-")
        if not out.exists():
            bridge.convert(
                MODEL, "hf", scheme, out, samples=4 if scheme == "fp8" else None, verify=False, progress=False
            )
        return out

    return make


def dropped_scale(tensors: Tensors) -> None:
    tensors[f"{LAYER}mlp.down_proj.weight_scale"].fill_(1.0)


def swapped_scales(tensors: Tensors) -> None:
    ours, theirs = (tensors[f"{LAYER}{name}.weight_scale"] for name in ("mlp.down_proj", "self_attn.o_proj"))
    ours[0], theirs[0] = theirs[0].clone(), ours[0].clone()


def transposed(tensors: Tensors) -> None:
    name = f"{LAYER}self_attn.o_proj.weight"
    tensors[name] = tensors[name].T.contiguous()


def zeroed_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith(LAYER) and name.endswith("proj.weight")]:
        tensors[name] = torch.zeros_like(tensors[name].view(torch.uint8)).view(tensors[name].dtype)


def not_a_number(tensors: Tensors) -> None:
    tensors[f"{LAYER}mlp.down_proj.weight"].view(torch.uint8)[3, 5] = 0x7F


def codes_off_by_one(tensors: Tensors) -> None:
    codes = tensors[f"{LAYER}self_attn.o_proj.weight"]
    codes.copy_((codes.int() + 1).clamp(-127, 127).to(torch.int8))


def groups_backwards(tensors: Tensors) -> None:
    name = f"{LAYER}mlp.down_proj.weight_scale"
    tensors[name] = tensors[name].flip(-1).contiguous()


def head_of_another_model(tensors: Tensors) -> None:
    name = next(name for name in ("lm_head.weight", "model.embed_tokens.weight") if name in tensors)
    noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(1))
    tensors[name] = (noise * tensors[name].float().std()).to(tensors[name].dtype)


def gate_for_up(tensors: Tensors) -> None:
    gate, up = (f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up"))
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def rows_shifted(tensors: Tensors) -> None:
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].roll(1, 0)


DAMAGED = [
    ("fp8", dropped_scale), ("int8_wo", swapped_scales), ("int8_wo", transposed), ("fp8", zeroed_layer),
    ("fp8", not_a_number), ("int8_wo", codes_off_by_one), ("int4:rtn", groups_backwards),
    ("nvfp4_wo", head_of_another_model), ("fp8", gate_for_up), ("int4_wo", rows_shifted),
]  # fmt: skip
SOUND = (
    "fp8", "fp8_pc_pt", "fp8_block", "mxfp8", "int8_wo", "int4_wo", "int4:rtn", "nvfp4_wo", "nvfp4_wo_mse", "mxfp4_wo",
)  # fmt: skip


@pytest.mark.parametrize(("scheme", "damage"), DAMAGED, ids=lambda one: getattr(one, "__name__", one))
def test_damaged_models_fail(
    scheme: str, damage: Callable[[Tensors], None], written: Callable[[str], Path], text: list[Tensors], tmp_path: Path
) -> None:
    out = shutil.copytree(written(scheme), tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    damage(tensors)
    with safe_open(out / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    save_file(tensors, out / "model.safetensors", metadata=metadata)
    report = bridge.verify(out, MODEL, data=text, progress=False)
    assert not report.passed and report.verdicts["file"] == "failed" and not report.command


@pytest.mark.parametrize(
    ("target", "key", "value"),
    [("hf", "rms_norm_eps", 1e-3), ("hf", "eos_token_id", 5), ("gguf", "attention.layer_norm_rms_epsilon", 1e-3),
     ("gguf", "attention.head_count_kv", 4), ("gguf", "context_length", 64)],
)  # fmt: skip
def test_damaged_configs_fail(target: str, key: str, value: float, text: list[Tensors], tmp_path: Path) -> None:
    """Of GGUF, four bytes in the header of the file."""
    out = tmp_path / "out"
    bridge.convert(MODEL, target, "int8_wo" if target == "hf" else "q8_0", out, verify=False, progress=False)
    if target == "hf":
        config = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps({**config, key: value}))
    else:
        data = bytearray((out / "model.gguf").read_bytes())
        at = data.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4
        struct.pack_into("<f" if isinstance(value, float) else "<I", data, at, value)
        (out / "model.gguf").write_bytes(data)
    report = bridge.verify(out, MODEL, data=text, progress=False)
    assert report.verdicts["file"] == "failed" and any(key in line or "config.json" in line for line in report.findings)


@pytest.mark.parametrize("scheme", SOUND)
def test_sound_models_pass_both_verdicts(scheme: str, written: Callable[[str], Path], text: list[Tensors]) -> None:
    report = bridge.verify(written(scheme), MODEL, data=text, progress=False)
    assert report.verdicts == {"file": "passed", "cost": "passed"} and report.passed, report.lines()


def test_a_model_that_costs_more_than_its_scheme_may_fails_by_the_second_verdict(
    written: Callable[[str], Path], text: list[Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.verification.evaluation.divergence_bound", lambda scheme, bits: 1e-4)
    report = bridge.verify(written("int4_wo"), MODEL, data=text, progress=False)
    assert report.verdicts == {"file": "passed", "cost": "failed"} and not report.passed and not report.command
    line = next(line for line in report.lines() if line.startswith("cost"))
    assert "FAILED: KL" in line and "is above 0.0001 nats a token" in line and "tokens" in line
    assert bridge.verify(written("int4_wo"), MODEL, data=text, gate="cosine", progress=False).passed
    assert bridge.verify(written("int4_wo"), MODEL, data=text, gate="kl=0.5", progress=False).passed
    assert not bridge.verify(written("int4_wo"), MODEL, data=text, gate="kl=0.001", progress=False).passed
    for wrong in ("kl=", "kl=-1", "kl=nan", "norm"):
        with pytest.raises(UsageError, match=r"is unknown; known: cosine, and kl=0\.1"):
            bridge.verify(written("int4_wo"), MODEL, gate=wrong)


def test_bounds_pass_what_was_measured_on_a_real_model_and_no_model_of_random_weights() -> None:
    """A second model, kept back, had up to 1.34 times the KL of the table."""
    for scheme, rows in read_quality().items():
        for model in REAL:
            if (found := rows.get(model)) and found.kl:
                bound = divergence_bound(scheme, int(found.bits or 4))
                assert 1.34 * found.kl < bound <= MOST or found.kl > MOST, scheme
    assert divergence_bound("int8_wo", 8) == LEAST  # what is nearly free is not held to a multiple of nothing
    assert divergence_bound("int4:gptq", 4) < divergence_bound("int4_wo", 4) <= divergence_bound("q2_k", 2)
    for name in scheme_names():  # KL of a source as sure as SmolLM2 (3 nats a token) to equal chances for 49,152 tokens
        assert divergence_bound(name, 2) < math.log(49_152) - 3


@pytest.mark.parametrize(("after", "fit"), [(80.0, True), (9_000.0, False)])
def test_a_pruned_model_of_ten_times_the_perplexity_is_not_served(after: float, fit: bool, tmp_path: Path) -> None:
    report = bridge.convert(MODEL, "hf", None, tmp_path / "plain", verify=False, progress=False)
    cut = Pruning((("ffn", 8, 4),), (2, 1), (2, 1), perplexity=(70.7, after))
    found = dataclasses.replace(report, pruning=cut)
    assert isinstance(found, Report) and found.passed == fit and bool(found.command) == fit and found.faithful
    first = found.lines()[0]
    assert first.endswith(f"perplexity 70.70 -> {after:,.2f}")
    assert fit or "FAILED: perplexity is 127 times the source's" in "\n".join(found.lines())
    pruned = StepDone("small", "prune", found, 1.0)
    assert pruned.passed == fit and dataclasses.replace(pruned, trained=True).passed  # what is trained next goes on
    assert ChainReport((dataclasses.replace(pruned, trained=True),)).passed


@pytest.mark.parametrize("more", [{}, {"evaluate": "2k"}], ids=["quick", "evaluated"])
def test_what_was_not_run_names_the_option_that_runs_it(more: dict[str, str], tmp_path: Path) -> None:
    report = bridge.convert(MODEL, "hf", "int8_wo", tmp_path / "out", progress=False, **more)
    lines = "\n".join(report.lines())
    assert ("passed for every weight; outputs were not run (--evaluate 2k runs them)" in lines) == (not more)
    assert report.verdicts["cost"] == ("passed" if more else "not measured") and ("\ncost " in lines) == bool(more)


def test_a_gguf_that_its_program_reads_wrongly_fails_though_its_weights_are_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from bridge.targets.gguf.runtime import Runtime

    real = Runtime.run_last
    monkeypatch.setattr(
        Runtime, "run_last", lambda self, batch: {k: v[..., ::-1] for k, v in real(self, batch).items()}
    )
    report = bridge.convert(MODEL, "gguf", "q8_0", tmp_path / "out", evaluate="1k", progress=False)
    assert report.parity.evaluation and report.parity.evaluation.passed  # the decoded weights
    assert not report.parity.outputs[0].passed and report.verdicts["file"] == "failed" and not report.command


def test_an_evaluation_that_is_asked_for_and_impossible_is_an_error(tmp_path: Path) -> None:
    mute = tmp_path / "mute"
    mute.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(f"{MODEL}/{name}", mute / name)
    with pytest.raises(UsageError, match=r"--evaluate.*no tokenizer"):
        bridge.convert(mute, "hf", "int8_wo", tmp_path / "out", evaluate="1k")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("asked", "tokens"), [(500, 511), ("1k", 1022), (2048, 2555)])
def test_so_many_tokens_as_are_asked_for_are_evaluated(asked: int | str, tokens: int, tmp_path: Path) -> None:
    report = bridge.convert(MODEL, "hf", "int8_wo", tmp_path / "out", evaluate=asked, progress=False)
    assert report.parity.evaluation and report.parity.evaluation.tokens == tokens
    assert "held out" not in report.parity.evaluation.line()
