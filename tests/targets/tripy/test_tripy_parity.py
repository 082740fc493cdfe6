"""Target `tripy` against ModelOpt's fake-quantized model, and quantized sources into it: codes, scales and names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import bridge
from bridge.core.errors import SourceError
from bridge.sources.live_models.checkpoint_names import live_names
from tests.covering import grid
from tests.models.export_families import tokens
from tests.models.stored_checkpoints import exported, gpt2, llama, modelopt
from tests.oracles import compressed_oracle
from tests.oracles import export_oracle as oracle
from tests.oracles import tripy_oracle as tripy
from tests.oracles.modelopt_oracle import Answer

SCHEMES = ("fp8", "int8", "int8_sq", "int8_wo", "int4_wo", "int4_awq")
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# `gpt-neox` and `opt` have no table; `phi3` holds q, k, v and gate, up in one matrix each
CHECKED = (
    "gpt2", "llama", "llama-tied", "llama-biased", "mistral", "qwen2", "qwen3", "gemma", "phi3", "mixtral", "bert",
    "gpt-neox", "opt",
)  # fmt: skip


def different(family: str, scheme: str, dtypes: tuple[str, str], root: Path) -> tuple[list[str], int]:
    """What of one conversion is not ModelOpt's, and how many modules were compared. dtypes: of source and module."""
    # of the pre-scales of int8 ModelOpt keeps the rounding to the model's dtype only
    source = "fp32" if scheme == "int8" else dtypes[0]
    directory = oracle.source(family, source)
    answer = oracle.calibrated(directory, scheme, None, tokens())
    out = root / f"{scheme}-{'-'.join(dtypes)}"
    quant = oracle.scheme_of(scheme, None)
    report = bridge.convert(directory, "tripy", quant, out, calib=answer.calibration, dtype=dtypes[1])
    assert report.passed and not report.findings, report.findings
    return compared(out, answer, oracle.load(directory), DTYPES[dtypes[1]])


def compared(out: Path, answer: Answer, model: Any, dtype: str) -> tuple[list[str], int]:
    """The same for a written directory.  model: the one that ModelOpt's was made of."""
    tensors, section = tripy.read(out)
    found = [f"{name}: {t.dtype}" for name, t in tensors.items() if t.dtype != tripy.TORCH[dtype]]
    for module, entry in section["modules"].items():
        mine, other = tripy.ours(tensors, module, entry), tripy.theirs(answer, model, f"{module}.weight")
        unequal = tripy.others(mine, other)
        found += [f"{module}: {unequal} of {mine.codes.numel()} codes differ"] if unequal else []
        for part in ("scale", "input_scale", "pre_quant_scale"):
            a, b = getattr(mine, part), getattr(other, part)
            if (a is None) != (b is None) or (a is not None and not torch.equal(a, b.to(tripy.TORCH[dtype]).float())):
                found.append(f"{module}: another {part}")
    if "experts" not in "".join(tensors):  # stacked in the model, apart in a checkpoint
        saved = {origin.ref.live: name for name, origin in live_names(model).items() if origin.ref}
        state = {saved.get(n, n): t for n, t in answer.model.state_dict().items() if "quantizer" not in n}
        shapes = [{name: tuple(t.shape) for name, t in of.items()} for of in (tripy.plain(tensors, section), state)]
        found += [f"{name}: other names or shapes" for name, _ in shapes[0].items() ^ shapes[1].items()]
    return found, len(section["modules"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "scheme", "dtypes"),
    [
        ("gpt2", "int4_awq", ("bf16", "fp16")),
        ("llama", "fp8", ("fp32", "fp32")),
        ("llama-tied", "int8_sq", ("fp16", "fp16")),
        ("phi3", "int4_wo", ("bf16", "bf16")),
        ("mixtral", "fp8", ("bf16", "fp16")),
        ("bert", "int8", ("fp32", "fp16")),
        ("opt", "int8_wo", ("fp16", "bf16")),
    ],
)
def test_codes_scales_and_names_are_those_of_modelopts_fake_quantized_model(
    family: str, scheme: str, dtypes: tuple[str, str], tmp_path: Path
) -> None:
    found, modules = different(family, scheme, dtypes, tmp_path)
    assert found == [] and modules >= 8


PAIRS = [(source, to) for source in DTYPES for to in DTYPES]


def turned(family: str, scheme: str) -> tuple[str, str]:
    """The dtypes of a row: every pair meets several families and schemes."""
    return PAIRS[(2 * SCHEMES.index(scheme) + CHECKED.index(family)) % 9]


@grid({"family": CHECKED, "scheme": SCHEMES}, shows=lambda family, scheme: {turned(family, scheme)})
def test_every_scheme_of_every_family_is_modelopts(family: str, scheme: str, tmp_path: Path) -> None:
    found, modules = different(family, scheme, turned(family, scheme), tmp_path)
    assert found == [] and modules


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8", "int4_awq"])
def test_one_call_calibrates_converts_and_proves(scheme: str, tmp_path: Path) -> None:
    directory = oracle.source("qwen3", "fp32")
    batches = [*tokens(), tokens()[0]]  # the last is held out
    report = bridge.convert(directory, "tripy", scheme, tmp_path / "out", calib=batches)
    assert report.passed and [row.reference for row in report.parity.outputs] == ["source", "modelopt"]
    answer = oracle.calibrated(directory, scheme, None, tokens())
    assert compared(tmp_path / "out", answer, oracle.load(directory), "float32") == ([], 14)
    assert bridge.verify(tmp_path / "out", directory).passed


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_an_unquantized_model_is_its_state_dict_with_tied_tensors_twice(family: str, tmp_path: Path) -> None:
    directory = oracle.source(family, "fp32")
    tensors, section = tripy.convert(directory, None, tmp_path / "out")
    state = oracle.load(directory).state_dict()
    assert tensors.keys() == state.keys()
    for name, tensor in tensors.items():
        conv1d = family == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        assert torch.equal(tensor, state[name].T if conv1d else state[name]), name
    assert not section["snapped"] and not section["modules"]
    assert section["copies"] == ({"lm_head.weight": "transformer.wte.weight"} if family == "gpt2" else {})
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not said.get("tie_word_embeddings") or family != "gpt2"


# Quantized sources


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [("fp8", "fp16"), ("int8_sq", "bf16"), ("int8_wo", "fp16"), ("int4_wo", "bf16"), ("int4_awq", "fp32")],
)
def test_a_unified_checkpoint_keeps_its_codes(family: str, scheme: str, dtype: str, tmp_path: Path) -> None:
    model = (llama if family == "llama" else gpt2)(torch.float32)
    source = exported(modelopt(model, scheme), tmp_path / "source")
    tensors, section = tripy.convert(source, None, tmp_path / "out", dtype=dtype)
    stored = load_file(source / "model.safetensors")
    assert len(section["modules"]) == (14 if family == "llama" else 8)
    for module, entry in section["modules"].items():
        codes, scale = (stored[f"{module}.{part}"] for part in ("weight", "weight_scale"))
        if entry["quant_dtype"] == "int4":
            codes, scale = signed(torch.stack([codes & 15, codes >> 4], 1).flatten(0, 1), 4), scale.T  # two of `out`
        mine = tripy.ours(tensors, module, entry)
        assert torch.equal(mine.codes, codes.float())
        beside = {"weight_scale": scale}
        beside |= {part: stored[name] for part in tripy.COMPANIONS[1:] if (name := f"{module}.{part}") in stored}
        for part, expected in beside.items():
            found = tensors[f"{module}.{part}"]
            assert torch.equal(found, expected.reshape(found.shape).to(oracle.DTYPES[dtype])), part
        assert all(entry[part] == (part in beside) for part in tripy.COMPANIONS[1:])


def signed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Two's complement of `bits`."""
    half = 1 << bits - 1
    return (codes.to(torch.int32) + half) % (2 * half) - half


@pytest.mark.slow
def test_scales_that_float16_does_not_resolve_are_an_error(tmp_path: Path) -> None:
    source = exported(modelopt(llama(torch.float32), "int8_wo"), tmp_path / "source")
    stored = load_file(source / "model.safetensors")
    stored["model.layers.0.mlp.up_proj.weight_scale"][7] = 3e-7
    save_file(stored, source / "model.safetensors")
    words = r"up_proj\.weight_scale: has scales, the least 3e-07, that float16 does not resolve; choose another dtype"
    with pytest.raises(SourceError, match=words):
        bridge.convert(source, "tripy", None, tmp_path / "out", dtype="fp16")
    tripy.convert(source, None, tmp_path / "out", dtype="bf16")


@pytest.mark.parametrize("preset", ["FP8", "W8A16", "W4A16"])
def test_compressed_tensors_keep_their_codes(preset: str, tmp_path: Path) -> None:
    source = compressed_oracle.compress(llama(), preset, tmp_path / "source", channels=preset == "W8A16")
    tensors, section = tripy.convert(source, None, tmp_path / "out")
    stored, module = load_file(source / "model.safetensors"), "model.layers.1.mlp.down_proj"
    mine = tripy.ours(tensors, module, section["modules"][module])
    if preset == "FP8":
        codes = stored[f"{module}.weight"].float()
    else:
        bits = int(preset[1])
        packed = stored[f"{module}.weight_packed"]
        codes = torch.stack([packed >> at & (1 << bits) - 1 for at in range(0, 32, bits)], -1).flatten(1)  # out, in
        codes = codes.float() - (1 << bits - 1)
    assert torch.equal(mine.codes, codes)


@pytest.mark.slow
def test_none_and_a_scheme_start_from_the_values_that_the_codes_stand_for(tmp_path: Path) -> None:
    source = exported(modelopt(llama(torch.float32), "int8_wo"), tmp_path / "source")
    kept, _ = tripy.convert(source, None, tmp_path / "kept")
    values, section = tripy.convert(source, "none", tmp_path / "none")
    assert not section["modules"] and values.keys() == tripy.plain(kept, {"modules": {}}).keys()
    assert all(torch.equal(values[name], kept[name]) for name in values)
    again, section = tripy.convert(source, "int4_wo", tmp_path / "again")
    down = "model.layers.1.mlp.down_proj"
    mine, weight = tripy.ours(again, down, section["modules"][down]), values[f"{down}.weight"]
    factor = torch.tensor(7.0) / weight.reshape(256, 5, 128).abs().amax(-1)
    assert torch.equal(mine.codes, (weight * factor.repeat_interleave(128, 1)).round())
