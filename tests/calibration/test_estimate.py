"""How long a calibration takes is said before it starts, and what float32 would save where bfloat16 is slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
needs("modelopt")

import bridge  # noqa: E402
from bridge.calibration import requirements  # noqa: E402
from bridge.calibration.data import Data, Sampling, prepare  # noqa: E402
from bridge.calibration.job import CalibrationJob  # noqa: E402
from bridge.calibration.requirements import has_bf16_instructions, source_for  # noqa: E402
from bridge.core.errors import BridgeWarning, UsageError  # noqa: E402
from bridge.planning.structure import structure_of  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from tests.models.calibrated_models import IDS, built  # noqa: E402

LLAMA = Path(__file__).parent.parent.parent / "examples" / "models" / "tiny-llama"
BATCHES = [{"input_ids": ids} for ids in IDS]  # 2 x 40 tokens each, the last held out


def flops(model: Any, quant: str, data: Data | None = None) -> float:
    source = open_source(model)
    return requirements.flops(
        CalibrationJob(source, structure_of(source), load_scheme(quant), data or prepare(BATCHES, source))
    )


def linears(model: Any) -> int:
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))


@pytest.mark.parametrize(("quant", "forwards"), [("fp8", 1), ("int8_sq", 1), ("int4_awq", 13)])
def test_flop_count_weights_tokens_and_forwards(quant: str, forwards: int) -> None:
    model = built("llama")
    assert flops(model, quant) == 2 * linears(model) * (forwards * 160 + 2 * 80)


def test_flop_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, ids = built("llama"), IDS[0]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, use_cache=False)
    linear = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    data = Data(({"input_ids": ids},))
    assert flops(model, "fp8", data) == linear


def test_a_token_meets_the_experts_that_it_is_sent_to() -> None:
    model = built("mixtral")
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    routers = sum(p.numel() for name, p in model.named_parameters() if ".gate.weight" in name)
    active = linears(model) + experts * 2 / 5
    assert 2 * active * 320 <= flops(model, "fp8") <= 2 * (active + routers) * 320


def warned(seconds: dict[str, float], compute: str | None = None, device: str | None = None) -> list[str]:
    """What is said of tiny-llama if a calibration takes `seconds` in a dtype."""
    source = open_source(LLAMA)
    structure, scheme, data = structure_of(source), load_scheme("fp8"), prepare(None, source, Sampling(512))
    job = CalibrationJob(source_for(source, compute), structure, scheme, data, device)
    work = requirements.flops(job)

    def rate(dtype: str, _: str | None) -> float:
        return work / seconds[dtype]

    return requirements.time_warnings(job, rate)


@pytest.fixture
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in bfloat16 on a CPU without instructions for it, whose work is worth measuring."""
    monkeypatch.setattr(requirements, "SMALL", 0.0)
    monkeypatch.setattr(requirements, "main_dtype", lambda specs: "bfloat16")
    monkeypatch.setattr(requirements, "has_bf16_instructions", lambda: False)
    monkeypatch.setattr(requirements, "has_avx512", lambda: True)


@pytest.mark.usefixtures("bfloat16")
def test_hours_are_told_and_what_float32_would_save() -> None:
    time, save = warned({"float32": 4000})
    assert time.startswith("calibration: about 2 h (") and time.endswith(" TFLOP/s)")
    assert 'compute="fp32" (--compute fp32) would take about 67 min instead of about 2 h' in save


@pytest.mark.usefixtures("bfloat16")
def test_without_avx512_bfloat16_takes_far_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "has_avx512", lambda: False)
    _, save = warned({"float32": 100})
    assert "would take about 2 min instead of about 2 h" in save


@pytest.mark.slow
@pytest.mark.usefixtures("bfloat16")
def test_nothing_is_told_of_seconds_or_where_float32_is_no_faster() -> None:
    assert warned({"float32": 10}) == []
    assert len(warned({"float32": 100})) == 1  # no estimate below ten minutes, but a faster way
    assert len(warned({"bfloat16": 9e9, "float32": 5000}, compute="fp32")) == 1
    assert len(warned({"bfloat16": 5000, "float32": 5000}, device="cuda")) == 1


def test_a_small_model_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(built("llama"))

    def rate(*_: Any) -> float:
        raise AssertionError("measured")

    scheme, data = load_scheme("fp8"), prepare(BATCHES, source)
    assert requirements.time_warnings(CalibrationJob(source, structure_of(source), scheme, data), rate) == []


def test_the_measured_rate_is_that_of_a_processor() -> None:
    assert 1e8 < requirements.measured_rate("float32", None) < 1e15
    assert has_bf16_instructions() in (True, False)


@pytest.mark.slow
def test_calibrate_says_the_estimate_before_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "SMALL", 0.0)
    monkeypatch.setattr(requirements, "measured_rate", lambda *_: 1.0)
    with pytest.warns(BridgeWarning, match="calibration: about .* days"):
        bridge.calibrate(built("llama"), "fp8", BATCHES)


@pytest.mark.slow
def test_fp32_calibrates_in_float32_and_leaves_the_model_as_it_is() -> None:
    model = built("llama", torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    own, wide = (bridge.calibrate(model, "fp8", BATCHES, compute=compute) for compute in (None, "fp32"))
    assert (own.provenance.dtype, wide.provenance.dtype) == ("bfloat16", "float32")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert own.provenance.model == wide.provenance.model  # one calibration or the other serves the same checkpoint
    for name, amax in own.input_amax.items():
        assert abs(float(wide.input_amax[name]) / float(amax) - 1) < 0.05, name
    same = bridge.calibrate(model.float(), "fp8", BATCHES)
    assert all(wide.input_amax[name] == amax for name, amax in same.input_amax.items())


def test_another_dtype_is_refused() -> None:
    for run in (
        lambda: bridge.calibrate(LLAMA, "fp8", compute="fp16"),
        lambda: bridge.convert(LLAMA, "hf", "fp8", compute="fp16"),
        lambda: source_for(open_source(LLAMA), "fp16"),
    ):
        with pytest.raises(UsageError, match=r"compute='fp16' \(--compute\) is unknown; known: fp32"):
            run()


@pytest.mark.usefixtures("bfloat16")
def test_a_busy_machine_does_not_hide_what_float32_would_save() -> None:
    """Both were timed for 30 ms, and the answer was theirs; instructions of the CPU decide."""
    (save,) = warned({"float32": 100, "bfloat16": 90})
    assert "would take about 2 min instead of about 4 min" in save, save


@pytest.mark.parametrize(
    ("facts", "fast"),
    [("Features\t: fp asimd bf16 i8mm\n", True), ("Features\t: fp asimd asimddp\n", False), ("", True)],
)
def test_arm_tells_bfloat16_by_its_features(
    facts: str, fast: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(facts)
    monkeypatch.setattr(requirements, "CPU_FACTS", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert has_bf16_instructions() is fast
