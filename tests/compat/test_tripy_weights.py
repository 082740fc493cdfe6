"""A module written as in Tripy's nanoGPT example is filled by its calls, and answers as ModelOpt's model does."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
needs("modelopt")

from safetensors.torch import save_file  # noqa: E402
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel  # noqa: E402

from bridge.compat.tripy import UnknownMode, load_quant_weights_from_hf, load_weights_from_hf, modelopt_quantize  # noqa: E402
from bridge.core.errors import BridgeError, CannotRun, PlanError, SourceError, UsageError  # noqa: E402
from tests.compat.nanogpt import gpt  # noqa: E402

TOKENIZER = Path(__file__).parents[2] / "examples" / "models" / "tiny-gpt2"
IDS = torch.randint(0, 1290, (2, 70), generator=torch.Generator().manual_seed(8))
PLAIN = {"int8-weight-only": ("int8", 0), "int4-weight-only": ("int4", None), "float8": ("float8", None)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the hub's gpt2: tied head, Conv1D, a tokenizer without padding; int4 takes matrices of 128 by 128 blocks."""
    torch.manual_seed(4)
    sizes = {"n_embd": 128, "n_head": 8, "n_layer": 2, "n_inner": 256, "vocab_size": 1290, "n_positions": 96}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and ".h." in name:
                parameter.mul_(3)
                parameter[5] *= 4  # an outlier: scales that belong to other blocks would show
    out = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return GPT2LMHeadModel.from_pretrained(checkpoint).eval()


def module_for(tp: Any, config: Any, mode: str | None, dtype: Any) -> Any:
    """The example's: every Linear of a block quantized, the head in float8 only."""
    if mode is None:
        return gpt(tp, config, dtype, lambda _, in_, out, bias: tp.Linear(in_, out, bias, dtype))
    name, dim = PLAIN[mode]

    def quantized(_: str, in_: int, out: int, bias: bool) -> Any:
        return tp.Linear(in_, out, bias, dtype, quant_dtype=getattr(tp, name), weight_quant_dim=dim)

    return gpt(tp, config, dtype, quantized, quantized if mode == "float8" else None)


def block_module(tp: Any, config: Any, dtype: Any) -> Any:
    """int4 in bridge's own layer, which has a place for AWQ's pre-scales."""
    from bridge.targets.tripy.models.layers import BlockLinear

    return gpt(tp, config, dtype, lambda _, in_, out, bias: BlockLinear(in_, out, bias, dtype, pre_quant_scale=True))


def logits(tp: Any, module: Any) -> Any:
    ids = tp.copy(tp.Tensor(IDS.to(torch.int32)), tp.device("gpu"))
    return torch.from_dlpack(module(ids)).cpu().float()


def apart(found: Any, expected: Any) -> float:
    return float((found - expected).norm() / expected.norm())


def state(module: Any) -> dict[str, Any]:
    return {name: torch.from_dlpack(value) for name, value in module.state_dict().items() if hasattr(value, "eval")}


@pytest.mark.slow
def test_an_unquantized_module_answers_as_the_checkpoint_does(tp: Any, model: Any, checkpoint: Path) -> None:
    module = module_for(tp, model.config, None, tp.float32)
    load_weights_from_hf(module, str(checkpoint), tp.float32)
    # the same formulas in float32, added up in another order
    assert apart(logits(tp, module), model(IDS).logits) < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_are_the_checkpoints_in_the_modules_dtype(dtype: str, tp: Any, model: Any, checkpoint: Path) -> None:
    module = module_for(tp, model.config, None, getattr(tp, dtype))
    load_weights_from_hf(module, checkpoint, dtype)  # the dtype by its name, too
    found, kept = state(module), getattr(torch, dtype)
    for name, value in model.state_dict().items():
        turned = value.t() if name.split(".")[-2] in ("c_attn", "c_proj", "c_fc") and value.ndim == 2 else value
        assert torch.equal(found[name], turned.to(kept)), name
    mask = torch.ones(96, 96).tril().to(kept)
    assert torch.equal(found["transformer.h.1.attn.bias"][0, 0], mask), "the module's own mask was touched"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "make", "tolerance"),
    [
        # ModelOpt multiplies with 127 / amax, its export divides by amax / 127: one code in 200,000 lies on a tie and
        # becomes another, which moves the logits by 1e-4
        pytest.param("int8-weight-only", module_for, 5e-4, id="int8"),
        # codes are those of ModelOpt; what is left is the order of float32 sums
        pytest.param("int4-weight-only", block_module, 5e-6, id="int4-awq"),
        # codes of activations flip: ModelOpt against itself, embeddings changed by 1e-7, moves by 5e-3
        pytest.param("float8", module_for, 2e-2, id="float8", marks=pytest.mark.product),
    ],
)
def test_a_quantized_module_answers_as_modelopts_model_does(
    mode: str, make: Callable[..., Any], tolerance: float, tp: Any, model: Any, checkpoint: Path
) -> None:
    arguments = (mode, tp.float32) if make is module_for else (tp.float32,)
    module = make(tp, model.config, *arguments)
    load_quant_weights_from_hf(module, str(checkpoint), tp.float32, mode)
    theirs = modelopt_quantize(model, mode)(IDS).logits
    assert apart(logits(tp, module), theirs) < tolerance < apart(theirs, model(IDS).logits)


@pytest.mark.slow
def test_int4_in_plain_linear_answers_as_blocks_along_the_outputs_do(tp: Any, model: Any, checkpoint: Path) -> None:
    module = module_for(tp, model.config, "int4-weight-only", tp.float32)
    load_quant_weights_from_hf(module, str(checkpoint), tp.float32, "int4-weight-only")
    refitted = GPT2LMHeadModel.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        for name, parameter in refitted.named_parameters():
            if parameter.ndim == 2 and ".h." in name:  # Conv1D: in, out
                blocks = parameter.unflatten(1, (-1, 128))
                scale = blocks.abs().amax(2, keepdim=True) / 7
                parameter.copy_((blocks / scale).round().clamp(-8, 7).mul(scale).flatten(1))
    assert apart(logits(tp, module), refitted(IDS).logits) < 5e-6  # float32 sums in another order


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["int8-weight-only", "float8"])
def test_scales_are_those_of_the_example_and_weights_lie_on_their_codes(
    mode: str, tp: Any, model: Any, checkpoint: Path
) -> None:
    """The example: amax / maxbound in float32, squeezed, in the dtype of the module; weights as ModelOpt has them."""
    module = module_for(tp, model.config, mode, tp.float16)
    load_quant_weights_from_hf(module, str(checkpoint), tp.float16, mode)
    found, theirs, bound = state(module), modelopt_quantize(model, mode), 127 if mode.startswith("int8") else 448
    scales = {name: value for name, value in found.items() if name.endswith("_scale")}
    assert len(scales) == (8 if bound == 127 else 18)
    for name, scale in scales.items():
        owner, _, leaf = name.rpartition(".")
        amax = theirs.get_submodule(f"{owner}.{leaf.removesuffix('_scale')}_quantizer")._amax
        assert torch.equal(scale, (amax.float() / bound).squeeze().to(torch.float16)), name
        if leaf == "weight_scale":
            step = scale.float().reshape(-1, 1) if scale.ndim else scale.float()
            weight, kept = theirs.get_submodule(owner).weight.detach(), found[f"{owner}.weight"].float()
            error = (kept - weight).abs()
            # half a step of an integer, half of e4m3's last bit; and what float16 rounds off scale and product
            allowed = step * 0.5 if bound == 127 else torch.maximum(weight.abs() * 2**-4, step * 2**-10)
            assert bool((error <= allowed * 1.05 + weight.abs() * 2**-9).all()), owner


@pytest.mark.slow
def test_scales_that_the_module_has_no_place_for_are_not_made(tp: Any, model: Any, checkpoint: Path) -> None:
    """float8 leaves a plain head plain: what is quantized follows from how the module is built."""
    name, dim = PLAIN["float8"]

    def quantized(_: str, in_: int, out: int, bias: bool) -> Any:
        return tp.Linear(in_, out, bias, tp.float16, quant_dtype=getattr(tp, name), weight_quant_dim=dim)

    module = gpt(tp, model.config, tp.float16, quantized)
    load_quant_weights_from_hf(module, str(checkpoint), tp.float16, "float8")
    assert torch.equal(state(module)["lm_head.weight"], model.lm_head.weight.to(torch.float16))


def test_a_module_built_for_another_mode_is_refused_before_anything_is_read(tp: Any, model: Any) -> None:
    int8 = module_for(tp, model.config, "int8-weight-only", tp.float16)
    with pytest.raises(UsageError, match=r"needs linear layers with quant_dtype float8, but the module has int8"):
        load_quant_weights_from_hf(int8, "no/where", tp.float16, "float8")
    plain = module_for(tp, model.config, None, tp.float16)
    with pytest.raises(UsageError, match=r"the module has no quantized linear layers"):
        load_quant_weights_from_hf(plain, "no/where", tp.float16, "float8")
    with pytest.raises(UsageError, match=r"is quantized \(transformer\.h\.\{0\.\.1\}\.attn\.c_attn.*build it without"):
        load_weights_from_hf(int8, "no/where", tp.float16)


@pytest.mark.parametrize("mode", ["int3", None])
def test_an_unknown_mode_is_named(mode: Any, tp: Any, model: Any) -> None:
    with pytest.raises(UnknownMode, match="unknown; known: float8") as caught:
        load_quant_weights_from_hf(module_for(tp, model.config, "float8", tp.float16), "no/where", tp.float16, mode)
    assert isinstance(caught.value, NotImplementedError)


def test_what_is_no_tripy_module_is_refused(tp: Any, model: Any) -> None:
    with pytest.raises(UsageError, match=r"model is a GPT2LMHeadModel; give the nvtripy\.Module to fill"):
        load_weights_from_hf(model, "no/where", tp.float16)


@pytest.mark.parametrize("dtype", ["int8", "float8", "half a float"])
def test_a_dtype_that_no_module_has_is_refused(dtype: str, tp: Any, model: Any, checkpoint: Path) -> None:
    with pytest.raises(UsageError, match=dtype):
        load_weights_from_hf(module_for(tp, model.config, None, tp.float16), checkpoint, getattr(tp, dtype, dtype))


def test_a_module_that_differs_is_told_every_difference_and_stays_empty(
    tp: Any, model: Any, checkpoint: Path, tmp_path: Path
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    other = GPT2Config(**{**config, "n_layer": 3, "n_inner": 384})
    module = module_for(tp, other, "int8-weight-only", tp.float32)
    with pytest.raises(BridgeError) as caught:
        load_quant_weights_from_hf(module, checkpoint, tp.float16, "int8-weight-only")
    for words in ("transformer.h.2.", "mlp.c_fc.weight", "384", "float16", "float32"):
        assert words in str(caught.value)
    assert not hasattr(module.transformer.wte.weight, "eval"), "something was loaded"


@pytest.mark.slow
def test_messages_name_the_model_and_advise_what_a_door_takes(tp: Any, model: Any, checkpoint: Path) -> None:
    from bridge.targets.tripy.models.layers import BlockLinear

    def mixed(name: str, in_: int, out: int, bias: bool) -> Any:
        if name.endswith("c_fc"):
            return tp.Linear(in_, out, bias, tp.float16)
        return BlockLinear(in_, out, bias, tp.float16, pre_quant_scale=True)

    def said(kind: type[BridgeError], call: Callable[[], None]) -> str:
        with pytest.raises(kind) as caught:
            call()
        assert not any(
            words in str(caught.value) for words in ("convert with", "(--", "linear=True", "give tokenizer=")
        )
        return str(caught.value)

    plain = module_for(tp, model.config, None, tp.float16)
    text = said(PlanError, lambda: load_weights_from_hf(plain, checkpoint, tp.float32))
    assert text.startswith(f"model_type {checkpoint} does not fit") and "call with dtype='float16'" in text
    blocks = gpt(tp, model.config, tp.float16, mixed)
    text = said(PlanError, lambda: load_quant_weights_from_hf(blocks, checkpoint, tp.float16, "int4-weight-only"))
    assert "or build all of int4 in tp.Linear" in text
    config = copy.deepcopy(model.config)
    config.name_or_path = ""  # made, not loaded: there is no place with a tokenizer
    bare, float8 = GPT2LMHeadModel(config), module_for(tp, model.config, "float8", tp.float16)
    text = said(UsageError, lambda: load_quant_weights_from_hf(float8, bare, tp.float16, "float8"))
    assert "save the model with its tokenizer" in text
    with torch.no_grad():
        bare.transformer.h[1].mlp.c_fc.weight[3, 4] = 1e6
    text = said(SourceError, lambda: load_weights_from_hf(plain, bare, tp.float16))
    assert text.endswith("does not fit float16; choose another dtype")
    small = GPT2LMHeadModel(GPT2Config(n_embd=60, n_head=6, n_layer=1, n_inner=80, vocab_size=112, n_positions=96))
    int4 = module_for(tp, small.config, "int4-weight-only", tp.float16)
    text = said(PlanError, lambda: load_quant_weights_from_hf(int4, small, tp.float16, "int4-weight-only"))
    assert text.endswith("bridge.convert(model_type, 'tripy', 'recipe.toml', out), then bridge.targets.tripy.load")


def test_a_checkpoint_that_was_saved_as_the_hubs_gpt2_fills_the_module(
    tp: Any, model: Any, checkpoint: Path, tmp_path: Path
) -> None:
    """Saved from the bare model, with the causal masks: names without `transformer.`, buffers that no one reads."""
    bare = {name.removeprefix("transformer."): value for name, value in model.transformer.state_dict().items()}
    bare |= {f"h.{at}.attn.bias": torch.ones(1, 1, 96, 96).tril() for at in range(2)}
    save_file(
        {name: value.contiguous() for name, value in bare.items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    module = module_for(tp, model.config, "int8-weight-only", tp.float16)
    load_quant_weights_from_hf(module, tmp_path, tp.float16, "int8-weight-only")  # without a tokenizer: no calibration
    found = state(module)
    assert torch.equal(found["lm_head.weight"], model.lm_head.weight.to(torch.float16))
    assert torch.equal(found["transformer.h.1.attn.c_attn.bias"], model.transformer.h[1].attn.c_attn.bias.half())


def test_without_nvtripy_the_line_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtripy", None)
    for call in (load_weights_from_hf, lambda *words: load_quant_weights_from_hf(*words, "float8")):
        with pytest.raises(CannotRun, match=r"pip install nvtripy -f https://nvidia\.github\.io"):
            call(None, "no/where", "float16")


def test_a_module_that_does_not_fit_is_told_before_anything_runs(
    tp: Any, model: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("converted")

    monkeypatch.setattr("bridge.api.verbs.convert", never)
    config = copy.deepcopy(model.config)
    config.n_embd += config.n_head
    wide = module_for(tp, config, "float8", tp.float16)
    with pytest.raises(PlanError, match=r"transformer\.ln_f\.weight: shape"):
        load_quant_weights_from_hf(wide, checkpoint, tp.float16, "float8")
    with pytest.raises(UsageError, match="dtype=None; give the module's dtype"):
        load_weights_from_hf(module_for(tp, model.config, None, tp.float16), checkpoint, None)
