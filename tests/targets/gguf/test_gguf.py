"""Written GGUF files against gguf-py: container, names, keys, refusals."""

from __future__ import annotations

import json
import re
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

import bridge
from bridge.core.errors import PlanError, SchemeError, SourceError, TableError, UsageError, VerifyError
from bridge.core.formats.gguf import GgufFile, layout
from bridge.core.mappings import parse_table
from bridge.core.progress import BYTES
from bridge.core.values import TensorSpec
from bridge.sources.opening import open_source
from bridge.tables.dialects.dialect import load_dialect
from bridge.tables.llama_cpp import graphs, read_graphs
from bridge.targets import load_target
from bridge.targets.gguf.runtime import LlamaCpp
from bridge.targets.manifest import load_manifest
from tests.blocks import ROOT
from tests.models.gguf_families import FAMILIES, save
from tests.oracles.llama_cpp import tensors

LLAMA = ROOT / "examples" / "models" / "tiny-llama"
MXFP4 = "mxfp4_wo"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gguf") / "out"
    assert bridge.convert(str(LLAMA), target="gguf", quant=MXFP4, out=out).passed
    return out


@pytest.mark.slow
def test_gguf_py_reads_every_tensor_and_key(written: Path) -> None:
    theirs, ours = gguf.GGUFReader(written / "model.gguf"), GgufFile(written / "model.gguf")
    assert [tensor.name for tensor in theirs.tensors] == list(ours.specs)
    for tensor in theirs.tensors:
        spec = ours.specs[tensor.name]
        assert tuple(int(n) for n in tensor.shape[::-1]) == spec.shape
        assert tensor.data.tobytes() == ours.read(tensor.name).tobytes()
        assert tensor.data_offset == ours.offsets[tensor.name] and tensor.data_offset % 32 == 0
    for key, value in ours.metadata.items():
        assert theirs.fields[key].contents() == value, key


@pytest.mark.parametrize("family", list(FAMILIES))
def test_names_are_those_of_gguf_py(family: str, tmp_path: Path) -> None:
    plan = bridge.plan(str(save(family, tmp_path / family)), target="gguf")
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == graphs()[plan.architecture].name)
    names = gguf.get_tensor_name_map(arch, 16)
    for step in plan.steps:
        name = step.outputs[0].spec.name
        stem, _, suffix = name.rpartition(".")
        base = step.source.removesuffix(f".{suffix}").replace("_correction_bias", "_correction")  # as its converter
        if len(step.inputs) == 1 and step.inputs[0].rows is None and ".experts." not in base:
            assert names.get_name(base, try_suffixes=(".weight", ".bias")) == stem, (base, name)
        assert stem in {names.mapping[key][1] for key in names.mapping}, name


def test_every_architecture_with_a_layout_has_a_graph() -> None:
    written = {name for name, graph in graphs().items() if not graph.refused}
    assert written == set(load_dialect("gguf").architectures)
    assert all(bool(graph.name) != bool(graph.refused) for graph in graphs().values())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("epsilon = 1", "unknown key `epsilon`"),
        ("rms = 1", "`rms` is a bool, not 1"),
        ('refuse = { "heads ** 2" = "wide" }', "is not allowed here"),
    ],
)
def test_a_wrong_row_of_a_graph_is_refused(row: str, message: str) -> None:
    file = parse_table(f"[graphs.LlamaForCausalLM]\n{row}\n", "llama.cpp.toml")
    with pytest.raises(TableError, match=re.escape(message)):
        read_graphs(file)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_plain_values_are_the_sources(family: str, tmp_path: Path) -> None:
    source, out = save(family, tmp_path / family), tmp_path / "out"
    assert bridge.convert(str(source), target="gguf", out=out).passed
    total = sum(float(np.abs(array).sum(dtype=np.float64)) for array in tensors(out / "model.gguf").values())
    plan = load_manifest(out).plan
    read = open_source(str(source))
    want = sum(
        float(np.abs(read.read(part.source).astype(np.float64) + step.shift).sum()) * (part.rows is None)
        for step in plan.steps for part in step.inputs
    )  # fmt: skip
    fused = any(part.rows for step in plan.steps for part in step.inputs)
    computed = float(np.abs(tensors(out / "model.gguf").get("rope_freqs.weight", np.zeros(1))).sum())
    assert fused or total == pytest.approx(want + computed, rel=1e-9)
    assert GgufFile(out / "model.gguf").metadata["general.architecture"] == graphs()[plan.architecture].name


def test_llama3_frequencies_are_those_of_transformers(tmp_path: Path) -> None:
    source, out = save("llama", tmp_path / "llama"), tmp_path / "out"
    bridge.convert(str(source), target="gguf", out=out)
    factors = GgufFile(out / "model.gguf").read("rope_freqs.weight")
    rotary = transformers.AutoModelForCausalLM.from_pretrained(source).model.rotary_emb
    plain = 1 / 5000.0 ** (torch.arange(0, 64, 2).double() / 64)
    np.testing.assert_allclose(factors, (plain / rotary.inv_freq.double()).numpy(), rtol=1e-6)


@pytest.mark.slow
def test_verify_asks_llama_cpp_for_64_positions(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp")
    asked, answer = [], LlamaCpp.log_probabilities
    monkeypatch.setattr(LlamaCpp, "log_probabilities", lambda *given: asked.append(given) or answer(*given))
    report = bridge.verify(written, against=str(LLAMA))
    (row,) = report.parity.outputs
    assert report.passed and row.positions == len(asked) == 64 and row.cosine > 0.97
    assert row.perplexity and row.reference_perplexity and 1 < row.perplexity / row.reference_perplexity < 1.1
    assert report.parity.ran == "64 positions in llama.cpp; KL and perplexity: the file's weights, decoded, in torch"


@pytest.mark.slow
def test_verify_finds_a_changed_byte(tmp_path: Path) -> None:
    source, copy = str(save("qwen2", tmp_path / "qwen2")), tmp_path / "copy"
    (tmp_path / "qwen2" / "tokenizer.json").unlink()  # so that tensors are compared, and llama.cpp does not run
    bridge.convert(source, target="gguf", quant=MXFP4, out=copy, verify=False)
    assert bridge.verify(copy, against=source).passed
    file = GgufFile(copy / "model.gguf")
    at = file.offsets["blk.2.ffn_up.weight"] + 5
    with (copy / "model.gguf").open("r+b") as data:
        data.seek(at)
        byte = data.read(1)
        data.seek(at)
        data.write(bytes([byte[0] ^ 0x77]))
    assert not bridge.verify(copy, against=source).passed


def test_a_file_that_is_cut_off_is_told(written: Path, tmp_path: Path) -> None:
    data = (written / "model.gguf").read_bytes()
    for size in (2, 20, 3000, len(data) - 1000):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(SourceError):
            GgufFile(tmp_path / "cut.gguf")
    copy = tmp_path / "copy"
    shutil.copytree(written, copy)
    (copy / "model.gguf").write_bytes(data[:-1000])
    assert any(
        "shorter than its tensors" in finding for finding in load_target("gguf").lint(copy, load_manifest(copy).plan)
    )
    with pytest.raises((SourceError, VerifyError)):
        bridge.verify(copy, against=str(LLAMA))


def test_opening_a_file_reads_its_header_alone(tmp_path: Path) -> None:
    nbytes = 64 << 20
    head, _, size = layout([TensorSpec("weight", (nbytes // 4,), "float32")], {"general.architecture": "llama"})
    with (tmp_path / "large.gguf").open("wb") as file:
        file.write(head)
        file.truncate(size)
    tracemalloc.start()
    try:
        assert GgufFile(tmp_path / "large.gguf").specs["weight"].nbytes == nbytes
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_run_that_was_cut_off_goes_on_to_the_same_bytes(written: Path, tmp_path: Path) -> None:
    seen: list[int] = []

    def cut_off(done: int, total: int, what: str) -> None:
        seen.append(done)
        if what == BYTES[0] and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bridge.convert(str(LLAMA), target="gguf", quant=MXFP4, out=tmp_path / "out", progress=cut_off)
    assert seen and not (tmp_path / "out").exists()
    assert bridge.convert(str(LLAMA), target="gguf", quant=MXFP4, out=tmp_path / "out").passed
    assert (tmp_path / "out" / "model.gguf").read_bytes() == (written / "model.gguf").read_bytes()


def test_a_sound_file_has_no_findings(written: Path) -> None:
    assert not load_target("gguf").lint(written, load_manifest(written).plan)


@pytest.mark.parametrize(
    ("quant", "nearest"),
    [("fp8", "int8_wo"), ("int4_awq", "int4_wo"), ("int8_sq", "int8_wo"), ("nvfp4", "nvfp4_wo"), ("mxfp8", "int8_wo")],
)
@pytest.mark.parametrize(
    "given", [{"target": "gguf"}, {"target": "llama.cpp"}, {"target": "gguf", "runtime": "llama.cpp"}], ids=str
)
def test_other_schemes_are_refused_with_the_nearest(quant: str, nearest: str, given: dict[str, str]) -> None:
    with pytest.raises(SchemeError, match=rf"(llama\.cpp|ggml) (divides|rounds|has) .*use {nearest}\b"):
        bridge.plan(str(LLAMA), quant=quant, **given)


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["q8_0", "q4_0"])
def test_a_scheme_with_the_name_of_a_type_writes_the_bytes_of_gguf_py(quant: str, tmp_path: Path) -> None:
    source, kind = str(save("mixtral", tmp_path / "mixtral")), gguf.GGMLQuantizationType[quant.upper()]
    for out, scheme in (("plain", None), ("codes", quant)):
        bridge.convert(source, target="gguf", quant=scheme, out=tmp_path / out, verify=False)
    plain, codes = GgufFile(tmp_path / "plain/model.gguf"), GgufFile(tmp_path / "codes/model.gguf")
    coded = [name for name, spec in codes.specs.items() if spec.dtype == quant]
    assert {name.split(".")[2] for name in coded} >= {"attn_q", "attn_output", "ffn_down_exps"}
    for name in coded:
        assert np.array_equal(codes.read(name), gguf.quants.quantize(plain.read(name), kind)), name


@pytest.mark.parametrize("quant", ["IQ2_XS", "iq3_m"])
def test_types_of_llama_cpps_own_quantizer_name_its_command(quant: str) -> None:
    with pytest.raises(UsageError, match=f"run llama-quantize model.gguf out.gguf {quant.upper()}"):
        bridge.plan(str(LLAMA), target="gguf", quant=quant)


def test_a_plan_refuses_a_tokenizer_that_llama_cpp_has_not(tmp_path: Path) -> None:
    tokenizer = save("qwen2", tmp_path / "qwen2") / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    content["pre_tokenizer"] = {"type": "Whitespace"}
    tokenizer.write_text(json.dumps(content))
    with pytest.raises(PlanError, match=r"cuts text into words in a way that has no name here.*\(Whitespace\)"):
        bridge.plan(str(tokenizer.parent), target="gguf")


def test_keys_of_latent_attention_and_experts_are_those_of_llama_cpps_converter(tmp_path: Path) -> None:
    """What convert_hf_to_gguf.py of b11549 writes of this config (conversion/base.py, conversion/deepseek.py)."""
    bridge.convert(str(save("deepseek2", tmp_path / "model")), target="gguf", out=tmp_path / "out")
    theirs = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    want = {
        "block_count": 3, "attention.head_count": 6, "attention.head_count_kv": 1, "attention.q_lora_rank": 96,
        "attention.kv_lora_rank": 160, "attention.key_length": 192, "attention.value_length": 160,
        "attention.key_length_mla": 96, "attention.value_length_mla": 128, "rope.dimension_count": 32,
        "leading_dense_block_count": 1, "expert_count": 12, "expert_used_count": 5, "expert_shared_count": 2,
        "expert_group_count": 4, "expert_group_used_count": 2, "expert_gating_func": 2, "expert_weights_norm": True,
        "expert_weights_scale": 1.5, "expert_feed_forward_length": 64, "feed_forward_length": 320,
        "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_log_multiplier": pytest.approx(0.1),
    }  # fmt: skip
    assert {key: theirs[f"deepseek2.{key}"].contents() for key in want} == want


def test_latent_keys_and_values_stay_unquantized(tmp_path: Path) -> None:
    plan = bridge.plan(str(save("deepseek2", tmp_path / "model")), target="gguf", quant="q8_0")
    kept = {step.outputs[0].spec.name: step.kept for step in plan.steps if not step.format}
    latent = {name.split(".")[2] for name, why in kept.items() if why.startswith("latent keys")}
    assert latent == {"attn_k_b", "attn_v_b"}
    assert {step.outputs[0].spec.name.split(".")[2] for step in plan.quantized} >= {"attn_q_b", "ffn_gate_exps"}


def test_rounded_scales_are_told() -> None:
    plan = bridge.plan(str(LLAMA), target="gguf", quant="int4_wo")
    assert any("repeat its scale, rounded to float16" in note for note in plan.notes)
    assert not any("rounded" in note for note in bridge.plan(str(LLAMA), target="gguf", quant=MXFP4).notes)


_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
CONTRADICTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": ("qwen3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "shares": ("qwen3moe", {"norm_topk_prob": False}, "norm_topk_prob is false"),
    "dense layers": ("qwen3moe", {"mlp_only_layers": [1]}, "some layers have no experts"),
    "attention's divisor": ("gemma3", {"query_pre_attn_scalar": 48}, "query_pre_attn_scalar is 48"),
    "pattern": ("gemma2", {"layer_types": ["full_attention"] * 7}, "layer_types is not llama.cpp's pattern"),
    "scaling": (
        "qwen2", {"rope_parameters": _YARN}, "rope_type 'yarn'",
    ),
    "yarn": (
        "deepseek2",
        {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
        "mscale is 1.0 and mscale_all_dim 0.7; llama.cpp takes one for both",
    ),
    "half of yarn": (
        "deepseek2",
        {"rope_parameters": _YARN},
        "mscale is None and mscale_all_dim None",
    ),
    "betas": (
        "deepseek2",
        {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_slow": 2.0}},
        "beta_slow is 2.0; llama.cpp turns as with 1",
    ),
    "pairs": ("deepseek2", {"rope_interleave": False}, "rope_interleave is false"),
    "biases": ("deepseek2", {"attention_bias": True}, "llama.cpp's deepseek2 has no biases"),
    "a Lite model": ("deepseek2", {"num_hidden_layers": 26}, "takes a deepseek2 of 26 or 27 layers"),
    "heads": ("nemotron", {"head_dim": 64}, "heads \\* head_dim is not hidden"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(CONTRADICTIONS))
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changed, words = CONTRADICTIONS[what]
    name, config = FAMILIES[family]
    monkeypatch.setitem(FAMILIES, family, (name, config | changed))
    root = save(family, tmp_path / family)
    with pytest.raises(PlanError, match=words) as told:
        bridge.plan(str(root), target="gguf")
    said = next(line for line in str(told.value).splitlines() if re.search(words, line))
    assert re.search("take target hf or trt$|--config '", said)  # what to do


@pytest.mark.parametrize("activation", ["gelu_fast", "gelu_accurate"])
def test_other_names_of_gelu_with_tanh_are_taken(activation: str, tmp_path: Path) -> None:
    root = save("gpt2", tmp_path / "gpt2")
    bridge.convert(root, "gguf", out=tmp_path / "plain", verify=False)
    content = json.loads((root / "config.json").read_text()) | {"activation_function": activation}
    (root / "config.json").write_text(json.dumps(content))
    bridge.convert(root, "gguf", out=tmp_path / "named", verify=False)
    assert (tmp_path / "plain/model.gguf").read_bytes() == (tmp_path / "named/model.gguf").read_bytes()


def test_what_a_refused_scaling_says_to_give_is_taken_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, config = FAMILIES["qwen2"]
    scaled = {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    monkeypatch.setitem(FAMILIES, "qwen2", (name, config | {"rope_parameters": None, **scaled}))
    root = save("qwen2", tmp_path / "qwen2")
    own = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps({**own, "rope_parameters": None, **scaled}))
    with pytest.raises(PlanError) as told:
        bridge.plan(str(root), target="gguf")
    given = str(told.value).partition("--config '")[2].partition("'")[0]
    assert json.loads(given)["rope_parameters"]["rope_theta"] == 5e5
    assert bridge.plan(str(root), target="gguf", config=given).target == "gguf"


@pytest.mark.parametrize(
    ("family", "words"),
    [("gemma", "leaves out NVFP4's scale"), ("llama", "NVFP4 weights and biases"), ("mixtral", "scale per expert")],
)
def test_nvfp4_is_refused_where_llama_cpp_misreads_it(family: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=words):
        bridge.plan(str(save(family, tmp_path / family)), target="gguf", quant="nvfp4_wo")
