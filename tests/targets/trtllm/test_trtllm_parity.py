"""Target `trtllm` against ModelOpt's own export: every rank's file and config.json, byte for byte."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
import transformers as T
from safetensors.torch import load_file

import bridge
from bridge.quant.calibration import Calibration, Provenance
from tests import once
from tests.covering import grid
from tests.models.export_families import WIDE, tokens
from tests.oracles import export_oracle
from tests.oracles import trtllm_oracle as oracle
from tests.oracles.export_oracle import DTYPES as TORCH
from tests.oracles.export_oracle import TheirsRaises, calibrated, save, unexplained
from tests.oracles.modelopt_oracle import Answer
from tests.oracles.trtllm_oracle import EXCEPTIONS, assert_slices

FAMILIES = (
    "llama", "llama-tied", "llama-biased", "llama-rope", "mistral", "qwen2", "qwen3", "gpt2", "starcoder2", "nemotron",
    "gemma",
)  # fmt: skip
SCHEMES = (
    "fp8", "fp8_pc_pt", "fp8_block", "int8", "int8_plain", "int8_sq", "int8_wo", "int4_wo", "int4_awq", "w4a8_awq",
    "nvfp4_wo", "mxfp8",
)  # fmt: skip
UNCUT = ("fp8_block", "mxfp8")  # scales that ModelOpt cannot cut either
NARROW = ("int4_wo", "int4_awq", "w4a8_awq")  # groups of 128 that do not fit an `in` of 256 or 384 cut in two
# (dtype of the source, dtype of the checkpoint)
DTYPES = (("bf16", "bf16"), ("fp16", "bf16"), ("fp32", "bf16"), ("fp16", "fp16"), ("fp32", "fp16"))
KV = (None, "fp8", "int8")
SPLITS = ((2, 1), (4, 1), (1, 2), (2, 2))  # tp, pp


class Case:
    """One family, and where its conversions go."""

    def __init__(self, family: str, root: Path) -> None:
        self.family, self.root = family, root

    def source(self, dtype: str) -> Path:
        """Its checkpoint, written once a run; nothing may change it."""
        if self.family not in oracle.OWN:
            return export_oracle.source(self.family, dtype)
        made = functools.partial(oracle.build, self.family, TORCH[dtype])
        return once.directory(f"source-{self.family}-{dtype}", lambda part: save(made(), part))

    def unexplained(self, scheme: str, kv: str | None, dtypes: tuple[str, str], tp: int = 1, pp: int = 1) -> list[str]:
        """What of one conversion is neither equal to ModelOpt's nor a named exception."""
        source, dtype = dtypes
        # of int8's pre-scales ModelOpt keeps the rounding to the model's dtype only
        directory = self.source("fp32" if scheme == "int8" else source)
        answer = calibrated(directory, scheme, kv, tokens())
        work = self.root / f"{scheme}-{kv}-{source}-{dtype}-{tp}-{pp}"
        ours = oracle.convert(directory, scheme, kv, answer, work / "ours", dtype=dtype, tp=tp, pp=pp)
        entries = oracle.expected(self.family, scheme, tp, pp)
        try:
            theirs = oracle.export(answer, work / "theirs", dtype, tp, pp)
        except TheirsRaises as error:
            return unexplained([str(error)], [entry for entry in entries if entry["theirs"] == "raises"])
        return unexplained(oracle.compared(ours, theirs), entries)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "scheme", "kv", "dtypes", "tp", "pp"),
    [
        ("llama", "fp8", "fp8", ("bf16", "bf16"), 1, 1),
        ("llama-biased", "int8_sq", None, ("fp16", "bf16"), 1, 1),
        ("qwen2", "w4a8_awq", "int8", ("fp32", "fp16"), 1, 1),
        ("qwen3", "fp8_block", None, ("fp16", "fp16"), 1, 1),
        ("llama-tied", "mxfp8", None, ("bf16", "bf16"), 1, 1),
        ("gpt2", "int4_awq", None, ("bf16", "bf16"), 1, 1),
        ("starcoder2", "int8_wo", None, ("bf16", "bf16"), 1, 1),
        ("nemotron", "fp8_pc_pt", None, ("bf16", "bf16"), 1, 1),
        ("gemma", "nvfp4_wo", "fp8", ("fp32", "bf16"), 1, 1),
        pytest.param("llama-wide", "int4_awq", None, ("bf16", "bf16"), 4, 1, marks=pytest.mark.product),
        ("llama-wide", "int8_sq", "fp8", ("bf16", "bf16"), 2, 2),
        ("gpt2", "fp8", "fp8", ("fp16", "fp16"), 4, 1),
        ("gpt2", "int8_wo", None, ("bf16", "bf16"), 2, 1),
        ("gemma", "fp8", None, ("bf16", "bf16"), 2, 2),
    ],
)
def test_every_file_equals_modelopts_export(
    family: str, scheme: str, kv: str | None, dtypes: tuple[str, str], tp: int, pp: int, tmp_path: Path
) -> None:
    assert Case(family, tmp_path).unexplained(scheme, kv, dtypes, tp, pp) == []


# What stands for the exceptions in which ModelOpt raises: the same bytes where it does not.


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-wide", "starcoder2"])
@pytest.mark.parametrize("scheme", ["int8_sq", "fp8_pc_pt"])
def test_scales_of_repeated_heads_are_those_of_one_rank(family: str, scheme: str, tmp_path: Path) -> None:
    """Of one rank they are ModelOpt's own, see above."""
    directory = Case(family, tmp_path).source("bf16")
    config, answer = json.loads((directory / "config.json").read_text()), calibrated(directory, scheme, None, tokens())
    one, four = (oracle.convert(directory, scheme, None, answer, tmp_path / str(n), tp=n) for n in (1, 4))
    whole, parts = load_file(one / "rank0.safetensors"), [load_file(four / f"rank{n}.safetensors") for n in range(4)]
    for tensors in (whole, *parts):  # padding by the number of ranks, and positions that no rank cuts
        del tensors["transformer.vocab_embedding.weight"], tensors["lm_head.weight"]
    assert_slices(whole, parts, config["num_attention_heads"], config["num_key_value_heads"])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", NARROW)
def test_a_vocabulary_that_needs_no_padding_equals_modelopts_export(scheme: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    directory = save(T.GemmaForCausalLM(T.GemmaConfig(**WIDE | {"vocab_size": 320})).bfloat16(), tmp_path / "source")
    answer = calibrated(directory, scheme, None, tokens())
    ours = oracle.convert(directory, scheme, None, answer, tmp_path / "ours")
    lines = oracle.compared(ours, oracle.export(answer, tmp_path / "theirs", "bf16", 1, 1))
    assert unexplained(lines, [EXCEPTIONS["rotary-base"]]) == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", NARROW)
def test_a_vocabulary_is_padded_with_zeros_and_nothing_else_changes(scheme: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = T.GemmaForCausalLM(T.GemmaConfig(**WIDE | {"vocab_size": 320})).bfloat16()
    long = save(model, tmp_path / "long")
    answer = calibrated(long, scheme, None, [batch % 310 for batch in tokens()])
    model.resize_token_embeddings(310, mean_resizing=False)
    short = save(model, tmp_path / "short")
    found = [oracle.convert(path, scheme, None, answer, tmp_path / f"{path.name}-out") for path in (long, short)]
    whole, padded = (load_file(path / "rank0.safetensors") for path in found)
    table = "transformer.vocab_embedding.weight"
    whole[table][310:] = 0
    assert whole.keys() == padded.keys() and all(torch.equal(whole[name], padded[name]) for name in whole)
    assert json.loads((found[1] / "config.json").read_text())["vocab_size"] == 320


@pytest.mark.slow
def test_tiles_of_conv1d_are_those_of_the_unified_checkpoint(tmp_path: Path) -> None:
    """Which ModelOpt does write."""
    directory = Case("gpt2", tmp_path).source("bf16")
    bridge.convert(directory, "trtllm", "fp8_block", tmp_path / "ours", verify=False)
    answer = calibrated(directory, "fp8_block", None, tokens())
    theirs = export_oracle.export(answer, tmp_path / "theirs", torch.bfloat16)
    ours, unified = load_file(tmp_path / "ours/rank0.safetensors"), load_file(theirs / "model.safetensors")
    modules = {"attention.qkv": "attn.c_attn", "attention.dense": "attn.c_proj", "mlp.fc": "mlp.c_fc"}
    for mine, other in (modules | {"mlp.proj": "mlp.c_proj"}).items():
        for leaf, part in (("weight", "weight"), ("weights_scaling_factor", "weight_scale")):
            a, b = ours[f"transformer.layers.1.{mine}.{leaf}"], unified[f"transformer.h.1.{other}.{part}"]
            assert a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (mine, part)


def test_an_unquantized_checkpoint_equals_modelopts_export(tmp_path: Path) -> None:
    model = oracle.build("llama-tied", TORCH["bf16"])
    directory = save(model, tmp_path / "source")
    bridge.convert(directory, "trtllm", None, tmp_path / "ours", verify=False, tp=2)
    model.config.architectures = [type(model).__name__]
    asked = Answer(model, Calibration(Provenance("", "", "", "", "", "", 0, 0)), {})
    theirs = oracle.export(asked, tmp_path / "theirs", "bf16", 2, 1)
    assert oracle.compared(tmp_path / "ours", theirs) == ["config.json: rotary_base: 10000.0, theirs None"]


@pytest.mark.slow
def test_modules_that_a_recipe_keeps_are_excluded_under_the_names_of_the_layout(tmp_path: Path) -> None:
    case = Case("llama", tmp_path)
    directory = case.source("bf16")
    recipe = tmp_path / "part.toml"
    recipe.write_text('base = "fp8"\n\n[[rule]]\nroles = ["mlp.*"]\nlayers = [1]\nquant = "none"\n')
    answer = calibrated(directory, "fp8", None, tokens(), {"*layers.1.mlp*": {"enable": False}})
    ours = oracle.convert(directory, str(recipe), None, answer, tmp_path / "ours")
    theirs = oracle.export(answer, tmp_path / "theirs", "bf16", 1, 1)
    mine, other = (json.loads((path / "config.json").read_text())["quantization"] for path in (ours, theirs))
    # their order is that of a set of strings, another in every run
    assert mine["exclude_modules"] == sorted(other["exclude_modules"]) == ["lm_head", "transformer.layers.1.mlp*"]
    found = oracle.compared(ours, theirs)
    assert [line for line in found if not line.startswith("config.json: ")] == []


@pytest.mark.slow
def test_two_formats_in_one_model_are_told_layer_by_layer(tmp_path: Path) -> None:
    from modelopt.torch.export.quant_utils import process_layer_quant_config  # seconds to import

    case = Case("llama", tmp_path)
    recipe = tmp_path / "mixed.toml"
    recipe.write_text('base = "fp8_pc_pt"\n\n[[rule]]\nroles = ["mlp.*"]\nquant = "int4_wo"\n')
    bridge.convert(case.source("bf16"), "trtllm", str(recipe), tmp_path / "ours", verify=False)
    told = json.loads((tmp_path / "ours/quant_cfg.json").read_text())
    names = [f"transformer.layers.{n}.{m}" for n in range(2) for m in ("attention.qkv", "attention.dense")]
    mlp = [f"transformer.layers.{n}.mlp.{m}" for n in range(2) for m in ("fc", "gate", "proj")]
    said = dict.fromkeys([f"{name}.quantization" for name in names], "fp8_pc_pt")
    said |= dict.fromkeys([f"{name}.quantization" for name in mlp], "int4_awq")
    said |= dict.fromkeys([f"{name}.awq_block_size" for name in mlp], 128)
    assert told == process_layer_quant_config(said | {"lm_head.quantization": None})
    config = json.loads((tmp_path / "ours/config.json").read_text())
    assert config["quantization"] == {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}


def turned(family: str, scheme: str) -> tuple[str | None, tuple[str, str]]:
    """KV and dtypes of a row: every scheme meets all of them in several families."""
    turn = FAMILIES.index(family) + SCHEMES.index(scheme)
    return KV[turn % 3], DTYPES[turn % 5]


def shown(family: str, scheme: str) -> set[object]:
    """What a row shows besides its family and scheme."""
    kv, dtypes = turned(family, scheme)
    return {kv, dtypes, *(entry["reason"] for entry in oracle.expected(family, scheme, 1, 1))}


@grid({"family": FAMILIES, "scheme": SCHEMES}, shows=shown)
def test_every_scheme_of_every_family_equals_modelopts_export(family: str, scheme: str, tmp_path: Path) -> None:
    assert Case(family, tmp_path).unexplained(scheme, *turned(family, scheme)) == []


CUT = [*FAMILIES, "llama-wide"]


def is_cut(family: str, split: tuple[int, int], scheme: str) -> bool:
    """A third of the schemes each, another third for the next family and split; what ModelOpt can cut."""
    wide, (tp, _) = family == "llama-wide", split
    if (CUT.index(family) + SPLITS.index(split) + SCHEMES.index(scheme)) % 3 and not wide:
        return False
    return tp == 1 or not (scheme in UNCUT or (scheme in NARROW and not wide))


def shown_cut(family: str, split: tuple[int, int], scheme: str) -> set[object]:
    """Every family and every scheme is cut into ranks, and meets the exceptions of ranks."""
    tp, pp = split
    found: set[object] = {entry["reason"] for entry in oracle.expected(family, scheme, tp, pp)}
    return found | ({("ranks", family), ("ranks", scheme)} if tp > 1 else {("stages", scheme in UNCUT)})


@grid({"family": CUT, "split": SPLITS, "scheme": SCHEMES}, valid=is_cut, shows=shown_cut)
def test_every_rank_of_every_family_equals_modelopts_export(
    family: str, split: tuple[int, int], scheme: str, tmp_path: Path
) -> None:
    number = SCHEMES.index(scheme)
    assert Case(family, tmp_path).unexplained(scheme, KV[number % 3], DTYPES[number % 5], *split) == []
