"""NaN and infinity are told by tensor, wherever they lie: in a written model, in a source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import bridge
from bridge.cli.main import app
from bridge.core.dtypes import DTYPES
from bridge.core.errors import SourceError
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.values import TensorSpec
from bridge.planning.memory import PIECE
from bridge.quant.codec.decode import as_floats
from bridge.verification import finite
from bridge.verification.finite import first_not_finite, not_finite
from tests.models.sources_made import MadeSource

MODEL = "examples/models/tiny-llama"
CHECKED = ("hf", "trt", "tripy", "trtllm", "megatron")


class Held:
    """One tensor in memory, read as a file is."""

    def __init__(self, bits: np.ndarray, dtype: str) -> None:
        self.specs = {"w": TensorSpec("w", bits.shape, dtype)}
        self._bytes = bits.view(np.uint8)

    def pieces(self, name: str, size: int, take: Callable[[int], np.ndarray]) -> Iterator[np.ndarray]:
        for begin in range(0, self._bytes.size, size):
            out = take(min(size, self._bytes.size - begin))
            out[:] = self._bytes[begin : begin + out.size]
            yield out


class Rowwise(MadeSource):
    """A source that is asked for rows alone, a piece at a time."""

    def read(self, name: str) -> np.ndarray:
        raise AssertionError(f"{name} is read whole")

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        rows = self.arrays[name][begin:end]
        assert 0 < rows.nbytes <= PIECE
        return rows


@pytest.mark.parametrize(
    ("dtype", "word", "largest", "bad"),
    [
        ("float64", "uint64", 0x7FEF << 48, (0x7FF0 << 48, 0x7FF8 << 48, 0xFFF0 << 48)),
        ("float32", "uint32", 0x7F7FFFFF, (0x7F800000, 0x7FC00000, 0xFF800000)),
        ("float16", "uint16", 0x7BFF, (0x7C00, 0x7E00, 0xFC00)),
        ("bfloat16", "uint16", 0xFF7F, (0x7F80, 0x7FC0, 0xFF80)),
        ("float8_e4m3fn", "uint8", 0x7E, (0x7F, 0xFF)),
        ("float8_e5m2", "uint8", 0x7B, (0x7C, 0x7F, 0xFC)),
        ("float8_e8m0fnu", "uint8", 0xFE, (0xFF,)),
    ],
)
def test_every_float_dtype_is_read_to_its_last_element(dtype: str, word: str, largest: int, bad: Any) -> None:
    size = PIECE // np.dtype(word).itemsize + 1  # the last element is the second piece
    for last, found in ((largest, []), *((value, ["w"]) for value in bad)):
        bits = np.zeros(size, word)
        bits[-1] = last
        held = Held(bits.view(DTYPES[dtype].storage), dtype)
        assert list(not_finite([held])) == found, hex(last)
        source = Rowwise({"w": bits.view(DTYPES[dtype].storage)}, held.specs)
        assert first_not_finite(source) == "".join(found), hex(last)


def test_a_source_is_asked_for_float_tensors_alone_and_tells_the_first() -> None:
    arrays = {
        "codes": np.full((3, 2), -1, np.int8),
        "scalar": np.array(1, np.float32),
        "none": np.zeros((0, 5), np.float32),
        "good": np.ones((6, 10), np.float32),
        "bad": np.array([[1, np.inf]], np.float32),
        "worse": np.array([np.nan], np.float32),
    }
    source = MadeSource(arrays, {name: TensorSpec(name, a.shape, str(a.dtype)) for name, a in arrays.items()})
    assert first_not_finite(source) == "bad"


def test_what_cannot_be_read_is_told_as_that_and_not_as_a_bad_number() -> None:
    specs = {"w": TensorSpec("w", (6, 10), "float32")}
    with pytest.raises(SourceError, match="the shard vanished"):
        first_not_finite(MadeSource({}, specs, broken=frozenset(specs)))


def test_the_codes_of_a_byte_are_decoded_once_for_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    monkeypatch.setattr(finite, "as_floats", lambda bits, dtype: decoded.append(dtype) or as_floats(bits, dtype))
    finite._finite_codes.cache_clear()
    held = Held(np.zeros(5, np.uint8), "float8_e5m2")
    assert list(not_finite([held] * 3)) == []
    assert decoded == ["float8_e5m2"]


def check(out: Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["check", str(out)])
    return done.exit_code, done.stdout.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.parametrize("target", CHECKED)
def test_a_nan_in_an_unquantized_weight_is_told_by_name(target: str, tmp_path: Path) -> None:
    quant = None if target == "megatron" else "int8_wo"
    bridge.convert(MODEL, target, quant, tmp_path / "out", verify=False)
    assert check(tmp_path / "out")[0] == 0
    source = SafetensorsFile(next(Path(MODEL).glob("*.safetensors"))).read("model.norm.weight")
    written = source.astype(np.float16) if target == "trtllm" else source
    good = written.tobytes()
    written[3] = np.nan
    bad = written.tobytes()
    held = [path for path in (tmp_path / "out").rglob("*") if path.is_file() and good in path.read_bytes()]
    for path in held:
        path.write_bytes(path.read_bytes().replace(good, bad))
    code, said = check(tmp_path / "out")
    assert code == 1, said
    assert "norm" in said or "ln_f" in said
    assert "holds NaN or infinity" in said
    assert len(held) == 1


def test_a_nan_among_codes_of_fp8_is_told_without_a_manifest(tmp_path: Path) -> None:
    out = tmp_path / "out"
    bridge.convert(MODEL, "hf", "fp8_block", out, verify=False)
    path = out / "model.safetensors"
    name = "model.layers.2.mlp.down_proj.weight"
    with path.open("r+b") as file:
        file.seek(SafetensorsFile(path).offset(name) + 7)
        file.write(b"\xff")
    (out / "bridge.json").unlink()
    code, said = check(out)
    assert (code, f"{name}: holds NaN or infinity" in said) == (1, True), said
