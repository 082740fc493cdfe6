"""Feature classes of the caller's: how they are loaded, what they are asked, what they see and change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import bridge  # noqa: E402
from bridge import dlfw as debug_api  # noqa: E402
from bridge.core.errors import BridgeWarning, InspectError, UsageError  # noqa: E402
from bridge.workflows.inspect.te.classes import load_features  # noqa: E402
from tests.cli.test_cli import run as command  # noqa: E402
from tests.models.calibrated_models import built  # noqa: E402
from tests.workflows.inspect.test_session import LLAMA, SIX, batch, config  # noqa: E402

HEAD = "import builtins\nTOLD = builtins.bridge_told\n"  # the list of the test
SEES = """
class Sees:
    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
        TOLD.append(("ask", layer_name, tensor_name, iteration, config))
        return iteration % 2 == 0, iteration + 2
    def inspect_tensor(self, config, layer_name, tensor_name, tensor, iteration, rowwise_quantized_tensor, quantizer):
        TOLD.append(("see", layer_name, tensor_name, iteration, tensor.clone(), rowwise_quantized_tensor, quantizer))
"""
HALVES = """
class Halves:
    def modify_tensor_enabled(self, config, layer_name, gemm, tensor_name, iteration):
        return True, None
    def modify_tensor(self, config, layer_name, gemm, tensor_name, tensor, default_quantizer, iteration, out, dtype):
        assert tensor.dtype == dtype and out is None
        return tensor * config["by"]
"""
DISABLES = """
class Disables:
    def fp8_gemm_enabled(self, config, layer_name, gemm, iteration):
        TOLD.append((gemm, iteration))
        return gemm != "fprop"  # a bare bool: ask again
"""
AFTER = """
class After:
    def inspect_tensor_postquantize_enabled(self, config, layer_name, tensor_name, gemm, iteration):
        return True, iteration + 1
    def inspect_tensor_postquantize(self, config, layer_name, tensor_name, tensor, iteration, rowwise):
        TOLD.append((tensor_name, rowwise, tensor.clone()))
"""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    import builtins

    found: list[Any] = []
    monkeypatch.setattr(builtins, "bridge_told", found, raising=False)
    return found


def folder(path: Path, *texts: str) -> Path:
    path.mkdir(parents=True)
    for number, text in enumerate(texts):
        (path / f"feature_{number}.py").write_text(HEAD + text)
    return path


def linear() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 8))


def run(model: Any, words: Any, mine: Path | None, steps: int = 1, **options: Any) -> tuple[list[Any], list[Any], Any]:
    """Inputs, outputs and the gradients of the weight after each step."""
    inputs, outputs = [torch.randn(3, 16, requires_grad=True) for _ in range(steps)], []
    with bridge.inspecting(model, words, feature_dirs=mine, **options) as session:
        for x in inputs:
            outputs.append(model(x))
            outputs[-1].square().sum().backward()
            session.step()
    return inputs, outputs, session


def test_a_class_sees_tensors_at_the_steps_that_it_names(tmp_path: Path, told: list[Any]) -> None:
    mine = folder(tmp_path / "mine", SEES)
    inputs, outputs, _ = run(linear(), config("Sees", tensors=SIX, mark=3), mine, steps=4)
    asked = [row[1:] for row in told if row[0] == "ask"]
    assert {row[2] for row in asked} == {0, 2, 4} and len(asked) == 18  # not at steps 1 and 3
    assert asked[0] == ("0", "activation", 0, {"mark": 3, "tensor": "activation"})
    seen = {(row[2], row[3]): row for row in told if row[0] == "see"}
    assert {*seen} == {(name, step) for name in SIX for step in (0, 2)}
    for step in (0, 2):
        assert torch.equal(seen["activation", step][4], inputs[step])
        assert torch.equal(seen["output", step][4], outputs[step])
        assert torch.equal(seen["dgrad", step][4], inputs[step].grad)
    assert (
        seen["output", 0][5] is None
        and torch.equal(seen["activation", 0][5], inputs[0])
        and seen["weight", 0][6] is None
    )


def test_a_class_sees_experts_inside_one_module(tmp_path: Path, told: list[Any]) -> None:
    model = built("mixtral").float()
    words = config("Sees", tensors=["activation", "weight"], layers={"modules": ["*.experts.*"]})
    with bridge.inspecting(model, words, feature_dirs=folder(tmp_path / "mine", SEES)) as session, torch.no_grad():
        model(input_ids=torch.arange(3, 21).reshape(2, 9))
        session.step()
    shapes = {row[1]: row[4].shape for row in told if row[0] == "see" and row[2] == "weight"}
    assert shapes and {row[2] for row in told if row[0] == "see"} == {"activation", "weight"}
    assert all(len(shape) == 2 for shape in shapes.values())


def test_between_those_steps_there_is_no_hook(tmp_path: Path, told: list[Any]) -> None:
    model = linear()
    with bridge.inspecting(model, config("Sees", tensors=SIX), feature_dirs=folder(tmp_path / "a", SEES)) as session:
        for step in range(4):
            assert bool(model[0]._forward_hooks) == (step % 2 == 0) and not model._forward_pre_hooks
            session.step()


def test_a_class_changes_what_a_gemm_takes_and_gives(tmp_path: Path, told: list[Any]) -> None:
    model = linear()
    words = config("Halves", gemms_struct=[
        {"gemm": "fprop", "tensors": ["weight"], "by": 0.5}, {"gemm": "wgrad", "tensors": ["wgrad"], "by": 3},
    ])  # fmt: skip
    (x, y), (out, plain), _ = run(model, words, folder(tmp_path / "mine", HALVES), steps=2)
    weight, bias = model[0].weight, model[0].bias
    assert torch.equal(out, torch.nn.functional.linear(x, weight * 0.5, bias))
    assert torch.equal(plain, torch.nn.functional.linear(y, weight, bias))  # (True, None): this step, then never
    assert torch.equal(x.grad, (2 * out) @ weight)  # dgrad takes the weight as it is
    assert torch.equal(weight.grad, 3 * ((2 * out).T @ x) + (2 * plain).T @ y)
    assert "forward" not in vars(model[0])


def test_a_whole_layer_is_asked_for_each_tensor_and_gemm(tmp_path: Path, told: list[Any]) -> None:
    run(linear(), config("Sees"), folder(tmp_path / "mine", SEES))
    assert sorted(row[2] for row in told if row[0] == "see") == sorted(SIX)


def test_a_class_turns_the_sessions_quantization_off(tmp_path: Path, told: list[Any]) -> None:
    mine, model = folder(tmp_path / "mine", DISABLES), linear()
    words = config("Disables", gemms=["fprop", "dgrad"])
    run(model, words, mine)
    assert told == []  # nothing is quantized, so nothing is asked
    (x, _), (out, _), _ = run(model, words, mine, steps=2, quant="int8")
    assert told == [(gemm, step) for step in range(3) for gemm in ("fprop", "dgrad")]
    assert torch.equal(out, model(x))  # fprop takes what it is given
    quantized = run(model, config(tensors=["weight"], stats=["max"]), None, quant="int8")
    assert not torch.equal(quantized[1][0], model(quantized[0][0]))


def test_after_a_change_each_direction_is_told_once(tmp_path: Path, told: list[Any]) -> None:
    fake = {
        "enabled": True,
        "gemms": ["fprop", "dgrad"],
        "tensors": ["activation", "weight"],
        "quant_format": "FP8E4M3",
    }
    words = config("After", tensors=["activation", "weight"])
    words["s"]["transformer_engine"]["FakeQuant"] = fake
    run(linear(), words, folder(tmp_path / "mine", AFTER))
    assert [row[:2] for row in told] == [("activation", True), ("weight", True), ("weight", False)]
    assert torch.equal(told[1][2], told[2][2])


def test_classes_of_the_loop_serve_verb_command_and_door(tmp_path: Path, told: list[Any]) -> None:
    mine = folder(tmp_path / "mine", SEES, HALVES)
    words = config("Sees", {"modules": ["*.0.mlp.up_proj"]}, tensors=["weight"])
    bridge.inspect(LLAMA, words, samples=4, steps=1, feature_dirs=[mine], progress=False)
    path = tmp_path / "config.yaml"
    path.write_text(
        "s: {enabled: True, layers: {modules: ['*.0.mlp.up_proj']}, bridge: {Sees: {enabled: True, tensors: weight}}}"
    )
    result = command("inspect", LLAMA, "--config", str(path), "--samples", "4", "--steps", "1", "--features", str(mine))
    assert result.exit_code == 0, result.output
    debug_api.initialize(words, feature_dirs=str(mine), log_dir=tmp_path)
    try:
        te, layer = debug_api.transformer_engine, {"layer_name": "a.0.mlp.up_proj", "tensor_name": "weight"}
        assert te.inspect_tensor_enabled(**layer, iteration=0) == (True, 2)
        te.inspect_tensor(**layer, tensor=torch.ones(2), iteration=0, rowwise_quantized_tensor=None,
                          columnwise_quantized_tensor=None, quantizer=None, tp_group=None, tp_size=1)  # fmt: skip
    finally:
        debug_api.end_debug()
    assert [row[1] for row in told if row[0] == "see"] == [*["model.layers.0.mlp.up_proj"] * 2, "a.0.mlp.up_proj"]


@pytest.mark.parametrize(
    ("text", "cause", "match"),
    [
        (
            "import nothing_of_that_name",
            ImportError,
            r"feature_0\.py: cannot be imported: ModuleNotFoundError: No module",
        ),
        (
            "class A:\n    def __init__(self):\n        1/0\n    fp8_gemm_enabled = 1",
            ZeroDivisionError,
            "cannot be made",
        ),
        ("class A:\n    def inspect_tensor(self, c, n): pass", None, "without inspect_tensor_enabled"),
        ("class LogTensorStats:\n    def fp8_gemm_enabled(self, c, n): pass", None, "is a feature of bridge"),
        ("x = 1", None, "no class has one of"),
    ],
)
def test_a_file_that_is_not_right_says_why(text: str, cause: Any, match: str, tmp_path: Path, told: list[Any]) -> None:
    with pytest.raises(InspectError, match=match) as raised:
        load_features(folder(tmp_path / "mine", text))
    assert raised.value.__cause__ is None if cause is None else isinstance(raised.value.__cause__, cause)


def test_folders_and_names_are_checked(tmp_path: Path, told: list[Any]) -> None:
    one = folder(tmp_path / "one", SEES)
    with pytest.raises(UsageError, match="no such directory"):
        load_features([one, tmp_path / "none"])
    with pytest.raises(InspectError, match=r"Sees is in .*feature_0\.py, too; rename one"):
        load_features([one, folder(tmp_path / "two", SEES)])
    deep = folder(tmp_path / "three" / "deep", "from beside import CALL\n" + SEES)
    (deep / "beside.py").write_text("CALL = 1\n")
    assert [*load_features(tmp_path / "three")] == ["Sees"]


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (
            "config.nothing",
            r"feature Bad \(.*feature_0\.py\), inspect_tensor_enabled of layer 0: AttributeError: 'dict'",
        ),
        ("1", r"returned 1; expected \(True or False, the next step to ask at after 0"),
        ("(True, 0)", r"returned \(True, 0\)"),
    ],
)
def test_what_a_class_raises_or_returns_is_told_with_the_layer(
    answer: str, match: str, tmp_path: Path, told: list[Any]
) -> None:
    text = f"""
class Bad:
    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
        return {answer}
    inspect_tensor = print
"""
    with pytest.raises(InspectError, match=match):
        run(linear(), config("Bad", tensors=["weight"]), folder(tmp_path / "mine", text))


def test_what_it_makes_must_fit_and_two_may_not_change_one_tensor(tmp_path: Path, told: list[Any]) -> None:
    wrong = HALVES.replace('tensor * config["by"]', "tensor[:1]")
    words = config("Halves", gemms="fprop", tensors=["activation"])
    with pytest.raises(InspectError, match=r"returned torch\.float32 \(1, 16\) for activation of fprop; expected"):
        run(linear(), words, folder(tmp_path / "a", wrong))
    words = config("Halves", by=1)
    words["s"]["transformer_engine"]["Again"] = {"enabled": True, "by": 1}
    with pytest.raises(InspectError, match="Halves, Again: activation of fprop is changed by two features"):
        run(linear(), words, folder(tmp_path / "b", HALVES, HALVES.replace("Halves", "Again")))


def test_a_trained_model_has_the_bits_of_one_that_no_class_looks_at(tmp_path: Path, told: list[Any]) -> None:
    def gradients(**options: Any) -> list[Any]:
        from bridge.sources.opening import open_source

        model = open_source(LLAMA).load_model().eval()
        words = config("Sees", tensors=SIX) if options else config(tensors=["weight"], stats=["max"])
        with bridge.inspecting(model, words, **options) as session:
            model(**batch()).loss.backward()
            session.step()
        return [param.grad for param in model.parameters()]

    mine = folder(tmp_path / "mine", SEES)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(feature_dirs=mine), strict=True))


def test_classes_that_no_section_names_are_told(tmp_path: Path, told: list[Any]) -> None:
    mine = folder(tmp_path / "mine", SEES, DISABLES)
    note = "feature_dirs: no section of the config names any of Sees, Disables, so that none of them runs"
    _, _, session = run(linear(), None, mine)
    assert note in session.inspection.notes and session.inspection.records and not told  # the default config ran
    _, _, session = run(linear(), config("Sees", tensors="weight"), mine)
    assert note not in session.inspection.notes and told
    words = config("LogTensorStats", tensors="weight", stats=["max"])
    debug_api.initialize(words, feature_dirs=str(mine), log_dir=tmp_path)
    (log,) = (tmp_path / "nvdlfw_inspect_logs").iterdir()
    assert f" - WARNING - {note}" in log.read_text()
    with pytest.warns(BridgeWarning, match="no layer called"):
        debug_api.end_debug()


def test_a_class_that_raises_at_the_start_leaves_nothing(tmp_path: Path, told: list[Any]) -> None:
    raises = "class Raises:\n    def modify_tensor_enabled(self, config, layer_name, **words):\n        return 1 / 0\n"
    mine = folder(tmp_path / "mine", raises + "    modify_tensor = modify_tensor_enabled\n")
    for _ in range(2):  # the second is not refused
        with pytest.raises(InspectError, match="ZeroDivisionError"):
            run(linear(), config("Raises", tensors="weight", gemms="fprop"), mine, out=tmp_path / "seen")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
