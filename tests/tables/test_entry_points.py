"""Tables of third parties, by the entry point `bridge.mappings`: found where ours have no such name, and never run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import bridge
from bridge.core import entry_points
from bridge.core import mappings as files
from bridge.core.errors import TableError, UsageError
from bridge.core.mappings import mappings
from bridge.quant.schemes.catalog import scheme_names
from bridge.quant.schemes.load import load_scheme
from bridge.tables.architectures.arch import load_arch
from bridge.tables.dialects.dialect import dialect_names, load_dialect

LLAMA = (mappings() / "arch/llama.toml").read_text()
COUSIN = LLAMA.replace("Llama", "Cousin")
META = (mappings() / "dialects/meta.toml").read_text()
FP8 = (mappings() / "schemes/fp8.toml").read_text()


class Site:
    """A directory on the path in which distributions are installed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, package: str, tables: dict[str, str], value: str = "") -> None:
        """Install a package whose code would not run."""
        info = self.root / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[bridge.mappings]\n{package} = {value or package}\n")
        (self.root / package).mkdir()
        (self.root / package / "__init__.py").write_text("raise SystemExit('this is data')\n")
        for name, text in tables.items():
            (path := self.root / package / name).parent.mkdir(exist_ok=True)
            path.write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(tmp_path)
    files._added.cache_clear()
    entry_points._all.cache_clear()
    yield Site(tmp_path)
    files._added.cache_clear()
    entry_points._all.cache_clear()


@pytest.mark.slow
def test_an_architecture_a_dialect_and_a_scheme_are_found_by_name(site: Site) -> None:
    scheme = FP8.replace('["float8"]', '["theirs"]')
    site.add("theirs", {"arch/cousin.toml": COUSIN, "dialects/kin.toml": META, "schemes/eight.toml": scheme})
    table = load_arch("CousinForCausalLM")
    assert table is not None and table.file.name == str(site.root / "theirs/arch/cousin.toml")
    assert "kin" in dialect_names() and load_dialect("kin").architectures == {"LlamaForCausalLM": "llama"}
    assert "eight" in scheme_names() and load_scheme("eight").name == load_scheme("theirs").name == "eight"
    assert bridge.check() == []


@pytest.mark.slow
def test_an_architecture_says_how_a_dialect_that_ships_lays_it_out(site: Site) -> None:
    said = '\n[layouts.CousinForCausalLM]\nmegatron = "llama"\nmeta = "llama"\n'
    site.add("theirs", {"arch/cousin.toml": COUSIN.replace("\n[foreign]", f"{said}\n[foreign]")})
    assert load_dialect("megatron").architectures["CousinForCausalLM"] == "llama"
    assert "CousinForCausalLM" not in load_dialect("torchtitan").architectures
    assert bridge.check() == []


@pytest.mark.slow
def test_a_wrong_row_of_theirs_is_told_with_its_file(site: Site) -> None:
    site.add("theirs", {"arch/cousin.toml": COUSIN.replace('"mlp.norm.weight"', '"mlp.nrm.weight"')})
    (problem,) = bridge.check()
    assert problem.startswith(f"{site.root}/theirs/arch/cousin.toml:") and "`mlp.nrm.weight` is unknown" in problem


def test_two_files_of_one_name_are_an_error_wherever_they_lie(site: Site) -> None:
    site.add("theirs", {"arch/llama.toml": COUSIN})
    assert load_arch("LlamaForCausalLM") is not None  # ours is found without a look at theirs
    (problem,) = bridge.check()
    assert "theirs/arch/llama.toml: arch 'llama' is mappings/arch/llama.toml already; rename" in problem
    site.add("others", {"schemes/one.toml": FP8})
    site.add("third", {"schemes/one.toml": FP8})
    files._added.cache_clear()
    entry_points._all.cache_clear()
    with pytest.raises(TableError, match=r"third/schemes/one.toml: schemes 'one' is .*others/schemes/one.toml already"):
        load_scheme("one")


@pytest.mark.slow
def test_two_tables_of_one_architecture_are_a_problem(site: Site) -> None:
    site.add("theirs", {"arch/own.toml": LLAMA})
    assert any("`LlamaForCausalLM` is also listed in mappings/arch/llama.toml" in problem for problem in bridge.check())


@pytest.mark.parametrize(
    ("value", "tables", "says"),
    [
        ("nobody", {"arch/a.toml": ""}, "no module of that name"),
        ("", {"a.toml": ""}, "holds none of arch, composites, dialects"),
    ],
)
def test_an_entry_point_that_leads_nowhere_is_told(site: Site, value: str, tables: dict[str, str], says: str) -> None:
    site.add("theirs", tables, value)
    assert load_scheme("fp8").name == "fp8"
    with pytest.raises(TableError, match=f"entry point theirs = .* of bridge.mappings: .*{says}"):
        load_scheme("eight")
    assert says in bridge.check()[0]


def test_an_unknown_name_is_still_told_with_the_nearest(site: Site) -> None:
    site.add("theirs", {"schemes/eight.toml": FP8.replace('["float8"]', "[]")})
    with pytest.raises(UsageError, match="nearest: eight"):
        load_scheme("eigth")
    with pytest.raises(TableError, match=r"dialect 'megatrn' is unknown; .*nearest: megatron"):
        load_dialect("megatrn")
