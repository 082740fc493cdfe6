"""How much data calibrates: by algorithm if nobody says, and enough for the channels of SmoothQuant."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
needs("modelopt")

import bridge  # noqa: E402
from bridge.calibration.automatic import EVERY_EXPERT, choose_samples  # noqa: E402
from bridge.calibration.data import Sampling, prepare  # noqa: E402
from bridge.calibration.job import CalibrationJob  # noqa: E402
from bridge.calibration.modelopt import fake_quantize  # noqa: E402
from bridge.calibration.requirements import BY_ALGORITHM, default_samples  # noqa: E402
from bridge.core.errors import UsageError  # noqa: E402
from bridge.planning.structure import structure_of  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from tests.calibration.test_data import TEXT, Letters  # noqa: E402
from tests.models.calibrated_models import built  # noqa: E402

LLAMA = Path(__file__).parent.parent.parent / "examples" / "models" / "tiny-llama"


@pytest.mark.parametrize(
    ("quant", "kv", "rows"),
    [
        ("fp8", None, 32),
        ("int4_awq", None, 32),
        ("int8_wo", "fp8", 32),
        ("int8", None, 128),
        ("int8_sq", None, 128),
        ("int4:gptq", None, 128),
        ("nvfp4_wo:gptq", None, 128),
        ("nvfp4_wo:imatrix", None, 32),
        ("nvfp4_gptq", None, 32),
    ],
)
def test_the_default_follows_the_algorithm(quant: str, kv: str | None, rows: int) -> None:
    assert default_samples(load_scheme(quant, kv=kv)) == rows


@pytest.mark.parametrize(
    ("base", "rule", "rows"), [("fp8", "int8_sq", 128), ("int8_sq", "fp8", 128), ("fp8", "int4_awq", 32)]
)
def test_a_recipe_takes_the_most_of_its_algorithms(base: str, rule: str, rows: int, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'base = "{base}"\n[[rule]]\nmodules = ["*.down_proj"]\nquant = "{rule}"\n')
    assert default_samples(load_scheme(recipe)) == rows


def test_the_embedded_text_has_the_rows_of_every_default() -> None:
    data = prepare(None, open_source(LLAMA), Sampling(default=max(BY_ALGORITHM.values())))
    assert (data.samples, data.sequence) == (128, 128)
    assert sum(batch["input_ids"].shape[0] for batch in data.held_out) == 16


@pytest.mark.slow
def test_calibrate_and_convert_use_the_default_of_the_scheme(tmp_path: Path) -> None:
    calibration = bridge.calibrate(LLAMA, "int8_sq", sequence=16)
    bridge.convert(LLAMA, "hf", "int8_sq", tmp_path / "out", sequence=16, verify=False)
    saved = bridge.Calibration.load(tmp_path / "out" / "bridge" / "calibration.safetensors")
    assert calibration.provenance.samples == saved.provenance.samples == 128
    assert bridge.calibrate(LLAMA, "int8_sq", sequence=16, samples=4).provenance.samples == 4


def library_text() -> list[str]:
    """Sources of Python's library: other text than the embedded one, which the divergence is measured on."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    return [file.read_text(encoding="utf-8", errors="ignore") for file in files]


def divergence(plain: Any, quantized: Any, batches: Sequence[dict[str, Any]]) -> float:
    """Mean KL divergence of the next token, in nats."""
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            p, q = (torch.log_softmax(m(**batch).logits.float(), -1) for m in (plain, quantized))
            total += float((p.exp() * (p - q)).sum())
            count += p.shape[0] * p.shape[1]
    return total / count


@pytest.mark.product
def test_smoothquant_at_its_default_is_as_good_as_with_four_times_as_much() -> None:
    source, scheme, texts = open_source(LLAMA), load_scheme("int8_sq"), library_text()
    measured = prepare(None, source, Sampling(samples=48)).batches

    def run(samples: int) -> float:
        data = replace(prepare(texts, source, Sampling(samples=samples)), held_out=())
        quantized = fake_quantize(CalibrationJob(source, structure_of(source), scheme, data))
        assert quantized.calibration.provenance.samples == samples
        return divergence(quantized.plain, quantized.model, measured)

    most = run(512)  # 0.0018
    assert run(default_samples(scheme)) <= 1.1 * most  # 1.0
    assert run(32) > 1.5 * most  # 1.8: the default of other algorithms is too few


@pytest.mark.slow
def test_auto_has_the_bytes_of_the_number_that_it_chose(tmp_path: Path) -> None:
    auto = bridge.calibrate(LLAMA, "int8_sq", samples="auto", sequence=32)
    number, why = auto.provenance.samples, auto.provenance.chosen
    assert number >= 128 and "channel maxima moved by 0.0" in why and why in "\n".join(auto.lines())
    plain = replace(auto, provenance=replace(auto.provenance, chosen=""))
    assert plain.to_bytes() == bridge.calibrate(LLAMA, "int8_sq", samples=number, sequence=32).to_bytes()
    assert bridge.Calibration.load(auto.save(tmp_path / "a.safetensors")).provenance == auto.provenance


@pytest.mark.slow
def test_auto_adds_rows_until_every_expert_has_64_tokens() -> None:
    source = open_source(built("mixtral"), tokenizer=Letters())
    scheme, structure = load_scheme("fp8"), structure_of(source)
    data = prepare([TEXT * 12], source, Sampling("auto", 4))
    chosen = choose_samples(CalibrationJob(source, structure, scheme, data))

    def least(samples: int) -> int:
        rows = prepare([TEXT * 12], source, Sampling(samples, 4))
        tokens = fake_quantize(CalibrationJob(source, structure, scheme, rows)).calibration.expert_tokens
        return int(min(count.min() for count in tokens.values()))

    assert chosen.samples > 32 and least(chosen.samples) >= EVERY_EXPERT > least(chosen.samples // 2)
    assert chosen.chosen == f"each expert has {least(chosen.samples)} tokens or more"


def test_auto_says_when_the_text_ends_first() -> None:
    source = open_source(built("mixtral"), tokenizer=Letters())
    data = prepare([TEXT[:80]], source, Sampling("auto", 4))
    chosen = choose_samples(CalibrationJob(source, structure_of(source), load_scheme("fp8"), data))
    assert chosen.samples < 64 and chosen.chosen.startswith("the text has no more; each expert has ")
    assert "were wanted: give more text" in chosen.warnings[0]


def test_auto_is_the_default_where_no_model_needs_more() -> None:
    source = open_source(built("llama"), tokenizer=Letters())
    data = prepare([TEXT], source, Sampling("auto", 16))
    chosen = choose_samples(CalibrationJob(source, structure_of(source), load_scheme("fp8"), data))
    assert (chosen.samples, chosen.chosen) == (32, "max needs no more than its default")


@pytest.mark.parametrize("data", [[[1, 2, 3], [4, 5, 6]], lambda model: None, torch.ones(4, 8, dtype=torch.int64)])
def test_auto_is_refused_for_data_that_are_used_as_they_are(data: Any) -> None:
    with pytest.raises(UsageError, match=r'samples="auto" chooses how many rows are cut from text; this \w+ is used'):
        prepare(data, open_source(LLAMA), Sampling("auto"))


@pytest.mark.parametrize("samples", ["Auto", "12", 0, -3, 2.0, True])
def test_another_word_than_auto_is_refused(samples: Any) -> None:
    with pytest.raises(UsageError, match=r'expected a positive whole number, or "auto"'):
        Sampling(samples)


def test_sensitivity_refuses_auto() -> None:
    with pytest.raises(UsageError, match="sensitivity measures on held-out rows"):
        bridge.sensitivity(LLAMA, "int8_wo", samples=cast(Any, "auto"))
