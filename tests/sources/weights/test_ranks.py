"""Files of single ranks joined to whole tensors: rows, columns, blocks, stages; what does not fit together is named."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bridge.core.errors import SourceError
from bridge.core.files.archive import open_folder
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.formats.torch_file import TorchFile
from bridge.sources.weights.containers import Container, Files
from bridge.sources.weights.ranks import Joined, Rank, open_ranks, rank_files
from bridge.tables.dialects.dialect import Cut
from tests.sources.weights.dcp_saves import bits, read, same

CUTS = {"rows": Cut(0), "columns": Cut(1), "gated": Cut(0, blocks=2), "norm": None}


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "rows": torch.randn(6, 5),
        "columns": torch.randn(4, 9).to(torch.bfloat16),
        "gated": torch.randn(12, 7),
        "norm": torch.randn(5),
    }


def shares(count: int) -> list[dict[str, torch.Tensor]]:
    """Divide as ranks do: of a gated matrix each holds its gate rows, then its up rows."""
    full = whole()
    gate, up = full["gated"].chunk(2)
    return [
        {
            "rows": full["rows"].chunk(count)[rank],
            "columns": full["columns"].chunk(count, 1)[rank],
            "gated": torch.cat([gate.chunk(count)[rank], up.chunk(count)[rank]]),
            "norm": full["norm"],
        }
        for rank in range(count)
    ]


def written(root: Path, name: str, state: dict[str, torch.Tensor]) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    torch.save({key: tensor.clone() for key, tensor in state.items()}, root / name)


def consolidated(root: Path, count: int = 3) -> dict[Rank, Container]:
    for rank, state in enumerate(shares(count)):
        written(root, f"consolidated.{rank:02}.pth", state)
    return open_ranks(open_folder(root))


@pytest.mark.parametrize("count", [1, 3])
def test_joined_shares_are_the_whole_tensors(tmp_path: Path, count: int) -> None:
    joined = Joined("m", consolidated(tmp_path, count), CUTS.__getitem__)
    same(joined, whole())
    assert [span.path.name for span in joined.files] == [f"consolidated.{n:02}.pth" for n in range(count)]


def test_any_elements_are_those_of_the_tensor(tmp_path: Path) -> None:
    joined = Joined("m", consolidated(tmp_path), CUTS.__getitem__)
    for name, tensor in whole().items():
        flat = bits(tensor).ravel()
        for begin, end in itertools.combinations(range(0, flat.size + 1, 2), 2):
            assert np.array_equal(read(joined, name, begin, end), flat[begin:end])


def test_place_follows_the_ranks(tmp_path: Path) -> None:
    joined = Joined("m", consolidated(tmp_path), CUTS.__getitem__)
    names = [Path(joined.place("gated", row * 7)[0]).name[13:15] for row in range(12)]
    assert names == ["00", "00", "01", "01", "02", "02"] * 2


def test_stages_are_renamed(tmp_path: Path) -> None:
    tensors = {n: torch.randn(2, 3) for n in range(4)}
    for stage in range(2):
        for rank in range(2):
            state = {f"layers.{n}.w": tensors[2 * stage + n][:, :].chunk(2)[rank] for n in range(2)}
            state[f"norm.{stage}"] = torch.full((3,), stage)
            written(tmp_path, f"tp_rank_{rank:02}_pp_rank_{stage:03}/model_weights.ckpt", state)
    ranks = open_ranks(open_folder(tmp_path))
    assert list(ranks) == [Rank(0, 0), Rank(0, 1), Rank(1, 0), Rank(1, 1)]

    def rename(name: str, rank: Rank) -> str:
        return f"layers.{2 * rank.pp + int(name.split('.')[1])}.w" if "layers" in name else name

    joined = Joined("m", ranks, lambda name: None if "norm" in name else Cut(0), rename)
    norms = {f"norm.{stage}": torch.full((3,), stage) for stage in range(2)}
    same(joined, {f"layers.{n}.w": tensor for n, tensor in tensors.items()} | norms)


def test_tensor_of_several_stages_is_refused(tmp_path: Path) -> None:
    for stage in range(2):
        written(tmp_path, f"tp_rank_00_pp_rank_{stage:03}/model_weights.ckpt", {"layers.0.w": torch.ones(2)})
    with pytest.raises(SourceError, match=r"layers\.0\.w: in several stages \(tp 0 pp 0, tp 0 pp 1\)"):
        Joined("m", open_ranks(open_folder(tmp_path)), lambda name: None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda state: state.pop("rows"), "rows: not in every rank of its stage: tp 1 pp 0 does not have it"),
        (lambda state: state.update(rows=torch.ones(3, 5)), "rows: its ranks differ in shape or dtype: float32 (2, 5)"),
        (lambda state: state.update(norm=torch.ones(5).half()), "norm: its ranks differ in shape or dtype: float16"),
    ],
)
def test_shares_that_do_not_fit_are_named(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], why: str
) -> None:
    for rank, state in enumerate(shares(3)):
        if rank == 1:
            change(state)
        written(tmp_path, f"consolidated.{rank:02}.pth", state)
    with pytest.raises(SourceError) as caught:
        Joined("where", open_ranks(open_folder(tmp_path)), CUTS.__getitem__)
    assert str(caught.value).startswith("where: ") and why in str(caught.value)


def test_cut_that_a_share_cannot_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"norm: a share of shape \(5,\) cannot be 1 blocks along axis 1"):
        Joined("m", consolidated(tmp_path), {**CUTS, "norm": Cut(1)}.__getitem__)


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    for rank in (0, 3):
        written(tmp_path, f"mp_rank_{rank:02}/model_weights.ckpt", {"a": torch.ones(2)})
    with pytest.raises(SourceError, match="files of ranks are missing: tp 1 pp 0, tp 2 pp 0; copy them as well"):
        rank_files(open_folder(tmp_path))


def test_wild_rank_numbers_take_no_time(tmp_path: Path) -> None:
    for name in ("consolidated.00.pth", "consolidated.999999999999.pth"):
        written(tmp_path, name, {"a": torch.ones(2)})
    with pytest.raises(SourceError, match="missing: tp 1 pp 0, tp 2 pp 0, tp 3 pp 0, tp 4 pp 0;"):
        rank_files(open_folder(tmp_path))


def test_one_rank_under_two_names_is_refused(tmp_path: Path) -> None:
    for name in ("consolidated.0.pth", "consolidated.00.pth"):
        written(tmp_path, name, {"a": torch.ones(2)})
    with pytest.raises(SourceError, match="are the same rank"):
        rank_files(open_folder(tmp_path))


def test_damage_of_several_ranks_is_one_error(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"consolidated.{rank:02}.pth").write_bytes(b"" if rank else b"PK\3\4broken")
    with pytest.raises(
        SourceError, match=r"3 problems\n  consolidated\.00\.pth: the zip has no end record: .*\n.*an empty file"
    ):
        open_ranks(open_folder(tmp_path))


def test_folder_without_ranks_has_none(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert rank_files(open_folder(tmp_path)) == {}


def test_whole_files_of_both_formats_are_one_container(tmp_path: Path) -> None:
    full = whole()
    save_file({"rows": full["rows"], "norm": full["norm"]}, tmp_path / "a.safetensors")
    torch.save({"columns": full["columns"], "gated": full["gated"].t()}, tmp_path / "b.pth")
    files = Files([SafetensorsFile(tmp_path / "a.safetensors"), TorchFile(tmp_path / "b.pth")])
    same(files, {**full, "gated": full["gated"].t()})
    assert read(files, "gated", 24, 60).tobytes() == bits(full["gated"].t()[2:5]).tobytes()
    assert read(files, "rows", 5, 20).tobytes() == bits(full["rows"][1:4]).tobytes()
    assert files.place("rows", 5)[1] - files.place("rows")[1] == 20


def test_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.pth", "b.pth"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(SourceError, match=r"b\.pth: holds w, which a\.pth holds as well"):
        Files([TorchFile(tmp_path / "a.pth"), TorchFile(tmp_path / "b.pth")])
