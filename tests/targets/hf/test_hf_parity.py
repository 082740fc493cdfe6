"""Target `hf` against ModelOpt's own export: every file of a directory, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import bridge
from bridge.core.errors import CalibrationError
from bridge.core.formats.safetensors import SafetensorsFile
from tests import once
from tests.covering import grid, usual
from tests.models.export_families import ALIKE, FAMILIES, build, tokens
from tests.oracles import export_oracle as oracle

SCHEMES = (
    "fp8", "fp8_pc_pt", "fp8_block", "int8", "int8_plain", "int8_sq", "int8_wo", "int4_wo", "int4_awq", "w4a8_awq",
    "nvfp4_wo", "nvfp4_input_scale1", "mxfp8", "w4a8_nvfp4_fp8",
)  # fmt: skip
# ModelOpt searches their scales for seconds: by 39 candidates, 126, or two.
SEARCHED = ("int4_mse", "nvfp4_mse", "nvfp4_wo_mse", "nvfp4_four_over_six")
# Codes and scales that calibration chooses.
CHOSEN = (("int4_gptq", "fp8"), ("nvfp4_local_hessian", None), ("nvfp4_gptq", "fp8"))
# (dtype of the source, dtype of the export)
DTYPES = (("bf16", "bf16"), ("fp16", "bf16"), ("fp32", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"))
CLIPPED = ("int4_awq_clip", "int4_awq_full")
KV = (None, "fp8")
SHARDS = ("10GB", "10GB", "300KB")
EXCEPTIONS = oracle.exceptions("hf")
# Exceptions that need a model made for them; each has a test of its own below.
MADE = {"all-zero", "scale-rounds-to-zero", "one-tile", "kept-conv1d", "untied-head", "cast-cache"}


class Case:
    """One family, and where its conversions go."""

    def __init__(self, family: str, root: Path) -> None:
        self.family, self.root = family, root

    def unexplained(self, scheme: str, kv: str | None, dtypes: tuple[str, str], shards: str) -> list[str]:
        """What of one conversion is neither equal to ModelOpt's nor a named exception."""
        source, export = dtypes
        if scheme == "int8":  # of its pre-scales ModelOpt keeps the rounding to the model's dtype only
            source = "fp32"
        if source != export:  # its files are divided before they are rounded here
            shards = "10GB"
        directory = oracle.source(self.family, source)
        answer = oracle.calibrated(directory, scheme, kv, tokens())
        work, entries = self.root / f"{scheme}-{kv}-{source}-{export}", allowed(self.family, scheme)
        if kv and any(entry["theirs"] == "drops" for entry in entries):
            with pytest.raises(CalibrationError, match="KV amax"):
                oracle.convert(directory, scheme, kv, answer, work / "ours", export, shards)
            return []
        entries = [entry for entry in entries if entry["theirs"] != "drops"]
        if any(entry.get("resized") for entry in entries):  # tensors of other sizes are divided otherwise
            shards = "10GB"
        # parameters are counted in the index, which one file alone does not have
        entries = [entry for entry in entries if entry["only"] != ["total_parameters"] or shards != "10GB"]
        ours = oracle.convert(directory, scheme, kv, answer, work / "ours", export, shards)
        try:
            theirs = oracle.export(answer, work / "theirs", oracle.DTYPES[export], shards)
        except oracle.TheirsRaises as error:
            return oracle.unexplained([str(error)], [entry for entry in entries if entry["theirs"] == "raises"])
        if source != export:
            oracle.recast(theirs, oracle.DTYPES[source], oracle.DTYPES[export])
        renamed = [pair for entry in entries for pair in entry.get("renamed", ())]
        return oracle.unexplained(oracle.differences(ours, theirs, renamed), entries)


def allowed(family: str, scheme: str) -> list[dict[str, Any]]:
    """The exceptions for a family and a scheme."""
    entries = [entry for name, entry in EXCEPTIONS.items() if name not in MADE and family in entry["families"]]
    return [entry for entry in entries if not entry["schemes"] or scheme in entry["schemes"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "scheme", "kv", "dtypes", "shards"),
    [
        ("llama", "fp8", "fp8", ("bf16", "bf16"), "300KB"),
        ("llama", "int8_sq", None, ("fp16", "bf16"), "10GB"),
        ("llama", "int4_awq", "fp8", ("bf16", "bf16"), "10GB"),
        ("llama", "w4a8_awq", None, ("fp32", "bf16"), "10GB"),
        ("llama", "fp8_block", None, ("fp16", "fp16"), "10GB"),
        ("llama", "mxfp8", None, ("bf16", "bf16"), "10GB"),
        ("llama", "nvfp4_input_scale1", None, ("fp32", "bf16"), "10GB"),
        ("llama", "nvfp4_act_headroom", None, ("bf16", "bf16"), "10GB"),
        ("llama", "w4a8_nvfp4_fp8", "fp8", ("fp32", "bf16"), "10GB"),
        ("llama-tied", "nvfp4_wo", "fp8", ("bf16", "bf16"), "300KB"),
        ("gemma3", "int4_awq", None, ("fp32", "fp32"), "10GB"),
        ("gpt2", "fp8_pc_pt", "fp8", ("fp16", "bf16"), "10GB"),
        ("phi3", "int4_wo", None, ("bf16", "bf16"), "10GB"),
        ("qwen3-moe", "fp8", None, ("bf16", "bf16"), "300KB"),
        ("qwen3-moe", "nvfp4_wo", None, ("fp32", "bf16"), "10GB"),
        ("mixtral", "int8_plain", None, ("bf16", "bf16"), "10GB"),
    ],
)
def test_every_file_equals_modelopts_export(
    family: str, scheme: str, kv: str | None, dtypes: tuple[str, str], shards: str, tmp_path: Path
) -> None:
    assert Case(family, tmp_path).unexplained(scheme, kv, dtypes, shards) == []


def turned(family: str, scheme: str) -> tuple[str | None, tuple[str, str], str]:
    """KV, dtypes and shards of a row: every scheme meets all of them in several families."""
    turn = list(FAMILIES).index(family) + SCHEMES.index(scheme)
    return KV[turn % 2], DTYPES[turn % 5], SHARDS[turn % 3]


def shown(family: str, scheme: str) -> set[object]:
    """What a row shows besides its family and scheme: its KV and dtypes, and exceptions with what they depend on."""
    kv, dtypes, shards = turned(family, scheme)
    found: set[object] = {(scheme, kv), dtypes}
    for entry in allowed(family, scheme):
        of_shards = entry.get("only") == ["total_parameters"]
        found.add((entry["reason"], kv if entry["theirs"] == "drops" else shards if of_shards else None))
    return found


@grid(
    {"family": list(FAMILIES), "scheme": SCHEMES},
    first=[("gemma", "w4a8_awq")],  # a norm of 1 + w in 16 bits, with a pre-scale folded in: three roundings
    shows=shown,
    later=lambda family, _: family in ALIKE,
)
def test_every_scheme_of_every_family_equals_modelopts_export(family: str, scheme: str, tmp_path: Path) -> None:
    assert Case(family, tmp_path).unexplained(scheme, *turned(family, scheme)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "scheme", "dtypes"),
    [
        ("llama", "int4_mse", ("bf16", "bf16")),
        pytest.param("gemma", "nvfp4_wo_mse", ("fp32", "bf16"), marks=pytest.mark.product),
        ("llama-tied", "nvfp4_mse", ("fp16", "bf16")),
        ("qwen3-moe", "nvfp4_four_over_six", ("bf16", "bf16")),
        *(
            pytest.param(family, scheme, ("bf16", "bf16"), marks=pytest.mark.product)
            for family in FAMILIES
            for scheme in SEARCHED
        ),
    ],
)
def test_searched_scales_equal_modelopts_export(
    family: str, scheme: str, dtypes: tuple[str, str], tmp_path: Path
) -> None:
    assert Case(family, tmp_path).unexplained(scheme, None, dtypes, "10GB") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "scheme", "dtypes"),
    [
        ("llama", "int4_awq_clip", ("bf16", "bf16")),
        pytest.param("gpt2", "int4_awq_full", ("fp32", "bf16"), marks=pytest.mark.product),
        ("llama", "int4_awq_full", ("fp16", "fp16")),
        *(
            pytest.param(family, "int4_awq_clip", ("fp16", "bf16"), marks=pytest.mark.product)
            for family in ("gemma", "gpt2", "phi3", "bert")
        ),
    ],
)
def test_clipped_scales_equal_modelopts_export(
    family: str, scheme: str, dtypes: tuple[str, str], tmp_path: Path
) -> None:
    assert Case(family, tmp_path).unexplained(scheme, None, dtypes, "10GB") == []


PARTS = [
    ("llama", "nvfp4_mlp_only"), ("qwen3-moe", "nvfp4_mlp_only"), ("mixtral", "nvfp4_mlp_only"),
    ("qwen3-moe", "nvfp4_experts_only"), ("mixtral", "nvfp4_experts_only"), ("deepseek-v3", "nvfp4_experts_only"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "scheme"), PARTS)
def test_schemes_of_a_part_of_the_model_equal_modelopts_export(family: str, scheme: str, tmp_path: Path) -> None:
    assert Case(family, tmp_path).unexplained(scheme, None, ("bf16", "bf16"), "10GB") == []


@grid({"scheme": SCHEMES, "dtypes": DTYPES, "kv": KV})
def test_all_dtypes_and_kv_of_llama_equal_modelopts_export(
    scheme: str, dtypes: tuple[str, str], kv: str | None, tmp_path: Path
) -> None:
    assert Case("llama", tmp_path).unexplained(scheme, kv, dtypes, "10GB") == []


def small() -> Path:
    """Narrow, since choosing codes takes seconds a matrix."""
    config = transformers.Qwen3Config(
        vocab_size=330, hidden_size=128, intermediate_size=384, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    return once.directory("source-small-qwen3", lambda part: oracle.save(model, part))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "kv"),
    usual(
        [("fp8", "fp8"), ("nvfp4_awq", None), ("int4_gptq", "fp8"), ("nvfp4_local_hessian", None)],
        [("fp8", "fp8"), ("int8", "fp8"), ("w4a8_awq", None), ("nvfp4_awq", None), *CHOSEN],
    ),
)
def test_calibrating_and_converting_in_one_call_equals_modelopts_export(
    scheme: str, kv: str | None, tmp_path: Path
) -> None:
    directory = small()
    batches = [*tokens(), tokens()[0]]  # the last is held out
    bridge.convert(directory, "hf", scheme, tmp_path / "ours", calib=batches, kv=kv, verify=False, own_scales=True)
    answer = oracle.calibrated(directory, scheme, kv, tokens())
    theirs = oracle.export(answer, tmp_path / "theirs", torch.bfloat16)
    assert oracle.differences(tmp_path / "ours", theirs) == []


NVFP4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_mixed_precision_equals_modelopts_export(family: str, tmp_path: Path) -> None:
    directory = oracle.source(family, "bf16")
    changes: dict[str, dict[str, Any]] = {
        "*mlp*weight_quantizer*": {"cfg": NVFP4},
        "*mlp*input_quantizer": {"enable": False},
        "*layers.1.self_attn*": {"enable": False},
    }
    if family == "qwen3-moe":
        changes["*mlp.gate.*"] = {"enable": False}
    answer = oracle.calibrated(directory, "fp8", None, tokens(), changes)
    recipe = tmp_path / "mixed.toml"
    rules = [("*.mlp.*_proj", "nvfp4_wo"), ("*.layers.1.self_attn.*", "none")]
    text = "".join(f'[[rule]]\nmodules = ["{glob}"]\nquant = "{quant}"\n' for glob, quant in rules)
    recipe.write_text(f'base = "fp8"\n{text}')
    bridge.convert(directory, "hf", recipe, tmp_path / "ours", calib=answer.calibration, verify=False, own_scales=True)
    theirs = oracle.export(answer, tmp_path / "theirs", torch.bfloat16)
    assert oracle.differences(tmp_path / "ours", theirs) == []


@pytest.mark.slow
@pytest.mark.parametrize(("wide", "shared"), [(16, {"q", "k", "v", "gate", "up"}), (32, set())])
def test_tiles_that_cover_every_weight_of_a_group_share_a_scale(wide: int, shared: set[str], tmp_path: Path) -> None:
    """With heads of 32 q has two tiles, k and v one each, gate and up three: nothing is shared."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=330, hidden_size=128, intermediate_size=8 * wide, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=2, head_dim=wide,
    )  # fmt: skip
    directory = oracle.save(transformers.LlamaForCausalLM(config).to(torch.bfloat16), tmp_path / "source")
    plan = bridge.plan(directory, "hf", "fp8_block")
    found = {s.site.module.rpartition(".")[2].split("_")[0] for s in plan.quantized if s.shares and s.site}
    assert found == shared
    answer = oracle.calibrated(directory, "fp8_block", None, tokens())
    ours = oracle.convert(directory, "fp8_block", None, answer, tmp_path / "ours", None)
    theirs = oracle.export(answer, tmp_path / "theirs", torch.bfloat16)
    lines = oracle.differences(ours, theirs)
    assert [line for line in lines if not line.endswith("(1, 1, 1, 1), theirs torch.float32 ()")] == []
    mine, other = (SafetensorsFile(path / "model.safetensors") for path in (ours, theirs))
    names = [name for name, spec in mine.specs.items() if spec.shape == (1, 1, 1, 1)]
    assert len(names) == len(lines) > 0, EXCEPTIONS["one-tile"]["reason"]
    assert all(mine.read(name).tobytes() == other.read(name).tobytes() for name in names)


@grid(
    {
        "dtype": ["fp16", "bf16"],
        "factor": [2e-4, 1e-37, 2.0**-130],
        "scheme": ["fp8", "fp8_pc_pt", "int4_wo", "nvfp4_wo"],
    },
    valid=lambda dtype, factor, _: (dtype == "fp16") == (factor == 2e-4),
)
def test_weights_near_the_smallest_numbers_equal_modelopts_export(
    scheme: str, dtype: str, factor: float, tmp_path: Path
) -> None:
    model = build("llama", oracle.DTYPES[dtype])
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(factor)
        model.model.layers[0].self_attn.q_proj.weight[3].mul_(factor)
    directory = oracle.save(model, tmp_path / "source")
    answer = oracle.calibrated(directory, scheme, None, tokens())
    ours = oracle.convert(directory, scheme, None, answer, tmp_path / "ours", None)
    theirs = oracle.export(answer, tmp_path / "theirs", oracle.DTYPES[dtype])
    assert oracle.differences(ours, theirs) == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8", "nvfp4_wo"])
def test_a_cast_cache_has_the_scales_of_one_that_modelopt_leaves_out(scheme: str, tmp_path: Path) -> None:
    directory = oracle.source("llama", "bf16")
    for cache in ("fp8_cast", "fp8_448"):
        answer = oracle.calibrated(directory, scheme, cache, tokens())
        assert not answer.calibration.k_amax or cache == "fp8_448"
        ours = oracle.convert(directory, scheme, "fp8_cast", answer, tmp_path / cache, None)
        theirs = oracle.export(answer, tmp_path / f"theirs-{cache}", torch.bfloat16)
        allowed = [EXCEPTIONS["cast-cache"]] if cache == "fp8_cast" else []
        assert oracle.unexplained(oracle.differences(ours, theirs), allowed) == []
