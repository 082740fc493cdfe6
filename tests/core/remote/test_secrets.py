"""Passwords in addresses: no verb shows one, and what cannot lie at an address is refused before it is quoted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import bridge
from bridge.cli.main import app
from bridge.core.addresses import LOCAL_ARGUMENTS, check_local
from bridge.core.errors import BridgeError, GoldenError, UsageError, VerifyError
from bridge.workflows.batch.manifest.keys import OWN
from bridge.workflows.batch.manifest.read import read_manifest
from tests.core.remote.server import serving

MODELS = Path(__file__).parents[3] / "examples/models"
TINY = MODELS / "tiny-llama"
ADDRESS = "https://me:secret@127.0.0.1:1/a"
REFUSED = "{}=https://127.0.0.1:1/a{}: only a model and an output may be at an address"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two written models, and a golden of the first."""
    root = tmp_path_factory.mktemp("outputs")
    for name, quant in (("a", "int8_wo"), ("b", "fp8_pc_pt")):
        bridge.convert(TINY, "hf", quant, root / name, verify=False)
    bridge.golden.record(root / "a", root / "golden", run=False)
    return root


@pytest.mark.slow
def test_goldens_and_verify_show_the_address_alone(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = outputs / "golden"
    with serving(outputs) as (url, _):
        far = f"{url.replace('//', '//me:secret@')}/b?sig=veiled"
        moved = bridge.golden.check(golden, far, run=False)
        assert moved.after == f"{url}/b" and bridge.golden.diff(golden, far).after == f"{url}/b"
        assert bridge.golden.diff(far, golden).before == f"{url}/b"
        told = CliRunner().invoke(app, ["golden", "check", str(golden), far, "--no-run", "--json"]).output
        with pytest.raises(GoldenError) as again:
            bridge.golden.record(far, golden, run=False)
        with pytest.raises(VerifyError) as other:
            bridge.verify(far, MODELS / "tiny-gpt2")
        monkeypatch.setattr(bridge.reporting.report.Report, "passed", False)
        with pytest.raises(GoldenError) as far_off:
            bridge.golden.record(far, outputs / "none", against=TINY, run=False)
    for text in (told, str(again.value), str(other.value), str(far_off.value)):
        assert f"{url}/b" in text and "secret" not in text and "veiled" not in text


@pytest.mark.parametrize(
    ("word", "suffix"),
    [
        ("calib", ".safetensors"), ("calib", ".txt"), ("calib", ""), ("tokenizer", ""), ("config", ".json"),
        ("quant", ".toml"), ("quant", ""),
    ],
)  # fmt: skip
def test_what_lies_at_no_address_is_refused_in_words(word: str, suffix: str, tmp_path: Path) -> None:
    words = {"quant": "fp8", word: f"{ADDRESS}{suffix}?sig=veiled"}
    with pytest.raises(UsageError) as caught:
        bridge.convert(TINY, "hf", out=tmp_path / "out", **words)
    assert str(caught.value).startswith(REFUSED.format(word, suffix))
    flags = [text for key, value in words.items() for text in (f"--{key}", value)]
    said = CliRunner().invoke(app, ["convert", str(TINY), "--target", "hf", "--out", str(tmp_path / "out"), *flags])
    assert said.exit_code == 2 and "secret" not in said.output and "veiled" not in said.output
    manifest = "".join(f'{key} = "{value}"\n' for key, value in {"model": TINY, "target": "hf", **words}.items())
    (tmp_path / "batch.toml").write_text(f"[[row]]\n{manifest}")
    with pytest.raises(UsageError) as caught:
        bridge.batch(tmp_path / "batch.toml", workers=1)
    assert "only a model and an output may be at an address" in str(caught.value)
    assert "secret" not in str(caught.value) and "veiled" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["batch.toml"]


def test_every_word_for_what_is_read_from_a_path_alone_is_known_to_manifests_too(tmp_path: Path) -> None:
    for word in LOCAL_ARGUMENTS:
        with pytest.raises(UsageError, match=f"{word}=https://127.0.0.1:1/a: only a model"):
            check_local(**{word: ADDRESS})
    for word in {*LOCAL_ARGUMENTS} & {*OWN}:
        (tmp_path / "batch.toml").write_text(f'[[row]]\nmodel = "m"\ntarget = "hf"\n{word} = "{ADDRESS}"\n')
        with pytest.raises(UsageError, match=f"{word} = .*only a model and an output may be at an address"):
            read_manifest(tmp_path / "batch.toml")
    with pytest.raises(AssertionError, match="recipe"):
        check_local(recipe=None)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda out: bridge.calibrate(TINY, "fp8", f"{ADDRESS}.txt"), REFUSED.format("data", ".txt")),
        (lambda out: bridge.verify(out, TINY, data=f"{ADDRESS}.txt"), REFUSED.format("data", ".txt")),
        (
            lambda out: bridge.golden.record(out, "none", quant=f"{ADDRESS}.toml", run=False),
            REFUSED.format("quant", ".toml"),
        ),
        (
            lambda out: bridge.golden.check(out.with_name("golden"), model=TINY, calib=f"{ADDRESS}.safetensors"),
            REFUSED.format("calib", ".safetensors"),
        ),
    ],
)
def test_other_verbs_refuse_it_too(call: Any, said: str, outputs: Path) -> None:
    with pytest.raises(BridgeError) as caught:
        call(outputs / "a")
    assert str(caught.value).startswith(said)


def test_check_reads_what_lies_here(outputs: Path) -> None:
    said = CliRunner().invoke(app, ["check", str(outputs / "a"), ADDRESS])
    assert said.exit_code == 1 and "https://127.0.0.1:1/a: check reads local files only" in said.output


def test_show_of_an_archive_there_shows_no_password(tmp_path: Path) -> None:
    (tmp_path / "x.nemo").write_bytes(b"no archive")
    with serving(tmp_path) as (url, _):
        said = CliRunner().invoke(app, ["show", f"{url.replace('//', '//me:secret@')}/x.nemo"])
    assert said.exit_code == 2 and f"{url}/x.nemo: neither a written model" in said.output
