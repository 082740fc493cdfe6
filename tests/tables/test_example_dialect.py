"""`examples/adding_a_dialect`: its checkpoint is litgpt's own, its one file reads it, installed as its package is."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bridge.core.mappings import parse_table
from bridge.tables.architectures.arch import load_arch
from bridge.tables.architectures.roles import load_roles
from bridge.tables.dialects.check import check_dialect
from bridge.tables.dialects.dialect import Dialect, parse_dialect
from tests.installed import install, run
from tests.oracles.litgpt_golden import GOLDEN, MODEL, digests
from tests.tables.foreign import interleaved

EXAMPLE = Path(__file__).parents[2] / "examples" / "adding_a_dialect"
DIALECT = EXAMPLE / "qbridge_litgpt" / "dialects" / "litgpt.toml"


@pytest.fixture(scope="module")
def litgpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's own checkpoint."""
    made: Path = runpy.run_path(str(EXAMPLE / "convert.py"))["as_litgpt"](MODEL, tmp_path_factory.mktemp("a") / "lit")
    return made


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install(EXAMPLE, tmp_path_factory.mktemp("site") / "site")


def dialect() -> Dialect:
    return parse_dialect(parse_table(DIALECT.read_text(), DIALECT.name), load_roles())


def test_the_checkpoint_of_the_example_is_litgpts_own(litgpt: Path) -> None:
    assert digests(torch.load(litgpt / "lit_model.pth")) == json.loads(GOLDEN.read_text())["tensors"]


@pytest.mark.parametrize("architecture", dialect().architectures)
def test_every_row_spells_its_roles_and_gives_them_back(architecture: str) -> None:
    table = load_arch(architecture)
    assert table is not None
    assert check_dialect(dialect(), table, architecture) == []


def in_groups(matrix: torch.Tensor) -> torch.Tensor:
    """q, k and v of a layer as litgpt laid them out before."""
    q, k, v = (part.numpy() for part in matrix.split((256, 64, 64)))
    return torch.from_numpy(interleaved(q, k, v, heads=8, groups=2))


@pytest.mark.slow
@pytest.mark.parametrize("older", [False, True])
def test_what_is_read_is_the_model(older: bool, litgpt: Path, installed: dict[str, str], tmp_path: Path) -> None:
    state: dict[str, Any] = torch.load(litgpt / "lit_model.pth")
    if older:
        state = {n.replace(".qkv.", ".attn."): in_groups(t) if ".qkv." in n else t for n, t in state.items()}
    (root := tmp_path / "lit").mkdir()
    torch.save(state, root / "lit_model.pth")
    (root / "config.json").write_bytes((MODEL / "config.json").read_bytes())
    code = "import sys, bridge; bridge.convert(sys.argv[1], 'hf', out=sys.argv[2], verify=False)"
    run(installed, "-c", code, str(root), str(tmp_path / "out"))
    want, got = load_file(MODEL / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[name], want[name]) for name in want)


@pytest.mark.slow
def test_the_script_of_the_example_runs(installed: dict[str, str], tmp_path: Path) -> None:
    said = run(installed, str(EXAMPLE / "convert.py"), "--out", str(tmp_path / "out"))
    assert "fp8_pc_pt" in said
    assert json.loads((tmp_path / "out" / "report.json").read_text())["passed"]


@pytest.mark.slow
def test_the_package_of_the_example_holds_the_table_and_its_entry_point(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", tmp_path, EXAMPLE], check=True, capture_output=True, timeout=300)
    wheel = zipfile.ZipFile(next(tmp_path.glob("qbridge_litgpt-*.whl")))
    assert wheel.read("qbridge_litgpt/dialects/litgpt.toml") == DIALECT.read_bytes()
    points = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert wheel.read(points).decode().split() == ["[bridge.mappings]", "litgpt", "=", "qbridge_litgpt"]
