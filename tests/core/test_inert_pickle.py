"""Configuration in pickles as data: what Megatron and ModelOpt put into `common.pt`, without their code."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bridge.core.files.span import span_of
from bridge.core.formats.inert_pickle import Record, inert
from bridge.core.formats.torch_file import Saved, open_saved
from bridge.core.formats.unpickle import load_bytes


class Backend(enum.Enum):
    FUSED = 5


@dataclasses.dataclass
class Config:
    layers: int = 3
    activation: Any = torch.nn.functional.silu
    dtype: Any = torch.bfloat16
    backend: Backend = Backend.FUSED
    init: Any = dataclasses.field(default_factory=lambda: functools.partial(torch.nn.init.normal_, std=0.02))


def opened(path: Path, value: object) -> Saved:
    torch.save(value, path)
    return open_saved(span_of(path), inert())


def test_arguments_are_a_mapping(tmp_path: Path) -> None:
    value = opened(
        tmp_path / "common.pt", {"args": argparse.Namespace(num_layers=3, swiglu=True), "iteration": 7}
    ).value
    assert value["iteration"] == 7
    assert value["args"].kind == "argparse.Namespace"
    assert dict(value["args"]) == {"num_layers": 3, "swiglu": True}


def test_classes_functions_and_enums_are_named(tmp_path: Path) -> None:
    config = opened(tmp_path / "common.pt", Config()).value
    assert isinstance(config, Record) and config.kind.endswith(".Config")
    assert config["layers"] == 3
    assert config["activation"].kind == "torch.nn.functional.silu"
    assert config["dtype"].dtype == "bfloat16"
    assert config["backend"].args == (5,)
    assert config["init"].kind == "functools.partial"


def test_mappings_of_other_classes_keep_their_items(tmp_path: Path) -> None:
    value = {"a": collections.defaultdict(list, {"x": [1]}), "b": collections.OrderedDict(y=2), "c": slice(1, 2)}
    found = opened(tmp_path / "common.pt", value).value
    assert (found["a"]["x"], found["b"]["y"], found["c"].args) == ([1], 2, (1, 2, None))


def test_tensors_inside_are_read_in_place_and_may_be_files_again(tmp_path: Path) -> None:
    """ModelOpt keeps its quantizers' state so: the bytes of a tensor are a file of torch.save."""
    inner = io.BytesIO()
    torch.save({"modelopt_quantizer_state": {"weight_quantizer": {"_num_bits": (4, 3), "_axis": None}}}, inner)
    saved = opened(tmp_path / "extra", [torch.frombuffer(bytearray(inner.getvalue()), dtype=torch.uint8)])
    extent = saved.extent(saved.value[0])
    again = open_saved(extent.span.part(extent.offset, extent.shape[0]), inert())
    assert again.value["modelopt_quantizer_state"]["weight_quantizer"]["_num_bits"] == (4, 3)


def test_bytes_of_old_protocols_and_streams_are_bytes() -> None:
    for protocol in (2, 4):
        value, _ = load_bytes(pickle.dumps({"raw": b"\x00\xff", "stream": io.BytesIO(b"abc")}, protocol), inert())
        assert value["raw"] == b"\x00\xff"
        assert value["stream"].state[0] == b"abc"


def test_numpy_values_are_records(tmp_path: Path) -> None:
    found = opened(tmp_path / "common.pt", {"n": np.float32(3), "rng": np.arange(3)}).value
    assert isinstance(found["n"], Record) and isinstance(found["rng"], Record)
