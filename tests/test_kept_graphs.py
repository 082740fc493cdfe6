"""A kept graph is loaded only if an export would give it, and other code, packages and arguments make it stale."""

from __future__ import annotations

import ast
from pathlib import Path

import onnx
import pytest

from tests import kept_graphs, once
from tests.kept_graphs import Request

REQUEST = Request({"model_type": "llama", "num_hidden_layers": 2}, {"dtype": "float32", "image": None})
CONTENT = b'{"note": ""}\nmodel'


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Archives and waiting exports of a tree of its own, whose code and packages are "now"."""
    monkeypatch.setattr(kept_graphs, "ARCHIVES", tmp_path / "archives")
    monkeypatch.setattr(kept_graphs, "WAITING", tmp_path / "waiting")
    monkeypatch.setattr(kept_graphs, "made_with", lambda: "now")
    monkeypatch.setattr(once, "ROOT", tmp_path)
    monkeypatch.delenv("BRIDGE_GRAPHS", raising=False)
    kept_graphs.archived.cache_clear()
    return tmp_path


def renew() -> None:
    kept_graphs.renew()
    kept_graphs.archived.cache_clear()


def test_a_stored_export_is_loaded_before_and_after_it_is_archived(tree: Path) -> None:
    assert kept_graphs.load(REQUEST) is None
    kept_graphs.store(REQUEST, CONTENT)
    assert kept_graphs.load(REQUEST) == CONTENT
    renew()
    assert not kept_graphs.WAITING.exists()
    assert [path.name for path in kept_graphs.ARCHIVES.iterdir()] == ["llama.tar.xz"]
    assert kept_graphs.load(REQUEST) == CONTENT


def test_a_graph_of_other_code_or_packages_is_not_loaded(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_graphs.store(REQUEST, CONTENT)
    renew()
    kept_graphs.store(REQUEST, CONTENT)
    monkeypatch.setattr(kept_graphs, "made_with", lambda: "later")
    kept_graphs.archived.cache_clear()
    assert kept_graphs.load(REQUEST) is None


@pytest.mark.parametrize(
    "other",
    [
        Request({**REQUEST.fields, "num_hidden_layers": 3}, REQUEST.options),
        Request({**REQUEST.fields, "rope_theta": 1e5}, REQUEST.options),
        Request(REQUEST.fields, {**REQUEST.options, "dtype": "float16"}),
        Request(REQUEST.fields, {**REQUEST.options, "image": (2, 3)}),
    ],
)
def test_a_graph_of_another_request_is_not_loaded(tree: Path, other: Request) -> None:
    kept_graphs.store(REQUEST, CONTENT)
    renew()
    assert kept_graphs.load(other) is None
    assert Request.of_text(other.text()).key == other.key


def test_a_run_that_exports_all_loads_nothing(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_graphs.store(REQUEST, CONTENT)
    monkeypatch.setenv("BRIDGE_GRAPHS", "export")
    assert kept_graphs.load(REQUEST) is None


def test_a_graph_that_the_last_whole_run_did_not_need_is_removed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Request({**REQUEST.fields, "num_hidden_layers": 3}, REQUEST.options)
    for request in (REQUEST, other):
        kept_graphs.store(request, CONTENT)
    renew()
    kept_graphs.note(REQUEST, "loaded")
    monkeypatch.setenv("BRIDGE_GRAPHS", "whole")
    assert kept_graphs.report(tree, passed=False) == kept_graphs.report(tree, passed=True) == ["float graphs: 1 loaded"]
    renew()
    assert [kept_graphs.load(request) for request in (REQUEST, other)] == [CONTENT, None]


def test_a_run_reports_its_exports_by_file(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept_graphs.report(tree, passed=True) == []
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/test_x.py::test (call)")
    kept_graphs.note(REQUEST, "stored")
    kept_graphs.note(Request({}, {}), "exported")
    assert kept_graphs.report(tree, passed=True) == [
        "float graphs: 1 stored, 1 exported; `make graphs` keeps the stored", "  2 exports in tests/test_x.py",
    ]  # fmt: skip


CODE = '"""Say."""\ndef f(a):\n    """Say more."""\n    return a + 1  # one\n'


@pytest.mark.parametrize("text", ["def f(a):\n    return (\n        a + 1)\n", CODE.replace("more", "less")])
def test_comments_docstrings_and_layout_make_no_graph_stale(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(CODE)
    (tmp_path / "b.py").write_text(text)
    assert kept_graphs.code_of(tmp_path / "a.py") == kept_graphs.code_of(tmp_path / "b.py")


@pytest.mark.parametrize(
    "change", [("+ 1", "+ 2"), ("+ 1", "- 1"), ("a + 1", "b + 1"), ("+ 1", "+ 1.0"), ("(a)", "(*a)")]
)
def test_any_change_of_code_makes_graphs_stale(change: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(CODE)
    (tmp_path / "b.py").write_text(changed := CODE.replace(*change))
    ast.parse(changed)
    assert kept_graphs.code_of(tmp_path / "a.py") != kept_graphs.code_of(tmp_path / "b.py")


def test_the_code_that_exports_is_where_it_is_looked_for() -> None:
    assert all((kept_graphs.ROOT / name).exists() for name in (*kept_graphs.CODE, *kept_graphs.OTHER_CODE))
    assert any("def export_graph(" in path.read_text() for path in kept_graphs.code_files())


def test_packages_that_decide_a_graph_are_pinned() -> None:
    lines = (kept_graphs.ROOT / "tests" / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].replace("_", "-") for line in lines if "==" in line}
    assert pinned.issuperset(kept_graphs.PACKAGES)


def model(*values: float, name: str = "x") -> bytes:
    table = onnx.helper.make_tensor("table", onnx.TensorProto.FLOAT, [len(values)], values)
    node = onnx.helper.make_node("Identity", ["table"], ["y"], name=name)
    graph = onnx.helper.make_graph([node], "g", [], [], initializer=[table])
    return b"{}\n" + onnx.helper.make_model(graph).SerializeToString(deterministic=True)


def test_last_bits_of_floats_alone_may_differ_between_machines() -> None:
    assert kept_graphs.differences(model(1.0, 3.0), model(1.0 + 2e-7, 3.0)) == []
    assert kept_graphs.differences(model(1.0, 3.0), model(1.0 + 1e-5, 3.0)) == ["table"]
    assert kept_graphs.differences(model(1.0), model(1.0, 1.0)) == ["table"]
    assert kept_graphs.differences(model(1.0), model(1.0, name="y")) == ["nodes or values"]
    assert kept_graphs.differences(model(1.0), b"[]" + model(1.0)[2:]) == ["{} is not []"]


def test_a_test_that_replaces_code_of_the_exporter_keeps_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.targets.onnx.export import naming

    assert [*kept_graphs._replaced()] == []
    monkeypatch.setattr(naming, "name_by_structure", lambda model: None)
    assert [*kept_graphs._replaced()] == ["bridge.targets.onnx.export.naming.name_by_structure"]
