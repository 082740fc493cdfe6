"""Outputs at the hub: one commit of a private repository, nothing seen before it, nothing sent twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from huggingface_hub import HfFileSystem, constants, hf_hub_download

import bridge
from bridge.cli.main import app
from bridge.core.errors import UsageError, WriteError
from bridge.core.remote.staged import staging_path
from tests.core.remote.hub_server import ATTRIBUTES, TOKEN, Hub, Repo, serving_hub

TINY = Path(__file__).parents[3] / "examples/models/tiny-llama"
OUT = "hf://org/tiny-int8"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub at which this process may write; the current directory is empty."""
    monkeypatch.chdir(tmp_path)
    with serving_hub() as (url, hub):
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / ".cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_ENDPOINT", url)  # of processes
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        HfFileSystem.clear_instance_cache()
        yield hub
        HfFileSystem.clear_instance_cache()


def convert(out: str = OUT, **arguments: Any) -> Any:
    """Unverified, unless it is asked for: running the model takes longer than all else."""
    return bridge.convert(TINY, out=out, **{"target": "hf", "quant": "int8_wo", "verify": False} | arguments)


def written(hub: Hub, name: str = "org/tiny-int8") -> set[str]:
    return {*hub.repos[name].files} - {*ATTRIBUTES}


def here() -> list[str]:
    return sorted(path.name for path in Path().iterdir() if path.name != ".cache")


@pytest.mark.slow
def test_the_bytes_at_the_hub_are_those_of_a_local_output_in_one_commit(hub: Hub) -> None:
    report = convert()
    bridge.convert(TINY, "hf", "int8_wo", "near", verify=False)
    near = {path.relative_to("near").as_posix() for path in Path("near").rglob("*") if path.is_file()}
    repo = hub.repos["org/tiny-int8"]
    assert written(hub) == near and report.out == OUT and repo.private and len(repo.commits) == 2
    for name in near - {"report.json", "report.html"}:  # they have times in them
        assert repo.files[name] == Path("near", name).read_bytes(), name
    assert here() == ["near"]
    assert Path(hf_hub_download("org/tiny-int8", "config.json")).read_bytes() == Path("near/config.json").read_bytes()


@pytest.mark.slow
def test_what_was_sent_is_read_and_verified_at_the_hub(hub: Hub) -> None:
    convert()
    assert bridge.verify(OUT, TINY).passed
    again = bridge.convert(OUT, "hf", out="hf://me/again", verify=False)  # its card is read there
    codes = [hub.repos[name].files["model.safetensors"] for name in ("org/tiny-int8", "me/again")]
    assert codes[0] == codes[1] and again.out == "hf://me/again"


@pytest.mark.slow
def test_a_killed_upload_goes_on_and_sends_no_file_twice(hub: Hub) -> None:
    command = [sys.executable, "-m", "bridge", "convert", str(TINY), "--target", "hf", "--quant", "int8_wo"]
    command += ["--shard-size", "100KB", "--no-verify", "--out", OUT]
    hub.stalls = "/commit/"
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert hub.stalled.wait(60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert written(hub) == set() and len(hub.sent) > 3  # a repository without a file of a model
    made = (staging_path(OUT) / "bridge.json").stat().st_mtime_ns
    assert made and here() == [staging_path(OUT).parent.name]
    hub.stalls, before = "", len(hub.sent)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(hub.sent) == before and "bridge.json" in written(hub) and here() == []


@pytest.mark.parametrize("lost", [False, True])
def test_a_failed_commit_leaves_nothing_there_and_a_lost_answer_is_no_failure(lost: bool, hub: Hub) -> None:
    if lost:
        hub.lost = ["POST .*/commit/"]
        assert convert().passed and len(hub.repos["org/tiny-int8"].commits) == 2
        return
    hub.fails["/commit/"] = [500]
    with pytest.raises(WriteError, match="cannot be asked") as caught:
        convert()
    assert written(hub) == set() and f"the finished output is kept in {staging_path(OUT)}" in str(caught.value)
    sent = len(hub.sent)
    convert()
    assert len(hub.sent) == sent and "bridge.json" in written(hub) and here() == []


def test_what_a_kill_left_here_after_the_commit_is_removed_by_the_next_run(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as once:
        once.setattr("bridge.core.remote.staged.Staged.tidy_up", lambda self: None)
        convert()
    assert staging_path(OUT).is_dir()
    with pytest.raises(WriteError, match="exists already"):
        convert()
    assert here() == []


def test_an_existing_output_is_refused_before_work_and_replaced_if_asked(hub: Hub) -> None:
    convert()
    hub.repos["org/tiny-int8"].files["old.safetensors"] = b"of an earlier version"
    with pytest.raises(WriteError, match=rf"{OUT} exists already, with .*; choose another name, or pass overwr"):
        convert(quant="no scheme at all")  # nothing else was looked at
    tokenizer, sent = hub.repos["org/tiny-int8"].files["tokenizer.json"], len(hub.sent)
    convert(quant="fp8_pc_pt", overwrite=True)
    repo = hub.repos["org/tiny-int8"]
    assert "old.safetensors" not in written(hub) and b"fp8_pc_pt" in repo.files["bridge.json"]
    assert repo.files["tokenizer.json"] == tokenizer and len(hub.sent) == sent + 1 and len(repo.commits) == 3


def test_what_is_not_ours_is_never_replaced(hub: Hub) -> None:
    hub.repos["org/tiny-int8"] = Repo(files={**ATTRIBUTES, "thesis.tex": b"work of years"})
    with pytest.raises(WriteError, match="was not written by bridge"):
        convert(overwrite=True)
    assert written(hub) == {"thesis.tex"} and not any(asked.startswith(("POST", "PUT")) for asked in hub.asked)


def test_an_empty_repository_is_written_to_and_stays_as_visible_as_it_was(hub: Hub) -> None:
    hub.repos["org/tiny-int8"] = Repo(private=False)
    convert()
    assert "bridge.json" in written(hub) and not hub.repos["org/tiny-int8"].private


@pytest.mark.parametrize(
    ("out", "token", "said"),
    [
        ("hf://org/tiny-int8", "", "no token of the hub is here; `hf auth login`, or set HF_TOKEN"),
        ("hf://org/tiny-int8", "hf_expired", "the hub does not know this user (Invalid username or password.)"),
        ("hf://org/tiny-int8", "hf_reader", "the token of me may only read"),
        ("hf://other/tiny", TOKEN, "me may not write to other; may write to me, org: choose one of them"),
        ("hf://shop/tiny", TOKEN, "me may not write to shop; may write to me, org"),
        ("hf://other/public", TOKEN, "this user may not write there (You have read access but not the required"),
        ("hf://other/hidden", TOKEN, "me may not write to other"),
        ("hf://org/old", TOKEN, "hf://org/old is called hf://org/new at the hub; give that"),
    ],
)
def test_a_name_that_one_may_not_write_to_is_one_error_before_work(
    out: str, token: str, said: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos = {"other/public": Repo(), "other/hidden": Repo(private=True), "org/new": Repo()}
    hub.renamed = {"org/old": "org/new"}
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    else:
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "none")
    monkeypatch.setattr("bridge.api.conversion.resolve", None)  # nothing is planned
    with pytest.raises(WriteError) as caught:
        convert(out)
    assert str(caught.value).startswith(out) and said in str(caught.value) and "hf_" not in str(caught.value)
    assert here() == [] and not any(asked.startswith(("POST", "PUT")) for asked in hub.asked)


def test_a_hub_that_does_not_answer_is_told_before_work(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(WriteError, match=r"the hub cannot be asked .* check the network, HF_ENDPOINT and HF_HUB_OFF"):
        convert()
    assert here() == []


def test_a_creation_that_the_hub_refuses_comes_before_the_work(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.fails["repos/create"] = [403]
    monkeypatch.setattr("bridge.targets.manifest.write", None)
    with pytest.raises(WriteError, match="this user may not write there"):
        convert()
    assert hub.repos == {} and here() == []


def test_a_model_that_cannot_be_planned_makes_no_repository(hub: Hub) -> None:
    with pytest.raises(UsageError):
        convert(quant="no scheme at all")
    assert hub.repos == {} and here() == []


@pytest.mark.slow
def test_a_conversion_that_fails_leaves_an_empty_private_repository_and_says_so(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise WriteError("the disk is full")

    monkeypatch.setattr("bridge.targets.manifest.write", fails)
    with (
        pytest.warns(UserWarning, match=f"{OUT} was made, private and empty"),
        pytest.raises(WriteError, match="the disk is full"),
    ):
        convert()
    assert written(hub) == set() and hub.repos["org/tiny-int8"].private and here() == []


def test_a_card_that_the_hub_refuses_is_told_before_the_work(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path("model")
    model.mkdir()
    for file in TINY.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "README.md").write_text("---\nbase_model: /home/me/llama\n---\n# Mine\n")
    monkeypatch.setattr("bridge.targets.manifest.write", None)
    with pytest.raises(WriteError, match=r'does not take the metadata of the source.s README.md .*"/home/me/llama'):
        bridge.convert(model, "hf", "int8_wo", OUT)
    assert hub.repos == {} and here() == ["model"]


@pytest.mark.slow
def test_a_commit_of_others_meanwhile_is_not_overwritten(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.targets import manifest as writing

    write = writing.write

    def meanwhile(context: Any) -> Any:
        hub.repos["org/tiny-int8"].files["theirs.txt"] = b"theirs"
        hub.repos["org/tiny-int8"].commits.append("theirs")
        return write(context)

    monkeypatch.setattr(writing, "write", meanwhile)
    with pytest.raises(WriteError, match="was changed by others meanwhile"):
        convert()
    assert written(hub) == {"theirs.txt"} and not hub.sent


def test_a_gitignore_there_is_refused_before_work(hub: Hub) -> None:
    """The hub would leave files out of the commit, and old ones beside new ones."""
    hub.repos["org/tiny-int8"] = Repo(files={".gitattributes": b"", ".gitignore": b"config.json"})
    hub.repos["org/tiny-int8"].files["bridge.json"] = b"of an earlier output"
    with pytest.raises(WriteError, match=r"has a \.gitignore, by which the hub leaves files out; remove it there"):
        convert(overwrite=True)
    assert not any(asked.startswith(("POST", "PUT")) for asked in hub.asked)


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("hf://tiny", "give a whole model of the hub: hf://org/name"),
        ("hf://org/tiny/eight", "give a whole model of the hub: hf://org/name"),
        ("hf://datasets/tiny", "give a whole model of the hub: hf://org/name"),
        ("hf://org/tiny@v1", "an output is the next commit of the main branch; leave out what follows @"),
        ("hf://org/ti ny", "not a name of the hub (Repo id must use alphanumeric chars"),
        ("hf://org/ti--ny", "not a name of the hub (Cannot have -- or .. in repo_id"),
        ("hf://", "give a whole model of the hub: hf://org/name"),
    ],
)
def test_a_malformed_name_is_refused_without_asking_the_hub(out: str, said: str, hub: Hub) -> None:
    with pytest.raises(UsageError) as caught:
        convert(out)
    assert said in str(caught.value) and not hub.asked and here() == []


@pytest.mark.slow
def test_a_plan_tells_what_would_be_uploaded_and_changes_nothing(hub: Hub) -> None:
    words = ["plan", str(TINY), "--target", "hf", "--quant", "int8_wo", "--out", OUT]
    said = CliRunner().invoke(app, words).stdout
    assert f"upload   {OUT}: README.md, model.safetensors, tokenizer.json, tokenizer_config.json: " in said
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["upload"]
    assert hub.repos == {} and not any(asked.startswith(("POST", "PUT")) for asked in hub.asked) and here() == []
    report = convert()
    weights = len(hub.repos["org/tiny-int8"].files["model.safetensors"])
    assert told["out"] == OUT and {*told["files"]} <= written(hub) and told["bytes"] >= weights
    assert report.plan_digest == bridge.plan(TINY, "hf", "int8_wo", out=OUT, overwrite=True).digest
    with pytest.raises(WriteError, match="exists already"):
        bridge.plan(TINY, "hf", "int8_wo", out=OUT)


@pytest.mark.slow
def test_the_command_of_a_server_has_the_name_at_the_hub(hub: Hub) -> None:
    report = convert(quant="fp8_pc_pt", runtime="vllm")
    assert report.command == "vllm serve org/tiny-int8" and not replace(report, target="ort").command


@pytest.mark.slow
def test_a_row_of_a_batch_is_sent_and_left_alone_when_it_is_there(hub: Hub) -> None:
    row = '[[row]]\nname = "{}"\nmodel = "{}"\ntarget = "hf"\nquant = "int8_wo"\nverify = false\nout = "hf://{}/{{name}}"\n'
    Path("nightly.toml").write_text(row.format("tiny", TINY, "org") + row.format("other", TINY, "shop"))
    planned = bridge.batch("nightly.toml", dry_run=True)
    assert "me may not write to shop" in planned.outcomes["other"].error and hub.repos == {}
    report = bridge.batch("nightly.toml", workers=1, only="tiny")
    assert report.passed and not report.outcomes["tiny"].kept and "bridge.json" in written(hub, "org/tiny")
    commits = len(hub.repos["org/tiny"].commits)
    assert bridge.batch("nightly.toml", workers=1, only="tiny").outcomes["tiny"].kept
    assert len(hub.repos["org/tiny"].commits) == commits
