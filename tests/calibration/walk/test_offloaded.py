"""A walk on a device keeps the activations of waiting forwards in the host's memory; a GPU is played here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
needs("modelopt")

from bridge.calibration.data import prepare  # noqa: E402
from bridge.calibration.job import CalibrationJob  # noqa: E402
from bridge.calibration.requirements import device_of  # noqa: E402
from bridge.calibration.walk import offloaded  # noqa: E402
from bridge.calibration.walk.budget import Room, calibration_need  # noqa: E402
from bridge.calibration.walk.offloaded import Offloaded  # noqa: E402
from bridge.calibration.walk.options import Options  # noqa: E402
from bridge.calibration.walk.run import calibrate_by_blocks  # noqa: E402
from bridge.planning.structure import structure_of  # noqa: E402
from bridge.quant.calibration import Calibration  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from tests.calibration.walk.walked_models import batches, mixture  # noqa: E402
from tests.models.decoder_families import build  # noqa: E402


class Host:
    """The memory of a host that a device cannot compute with: values there are NaN, and come back as they were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies = 0
        self._values: dict[int, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []
        monkeypatch.setattr(offloaded, "HOST", "the host")
        monkeypatch.setattr(offloaded, "SMALL", 0)
        monkeypatch.setattr(offloaded, "to_host", self._take)
        monkeypatch.setattr(offloaded, "to_device", lambda tensor, _: self._values[id(tensor)].clone())

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        self.copies += 1
        values = tensor.detach().clone()
        there = torch.full_like(values, float("nan")) if values.is_floating_point() else torch.zeros_like(values)
        self._alive.append(there)
        self._values[id(there)] = values
        return there


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "LlamaForCausalLM",
        pytest.param("GPT2LMHeadModel", marks=pytest.mark.product),
        pytest.param("T5ForConditionalGeneration", marks=pytest.mark.product),
    ],
)
def test_no_step_computes_with_an_activation_that_is_away(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(family, torch.float32).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    structure = structure_of(source)
    scheme = load_scheme("int4_awq", kv="fp8").bound(structure.sites)
    data = prepare(batches("Conditional" in family), source)

    def digest() -> str:
        return calibrate_by_blocks(CalibrationJob(source, structure, scheme, data)).digest

    expected = digest()
    host = Host(monkeypatch)
    assert digest() == expected
    assert host.copies > 4


@pytest.mark.slow
def test_experts_that_run_one_by_one_compute_with_no_activation_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture("Qwen3MoeForCausalLM").save_pretrained(tmp_path)
    source = open_source(tmp_path)
    structure = structure_of(source)
    scheme = load_scheme("fp8").bound(structure.sites)
    data = prepare(batches(), source)
    room = Room(calibration_need(source.specs, source.config, scheme).blocks.nbytes - 1, 0)

    def found() -> Calibration:
        return calibrate_by_blocks(CalibrationJob(source, structure, scheme, data), Options(room=room))

    expected = found().to_bytes()
    Host(monkeypatch)
    assert found().to_bytes() == expected


def test_a_tensor_moves_for_all_that_hold_it_and_is_copied_again_if_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, tensor = Host(monkeypatch), torch.arange(6.0)
    states, held = Offloaded("cpu"), {"mask": (tensor, None)}
    states.offload(held)
    assert bool(tensor.isnan().all()) and held["mask"][0] is tensor
    states.restore()
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]
    states.offload()
    states.restore()
    assert host.copies == 1
    tensor += 1
    states.offload()
    states.restore()
    assert host.copies == 2 and tensor.tolist() == [1, 2, 3, 4, 5, 6]


def test_an_expanded_tensor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    host, states = Host(monkeypatch), Offloaded("cpu")
    states.offload(torch.ones(1, 4).expand(3, 4), torch.ones(8)[:4])
    assert host.copies == 0


def test_a_worker_takes_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert device_of("cuda", 2) == "cuda:2"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert [device_of(name, 0) for name in ("cuda", "cuda:1", "cpu", None)] == ["cuda:3", "cuda:1", "cpu", None]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # Ray shows each process one
    assert device_of("cuda", 2) == "cuda:0"
