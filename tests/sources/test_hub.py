"""Hub ids without a network: the cache serves, and what cannot be had is one clear error."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import errors
from safetensors.numpy import save_file

from bridge.core.errors import SourceError
from bridge.sources import hub
from bridge.sources.opening import open_source

REVISION = "0" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the model org/name in it, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(REVISION)
    (snapshot / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    save_file({"a": np.ones(3, np.float32)}, snapshot / "model.safetensors")
    return tmp_path


def refusal(model: object) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(model)
    return str(caught.value)


def test_cache_serves_offline(cache: Path) -> None:
    source = open_source("org/name")
    assert (source.where, source.name, list(source.specs)) == ("org/name", "name", ["a"])
    assert source.read("a").tolist() == [1, 1, 1]


def test_revision_is_taken_after_an_at_sign(cache: Path) -> None:
    assert open_source(f"org/name@{REVISION}").name == "name"


def test_directory_of_the_same_name_wins(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    local = tmp_path / "org" / "name"
    local.mkdir(parents=True)
    (local / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    save_file({"b": np.ones(2, np.float32)}, local / "model.safetensors")
    assert list(open_source("org/name").specs) == ["b"]


def test_incomplete_cache_is_told_by_its_index(cache: Path) -> None:
    snapshot = cache / "models--org--name" / "snapshots" / REVISION
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "model-00002-of-00002.safetensors: missing, though the index names it" in refusal("org/name")


def test_what_the_cache_lacks_is_said_with_both_reasons(cache: Path) -> None:
    message = refusal("org/other")
    assert message.startswith(
        "org/other: no such directory here, and the hub cannot be reached, nor does its cache hold"
    )


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "a/b/c", "model.nemo", "~/nowhere-at-all"])
def test_path_that_does_not_exist_is_not_asked_of_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    assert "no such directory, and not a hub id either (org/name); check the path" in refusal(path)


def test_path_object_is_never_a_hub_id() -> None:
    assert "no such directory, and not a hub id either" in refusal(Path("org/name"))


def answers(kind: type[Exception]) -> Callable[..., str]:
    def download(*_: object, **__: object) -> str:
        raise kind.__new__(kind)  # without the web response that its __init__ wants

    return download


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (errors.GatedRepoError, "the hub asks for access rights to org/name; request them and `hf auth login`"),
        (errors.RepositoryNotFoundError, "the hub has no (public) model org/name; check spelling"),
        (errors.RevisionNotFoundError, "org/name on the hub has no revision 'v2'"),
    ],
)
def test_refusals_of_the_hub_are_told_apart(
    kind: type[Exception], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", answers(kind))
    assert reason in refusal("org/name@v2")


def test_pickles_are_fetched_only_where_there_is_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def download(name: str, **arguments: object) -> str:
        asked.append(arguments)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    hub.snapshot("org/name")
    assert [a["allow_patterns"] for a in asked] == [None, hub.BIN]
    assert {"*.bin", "*.py", "*.pth"} <= set(hub.OTHER_WEIGHTS)
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    asked.clear()
    hub.snapshot("org/name")
    assert len(asked) == 1


def test_a_full_disk_is_not_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/cache/model.safetensors")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(SourceError, match=r"org/name: cannot be written here: No space left on device \(/cache/model"):
        hub.snapshot("org/name")
