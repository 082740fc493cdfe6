"""Tensors put together as they are read: any rows are those of the whole, whatever lies across, in bounded memory."""

from __future__ import annotations

import os
import shutil
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bridge
from bridge.core.arrays import Buffers
from bridge.core.errors import SourceError
from bridge.core.files.span import Extent, Span, span_of
from bridge.core.values import TensorSpec
from bridge.planning.memory import working_set
from bridge.quant.schemes.load import load_scheme
from bridge.sources.dialects import tensors as foreign
from bridge.sources.dialects.tensors import weights_of
from bridge.sources.opening import open_source
from bridge.streaming.context import ConversionContext
from bridge.streaming.encode import write_step
from bridge.tables.dialects.translate import Native, Translated
from bridge.tables.expressions.regions import Block
from bridge.targets import file_settings
from tests.sources.foreign_checkpoints import CONFIG, llama, megatron_bridge, meta, nemo_archive, spelled, stacked
from tests.sources.weights.dcp_saves import save
from tests.sources.weights.test_zarr import array as zarr_array
from tests.tables import foreign as formulas
from tests.tables.checkpoints import GPT2, headers

GPT2_CONFIG = GPT2 | {
    "model_type": "gpt2", "n_inner": None, "activation_function": "gelu", "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True, "layernorm_zero_centered_gamma": False,
}  # fmt: skip


class Held:
    """A container of arrays."""

    objects, skipped, files = (), dict[str, int](), ()

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays
        self.specs = {name: TensorSpec(name, array.shape, str(array.dtype)) for name, array in arrays.items()}

    def read_flat(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        out[...] = self.arrays[name].reshape(-1)[begin:end].reshape(out.shape)
        return out

    def place(self, name: str, begin: int = 0) -> tuple[str, int]:
        return name, begin


def rows_of(spec: TensorSpec, blocks: tuple[Block, ...], turned: bool, **arrays: np.ndarray) -> Any:
    native = {name: Native(name, array.shape, str(array.dtype)) for name, array in arrays.items()}
    return weights_of(Held(arrays), native, {spec.name: Translated(spec, blocks, turned)}).holder[spec.name]


A = np.random.default_rng(0).random((2, 7, 9), np.float32)  # seen as a matrix of 14 rows
C = np.random.default_rng(2).random((12, 5), np.float32)
B = np.random.default_rng(1).random((9, 12), np.float32)
RECTANGLES = {
    "rows": ((Block("A", (3, 13), (0, 9)),), False, A.reshape(14, 9)[3:13]),
    "columns": ((Block("A", (3, 13), (2, 8)),), False, A.reshape(14, 9)[3:13, 2:8]),
    "every third": ((Block("A", (1, 14), (0, 9), step=3),), False, A.reshape(14, 9)[1:14:3]),
    "columns of every third": ((Block("A", (1, 14), (4, 9), step=3),), False, A.reshape(14, 9)[1:14:3, 4:9]),
    "turned": ((Block("A", (3, 13), (0, 9)),), True, A.reshape(14, 9)[3:13].T),
    "across": ((Block("B", (2, 11), (1, 7), transposed=True),), False, B[1:7, 2:11].T),
    "every second across": ((Block("B", (1, 12), (1, 7), transposed=True, step=2),), False, B[1:7, 1:12:2].T),
    "heads to pairs": ((Block("C", (6, 12), (0, 5), rope=6),), False, C[[6, 9, 7, 10, 8, 11]]),
    "heads to halves": ((Block("C", (0, 12), (0, 5), rope=-4),), False, C[[0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11]]),
    "columns of heads": ((Block("C", (0, 4), (1, 3), rope=-4),), False, C[[0, 2, 1, 3], 1:3]),
    "under each other": (
        (Block("B", (2, 11), (0, 9), transposed=True), Block("A", (5, 8), (0, 9)), Block("B", (0, 4), (0, 9),
         transposed=True)), False, np.concatenate([B[:, 2:11].T, A.reshape(14, 9)[5:8], B[:, :4].T]),
    ),
    "three axes": ((Block("A", (0, 7), (1, 5)), Block("A", (7, 14), (1, 5))), False, A[:, :, 1:5]),
    "a vector in a matrix": ((Block("B", (20, 31)),), False, B.reshape(-1)[20:31]),
}  # fmt: skip


@pytest.mark.parametrize("name", RECTANGLES)
def test_any_rows_are_those_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "PIECE", 50)
    blocks, turned, want = RECTANGLES[name]
    tensor = rows_of(TensorSpec("t", want.shape, "float32"), blocks, turned, A=A, B=B, C=C)
    assert np.array_equal(tensor.read("t"), want)
    for begin in range(len(want)):
        for end in range(begin + 1, len(want) + 1):
            assert np.array_equal(tensor.read_rows("t", begin, end), want[begin:end])


def gpt2(root: Path, config: dict[str, Any]) -> tuple[Path, dict[str, np.ndarray]]:
    """A GPT-2 of Megatron, which stores across its rows what Hugging Face stores along them."""
    numbers = np.random.default_rng(0)
    hf = {name: numbers.random(spec.shape, np.float32) for name, spec in headers(config).items()}
    state = {name: torch.from_numpy(np.float32(array)) for name, array in formulas.megatron("gpt2", hf).items()}
    return save(root, state), hf


@pytest.mark.slow
def test_rows_of_what_is_stored_across_them_are_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "PIECE", 500)
    checkpoint, hf = gpt2(tmp_path / "c", GPT2)
    source = open_source(checkpoint, config=GPT2_CONFIG)
    for name, array in hf.items():
        for begin, end in ((0, 1), (2, 9), (5, 7), (0, len(array)), (len(array) - 3, len(array))):
            assert np.array_equal(source.read_rows(name, begin, end), array[begin:end])


def wide_gpt2(root: Path) -> tuple[Path, dict[str, Any]]:
    """A layer whose matrices take up to 9.4 MB, of which one alone is more than steps say that read by rows."""
    config = GPT2_CONFIG | {"n_embd": 768, "n_head": 12, "n_layer": 1, "vocab_size": 96, "n_positions": 64}
    shapes = {
        "embedding.word_embeddings.weight": (96, 768), "embedding.position_embeddings.weight": (64, 768),
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (768,),
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_bias": (768,),
        "decoder.layers.0.self_attention.linear_qkv.weight": (2304, 768),
        "decoder.layers.0.self_attention.linear_qkv.bias": (2304,),
        "decoder.layers.0.self_attention.linear_proj.weight": (768, 768),
        "decoder.layers.0.self_attention.linear_proj.bias": (768,),
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": (768,),
        "decoder.layers.0.mlp.linear_fc1.layer_norm_bias": (768,),
        "decoder.layers.0.mlp.linear_fc1.weight": (3072, 768), "decoder.layers.0.mlp.linear_fc1.bias": (3072,),
        "decoder.layers.0.mlp.linear_fc2.weight": (768, 3072), "decoder.layers.0.mlp.linear_fc2.bias": (768,),
        "decoder.final_layernorm.weight": (768,), "decoder.final_layernorm.bias": (768,),
    }  # fmt: skip
    return save(root, {name: torch.randn(shape) for name, shape in shapes.items()}), config


@pytest.mark.slow
@pytest.mark.parametrize("quant", [None, "int8_wo"])
def test_a_step_takes_no_more_memory_than_it_says(quant: str | None, tmp_path: Path) -> None:
    checkpoint, config = wide_gpt2(tmp_path / "c")
    for measured in (False, True):  # kernels are compiled the first time
        source = open_source(checkpoint, config=config)
        plan = bridge.plan(source, "hf", quant)
        scheme = load_scheme(quant) if quant else None
        context = ConversionContext(plan, source, None, scheme, 0, None, file_settings(plan, source))  # type: ignore[arg-type]
        tracemalloc.start()
        try:
            for step in plan.steps:
                tracemalloc.reset_peak()
                write_step(step, context, Buffers(), 1.0, lambda *_: None)
                says = max(working_set(step, plan.sources), 1 << 20)
                assert not measured or tracemalloc.get_traced_memory()[1] < says + (1 << 16), (step.source, says)
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("quant", [None, "int8_wo"])
def test_what_is_stored_across_its_rows_is_read_once(
    quant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, config = wide_gpt2(tmp_path / "c")
    source, whole, count = open_source(checkpoint, config=config), Span.read_into, [0]
    plan = bridge.plan(source, "hf", quant)

    def counted(span: Span, out: np.ndarray, begin: int) -> None:
        count[0] += out.nbytes
        whole(span, out, begin)

    monkeypatch.setattr(Span, "read_into", counted)
    bridge.convert(source, "hf", quant, tmp_path / "out", verify=False)
    turned = [spec for spec in plan.sources.values() if spec.across]
    assert len(turned) == 4
    assert count[0] < 1.1 * sum(spec.nbytes for spec in plan.sources.values())


@pytest.mark.parametrize("shape", [(600, 700), (3, 300, 400)])
def test_strides_of_a_file_take_no_more_memory_than_a_step(
    shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of 1.5 MB whose first axis is stored as others store the last."""
    monkeypatch.setattr("bridge.core.files.span.STEP", 1 << 15)
    array = np.random.default_rng(0).random(shape, np.float32)
    (tmp_path / "f").write_bytes(array.T.tobytes())
    stride = tuple(int(np.prod(shape[:axis])) for axis in range(len(shape)))
    extent = Extent(span_of(tmp_path / "f"), 0, "float32", shape, stride)
    flat = array.reshape(-1)
    tracemalloc.start()
    try:
        for begin, end in ((0, 1), (7, 2000), (flat.size // 2 - 5, flat.size // 2 + 1000), (flat.size - 3, flat.size)):
            found = extent.read_flat(begin, end, np.empty(end - begin, np.float32))
            assert np.array_equal(found, flat[begin:end])
        assert tracemalloc.get_traced_memory()[1] < 200_000 + array[:1].nbytes
    finally:
        tracemalloc.stop()


def test_stacked_strides_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of experts whose two other axes changed places with theirs: no piece reads what another one wants."""
    stored = np.random.default_rng(0).random((30, 5, 70), np.float32)
    (tmp_path / "f").write_bytes(stored.tobytes())
    extent = Extent(span_of(tmp_path / "f"), 0, "float32", (5, 30, 70), (70, 350, 1))
    monkeypatch.setattr("bridge.core.files.span.STEP", 256)
    whole, count, flat = Span.read_into, [0], stored.swapaxes(0, 1).reshape(-1)

    def counted(span: Span, out: np.ndarray, begin: int) -> None:
        count[0] += out.nbytes
        whole(span, out, begin)

    monkeypatch.setattr(Span, "read_into", counted)
    for step in (70, 300, 2100, 4000):
        count[0] = 0
        for begin in range(0, flat.size, step):
            end = min(begin + step, flat.size)
            found = extent.read_flat(begin, end, np.empty(end - begin, np.float32))
            assert np.array_equal(found, flat[begin:end])
        assert count[0] < 1.5 * stored.nbytes


@pytest.mark.slow
def test_the_fingerprint_is_that_of_the_layout_too(tmp_path: Path) -> None:
    """The same tensors, the same config.json: a run that resumes must notice that they are made of others."""
    run = megatron_bridge(tmp_path / "run", spelled(llama(), "megatron"))
    first = open_source(run).fingerprint
    assert open_source(run).fingerprint == first
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    for path in run.rglob("*"):  # times are part of it, places are not
        os.utime(moved / path.relative_to(run), ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    assert open_source(moved).fingerprint == first
    index = moved / "iter_0000100/.metadata"
    os.utime(index, ns=(0, index.stat().st_mtime_ns + 1))
    assert open_source(moved).fingerprint != first
    text = (run / "iter_0000100/run_config.yaml").read_text()
    (run / "iter_0000100/run_config.yaml").write_text(
        text.replace("model:", "model:\n  layernorm_zero_centered_gamma: true")
    )
    centered = open_source(run)
    assert centered.config == open_source(moved).config
    assert centered.fingerprint != first


def test_ranks_that_changed_places_are_another_fingerprint(tmp_path: Path) -> None:
    root = meta(tmp_path / "m", spelled({n: t[:96] for n, t in llama().items()}, "meta"), 2, vocab_size=96)
    first = open_source(root).fingerprint
    one, other = root / "consolidated.00.pth", root / "consolidated.01.pth"
    for path in (one, other):
        os.utime(path, ns=(0, 0))
    assert one.stat().st_size == other.stat().st_size
    level = open_source(root).fingerprint
    assert level != first and open_source(root).fingerprint == level


def test_threads_turn_their_own_tensors(tmp_path: Path) -> None:
    checkpoint, hf = gpt2(tmp_path / "c", GPT2)
    source = open_source(checkpoint, config=GPT2_CONFIG)
    wrong: list[str] = []

    def work(names: list[str]) -> None:
        for name in names * 5:
            half = len(hf[name]) // 2
            found = [source.read_rows(name, 0, half), source.read_rows(name, half, len(hf[name]))]
            if not np.array_equal(np.concatenate(found), hf[name]):
                wrong.append(name)

    names = [name for name in hf if hf[name].ndim == 2]
    threads = [threading.Thread(target=work, args=(names[n::3],)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_checkpoint_that_changed_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    source = open_source(save(tmp_path / "c", spelled(llama(), "torchtitan")), config=CONFIG)
    file = tmp_path / "c/__0_0.distcp"
    source.read("model.norm.weight")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    os.utime(file, ns=(0, 0))
    with pytest.raises(SourceError, match="changed since it was opened"):
        source.read("lm_head.weight")


def zarr(root: Path, state: dict[str, torch.Tensor]) -> Path:
    """The DCP checkpoint's directory with a folder a tensor."""
    megatron_bridge(root, {})
    iteration = root / "iter_0000100"
    for path in (iteration / ".metadata", *iteration.glob("*.distcp")):
        path.unlink()
    (iteration / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    for name, tensor in state.items():
        zarr_array(iteration, name, tensor, tuple(max(1, n // 2) for n in tensor.shape))
    return root


CONTAINERS: dict[str, Callable[[Path], Path]] = {
    "megatron": lambda root: megatron_bridge(root, stacked(spelled(llama(), "megatron"))),
    "zarr": lambda root: zarr(root, spelled(llama(), "megatron")),
    "nemo": lambda root: nemo_archive(root / "n", {"model_weights.ckpt": spelled(llama(), "megatron")}),
    "meta": lambda root: meta(root, spelled({n: t[:96] for n, t in llama().items()}, "meta"), 2, vocab_size=96),
    "torchtitan": lambda root: save(root, spelled(llama(), "torchtitan")),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_plan_reads_no_weight(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of where weights lie but what a header's read takes along, which are the last 4 kB of a file of torch."""
    checkpoint = CONTAINERS[kind](tmp_path)
    read: list[tuple[Path, int, int]] = []
    headers = [0]
    into, at = Span.read_into, Span.at

    def counted_into(span: Span, out: np.ndarray, begin: int) -> None:
        read.append((span.path, span.offset + begin, span.offset + begin + out.nbytes))
        into(span, out, begin)

    def counted_at(span: Span, fd: int, begin: int, nbytes: int) -> bytes:
        found = at(span, fd, begin, nbytes)
        headers[0] += len(found)
        return found

    monkeypatch.setattr(Span, "read_into", counted_into)
    monkeypatch.setattr(Span, "at", counted_at)
    config = CONFIG | {"vocab_size": 96} if kind == "meta" else CONFIG
    source = open_source(checkpoint, config=config)
    plan = bridge.plan(source, "hf", "int8_wo")
    assert len(plan.quantized) == 3 * 7
    assert headers[0] < sum(spec.nbytes for spec in plan.sources.values()) / 10
    planned, read[:] = tuple(read), ()
    for name in source.specs:
        source.read(name)
    assert read
    assert not [one for one in planned for path, a, b in read if one[0] == path and one[1] < b and a < one[2]]
