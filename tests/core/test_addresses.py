"""A word that is too long for a path is told so, whichever argument it was given for."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import bridge
from bridge.cli.main import app
from bridge.core.addresses import check_length
from bridge.core.errors import UsageError

TINY = "examples/models/tiny-llama"
FP8 = [TINY, "--target", "hf", "--quant", "fp8"]
NAME, DEEP = "x" * 300, "/tmp/" + "y/" * 2100 + "z"


@pytest.mark.parametrize("long", [NAME, DEEP], ids=["name", "path"])
@pytest.mark.parametrize(
    "words",
    [
        ["convert", "@", "--target", "hf"],
        ["convert", TINY, "--target", "hf", "--quant", "@.toml"],
        ["convert", *FP8, "--out", "@"],
        ["convert", *FP8, "--out", "@", "--overwrite"],
        ["convert", *FP8, "--out", "made", "--calib", "@"],
        ["plan", "@.nemo", "--target", "hf"],
        ["calibrate", TINY, "--quant", "fp8", "--out", "@.safetensors"],
        ["calibrate", TINY, "--quant", "fp8", "--out", "c.safetensors", "--data", "@"],
        ["check", "@"],
        ["check", "@.toml"],
        ["show", "@"],
        ["golden", "check", "@", TINY],
        ["golden", "diff", "@", TINY],
        ["sensitivity", "@", "--quant", "fp8"],
        ["sensitivity", TINY, "--quant", "fp8", "--budget", "9bits", "--out", "@.toml"],
    ],
    ids=" ".join,
)
def test_a_path_that_is_too_long_is_told_before_work(words: list[str], long: str) -> None:
    done = CliRunner().invoke(app, [word.replace("@", long) for word in words])
    assert done.exit_code == 2, done.output
    assert done.output.startswith("UsageError: ") and "too long for a path" in done.output and len(done.output) < 400


def test_an_output_whose_work_directory_could_not_be_named_is_refused(tmp_path: Path) -> None:
    """While it is made it is called `.NAME.partial`."""
    with pytest.raises(UsageError, match="too long"):
        bridge.convert(TINY, "hf", "int8_wo", tmp_path / ("x" * 250))
    assert not list(tmp_path.iterdir())


def test_what_is_short_enough_or_no_path_is_let_through() -> None:
    for place in ("gone", "x" * 255, Path("a/b"), "a\0b", f"https://host/{NAME}", None, {"x": NAME}, 3):
        check_length(place)


def test_a_golden_is_not_converted_again_under_what_is_no_directory(tmp_path: Path) -> None:
    bridge.convert(TINY, "hf", "int8_wo", tmp_path / "out", verify=False)
    bridge.golden.record(tmp_path / "out", tmp_path / "golden", run=False)
    for work, said in ((tmp_path / "gone", "is not a directory"), (NAME, "too long")):
        with pytest.raises(UsageError, match=said):
            bridge.golden.check(tmp_path / "golden", model=TINY, work=work)
