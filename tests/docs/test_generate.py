"""The generated parts: each source, target, scheme, error and public name has its place, and the text is current."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from pathlib import Path

import pytest

import bridge
from bridge.core.values import Program
from bridge.planning.estimate import read_speeds
from bridge.quant.schemes.catalog import scheme_names
from bridge.sources.opening import KINDS
from bridge.targets import load_target, target_names
from docs.generate import PARTS, api, errors, limits, make, matrix, schemes, speed, stored, targets
from docs.generate.doctests import Fenced
from docs.generate.stored import MARK
from tests.blocks import ROOT
from tests.docs.site import PAGES

TARGETS = ROOT / "bridge" / "targets"
OWN_TARGETS = [name for name in target_names() if (TARGETS / f"{name}.py").exists() or (TARGETS / name).is_dir()]
PROGRAMS: dict[str, tuple[Program, ...]] = {
    **{f"target {name}": load_target(name).loaded_by for name in OWN_TARGETS},
    **{f"source {kind}": importlib.import_module(f"bridge.sources.{kind}").WRITTEN_BY for kind in KINDS},
}
# Word of a program's name or proof -> the distribution whose version it says.
INSTALLED = {
    "Megatron-Core": "megatron-core",
    "Megatron-Bridge": "megatron-bridge",
    "Tripy": "nvtripy",
    "torchtitan": "torchtitan",
}


def test_the_targets_that_ship_are_found() -> None:
    assert {"gguf", "hf", "megatron", "mlx", "ort", "torchtitan", "tripy", "trt", "trtllm"} <= set(OWN_TARGETS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_says_how_it_is_known_by_tests_that_exist(name: str) -> None:
    assert PROGRAMS[name]
    for program in PROGRAMS[name]:
        assert program.name and program.versions and program.proof and program.tests
        assert all((ROOT / test).is_file() for test in program.tests), program.tests


def test_versions_that_are_told_are_those_that_tests_ran_with() -> None:
    told = [
        (p, dist) for found in PROGRAMS.values() for p in found for w, dist in INSTALLED.items() if p.name.startswith(w)
    ]
    assert {dist for _, dist in told} == set(INSTALLED.values())
    for program, distribution in told:
        assert program.versions.startswith(importlib.metadata.version(distribution)), program
    for program in (program for found in PROGRAMS.values() for program in found):
        for word, distribution in (("ModelOpt", "nvidia-modelopt"), ("compressed-tensors", "compressed-tensors")):
            for version in re.findall(rf"{word}(?:`| )*(\d+\.\d+)", f"{program.versions} {program.proof}"):
                assert importlib.metadata.version(distribution).startswith(version), program


@pytest.mark.parametrize("kind,names", [("targets", OWN_TARGETS), ("sources", KINDS)])
def test_every_target_and_source_has_a_page_with_its_parts(kind: str, names: tuple[str, ...]) -> None:
    for name in names:
        text = (PAGES / kind / f"{name}.md").read_text()
        wanted = [f"programs {kind[:-1]} {name}"]
        wanted += [f"options {name}", f"takes {name}", f"written {name}"] if kind == "targets" else []
        assert all(f"<!-- generated: {part}" in text for part in wanted), (kind, name)
        assert f"{kind}/{name}.md" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.slow
def test_every_scheme_has_a_page_and_a_test_that_names_it() -> None:
    named = schemes.tests()
    assert set(named) == set(scheme_names()) and all(named.values())
    text = schemes.page("nvfp4_wo", named["nvfp4_wo"])
    assert (
        "| `weight_scale` | 256x8 | float8_e4m3fn | `amax(W, block of 16) / 6` |" in text
        and "tests/targets/hf/test_hf_parity.py" in text
    )


def test_every_mark_of_a_page_names_a_generator() -> None:
    marks = [m["words"].split() for path in PAGES.rglob("*.md") for m in MARK.finditer(path.read_text())]
    assert {name for name, *_ in marks} == set(PARTS)
    with pytest.raises(AssertionError, match="no generator is called 'schmes'"):
        make("schmes")


def test_options_are_those_of_the_target() -> None:
    assert "| `tp` | `--tp` | int | `1` |" in targets.options("trtllm")
    assert "| `cache` | `--cache`, `--no-cache` | bool, int | `True` |" in targets.options("trt")


@pytest.mark.slow
def test_what_a_target_takes_is_what_the_matrix_says() -> None:
    head, _, *rows = (
        [cell.strip(" `") for cell in line.strip("|").split("|")] for line in matrix.schemes().splitlines()
    )
    for name in OWN_TARGETS:
        said = set(re.findall(r"\[`(\S+)`\]\(../schemes/", targets.takes(name)))
        assert said == {row[0] for row in rows if name in head and row[head.index(name)] != "no"}
        assert bool(said) == (name in head)


def test_what_is_written_is_what_a_conversion_wrote() -> None:
    said = targets.written("hf", "int8_wo")
    assert "| `model.safetensors` | loaded by the runtime |" in said
    assert "| `model.layers.{0..4}.self_attn.q_proj.weight` | 5 | 256x128 | int8 | weight |" in said


def test_every_error_has_an_example_that_provokes_it() -> None:
    assert {kind.__name__ for kind in errors.classes()} == set(errors.EXAMPLES)


@pytest.mark.parametrize("name", errors.EXAMPLES)
def test_the_example_of_an_error_gives_it(name: str) -> None:
    assert errors.message(name).startswith(f"{name}: ")
    assert "/tmp" not in errors.message(name)


def test_every_public_name_is_in_the_reference() -> None:
    named = {name for _, _, names in api.PAGES.values() for name in names}
    public = {f"bridge.{name}" for name in bridge.__all__ if name not in ("__version__", "golden", "targets")}
    public |= {f"bridge.golden.{name}" for name in bridge.golden.__all__}
    public |= {f"bridge.tracker.{name}" for name in bridge.tracker.__all__}
    assert public <= named
    assert len(named) == sum(len(names) for _, _, names in api.PAGES.values())
    for name in named:
        assert getattr(api.held(name), "__doc__", ""), f"{name} has no docstring"


def test_limits_are_the_constants_of_the_readers() -> None:
    from bridge.core.formats.safetensors import MAX_HEADER
    from bridge.core.formats.unpickle import MAX_PICKLE

    said = limits.limits()
    assert f"| `core.formats.safetensors.MAX_HEADER` | {MAX_HEADER:,} |" in said
    assert f"| `core.formats.unpickle.MAX_PICKLE` | {MAX_PICKLE >> 20} MiB |" in said


def test_an_example_in_a_docstring_gets_a_fence_and_a_fenced_one_no_second() -> None:
    bare, fenced = ["Text.", "", ">>> 1 + 1", "2", "", "More."], ["```", ">>> 1 + 1", "```"]
    assert Fenced(None).run(bare) == ["Text.", "", "```pycon", ">>> 1 + 1", "2", "```", "", "More."]
    assert Fenced(None).run(bare[:4])[-1] == "```"
    assert Fenced(None).run(fenced) == fenced


def test_pages_are_generated_not_stored() -> None:
    assert not list(Path(PAGES / "schemes").glob("[!i]*.md")) and not (PAGES / "reference" / "verbs.md").exists()


def test_a_row_says_what_an_operation_takes() -> None:
    speeds = read_speeds()
    row = f"| `fp8 channel` | {speeds.write['fp8 channel']:.1f} | {speeds.verify['fp8 channel']:.1f} |"
    assert row in speed.speeds()


@pytest.mark.slow
def test_pages_of_the_readme_have_their_tables_in_the_repository() -> None:
    paths = list(stored.linked())
    assert len(paths) > 30
    stale = [path.name for path in paths if (text := path.read_text("utf-8")) != stored.filled(text, make)]
    assert not stale, f"run `make readme` for {stale}"


def test_a_part_is_filled_once_and_files_are_left_out() -> None:
    page = "a\n\n<!-- generated: x y -->\n\nb\n\n<!-- generated: file z -->\n\nc\n\n<!-- generated: w -->\n"
    made = stored.filled(page, lambda *words: f"| {' '.join(words)} {{: .wide }} |\n")
    assert made.count(stored.END) == 2 and "| x y |" in made and "| w |" in made and "file z |" not in made
    assert stored.filled(made, lambda *words: f"| {' '.join(words)} |") == made
    assert [match["words"] for match in MARK.finditer(made)] == ["x y", "file z", "w"]
    assert MARK.sub("", made).split() == ["a", "b", "c"]


def test_each_scheme_is_on_the_page_of_one_family() -> None:
    found = [schemes.family_page(title) for title in schemes.FAMILIES]
    assert len(found) <= 8
    for name in scheme_names():
        assert sum(f"[`{name}`](" in page for page in found) == 1, name
