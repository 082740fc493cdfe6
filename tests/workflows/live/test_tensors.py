"""A model in memory as the tensors that a server loads: the bytes of `convert`, planned once, read anew each time."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
import tracemalloc
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import bridge
from bridge.api import plans
from bridge.core import arrays
from bridge.core.errors import CalibrationError, LiveError, SchemeError, SourceError, UsageError
from bridge.planning import memory
from bridge.workflows.live import encoding, sharded, verbs
from tests.covering import grid
from tests.models.decoder_families import build
from tests.oracles import sglang_oracle
from tests.workflows.live.families import FIELDS, SCHEMES


def made(family: str = "LlamaForCausalLM", dtype: torch.dtype = torch.bfloat16) -> Any:
    return build(family, dtype, **FIELDS[family])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def written(model: Any, out: Path, scheme: str | None, **options: Any) -> dict[str, torch.Tensor]:
    bridge.convert(model, "vllm", scheme, out, verify=False, **options)
    return load_file(out / "model.safetensors")


@grid(
    {"family": [*FIELDS], "scheme": SCHEMES},
    fast=[("LlamaForCausalLM", "nvfp4_wo"), ("Qwen3MoeForCausalLM", "fp8_block")],
)
def test_every_tensor_is_the_one_that_convert_writes(family: str, scheme: str | None, tmp_path: Path) -> None:
    model = made(family)
    source = bridge.tensors(model, "vllm", scheme)
    wanted = written(model, tmp_path / "out", scheme)
    seen = 0
    for meta, (name, tensor) in zip(source.metadata, source, strict=True):
        assert (name, tensor.dtype, tuple(tensor.shape)) == (meta.name, getattr(torch, meta.dtype), meta.shape)
        assert tensor.nbytes == meta.nbytes
        assert torch.equal(bits(tensor), bits(wanted[name])), name
        seen += 1
    assert seen == len(wanted) == len(source)
    assert source.digest() == bridge.live.digest(tmp_path / "out")
    assert source.config == _config(tmp_path / "out").get("quantization_config", {})
    assert source.files["config.json"] == (tmp_path / "out/config.json").read_bytes()


def _config(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "config.json").read_text())
    return content


def test_an_iteration_reads_the_weights_as_they_are_then(tmp_path: Path) -> None:
    model = made(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    source = bridge.tensors(model, "vllm", "fp8_pc_pt")
    before = source.digest()
    assert source.digest() == before
    model(torch.arange(8)[None]).logits.square().mean().backward()
    optimizer.step()
    after = source.digest()
    written(model, tmp_path / "out", "fp8_pc_pt")
    assert after != before and after == bridge.live.digest(tmp_path / "out")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)  # another tensor in its place
    assert source.digest() != after


def test_a_second_iteration_plans_imports_and_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "cores", lambda: 1)  # of several threads each keeps the largest buffers it needed
    source = bridge.tensors(made(), "vllm", "nvfp4_wo")
    first = source.digest()
    calls: list[str] = []

    def counting(what: str, function: Any) -> Any:
        def called(*args: Any, **named: Any) -> Any:
            calls.append(what)
            return function(*args, **named)

        return called

    modules = set(sys.modules)
    monkeypatch.setattr(plans, "make_plan", counting("plan", plans.make_plan))
    monkeypatch.setattr(arrays, "aligned_empty", counting("buffer", arrays.aligned_empty))
    assert source.digest() == first
    assert not calls and set(sys.modules) == modules


def test_what_is_held_stays_within_the_memory_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "cores", lambda: 1)
    monkeypatch.setattr(memory, "PIECE", 1 << 16)  # so that tensors of 64 KB and more are what takes memory
    monkeypatch.setattr(arrays, "MIN_BUFFER", 1)
    model = build("LlamaForCausalLM", torch.bfloat16, **FIELDS["LlamaForCausalLM"] | {"num_hidden_layers": 8})
    with pytest.raises(UsageError, match=r"memory=100 kB is too little: .*; give at least \d+ bytes") as e:
        bridge.tensors(model, "vllm", "fp8_pc_pt", memory="100kB")
    least = int(str(e.value).split()[-2])
    bridge.tensors(model, "vllm", "fp8_pc_pt").digest()  # what is imported and kept is not counted
    assert most_allocated(bridge.tensors(model, "vllm", "fp8_pc_pt", memory=least)) <= least
    assert most_allocated(bridge.tensors(model, "vllm", "fp8_pc_pt")) > least


def most_allocated(source: Any) -> int:
    """The most bytes that Python and NumPy hold during an iteration, beyond those before it."""
    for _ in source:
        break
    tracemalloc.start()
    try:
        for _ in source:
            time.sleep(0.005)  # steps that may run ahead do
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_abandoned_iteration_leaves_the_next_one_whole() -> None:
    source = bridge.tensors(made(), "vllm", "int8_wo")
    whole = source.digest()
    for _ in source:
        break
    assert source.digest() == whole


def test_a_number_that_is_not_finite_is_named_and_ends_the_iteration() -> None:
    model = made()
    source = bridge.tensors(model, "vllm", "fp8_pc_pt")
    good = source.digest()
    name = "model.layers.1.mlp.up_proj.weight"
    kept = model.get_parameter(name).data[3, 5].item()
    model.get_parameter(name).data[3, 5] = float("nan")
    with pytest.raises(SourceError, match=f"{name}: holds NaN or infinity|{name}.*NaN"):
        source.digest()
    model.get_parameter(name).data[3, 5] = kept
    assert source.digest() == good


def test_a_model_that_changed_since_it_was_planned_is_refused() -> None:
    model = made()
    source = bridge.tensors(model, "vllm", "fp8_pc_pt")
    model.resize_token_embeddings(321)
    with pytest.raises(LiveError, match=r"embed_tokens.weight.*: had shape \(320, 256\) when it was planned"):
        source.digest()
    model = made()
    source = bridge.tensors(model, "vllm", "fp8_pc_pt")
    model.half()
    with pytest.raises(LiveError, match=r"had dtype torch.bfloat16 when it was planned, and has torch.float16"):
        source.digest()
    model = made()
    source = bridge.tensors(model, "vllm", "fp8_pc_pt")
    del model.model.layers[1]
    with pytest.raises(LiveError, match=r"model.layers.1.*was in the model when it was planned, and is not any more"):
        source.digest()
    model = made()
    source = bridge.tensors(model, "vllm", "fp8_pc_pt")
    model.lm_head.to("meta")
    with pytest.raises(LiveError, match=r"lm_head.weight: has no values"):
        source.digest()


@pytest.mark.slow
def test_a_scheme_that_needs_data_is_refused_and_those_without_are_named() -> None:
    with pytest.raises(CalibrationError, match=r"quant='fp8' needs statistics of activations.*fp8_pc_pt"):
        bridge.tensors(made(), "vllm", "fp8")
    with pytest.raises(CalibrationError, match="with kv='fp8' needs statistics"):
        bridge.tensors(made(), "vllm", "fp8_pc_pt", kv="fp8")
    assert bridge.tensors(made(), "vllm", "fp8_pc_pt", kv="fp8_cast").config


def test_no_scheme_is_promised_where_none_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise SchemeError("none")

    monkeypatch.setattr(verbs, "plan_of", refused)
    with pytest.raises(CalibrationError, match=r"'fp8'\); every scheme that fits needs some$"):
        bridge.tensors(made(), "vllm", "fp8")


def test_a_torch_without_ranks_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "is_initialized")
    assert not sharded.is_sharded(torch.nn.Linear(2, 2))


@pytest.mark.slow
def test_a_calibration_gives_static_scales(tmp_path: Path) -> None:
    model = made()
    saved = tmp_path / "fp8.safetensors"
    batches = [
        {"input_ids": torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(n))} for n in (1, 2)
    ]
    bridge.calibrate(model, "fp8", batches).save(saved)
    source = bridge.tensors(model, "vllm", "fp8", calib=saved)
    written(model, tmp_path / "out", "fp8", calib=saved)
    assert source.digest() == bridge.live.digest(tmp_path / "out")


def test_what_no_server_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    with pytest.raises(SchemeError, match="loads no output of scheme q4_k"):
        bridge.tensors(model, "vllm", "q4_k")
    with pytest.raises(UsageError, match="writes no checkpoint that a server loads tensor by tensor"):
        bridge.tensors(model, "gguf", "q8_0")
    with pytest.raises(UsageError, match="not a transformers model in memory"):
        bridge.tensors("examples/models/tiny-llama", "vllm", "fp8_pc_pt")
    for measured in ("auto:4.8bits", "int4:best"):
        with pytest.raises(UsageError, match="measures the model first"):
            bridge.tensors(model, "vllm", measured)
    monkeypatch.setitem(sys.modules, "peft", types.SimpleNamespace(PeftModel=type(model)))
    with pytest.raises(SourceError, match="its adapter is not merged"):
        bridge.tensors(model, "vllm", "fp8_pc_pt")


def test_buckets_hold_every_tensor_once_and_no_more_than_they_may() -> None:
    source = bridge.tensors(made(), "sglang", "fp8_pc_pt")
    whole, seen = dict(source), []
    for bucket in bridge.live.sglang(source, bucket="300KB"):
        request = bucket.names()
        assert sum(tensor.nbytes for _, tensor in bucket.tensors) <= 300_000 or len(bucket.tensors) == 1
        at = 0
        for name, dtype, shape in zip(*request.values(), strict=True):
            assert at % getattr(torch, dtype).itemsize == 0, "SGLang refuses unaligned tensors"
            assert list(whole[name].shape) == shape
            at += whole[name].nbytes
        seen += request["names"]
    assert sorted(seen) == sorted(whole) and len(seen) == len(whole)


def test_sglang_takes_its_tensors_out_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang_oracle.require()
    name = "sglang.srt.weight_sync.tensor_bucket"
    path = sglang_oracle.PACKAGES / name.replace(".", "/")
    spec = importlib.util.spec_from_file_location(name, path.with_suffix(".py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    for package in ("sglang", "sglang.srt", "sglang.srt.weight_sync"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    source = bridge.tensors(made(), "sglang", "nvfp4_wo")
    got: dict[str, torch.Tensor] = {}
    for bucket in bridge.live.sglang(source, bucket="200KB"):
        got |= dict(module.FlattenedTensorBucket(**bucket.flattened()).reconstruct_tensors())
        empty = module.FlattenedTensorBucket.empty(
            *bucket.names().values(), "cpu"
        )  # of update_weights_from_distributed
        assert empty.flattened_tensor.shape == bucket.flattened()["flattened_tensor"].shape
    for name, tensor in source:
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(got.pop(name)), bits(tensor))
    assert not got
