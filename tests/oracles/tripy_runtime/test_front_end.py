"""The stand-in below nvtripy means what torch means, operation by operation, and refuses what an engine refuses."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.oracles.tripy_runtime import evaluate, install
from tests.oracles.tripy_runtime.against_torch import FLOATS, made, out, same

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
}
POSITIVE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "floor_div": lambda a, b: a // b,
    "pow": lambda a, b: abs(a) ** b,
    "less": lambda a, b: a < b,
    "less_equal": lambda a, b: a <= b,
    "greater": lambda a, b: a > b,
    "greater_equal": lambda a, b: a >= b,
    "equal": lambda a, b: a == b,
    "not_equal": lambda a, b: a != b,
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [*UNARY, *POSITIVE])
def test_unary_operation_is_torchs(tp: Any, name: str, dtype: torch.dtype) -> None:
    x = made(3, 5, dtype=dtype)
    x = x if name in UNARY else x.abs() + 0.1
    same(getattr(tp, name)(tp.Tensor(x)), (UNARY | POSITIVE)[name](x))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_binary_operation_broadcasts_as_torch(tp: Any, name: str, dtype: torch.dtype) -> None:
    a, b = made(2, 1, 5, dtype=dtype), made(3, 1, dtype=dtype, seed=1)
    a[0, 0, 0] = b[0, 0]
    same(BINARY[name](tp.Tensor(a), tp.Tensor(b)), BINARY[name](a, b))


def test_integers_divide_as_torch(tp: Any) -> None:
    a, b = torch.tensor([7, -7, 6, -1], dtype=torch.int32), torch.tensor([2, 2, 3, 5], dtype=torch.int32)
    same(tp.Tensor(a) // tp.Tensor(b), a // b)
    same(tp.Tensor(a) % tp.Tensor(b), a % b)
    same(tp.maximum(tp.Tensor(a), tp.Tensor(b)), torch.maximum(a, b))
    same(tp.minimum(tp.Tensor(a), tp.Tensor(b)), torch.minimum(a, b))


def test_logic_is_torchs(tp: Any) -> None:
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    same(tp.Tensor(a) | tp.Tensor(b), a | b)
    same(~tp.Tensor(a), ~a)


SHAPES = [
    ((3, 5), (5, 4)),
    ((2, 3, 5), (5, 4)),
    ((2, 1, 3, 5), (6, 5, 4)),
    ((5,), (5, 4)),
    ((3, 5), (5,)),
    ((5,), (5,)),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("left", "right"), SHAPES, ids=str)
def test_matmul_is_torchs(tp: Any, left: tuple[int, ...], right: tuple[int, ...], dtype: torch.dtype) -> None:
    a, b = made(*left, dtype=dtype), made(*right, dtype=dtype, seed=1)
    same(tp.Tensor(a) @ tp.Tensor(b), (a.float() @ b.float()).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_softmax_with_masked_places_and_layer_norm_are_torchs(tp: Any, dtype: torch.dtype) -> None:
    x = made(2, 3, 8, dtype=dtype)
    weight, bias = made(8, dtype=dtype, seed=1), made(8, dtype=dtype, seed=2)
    masked = x.masked_fill(x > 0.5, float("-inf"))
    same(tp.softmax(tp.Tensor(masked), dim=-1), torch.softmax(masked, -1))
    norm = tp.LayerNorm(8, dtype=getattr(tp, str(dtype).removeprefix("torch.")), eps=1e-5)
    norm.load_state_dict({"weight": tp.Tensor(weight), "bias": tp.Tensor(bias)})
    same(norm(tp.Tensor(x)), F.layer_norm(x.float(), (8,), weight.float(), bias.float(), 1e-5).to(dtype))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "prod", "var"])
def test_reduction_is_torchs(tp: Any, name: str, keep: bool) -> None:
    x = made(2, 3, 5)
    theirs = getattr(torch, {"max": "amax", "min": "amin"}.get(name, name))
    same(getattr(tp, name)(tp.Tensor(x), dim=1, keepdim=keep), theirs(x, dim=1, keepdim=keep))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32], ids=str)
def test_choosing_is_torchs(tp: Any, dtype: torch.dtype) -> None:
    x = (made(4, 7) * 10).to(dtype)
    indices = torch.tensor([[2, 0], [3, 3]], dtype=torch.int32)
    ours = tp.Tensor(x)
    same(tp.gather(ours, 0, tp.Tensor(indices)), x[indices.long()])
    same(tp.argmax(ours, 1), x.argmax(1).int())
    values, places = tp.topk(ours, 3, dim=1)
    same(values, x.topk(3, 1).values)
    assert torch.equal(x.gather(1, out(places).long()), out(values))
    same(tp.where(ours > tp.cast(tp.Tensor(0), ours.dtype), ours, -ours), x.abs())


MOVES: list[Callable[[Any, Any], Any]] = [
    lambda lib, x: lib.reshape(x, (6, 4)),
    lambda lib, x: lib.reshape(x, (4, -1)),
    lambda lib, x: lib.permute(x, (2, 0, 1)),
    lambda lib, x: x[1],
    lambda lib, x: x[:, 1:, ::2],
    lambda lib, x: x[:, -2:, -1],
    lambda lib, x: lib.unsqueeze(x, 1),
    lambda lib, x: lib.flatten(x),
    lambda lib, x: lib.flip(x, (-1,)),
    lambda lib, x: lib.split(x, 2, 2)[1],
    lambda lib, x: lib.tril(x, -1),
    lambda lib, x: lib.triu(x, 1),
    lambda lib, x: lib.transpose(x, 1, 2),
    lambda lib, x: lib.stack([x, x], 1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("move", MOVES, ids=range(len(MOVES)))
def test_moving_is_torchs(tp: Any, move: Callable[[Any, Any], Any], dtype: torch.dtype) -> None:
    x = (made(2, 3, 4) * 10).to(dtype)
    same(move(tp, tp.Tensor(x)), move(torch, x).to(dtype))


def test_joining_expanding_and_padding_are_torchs(tp: Any) -> None:
    a, b = made(2, 3), made(2, 5, seed=1)
    same(tp.concatenate([tp.Tensor(a), tp.Tensor(b)], 1), torch.cat([a, b], 1))
    same(tp.expand(tp.Tensor(a[:, :1].contiguous()), (4, 2, 6)), a[:, :1].expand(4, 2, 6))
    same(tp.cumsum(tp.Tensor(a), 1), a.cumsum(1))
    same(tp.repeat(tp.Tensor(a), 3, 1), a.repeat_interleave(3, 1))
    same(tp.pad(tp.Tensor(a), ((1, 0), (2, 3)), value=7), F.pad(a, (2, 3, 1, 0), value=7))
    same(tp.pad(tp.Tensor(a), ((0, 0), (2, 1)), mode="reflect"), F.pad(a, (2, 1), mode="reflect"))


def test_ramps_are_torchs(tp: Any) -> None:
    same(tp.arange(2, 11, 3, dtype=tp.int32), torch.arange(2, 11, 3, dtype=torch.int32))
    same(tp.arange(7, dtype=tp.float16), torch.arange(7, dtype=torch.float16))
    same(tp.iota((2, 3), dim=1), torch.arange(3.0).expand(2, 3))
    same(tp.full((2, 3), 0.5), torch.full((2, 3), 0.5))


@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_is_torchs(tp: Any, groups: int) -> None:
    x, kernel, bias = made(2, 4, 9, 7), made(6, 4 // groups, 3, 2, seed=1), made(6, seed=2)
    conv = tp.Conv(4, 6, (3, 2), padding=((1, 1), (2, 2)), stride=(2, 1), dilation=(1, 2), groups=groups)
    conv.load_state_dict({"weight": tp.Tensor(kernel), "bias": tp.Tensor(bias)})
    expected = F.conv2d(x, kernel, bias, (2, 1), (1, 2), (1, 2), groups)
    torch.testing.assert_close(out(conv(tp.Tensor(x))), expected, rtol=1e-5, atol=1e-5)  # 24 products in another order


@pytest.mark.parametrize("source", [*FLOATS, torch.int8, torch.int32, torch.int64, torch.bool], ids=str)
def test_casts_are_torchs(tp: Any, source: torch.dtype) -> None:
    x = torch.tensor([0.0, -1.5, 2.5, 3.49, 100.0]).to(source)
    for target in (*FLOATS, torch.int8, torch.int32, torch.int64, torch.bool):
        same(tp.cast(tp.Tensor(x), getattr(tp, str(target).removeprefix("torch."))), x.to(target))


def test_index_out_of_range_is_refused(stand_in: Any) -> None:
    tp = stand_in
    for index in (-1, 4):
        with pytest.raises(tp.TripyException, match="gather"):
            tp.gather(tp.Tensor(made(4, 2)), 0, tp.Tensor(torch.tensor([index], dtype=torch.int32))).eval()


@pytest.mark.parametrize("wrong", [lambda x: x.astype(np.float64), lambda x: x[0], lambda x: x[:, :1]], ids=range(3))
def test_result_that_is_not_as_declared_is_refused(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Any], Any]
) -> None:
    tp = stand_in
    monkeypatch.setitem(evaluate.RULES, "cast", lambda x, to: wrong(x))
    with pytest.raises(tp.TripyException, match="declared"):
        tp.cast(tp.Tensor(made(2, 3)), tp.float16).eval()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.int32, torch.int64, torch.bool], ids=str)
def test_tensor_comes_back_as_it_went_in(tp: Any, dtype: torch.dtype) -> None:
    for shape in ((2, 3), (1,), ()):
        x = (made(*shape) * 9).to(dtype)
        assert torch.equal(out(tp.Tensor(x)), x)
        assert torch.equal(out(tp.copy(tp.Tensor(x), tp.device("gpu"))), x)
        assert torch.equal(torch.tensor(tp.Tensor(x).tolist()).to(dtype), x)


def test_what_dlpack_cannot_carry_is_refused(tp: Any) -> None:
    with pytest.raises(tp.TripyException, match=r"tensor\.contiguous\(\)"):
        tp.Tensor(made(3, 4).T)
    for unsupported in (torch.float64, torch.uint8):
        with pytest.raises(tp.TripyException, match="nvtripy data type"):
            tp.Tensor(torch.ones(3, dtype=unsupported))
    with pytest.raises(Exception, match="Unsupported kFloat bits 8"):
        torch.from_dlpack(tp.cast(tp.Tensor([1.0, 2.0]), tp.float8))


def test_compiled_function_takes_every_length_of_its_profile(tp: Any) -> None:
    weight = tp.Tensor(made(4, 5))

    def function(x: Any) -> Any:
        rows = tp.arange(x.shape[1])
        return tp.softmax(x @ weight, dim=-1) * tp.unsqueeze(rows, 1)

    compiled = tp.compile(function, args=[tp.InputInfo((2, (1, 3, 6), 4), tp.float32)])
    for length in (1, 3, 6):
        x = made(2, length, 4, seed=length)
        assert torch.equal(out(compiled(tp.copy(tp.Tensor(x), tp.device("gpu")))), out(function(tp.Tensor(x))))
    with pytest.raises(tp.TripyException, match="within the bounds"):
        compiled(tp.copy(tp.Tensor(made(2, 7, 4)), tp.device("gpu")))
    with pytest.raises(tp.TripyException, match="expected data type: float32"):
        compiled(tp.copy(tp.Tensor(made(2, 3, 4, dtype=torch.float16)), tp.device("gpu")))


@pytest.mark.slow
def test_small_transformer_is_torchs(tp: Any) -> None:
    """Heads, causal mask and norms in one module, with 70 positions: loaded by name, compiled, equal to torch's."""
    heads, extent, length = 6, 10, 70
    hidden = heads * extent

    class Block(tp.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = tp.LayerNorm(hidden)
            self.qkv = tp.Linear(hidden, 3 * hidden)
            self.proj = tp.Linear(hidden, hidden)

        def forward(self, x: Any) -> Any:
            batch, rows = x.shape[0], x.shape[1]
            parts = tp.split(self.qkv(self.norm(x)), 3, 2)
            q, k, v = (tp.transpose(tp.reshape(part, (batch, rows, heads, extent)), 1, 2) for part in parts)
            scores = (q @ tp.transpose(k, 2, 3)) * (extent**-0.5)
            places = tp.arange(rows)
            seen = tp.unsqueeze(places, 1) >= tp.unsqueeze(places, 0)
            mixed = tp.softmax(tp.where(seen, scores, tp.Tensor(float("-inf"))), -1) @ v
            return x + self.proj(tp.reshape(tp.transpose(mixed, 1, 2), (batch, rows, hidden)))

    norm, qkv = torch.nn.LayerNorm(hidden), torch.nn.Linear(hidden, 3 * hidden)
    proj = torch.nn.Linear(hidden, hidden)
    theirs = torch.nn.ModuleDict({"norm": norm, "qkv": qkv, "proj": proj}).requires_grad_(False)
    block = Block()
    block.load_state_dict({name: tp.Tensor(tensor) for name, tensor in theirs.state_dict().items()})
    x = made(2, length, hidden)
    q, k, v = (part.unflatten(-1, (heads, extent)).transpose(1, 2) for part in qkv(norm(x)).chunk(3, -1))
    attention = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    compiled = tp.compile(block, args=[tp.InputInfo((2, (1, 9, 99), hidden), tp.float32)])
    got = out(compiled(tp.copy(tp.Tensor(x), tp.device("gpu"))))
    torch.testing.assert_close(got, x + proj(attention), rtol=1e-5, atol=1e-5)
    assert torch.equal(got, out(block(tp.Tensor(x))))


def test_stand_in_hides_no_tensorrt_and_imports_once(stand_in: Any) -> None:
    assert install() is stand_in
    assert importlib.util.find_spec("tensorrt") is None or sys.modules["tensorrt"].__file__
    assert importlib.util.find_spec("mlir_tensorrt") is not None


def test_nothing_is_installed_by_an_import() -> None:
    code = (
        "import sys, tests.oracles.tripy_runtime; sys.exit('nvtripy' in sys.modules or 'mlir_tensorrt' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# What these examples show is not stood in for: engines and plugins, pooling, resizing; one wants CUDA by name.
LEFT_OUT = {"executable", "plugin", "avgpool", "maxpool", "resize", "conv_transpose", "groupnorm"}
EXAMPLE = re.compile(r"\.\. code-block:: python\n(?: +:.*\n)*((?: +.*\n|\n)+)")


def examples(root: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*.py")):
        if path.stem in LEFT_OUT:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.ClassDef) else None
            for code in EXAMPLE.findall(f"{doc}\n"):
                yield f"{path.relative_to(root)}: {node.name}", textwrap.dedent(code)


class Array(np.ndarray):
    """A NumPy array that one can `get()`, as a CuPy array."""

    def get(self) -> np.ndarray:
        return self.view(np.ndarray)


@pytest.mark.slow
def test_nvtripys_own_examples_hold(tp: Any) -> None:
    """The examples in its docstrings assert what they show. They look at values with CuPy, which is NumPy here."""

    def from_dlpack(tensor: Any) -> Array:
        return np.asarray(out(tp.cast(tensor, tp.float32) if tensor.dtype is tp.bfloat16 else tensor)).view(Array)

    cupy = SimpleNamespace(**{**vars(np), "from_dlpack": from_dlpack})
    failed, ran = [], 0
    for name, code in examples(Path(tp.__file__).parent):
        if "doc: allow-exception" in code:
            continue
        try:
            exec(code, {"tp": tp, "np": np, "cp": cupy, "torch": torch, "nvtripy": tp})
            ran += 1
        except Exception as error:
            failed.append(f"{name}: {error}")
    assert not failed, "\n".join(failed)
    assert ran > 150
