"""Models in memory that cannot be taken as they are, and what a source builds for calibration."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bridge.core.errors import SourceError, UsageError
from bridge.sources.opening import open_source
from tests.sources.tiny_families import build


def refusal(model: object) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(model)
    return str(caught.value)


def test_module_that_is_no_transformers_model_is_refused() -> None:
    assert "Linear in memory: not a transformers model (it has no config)" in refusal(torch.nn.Linear(2, 3))


class FrozenDict(dict[str, Any]):
    """A config of another library; it has no `to_json_string`."""


class ModelMixin(torch.nn.Linear):
    """A module with a config, of no library that is known."""

    def __init__(self, **config: Any) -> None:
        super().__init__(2, 3)
        self.config = FrozenDict(config)

    def save_pretrained(self, directory: str) -> None:
        raise AssertionError


class DiffusionPipeline:
    """No torch module."""

    __module__ = "diffusers.pipelines"


def test_of_a_live_pipeline_one_model_is_asked_for() -> None:
    message = refusal(DiffusionPipeline())
    assert message.startswith("DiffusionPipeline in memory: a pipeline; give one of its models (pipeline.transformer")


def test_another_modules_config_is_no_transformers_model() -> None:
    assert "ModelMixin in memory: not a transformers model (its config is a FrozenDict)" in refusal(ModelMixin(width=3))


def test_wrapper_for_parallel_training_is_named() -> None:
    assert "or its `.module` if it is wrapped" in refusal(torch.nn.DataParallel(build("llama")))


def test_compiled_model_is_unwrapped() -> None:
    model = build("llama")
    source = open_source(torch.compile(model))
    assert source.load_model() is model
    assert source.where == "LlamaForCausalLM in memory"


def test_compiled_layers_have_the_names_and_tensors_of_plain_ones() -> None:
    plain, model = build("llama"), build("llama")
    layer = model.model.layers[1]
    model.model.layers[1] = compiled = torch.compile(layer)
    source = open_source(model)
    assert source.fingerprint == open_source(plain).fingerprint
    assert source.load_model().model.layers[1].mlp.up_proj.weight is layer.mlp.up_proj.weight
    assert model.model.layers[1] is compiled


def test_methods_and_hooks_of_a_wrapped_model_are_its_copys_own() -> None:
    model = build("llama")
    model.model.layers[1] = torch.compile(model.model.layers[1])
    model.forward = MethodType(type(model).forward, model)
    plain = open_source(model).load_model()
    assert plain.forward.__self__ is plain and model.forward.__self__ is model
    plain.model.layers[0].register_forward_hook(print)
    assert not model.model.layers[0]._forward_hooks


def test_a_forward_that_runs_the_wrapped_module_is_refused() -> None:
    model = build("llama")
    model.model.layers[1] = torch.compile(model.model.layers[1])
    model.model.layers[0].forward = functools.partial(type(model.model.layers[0]).forward, model.model.layers[0])
    assert "its forward was replaced by a function" in refusal(model)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def one_of_two_ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # a group whose other rank does not answer

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


def sharded(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_a_model_under_fsdp2_and_activation_checkpointing_is_the_plain_one_and_trains_on() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    plain, model, ids = build("llama"), build("llama"), torch.arange(8)[None]
    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ == "LlamaDecoderLayer")
    model = sharded(model)
    before = {name: type(module) for name, module in model.named_modules()}
    source = open_source(model)
    assert source.where == "LlamaForCausalLM in memory" and source.config == open_source(plain).config
    assert source.fingerprint == open_source(plain).fingerprint  # of every name and value
    assert torch.equal(source.load_model()(ids).logits, plain(ids).logits)
    held = model.model.embed_tokens.weight.to_local()
    assert source.load_model().model.embed_tokens.weight.data_ptr() == held.data_ptr()
    copy.deepcopy(source.load_model())  # which FSDP forbids, and calibration does
    assert {name: type(module) for name, module in model.named_modules()} == before
    model(ids).logits.sum().backward()
    assert model.model.embed_tokens.weight.grad is not None


@pytest.mark.slow
@pytest.mark.usefixtures("one_of_two_ranks")
def test_a_part_of_a_tensor_is_refused_with_how_to_gather_it() -> None:
    message = refusal(sharded(build("llama")))
    assert message.startswith("LlamaForCausalLM in memory: this rank holds only a part of")
    assert "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))" in message


def test_model_with_adapters_is_refused() -> None:
    model = build("llama")
    model.peft_config = {"default": object()}
    assert "has adapters; give peft's PeftModel, or the adapter's directory with base=" in refusal(model)


def test_model_with_modelopt_quantizers_is_refused() -> None:
    model = build("llama")
    model.model.layers[0].mlp.quantizer = type("TensorQuantizer", (torch.nn.Module,), {})()
    assert "is quantized by ModelOpt already; give the plain model" in refusal(model)


def test_model_with_a_quantizer_of_transformers_is_refused() -> None:
    model = build("llama")
    model.hf_quantizer = SimpleNamespace()
    assert "is quantized already (quantization_config)" in refusal(model)


def test_model_of_fp8_values_is_refused() -> None:
    model = build("llama")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to(torch.float8_e4m3fn), requires_grad=False)
    assert "already quantized (lm_head.weight: float8_e4m3fn values)" in refusal(model)


def test_model_of_complex_values_is_refused() -> None:
    model = build("llama")
    model.register_buffer("spectrum", torch.ones(3, dtype=torch.complex64))
    assert "spectrum: dtype complex64 is unknown" in refusal(model)


def test_offloaded_tensor_is_refused_when_read() -> None:
    model = build("llama")
    model.lm_head.weight = torch.nn.Parameter(torch.empty(97, 60, device="meta", dtype=torch.bfloat16))
    with pytest.raises(SourceError, match=r"lm_head\.weight: has no values.*give its directory instead"):
        open_source(model).read("lm_head.weight")


def test_fingerprint_follows_every_value() -> None:
    model = build("llama")
    first = open_source(model).fingerprint
    assert open_source(model).fingerprint == first
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1
    assert open_source(model).fingerprint != first


def test_model_is_handed_back_as_it_is() -> None:
    model = build("llama").train()
    source = open_source(model)
    assert source.load_model() is model
    assert model.training
    assert source.can_run


def test_contiguity_of_the_live_tensor_does_not_matter() -> None:
    model = build("llama", torch.float32)
    weight = model.lm_head.weight.detach()
    model.lm_head.weight = torch.nn.Parameter(weight.t().contiguous().t())
    assert np.array_equal(open_source(model).read("lm_head.weight"), weight.numpy())


def test_config_entries_of_the_caller_win() -> None:
    source = open_source(build("llama"), config={"max_position_embeddings": 64})
    assert source.config["max_position_embeddings"] == 64
    written = source.side_files["config.json"]
    assert isinstance(written, bytes)
    assert json.loads(written)["max_position_embeddings"] == 64


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")


def test_tokenizer_is_handed_back_and_carried() -> None:
    given = tokenizer()
    source = open_source(build("llama"), tokenizer=given)
    assert source.load_tokenizer() is given
    assert {"tokenizer.json", "tokenizer_config.json"} <= source.side_files.keys()


def test_model_in_memory_without_a_tokenizer_asks_for_one() -> None:
    with pytest.raises(UsageError, match="a model in memory has no tokenizer; give tokenizer="):
        open_source(build("llama")).load_tokenizer()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path)
    return tmp_path


def test_tokenizer_beside_the_weights_is_loaded(saved: Path) -> None:
    tokenizer().save_pretrained(saved)
    assert open_source(saved).load_tokenizer()("b")["input_ids"] == [1]


def test_tokenizer_of_another_directory_can_be_given(saved: Path, tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path / "words")
    assert open_source(saved, tokenizer=tmp_path / "words").load_tokenizer()("b")["input_ids"] == [1]


def test_directory_without_a_tokenizer_asks_for_one(saved: Path) -> None:
    with pytest.raises(SourceError, match="the checkpoint has no tokenizer; give tokenizer="):
        open_source(saved).load_tokenizer()


def test_weights_that_the_class_needs_and_the_checkpoint_lacks_are_an_error(saved: Path) -> None:
    state = load_file(saved / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(SourceError, match=r"needs model.layers.1.mlp.up_proj.weight, which the checkpoint lacks"):
        open_source(saved).load_model()


def test_unknown_architecture_names_the_nearest(saved: Path) -> None:
    source = open_source(saved, config={"architectures": ["LlamaForCasualLM"]})
    with pytest.raises(SourceError, match=r"LlamaForCasualLM is not in transformers .*nearest: LlamaForCausalLM"):
        source.load_model()


def test_code_of_the_checkpoint_is_not_run(saved: Path) -> None:
    (saved / "modeling.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoModelForCausalLM": "modeling.OwnForCausalLM"}
    source = open_source(saved, config={"architectures": ["OwnForCausalLM"], "auto_map": auto_map})
    with pytest.raises(SourceError, match=r"comes with its own code \(auto_map\), which is not run"):
        source.load_model()


def test_shapes_that_contradict_the_config_are_one_short_error(saved: Path) -> None:
    source = open_source(saved, config={"intermediate_size": 70})
    with pytest.raises(SourceError, match="transformers cannot build LlamaForCausalLM") as caught:
        source.load_model()
    assert len(str(caught.value)) < 600


def test_bin_loads_through_our_own_reader(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = load_file(saved / "model.safetensors")
    torch.save(state, saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    monkeypatch.setattr(torch, "load", None)
    loaded = open_source(saved).load_model().state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_loading_keeps_the_terminal_quiet(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    open_source(saved).load_model()
    assert capfd.readouterr() == ("", "")
