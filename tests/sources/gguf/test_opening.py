"""GGUF files as sources: every architecture there and back, every type of tensor, split files, and what is refused."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import bridge
from bridge.core.errors import SourceError
from bridge.core.formats.gguf import GgufFile
from bridge.sources.gguf.container import GgufTensors
from bridge.sources.opening import open_source
from bridge.tables.dialects.dialect import load_dialect
from tests.models.draft_families import KEY
from tests.models.gguf_families import FAMILIES, add_draft, save
from tests.oracles.gguf_files import rewritten

# A GGUF file names several classes alike: those whose models compute the same become the first.
SAME = {"MistralForCausalLM": "LlamaForCausalLM"}
PROMPT = torch.tensor([[5, 17, 203, 44, 8, 91, 250, 33, 4, 76, 120, 9, 61, 14, 7, 2, 190, 66, 3, 11]])


def written(family: str, root: Path, **changed: Any) -> tuple[Path, Path]:
    """A random model, and the GGUF file that target gguf makes of it; norms are values of bfloat16, as models' are."""
    source = save(family, root / family, **changed)
    values = load_file(source / "model.safetensors")
    rounded = {name: _rounded(array) if array.ndim == 1 else array for name, array in values.items()}
    save_file(rounded, source / "model.safetensors", {"format": "pt"})
    bridge.convert(str(source), target="gguf", out=root / "gguf", verify=False)
    return source, root / "gguf" / "model.gguf"


def _rounded(array: np.ndarray) -> np.ndarray:
    """Values with few bits, to which one can be added without rounding."""
    return np.round(array * 256).astype(np.float32) / 256 + np.float32(0)  # no zero with a sign


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written("llama", tmp_path_factory.mktemp("llama"))[1]


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written("deepseek2", tmp_path_factory.mktemp("deepseek"))[1]


def refusal(model: object, **arguments: Any) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(model, **arguments)
    return str(caught.value)


def test_every_architecture_with_a_layout_is_read() -> None:
    assert {name for name, _ in FAMILIES.values()} == set(load_dialect("gguf").architectures)


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_there_and_back_gives_the_same_bytes_and_logits(family: str, tmp_path: Path) -> None:
    source, file = written(family, tmp_path)
    assert bridge.convert(str(file), target="hf", out=tmp_path / "back").passed
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    models = [transformers.AutoModelForCausalLM.from_pretrained(at) for at in (source, tmp_path / "back")]
    name = FAMILIES[family][0]
    assert type(models[1]).__name__ == SAME.get(name, name)
    with torch.no_grad():
        ours, theirs = (model.eval()(PROMPT).logits for model in models)
    # both are GELU's approximation, in another order
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 if family in ("gpt2", "starcoder2") else 0)


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("deepseek2", {"q_lora_rank": None, "norm_topk_prob": False, "first_k_dense_replace": 0}),
        ("glm4moe", {"attention_bias": False, "use_qk_norm": False, "norm_topk_prob": False, "n_shared_experts": 1}),
        ("glm4moe", {"partial_rotary_factor": 1.0, "tie_word_embeddings": True, "first_k_dense_replace": 2}),
        ("nemotron", {"partial_rotary_factor": 1.0}),
    ],
)
def test_fields_that_the_keys_tell_come_back(family: str, changed: dict[str, Any], tmp_path: Path) -> None:
    source, file = written(family, tmp_path, **changed)
    before, after = (transformers.AutoConfig.for_model(**open_source(at).config) for at in (source, file))
    fields = {*FAMILIES[family][1], *changed} - {"rope_parameters", "partial_rotary_factor", "head_dim"}
    assert {name: getattr(after, name) for name in fields} == {name: getattr(before, name) for name in fields}
    assert after.rope_parameters.items() <= before.rope_parameters.items()
    assert after.rope_parameters.get("partial_rotary_factor") == before.rope_parameters.get("partial_rotary_factor")


@pytest.mark.parametrize("mscale", [0.707, 1.3])
def test_scales_and_bounds_of_yarn_come_back(mscale: float, deepseek: Path, tmp_path: Path) -> None:
    keys = {"yarn_log_multiplier": 0.1 * mscale, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}
    keys = {f"deepseek2.rope.scaling.{name}": value for name, value in keys.items()}
    assert open_source(rewritten(deepseek, tmp_path / "model.gguf", keys=keys)).config["rope_parameters"] == {
        "rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0, "original_max_position_embeddings": 32,
        "mscale": mscale, "mscale_all_dim": mscale, "beta_fast": 16.0, "beta_slow": 2.0,
    }  # fmt: skip


def test_a_draft_layer_comes_back(tmp_path: Path) -> None:
    source = save("glm4moe", tmp_path / "model")
    more = add_draft(source)
    for choice in ("keep", "drop"):
        bridge.convert(source, "gguf", out=tmp_path / choice, drafts=choice, verify=False)
    result = bridge.convert(tmp_path / "keep", "hf", out=tmp_path / "back")
    assert result.passed
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys() and more.keys() <= after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    with_it, without = (open_source(tmp_path / choice) for choice in ("keep", "drop"))
    assert (with_it.config["num_hidden_layers"], with_it.config[KEY]) == (3, 1)
    assert without.specs == {name: spec for name, spec in with_it.specs.items() if name not in more}
    assert (without.config["num_hidden_layers"], without.config[KEY]) == (3, 0)


@pytest.mark.parametrize(
    "kind",
    ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"],  # those that gguf-py makes
)
def test_values_are_those_of_gguf_py(kind: str, llama: Path, tmp_path: Path) -> None:
    names = ["token_embd.weight", "blk.1.ffn_down.weight", "blk.2.ffn_up.weight"]
    file = rewritten(llama, tmp_path / "model.gguf", dict.fromkeys(names, kind))
    container = GgufTensors([GgufFile(file)])
    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.name not in container.specs:
            continue
        spec = container.specs[tensor.name]
        wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(-1)
        begin, end = spec.size // 3, spec.size  # inside a block
        storage = {"float16": np.float16, "bfloat16": np.uint16}.get(spec.dtype, np.float32)
        values = container.read_flat(tensor.name, begin, end, np.empty(end - begin, storage))
        if spec.dtype == "bfloat16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(values, wanted[begin:end])
    dtypes = {spec.dtype for name, spec in open_source(file).specs.items() if "down" in name}
    assert dtypes == {"float32"} | ({"float16"} if kind == "F16" else {"bfloat16"} if kind == "BF16" else set())


def test_a_file_of_halves_is_a_model_of_halves(tmp_path: Path) -> None:
    source = save("qwen3", tmp_path / "qwen3")
    bridge.convert(str(source), target="gguf", dtype="bf16", out=tmp_path / "out", verify=False)
    assert open_source(tmp_path / "out").config["dtype"] == "bfloat16"
    assert bridge.convert(str(tmp_path / "out"), target="hf", quant="fp8_pc_pt", out=tmp_path / "fp8").passed


def test_parts_of_a_split_file_are_one_model(llama: Path, tmp_path: Path) -> None:
    first = rewritten(llama, tmp_path / "model.gguf", shards=3)
    whole, split = open_source(llama), open_source(first)
    assert whole.specs == split.specs == open_source(tmp_path).specs
    assert all(np.array_equal(whole.read(name), split.read(name)) for name in whole.specs)
    assert open_source(first.with_name("model-00002-of-00003.gguf")).specs == whole.specs
    first.with_name("model-00002-of-00003.gguf").unlink()
    assert refusal(first) == f"{tmp_path}: model-00002-of-00003.gguf: missing, a part of the model; get it as well"
    first.rename(tmp_path / "alone.gguf")
    assert "says that it is one of 3 parts" in refusal(tmp_path / "alone.gguf")


def test_parts_under_other_names_are_refused(llama: Path, tmp_path: Path) -> None:
    parts = [rewritten(llama, tmp_path / "model.gguf", shards=3)]
    parts += [tmp_path / f"model-0000{at}-of-00003.gguf" for at in (2, 3)]
    for name in ("model-00004-of-00003.gguf", "model-00000-of-00003.gguf", "model-00001-of-00000.gguf"):
        (tmp_path / name).symlink_to(parts[0])
        assert "its name says part" in refusal(tmp_path / name)
        (tmp_path / name).unlink()
    (tmp_path / "folder.gguf").mkdir()
    assert open_source(tmp_path).specs
    moved = parts[1].rename(tmp_path / "moved")
    parts[2].rename(parts[1])
    moved.rename(parts[2])
    assert f"{parts[1]}: is part 3 by its key split.no, and 2 by its name" in refusal(parts[0])


@pytest.mark.parametrize("count", ["abc", [1, 2], -1])
def test_a_count_of_parts_that_is_none_is_refused(count: Any, llama: Path, tmp_path: Path) -> None:
    file = rewritten(llama, tmp_path / "model.gguf", keys={"split.count": count})
    assert re.search(r"split.count is .*; it should be a whole number", refusal(file))


def test_the_caller_names_the_class_and_its_config(llama: Path) -> None:
    config = open_source(llama, config={"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}).config
    assert config["rms_norm_eps"] == 1e-5
    assert "llama is LlamaForCausalLM or MistralForCausalLM" in refusal(llama, config={"architectures": ["Bert"]})
    assert "rms_norm_epss is no field of LlamaForCausalLM's config" in refusal(llama, config={"rms_norm_epss": 1e-5})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.architecture": "falcon"}, "general.architecture is 'falcon', which has no table here; known: deep"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale = 0.5: is not read"),
        ({"llama.attention.head_count": [6, 6, 2]}, "llama.attention.head_count = [6, 6, 2]: must be a whole number"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "rms_norm_eps: epsilon of the norms"),
        ({"llama.attention.value_length": 16}, "llama.attention.value_length = 16, but llama.attention.key_length"),
        ({"llama.rope.scaling.type": "longrope"}, "rope_parameters: scaling of the rotary embedding"),
        ({"tokenizer.ggml.model": None}, "has no tokenizer; give the tokenizer of the model: tokenizer="),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'; read are"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'; read are"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is None; it should be a list of texts"),
        ({"tokenizer.ggml.merges": ["th"]}, "tokenizer.ggml.merges has 'th', which is not two texts"),
        ({"tokenizer.ggml.eos_token_id": 300}, "tokenizer.ggml.eos_token_id is 300, of 300 tokens"),
    ],
)
def test_keys_that_cannot_be_followed_are_refused(
    keys: dict[str, Any], message: str, llama: Path, tmp_path: Path
) -> None:
    file = rewritten(llama, tmp_path / "model.gguf", keys=keys)
    text = refusal(file)
    assert message in text and text.startswith(str(file))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_gating_func": 1}, "score = 'sigmoid', but deepseek2.expert_gating_func (1) = 'softmax'"),
        ({"expert_gating_func": None}, "score = 'sigmoid', but llama.cpp's deepseek2 = 'softmax'"),
        ({"expert_group_count": None}, "n_group: groups of experts"),
        ({"expert_shared_count": 3}, "deepseek2.expert_feed_forward_length = 192, but the tensors have 128"),
        ({"leading_dense_block_count": 2}, "deepseek2.leading_dense_block_count (2) = (0, 1), but the tensors have"),
        ({"leading_dense_block_count": -1}, "deepseek2.leading_dense_block_count = -1: must be a whole number"),
        ({"attention.key_length_mla": 90}, "deepseek2.attention.key_length_mla - deepseek2.rope.dimension_count = 58"),
        ({"rope.dimension_count": 16}, "deepseek2.rope.dimension_count = 16"),
        ({"rope.scaling.type": "linear"}, "rope_parameters: scaling of the rotary embedding"),
        ({"rope.scaling.yarn_log_multiplier": None}, "rope_parameters: scaling of the rotary embedding"),
        ({"nextn_predict_layers": 1}, "deepseek2.nextn_predict_layers = 1: is not read"),
    ],
)
def test_keys_of_experts_and_latents_that_cannot_be_followed_are_refused(
    keys: dict[str, Any], message: str, deepseek: Path, tmp_path: Path
) -> None:
    own = {f"deepseek2.{name}": value for name, value in keys.items()}
    assert message in refusal(rewritten(deepseek, tmp_path / "model.gguf", keys=own))


def test_what_is_refused_can_be_answered(llama: Path, tmp_path: Path) -> None:
    keys = {"llama.attention.scale": 0.5, "llama.rope.scaling.type": "longrope", "tokenizer.ggml.model": None}
    file = rewritten(llama, tmp_path / "model.gguf", keys=keys)
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    given = {"llama.attention.scale": None, "rope_parameters": rope}
    source = open_source(file, config=given, tokenizer=llama.parent.parent / "llama")
    assert source.config["rope_parameters"] == rope and "tokenizer.json" in source.side_files


def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    assert refusal("no/model.gguf").startswith("no/model.gguf: no such directory, and not a hub id either")


def test_several_models_in_a_directory_are_named(llama: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).symlink_to(llama)
    assert refusal(tmp_path) == f"{tmp_path}: has 2 GGUF models (a.gguf, b.gguf); give the path of one file"


def _begun(tail: bytes, version: int = 3, tensors: int = 0, pairs: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + tail


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGUF", "truncated inside its header"),
        (b"GGML" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "a GGUF file of a big-endian machine"),
        (_begun(b"", version=1), "GGUF version 1; this program reads versions 2 and 3"),
        (_begun(_text("k") + struct.pack("<IIQ", 9, 4, 1 << 60)), "a list of 1152921504606846976 values"),
        (_begun(_text("k") + struct.pack("<IIQ", 9, 8, 1 << 60)), "a list of 1152921504606846976 values"),
        (
            _begun(
                b"".join(_text(f"k{at}") + struct.pack("<IIQ", 9, 0, 1 << 20) + bytes(1 << 20) for at in range(5)),
                pairs=5,
            ),
            "a list of 1048576 values in its header, where all lists together have at most 4194304",
        ),
        (_begun(_text("k") + struct.pack("<IQ", 8, 1 << 60)), "truncated inside its header"),
        (_begun(_text("k") + struct.pack("<IIQ", 9, 9, 1)), "unknown type 9"),
        (_begun(b"", pairs=1 << 60), "truncated inside its header"),
        (_begun(b"", tensors=1 << 60, pairs=0), "truncated inside its header"),
        (_begun(_text("t") + struct.pack("<I2QIQ", 2, 1 << 40, 1 << 40, 0, 0), tensors=1, pairs=0), "no memory holds"),
        (_begun(_text("t") + struct.pack("<IQIQ", 1, 256, 16, 0), tensors=1, pairs=0), "has ggml type IQ2_XXS, which"),
        (
            _begun(_text("t") + struct.pack("<IQIQ", 1, 256, 99, 0), tensors=1, pairs=0),
            "has ggml type 99, which is not",
        ),
        (
            _begun(_text("t") + struct.pack("<IQIQ", 1, 33, 3, 0), tensors=1, pairs=0),
            "rows of 33 are no blocks of q4_1",
        ),
        (_begun(_text("t") + struct.pack("<IIQ", 0, 3, 0), tensors=1, pairs=0), "rows of 1 are no blocks of q4_1"),
        (_begun(_text("t") + struct.pack("<IQIQ", 1, 32, 3, 0), tensors=1, pairs=0), "shorter than its tensors"),
    ],
)
def test_a_broken_header_is_one_error(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    assert re.search(re.escape(message), refusal(tmp_path / "model.gguf"))
