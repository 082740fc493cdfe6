"""What a manifest says for all rows, and where a problem is told: of the row, or of the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge.core.errors import UsageError
from bridge.workflows.batch.manifest import rows as manifest_rows
from tests.workflows.batch.test_manifest import HF, MATRIX, TRT, read, refused


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("quant = 5", "[defaults]: quant = 5; expected a text in quotes"),
        ('quant = "fp9"', "[defaults]: quant='fp9' is unknown"),
        ('quant = "gone.toml"', "[defaults]: quant="),
        ('verify = "no"', "[defaults]: verify = 'no'; expected true or false"),
        ('memory = "lots"', "[defaults]: memory 'lots' is not a size"),
        ('config = "~nobody-of-that-name/c.json"', "[defaults]: '~nobody-of-that-name/c.json'"),
        ('calib = "~nobody-of-that-name/t.txt"', "[defaults]: '~nobody-of-that-name/t.txt'"),
        ('out = "~nobody-of-that-name/{name}"', "[defaults]: '~nobody-of-that-name/"),
        ('out = "o/{nmae}"', "[defaults]: out = 'o/{nmae}': unknown row key {nmae}"),
        ("custom_ops = 1", "[defaults]: custom_ops=1: option 'custom_ops' of target"),
    ],
)
def test_what_is_wrong_with_the_defaults_is_told_of_them_once(wrong: str, told: str, tmp_path: Path) -> None:
    rows = "".join(TRT.replace("llama", f"llama{n}") for n in range(3))
    lines = refused(tmp_path, f"[defaults]\n{wrong}\n{rows}")
    assert told in lines[1] and not any("[[row]]" in line for line in lines)
    with_target = refused(tmp_path, f'[defaults]\ntarget = "trtt"\n{rows}'.replace('target = "trt"\n', ""))
    assert len(with_target) == 2 and "[defaults]: target 'trtt' is unknown" in with_target[1]


def test_what_is_wrong_is_told_of_where_that_word_stands(tmp_path: Path) -> None:
    rows = "".join(f'{HF.replace("llama", f"llama{n}")}quant = "fp8"\n' for n in range(3))
    lines = refused(tmp_path, f'[defaults]\nkv = "zz"\n{rows}')
    assert len(lines) == 2 and lines[1].startswith("  [defaults]: kv='zz' is unknown")
    lines = refused(tmp_path, f'[defaults]\nquant = "fp9"\n{HF}kv = "fp8"\n{TRT}kv = "zz"')
    assert [line.partition(" is")[0] for line in lines[1:]] == [
        "  [defaults]: quant='fp9'", "  [[row]] 2: kv='zz'",
    ]  # fmt: skip
    Path(tmp_path / "mine.toml").write_text('base = "fp8"\nkv = "int8"')
    lines = refused(tmp_path, f'[defaults]\nkv = "fp8"\n{HF}quant = "mine.toml"')
    assert len(lines) == 2 and lines[1].startswith("  [[row]] 1: kv='fp8' contradicts")


def test_an_option_that_is_wrong_is_told_of_where_it_stands(tmp_path: Path) -> None:
    rows = "".join(f"{TRT.replace('llama', f'llama{n}')}opset = 21\n" for n in range(3))
    lines = refused(tmp_path, f"[defaults]\ncustom_ops = 1\n{rows}tp = 2")
    assert [line.partition(" of target")[0].partition("has no")[0] for line in lines[1:]] == [
        "  [defaults]: custom_ops=1: option 'custom_ops'", "  [[row]] 3: target trt ",
    ]  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Options of which the first needs the second."""

    first: int = 0
    second: int = 0

    def __post_init__(self) -> None:
        if self.first and not self.second:
            raise UsageError("first needs second")


def test_options_that_are_right_together_are_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = SimpleNamespace(name="pair", Options=Pair)
    monkeypatch.setattr(manifest_rows, "load_target", lambda name: pair)
    text = '[defaults]\nfirst = 1\n[[row]]\nmodel = "llama"\ntarget = "pair"\n'
    assert read(tmp_path, f"{text}second = 1").rows[0].options == {"first": 1, "second": 1}
    assert refused(tmp_path, text)[1:] == ["  [defaults]: first needs second"]


def test_a_default_that_only_one_row_cannot_have_is_told_of_that_row(tmp_path: Path) -> None:
    lines = refused(tmp_path, f'[defaults]\nopset = 21\nout = "{{name}}-{{opset}}"\n{TRT}{HF}')
    assert len(lines) == 2 and "[[row]] 2: out = '{name}-{opset}': unknown row key {opset}" in lines[1]


def test_an_exclusion_names_the_key_that_the_matrix_has_not(tmp_path: Path) -> None:
    rules = '[{ quantt = "fp8" }, { target = "hf", tp = 2 }, { quant = "int8" }]'
    lines = refused(tmp_path, f'{MATRIX}target = ["hf"]\nquant = ["fp8"]\nexclude = {rules}\n[defaults]\ntp = 2')
    assert [line.partition("known")[0].strip() for line in lines[1:4]] == [
        "[[matrix]] 1: exclude {'quantt': 'fp8'}: the matrix has no key `quantt`;",
        "[[matrix]] 1: exclude {'target': 'hf', 'tp': 2}: the matrix has no key `tp`; it is in [defaults]; write "
        "it in the matrix",
        "[[matrix]] 1: exclude {'quant': 'int8'}: no combination matches",
    ]
    assert lines[1].endswith("known: model, quant, target; nearest: quant")
