"""`nan=`, `cost=` and `sink=`: who made the first NaN, what modules cost, and values for other programs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

import bridge  # noqa: E402
from bridge.cli.main import app  # noqa: E402
from bridge.core.errors import UsageError  # noqa: E402
from bridge.workflows.inspect.result import Inspection, Record  # noqa: E402
from tests.models.decoder_families import build  # noqa: E402

TINY = "examples/models/tiny-llama"
AMAX: dict[str, Any] = {
    "all": {
        "enabled": True,
        "layers": {"layer_types": ["all"]},
        "bridge": {"LogTensorStats": {"enabled": True, "tensors": ["weight"], "stats": ["cur_amax"]}},
    }
}
IDS = [{"input_ids": torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(n))} for n in range(2)]


@pytest.fixture
def llama() -> Any:
    torch.manual_seed(1)
    return build("LlamaForCausalLM").float()


def seen(model: Any, **options: Any) -> Inspection:
    return bridge.inspect(model, AMAX, data=IDS, nan=True, progress=False, **options)


class Log(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return (-1 - x.abs()).log()


class Root(torch.nn.Module):
    """The gradient of a root at 0 is infinite, and times 0 NaN."""

    def forward(self, x: Any) -> Any:
        return x + 0 * (x - x).abs().sqrt()


def test_a_sound_model_makes_none(llama: Any) -> None:
    found = seen(llama, gradients=True)
    assert found.first_bad is None and found.finite
    assert "no module made a NaN or an infinity in 2 steps" in found.notes


def test_an_infinite_weight_is_named(llama: Any) -> None:
    llama.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("inf")
    found = seen(llama)
    assert str(found.first_bad) == "model.layers.1.mlp.up_proj makes infinity in forward: weight is not finite"
    assert not found.finite and json.loads(found.to_json())["first_bad"]["parameter"] == "weight"
    assert "first not finite: model.layers.1.mlp.up_proj" in repr(found)


def test_the_log_of_a_negative_is_named(llama: Any) -> None:
    llama.model.layers[0].mlp.act_fn = Log()
    found = seen(llama).first_bad
    assert found is not None
    assert (found.module, found.direction, found.value) == ("model.layers.0.mlp.act_fn", "forward", "NaN")


def test_an_overflow_in_float16_is_named(llama: Any) -> None:
    llama.model.layers[1].mlp.down_proj.weight.data.fill_(6e4)
    found = seen(llama.half()).first_bad
    assert found is not None
    assert (found.module, found.direction) == ("model.layers.1.mlp.down_proj", "forward")


def test_a_nan_of_the_backward_is_named(llama: Any) -> None:
    llama.model.layers[1].mlp.act_fn = Root()
    assert seen(llama).first_bad is None
    found = seen(llama, gradients=True).first_bad
    assert found is not None
    assert (found.module, found.direction, found.value) == ("model.layers.1.mlp.act_fn", "backward", "NaN")


def test_a_loop_of_the_callers_is_looked_at(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    with bridge.inspecting(model, AMAX, nan=True, out=tmp_path / "seen") as session:
        for step in range(3):
            model(torch.ones(2, 4)).sum().backward()
            session.step()
            model[1].weight.data.mul_(torch.tensor(float("nan") if step == 1 else 1.0))
    assert str(session.inspection.first_bad) == "1 makes NaN in forward: weight is not finite"
    assert json.loads((tmp_path / "seen/inspect.json").read_text())["first_bad"]["module"] == "1"
    assert not model._forward_hooks and not torch.nn.modules.module._global_forward_hooks


def test_what_was_written_is_looked_at_beside_its_source(llama: Any, tmp_path: Path) -> None:
    bridge.convert(llama, "hf", "int8_wo", tmp_path / "out", verify=False, progress=False)
    found = bridge.inspect(llama, against=tmp_path / "out", data=IDS, nan=True, progress=False)
    assert found.first_bad is None and "no module made a NaN or an infinity in 2 steps" in found.notes
    assert {row.role for row in found.compared if row.alone} >= {"attn.q", "mlp.down"}
    first = bridge.inspect(llama, against=tmp_path / "out", data=IDS, steps=1, nan=True, progress=False)
    assert any(note.endswith("in 1 step") for note in first.notes), first.notes
    more = bridge.inspect(llama, against=tmp_path / "out", data=IDS, steps=9, progress=False)
    assert any("the data make 2 steps" in note for note in more.notes), more.notes
    with pytest.raises(UsageError, match="cost= does not go with against="):
        bridge.inspect(llama, against=tmp_path / "out", data=IDS, cost=True, progress=False)


def test_costs_are_those_of_all_modules_and_batches(llama: Any, tmp_path: Path) -> None:
    found = bridge.inspect(
        llama, AMAX, data=IDS, cost=True, gradients=True, out=tmp_path / "seen", progress=False
    )  # fmt: skip
    costs = {cost.module: cost for cost in found.costs}
    whole = costs["LlamaForCausalLM"]
    assert whole.calls == len(IDS) and costs["model.layers.1.mlp"].calls == len(IDS)
    assert whole.forward >= costs["model"].forward > 0 and whole.backward > 0
    assert whole.kept >= costs["model.layers.0"].kept > 0
    assert sum(cost.own for cost in found.costs) == pytest.approx(whole.forward, rel=1e-6)
    assert found.costliest(1)[0].own == max(cost.own for cost in found.costs)
    assert len(json.loads((tmp_path / "seen/inspect.json").read_text())["costs"]) == len(costs)
    assert "The costliest modules" in (tmp_path / "seen/inspect.html").read_text()


def test_without_a_backward_nothing_is_kept_and_a_note_says_so(llama: Any) -> None:
    found = bridge.inspect(llama, AMAX, data=IDS, cost=True, progress=False)
    assert all(cost.kept == 0 for cost in found.costs) and any("gradients=True" in note for note in found.notes)


class Counting(torch.nn.Linear):
    hooks: ClassVar[list[int]] = []

    def forward(self, x: Any) -> Any:
        self.hooks.append(len(self._forward_pre_hooks))
        return super().forward(x)


def test_costs_are_measured_in_a_run_without_statistics(llama: Any) -> None:
    llama.model.layers[0].mlp.up_proj.__class__ = Counting
    bridge.inspect(llama, AMAX, data=IDS, cost=True, progress=False)
    assert Counting.hooks == [1, 1, 0, 0]


def test_each_value_goes_to_the_sink(llama: Any) -> None:
    told: list[tuple[str, float, int]] = []
    found = seen(llama, sink=lambda *value: told.append(value))
    assert told == [(f"{r.layer}_{r.tensor}_{r.stat}", r.value, r.step) for r in found.records]


def test_tensorboard_reads_what_its_writer_was_told(llama: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        found = seen(llama, sink=writer.add_scalar)
    read = EventAccumulator(str(tmp_path)).Reload()
    name = "model.layers.0.mlp.up_proj_weight_cur_amax"
    assert [event.step for event in read.Scalars(name)] == [0, 1]
    assert read.Scalars(name)[0].value == pytest.approx(next(r.value for r in found.records if r.layer in name))


def test_the_data_are_named(llama: Any) -> None:
    assert seen(llama).about["data"] == "batches of the caller: 2 batches, rows of 12 tokens"
    small = bridge.inspect(TINY, AMAX, samples=4, sequence=16, progress=False)
    assert small.about["data"] == "the embedded text: 2 batches, rows of 16 tokens"


@pytest.mark.parametrize(("stat", "value", "finite"), [
    ("nan%", 0.0, True), ("nan%", 0.1, False), ("inf%", 3.0, False), ("cur_amax", None, False),
    ("fp8_sqnr", None, False), ("mxfp8_scale_min", None, True), ("kurtosis", None, True),
])  # fmt: skip
def test_values_that_are_not_finite_are_seen_in_statistics(stat: str, value: float | None, finite: bool) -> None:
    assert Inspection({}, (Record(0, "a", "", "weight", stat, value),)).finite is finite


def test_the_command_exits_with_3_and_names_the_module(tmp_path: Path) -> None:
    words = [str(tmp_path / "model"), "--steps", "1", "--samples", "2", "--sequence", "8", "--nan", "--cost"]
    (tmp_path / "config.yaml").write_text(json.dumps(AMAX))
    shutil.copytree(TINY, tmp_path / "model")
    sound = CliRunner().invoke(app, ["inspect", *words, "--config", str(tmp_path / "config.yaml")])
    assert sound.exit_code == 0, sound.output
    assert "no module made a NaN" in sound.output and "own ms" in sound.output
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.2.mlp.up_proj.weight"][0, 0] = float("inf")
    save_file(tensors, file, {"format": "pt"})
    broken = CliRunner().invoke(app, ["inspect", *words, "--config", str(tmp_path / "config.yaml")])
    assert broken.exit_code == 3
    assert "model.layers.2.mlp.up_proj makes infinity in forward: weight is not finite" in broken.output
