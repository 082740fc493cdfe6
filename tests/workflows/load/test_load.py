"""`load` fills a live model with what its own program loads from the same checkpoint, or changes nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import bridge
from bridge.core.arrays import Buffers
from bridge.core.errors import PlanError, UsageError, WriteError
from bridge.core.values import Slice, TensorSpec
from bridge.planning.plan import Output, Step
from bridge.sources.memory.megatron_parts import Part
from bridge.sources.opening import open_source
from bridge.workflows.load.fill import Reader, fill
from bridge.workflows.load.steps import same_values, settled
from tests.models.decoder_families import DECODERS, STACKED, build
from tests.models.sources_made import MadeSource
from tests.targets.dcp.test_torchtitan import LLAMA, OSS, made

DENSE = "LlamaForCausalLM"


def emptied(name: str, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Any:
    model = build(name, dtype, **fields)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(7)
    return model


def saved(name: str, directory: Path, **fields: Any) -> Path:
    build(name, **fields).save_pretrained(directory)
    return directory


def differing(model: Any, wanted: dict[str, torch.Tensor]) -> list[str]:
    state = model.state_dict()
    assert state.keys() == wanted.keys()
    return [name for name, tensor in wanted.items() if not torch.equal(state[name], tensor)]


def untouched(model: Any) -> bool:
    return all(bool((tensor == 7).all()) for tensor in model.parameters())


@pytest.mark.parametrize("name", [DENSE, "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_the_model_is_that_of_from_pretrained(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    model = emptied(name, torch.float32)
    loaded = bridge.load(model, tmp_path)
    assert not differing(model, type(model).from_pretrained(tmp_path, dtype=torch.float32).state_dict())
    assert loaded.nbytes == 2 * loaded.read == sum(tensor.nbytes for tensor in model.state_dict().values())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DECODERS, *STACKED])
def test_every_family_is_that_of_from_pretrained(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    model = emptied(name)
    bridge.load(model, tmp_path)
    assert not differing(model, type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict())


def test_values_are_cast_as_torch_casts(tmp_path: Path) -> None:
    build(DENSE, torch.float32).save_pretrained(tmp_path)
    model = emptied(DENSE, torch.float16)
    bridge.load(model, tmp_path)
    assert not differing(
        model, {key: tensor.half() for key, tensor in build(DENSE, torch.float32).state_dict().items()}
    )


def test_a_number_that_the_models_dtype_does_not_hold_is_told(tmp_path: Path) -> None:
    build(DENSE, torch.float32).save_pretrained(tmp_path)
    added(tmp_path, **{"model.norm.weight": torch.full((60,), 1e6)})
    with pytest.raises(WriteError, match=r"model\.norm\.weight: 1e\+06 does not fit float16; give a model of another"):
        bridge.load(emptied(DENSE, torch.float16), tmp_path)
    assert not bridge.load(emptied(DENSE), tmp_path).not_finite


def test_what_is_no_number_is_copied_and_counted(tmp_path: Path) -> None:
    build(DENSE, torch.float32).save_pretrained(tmp_path)
    values = torch.ones(60)
    values[3], values[7], values[8] = torch.nan, torch.inf, -torch.inf
    added(tmp_path, **{"model.norm.weight": values})
    model = emptied(DENSE, torch.float16)
    assert bridge.load(model, tmp_path).not_finite == {"model.norm.weight": 3}
    wanted = type(model).from_pretrained(tmp_path, dtype=torch.float16).state_dict()
    assert torch.equal(model.model.norm.weight.view(torch.int16), wanted["model.norm.weight"].view(torch.int16))


def test_a_model_in_memory_is_a_source() -> None:
    model, other = emptied(DENSE), build(DENSE)
    bridge.load(model, other)
    assert not differing(model, other.state_dict())


def test_compiled_layers_are_filled(tmp_path: Path) -> None:
    saved(DENSE, tmp_path)
    model = emptied(DENSE)
    model.model.layers[0] = torch.compile(model.model.layers[0])
    bridge.load(torch.compile(model), tmp_path)
    wanted = [tensor for _, tensor in build(DENSE).named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted, strict=True))


def test_a_tied_head_is_filled_with_the_embedding(tmp_path: Path) -> None:
    saved(DENSE, tmp_path, tie_word_embeddings=True)
    model = emptied(DENSE, tie_word_embeddings=True)
    bridge.load(model, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not differing(model, build(DENSE, tie_word_embeddings=True).state_dict())


def test_a_stored_head_of_a_tied_model_is_the_embedding_or_refused(tmp_path: Path) -> None:
    saved(DENSE, tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    model = emptied(DENSE, tie_word_embeddings=True)
    assert bridge.load(model, tmp_path).dropped["lm_head.weight"] == "tied to model.embed_tokens.weight"
    assert torch.equal(model.lm_head.weight, embedding)
    save_file({**tensors, "lm_head.weight": embedding + 1}, tmp_path / "model.safetensors", {"format": "pt"})
    model = emptied(DENSE, tie_word_embeddings=True)
    with pytest.raises(PlanError, match=r"the model ties it to model\.embed_tokens\.weight, but the checkpoint has"):
        bridge.load(model, tmp_path)
    assert untouched(model)


def test_every_tensor_that_does_not_fit_is_told_before_anything_changes(tmp_path: Path) -> None:
    saved(DENSE, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:90].clone()
    tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = emptied(DENSE)
    with pytest.raises(PlanError) as told:
        bridge.load(model, tmp_path)
    assert untouched(model)
    assert str(told.value).startswith(f"{tmp_path} does not fit LlamaForCausalLM in memory; nothing was changed:")
    for line in (
        "model.norm.weight: gets no value: the checkpoint has no tensor for it",
        "model.embed_tokens.weight: has shape (97, 60) in the model, (90, 60) in the checkpoint",
        "model.layers.0.mlp.extra.weight: LlamaForCausalLM has no place for it",
    ):
        assert line in str(told.value)


def added(directory: Path, **tensors: torch.Tensor) -> None:
    """Add tensors to a checkpoint, or replace those it has."""
    file = directory / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})


@pytest.mark.parametrize(("family", "name", "why"), [
    (DENSE, "model.layers.0.self_attn.rotary_emb.inv_freq", "a buffer of older checkpoints; transformers computes it"),
    ("GPT2LMHeadModel", "transformer.h.0.attn.bias", "GPT2LMHeadModel of transformers leaves it out"),
])  # fmt: skip
def test_tensors_that_transformers_leaves_out_are_told(family: str, name: str, why: str, tmp_path: Path) -> None:
    saved(family, tmp_path)
    added(tmp_path, **{name: torch.zeros(5)})
    assert bridge.load(emptied(family), tmp_path).dropped == {name: why}


def test_a_bias_of_attention_is_no_buffer(tmp_path: Path) -> None:
    saved(DENSE, tmp_path)
    added(tmp_path, **{"model.layers.0.self_attn.bias": torch.zeros(5)})
    with pytest.raises(PlanError, match=r"self_attn\.bias: LlamaForCausalLM has no place for it"):
        bridge.load(emptied(DENSE), tmp_path)


def test_a_model_without_memory_is_told_how_to_get_some(tmp_path: Path) -> None:
    saved(DENSE, tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(build(DENSE).config)
    with pytest.raises(UsageError, match=r"on the meta device.*model\.to_empty\(device=\.\.\.\) first"):
        bridge.load(model, tmp_path)


@pytest.mark.parametrize("overlapping", [
    torch.zeros(60, dtype=torch.bfloat16)[:1].expand(60),
    torch.zeros(60, dtype=torch.bfloat16).as_strided((6, 10), (5, 1)),
])  # fmt: skip
def test_a_parameter_whose_values_share_memory_is_refused(overlapping: torch.Tensor, tmp_path: Path) -> None:
    saved(DENSE, tmp_path)
    model = emptied(DENSE)
    model.model.norm.weight.data = overlapping
    with pytest.raises(UsageError, match=r"model\.norm\.weight: several of its values are one place in memory"):
        bridge.load(model, tmp_path)


def test_a_parameter_of_strides_is_filled(tmp_path: Path) -> None:
    saved(DENSE, tmp_path)
    model = emptied(DENSE)
    model.lm_head.weight.data = torch.zeros(60, 200, dtype=torch.bfloat16)[:, 3:100].T
    bridge.load(model, tmp_path)
    assert not differing(model, build(DENSE).state_dict())


def values_step(*names: str) -> Step:
    spec = TensorSpec("joined", (1,), "float32")
    return Step(tuple(Slice(name) for name in names), (Output(spec, "weight", ""),))


@pytest.mark.parametrize(("pairs", "same"), [
    ([(np.float32(3), np.float32(3))], True),  # scalars
    ([(np.float32(3), np.float32(4))], False),
    ([(np.zeros((0, 4), np.float32),) * 2], True),
    ([(np.full(4, np.nan, np.float32),) * 2], True),
    ([(np.ones(4, np.float32),) * 2, (np.ones(4, np.float32), np.zeros(4, np.float32))], False),  # joined: all of them
])  # fmt: skip
def test_two_steps_are_compared_by_the_bits_of_all_their_tensors(pairs: list[Any], same: bool) -> None:
    arrays = {f"{side}{at}": np.asarray(x) for at, pair in enumerate(pairs) for side, x in zip("ab", pair, strict=True)}
    source = MadeSource(arrays, {name: TensorSpec(name, x.shape, "float32") for name, x in arrays.items()})
    one, other = (values_step(*(f"{side}{at}" for at in range(len(pairs)))) for side in "ab")
    assert same_values(one, other, source) is same


def test_other_modules_and_values_are_refused(tmp_path: Path) -> None:
    saved(DENSE, tmp_path)
    with pytest.raises(UsageError, match="model is str"):
        bridge.load("model", tmp_path)
    with pytest.raises(bridge.errors.SourceError, match="load fills a model of transformers, torchtitan or Megatron"):
        bridge.load(torch.nn.Linear(3, 4), tmp_path)
    with pytest.raises(UsageError, match="model is a list of 2 modules"):
        bridge.load([emptied(DENSE), emptied(DENSE)], tmp_path)


def test_an_error_while_reading_says_that_the_model_is_partly_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(DENSE, tmp_path)
    monkeypatch.setattr(Reader, "read_rows", lambda *_: (_ for _ in ()).throw(OSError("the disk is gone")))
    with pytest.raises(WriteError, match="the disk is gone; the model is partly filled: load it again, or discard it"):
        bridge.load(emptied(DENSE), tmp_path)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "out"
    bridge.convert(build(DENSE), "hf", "fp8_pc_pt", out, format="compressed-tensors", verify=False)
    return out


def test_a_quantized_checkpoint_is_decoded(quantized: Path) -> None:
    model = emptied(DENSE)
    bridge.load(model, quantized)
    stored = load_file(quantized / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    decoded = stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"].float()
    assert torch.equal(model.get_parameter(f"{name}.weight"), decoded.bfloat16())


def test_codes_go_where_the_model_has_parameters_of_them(quantized: Path) -> None:
    model, stored = emptied(DENSE), load_file(quantized / "model.safetensors")
    with pytest.raises(PlanError) as told:
        bridge.load(model, quantized, decode=False)
    assert "is bfloat16 in the model, float8_e4m3fn in the checkpoint" in str(told.value)
    assert "_proj.weight_scale: LlamaForCausalLM has no place for it" in str(told.value) and untouched(model)
    for name, tensor in stored.items():
        module, _, key = name.rpartition(".")
        setattr(model.get_submodule(module), key, torch.nn.Parameter(torch.zeros_like(tensor), requires_grad=False))
    bridge.load(model, quantized, decode=False)
    assert not [name for name, tensor in stored.items() if not torch.equal(model.get_parameter(name), tensor)]


def test_decoded_weights_are_not_cast_to_codes(quantized: Path) -> None:
    model = emptied(DENSE)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(PlanError, match=r"lm_head.weight: is float8_e4m3fn in the model, bfloat16 in the checkpoint"):
        bridge.load(model, quantized)


@pytest.mark.parametrize(("config", "target", "options"), [
    (LLAMA, "torchtitan", {"era": "0.2"}),  # heads in pairs
    (LLAMA, "megatron", {}),
    (LLAMA | OSS | {"architectures": ["GptOssForCausalLM"]}, "hf", {}),
])  # fmt: skip
def test_any_box_of_a_tensor_is_that_of_the_whole(config: dict[str, Any], target: str, options: dict[str, Any]) -> None:
    source = boxed_source(config)
    numbers = np.random.default_rng(5)
    for step in bridge.plan(source, target, "none", **options).steps:
        whole = filled(source, step, (0,) * len(step.outputs[0].spec.shape), step.outputs[0].spec.shape)
        shape = step.outputs[0].spec.shape
        for _ in range(4):
            begin = [int(numbers.integers(n)) for n in shape]
            size = [int(numbers.integers(1, n - at + 1)) for n, at in zip(shape, begin, strict=True)]
            part = filled(source, step, tuple(begin), tuple(size))
            where = tuple(slice(at, at + n) for at, n in zip(begin, size, strict=True))
            assert torch.equal(part, whole[where]), (step.outputs[0].spec.name, begin, size)


def boxed_source(config: dict[str, Any]) -> MadeSource:
    if "Llama" in config["architectures"][0]:
        return made(config)
    model = build("GptOssForCausalLM", torch.float32)
    arrays = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    specs = {name: TensorSpec(name, a.shape, "float32") for name, a in arrays.items()}
    return MadeSource(arrays, specs, model.config.to_dict() | {"architectures": ["GptOssForCausalLM"]})


def filled(source: Any, step: Any, offsets: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
    spec = step.outputs[0].spec
    part = Part(spec.name, torch.zeros(size), spec.shape, offsets)
    fill(part, settled(part, step, source.specs), Reader(source), Buffers())
    return part.tensor


def test_columns_are_read_alone_where_they_are_wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"intermediate_size": 4096, "num_hidden_layers": 1}
    saved(DENSE, tmp_path, **fields)
    source, name, read = open_source(tmp_path), "model.layers.0.mlp.down_proj.weight", 0
    whole, real = build(DENSE, **fields).state_dict()[name], os.preadv

    def counted(*args: Any) -> int:
        nonlocal read
        read += (count := real(*args))
        return count

    step = next(step for step in bridge.plan(source, "hf", "none").steps if step.source == name)
    part = Part(name, torch.zeros(60, 2048, dtype=torch.bfloat16), (60, 4096), (0, 2048))
    monkeypatch.setattr(os, "preadv", counted)
    fill(part, settled(part, step, source.specs), Reader(source), Buffers())
    assert torch.equal(part.tensor, whole[:, 2048:])
    assert read == part.tensor.nbytes
