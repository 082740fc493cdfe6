"""A golden says what moved and nothing else: the same model passes wherever it lies, one changed byte is named with its
row, an update has its reason.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import bridge
from bridge.core.dtypes import K_QUANTS
from bridge.core.errors import GoldenError, UsageError
from bridge.core.formats.safetensors import SafetensorsFile, file_bytes, read_header
from bridge.quant.schemes.catalog import scheme_names
from bridge.targets.onnx.run import layer_error
from bridge.workflows.golden import reference_run
from bridge.workflows.golden.differences import Differences, compare, compare_outputs, lines
from bridge.workflows.golden.reconvert import arguments
from bridge.workflows.golden.store import Reference, load
from tests.models.golden_made import LLAMA, Q, calibration, changed, converted_made, written
from tests.models.sources_made import llama_shapes

ROW = 'mappings/arch/llama.toml: "model.layers.{l}.self_attn.q_proj.weight" = "attn.q.weight"'


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("golden") / "out")


@pytest.fixture(scope="module")
def golden(out: Path) -> Path:
    bridge.golden.record(out, out.parent / "golden", run=False)
    return out.parent / "golden"


def kinds(moved: Differences) -> list[tuple[str, str]]:
    return [(move.kind, move.name) for move in moved.moves]


def test_the_same_model_passes_wherever_it_lies(out: Path, golden: Path, tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path / "elsewhere")
    moved = bridge.golden.check(golden, tmp_path / "elsewhere")
    assert moved.passed and moved.tensors == len(read_header(out / "model.safetensors").entries)


def test_a_golden_and_an_output_are_told_apart_in_either_order(out: Path, golden: Path, tmp_path: Path) -> None:
    assert bridge.golden.check(out, golden).passed
    made = bridge.golden.record(tmp_path / "golden", out, run=False)
    assert made.digest == load(golden).digest and load(tmp_path / "golden").digest == made.digest


def test_two_conversions_have_goldens_of_the_same_bytes(out: Path, golden: Path, tmp_path: Path) -> None:
    bridge.golden.record(written(tmp_path / "out"), tmp_path / "golden", run=False)
    assert sorted(p.name for p in golden.iterdir()) == sorted(p.name for p in (tmp_path / "golden").iterdir())
    for path in golden.iterdir():
        assert (tmp_path / "golden" / path.name).read_bytes() == path.read_bytes(), path.name


def test_nothing_in_a_golden_tells_of_time_or_place(out: Path, golden: Path) -> None:
    text = b"".join(path.read_bytes() for path in golden.iterdir())
    assert str(out.parent).encode() not in text
    assert not {"report.json", "report.html", "README.md", "bridge.json"} & set(load(golden).snapshot.files)


def test_one_changed_code_is_named_with_its_row(out: Path, golden: Path, tmp_path: Path) -> None:
    moved = bridge.golden.check(golden, changed(out, tmp_path / "out", Q))
    (move,) = moved.moves
    assert (move.kind, move.name) == ("codes", Q)
    assert move.measure and (move.measure.changed, move.measure.most) == (1, 1.0)
    assert move.origin and move.origin.rows == (ROW,) and ROW in str(moved)


def test_a_changed_scale_is_no_changed_code(out: Path, golden: Path, tmp_path: Path) -> None:
    moved = bridge.golden.check(golden, changed(out, tmp_path / "out", f"{Q}_scale", at=3))
    assert kinds(moved) == [("scales", f"{Q}_scale")]


def test_a_byte_outside_the_samples_is_found(out: Path, golden: Path, tmp_path: Path) -> None:
    moved = bridge.golden.check(golden, changed(out, tmp_path / "out", Q, at=20_011))
    assert kinds(moved) == [("codes", Q)]
    assert moved.moves[0].measure and moved.moves[0].measure.changed == 0
    assert "bytes changed, and none of the" in str(moved)


def test_layers_that_moved_alike_share_a_line(out: Path, golden: Path, tmp_path: Path) -> None:
    other = changed(out, tmp_path / "one", Q)
    other = changed(other, tmp_path / "two", Q.replace(".1.", ".3."))
    (line, *_) = lines(bridge.golden.check(golden, other).moves)
    assert "model.layers.{1,3}.self_attn.q_proj.weight (2): 2 of 128 samples" in line


def test_another_order_in_the_file_is_layout_alone(out: Path, golden: Path, tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    file = SafetensorsFile(path)
    path.write_bytes(file_bytes({name: file.read(name) for name in file.specs}, {"format": "np"}))
    assert kinds(bridge.golden.check(golden, tmp_path / "out")) == [("layout", "model.safetensors")]


def test_tensors_that_came_and_went_are_told(out: Path, golden: Path, tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    file = SafetensorsFile(path)
    kept = {name: file.read(name) for name in file.specs if name != "model.norm.weight"}
    path.write_bytes(file_bytes(kept | {"model.extra": np.zeros(3, np.float32)}, {"format": "pt"}))
    moved = bridge.golden.check(golden, tmp_path / "out")
    assert kinds(moved) == [("missing", "model.norm.weight"), ("added", "model.extra")]
    assert f"2 of {moved.tensors + 1} tensors moved (missing 1, added 1)" in str(moved)


def test_a_tensor_with_the_same_bytes_under_another_name_is_renamed(out: Path, golden: Path, tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    file = SafetensorsFile(path)
    tensors = {name.replace("embed_tokens", "wte"): file.read(name) for name in file.specs}
    path.write_bytes(file_bytes(tensors, {"format": "pt"}))
    moved = bridge.golden.check(golden, tmp_path / "out")
    assert kinds(moved) == [("renamed", "model.embed_tokens.weight")]
    assert "renamed  model.embed_tokens.weight: is now model.wte.weight" in str(moved)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("layers.0.mlp.up_proj", "layers.0.mlp.fc1", "layers.0.mlp.up_proj.weight: is now model.layers.0.mlp.fc1."),
        ("layers.1.mlp.up_proj", "layers.7.mlp.fc1", "layers.1.mlp.up_proj.weight: is now model.layers.7.mlp.fc1."),
        ("mlp.up_proj", "mlp.fc1", "layers.{0..4}.mlp.up_proj.weight (5): is now model.layers.{0..4}.mlp.fc1.weight"),
    ],
)  # fmt: skip
def test_a_renamed_tensor_is_told_with_the_number_of_its_layer(
    old: str, new: str, said: str, out: Path, golden: Path, tmp_path: Path
) -> None:
    shutil.copytree(out, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    file = SafetensorsFile(path)
    path.write_bytes(file_bytes({name.replace(old, new): file.read(name) for name in file.specs}, {"format": "pt"}))
    assert f"renamed  model.{said}" in str(bridge.golden.check(golden, tmp_path / "out"))


def test_a_missing_weight_file_is_told_before_its_tensors(out: Path, golden: Path, tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").unlink()
    moved = bridge.golden.check(golden, tmp_path / "out")
    assert {move.kind for move in moved.moves} == {"missing", "file"} and len(moved.moves) == moved.tensors + 1
    assert moved.moves[0].kind == "file" and str(moved).splitlines()[1].startswith("  file     model.safetensors: ")


def test_files_beside_the_weights_are_held_too(out: Path, golden: Path, tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text("{}")
    (tmp_path / "out" / "tokenizer.json").unlink()
    (tmp_path / "out" / "new.txt").write_text("new")
    found = kinds(bridge.golden.check(golden, tmp_path / "out"))
    assert found == [("file", "config.json"), ("file", "new.txt"), ("file", "tokenizer.json")]


@pytest.mark.slow
def test_one_changed_source_tensor_moves_what_is_made_of_it(tmp_path: Path) -> None:
    bridge.golden.record(converted_made(tmp_path / "out"), tmp_path / "golden", run=False)
    values = np.random.default_rng(5).standard_normal(llama_shapes()[Q], np.float32)
    other = converted_made(tmp_path / "other", **{Q.replace(".", "__"): values})
    assert kinds(bridge.golden.check(tmp_path / "golden", other)) == [("codes", Q), ("scales", f"{Q}_scale")]


def test_another_scheme_is_told_by_plan_and_layout(golden: Path, tmp_path: Path) -> None:
    moved = bridge.golden.check(golden, written(tmp_path / "out", quant="fp8_pc_pt"))
    assert moved.moves[0].kind == "plan" and "scheme int8_wo -> fp8_pc_pt" in moved.moves[0].text
    (layout,) = [move for move in moved.moves if (move.kind, move.name) == ("layout", Q)]
    assert layout.text.startswith("dtype int8 -> float8_e4m3fn; format w int8 -> w fp8")


def test_a_row_that_changed_is_told_though_no_byte_moved(golden: Path, out: Path, tmp_path: Path) -> None:
    kept = load(golden)
    (was,) = [o for o in kept.snapshot.origins.values() if o.tensors.endswith("q_proj.weight") and o.part == "weight"]
    old = replace(was, rows=("mappings/arch/llama.toml: another row",))
    tensors = {k: replace(t, origin=old.id) if t.origin == was.id else t for k, t in kept.snapshot.tensors.items()}
    snapshot = replace(kept.snapshot, tensors=tensors, origins={**kept.snapshot.origins, old.id: old})
    replace(kept, snapshot=snapshot).save(tmp_path / "golden")
    moved = bridge.golden.check(tmp_path / "golden", out)
    assert {move.kind for move in moved.moves} == {"made"} and len(moved.moves) == 5
    assert moved.moves[0].text == "row was mappings/arch/llama.toml: another row"


def test_converting_again_gives_the_same(golden: Path) -> None:
    moved = bridge.golden.check(golden, model=LLAMA)
    assert moved.passed and moved.after == "a new conversion"


@pytest.mark.slow
def test_converting_again_takes_the_goldens_own_calibration(tmp_path: Path) -> None:
    bridge.convert(LLAMA, "hf", "fp8", tmp_path / "out", calib=calibration(), kv=None, verify=False)
    bridge.golden.record(tmp_path / "out", tmp_path / "golden", run=False)
    assert bridge.golden.check(tmp_path / "golden", model=LLAMA).passed
    louder = calibration()
    louder.input_amax["model.layers.1.self_attn.q_proj"] *= 2  # type: ignore[index]
    moved = bridge.golden.check(tmp_path / "golden", model=LLAMA, calib=louder)
    assert moved.moves and {move.kind for move in moved.moves} == {"scales"}


@pytest.mark.slow
def test_a_recipe_is_kept_to_convert_again(tmp_path: Path) -> None:
    recipe = tmp_path / "mixed.toml"
    recipe.write_text('base = "int8_wo"\n[[rule]]\nlayers = [0]\nquant = "none"\n')
    out = written(tmp_path / "out", quant=str(recipe))
    bridge.golden.record(out, tmp_path / "without", run=False)
    with pytest.raises(GoldenError, match="scheme mixed is a recipe that was not given"):
        bridge.golden.check(tmp_path / "without", model=LLAMA)
    bridge.golden.record(out, tmp_path / "golden", run=False, quant=recipe)
    recipe.unlink()
    assert bridge.golden.check(tmp_path / "golden", model=LLAMA).passed


def test_check_takes_one_of_two_things(golden: Path, out: Path) -> None:
    with pytest.raises(UsageError, match="either"):
        bridge.golden.check(golden)
    with pytest.raises(UsageError, match="either"):
        bridge.golden.check(golden, out, model=LLAMA)


@pytest.mark.slow
def test_an_update_has_a_reason_that_is_kept(out: Path, tmp_path: Path) -> None:
    golden = tmp_path / "golden"
    first = bridge.golden.record(out, golden, run=False)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in golden.iterdir()}
    bridge.golden.record(out, golden, run=False)
    assert before == {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in golden.iterdir()}
    other = changed(out, tmp_path / "out", Q)
    with pytest.raises(GoldenError, match=r"would change; say why: reason= \(--reason TEXT\)\n(.*\n)+.*q_proj"):
        bridge.golden.record(other, golden, run=False)
    assert load(golden).digest == first.digest
    bridge.golden.record(other, golden, run=False, reason="ties go up now")
    assert bridge.golden.check(golden, other).passed
    (entry,) = load(golden).history
    assert entry.reason == "ties go up now" and Q in entry.moved[0]


@pytest.mark.slow  # it runs the model
def test_a_golden_is_not_made_of_what_fails_against_its_source(out: Path, tmp_path: Path) -> None:
    with pytest.raises(GoldenError, match="differs too much from its source"):
        bridge.golden.record(changed(out, tmp_path / "out", "model.norm.weight", 3), tmp_path / "golden", against=LLAMA)
    assert not (tmp_path / "golden").exists()


def test_diff_compares_goldens_and_models(out: Path, golden: Path, tmp_path: Path) -> None:
    other = changed(out, tmp_path / "out", Q)
    bridge.golden.record(other, tmp_path / "golden", run=False)
    for a in (out, golden):
        for b in (other, tmp_path / "golden"):
            assert kinds(bridge.golden.diff(a, b)) == [("codes", Q)]
    assert bridge.golden.diff(golden, out).passed


@pytest.mark.parametrize(
    "target", ["trtllm", "megatron", "torchtitan", pytest.param("gguf", marks=pytest.mark.product)]
)
def test_rows_of_a_dialect_are_named(target: str, tmp_path: Path) -> None:
    quant = "int8_wo" if target == "trtllm" else None
    out = written(tmp_path / "out", target, quant)
    golden = bridge.golden.record(out, tmp_path / "golden")
    assert bridge.golden.check(tmp_path / "golden", out).passed
    assert bool(golden.reference.not_run) == (target != "gguf")  # which llama.cpp runs
    for origin in golden.snapshot.origins.values():
        assert origin.rows[0].startswith(f"mappings/dialects/{target}.toml: "), origin
        assert all(row.startswith("mappings/arch/llama.toml: ") for row in origin.rows[1:]), origin


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["megatron", "torchtitan"])
def test_rows_that_read_another_dialect_are_named(dialect: str, tmp_path: Path) -> None:
    written(tmp_path / "source", dialect, None)
    bridge.convert(tmp_path / "source", "hf", "int8_wo", tmp_path / "out", verify=False)
    golden = bridge.golden.record(tmp_path / "out", tmp_path / "golden", run=False)
    for origin in golden.snapshot.origins.values():
        files = [row.partition(": ")[0] for row in origin.rows]
        assert files[:2] == ["mappings/arch/llama.toml", f"mappings/dialects/{dialect}.toml"], origin
    q = golden.snapshot.origins[golden.snapshot.tensors["model.safetensors", Q].origin]
    assert all("attn.q.weight" in row for row in q.rows), q


@pytest.mark.slow
def test_a_byte_of_a_distributed_checkpoint_is_found(tmp_path: Path) -> None:
    out = written(tmp_path / "out", "megatron", None)
    bridge.golden.record(out, tmp_path / "golden", run=False)
    path = out / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (move,) = bridge.golden.check(tmp_path / "golden", out).moves
    assert move.kind == "weights" and move.name.startswith("decoder.layers[5].")


def test_json_says_what_the_text_says(out: Path, golden: Path, tmp_path: Path) -> None:
    data = json.loads(bridge.golden.check(golden, changed(out, tmp_path / "out", Q)).to_json())
    assert not data["passed"] and [move["name"] for move in data["moves"]] == [Q]
    assert data["moves"][0]["before"]["nonfinite"] == 0


# No row of the tiny Llama has the 256 values of a K-quant, and it has no experts.
FITTING = [name for name in scheme_names() if not name.startswith(K_QUANTS) and name != "nvfp4_experts_only"]


@pytest.mark.parametrize("quant", ["none", *FITTING])
def test_the_arguments_of_a_conversion_are_found_again(quant: str) -> None:
    others = {"gguf": ("q", "iq", "int4:gptq", "int4:signround"), "mlx": ("affine",)}
    target = next((name for name, begins in others.items() if quant.startswith(begins)), "hf")
    for kv in (None, "fp8") if quant != "none" and target == "hf" else (None,):
        made = bridge.plan(LLAMA, target, quant, kv=kv)
        again, beside = arguments(made, LLAMA)
        assert (again.quant, again.kv, again.refused, beside) == (quant, kv, "", {})


@pytest.mark.parametrize(("group", "zero_points"), [(32, False), (None, True), (64, True)])
def test_blocks_that_options_gave_are_found_again(group: int | None, zero_points: bool) -> None:
    made = bridge.plan(LLAMA, "hf", "int4_wo", group=group, zero_points=zero_points)
    again, _ = arguments(made, LLAMA)
    assert (again.quant, again.group, again.zero_points, again.refused) == ("int4_wo", group, zero_points, "")


def test_outputs_from_zeros_or_to_nan_have_moved() -> None:
    zeros, ones = np.zeros(4, np.float32), np.ones(4, np.float32)
    nan = np.full(4, np.nan, np.float32)
    for before, after in ((zeros, ones), (ones, nan), (ones, 1.1 * ones)):
        found = compare_outputs(
            Reference(values={"output": before}, tolerance=0.01), Reference(values={"output": after})
        )
        assert [move.name for move in found] == ["output"]
    assert not compare_outputs(Reference(values={"o": ones}, tolerance=0.01), Reference(values={"o": 1.001 * ones}))


def test_a_number_that_is_none_any_more_is_told_apart_from_those_that_moved(
    out: Path, golden: Path, tmp_path: Path
) -> None:
    shutil.copytree(out, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    file = SafetensorsFile(path)
    tensors = {name: file.read(name) for name in file.specs}
    norm = tensors["model.norm.weight"]
    for at, value, said in (
        (3, np.nan, r"1 of 47 samples (2%) to or from NaN or infinity; 0.8891 .. 1.623"),
        (
            5,
            norm[5] + 0.25,
            "2 of 47 samples (4%) by at most 0.25, relative L2 0.026, 1 of them to or from NaN or infinity; ",
        ),
    ):
        norm = tensors["model.norm.weight"] = np.array(norm)
        norm[at] = value
        path.write_bytes(file_bytes(tensors, {"format": "pt"}))
        moved = bridge.golden.check(golden, tmp_path / "out")
        assert f"model.norm.weight: {said}" in str(moved) and "and 1 not finite" in str(moved)
        json.loads(moved.to_json())


def test_outputs_that_stay_what_is_no_number_have_not_moved() -> None:
    ones = np.ones(64, np.float32)
    (nan := ones.copy())[3] = np.nan
    (both := nan.copy())[5] = 1.5

    def told(before: np.ndarray, after: np.ndarray) -> list[str]:
        kept = Reference(values={"o": before}, tolerance=0.01)
        return lines(compare_outputs(kept, Reference(values={"o": after})))

    assert told(nan, nan) == []
    assert told(ones, nan) == ["outputs  o: 1 of 64 samples (2%) to or from NaN or infinity; tolerance 0.01"]
    assert told(nan, both) == ["outputs  o: by at most 0.5, relative L2 0.063; tolerance 0.01"]
    assert told(0 * ones, ones) == ["outputs  o: by at most 1; tolerance 0.01"]


def test_beside_what_is_no_number_the_numbers_are_compared_by_the_tolerance() -> None:
    before = np.ones(64, np.float32)
    before[:3] = np.nan, np.inf, -np.inf

    def told(**changes: float) -> list[str]:
        after = 1.001 * before
        for at, value in changes.items():
            after[int(at[1:])] = value
        kept = Reference(values={"o": before}, tolerance=0.01)
        return lines(compare_outputs(kept, Reference(values={"o": after})))

    assert told() == [] and told(_0=-np.nan) == []
    assert "by at most 0.5, relative L2 0.064" in told(_9=1.5)[0] and "NaN" not in told(_9=1.5)[0]
    for changes in ({"_0": 1.0}, {"_0": np.inf}, {"_1": -np.inf}, {"_2": np.nan}, {"_9": np.nan}, {"_9": np.inf}):
        assert "1 of them to or from NaN or infinity" in told(**changes)[0]


def test_samples_that_are_no_number_before_and_now_have_not_moved_to_it() -> None:
    zeros, gone = np.zeros(4, np.float32), np.full(4, np.nan, np.float32)
    kept = Reference(values={"o": gone}, tolerance=0.01)
    assert compare_outputs(kept, Reference(values={"o": -gone})) == []
    assert "4 of 4 samples (100%) to or from NaN" in lines(compare_outputs(kept, Reference(values={"o": zeros})))[0]


def test_a_matrix_that_reads_an_input_of_the_model_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in "xwy"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", values[:2], values[2:])
    opset = [helper.make_opsetid("", 19)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), tmp_path / "model.onnx")
    monkeypatch.setattr(layer_error, "places", lambda path, steps: {"m": ("x", "y", None)}.items())
    feeds = {"x": np.eye(2, dtype=np.float32), "w": np.full((2, 2), 3, np.float32)}
    inner, out = reference_run._run_with_taps(tmp_path, [], feeds)
    assert np.array_equal(inner["m input"], feeds["x"]) and np.array_equal(inner["m output"], feeds["w"])
    assert np.array_equal(out, feeds["w"])


def test_the_old_name_of_differences_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"is now bridge\.golden\.Differences"):
        assert bridge.golden.Moved is Differences


def test_a_changed_rounding_is_named_where_both_goldens_tell_theirs(golden: Path) -> None:
    before = load(golden).snapshot
    assert before.made.rounding == "int8 channel: amax / 127"
    after = replace(before, made=replace(before.made, rounding="int8 channel: amax / 127.5"))
    (move,) = compare(before, after, dict, dict)
    assert move.text == "rounding int8 channel: amax / 127 -> int8 channel: amax / 127.5"
    assert not compare(replace(before, made=replace(before.made, rounding="")), after, dict, dict)
