"""`.bin` files: equal to torch.load without torch, damaged and hostile ones refused with nothing executed."""

from __future__ import annotations

import collections
import io
import json
import pickle
import pickletools
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bridge.core.dtypes import DTYPES
from bridge.core.errors import SourceError
from bridge.core.files.span import span_of
from bridge.core.formats.torch_file import TorchFile
from bridge.core.formats.torch_pickle import WEIGHTS
from bridge.core.formats.unpickle import load_bytes
from bridge.sources.opening import open_source


def same(file: TorchFile, state: dict[str, torch.Tensor]) -> None:
    assert list(file.specs) == list(state)
    for name, tensor in state.items():
        spec = file.specs[name]
        assert (spec.shape, f"torch.{spec.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
        got = file.read(name)
        assert got.dtype == DTYPES[spec.dtype].storage
        plain = tensor.detach().contiguous().view(getattr(torch, DTYPES[spec.dtype].storage))
        assert got.tobytes() == plain.numpy().tobytes()


def every_kind() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    base = torch.randn(6, 10)
    state: dict[str, torch.Tensor] = {
        "plain": base,
        "transposed": base.t(),
        "rows": base[2:5],
        "strided": base[::2, 1::3],
        "expanded": torch.randn(1, 4).expand(3, 4),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "bool": torch.tensor([True, False, True]),
    }
    for name in ("float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "float8_e4m3fn",
                 "float8_e5m2", "uint16", "uint32", "uint64"):  # fmt: skip
        state[name] = torch.arange(7).to(getattr(torch, name))
    return state


def test_zip_reads_equal_to_torch(tmp_path: Path) -> None:
    torch.save(every_kind(), tmp_path / "m.bin")
    same(TorchFile(tmp_path / "m.bin"), torch.load(tmp_path / "m.bin"))


def test_legacy_reads_equal_to_torch(tmp_path: Path) -> None:
    newer = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")  # torch cannot load these from it itself
    state = {name: t for name, t in every_kind().items() if name not in newer}
    torch.save(state, tmp_path / "m.bin", _use_new_zipfile_serialization=False)
    assert not zipfile.is_zipfile(tmp_path / "m.bin")
    same(TorchFile(tmp_path / "m.bin"), torch.load(tmp_path / "m.bin"))


def test_state_dict_of_a_module_with_its_metadata_reads(tmp_path: Path) -> None:
    state = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)).state_dict()
    assert isinstance(state, collections.OrderedDict)
    torch.save(state, tmp_path / "m.bin")
    same(TorchFile(tmp_path / "m.bin"), dict(state))


def test_tensors_on_one_storage_stay_two_tensors(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    torch.save({"a": weight, "b": weight}, tmp_path / "m.bin")
    file = TorchFile(tmp_path / "m.bin")
    assert np.array_equal(file.read("a"), file.read("b"))


@pytest.mark.slow
def test_directory_of_bin_shards_opens_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    torch.save({"a": torch.ones(3)}, tmp_path / names[0])
    torch.save({"b": torch.ones(2)}, tmp_path / names[1])
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    code = (
        "import sys; from bridge.sources import open_source; s = open_source(sys.argv[1]);"
        "print(list(s.specs), s.read('b').tolist(), list(s.side_files), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['a', 'b'] [1.0, 1.0] ['config.json'] False"


def test_safetensors_beside_bin_are_preferred_and_the_rest_reported(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    torch.save({"a": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    source = open_source(tmp_path)
    assert source.read("a").tolist() == [1, 1, 1]
    assert list(source.dropped) == ["pytorch_model.bin"]


def saved(path: Path, state: Any = None) -> bytes:
    torch.save({"a": torch.arange(100.0)} if state is None else state, path)
    return path.read_bytes()


def refusal(path: Path) -> str:
    with pytest.raises(SourceError) as caught:
        TorchFile(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value)


@pytest.mark.parametrize("keep", [10, 300, 700, -1, -60])
def test_truncated_zip(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(saved(path)[:keep])
    assert "the zip has no end record: its end is missing, or something was written behind it" in refusal(path)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda data: data + bytes(1 << 17), "or something was written behind it"),
        (lambda data: data.replace(b"PK\x03\x04", b"PK\x03\x05"), "does not begin at byte"),
        (
            lambda data: data[: data.rindex(b"PK\x05\x06") + 16] + b"\xff\xff\xff\x00" + data[-2:],
            "or its end record is wrong",
        ),
    ],
)
def test_a_whole_zip_is_not_called_truncated(tmp_path: Path, spoil: Callable[[bytes], bytes], why: str) -> None:
    path = tmp_path / "m.bin"
    data = spoil(saved(path))
    path.write_bytes(data if data[:4] == b"PK\x03\x04" else b"PK\x03\x04" + data[4:])
    message = refusal(path)
    assert why in message and "truncated" not in message


def test_truncated_legacy(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    torch.save({"a": torch.arange(100.0)}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:-8])
    assert "shorter than its tensors: the tensors end at byte" in refusal(path)


def test_flipped_bit_is_found_when_read(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    data = bytearray(saved(path))
    at = bytes(data).index(np.arange(100, dtype=np.float32).tobytes())
    data[at + 33] ^= 4
    path.write_bytes(data)
    file = TorchFile(path)
    with pytest.raises(SourceError, match="a does not match its checksum"):
        file.read("a")


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"state_dict": {"a": torch.ones(2)}}, "state_dict is none; save the model's state_dict() alone"),
        ({"a": torch.ones(2), "epoch": 3, "name": "x"}, "epoch, name are none"),
        ([torch.ones(2)], "holds a list, not a dict of tensors"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "torch.ComplexFloatStorage"),
        ({"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, "_rebuild_qtensor"),
        ({"a": torch.ones(2, 2).to_sparse()}, "_rebuild_sparse_tensor"),
        (torch.nn.Linear(2, 3), "torch.nn.modules.linear.Linear"),
        ({"a": np.float32(3)}, "numpy"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_contents_that_are_not_plain_weights(tmp_path: Path, state: Any, reason: str) -> None:
    saved(tmp_path / "m.bin", state)
    assert reason in refusal(tmp_path / "m.bin")


def test_negative_bits_are_refused_not_ignored(tmp_path: Path) -> None:
    imaginary = torch.ones(3, dtype=torch.complex64).conj().imag
    assert imaginary.is_neg()
    saved(tmp_path / "m.bin", {"a": imaginary})
    assert "conjugate or negative bits" in refusal(tmp_path / "m.bin")


def rezip(path: Path, **changes: bytes) -> None:
    """Write the zip again with members replaced or added, stored as torch stores them."""
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    members.update({f"m/{name.replace('__', '/').replace('_dot_', '.')}": data for name, data in changes.items()})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name, data in members.items():
            new.writestr(name, data)


def test_torchscript_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "m.bin")
    rezip(tmp_path / "m.bin", constants_dot_pkl=b"x")
    assert "a TorchScript program" in refusal(tmp_path / "m.bin")


def test_big_endian_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "m.bin")
    rezip(tmp_path / "m.bin", byteorder=b"big")
    assert "big-endian" in refusal(tmp_path / "m.bin")


def test_storage_of_another_size_than_the_pickle_says(tmp_path: Path) -> None:
    saved(tmp_path / "m.bin")
    rezip(tmp_path / "m.bin", data__0=bytes(8))
    assert "storage 0: the pickle says 400 bytes, the zip has 8" in refusal(tmp_path / "m.bin")


def test_storages_that_are_numbered_with_integers_read(tmp_path: Path) -> None:
    """As Lightning and litgpt save them, one while the next is made."""
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4)}
    saved(tmp_path / "m.bin", state)
    with zipfile.ZipFile(tmp_path / "m.bin") as file:
        pickled = file.read("m/data.pkl")
    for number in (0, 1):  # BINUNICODE of one character becomes BININT1
        text = b"X\x01\x00\x00\x00%d" % number
        assert pickled.count(text) == 1
        pickled = pickled.replace(text, b"K%c" % number)
    rezip(tmp_path / "m.bin", data_dot_pkl=pickled)
    assert torch.load(tmp_path / "m.bin").keys() == state.keys()
    same(TorchFile(tmp_path / "m.bin"), state)


def test_compressed_member_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("m/data.pkl", b"0" * 1000)
    assert "compressed or encrypted" in refusal(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_beside_the_only_folder_is_refused_as_torch_does(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    torch.save({"w": torch.zeros(3)}, path)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("elsewhere/data.pkl", b"N.")
    assert "'elsewhere/data.pkl' lies beside m/ in the zip" in refusal(path)
    with pytest.raises(RuntimeError, match="is not in a subdirectory"):
        torch.load(path)


def test_member_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("m/data.pkl", b"0")
        file.writestr("m/data.pkl", b"1")
    assert "the zip holds m/data.pkl twice" in refusal(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git-LFS pointer"),
        (pickle.dumps({"a": 1}), "a bare pickle"),
        (b"hello, world", "not a file of torch.save"),
        (b"\0" * 257 + b"ustar" + b"\0" * 250, "a tar file"),
    ],
)
def test_file_that_is_something_else(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "m.bin").write_bytes(content)
    assert reason in refusal(tmp_path / "m.bin")


def test_plain_zip_is_no_torch_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.bin", "w") as file:
        file.writestr("a.txt", "x")
    assert "it has no data.pkl" in refusal(tmp_path / "m.bin")


def attacked(data: bytes) -> str:
    with pytest.raises(SourceError) as caught:
        load_bytes(data, WEIGHTS)
    return str(caught.value)


def bare(value: object) -> bytes:
    return pickletools.optimize(pickle.dumps(value, 2))[2:-1]


def storage(
    kind: str = "FloatStorage", key: str = "'0'", numel: str = "4", shape: str = "(4,)", rest: str = ""
) -> bytes:
    """Write a pickle of one tensor as text opcodes, to say what torch would never say."""
    stream = io.BytesIO()
    stream.write(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((")
    stream.write(b"X\x07\x00\x00\x00storagectorch\n" + kind.encode() + b"\n")
    stream.write(bare(eval(key)) + b"X\x03\x00\x00\x00cpu")
    stream.write(bare(eval(numel)) + b"tQ")
    for value in (0, eval(shape), (1,) * len(eval(shape)), False, None):
        stream.write(bare(value))
    stream.write(b"tR.")
    return stream.getvalue()


def test_the_hand_made_tensor_is_taken_when_it_is_right() -> None:
    tensor, storages = load_bytes(storage(), WEIGHTS)
    assert (tensor.shape, tensor.dtype, list(storages)) == ((4,), "float32", ["0"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"numel": "-1"}, "describes storage '0' wrongly"),
        ({"numel": "'4'"}, "describes storage '0' wrongly"),
        ({"key": "-7"}, "describes storage '-7' wrongly"),
        ({"kind": "Size"}, "describes storage '0' wrongly"),
        ({"shape": "(5,)"}, "reaches beyond its storage of 16 bytes"),
        ({"shape": "(-4,)"}, "must be non-negative integers"),
        ({"kind": "UntypedStorage"}, "a storage without a dtype"),
    ],
)
def test_geometry_is_checked(arguments: dict[str, str], reason: str) -> None:
    assert reason in attacked(storage(**arguments))


def test_persistent_id_that_is_a_string_is_refused() -> None:
    assert "which is not a storage" in attacked(b"Pabc\n.")


def test_extra_state_between_the_weights_is_set_aside_where_the_caller_expects_it(tmp_path: Path) -> None:
    state = {"a.weight": torch.ones(2), "a._extra_state": io.BytesIO(b"abc"), "b._extra_state": None}
    saved(tmp_path / "m.ckpt", state)
    assert "_io.BytesIO" in refusal(tmp_path / "m.ckpt")
    file = TorchFile(tmp_path / "m.ckpt", extra=True)
    assert (list(file.specs), file.extras) == (["a.weight"], ("a._extra_state", "b._extra_state"))
    saved(tmp_path / "m.ckpt", {"a.weight": None})
    with pytest.raises(SourceError, match=r"a\.weight is none"):
        TorchFile(tmp_path / "m.ckpt", extra=True)


@pytest.mark.parametrize("legacy", [False, True])
def test_file_inside_another_reads_in_place(tmp_path: Path, legacy: bool) -> None:
    torch.save({"a": torch.arange(6.0), "b": torch.arange(12).reshape(4, 3).t()}, tmp_path / "m.bin",
               _use_new_zipfile_serialization=not legacy)  # fmt: skip
    data = (tmp_path / "m.bin").read_bytes()
    (tmp_path / "outer").write_bytes(b"x" * 37 + data + (tmp_path / "m.bin").read_bytes())
    file = TorchFile(span_of(tmp_path / "outer").part(37, len(data)))
    same(file, torch.load(tmp_path / "m.bin"))
    assert file.offset("a") > 37


def test_file_that_changed_since_it_was_opened_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path / "m.bin")
    file = TorchFile(tmp_path / "m.bin")
    (tmp_path / "m.bin").write_bytes((tmp_path / "m.bin").read_bytes() + b"x")
    with pytest.raises(SourceError, match="changed since it was opened"):
        file.read_rows("a", 0, 3)
