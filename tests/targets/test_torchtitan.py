"""Target `torchtitan`: tensors of torchtitan's own adapters, loaded by torch's own checkpoint code; what is refused."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import bridge
from bridge.budget import working_set
from bridge.conversion import Conversion
from bridge.errors import PlanError, SchemeError, SourceError, UsageError, VerifyError
from bridge.making import Maker
from bridge.output import Work
from bridge.sources import open_source
from bridge.values import TensorSpec
from tests import torchtitan_oracle
from tests.sources.dcp_saves import bits
from tests.sources_made import MadeSource
from tests.tables import foreign
from tests.tables.checkpoints import headers
from tests.test_faults import VICTIM
from tests.test_imports import FRAMEWORKS, MODEL, command, loaded
from tests.torchtitan_families import CONFIGS

LLAMA = foreign.CONFIGS["llama"] | {"rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 64}
LLAMA |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "tie_word_embeddings": False}


def made(config: dict[str, Any], dtype: str = "float32") -> MadeSource:
    """A checkpoint of random tensors for a config."""
    rng, specs = np.random.default_rng(3), headers(config)
    arrays = {name: rng.normal(size=spec.shape).astype("float32") for name, spec in specs.items()}
    if dtype == "bfloat16":
        arrays = {name: bits(torch.from_numpy(array).bfloat16()) for name, array in arrays.items()}
    return MadeSource(arrays, {n: TensorSpec(n, s.shape, dtype) for n, s in specs.items()}, config)


def of_hf(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> MadeSource:
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    return MadeSource(arrays, {n: TensorSpec(n, a.shape, str(a.dtype)) for n, a in arrays.items()}, config)


def read_by_torch(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor, loaded by torch into room of the size that its index says."""
    described = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    state = {
        name: torch.full(entry.size, 3, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    return state


@pytest.mark.slow
@pytest.mark.parametrize("era", torchtitan_oracle.ERAS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_is_torchtitans_own(name: str, era: str, tmp_path: Path) -> None:
    known = torchtitan_oracle.family(name, era)
    report = bridge.convert(of_hf(known.hf, known.config_hf), "torchtitan", out=tmp_path / "out", era=era)
    written = {key: tensor.numpy() for key, tensor in read_by_torch(tmp_path / "out").items()}
    native = {key: array for key, array in known.native.items() if "qwen3" not in name or "expert_bias" not in key}
    assert written.keys() == native.keys()
    assert all(np.array_equal(written[key], array) for key, array in native.items())
    assert not report.findings and report.passed


@pytest.mark.parametrize("era", torchtitan_oracle.ERAS)
@pytest.mark.parametrize("case", ["llama", "llama-mqa", "llama-tied", "qwen3", "qwen3-moe", "deepseek"])
def test_every_tensor_is_what_torchtitan_documents(case: str, era: str, tmp_path: Path) -> None:
    source = made(LLAMA | foreign.CONFIGS[case])
    bridge.convert(source, "torchtitan", out=tmp_path / "out", era=era)
    head = {"lm_head.weight": source.arrays["model.embed_tokens.weight"]}  # torchtitan saves a tied one, too
    written, expected = read_by_torch(tmp_path / "out"), foreign.torchtitan(case, head | source.arrays, era == "0.2")
    assert written.keys() == expected.keys()
    assert all(np.array_equal(written[name].numpy(), array) for name, array in expected.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_own_reader_gives_the_source_back_to_the_bit(dtype: str, tmp_path: Path) -> None:
    source = made(LLAMA, dtype)
    bridge.convert(source, "torchtitan", out=tmp_path / "out")
    back = open_source(tmp_path / "out")
    assert back.specs.keys() == source.specs.keys()
    assert all(np.array_equal(back.read(name), array) for name, array in source.arrays.items())


def test_another_dtype_is_rounded_to_once(tmp_path: Path) -> None:
    source = made(LLAMA)
    bridge.convert(source, "torchtitan", out=tmp_path / "out", dtype="bf16")
    head = read_by_torch(tmp_path / "out")["lm_head.weight"]
    assert torch.equal(head, torch.from_numpy(source.arrays["lm_head.weight"]).bfloat16())
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def test_bytes_do_not_depend_on_the_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    for cores in (1, 3):
        monkeypatch.setattr("bridge.stream.cores", lambda cores=cores: cores)
        out = tmp_path / f"out{cores}"
        bridge.convert(made(LLAMA), "torchtitan", out=out, verify=False)
        written.append([(out / name).read_bytes() for name in ("__0_0.distcp", ".metadata")])
    assert written[0] == written[1]


def test_reordered_rows_stay_in_the_memory_that_the_plan_says() -> None:
    """Heads of 4 MB: a piece is a head then, not a megabyte."""
    config = LLAMA | {"hidden_size": 8192, "head_dim": 128, "num_attention_heads": 4, "intermediate_size": 72}
    specs = headers(config | {"num_hidden_layers": 1})
    arrays = {name: np.ones(spec.shape, np.float32) for name, spec in specs.items()}
    source = of_hf(arrays, config | {"num_hidden_layers": 1})
    plan = bridge.plan(source, "torchtitan")
    (step,) = (step for step in plan.steps if step.outputs[0].spec.name.endswith("wq.weight"))
    conversion = Conversion(plan, source, None, None, 1, Work(Path(), {}, io.StringIO()))
    Maker(conversion).make(step, None, lambda output, array, at: None)  # compiles
    tracemalloc.start()
    Maker(conversion).make(step, None, lambda output, array, at: None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= working_set(step, plan.sources) + 100_000


@pytest.mark.parametrize("calls", [20, 90, 125])
@pytest.mark.parametrize("target", ["torchtitan", "megatron"])
def test_a_killed_run_goes_on_to_the_bytes_of_one_that_nobody_disturbed(
    target: str, calls: int, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    killed = [sys.executable, "-c", VICTIM, str(MODEL), str(out), str(calls), target, "none"]
    assert subprocess.run(killed, timeout=120).returncode == -signal.SIGKILL
    assert not out.exists() and (tmp_path / ".out.partial").exists()
    for directory in (out, tmp_path / "other"):
        bridge.convert(MODEL, target, out=directory, verify=False)
    files = [path.name for path in out.iterdir() if path.suffix in (".distcp", ".metadata", ".pt", ".yaml")]
    assert files and all((out / name).read_bytes() == (tmp_path / "other" / name).read_bytes() for name in files)


@pytest.mark.parametrize(
    ("config", "arguments", "error", "says"),
    [
        (LLAMA, {"quant": "fp8"}, SchemeError, "torchtitan loads plain weights only; convert without quant"),
        (LLAMA, {"era": "0.1"}, UsageError, "era '0.1' is unknown; known: 0.3, 0.2"),
        (LLAMA, {"dtype": "int8"}, UsageError, "dtype 'int8' is none that weights are trained in"),
        (foreign.CONFIGS["gemma"], {}, PlanError, "torchtitan.toml has no layout for GemmaForCausalLM"),
        (LLAMA | {"attention_bias": True}, {}, PlanError, "the models of torchtitan have no biases"),
    ],
)
def test_what_does_not_fit_is_told_before_any_weight_is_read(
    config: dict[str, Any], arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    source = made(config)
    source.broken = frozenset(source.specs)
    with pytest.raises(error) as told:
        bridge.plan(source, "torchtitan", **arguments)
    assert says in str(told.value)


def test_a_stack_of_mixed_experts_is_told() -> None:
    source = made(LLAMA | foreign.CONFIGS["qwen3-moe"])
    name = next(name for name in source.specs if name.endswith("experts.2.up_proj.weight"))
    source.specs = {**source.specs, name: TensorSpec(name, source.specs[name].shape, "float16")}
    with pytest.raises(PlanError, match=r"w3_EFD: is one tensor here, but its parts are float16 and float32"):
        bridge.plan(source, "torchtitan")


@pytest.mark.parametrize("damage", ["index", "items", "lost"])
def test_a_damaged_directory_is_found(damage: str, tmp_path: Path) -> None:
    source, out = made(LLAMA), tmp_path / "out"
    bridge.convert(source, "torchtitan", out=out)
    assert bridge.verify(out, against=source).passed
    file = out / "__0_0.distcp"
    if damage == "index":
        (out / ".metadata").unlink()
    elif damage == "items":
        with file.open("r+b") as stream:
            stream.write(b"\0" * 400)
    else:
        file.unlink()
    with pytest.raises((SourceError, VerifyError)):
        bridge.verify(out, against=source)


def test_a_changed_weight_is_found(tmp_path: Path) -> None:
    source, out = made(LLAMA), tmp_path / "out"
    bridge.convert(source, "torchtitan", out=out)
    content = bytearray((out / "__0_0.distcp").read_bytes())
    at = content.find(source.arrays["model.norm.weight"].tobytes())
    content[at + 9] ^= 1
    (out / "__0_0.distcp").write_bytes(content)
    report = bridge.verify(out, against=source)
    assert [row.name for row in report.parity.tensors if not row.passed] == ["__0_0.distcp: norm.weight"]


@pytest.mark.parametrize("target", ["torchtitan", "megatron"])
def test_converting_loads_no_framework(target: str, tmp_path: Path) -> None:
    words = ("convert", str(MODEL), "--target", target, "--out", str(tmp_path / "out"))
    assert not loaded(command(*words)) & (FRAMEWORKS - {"numba"})
