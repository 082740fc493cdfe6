"""A live GPTModel of every family is converted, quantized and, in place, pruned as its checkpoint is."""

from __future__ import annotations

import functools
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("megatron.core")

import bridge
from bridge.quant.schemes.load import load_scheme
from bridge.sources.opening import open_source
from tests.models.megatron_families import EVERY, PADDED, VOCAB
from tests.oracles import megatron_oracle, megatron_process, nemo_process

random = np.random.default_rng(3)
IDS = [random.integers(0, VOCAB, (rows, 40)) for rows in (5, 4, 3)]
FAMILIES = [name for name in EVERY if not EVERY[name].gemma]
CUTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((name, {"drop_layers": [2]}, {"drop_layers": [1]}) for name in FAMILIES),
    ("llama", {"target_ffn_hidden_size": 40}, {"keep": {"ffn": 40}}),
    ("llama-rope", {"target_ffn_hidden_size": 40}, {"keep": {"ffn": 40}}),  # its scaling is in no field of the model
    ("gpt", {"target_ffn_hidden_size": 40}, {"keep": {"ffn": 40}}),
    ("mixtral", {"target_hidden_size": 36}, {"keep": {"hidden": 36}}),
    ("llama", {"target_hidden_size": 36, "target_num_layers": 2}, {"keep": {"hidden": 36, "layers": 2}}),
    (
        "llama",
        {"target_num_attention_heads": 4, "target_num_query_groups": 2},
        {"keep": {"heads": 4, "kv_heads": 2}},
    ),
    (
        "llama",
        {"target_num_attention_heads": 3, "target_num_query_groups": 1, "target_num_layers": 1},
        {"keep": {"heads": 3, "kv_heads": 1, "layers": 1}},
    ),
]


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = str(tmp_path_factory.mktemp("gloo") / "store")
    with ProcessPoolExecutor(1, megatron_oracle.processes(), megatron_process.start, (0, 1, 1, store)) as pool:
        yield pool


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda name: megatron_oracle.family(name).save(root / name))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config", "cut"), CUTS)
def test_a_live_model_becomes_the_pruned_one_in_place(
    name: str, config: dict[str, Any], cut: dict[str, Any], child: Any, directory: Any
) -> None:
    logits, sizes = child.submit(nemo_process.pruned, name, config, IDS).result()
    data = [{"input_ids": torch.from_numpy(ids)} for ids in IDS]
    whole = open_source(directory(name), EVERY[name].hf)
    smaller = bridge.pruned(whole, **cut, data=data, importance="minitron", order="importance")
    with torch.no_grad():
        wanted = smaller.load_model().float()(torch.from_numpy(IDS[0])).logits
    np.testing.assert_allclose(logits, wanted, atol=1e-4)
    given = {field.removeprefix("target_"): size for field, size in config.items() if field != "drop_layers"}
    assert given.items() <= sizes.items()
    assert sizes["kv_channels"] == EVERY[name].config["kv_channels"] and sizes["perform_initialization"]
    if isinstance(sizes["moe_layer_freq"], list):
        assert len(sizes["moe_layer_freq"]) == sizes["num_layers"]


@pytest.mark.slow
def test_a_live_model_that_cannot_be_rebuilt_stays_as_it_is(child: Any) -> None:
    messages = child.submit(nemo_process.refused, "llama").result()
    assert "forward hooks on embedding" in messages["hook"]
    assert "tensor_model_parallel_size is 2" in messages["split"]
    assert "range 1 to 3, got [99]" in messages["layers"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_live_model_converts_to_what_answers_as_it_does(name: str, child: Any, tmp_path: Path) -> None:
    ids, logits = child.submit(nemo_process.converted, name, str(tmp_path / "out")).result()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        np.testing.assert_allclose(model(torch.from_numpy(ids)).logits, logits, atol=1e-4)


@pytest.mark.slow
def test_nemos_quantizer_writes_of_a_live_model_what_its_checkpoint_gives(
    child: Any, directory: Any, tmp_path: Path
) -> None:
    """The tokens that its `forward_loop` runs calibrate, those of a step from a cache excepted."""
    did = child.submit(nemo_process.quantized, "llama", str(tmp_path / "live")).result()
    assert (did["ran"], did["same"], did["passed"]) == (3, True, True)
    source, scheme = open_source(directory("llama"), {"vocab_size": PADDED}), load_scheme("fp8")

    def loop(model: Any) -> None:
        for row in torch.from_numpy(did["ids"]):
            model(input_ids=row[None])

    calibration = bridge.calibrate(source, scheme, loop)
    bridge.convert(source, "hf", scheme, tmp_path / "stored", calib=calibration, dtype="bf16", progress=False)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "live" / file).read_bytes() == (tmp_path / "stored" / file).read_bytes()


@pytest.mark.slow
def test_a_live_model_that_is_split_is_refused_by_every_verb(child: Any) -> None:
    told = child.submit(nemo_process.split, "llama").result()
    assert told.startswith(
        "SourceError: GPTModel in memory: tensor_model_parallel_size is 2: only a model that is whole"
    )
