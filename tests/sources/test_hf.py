"""Directories: what is read, what is carried along, and every way in which one can be broken."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bridge.core.errors import SourceError, UsageError
from bridge.sources.opening import open_source
from bridge.sources.source import lazy

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 6}
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 9\n"
FIRST = {f"model.layers.{i}.w": np.full((2, 3), i, np.float32) for i in (0, 2)}
SECOND = {f"model.layers.{i}.w": np.full((4,), i, np.float16) for i in (1, 10)}
NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    root = tmp_path / "two-shards"
    root.mkdir()
    (root / "config.json").write_text(json.dumps(CONFIG))
    save_file(FIRST, root / NAMES[0])
    save_file(SECOND, root / NAMES[1])
    write_index(root, {**dict.fromkeys(FIRST, NAMES[0]), **dict.fromkeys(SECOND, NAMES[1])})
    return root


@pytest.fixture
def single(tmp_path: Path) -> Path:
    root = tmp_path / "one-file"
    root.mkdir()
    (root / "config.json").write_text(json.dumps(CONFIG))
    save_file({**FIRST, **SECOND}, root / "model.safetensors")
    return root


def write_index(root: Path, weight_map: dict[str, str]) -> None:
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def index_of(root: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((root / "model.safetensors.index.json").read_text())["weight_map"]
    return found


def refusal(model: object, **arguments: object) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(model, **arguments)
    return str(caught.value)


def test_shards_read_equal_to_the_reference_in_natural_order(sharded: Path) -> None:
    source = open_source(str(sharded))
    assert list(source.specs) == [f"model.layers.{i}.w" for i in (0, 1, 2, 10)]
    want = {**load_file(sharded / NAMES[0]), **load_file(sharded / NAMES[1])}
    assert all(np.array_equal(lazy(source, name).read(), array) for name, array in want.items())
    assert (source.dialect, source.name, source.config) == ("hf", "two-shards", CONFIG)


def test_several_files_without_index_are_one_checkpoint(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert len(open_source(sharded).specs) == 4


def test_a_single_file_of_any_name_is_the_checkpoint(single: Path) -> None:
    (single / "model.safetensors").rename(single / "weights.safetensors")
    assert len(open_source(single).specs) == 4


def test_everything_except_weights_and_index_is_carried(sharded: Path) -> None:
    carried = ["generation_config.json", "tokenizer.json", "chat_template.jinja", "LICENSE", "1_Pooling/config.json"]
    for name in [*carried, "training_args.bin", "onnx/model.onnx", ".gitattributes", "model.fp16.safetensors"]:
        (sharded / name).parent.mkdir(exist_ok=True)
        (sharded / name).write_text("x")
    source = open_source(sharded)
    assert set(source.side_files) == {"config.json", *carried}
    assert set(source.dropped) == {"training_args.bin", "onnx/model.onnx", "model.fp16.safetensors"}


def test_another_model_below_is_dropped_by_name(single: Path) -> None:
    below = single / "checkpoint-500"
    below.mkdir()
    for name in ("config.json", "model.safetensors"):
        (below / name).write_bytes((single / name).read_bytes())
    source = open_source(single)
    assert dict(source.dropped) == {"checkpoint-500/": "another model in a subdirectory"}


def test_links_to_directories_are_dropped_by_name_not_followed(single: Path) -> None:
    (single / "loop").symlink_to(single)
    (single / "license").symlink_to(single / "config.json")
    source = open_source(single)
    assert dict(source.dropped) == {"loop": "a link to a directory"}
    assert set(source.side_files) == {"config.json", "license"}


@pytest.mark.parametrize("name", ["tokenizer.json", "1_Pooling/config.json", "config.json", "model.safetensors"])
def test_a_link_to_nothing_is_refused_whatever_it_was(single: Path, name: str) -> None:
    """A cache of the hub whose blobs are gone."""
    (single / name).parent.mkdir(exist_ok=True)
    (single / name).unlink(missing_ok=True)
    (single / name).symlink_to("../blobs/12ab")
    assert f"{name}: a link to ../blobs/12ab, which is not there; get the file again" in refusal(single)


def test_pointers_instead_of_side_files_are_refused_together(single: Path) -> None:
    for name in ("tokenizer.json", "tokenizer.model"):
        (single / name).write_text(LFS)
    message = refusal(single)
    assert message.count(": a Git-LFS pointer instead of the file; run `git lfs pull` in its directory") == 2


@pytest.mark.parametrize("place", ["./", "weights/"])
def test_the_index_may_name_files_of_subdirectories(single: Path, place: str) -> None:
    """transformers joins the name to the directory."""
    (single / place).mkdir(exist_ok=True)
    (single / "model.safetensors").rename(single / place / "w.safetensors")
    write_index(single, dict.fromkeys({**FIRST, **SECOND}, f"{place}w.safetensors"))
    source = open_source(single)
    assert all(np.array_equal(lazy(source, name).read(), array) for name, array in {**FIRST, **SECOND}.items())
    assert not source.dropped and set(source.side_files) == {"config.json"}


def test_fingerprint_follows_the_weights(single: Path) -> None:
    first = open_source(single).fingerprint
    assert open_source(single).fingerprint == first
    os.utime(single / "model.safetensors", ns=(1, 1))
    assert open_source(single).fingerprint != first


def test_opening_and_reading_import_no_framework(sharded: Path) -> None:
    code = (
        "import sys; from bridge.sources import open_source; s = open_source(sys.argv[1]); s.read('model.layers.0.w');"
        "s.fingerprint; s.side_files;"
        "print(*[m for m in ('torch', 'transformers', 'safetensors', 'huggingface_hub', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(sharded)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_tokenizer_is_loaded_once() -> None:
    source = open_source("examples/models/tiny-llama")
    assert source.load_tokenizer() is source.load_tokenizer()


def test_a_checkpoint_without_a_tokenizer_imports_nothing_to_say_so(
    single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("bridge.tables.architectures.meaning._code", lambda architecture: ())  # which is kept
    with pytest.raises(SourceError, match=r"the checkpoint has no tokenizer; give"):
        open_source(single).load_tokenizer()
    for config in {"tokenizer_class": "ByT5Tokenizer"}, {"model_type": "canine"}:  # these have no file
        with pytest.raises(ImportError):
            open_source(single, config=config).load_tokenizer()
    (single / "tokenizer.json").write_text("{}")
    with pytest.raises(ImportError):
        open_source(single).load_tokenizer()


def test_config_entries_of_the_caller_win_and_are_written(single: Path) -> None:
    source = open_source(single, config={"hidden_size": 7})
    assert source.config == {**CONFIG, "hidden_size": 7}
    written = source.side_files["config.json"]
    assert isinstance(written, bytes)
    assert json.loads(written) == source.config


def test_config_can_come_from_a_file_when_there_is_none(single: Path, tmp_path: Path) -> None:
    (single / "config.json").rename(tmp_path / "other.json")
    assert open_source(single, config=tmp_path / "other.json").config == CONFIG


def test_a_broken_file_of_config_is_named_by_its_path(single: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{")
    assert f"config={tmp_path / 'other.json'} (--config): cannot be read as JSON" in refusal(
        single, config=tmp_path / "other.json"
    )


def test_config_of_a_wrong_type_is_a_usage_error(single: Path) -> None:
    with pytest.raises(
        UsageError, match=r"config= \(--config\) takes a dict, a config object, a JSON object or a path, not int"
    ):
        open_source(single, config=3)


def test_missing_config_says_what_to_do(single: Path) -> None:
    (single / "config.json").unlink()
    assert refusal(single) == f"{single}: config.json is missing; put it beside the weights, or give config= (--config)"


def test_config_that_is_no_json_is_refused(single: Path) -> None:
    (single / "config.json").write_text("{")
    assert "config.json: cannot be read as JSON" in refusal(single)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"hidden_size": -128, "eps": 1.0}, "hidden_size = -128:"),
        ({"vocab_size": math.nan}, "vocab_size = nan:"),
        ({"num_hidden_layers": math.inf}, "num_hidden_layers = inf:"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps = nan:"),
        (
            {"text_config": {"head_dim": -1}, "scales": [1.0, math.nan]},
            "text_config.head_dim = -1, scales = [1.0, nan]:",
        ),
    ],
)
def test_impossible_numbers_of_a_config_are_one_error(single: Path, fields: dict[str, object], told: str) -> None:
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps(config | fields))
    assert refusal(single).count("config.json: ") == 1
    assert f"config.json: {told}" in refusal(single)


def test_other_fields_may_be_infinite_or_negative(single: Path) -> None:
    """Mamba 2's `time_step_limit`, and -1 for none or all."""
    config = json.loads((single / "config.json").read_text())
    fields = {"time_step_limit": [0.0, math.inf], "sliding_window": -1}
    (single / "config.json").write_text(json.dumps(config | fields))
    assert open_source(single).config["time_step_limit"] == [0.0, math.inf]


@pytest.mark.parametrize("architectures", [None, [], "Llama", [1]])
def test_config_without_architectures_says_what_to_give(single: Path, architectures: object) -> None:
    (single / "config.json").write_text(json.dumps({**CONFIG, "architectures": architectures}))
    message = refusal(single)
    assert "config.json has no architectures (model_type is 'llama')" in message
    given = '{"architectures": ["LlamaForCausalLM"]}'
    assert f"config={json.loads(given)} (--config '{given}')" in message
    assert open_source(single, config=json.loads(given)).config == open_source(single, config=given).config


THETA, YARN = {"rope_theta": 1e4, "rope_type": "default"}, {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("own", "given"),
    [
        ({"rope_parameters": THETA}, {"rope_theta": 5e3}),
        ({"rope_theta": 1e4}, {"rope_theta": 5e3}),
        ({"rope_scaling": YARN, "rope_theta": 7.0}, {"rope_parameters": {**THETA, "rope_theta": 5e3}}),
        ({"rope_parameters": {**THETA, "rope_theta": 5e3}}, {"rope_scaling": YARN}),
        ({"rope_parameters": THETA, "rope_theta": 1e4}, {"rope_scaling": YARN, "rope_theta": 5e3}),
    ],
)
def test_a_given_rotary_entry_counts_as_transformers_ranks_it(
    single: Path, own: dict[str, object], given: dict[str, dict[str, object]]
) -> None:
    transformers = pytest.importorskip("transformers")
    (single / "config.json").write_text(json.dumps({**CONFIG, "num_attention_heads": 2, **own}))
    merged = transformers.LlamaConfig.from_dict(dict(open_source(single, config=given).config)).rope_parameters
    wanted = (given.get("rope_scaling") or given.get("rope_parameters") or THETA)["rope_type"]
    assert (merged["rope_theta"], merged["rope_type"]) == (5e3, wanted)


def test_a_given_theta_does_not_say_which_kind_of_layers_has_it(single: Path) -> None:
    kinds = {"rope_parameters": {"full_attention": THETA, "sliding_attention": THETA}}
    (single / "config.json").write_text(json.dumps({**CONFIG, **kinds}))
    with pytest.raises(
        UsageError, match=r"rope_theta: rope_parameters of config\.json has one for each kind of layers"
    ):
        open_source(single, config={"rope_theta": 5e3})


def test_the_rotary_type_su_is_read_as_longrope(single: Path) -> None:
    (single / "config.json").write_text(json.dumps({**CONFIG, "rope_scaling": {"type": "su", "long_factor": [1.0]}}))
    assert open_source(single).config["rope_scaling"] == {"type": "longrope", "long_factor": [1.0]}


def words_of(root: Path, text: str) -> Path:
    root.mkdir()
    (root / "tokenizer.json").write_text(text)
    return root


def test_a_given_tokenizer_replaces_the_files_of_the_models_own(single: Path, tmp_path: Path) -> None:
    (single / "tokenizer.json").write_text("own")
    (single / "merges.txt").write_text("own")
    source = open_source(single, tokenizer=words_of(tmp_path / "words", "given"))
    assert {name: Path(file).read_text() for name, file in source.side_files.items() if "config" not in name} == {
        "tokenizer.json": "given"
    }


@pytest.mark.parametrize("kind", ["nowhere", "nothing"])
def test_a_given_tokenizer_that_is_none_is_refused_when_the_model_is_opened(single: Path, kind: str) -> None:
    (single / "nothing").mkdir()
    message = refusal(single, tokenizer=single / kind)
    assert message.startswith("tokenizer= (--tokenizer): ")
    assert ("no such directory" in message) == (kind == "nowhere")


def test_an_entry_that_another_run_left_is_not_taken_for_codes(single: Path) -> None:
    section = {"quantization_config": {"quant_method": "gptq", "bits": 4, "unheard_of": 1}}
    (single / "config.json").write_text(json.dumps({**CONFIG, **section}))
    message = refusal(single)
    assert "but its tensors have plain" in message and "remove this" in message
    assert "dequantize" not in message and "unheard_of" not in message


def test_shard_that_the_index_names_but_is_missing(sharded: Path) -> None:
    (sharded / NAMES[1]).unlink()
    assert f"{NAMES[1]}: missing, though the index names it" in refusal(sharded)


def test_gap_in_the_numbers_without_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    (sharded / NAMES[0]).unlink()
    assert f"{NAMES[0]}: missing, as the numbers of the others say" in refusal(sharded)


def test_tensor_of_the_index_that_no_shard_holds(sharded: Path) -> None:
    write_index(sharded, {**index_of(sharded), "model.norm": NAMES[0]})
    assert f"{NAMES[0]}: lacks model.norm, which the index places there: they are not of one save" in refusal(sharded)


def test_tensor_of_a_shard_that_the_index_lacks(sharded: Path) -> None:
    weight_map = index_of(sharded)
    del weight_map["model.layers.10.w"]
    write_index(sharded, weight_map)
    assert f"{NAMES[1]}: holds model.layers.10.w, which the index does not place there" in refusal(sharded)


def test_tensor_in_two_shards(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    save_file({**SECOND, **FIRST}, sharded / NAMES[1])
    assert f"{NAMES[1]}: holds model.layers.{{0,2}}.w, which {NAMES[0]} holds as well" in refusal(sharded)


def test_truncated_shard(sharded: Path) -> None:
    path = sharded / NAMES[0]
    path.write_bytes(path.read_bytes()[:-5])
    assert f"{NAMES[0]}: shorter than its tensors: tensors take 48 bytes, the file holds 43" in refusal(sharded)


def test_pointers_instead_of_weights_are_all_in_one_message(sharded: Path) -> None:
    for name in NAMES:
        (sharded / name).write_text(LFS)
    message = refusal(sharded)
    assert message.startswith(f"{sharded}: 2 problems\n")
    assert all(f"  {name}: a Git-LFS pointer instead of weights; run `git lfs pull`" in message for name in NAMES)


def test_pointer_instead_of_the_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(LFS)
    assert "model.safetensors.index.json: a Git-LFS pointer" in refusal(sharded)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "no JSON with a weight_map"),
        ("{}", "no JSON with a weight_map"),
        ('{"weight_map": {"a": 1}}', "weight_map must map tensor names to file names"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "names files by absolute paths or with '..': ../model"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "names files by absolute paths or with '..': /etc/passwd"),
        ('{"weight_map": {"a": "."}}', "weight_map must map tensor names to file names"),
    ],
)
def test_broken_index(sharded: Path, content: str, reason: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    assert f"model.safetensors.index.json: {reason}" in refusal(sharded)


def test_two_checkpoints_in_one_directory(sharded: Path) -> None:
    save_file(FIRST, sharded / "model.safetensors")
    assert "describe two checkpoints in one directory; keep one" in refusal(sharded)


def test_all_problems_come_in_one_message(sharded: Path) -> None:
    (sharded / NAMES[0]).write_text(LFS)
    (sharded / NAMES[1]).unlink()
    (sharded / "config.json").write_text("{}")
    message = refusal(sharded)
    assert all(word in message for word in ("3 problems", "Git-LFS", "missing, though the index", "no architectures"))


@pytest.mark.parametrize(
    ("name", "kind", "writer"),
    [
        ("layers.0.q.weight_scale_inv", np.float32, "block-scaled FP8"),
        ("layers.0.q.weight_scale", np.float32, "ModelOpt or compressed-tensors"),
        ("layers.0.q.qweight", np.int32, "GPTQ or AWQ"),
        ("layers.0.q.weight_packed", np.int32, "compressed-tensors"),
        ("layers.0.q.SCB", np.float32, "bitsandbytes int8"),
        ("layers.0.q.weight.absmax", np.uint8, "bitsandbytes 4-bit"),
        ("layers.0.q.input_quantizer._amax", np.float32, "ModelOpt (calibrated, not exported)"),
    ],
)
def test_companions_of_quantized_weights_are_recognized(single: Path, name: str, kind: type, writer: str) -> None:
    save_file({**FIRST, name: np.ones(3, kind)}, single / "model.safetensors")
    message = refusal(single)
    assert f"already quantized ({name}: {writer}" in message
    assert "start from the unquantized checkpoint" in message


def test_names_that_only_look_like_companions_are_plain(single: Path) -> None:
    save_file(
        {"logit_scale": np.ones(1, np.float32), "num_blocks": np.ones(1, np.float32)}, single / "model.safetensors"
    )
    assert len(open_source(single).specs) == 2


def test_low_bit_values_are_recognized_without_companions(single: Path) -> None:
    import ml_dtypes

    save_file({"q.weight": np.ones((2, 2), ml_dtypes.float8_e4m3fn)}, single / "model.safetensors")
    assert "already quantized (q.weight: float8_e4m3fn values)" in refusal(single)


@pytest.mark.parametrize(
    ("file", "content", "found"),
    [
        ("config.json", {**CONFIG, "quantization_config": {"quant_method": "gptq", "bits": 4}}, "=gptq, bits=4"),
        ("config.json", {**CONFIG, "text_config": {"quantization_config": {"quant_method": "fp8"}}}, "=fp8"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "hf_quant_config.json: quant_algo=NVFP4"),
        ("quantize_config.json", {"bits": 4}, "quantize_config.json: bits=4"),
    ],
)  # fmt: skip
def test_quantized_by_its_files(single: Path, file: str, content: object, found: str) -> None:
    (single / file).write_text(json.dumps(content))
    message = refusal(single)
    assert "but its tensors have plain" in message and "remove this" in message
    assert found in message


def test_empty_directory(tmp_path: Path) -> None:
    assert "an empty directory; give one with config.json and *.safetensors" in refusal(tmp_path)


def test_directory_with_config_alone(single: Path) -> None:
    (single / "model.safetensors").unlink()
    assert "no weights: neither *.safetensors nor pytorch_model*.bin" in refusal(single)


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (("model_index.json", "unet/config.json"), "a pipeline of diffusers"),
        (("config.json", "tf_model.h5"), "TensorFlow or Flax weights"),
        (("weights/.metadata",), "weights/ is a distributed checkpoint, as of NeMo 2, but context/"),
        (("checkpoint-500/model.safetensors",), "a training run: give one of its checkpoint-* directories"),
    ],
)
def test_what_is_no_checkpoint_is_recognized(tmp_path: Path, names: tuple[str, ...], what: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path}: {what}")


def test_a_file_is_not_a_model(single: Path) -> None:
    assert "a file; give the directory that holds it" in refusal(single / "model.safetensors")


@pytest.mark.parametrize("make", [lambda: 3, lambda: None, lambda: {"a": 1}])
def test_what_is_no_model_at_all_is_a_usage_error(make: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match="give a transformers model, a directory or a hub id"):
        open_source(make())


def test_a_source_is_passed_through(single: Path) -> None:
    source = open_source(single)
    assert open_source(source) is source
    with pytest.raises(UsageError, match="go to the source itself"):
        open_source(source, config={})
