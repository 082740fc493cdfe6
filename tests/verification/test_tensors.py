"""Verify sees each single thing that can be wrong in a written model, and names the tensor."""

from __future__ import annotations

import copy
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.output.names import CALIBRATION
from bridge.planning.memory import working_set
from bridge.quant.calibration import Calibration, Provenance
from bridge.quant.schemes.load import load_scheme
from bridge.sources.opening import open_source
from bridge.targets.manifest import load_manifest
from bridge.verification.tensors import tensor_parity
from tests.covering import grid
from tests.models.sources_made import MadeSource, made_llama

PROVENANCE = Provenance("", "", "", "", "", "", 0, 0)
LAYERS = [f"model.layers.{n}" for n in range(3)]
MLP, ATTENTION = f"{LAYERS[1]}.mlp", f"{LAYERS[1]}.self_attn"


def statistics(source: MadeSource, smooth: bool) -> Calibration:
    """Made-up statistics, every one different; what reads one input has one amax. `smooth`: with pre-scales."""
    rng = np.random.default_rng(5)
    modules = {name.removesuffix(".weight"): spec.shape for name, spec in source.specs.items() if "_proj" in name}

    def amax() -> np.ndarray:
        return np.array(rng.uniform(1, 9), np.float32)

    wide = {name: rng.uniform(0.5, 2, shape[1]).astype(np.float32) for name, shape in modules.items()}
    attention = [f"{layer}.self_attn" for layer in LAYERS]
    return Calibration(
        PROVENANCE,
        {name: amax() for name in modules},
        wide if smooth else {},
        wide if smooth else {},
        k_amax={name: amax() for name in attention},
        v_amax={name: amax() for name in attention},
    )


class Written:
    """A converted model; `harmed` copies it, changes tensors of one file, and verifies."""

    def __init__(self, root: Path, target: str, scheme: str, kind: str, /, **options: Any) -> None:
        self.source, self.out = made_llama(kind), root / "out"
        self.source.config = {**self.source.config, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
        self.calibration = statistics(self.source, load_scheme(scheme).format.prescales)
        report = bridge.convert(
            self.source, target, scheme, self.out, calib=None if scheme.endswith(("wo", "pt")) else self.calibration,
            **options,
        )  # fmt: skip
        assert report.passed, [row for row in report.parity.tensors if not row.passed]
        self.file = next(self.out.glob("*.safetensors")).name

    def harmed(self, root: Path, *names: str, change: Callable[..., tuple[np.ndarray, ...]]) -> list[str]:
        """The rows that failed once `change` was made to the arrays of the tensors `names`."""
        out = root / "harmed"
        shutil.copytree(self.out, out)
        file = SafetensorsFile(out / self.file)
        changed = change(*(file.read(name) for name in names))
        with (out / self.file).open("r+b") as opened:
            for name, array in zip(names, changed, strict=True):
                opened.seek(file.offset(name))
                opened.write(array.tobytes())
        report = bridge.verify(out, self.source)
        assert report.passed == all(row.passed for row in report.parity.tensors)
        return [row.name.rpartition(" ")[2] for row in report.parity.tensors if not row.passed]


def exchanged(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, ...]:
    assert one.tobytes() != other.tobytes()
    return other, one


def doubled(array: np.ndarray) -> tuple[np.ndarray, ...]:
    return ((array.view(np.float32) * 2 if array.dtype == np.float32 else array + (1 << 7)).astype(array.dtype),)


def dropped(array: np.ndarray) -> tuple[np.ndarray, ...]:
    return (np.ones_like(array) if array.dtype == np.float32 else np.full_like(array, 0x3F80),)


def next_code(array: np.ndarray) -> tuple[np.ndarray, ...]:
    """One bit, the lowest of one code: a change that no norm and no cosine can see."""
    array.view(np.uint8).reshape(-1)[7] ^= 1
    return (array,)


def a_little(array: np.ndarray) -> tuple[np.ndarray, ...]:
    """One value of a norm by 2 % (bfloat16)."""
    array[9] += 3
    return (array,)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("fp8"), "hf", "fp8", "bfloat16", kv="fp8")


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("awq"), "hf", "int4_awq", "bfloat16")


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("rank"), "trtllm", "fp8", "bfloat16", kv="fp8")


@pytest.mark.parametrize(
    ("names", "change", "failed"),
    [
        ([f"{layer}.mlp.down_proj.weight_scale" for layer in LAYERS[:2]], exchanged, "{0}.mlp.down_proj.weight"),
        ([f"{MLP}.down_proj.weight_scale"], dropped, f"{MLP}.down_proj.weight"),
        ([f"{layer}.mlp.down_proj.input_scale" for layer in LAYERS[:2]], exchanged, "{0}.mlp.down_proj.input_scale"),
        ([f"{MLP}.up_proj.input_scale"], doubled, f"{MLP}.up_proj.input_scale"),
        ([f"{MLP}.up_proj.input_scale"], dropped, f"{MLP}.up_proj.input_scale"),
        ([f"{ATTENTION}.k_proj.k_scale"], doubled, f"{ATTENTION}.k_proj.k_scale"),
        ([f"{ATTENTION}.{p}_proj.{p}_scale" for p in "kv"], exchanged, f"{ATTENTION}.k_proj.k_scale"),
        ([f"{MLP}.down_proj.weight"], next_code, f"{MLP}.down_proj.weight"),
        ([f"{MLP}.{p}_proj.weight" for p in ("gate", "up")], exchanged, f"{MLP}.gate_proj.weight"),
        (["model.embed_tokens.weight"], next_code, "model.embed_tokens.weight"),
        ([f"{layer}.input_layernorm.weight" for layer in LAYERS[:2]], exchanged, "{0}.input_layernorm.weight"),
    ],
)
def test_a_wrong_tensor_of_a_unified_checkpoint_is_seen(
    fp8: Written, names: list[str], change: Callable[..., Any], failed: str, tmp_path: Path
) -> None:
    found = fp8.harmed(tmp_path, *names, change=change)
    assert failed.format(*LAYERS) in found
    assert len(found) <= len(names), "and nothing else"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (f"{LAYERS[0]}.input_layernorm.weight", a_little),
        (f"{LAYERS[0]}.input_layernorm.weight", doubled),
        (f"{MLP}.down_proj.pre_quant_scale", dropped),
        (f"{ATTENTION}.q_proj.weight", next_code),
    ],
)
def test_a_wrong_pre_scale_or_folded_norm_is_seen(
    awq: Written, name: str, change: Callable[..., Any], tmp_path: Path
) -> None:
    folded = {module for step in load_manifest(awq.out).plan.steps for module in step.folded}
    assert f"{LAYERS[0]}.self_attn.q_proj" in folded
    assert awq.harmed(tmp_path, name, change=change) == [name]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("transformer.layers.1.mlp.fc.weight", next_code),
        ("transformer.layers.1.attention.qkv.weight", next_code),
        ("transformer.layers.1.mlp.proj.activation_scaling_factor", doubled),
        ("transformer.layers.1.mlp.proj.weights_scaling_factor", doubled),
        ("transformer.layers.1.attention.kv_cache_scaling_factor", doubled),
    ],
)
def test_a_wrong_tensor_of_a_rank_is_seen(rank: Written, name: str, change: Callable[..., Any], tmp_path: Path) -> None:
    found = rank.harmed(tmp_path, name, change=change)
    assert found == [name.replace("weights_scaling_factor", "weight")]


@grid(
    {
        "scheme": [
            "fp8_pc_pt", "fp8_block", "int8_sq", "int8_wo", "int4_wo", "w4a8_awq", "nvfp4_wo", "mxfp8", "mxfp4_wo",
        ],
        "dtype": ["bfloat16", "float16", "float32"],
        "written": [None, "fp16", "bf16"],
    },
    pairs=[("dtype", "written")],
    fast=[("int8_sq", "bfloat16", None), ("fp8_pc_pt", "float32", "fp16")],
)  # fmt: skip
def test_nothing_is_wrong_with_what_was_written(scheme: str, dtype: str, written: str | None, tmp_path: Path) -> None:
    Written(tmp_path, "hf", scheme, dtype, **({"dtype": written} if written else {}))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scheme", ["fp8_pc_pt", "int8_wo", "int4_wo", "nvfp4_wo"])
def test_nothing_is_wrong_in_the_words_of_compressed_tensors(scheme: str, dtype: str, tmp_path: Path) -> None:
    Written(tmp_path, "hf", scheme, dtype, format="compressed-tensors")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (f"{MLP}.up_proj.input_scale", doubled),
        (f"{ATTENTION}.v_proj.v_scale", doubled),
        (f"{MLP}.up_proj.weight_scale", doubled),
        (f"{MLP}.up_proj.weight", next_code),
    ],
)
def test_what_is_carried_is_compared_with_what_the_source_stores(
    fp8: Written, name: str, change: Callable[..., Any], tmp_path: Path
) -> None:
    report = bridge.convert(fp8.out, "hf", None, tmp_path / "out")
    assert report.passed and load_manifest(tmp_path / "out").plan.scheme == "stored"
    assert not [line for line in report.parity.not_run if "beside the output" in line]
    carried = copy.copy(fp8)
    carried.source, carried.out = open_source(fp8.out), tmp_path / "out"
    assert name.replace("weight_scale", "weight") in carried.harmed(tmp_path, name, change=change)


def test_what_no_calibration_tells_is_said(fp8: Written, tmp_path: Path) -> None:
    shutil.copytree(fp8.out, tmp_path / "out")
    (tmp_path / "out" / CALIBRATION).unlink()
    report = bridge.verify(tmp_path / "out", fp8.source)
    assert report.passed
    (said,) = (line for line in report.parity.not_run if "beside the output" in line)
    assert "21 input_scale, 3 k_scale, 3 v_scale" in said


def test_steps_wait_for_their_share_of_the_memory(fp8: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.verification import tensors as verification

    manifest, lock, running, most = load_manifest(fp8.out), threading.Lock(), [0], [0]
    compare = verification.compare_step

    def watched(*arguments: Any) -> Any:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        try:
            return compare(*arguments)
        finally:
            with lock:
                running[0] -= 1

    monkeypatch.setattr(verification, "compare_step", watched)
    monkeypatch.setattr("bridge.streaming.rows.cores", lambda: 4)
    largest = max(working_set(step, manifest.plan.sources) for step in manifest.plan.steps)
    parity = tensor_parity(manifest.plan, fp8.source, manifest.gates, fp8.out, memory=largest)
    assert parity.passed
    assert most[0] == 1
