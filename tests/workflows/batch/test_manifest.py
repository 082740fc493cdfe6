"""What a manifest says, and how it is told what is wrong with it: everything at once, by row."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import bridge
from bridge.cli.terminal import console
from bridge.core.errors import UsageError
from bridge.core.parsing.problems import MAX_KINDS
from bridge.workflows.batch import engines
from bridge.workflows.batch.engines.local import Local
from bridge.workflows.batch.manifest import rows as manifest_rows
from bridge.workflows.batch.manifest.read import Manifest, read_manifest
from bridge.workflows.batch.report import BatchReport
from bridge.workflows.batch.values import DONE, Limits, Outcome


def read(tmp_path: Path, text: str) -> Manifest:
    (tmp_path / "llama").mkdir(exist_ok=True)
    if not (tmp_path / "link").is_symlink():
        (tmp_path / "link").symlink_to("o")
    path = tmp_path / "batch.toml"
    path.write_text(text)
    return read_manifest(path)


def refused(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    return str(caught.value).splitlines()


def test_a_matrix_is_every_combination_but_those_excluded(tmp_path: Path) -> None:
    made = read(
        tmp_path,
        """
        [[matrix]]
        model = ["llama", "org/other"]
        target = ["hf", "trt"]
        quant = ["fp8", "int8_wo"]
        exclude = [{ target = "trt", quant = "int8_wo" }, { model = "org/other", target = "hf", quant = "fp8" }]
        """,
    )
    assert [row.name for row in made.rows] == [
        "llama-fp8-hf", "llama-int8_wo-hf", "llama-fp8-trt", "other-int8_wo-hf", "other-fp8-trt",
    ]  # fmt: skip
    assert [row.model for row in made.rows[-2:]] == [str(tmp_path / "llama"), "org/other"][1:] * 2


def test_what_a_row_says_wins_over_defaults(tmp_path: Path) -> None:
    made = read(
        tmp_path,
        """
        [defaults]
        quant = "fp8"
        out = "out/{target}/{name}"
        verify = false
        [[row]]
        model = "llama"
        target = "hf"
        [[row]]
        model = "llama"
        target = "hf"
        quant = "int4_awq"
        verify = true
        """,
    )
    assert [(row.quant, row.verify) for row in made.rows] == [("fp8", False), ("int4_awq", True)]
    assert made.rows[0].out == str(tmp_path / "out/hf/llama-fp8-hf")


def test_an_option_goes_to_the_targets_that_have_it(tmp_path: Path) -> None:
    made = read(
        tmp_path,
        """
        [defaults]
        model = "llama"
        pp = 2
        [[matrix]]
        target = ["hf", "trtllm"]
        dtype = ["fp16", "bf16"]
        [[row]]
        target = "trt"
        opset = 21
        """,
    )
    assert {row.name: dict(row.options) for row in made.rows} == {
        "llama-none-trt": {"opset": 21},
        "llama-none-hf-dtype-fp16": {"dtype": "fp16"},
        "llama-none-hf-dtype-bf16": {"dtype": "bf16"},
        "llama-none-trtllm-dtype-fp16": {"pp": 2, "dtype": "fp16"},
        "llama-none-trtllm-dtype-bf16": {"pp": 2, "dtype": "bf16"},
    }


def test_an_axis_that_a_target_has_not_makes_one_row_of_it(tmp_path: Path) -> None:
    text = '[[matrix]]\nmodel = "llama"\ntarget = ["hf", "trtllm"]\npp = [1, 2]'
    names = [row.name for row in read(tmp_path, text).rows]
    assert names == ["llama-none-hf", "llama-none-trtllm-pp-1", "llama-none-trtllm-pp-2"]


def test_combinations_that_come_to_one_row_are_told(tmp_path: Path) -> None:
    text = '[[row]]\nmodel = "llama"\ntarget = "hf"\nquant = "fp8"\n'
    text += '[[matrix]]\nmodel = "llama"\ntarget = ["hf", "trtllm"]\npp = [1, 2, 4]\n'
    text += '[[matrix]]\nmodel = "llama"\ntarget = "hf"\nquant = ["fp8", "int8_wo", "int8_wo"]\n'
    made = read(tmp_path, text)
    assert len(made.rows) == 6 and made.notes == (
        "[[matrix]] 1: 2 combinations merged into 'llama-none-hf': target hf has no option 'pp'",
        "[[matrix]] 2: 2 combinations merged into 'llama-fp8-hf', 'llama-int8_wo-hf': an equal row exists",
    )
    report = BatchReport("", "local", 1, made.rows, notes=made.notes)
    assert json.loads(report.to_json())["notes"] == list(made.notes)
    assert all(f"note: {note}\n" in shown(report) for note in made.notes)
    assert bridge.batch(tmp_path / "batch.toml", dry_run=True).notes == made.notes


def shown(report: BatchReport) -> str:
    with Path("/dev/null").open("w") as nowhere, (screen := console(nowhere)).capture() as captured:
        screen.print(report)
    return captured.get()


def test_the_seconds_of_an_earlier_run_are_not_shown_as_this_ones(tmp_path: Path) -> None:
    rows = read(tmp_path, '[[matrix]]\nmodel = "llama"\ntarget = ["hf", "trt"]').rows
    before, now = (Outcome(row.name, DONE, seconds=12.5) for row in rows)
    ends = {before.name: replace(before, kept=True), now.name: now}
    first, second = shown(BatchReport("", "local", 1, rows, ends)).splitlines()[1:3]
    assert "done before" in first and "12.5" not in first and "12.5" in second


def test_paths_are_relative_to_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "here").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    (tmp_path / "recipe.toml").write_text('base = "fp8"\n')
    row = 'target = "hf"\nquant = "recipe.toml"\ncalib = "text.jsonl"\nconfig = "c.json"\nout = "../x"'
    made = read(tmp_path, f'[[row]]\nmodel = "llama"\n{row}').rows[0]
    found = (made.model, made.quant, made.calib, made.config, made.name)
    expected = tuple(str(tmp_path / name) for name in ("llama", "recipe.toml", "text.jsonl", "c.json"))
    assert found == (*expected, "llama-recipe-hf")
    assert Path(made.out) == tmp_path / "../x"
    line = refused(tmp_path, '[[row]]\nmodel = "here"\ntarget = "hf"')[1]
    assert "'here' does not exist relative to" in line


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    lines = refused(
        tmp_path,
        """
        worker = 2
        engine = "slurm"
        memory = "lots"
        [local]
        nodes = 2
        [defaults]
        verfy = true
        [[row]]
        model = "llama"
        target = "hf"
        pp = 2
        [[row]]
        model = 3
        [[row]]
        model = "llama"
        target = ["hf", "trt"]
        [[row]]
        model = "llama"
        target = "hf"
        name = "{modle}"
        [[matrix]]
        model = "llama"
        target = ["hf", "trtt"]
        quant = ["fp8", "fp9"]
        exclude = [{ quant = "int8" }]
        """,
    )
    assert len(lines) == 1 + 13, "\n".join(lines)
    for needle in (
        "`worker` is unknown", "nearest: workers", "'slurm' is unknown", "'lots' is not a size",
        "[local] has no key `nodes`", "[defaults]: key `verfy` is unknown",
        "[[row]] 1: target hf has no option 'pp'", "[[row]] 2: model = 3",
        "[[row]] 2: target is missing", "[[row]] 3: target is a list", "[[row]] 4: name = '{modle}'", "nearest: model",
        "'trtt' is unknown", "'fp9' is unknown", "exclude {'quant': 'int8'}: no combination",
    ):  # fmt: skip
        assert any(needle in line for line in lines), needle


def test_a_recipe_that_is_missing_hides_no_other_problem(tmp_path: Path) -> None:
    lines = refused(
        tmp_path,
        """
        [defaults]
        model = "llama"
        pp = 2
        [[row]]
        target = "hf"
        quant = "gone.toml"
        memory = "lots"
        name = "{modle}"
        [[row]]
        target = "hf"
        quant = "gone.toml"
        verify = "no"
        config = "~nobody-of-that-name/config.json"
        [[row]]
        target = "hf"
        quant = "gone.toml"
        name = "same"
        [[row]]
        target = "hf"
        name = "same"
        [[matrix]]
        target = ["hf", "trtt"]
        quant = ["gone.toml"]
        """,
    )
    for needle in (
        "[[row]] 1, [[row]] 2, [[row]] 3 and 1 more: quant=", "[[row]] 1: memory 'lots' is not a size",
        "[[row]] 1: name = '{modle}'", "[[row]] 2: verify = 'no'", "[[row]] 2: '~nobody-of-that-name/config.json'",
        "[[row]] 4: [[row]] 3 already has the name 'same'", "[[matrix]] 1: target 'trtt' is unknown",
    ):  # fmt: skip
        assert any(needle in line for line in lines), needle
    assert len(lines) == 1 + 7, "\n".join(lines)
    alone = refused(tmp_path, '[defaults]\npp = 2\n[[row]]\nmodel = "llama"\ntarget = "hf"\nquant = "gone.toml"\n')
    assert "no row's target has the option 'pp'" in alone[2]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('[defaults]\npp = [1, 2]\n[[row]]\nmodel = "llama"\ntarget = "trtllm"\n', "[defaults]: pp is a list"),
        ('row = [1]\n[defaults]\ntarget = "hf"\npp = 2\n', "[[row]] 1: must be a table"),
        ('matrix = [1]\n[defaults]\ntarget = "hf"\npp = 2\n', "[[matrix]] 1: must be a table"),
    ],
)
def test_no_option_is_said_to_be_idle_where_a_table_cannot_be_read(text: str, wrong: str, tmp_path: Path) -> None:
    lines = refused(tmp_path, text)
    assert any(wrong in line for line in lines) and not any("no row's target" in line for line in lines), lines


HF, TRT = '[[row]]\nmodel = "llama"\ntarget = "hf"\n', '[[row]]\nmodel = "llama"\ntarget = "trt"\n'
MATRIX = '[[matrix]]\nmodel = "llama"\n'
FIVE = ("shards", "memory", "samples", "sequence", "pp")  # axes: 777 million rows of 60 values each


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (f'{HF}name = "a"\n' * 2, "[[row]] 1 already has the name 'a'"),
        (f'{HF}out = "o"\n{TRT}out = "o"', "already the output of 'llama-none-hf'"),
        (f'{HF}out = "o"\n{TRT}out = "./q/../o"', "already the output of 'llama-none-hf'"),
        (f'{HF}out = "o"\n{TRT}out = "o/p"', "lies inside"),
        (f'{HF}out = "o"\n{TRT}out = "q/../o/p"', "lies inside"),
        (f'{HF}out = "o"\n{TRT}out = "link/p"', "lies inside"),
        (f'{HF}out = "o"\n[[row]]\nmodel = "./q/../o"\ntarget = "trt"', "a batch of its own"),
        (f'{HF}out = "o"\n[[row]]\nmodel = "./o/part"\ntarget = "trt"', "a batch of its own"),
        (
            f'{HF}out = "s3://me:key@b/o"\n{TRT}out = "s3://b/o/"',
            "out s3://b/o is already the output of 'llama-none-hf'",
        ),
        (f'{HF}out = "s3://b/o"\n[[row]]\nmodel = "s3://b/o/part"\ntarget = "trt"', "a batch of its own"),
        (f'{HF}out = "o/{{name"', "unbalanced brace; write row keys as {name}"),
        (f'{HF}out = "a\\u0000b"', "without control characters"),
        (f"{HF}samples = 0", 'expected 1 or more, or "auto"'),
        (f"{HF}samples = 'most'", 'expected 1 or more, or "auto"'),
        (f"{HF}config = {{ a = nan }}", "a table with entries of config.json"),
        (f"{MATRIX}target = ['hf']\n" + "".join(f"{k} = {list(range(1, 61))}\n" for k in FIVE), "10,000 at most"),
        (f'{HF}out = "o"\n[[row]]\nmodel = "./o"\ntarget = "trt"', "a batch of its own"),
        (f"[defaults]\npp = 2\n{HF}", "no row's target has the option 'pp'"),
        (f'{MATRIX}target = ["hf"]\nopset = 21', "no row's target has the option 'opset'"),
        (f'{MATRIX}target = "hf"', "nothing to combine"),
        (f"{MATRIX}target = []", "a list of values that is not empty"),
        (f'{HF}verify = "no"', "expected true or false"),
        (f"{HF}shards = 0", "expected 1 or more"),
        (f"workers = true\n{HF}", "expected a whole number"),
        ("", "there are no rows"),
        ("[[row]\n", "cannot be read as TOML"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(rows: str, told: str, tmp_path: Path) -> None:
    assert told in "\n".join(refused(tmp_path, rows))


def test_many_rows_with_one_mistake_share_a_line(tmp_path: Path) -> None:
    lines = refused(tmp_path, '[[matrix]]\nmodel = "llama"\ntarget = ["hf", "trt", "tripy"]\nquant = ["fp9"]')
    assert len(lines) == 2 and "fp9" in lines[1]


@pytest.mark.parametrize("word", ["row", "matrix"])
def test_of_what_is_no_table_nothing_else_is_told(word: str, tmp_path: Path) -> None:
    lines = refused(tmp_path, f'{word} = [1, "a"]')
    assert lines[1:] == [f"  [[{word}]] 1, [[{word}]] 2: must be a table"]


def test_each_scheme_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(manifest_rows, "load_scheme", lambda quant, kv: loaded.append(quant))
    text = f'{MATRIX}target = "hf"\nquant = ["fp8", "int8_wo"]\nsamples = {list(range(1, 101))}'
    assert len(read(tmp_path, text).rows) == 200
    assert loaded == ["fp8", "int8_wo"]


ENOUGH = "[[matrix]] 1: these problems are enough; what follows was not looked at"


@pytest.mark.slow
def test_after_many_problems_the_rest_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(quant: str, kv: str | None) -> None:
        loaded.append(quant)
        raise UsageError(f"{quant} is unknown")

    monkeypatch.setattr(manifest_rows, "load_scheme", load)
    lines = refused(tmp_path, f'{MATRIX}target = "hf"\nquant = {[f"q{n}" for n in range(3000)]}\n[defaults]\npp = 2')
    assert len(loaded) == MAX_KINDS and "q99 is unknown" in "\n".join(lines)
    assert ENOUGH in lines[-1]
    assert not any("no row's target" in line for line in lines)  # one of the rest may have it
    loaded.clear()
    lines = refused(tmp_path, f'{MATRIX}target = "hf"\nquant = ["q"]\nsamples = {list(range(1, 6000))}')
    assert loaded == ["q"] and ENOUGH in lines[-1]


SECRET = "http://me:hunter2@host/models/m?X-Amz-Signature=s3cr3t"


def test_no_password_or_signature_is_shown_or_names_anything(tmp_path: Path) -> None:
    row = f'model = "{SECRET}"\ntarget = "hf"\nquant = "fp8"\n'
    made = read(tmp_path, f"[[row]]\n{row}")
    assert (made.rows[0].name, made.rows[0].model) == ("m-fp8-hf", SECRET)
    saved = BatchReport("", "local", 1, made.rows).to_json()
    wrong = refused(tmp_path, f'[[row]]\n{row}tokenizer = "{SECRET}"\ncalib = "{SECRET}"\n')
    wrong += refused(tmp_path, f'{MATRIX}target = "hf"\nquant = ["fp8"]\nexclude = [{{ model = "{SECRET}" }}]')
    wrong += refused(tmp_path, f'[[row]]\ntarget = "hf"\nmodel = {{ a = "{SECRET}" }}')
    wrong += refused(tmp_path, f'[[row]]\ntarget = "hf"\nmodel = "llama"\nout = "{SECRET}"\nname = "a"\n' * 2)
    for text in (saved, "\n".join(wrong)):
        assert "http://host/models/m" in text
        assert "hunter2" not in text and "s3cr3t" not in text


@pytest.mark.parametrize("length", [245, 300, 4000])
def test_a_summary_whose_name_no_system_takes_is_told_with_the_rest(length: int, tmp_path: Path) -> None:
    text = f'summary = "{"x" * length}.json"\nstrikt = true\n[[row]]\nmodel = "llama"\ntarget = "hf"\n'
    first, *problems = refused(tmp_path, text)
    assert first.endswith("2 problems") and "key `strikt` is unknown" in problems[0]
    assert "characters are too long for a path here" in problems[1] and len(problems) == 2


def test_an_entry_point_adds_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", engines.BUILT_IN["local"], "bridge.engines")
    monkeypatch.setattr(engines, "_registered", lambda: {"mine": point})
    made = read(tmp_path, 'engine = "mine"\n[mine]\n[[row]]\nmodel = "llama"\ntarget = "hf"\n')
    assert made.engine == "mine" and "mine" in made.settings
    assert engines.make_engine("mine", engines.make_settings("mine", {}), Limits(2, 3)) == Local(2, 3)


def test_the_engine_ray_is_an_entry_point_of_this_package() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["bridge.engines"] == {"ray": engines.BUILT_IN["ray"]}
