"""An adapter's directory in every verb: merged by rows in bounded memory, resolved from what it names."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import bridge
from bridge.sources.adapted.source import BLOCK, LEAST
from bridge.sources.opening import open_source
from bridge.tracker.tensors import tensors_in
from tests.models.tiny_adapters import MODEL, factors, write_adapter

NAME = "model.layers.1.mlp.down_proj.weight"


def merged(name: str) -> np.ndarray:
    """The weight as float32 of the plain formula, from the files."""
    state, base = factors(), open_source(MODEL)
    key = f"base_model.model.{name.removesuffix('.weight')}"
    weight = torch.from_numpy(base.read(name).copy()).view(getattr(torch, base.specs[name].dtype)).float().numpy()
    return weight + 2 * state[f"{key}.lora_B.weight"] @ state[f"{key}.lora_A.weight"]


def values(source: Any, name: str) -> np.ndarray:
    return torch.from_numpy(source.read(name).copy()).view(getattr(torch, source.specs[name].dtype)).float().numpy()


def test_a_converted_adapter_has_the_merged_weights(tmp_path: Path) -> None:
    report = bridge.convert(write_adapter(tmp_path / "tuned"), "hf", out=tmp_path / "out")
    assert report.passed
    np.testing.assert_allclose(values(open_source(tmp_path / "out"), NAME), merged(NAME), rtol=8e-3, atol=1e-4)
    assert any("LoRA of rank 4, alpha 8, merged into 10 tensors" in note for note in report.notes)


def test_verify_and_plan_take_the_adapter(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "tuned", {"base_model_name_or_path": "lost"})
    bridge.convert(adapter, "hf", "int8_wo", tmp_path / "out", base=MODEL, verify=False)
    assert bridge.verify(tmp_path / "out", adapter, base=MODEL).passed
    with pytest.raises(bridge.BridgeError):
        bridge.verify(tmp_path / "out", adapter)
    plan = bridge.plan(adapter, "hf", "int8_wo", base=MODEL)
    assert plan.sources == bridge.plan(MODEL, "hf", "int8_wo").sources


def test_another_adapter_over_the_same_base_fails_verification(tmp_path: Path) -> None:
    bridge.convert(write_adapter(tmp_path / "tuned"), "hf", out=tmp_path / "out", verify=False)
    other = write_adapter(tmp_path / "other", None, factors(scale=0.3))
    assert not bridge.verify(tmp_path / "out", other).passed


def test_a_base_is_found_relative_to_its_adapter(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "base")
    adapter = write_adapter(tmp_path / "tuned", {"base_model_name_or_path": "../base"})
    assert open_source(adapter).name == "tuned"


def test_a_pickled_adapter_has_the_same_values(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "tuned")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(adapter / "adapter_config.json", pickled)
    state = load_file(adapter / "adapter_model.safetensors")
    torch.save({name: torch.from_numpy(value) for name, value in state.items()}, pickled / "adapter_model.bin")
    assert np.array_equal(open_source(pickled).read(NAME), open_source(adapter).read(NAME))


def test_the_adapters_tokenizer_goes_before_the_bases(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "tuned")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, adapter)
    config = json.loads((adapter / "tokenizer_config.json").read_text())
    (adapter / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ 'hello' }}"}))
    source = open_source(adapter)
    assert source.load_tokenizer().chat_template == "{{ 'hello' }}"
    bridge.convert(adapter, "hf", out=tmp_path / "out", verify=False)
    assert "hello" in (tmp_path / "out" / "tokenizer_config.json").read_text()


def test_the_fingerprint_changes_with_the_adapter(tmp_path: Path) -> None:
    one, other = write_adapter(tmp_path / "one"), write_adapter(tmp_path / "other", {"lora_alpha": 9})
    assert open_source(one).fingerprint != open_source(other).fingerprint != open_source(MODEL).fingerprint


class Largest(TorchDispatchMode):  # type: ignore[misc]
    """The bytes of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        own = [tensor.numel() * tensor.element_size() for tensor in tensors_in(result)]
        self.bytes = max(self.bytes, *own, 0)
        return result


def test_a_merge_holds_a_block_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    adapter = write_adapter(tmp_path / "tuned", {"target_modules": ["up_proj"]}, factors(modules=("up_proj",)))
    source = open_source(adapter)
    rows, inputs = source.specs[name].shape
    assert rows > BLOCK + LEAST
    read: list[int] = []
    own = source.base.read_rows

    def read_rows(name: str, begin: int, end: int, out: Any = None) -> Any:
        read.append(end - begin)
        return own(name, begin, end, out)

    monkeypatch.setattr(source.base, "read_rows", read_rows)
    monkeypatch.setattr(source.base, "read", lambda name: pytest.fail(f"{name} was read whole"))
    with Largest() as largest:
        source.read_rows(name, 10, 20)
    assert read == [BLOCK]
    assert largest.bytes <= 4 * BLOCK * inputs
    source.read(name)
    assert sum(read) == rows  # each thread keeps its last block


def test_torch_has_its_threads_afterwards(tmp_path: Path) -> None:
    write_adapter(tmp_path / "tuned")
    counts: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        source = open_source(tmp_path / "tuned")
        for work in (lambda: source.read(NAME), lambda: counts.append(torch.get_num_threads())):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert [*counts, torch.get_num_threads()] == [3, 3]
    finally:
        torch.set_num_threads(before)


def test_a_plan_counts_the_memory_of_merging(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "tuned")
    more = bridge.plan(adapter, "hf").memory - bridge.plan(MODEL, "hf").memory
    assert more == 2 * 12 * 128 * 384


def test_rows_of_a_batch_with_adapters_over_one_base(tmp_path: Path) -> None:
    write_adapter(tmp_path / "one", {"base_model_name_or_path": "lost"})
    write_adapter(tmp_path / "two", {"base_model_name_or_path": "lost"}, factors(scale=0.03))
    (tmp_path / "batch.toml").write_text(
        f'[defaults]\ntarget = "hf"\nquant = "int8_wo"\nbase = "{MODEL}"\nverify = false\n'
        '[[row]]\nmodel = "one"\n[[row]]\nmodel = "two"\n[[row]]\nmodel = "two"\nname = "kept"\nadapter = "keep"\n'
    )
    report = bridge.batch(tmp_path / "batch.toml", workers=1)
    assert report.passed, report
    outs = [open_source(tmp_path / name) for name in ("one-int8_wo-hf", "two-int8_wo-hf", "kept")]
    assert not any(np.array_equal(a.read(NAME), b.read(NAME)) for a, b in itertools.pairwise(outs))
    assert (tmp_path / "kept" / "adapter" / "adapter_model.safetensors").is_file()
