"""How much data calibrates: by algorithm if nobody says, and enough for the channels of SmoothQuant."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import bridge  # noqa: E402
from bridge.calibration.amount import BY_ALGORITHM, default_samples  # noqa: E402
from bridge.calibration.data import Sampling, prepare  # noqa: E402
from bridge.planning.structure import structure_of  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402

LLAMA = Path(__file__).parent.parent.parent / "examples" / "models" / "tiny-llama"


@pytest.mark.parametrize(
    ("quant", "kv", "rows"),
    [("fp8", None, 32), ("int4_awq", None, 32), ("int8_wo", "fp8", 32), ("int8", None, 128), ("int8_sq", None, 128)],
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
    from bridge.calibration.modelopt import fake_quantize

    source, scheme, texts = open_source(LLAMA), load_scheme("int8_sq"), library_text()
    measured = prepare(None, source, Sampling(samples=48)).batches

    def run(samples: int) -> float:
        data = replace(prepare(texts, source, Sampling(samples=samples)), held_out=())
        quantized = fake_quantize(source, structure_of(source), scheme, data)
        assert quantized.calibration.provenance.samples == samples
        return divergence(quantized.plain, quantized.model, measured)

    most = run(512)  # 0.0018
    assert run(default_samples(scheme)) <= 1.1 * most  # 1.0
    assert run(32) > 1.5 * most  # 1.8: the default of other algorithms is too few
