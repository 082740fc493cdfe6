"""The wheel and the sdist: built as a user's pip builds them, and used from the wheel alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from bridge.core import version
from bridge.quant.schemes.catalog import scheme_names

ROOT = Path(__file__).parent.parent
SERVERS: dict[str, list[str]] = tomllib.loads((ROOT / "tests" / "matrix" / "cells.toml").read_text())["servers"]
EXCLUDED = {"torch==2.11.0": "no conversion ran with it: tests/matrix/results.toml"}
TEXTS = (".py", ".md", ".toml", ".ipynb", ".txt", "Makefile", ".html", ".yml")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*build, "--wheel-dir", out, ROOT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return next(out.glob("quantbridge-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def run(site: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=site, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_every_file_of_package_tables_and_kernels(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    moved = {"bridge": "bridge", "mappings": "bridge/_mappings", "kernels": "bridge/_kernels"}
    for directory, inside in moved.items():
        files = [p for p in (ROOT / directory).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        wanted = {f"{inside}/{path.relative_to(ROOT / directory)}" for path in files} - {"bridge/_kernels.py"}
        assert wanted <= names, wanted - names
    assert {"bridge/py.typed", "bridge/_mappings/roles.toml", "bridge/_kernels/fp8.py"} <= names


def test_the_wheel_puts_nothing_else_at_the_top_level(wheel: Path) -> None:
    top = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"bridge"}
    assert "bridge/_kernels.py" not in zipfile.ZipFile(wheel).namelist()


def test_the_wheel_carries_the_licences_and_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = next(name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name)
    assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
    assert "Python Software Foundation" in archive.read(f"{info}/licenses/NOTICE").decode()
    assert "qbridge = bridge.__main__:main" in archive.read(f"{info}/entry_points.txt").decode()


def test_the_installed_package_finds_its_own_tables_and_kernels(installed: Path) -> None:
    code = """
import bridge, bridge._kernels.fp8, bridge.core.mappings, bridge.quant.schemes.catalog
print(bridge.__file__, bridge._kernels.fp8.__file__, bridge.core.mappings.mappings())
print(len(bridge.quant.schemes.catalog.scheme_names()))
"""
    *places, schemes = run(installed, "-c", code).split()
    assert all(place.startswith(str(installed)) for place in places)
    assert int(schemes) == len(scheme_names()) > len(list((ROOT / "mappings" / "schemes").glob("*.toml"))) - 1


def test_the_installed_command_plans(installed: Path) -> None:
    model = ROOT / "examples" / "models" / "tiny-llama"
    said = run(installed, "-m", "bridge", "plan", str(model), "--target", "trt", "--quant", "int4_awq")
    assert "35 of 36 matrices quantized" in said


def test_the_sdist_builds_the_same_wheel_without_machine_code(wheel: Path, tmp_path: Path) -> None:
    """Object files are of a machine, an sdist of none: what it builds compiles the kernels at the first conversion."""
    from hatchling.build import build_sdist

    before = Path.cwd()
    os.chdir(ROOT)  # the hook of PEP 517 works in the current directory
    try:
        archive = tmp_path / build_sdist(str(tmp_path))
    finally:
        os.chdir(before)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", tmp_path, archive], check=True, capture_output=True, timeout=300)
    again = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    assert set(again.namelist()) == {n for n in zipfile.ZipFile(wheel).namelist() if "/objects/" not in n}


@pytest.mark.parametrize("extra", ["", "trt", "calibrate", "inspect"])
@pytest.mark.parametrize("server", SERVERS)
def test_the_wheel_excludes_no_pin_of_a_server_without_a_reason(server: str, extra: str, wheel: Path) -> None:
    """pip resolves by the wheel's own metadata: a range without a server's pin changes that server, or stops pip."""
    archive = zipfile.ZipFile(wheel)
    metadata = next(archive.read(name) for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    fields = Parser().parsestr(metadata.decode())
    needs = [Requirement(text) for text in fields.get_all("Requires-Dist", [])]
    ours = [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    pins = dict(pin.split("==") for pin in SERVERS[server])
    pinned = [need for need in ours if need.name in pins]
    excluded = {f"{need.name}=={pins[need.name]}" for need in pinned if pins[need.name] not in need.specifier}
    assert excluded <= {*EXCLUDED} and (pinned or not extra)
    assert not excluded or extra  # the package alone is installed beside each of them
    assert all(f"3.{minor}" in SpecifierSet(fields["Requires-Python"]) for minor in (11, 12, 13))


def test_no_text_installs_a_strangers_package() -> None:
    """`qbridge` on PyPI compiles quantum circuits, and `quantbridge` is not published."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    wrong = re.compile(
        r"pip install (-\S+ )*[\"'`]?(qbridge|quantbridge)\b(?!-[\d{])"  # but for the file of a wheel
        r"|\bqbridge\[[a-z]|dependencies = .*\"qbridge\b"
    )
    found = {name for name in files if name.endswith(TEXTS) and wrong.search((ROOT / name).read_text())}
    assert found <= {"tests/test_package.py"}


def test_a_missing_extra_is_installed_from_the_checkout_or_from_the_wheel(wheel: Path, installed: Path) -> None:
    """pip itself takes both commands, as far as it can without a network."""
    assert version.install("trt") == f"pip install -e '{ROOT}[trt]'"
    said = run(installed, "-c", "from bridge.core.version import install; print(install('golden'))").strip()
    assert said == f"pip install '.[golden]' in bridge's checkout, or '{wheel.name}[golden]'"
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-index", "--no-build-isolation"]
    for what in (f"{ROOT}[gguf]", f"{wheel}[golden]"):
        done = subprocess.run([*pip, what], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


def test_pip_finds_no_fault_in_what_the_package_needs() -> None:
    """Others are installed without what they need; only lines about this distribution count."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=120)
    assert not [line for line in done.stdout.splitlines() if line.startswith(version.DISTRIBUTION)]
    assert version.installed(version.DISTRIBUTION) == version.__version__
