"""What vLLM makes of target `hf`: its own loader, layers and models, on a CPU (`make oracles`).

A new spelling or scheme is a row of CELLS: what is calibrated, and what the logits are held to.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import bridge
from bridge.planning.contract_files import load_runtime
from bridge.planning.contracts import verdict
from bridge.quant.describe import numeric_words
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Scheme
from bridge.reporting.loading import loadings
from bridge.targets.hf.runtime import Runtime
from bridge.targets.manifest import load_manifest
from tests.covering import grid
from tests.models import draft_families, own_schemes, served_checkpoints
from tests.models.export_families import EXPERT_FAMILIES, GQA, tokens
from tests.oracles import export_oracle, vllm_oracle
from tests.oracles.modelopt_oracle import Answer
from tests.planning import test_eagle

IDS = torch.randint(3, 300, (24,), generator=torch.Generator().manual_seed(7))
FAMILIES = ("llama", "llama-tied", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3-moe")
FORMATS = ("modelopt", "compressed-tensors")
ROUNDING = 2e-5  # float32 products of the same values in another order
# Of the spread of the logits: an input that lies between two codes falls on either side where sums differ in the last
# bit. Measured: 0.019 at most (gemma3), 4e-6 where none does (qwen2).
TIES = 0.04
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# compressed-tensors' INT8 scales are rounded to the model's dtype.
BOUNDS = 0.15
# vLLM's kernel for W4A8 rounds the scales of groups to FP8. Measured: 0.07 (llama, qwen3) to 0.101 (gemma3).
SCALES = 0.13
OF_A_SCHEME = r"ModelOpt currently only supports: \['FP8', 'FP8_PER_CHANNEL_PER_TOKEN', 'FP8_PB_WO', 'NVFP4'"


@dataclass(frozen=True)
class Cell:
    """A scheme in a format, and what vLLM's logits of it equal."""

    scheme: str | Scheme
    format: str = "modelopt"
    reference: str = (
        "weights"  # dequantized; `modelopt`: its fake-quantized model; `inputs`: weights and rounded inputs
    )
    tolerance: float = ROUNDING  # `weights`: largest difference; else root mean square, of the logits' spread
    experts: str = ""  # how vLLM refuses a model with experts
    refused: str = ""  # how it refuses any model
    options: tuple[tuple[str, Any], ...] = ()  # of target hf

    def __str__(self) -> str:
        name = self.scheme if isinstance(self.scheme, str) else self.scheme.name
        return "-".join([name, self.format, *(f"{name}={value}" for name, value in self.options)])

    def refusal(self, family: str) -> str:
        return self.refused or (self.experts if family in EXPERT_FAMILIES else "")


OF_TENSORS = r"shape '\[\]' is invalid for input of size"  # its experts in FP8 have one scale a tensor
OF_INTEGERS = "No W4A8 Int8 MoE backend|Unsupported FusedMoe scheme"  # inputs in INT8
CELLS = (
    Cell("fp8", reference="modelopt", tolerance=TIES),
    Cell("fp8", "compressed-tensors", reference="modelopt", tolerance=TIES),
    Cell("fp8_pc_pt", reference="modelopt", tolerance=TIES, experts=OF_TENSORS),
    Cell("fp8_pc_pt", "compressed-tensors", reference="modelopt", tolerance=TIES),
    Cell("fp8_block", experts=OF_TENSORS),
    Cell("fp8_block_dynamic", experts=OF_TENSORS),  # inputs of tiles: a test of its own
    Cell("fp8_block_dynamic", "compressed-tensors"),
    Cell("fp8_block_dynamic", "deepseek"),
    Cell("int8_pc_pt", "compressed-tensors", reference="inputs", tolerance=TIES),
    Cell("w4a8_int8", "compressed-tensors", reference="inputs", tolerance=TIES, experts=OF_INTEGERS),
    *(
        Cell(f"ct:W{bits}A8", "compressed-tensors", reference="inputs", tolerance=TIES, experts=OF_INTEGERS)
        for bits in (2, 3, 5, 6)
    ),
    *(Cell(f"int{bits}:rtn", "compressed-tensors") for bits in (2, 3, 5, 6)),
    Cell("w4a8_fp8", "compressed-tensors", reference="inputs", tolerance=SCALES, experts="must be divisible by 256"),
    Cell("mxfp4", "compressed-tensors"),  # as mxfp4_wo: where no kernel quantizes inputs, Marlin leaves them
    Cell("int8_wo", "compressed-tensors"),
    Cell("int4_wo", "compressed-tensors"),
    Cell("nvfp4", reference="inputs", tolerance=TIES),
    Cell("nvfp4", "compressed-tensors", reference="inputs", tolerance=TIES),
    Cell("nvfp4_awq", "compressed-tensors", reference="inputs", tolerance=TIES),
    Cell("nvfp4_wo"),
    Cell("nvfp4_wo", "compressed-tensors"),
    Cell("mxfp8"),  # vLLM's own emulation, which we run, leaves inputs as they are
    Cell("mxfp8", "compressed-tensors"),
    Cell("mxfp4_wo", "compressed-tensors"),
    Cell("int4_awq", "compressed-tensors"),
    Cell("int8", "compressed-tensors", reference="modelopt", tolerance=BOUNDS),
    Cell("int8_sq", "compressed-tensors", reference="modelopt", tolerance=BOUNDS),
    *(Cell(scheme, format_) for scheme in ("int4_wo", "int4_awq") for format_ in ("awq", "gptq")),
    Cell("int4_wo", "awq", options=(("zero_points", True),)),
    Cell("int4_wo", "compressed-tensors", options=(("zero_points", True),)),
    Cell("int8_wo", "gptq"),
    Cell("fp8_block", "deepseek"),
    *(
        Cell(scheme, refused=OF_A_SCHEME)
        for scheme in ("int8", "int8_sq", "int8_wo", "int4_wo", "int4_awq", "w4a8_awq", "w4a8_nvfp4_fp8", "mxfp4_wo")
    ),
    Cell("nvfp4_awq", refused=OF_A_SCHEME),
    # A weight-only group says nothing of inputs: `input_quant and not input_quant.dynamic` is None, not False.
    Cell("fp8_block", "compressed-tensors", refused="^AssertionError", experts="has no attribute 'num_bits'"),
)
NO_INPUTS = "For Fused MoE layers|has no attribute 'num_bits'"  # experts in FP8 ask for a format of inputs
CELLS += (  # schemes of one's own
    *(Cell(own, "compressed-tensors") for own in (*own_schemes.INT4, *own_schemes.INT8)),
    *(Cell(own, "compressed-tensors") for own in own_schemes.NARROW),
    *(Cell(own, "gptq") for own in (*own_schemes.INT4, *own_schemes.INT8)),
    *(Cell(own, "awq") for own in own_schemes.INT4[1:]),
    *(Cell(own, "compressed-tensors", experts=NO_INPUTS) for own in (own_schemes.CHANNELS, own_schemes.TENSORS)),
    *(
        Cell(own, "compressed-tensors", reference="inputs", tolerance=TIES, experts="^AssertionError")
        for own in (own_schemes.STATIC, own_schemes.TOKENS)
    ),
)
NIGHTLY = [pytest.mark.slow, pytest.mark.product]
SERVED = [cell for cell in CELLS if not cell.refused]
NEEDS_DATA = ("fp8", "int8", "int8_sq", "int4_awq", "w4a8_awq", "w4a8_nvfp4_fp8", "nvfp4", "nvfp4_awq")


@pytest.fixture(autouse=True)
def environment() -> None:
    vllm_oracle.require()


@functools.cache
def calibrated(family: str, scheme: str | Scheme, kv: str | None) -> tuple[Answer, np.ndarray]:
    """ModelOpt's calibration, and the logits of its fake-quantized model."""
    answer = export_oracle.calibrated(export_oracle.source(family, "fp32"), scheme, kv, tokens())
    if scheme == "fp8":
        share_scales(answer.model)
    with torch.no_grad():
        return answer, answer.model(IDS[None]).logits[0].numpy()


def share_scales(model: Any) -> None:
    """Give what servers fuse the largest of its weight scales, where ModelOpt has one each; experts share theirs."""
    for module in model.modules():
        for names in FUSED:
            quantizers = [getattr(getattr(module, name, None), "weight_quantizer", None) for name in names]
            if all(quantizers):
                largest = max(quantizer.amax for quantizer in quantizers)
                for quantizer in quantizers:
                    quantizer.amax = largest.clone()


def write(family: str, cell: Cell, out: Path, kv: str | None = None, **options: Any) -> Path:
    """The checkpoint that vLLM gets, from float32 weights, so that nothing but the scheme rounds."""
    source, calib = export_oracle.source(family, "fp32"), None
    if cell.reference == "modelopt" or kv:
        calib = calibrated(family, cell.scheme, kv)[0].calibration
    elif cell.scheme in NEEDS_DATA or (isinstance(cell.scheme, Scheme) and cell.scheme.needs_calibration):
        calib = [*tokens(), tokens()[0]]  # the last is held out
    options |= {"format": cell.format, "verify": False} | dict(cell.options)
    bridge.convert(source, "hf", cell.scheme, out, calib=calib, kv=kv, progress=False, **options)
    return out


def off(cell: Cell, family: str, directory: Path, logits: np.ndarray, kv: str | None = None) -> float:
    """How far vLLM's logits are from the reference, in the measure of the cell's tolerance."""
    if cell.reference == "modelopt" or kv:
        reference = calibrated(family, cell.scheme, kv)[1]
    else:
        runtime = Runtime(directory)
        if cell.reference == "inputs":
            round_inputs(runtime.model, directory, cell.scheme)
        reference = runtime.run({"input_ids": IDS[None].numpy()})["output 0"][0]
    difference = logits - reference
    if cell.reference == "weights" and not kv:
        return float(np.abs(difference).max())
    return float(np.sqrt((difference**2).mean()) / reference.std())


def round_inputs(model: Any, directory: Path, scheme: str | Scheme) -> None:
    """NVFP4, or FP8, of the inputs as the format defines it, from the scales of the file and the casts of ml_dtypes.

    Those that are quantized at run time: by their formula.
    """
    words = numeric_words(load_scheme(scheme).input)
    static = fp8 if words == "fp8 tensor" else nvfp4
    if rounded := AT_RUN_TIME.get(words):
        coded = {step.site.module for step in load_manifest(directory).plan.quantized if step.site}
        for name, module in model.named_modules():
            if name in coded:
                module.register_forward_pre_hook(lambda _, args: (rounded(args[0]),))
        return
    tensors = load_file(directory / "model.safetensors")
    for name, module in model.named_modules():
        scale = tensors.get(f"{name}.input_scale")
        if (inverse := tensors.get(f"{name}.input_global_scale")) is not None:
            scale = 1 / inverse
        if scale is not None:
            module.register_forward_pre_hook(lambda _, args, scale=float(scale): (static(args[0], scale),))


def fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def nvfp4(x: torch.Tensor, scale: float) -> torch.Tensor:
    block = x.unflatten(-1, (-1, 16)).numpy()
    of_block = np.clip(np.abs(block).max(-1, keepdims=True) / 6 / scale, 0, 448)  # beyond it, ml_dtypes says NaN
    of_block = of_block.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(scale)
    codes = np.clip(np.divide(block, of_block, where=of_block > 0, out=np.zeros_like(block)), -6, 6)
    return torch.from_numpy((codes.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * of_block).reshape(x.shape))


def int8_tokens(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def fp8_groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """FP8 of each `size` values of a token under a scale of its own."""
    groups = x.unflatten(-1, (-1, size))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


AT_RUN_TIME: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int8 token dynamic": int8_tokens,
    "fp8 block 128 dynamic": lambda x: fp8_groups(x, 128),
    "fp8 token dynamic": lambda x: fp8_groups(x, x.shape[-1]),
}


def in_logits(family: str, cell: Cell) -> bool:
    """Inputs of stacked experts cannot be rounded in transformers' model, and ModelOpt's NVFP4 wants a GPU."""
    return cell.reference != "inputs" or family not in EXPERT_FAMILIES


@grid(
    {"family": FAMILIES, "cell": SERVED},
    valid=lambda family, cell: not cell.refusal(family),
    first=[("llama", SERVED[0]), ("mixtral", SERVED[1])],
)
def test_vllm_reads_every_tensor_and_gives_the_logits(family: str, cell: Cell, tmp_path: Path) -> None:
    directory = write(family, cell, tmp_path / "out")
    answer = vllm_oracle.ask(directory, IDS.tolist())
    unread = [name for name in answer.unread if not name.endswith(".g_idx")]  # GPTQ's natural order needs no kernel
    assert (answer.error, unread) == ("", [])
    assert answer.missing(weight_only=cell.scheme == "nvfp4_wo") == []
    if in_logits(family, cell):
        assert off(cell, family, directory, answer.logits) <= cell.tolerance


def refused() -> list[Any]:
    """Those whose calibration takes seconds are asked at night."""
    cells = [("llama", cell) for cell in CELLS if cell.refused]
    cells += [("mixtral", cell) for cell in CELLS if cell.experts]
    return [pytest.param(*row, marks=NIGHTLY if row[1].scheme in NEEDS_DATA else pytest.mark.slow) for row in cells]


@pytest.mark.parametrize(("family", "cell"), refused(), ids=str)
def test_vllm_refuses_what_we_say_it_refuses(family: str, cell: Cell, tmp_path: Path) -> None:
    answer = vllm_oracle.ask(write(family, cell, tmp_path / "out"), IDS.tolist())
    assert re.search(cell.experts if family in EXPERT_FAMILIES else cell.refused, answer.error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "ffn", "words"),
    [(1, 384, "exceeds dimension size"), (2, 192, "FP8_PB_WO requires in divisible by 128, got 192")],
)
def test_vllm_fuses_whole_blocks_only(heads: int, ffn: int, words: str, tmp_path: Path) -> None:
    """Scales of q, k and v are put behind each other by the block; k has 64 rows a head here, so half a block."""
    dims = GQA | {"num_key_value_heads": heads, "intermediate_size": ffn, "num_hidden_layers": 1}
    export_oracle.save(transformers.LlamaForCausalLM(transformers.LlamaConfig(**dims)), tmp_path / "source")
    bridge.convert(tmp_path / "source", "hf", "fp8_block", tmp_path / "out", verify=False, progress=False)
    assert words in vllm_oracle.ask(tmp_path / "out", IDS.tolist()).error


@pytest.mark.slow
@pytest.mark.parametrize("cell", SERVED[:2], ids=str)
def test_vllm_changes_no_code_at_load(cell: Cell, tmp_path: Path) -> None:
    answer = vllm_oracle.ask(write("llama", cell, tmp_path / "out"), IDS.tolist())
    assert answer.error == "" and len(answer.changed) == 8
    assert sum(answer.changed.values()) == 0
    own = vllm_oracle.ask(write("llama", cell, tmp_path / "own", own_scales=True), IDS.tolist())
    assert sum(own.changed.values()) > 400_000, "of 917,504, where q, k and v have a scale each"


KEPT = '[[rule]]\nmodules = ["*.mlp.*"]\nquant = "none"\n'
HEAD = '[[rule]]\nroles = ["head.weight"]\nquant = "nvfp4_wo"\noverride = true\n'
RECIPES = {
    # what runs first is in make test, with one of each kind; the others are asked at night
    "kept-compressed-tensors": ("int8_wo", KEPT),
    "mixed-modelopt": ("nvfp4_wo", '[[rule]]\nmodules = ["*.mlp.*"]\nquant = "fp8_block"\n'),
    "head-modelopt": ("nvfp4_wo", HEAD),
    "head-compressed-tensors": ("int8_wo", HEAD.replace("nvfp4_wo", "int8_wo")),
    "other_head-compressed-tensors": ("int4:rtn", HEAD.replace("nvfp4_wo", "int8_wo")),
    "mixed-compressed-tensors": ("int8_wo", '[[rule]]\nmodules = ["*.mlp.*"]\nquant = "int4_wo"\n'),
    "kept-modelopt": ("nvfp4_wo", KEPT),
    "kept-awq": ("int4_wo", KEPT),
    "kept-gptq": ("int4_wo", KEPT),
    "kept-deepseek": ("fp8_block", KEPT),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.product if at > 3 else ()) for at, name in enumerate(RECIPES)]
)
def test_vllm_reads_recipes_that_keep_mix_or_quantize_the_head(name: str, tmp_path: Path) -> None:
    base, rules = RECIPES[name]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'base = "{base}"\n{rules}')
    directory = write("llama", Cell(str(recipe), name.partition("-")[2]), tmp_path / "out")
    answer = vllm_oracle.ask(directory, IDS.tolist())
    unread = [name for name in answer.unread if not name.endswith(".g_idx")]
    assert (answer.error, unread, answer.missing(weight_only=True)) == ("", [], [])
    assert off(Cell(base), "llama", directory, answer.logits) <= ROUNDING
    # the oracle has no Marlin, whose kernel multiplies by negative scales
    how = "read" if base == "int4:rtn" else "run"
    assert verdict(load_runtime("vllm"), load_manifest(directory).plan).how == how


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "format_"),
    [
        *(("fp8_block", format_) for format_ in ("modelopt", "deepseek")),
        *(("fp8_block_dynamic", format_) for format_ in (*FORMATS, "deepseek")),
    ],
)
def test_vllm_rounds_the_inputs_of_tiles_as_its_contract_says(scheme: str, format_: str, tmp_path: Path) -> None:
    directory = write("llama", Cell(scheme, format_), tmp_path / "out")
    answer = vllm_oracle.ask(directory, IDS.tolist(), inputs=True)
    runtime = Runtime(directory)
    exact = runtime.run({"input_ids": IDS[None].numpy()})["output 0"][0]
    round_inputs(runtime.model, directory, "fp8_block_dynamic")
    rounded = runtime.run({"input_ids": IDS[None].numpy()})["output 0"][0]
    spread = rounded.std()
    assert np.sqrt(((answer.logits - rounded) ** 2).mean()) / spread <= TIES
    assert np.sqrt(((answer.logits - exact) ** 2).mean()) / spread > TIES, "inputs are rounded"
    (loading,) = [one for one in loadings(load_manifest(directory).plan) if one.program.startswith("vLLM")]
    assert ("rounds inputs to FP8" in loading.limit) == (scheme == "fp8_block")


@pytest.mark.slow
@pytest.mark.parametrize("cell", [Cell("int4_wo", "compressed-tensors"), Cell("nvfp4_wo")], ids=str)
def test_nine_shards_are_one_checkpoint(cell: Cell, tmp_path: Path) -> None:
    directory = write("llama", cell, tmp_path / "out", shard_size="120KB")
    assert len(list(directory.glob("model-*.safetensors"))) >= 9
    answer = vllm_oracle.ask(directory, IDS.tolist())
    assert (answer.error, answer.unread, answer.missing(weight_only=True)) == ("", (), [])
    assert off(cell, "llama", directory, answer.logits) <= cell.tolerance


RANKS = [("llama", Cell("int8_wo", "compressed-tensors")), ("qwen2", Cell("mxfp8")), ("qwen3-moe", Cell("nvfp4_wo"))]


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize(("family", "cell"), RANKS, ids=str)
def test_two_ranks_say_what_one_says(family: str, cell: Cell, tmp_path: Path) -> None:
    directory = write(family, cell, tmp_path / "out")
    assert shared_by_two(family, cell) == ""
    answer = vllm_oracle.ask(directory, IDS.tolist(), ranks=2)
    assert (answer.error, answer.unread, answer.missing(weight_only=True)) == ("", (), [])
    assert off(cell, family, directory, answer.logits) <= cell.tolerance


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (Cell("int4_wo", "compressed-tensors"), "input_size_per_partition=192 .* not divisible by group_size=128"),
        (Cell("fp8_block"), "FP8_PB_WO requires in divisible by 128, got 192"),
    ],
    ids=str,
)
def test_ranks_that_cut_a_block_are_refused(cell: Cell, words: str, tmp_path: Path) -> None:
    assert re.search(words, vllm_oracle.ask(write("llama", cell, tmp_path / "out"), IDS.tolist(), ranks=2).error)
    assert "192 a rank of 2 is not a multiple of 128" in shared_by_two("llama", cell)


def shared_by_two(family: str, cell: Cell) -> str:
    """Why the contract says that two ranks cannot share it."""
    source = export_oracle.source(family, "fp32")
    return verdict(load_runtime("vllm"), bridge.plan(source, "hf", cell.scheme, format=cell.format, tp=2)).why_not


KV = [
    pytest.param("llama", "modelopt", marks=pytest.mark.slow),
    pytest.param("qwen3", "modelopt", marks=NIGHTLY),
    pytest.param("llama", "compressed-tensors", marks=NIGHTLY),
]


@pytest.mark.parametrize(("family", "format_"), KV)
def test_scales_of_an_fp8_cache_are_read(family: str, format_: str, tmp_path: Path) -> None:
    cell = Cell("fp8_pc_pt", format_, reference="modelopt", tolerance=TIES)
    directory = write(family, cell, tmp_path / "out", kv="fp8")
    answer = vllm_oracle.ask(directory, IDS.tolist(), kv="fp8")
    assert (answer.error, answer.unread, answer.missing(kv=True)) == ("", (), [])
    assert off(cell, family, directory, answer.logits, kv="fp8") <= cell.tolerance


@pytest.mark.slow
def test_the_oracle_sees_a_tensor_that_is_not_read_and_one_that_lacks(tmp_path: Path) -> None:
    """vLLM itself passes over both: scales that it has no parameter for, and parameters that no file sets."""
    cell = Cell("fp8_pc_pt")
    directory = write("llama", cell, tmp_path / "out")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight_scale"]
    tensors["model.layers.0.mlp.down_proj.pre_quant_scale"] = torch.ones(384)
    (directory / "model.safetensors").unlink()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    answer = vllm_oracle.ask(directory, IDS.tolist())
    if answer.error:  # the name that it has no parameter for may also end the load
        assert "pre_quant_scale" in answer.error
        del tensors["model.layers.0.mlp.down_proj.pre_quant_scale"]
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        answer = vllm_oracle.ask(directory, IDS.tolist())
    else:
        assert answer.unread == ("model.layers.0.mlp.down_proj.pre_quant_scale",)
    assert answer.missing() == ["model.layers.1.mlp.down_proj.weight_scale"]


@pytest.mark.slow
@pytest.mark.parametrize("name", served_checkpoints.FORMATS)
def test_formats_of_others_give_the_values_of_their_codes(name: str, tmp_path: Path) -> None:
    """Stand-ins and loaders of spellings that servers prefer, on checkpoints written from the definitions."""
    model = served_checkpoints.write(export_oracle.source("llama", "fp32"), name, tmp_path / "out")
    answer = vllm_oracle.ask(tmp_path / "out", IDS.tolist())
    assert (answer.error, answer.unread, answer.missing()) == ("", (), [])
    with torch.no_grad():
        assert np.abs(answer.logits - model(IDS[None]).logits[0].numpy()).max() <= ROUNDING


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3_next", "ernie4_5", "nemotron_h"])
@pytest.mark.parametrize("drafts", ["keep", "quantize"])
def test_vllm_reads_every_tensor_of_draft_layers(family: str, drafts: str, tmp_path: Path) -> None:
    """By its own models of them, which ask with other names than the files'; unlisted, floats are loaded as codes."""
    vllm_oracle.require()
    tensors = draft_families.FAMILIES[family](tmp_path / "model")
    options: dict[str, Any] = {"format": "compressed-tensors", "drafts": drafts, "progress": False, "verify": False}
    bridge.convert(tmp_path / "model", "hf", "fp8_pc_pt", tmp_path / "out", **options)
    answer = vllm_oracle.ask_drafts(tmp_path / "out")
    assert not answer.error, answer.trace
    assert not answer.missing() and not tensors.keys() & set(answer.unread)


@pytest.mark.parametrize("format_", FORMATS)
def test_vllm_reads_every_tensor_of_a_draft_of_its_own(format_: str, tmp_path: Path) -> None:
    """EAGLE-3's; the embedding is the model's, and vLLM reads no t2d."""
    vllm_oracle.require()
    sizes: dict[str, Any] = {name: test_eagle.CONFIG[name] for name in test_eagle.CONFIG if name.startswith("num_")}
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, head_dim=16, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    draft_families.write(tmp_path / "draft", test_eagle.draft(), test_eagle.CONFIG)
    options: dict[str, Any] = {"format": format_, "progress": False, "verify": False}
    bridge.convert(tmp_path / "draft", "hf", "fp8_pc_pt", tmp_path / "out", **options)
    answer = vllm_oracle.ask_drafts(tmp_path / "model", tmp_path / "out")
    assert not answer.error, answer.trace
    assert answer.unread == ("t2d",) and answer.missing() == ["model.embed_tokens.weight"]
