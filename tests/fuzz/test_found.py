"""What attacks found, each as it was found: once another exception, a hang, gigabytes, or a file read that is none."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bridge.calibration.data.documents import documents
from bridge.core.errors import BridgeError, SourceError, TableError
from bridge.core.files.archive import open_folder
from bridge.core.formats.safetensors import SafetensorsFile, file_bytes, read_header
from bridge.core.formats.torch_file import TorchFile
from bridge.core.formats.unpickle import load_bytes
from bridge.core.mappings import Place, parse_table, read_table
from bridge.core.parsing.limited import parse_toml
from bridge.core.parsing.typed_json import typed
from bridge.core.text import fold_layers, nearest
from bridge.planning.plan import Plan
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.load import load_scheme
from bridge.sources.quantized import fields as words
from bridge.sources.weights.dcp_metadata import METADATA
from bridge.sources.weights.distributed import distributed
from bridge.sources.weights.shards import find_weights
from bridge.tables.expressions.grammar import parse_formula
from tests.covering import usual
from tests.fuzz.case import clean
from tests.fuzz.corpus.texts import header
from tests.fuzz.opcodes import integer, named, text
from tests.fuzz.targets import configs, quantized, sidecars
from tests.sources.weights.test_zarr import array

DEEP = b"[" * 100_000
PLACE = Place("x.toml", 1, "row")


def refusal(root: Path, read: Callable[[], object]) -> str:
    """What bridge says of it: one error, that names a file and can be printed."""
    with pytest.raises(BridgeError) as caught:
        read()
    clean(caught.value, root)
    return str(caught.value)


def weights(root: Path) -> object:
    found = find_weights(root)
    assert found is not None
    if found.problems:
        raise SourceError(f"{root}: {found.problems[0]}")
    return found


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (DEEP, "nested too deeply"),
        (b'{"weight_map":' + b"[" * 70 + b"]" * 70 + b"}", "nested more than 64 deep"),
        (json.dumps({"weight_map": {"a": "x" * 300}}).encode(), "names files that no directory has"),
        (b'{"weight_map":{}}', "weight_map is empty"),
        (b"[" + b"1," * (3 << 20) + b"1]", "at most 2097152 are read"),
        (json.dumps({"weight_map": {"a": "x\x1b[2J.safetensors"}}).encode(), r"\\x1b\[2J.safetensors: missing"),
    ],
)
def test_index_that_is_none_is_one_error(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    assert re.search(why, refusal(tmp_path, lambda: weights(tmp_path)))


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ({"__metadata__": 0}, "must map strings to strings"),
        ({"a": {"dtype": "F32", "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}}, "which no memory holds"),
        ({"a": {"dtype": "F32", "shape": [1] * 70, "data_offsets": [0, 4]}}, "has 70 axes"),
        ({"a": {"dtype": [[[]]], "shape": [], "data_offsets": [0, 4]}}, r"dtype \[list\] is unknown"),
        (b'{"a":{"dtype":"F32","shape":[' + b"9" * 60 + b'],"data_offsets":[0,4]}}', "a number of 60 digits"),
        (b'{"a":[' + b"{}," * (3 << 20) + b"{}]}", "at most 4194304 are read"),
        (b"{" + b",".join(b'"%d":0,"%d":0' % (n, n) for n in range(50_000)) + b"}", "and 49992 more twice"),
    ],
)
def test_header_that_no_writer_writes_is_one_error(tmp_path: Path, tree: Any, why: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(header(tree))
    assert re.search(why, refusal(tmp_path, lambda: read_header(tmp_path / "model.safetensors")))


def test_names_with_numbers_of_other_scripts_or_thousands_of_digits_are_not_folded() -> None:
    names = ["a.²", "a.٣", f"a.{'9' * 5000}", "a.1", "a.2"]
    assert fold_layers(names) == ["a.²", "a.٣", f"a.{'9' * 5000}", "a.{1..2}"]


def test_name_of_ten_thousand_parts_takes_no_pass_for_each() -> None:
    name = ".".join(["1"] * 10_000)
    (folded,) = fold_layers([name])
    assert folded == name


def test_long_name_is_compared_by_its_beginning() -> None:
    assert nearest("fp8" + "x" * 1_000_000, ["fp8", "x" * 1_000_000]).endswith("known: fp8, " + "x" * 1_000_000)


def test_message_is_cut_and_steers_no_terminal() -> None:
    message = str(SourceError("\x1b[2J" + "x" * 100_000 + "\ud800"))
    assert message.startswith(r"\x1b[2Jxxx")
    assert message.endswith(f"and {100_005 - 16_384} more characters")
    assert str(SourceError("a\ud800")).encode() == rb"a\ud800"


def _legacy(change: Callable[[bytes], bytes], root: Path) -> None:
    torch.save({"a": torch.arange(3.0)}, root / "a.bin", _use_new_zipfile_serialization=False)
    data = change((root / "a.bin").read_bytes())
    (root / "a.bin").write_bytes(data)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data.replace(pickle.dumps(1001, 2), pickle.dumps(1002, 2)), "another version"),
        (lambda data: data[:-20] + (4).to_bytes(8, "little") + data[-12:], "other sizes than its tensors say"),
    ],
)
def test_legacy_file_is_held_to_what_torch_holds_it_to(
    tmp_path: Path, change: Callable[[bytes], bytes], why: str
) -> None:
    _legacy(change, tmp_path)
    assert why in refusal(tmp_path, lambda: TorchFile(tmp_path / "a.bin"))


@pytest.mark.parametrize(("at", "why"), [(-18, "of several files"), (None, "another name in its local header")])
def test_zip_that_readers_differ_on_is_refused(tmp_path: Path, at: int | None, why: str) -> None:
    torch.save({"a": torch.arange(3.0)}, tmp_path / "a.bin")
    data = bytearray((tmp_path / "a.bin").read_bytes())
    if at is None:
        found = data.index(b"data/0")
        data[found : found + 6] = b"data/1"
    else:
        data[at] = 1
    (tmp_path / "a.bin").write_bytes(data)
    assert why in refusal(tmp_path, lambda: TorchFile(tmp_path / "a.bin"))


def _tensor(shape: bytes, numel: bytes = integer(3)) -> bytes:
    storage = b"(" + text("storage") + named("torch FloatStorage") + text("0") + text("cpu") + numel + b"tQ"
    rest = integer(0) + b"(" + shape + b"t(" + shape + b"t\x89" + named("collections OrderedDict") + b")R"
    return b"}" + text("a") + named("torch._utils _rebuild_tensor_v2") + b"(" + storage + rest + b"tRs"


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (_tensor(b"\x8b\x00\x10\x00\x00" + b"\x7f" * 4096), "a number of 32767 bits"),
        (_tensor(integer(1) * 70), "... 70 of them"),
        (_tensor(integer(0) + integer(1 << 62)), "which no memory holds"),
        (b"}\x8b\x00\x10\x00\x00" + b"\x7f" * 4096 + b"Ns", "a number of 32767 bits"),
        (_tensor(integer(3), b"\x8b\x00\x10\x00\x00" + b"\x7f" * 4096), "describes storage '0' wrongly"),
    ],
)
def test_number_of_a_pickle_is_one_that_can_be_printed(tmp_path: Path, program: bytes, why: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.bin", "w") as made:
        made.writestr("archive/data.pkl", b"\x80\x02" + program + b".")
    assert why in refusal(tmp_path, lambda: TorchFile(tmp_path / "a.bin"))


@pytest.mark.slow
@pytest.mark.parametrize("body", usual([b"}", b"\x8f"], [b"}", b"\x8f", b"]\x94", b"}K\0K\0s"]))
def test_small_index_makes_no_more_than_so_much_for_each_byte(body: bytes) -> None:
    data = b"\x80\x04](" + body * (1_000_000 // len(body)) + b"e."
    tracemalloc.start()
    try:
        with contextlib.suppress(SourceError):
            load_bytes(data, METADATA)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 70 * len(data)


def test_table_that_is_no_text_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff")
    assert "cannot be read" in refusal(tmp_path, lambda: read_table(tmp_path / "x.toml"))


@pytest.mark.parametrize("toml", ["a = " + "[" * 5000, "a = " + "9" * 5000, ".".join(["a"] * 3000) + " = 1"])
def test_toml_that_would_take_everything_is_one_error(tmp_path: Path, toml: str) -> None:
    with pytest.raises(TableError, match="not valid TOML"):
        parse_table(toml, "x.toml")
    with pytest.raises(ValueError, match=r"nested|digit|dots"):
        parse_toml(toml)
    (tmp_path / "x.toml").write_text(toml)
    assert "cannot be read as TOML" in refusal(tmp_path, lambda: load_scheme(tmp_path / "x.toml"))


@pytest.mark.parametrize("formula", ["-" * 3000 + "1", "1+" * 600 + "1", "(" * 300, "a\0b", "not " * 60 + "a"])
def test_formula_that_is_too_deep_is_one_error(formula: str) -> None:
    with pytest.raises(TableError, match=r"nested|is not an expression"):
        parse_formula(formula, PLACE)


@pytest.mark.parametrize("formula", ["range(n)", "sliding(n, [1, 1])"])
def test_formula_counts_to_no_more_than_a_model_has(formula: str) -> None:
    with pytest.raises(BridgeError, match="at most 65536 are supported"):
        parse_formula(formula, PLACE).value({"n": 10**9})


def test_recipe_with_an_unknown_cache_names_itself(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "fp8"\nkv = "fp7"\n')
    assert "mine.toml" in refusal(tmp_path, lambda: load_scheme(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (f'base = "{"fp8" * 100}"', "is unknown"),
        ('base = "../dialects/hf"', "not from another file"),
        ('base = "fp8"\n[[rule]]\nlayers = [0]\nquant = "{root}/mine"', "not from another file"),
    ],
)
def test_scheme_of_a_recipe_is_a_name_and_no_file(tmp_path: Path, recipe: str, why: str) -> None:
    for name in ("mine", "mine.toml"):  # a rule that names its own recipe was read for ever
        (tmp_path / name).write_text(recipe.replace("{root}", str(tmp_path)))
    assert why in refusal(tmp_path, lambda: load_scheme(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "fp8", "weight_block_size": [0, 8]},
        {"quant_method": "fp8", "weight_block_size": ["a", 8]},
        {"quant_method": "compressed-tensors", "config_groups": [1]},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": 3},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": [3]}}},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["re:("]}}},
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"g": {"targets": ["re:.*"], "weights": {"num_bits": "x"}}},
        },
    ],
)
def test_words_of_a_quantized_checkpoint_are_held_to_their_types(tmp_path: Path, section: dict[str, Any]) -> None:
    quantized.make(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": section}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refusal(tmp_path, lambda: quantized.read(tmp_path))


@pytest.mark.parametrize(
    "pattern", [r"(a|a)*!", r"(\w+)+!", r".*.*.*.*.*!", r"(a*)*", r"(?:x{1,9}){9}", r"(.)\1", "a" * 600]
)
def test_expression_that_may_never_end_is_refused(pattern: str) -> None:
    with pytest.raises(SourceError, match=r"expression|repeats|characters"):
        words.matches(pattern, "a" * 40, "config.json")


@pytest.mark.parametrize(
    "pattern", [r".*lm_head", r"model\.layers\.\d+\.mlp\..*", r".*(q|k|v)_proj$", r"(?:model\.)?layers.*"]
)
def test_expression_that_checkpoints_have_is_tried(pattern: str) -> None:
    for name in ("model.layers.3.mlp.up_proj", "lm_head", "model.layers.0.self_attn.q_proj"):
        assert words.matches(pattern, name, "config.json") == (re.match(pattern, name) is not None)


def test_long_names_of_long_names_are_one_error(tmp_path: Path) -> None:
    link = tarfile.TarInfo("L")
    link.type, link.size = tarfile.GNUTYPE_LONGNAME, 2
    (tmp_path / "a.nemo").write_bytes((link.tobuf() + b"a\0" + bytes(510)) * 3000 + bytes(1024))
    assert "without end" in refusal(tmp_path, lambda: open_folder(tmp_path / "a.nemo"))


def test_size_beyond_what_files_have_is_one_error(tmp_path: Path) -> None:
    head = bytearray(tarfile.TarInfo("a").tobuf(tarfile.GNU_FORMAT))
    head[124:136] = b"\x80" + b"\x7f" * 11  # base 256
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    (tmp_path / "a.nemo").write_bytes(bytes(head) + bytes(1024))
    refusal(tmp_path, lambda: open_folder(tmp_path / "a.nemo"))


def test_header_that_promises_a_million_chunks_looks_for_a_hundred(tmp_path: Path) -> None:
    array(tmp_path, "w", torch.ones(3), (1,))
    said = json.loads((tmp_path / "w" / ".zarray").read_text())
    (tmp_path / "w" / ".zarray").write_text(json.dumps(said | {"shape": [1 << 20]}))
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert "chunks {3..103} and others are missing" in refusal(tmp_path, lambda: distributed(open_folder(tmp_path)))


def test_calibration_and_texts_that_are_nested_are_one_error(tmp_path: Path) -> None:
    metadata = {"qbridge.calibration": "1", "qbridge": DEEP.decode()}
    (tmp_path / "a.calib").write_bytes(file_bytes({"input_amax/a": np.ones((), np.float32)}, metadata))
    refusal(tmp_path, lambda: Calibration.load(tmp_path / "a.calib"))
    (tmp_path / "a.jsonl").write_bytes(DEEP + b"\n")
    refusal(tmp_path, lambda: documents(tmp_path / "a.jsonl", lambda: None, 1))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda said: said.update(applied=""), "applied = ''; expected a list"),
        (lambda said: said.update(applied={}), "applied = {}; expected a list"),
        (lambda said: said.update(provenance=sorted(said["provenance"])), "expected an object for Provenance"),
    ],
)
def test_words_of_a_calibration_are_held_to_their_types(
    tmp_path: Path, change: Callable[[Any], object], why: str
) -> None:
    sidecars.make(tmp_path)
    saved = SafetensorsFile(tmp_path / sidecars.FILE)
    said = json.loads(saved.header.metadata["qbridge"])
    change(said)
    arrays = {name: saved.read(name) for name in saved.specs}
    data = file_bytes(arrays, saved.header.metadata | {"qbridge": json.dumps(said)})
    (tmp_path / "changed.calib").write_bytes(data)
    assert why in refusal(tmp_path, lambda: Calibration.load(tmp_path / "changed.calib"))


@pytest.mark.parametrize("at", ["00", "٠", " 0", "1", "-0"])
def test_batches_of_a_calibration_are_counted_in_one_way(tmp_path: Path, at: str) -> None:
    sidecars.make(tmp_path)
    saved = SafetensorsFile(tmp_path / sidecars.FILE)
    arrays = {name.replace("inputs/0/", f"inputs/{at}/"): saved.read(name) for name in saved.specs}
    (tmp_path / "changed.calib").write_bytes(file_bytes(arrays, saved.header.metadata))
    assert "held_out contains" in refusal(tmp_path, lambda: Calibration.load(tmp_path / "changed.calib"))


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan["steps"][0].pop("shift"),
        lambda plan: plan["steps"][0].update(shift="1"),
        lambda plan: plan.update(sources=[]),
        lambda plan: plan["steps"][0]["outputs"][0]["spec"].update(dtype="float33"),
        lambda plan: plan.update(steps={}),
        lambda plan: plan["steps"][0]["outputs"][0]["spec"].update(shape=[-1]),
        lambda plan: plan["steps"][0]["inputs"][0].update(rows=[1]),
    ],
)
def test_plan_is_read_with_the_types_of_its_fields_or_not_at_all(
    tmp_path: Path, change: Callable[[Any], object]
) -> None:
    import bridge

    configs.make(tmp_path)
    plan = json.loads(json.dumps(bridge.plan(tmp_path, "hf").to_dict()))
    assert typed(Plan, plan).target == "hf"
    change(plan)
    with pytest.raises((TypeError, ValueError)):
        typed(Plan, plan)


def test_attributes_of_gigabytes_are_not_read() -> None:
    with pytest.raises(SourceError):
        load_bytes(io.BytesIO(b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f").getvalue(), METADATA)
