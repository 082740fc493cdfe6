"""K-quants: gguf-py reads what we read, llama.cpp computes it, and the plan says where they do not fit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

import bridge
from bridge.core.dtypes import DTYPES, from_float32, to_float32
from bridge.core.errors import PlanError, SchemeError, SourceError
from bridge.core.formats.gguf import GgufFile
from bridge.core.values import Encoding, Numeric
from bridge.planning.contract_files import load_runtime
from bridge.planning.contracts import verdict
from bridge.quant.codec import ggml_library
from bridge.quant.codec.blocks import grid
from bridge.quant.codec.decode import decode
from bridge.quant.codec.encode import Encoder, encode
from bridge.quant.schemes.load import load_scheme
from bridge.targets.manifest import load_manifest
from bridge.verification.weight_error import Comparer, ErrorSums, StoredCodes
from tests.models.gguf_families import save
from tests.oracles.llama_cpp import divergence

SCHEMES = ["q4_k", "q5_k", "q6_k"]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
# Sums of llama.cpp in another order round a value to its neighbour now and then; see test_llama_cpp.py.
ROUNDED = 2.5e-4


def _weights() -> np.ndarray:
    weights = np.random.default_rng(0).standard_normal((19, 512)).astype(np.float32)
    weights[3, :256] = 0
    weights[4] *= 1e-6
    weights[5] = 7
    weights[6, ::2] = -1e4
    return weights


def _compared(bits: np.ndarray, dtype: str, codes: np.ndarray, scheme: str) -> ErrorSums:
    numeric, coding = load_scheme(scheme).weight, Encoding(packed=scheme)
    blocks = grid(numeric[0], bits.shape, "out_in")
    stored = StoredCodes(numeric, blocks, scheme, coding, None)
    return Comparer(stored, dtype).rows(bits, codes, np.empty(0, np.uint8))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("wide") / "llama", **WIDE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gguf_py_reads_the_values_that_we_read(scheme: str, dtype: str) -> None:
    numeric, coding = load_scheme(scheme).weight, Encoding(packed=scheme)
    bits = from_float32(_weights(), dtype)
    arrays = encode(bits, dtype, numeric, coding=coding)
    theirs = gguf.quants.dequantize(arrays["codes"], gguf.GGMLQuantizationType[scheme.upper()])
    ours = decode(dict(arrays), numeric, bits.shape, coding=coding)
    assert np.array_equal(ours, theirs)
    assert np.array_equal(decode(dict(arrays), numeric, bits.shape, coding=coding, rows=(5, 9)), theirs[5:9])
    sums = _compared(bits, dtype, arrays["codes"], scheme)
    source, read = to_float32(bits, dtype).astype(np.float64), theirs.astype(np.float64)
    assert sums.error == pytest.approx(np.square(source - read).sum())
    assert sums.cosine == pytest.approx((source * read).sum() / np.linalg.norm(source) / np.linalg.norm(read))
    assert sums.codes == source.size


@pytest.mark.parametrize("spread", ["gaussian", "student"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_gates_hold_what_the_quantizer_reaches_and_a_changed_scale_fails_them(scheme: str, spread: str) -> None:
    random, numeric, coding = np.random.default_rng(1), load_scheme(scheme).weight, Encoding(packed=scheme)
    weights = random.standard_normal((64, 512)) if spread == "gaussian" else random.standard_t(3, (64, 512))
    weights = weights.astype(np.float32)
    arrays, gate = encode(weights, "float32", numeric, coding=coding), load_scheme(scheme).parity.tensor
    sums = _compared(weights, "float32", arrays["codes"], scheme)
    assert sums.cosine >= gate.cosine >= 1 - 10 * (1 - sums.cosine) and gate.norm[0] <= sums.norm_ratio <= gate.norm[1]
    blocks = arrays["codes"].reshape(-1, DTYPES[scheme].size)
    at = 208 if scheme == "q6_k" else 0
    half = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)
    blocks[:, at : at + 2] = (half * np.float16(1.1)).view(np.uint8)
    changed = _compared(weights, "float32", arrays["codes"], scheme)
    assert not (changed.cosine >= gate.cosine and gate.norm[0] <= changed.norm_ratio <= gate.norm[1])


def test_pieces_of_rows_are_the_rows_of_the_whole() -> None:
    numeric, coding, weights = load_scheme("q4_k").weight, Encoding(packed="q4_k"), _weights()
    encoder = Encoder(numeric, "float32", weights.shape, coding=coding)
    pieces = [encoder.rows(weights[at : at + 5], at)["codes"].copy() for at in range(0, len(weights), 5)]
    assert np.array_equal(np.concatenate(pieces), encode(weights, "float32", numeric, coding=coding)["codes"])
    assert encoder.constants() == {}


def test_weights_that_are_not_finite_are_refused() -> None:
    weights = _weights()
    weights[7, 300] = np.nan
    with pytest.raises(SourceError, match="NaN in 1 block"):
        encode(weights, "float32", load_scheme("q6_k").weight, coding=Encoding(packed="q6_k"))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_llama_cpp_computes_the_written_weights(llama: Path, scheme: str, tmp_path: Path) -> None:
    report = bridge.convert(str(llama), target="gguf", quant=scheme, out=tmp_path / "out")
    assert report.passed and not report.findings
    assert {spec.dtype for spec in GgufFile(tmp_path / "out" / "model.gguf").specs.values()} == {"float32", scheme}
    assert divergence(llama, tmp_path / "out", tmp_path) <= ROUNDED


@pytest.mark.slow
def test_a_recipe_mixes_types_as_llama_quantize_does(llama: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mix.toml"
    rules = '[[rule]]\nroles = ["attn.v.weight", "mlp.down.weight", "head.weight"]\nquant = "q6_k"\noverride = true\n'
    recipe.write_text(f'base = "q4_k"\n{rules}')
    assert bridge.convert(str(llama), target="gguf", quant=recipe, out=tmp_path / "out", runtime="llama.cpp").passed
    plan = load_manifest(tmp_path / "out").plan
    found = {step.outputs[0].spec.name.split(".")[-2]: step.outputs[0].spec.dtype for step in plan.quantized}
    assert found["attn_v"] == found["ffn_down"] == found["output"] == "q6_k"
    assert found["attn_q"] == found["ffn_up"] == "q4_k"
    assert verdict(load_runtime("llama.cpp"), plan).how == "run"
    assert divergence(llama, tmp_path / "out", tmp_path) <= ROUNDED


def test_a_model_of_narrow_rows_alone_is_refused_with_a_scheme_of_smaller_blocks(tmp_path: Path) -> None:
    narrow = save("llama", tmp_path / "narrow")
    with pytest.raises(PlanError, match="in = 192 is no multiple of Q4_K's 256; use q4_0, whose blocks have 32"):
        bridge.plan(str(narrow), target="gguf", quant="q4_k")


@pytest.mark.parametrize("options", [{}, {"format": "compressed-tensors"}, {"format": "gptq"}], ids=str)
def test_other_targets_refuse_them_in_words(llama: Path, options: dict[str, str]) -> None:
    with pytest.raises(SchemeError, match="target hf cannot express scheme q6_k"):
        bridge.plan(str(llama), target="hf", quant="q6_k", **options)


def test_without_llama_cpp_a_plan_says_what_to_install(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml_library, "find_spec", lambda name: None)
    with pytest.raises(SchemeError, match=r"pip install .*\[gguf\]"):
        bridge.plan(str(llama), target="gguf", quant="q5_k")


def test_the_numeric_is_the_block_type() -> None:
    for scheme in SCHEMES:
        assert load_scheme(scheme).weight == (Numeric(scheme, "block", (DTYPES[scheme].block,)),)
