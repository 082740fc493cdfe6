"""`quantization_config` of checkpoints that are quantized already, against the same arithmetic in NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from safetensors.torch import save_file

from bridge.sources.opening import open_source
from bridge.sources.source import Source
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import VALUES, jsons
from tests.models.sources_made import CONFIG

FILE = "config.json"
MODULE = "model.layers.0.mlp.up_proj"
BLOCK = (4, 8)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
OTHERS: tuple[dict[str, Any], ...] = (
    {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "output_activations": None,
                "input_activations": None,
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "symmetric": True,
                    "strategy": "block",
                    "block_structure": [4, 8],
                    "group_size": None,
                    "dynamic": False,
                    "observer": "minmax",
                    "actorder": None,
                },
            }
        },
    },
    {
        "quant_method": "modelopt",
        "quant_algo": "FP8_PB_WO",
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.47"},
        "group_size": 128,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head*"],
    },
    {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "gptq", "bits": 4},
)


def make(root: Path) -> None:
    random = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 255, (10, 20), generator=random, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    scale = torch.rand((3, 3), generator=random) + 0.01
    tensors = {
        f"{MODULE}.weight": codes.view(torch.float8_e4m3fn),
        f"{MODULE}.weight_scale_inv": scale,
        "model.norm.weight": torch.ones(20),
    }
    save_file(tensors, root / "model.safetensors")
    (root / FILE).write_text(json.dumps(CONFIG | {"dtype": "float32", "quantization_config": FP8}))


def cases(root: Path) -> SearchStrategy[Case]:
    tree = json.loads((root / FILE).read_text())
    own = jsons(FP8, (*VALUES, "fp8", "compressed-tensors", [1, 1], [128, 128], [3, 20])).map(
        lambda section: json.dumps(tree | {"quantization_config": None}).encode().replace(b"null}", section + b"}")
    )
    others = st.sampled_from(OTHERS).flatmap(lambda section: jsons(tree | {"quantization_config": section}))
    modelopt = (
        st.sampled_from(OTHERS[1:2])
        .flatmap(lambda section: jsons({"quantization": section}))
        .map(lambda content: {"hf_quant_config.json": content})
    )
    return st.one_of(own.map(_config), own.map(_config), jsons(tree).map(_config), others.map(_config), modelopt)


def _config(content: bytes) -> Case:
    return {FILE: content}


def read(root: Path) -> tuple[Source, dict[str, np.ndarray]]:
    source = open_source(root)
    return source, {name: source.read(name) for name in source.specs}


def agree(root: Path, found: tuple[Source, dict[str, np.ndarray]]) -> None:
    source, arrays = found
    from safetensors import safe_open

    with safe_open(root / "model.safetensors", "pt") as file:
        codes = file.get_tensor(f"{MODULE}.weight").view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
        scale = file.get_tensor(f"{MODULE}.weight_scale_inv").numpy()
    assert set(arrays) == {f"{MODULE}.weight", "model.norm.weight"}
    rows, columns = json.loads((root / FILE).read_bytes())["quantization_config"].get("weight_block_size", BLOCK)
    wide = np.repeat(np.repeat(scale, rows, 0), columns, 1)[: codes.shape[0], : codes.shape[1]]
    if source.specs[f"{MODULE}.weight"].dtype == "float32":
        assert np.array_equal(arrays[f"{MODULE}.weight"], codes.astype(np.float32) * wide)


TARGET = Target("quantized", make, cases, read, agree, FILE)
