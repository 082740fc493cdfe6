"""Chains: what is checked before the first step, and against which folder paths are read."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import bridge
from bridge.core.errors import BridgeError, TrainingError, UsageError
from bridge.workflows.chain import read
from tests.workflows.chain.test_chain import CHAIN, LLAMA, written

ONE = f'[[step]]\nname = "one"\nverb = "convert"\nmodel = "{LLAMA}"\ntarget = "hf"\n'


def refused(tmp_path: Path, text: str) -> str:
    """What is said of a chain, which writes nothing."""
    before = sorted(tmp_path.rglob("*"))
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as raised:
        bridge.chain(path, progress=False)
    assert sorted(tmp_path.rglob("*")) == sorted({*before, path})
    return str(raised.value)


LATER = [
    ("verb    = \"distill\"", "verb = \"distill\"\nquant = \"fp9\"", "step trained: quant='fp9' is unknown"),
    ("quant = \"int8_wo\"", "quant = \"int9\"", "step coded: quant='int9' is unknown"),
    ("quant = \"int8_wo\"", "quant = \"gone.toml\"", "step coded: quant = '"),
    ("quant = \"int8_wo\"", "quant = \"int4:best\"\ncandidates = \"awqq\"", "candidates='awqq' (--candidates)"),
    ("verb    = \"distill\"", "verb = \"distill\"\nquant = \"int4:best\"", "quant='int4:best' is a choice"),
    ("target = \"hf\"", "target = \"hff\"", "step coded: target 'hff' is unknown"),
    ("target = \"hf\"", "target = \"hf\"\nmemory = \"lots\"", "step coded: memory= 'lots' is not a size"),
    ("target = \"hf\"", "target = \"hf\"\ncalib = \"gone.safetensors\"", "gone.safetensors': there is no such file"),
    ("target = \"hf\"", "target = \"hf\"\ndevice = \"gpu\"", "step coded: device 'gpu' is unknown"),
    ("quant = \"int8_wo\"", "quant = \"nvfp4\"\nkv = \"fp9\"", "step coded: kv='fp9' is unknown"),
    ("quant = \"int8_wo\"", "quant = \"auto:lots\"", "step coded: quant='auto:lots'"),
    ("quant = \"int8_wo\"", "quant = \"q4_k\"", "step coded: "),
    ("steps   = 6", "steps = 0", "step trained: steps=0 (--steps): expected a positive whole number"),
    ("steps   = 6", "steps = \"6\"", "step trained: steps = '6'; expected a whole number"),
    ("lr      = 1e-3", "lr = -1", "step trained: lr=-1"),
    ("lr      = 1e-3", "pairs = [[9, 9]]", "step trained: pairs= (--pairs): the student has layers 0 to 4, and no 9"),
    ("lr      = 1e-3", "teacher_cache = \"kept\"", "step trained: teacher_cache= (--teacher-cache)"),
    ("lr      = 1e-3", "data = \"gone.txt\"", "gone.txt': there is no such file"),
    ("lr      = 1e-3", "memory = \"1MB\"", "step trained: training "),
    ("lr      = 1e-3", "calib = \"text.txt\"", "step trained: "),
    ("sequence = 48", "sequence = 100000", "step trained: sequence=100000 (--sequence): the model has"),
    (f"teacher = \"{LLAMA}\"", "teacher = \"./gone\"", "step trained: "),
    ("ffn = 128", "ffn = 4000", "step pruned: "),
    ("ffn = 128", "fnn = 128", "step pruned: "),
    ("keep  = { ffn = 128 }", "keep = \"75%\"", "expected a table (each value: a whole number or a text in quotes)"),
    ("importance = \"weights\"", "importance = \"weight\"", "step pruned: importance='weight' (--importance): unknown"),
    ("importance = \"weights\"", "importance = \"s.safetensors\"", "s.safetensors': there is no such file"),
    ("importance = \"weights\"", "importance = \"weights\"\norder = \"up\"", "order='up' (--order): unknown"),
    ("importance = \"weights\"", "importance = \"weights\"\nrepair = \"yes\"", "expected true or false"),
    ("importance = \"weights\"", "data = \"gone.txt\"", "gone.txt': there is no such file"),
    ("model = \"{trained}\"", "model = \"made/trained\"", "is the output of a step above; write \"{trained}\""),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "said"), LATER, ids=[new for _, new, _ in LATER])
def test_what_is_wrong_in_a_later_step_is_said_before_the_first_one(
    old: str, new: str, said: str, tmp_path: Path
) -> None:
    assert CHAIN.count(old) == 1
    assert said in refused(tmp_path, CHAIN.replace(old, new))


def test_problems_of_all_steps_are_in_one_error(tmp_path: Path) -> None:
    text = CHAIN.replace("128", "4000").replace("steps   = 6", "steps = 0").replace("int8_wo", "int9")
    lines = refused(tmp_path, text.replace('out = "made"', 'oout = "made"')).splitlines()
    begins = ["key `oout` is unknown", "step pruned: ", "step trained: steps=0", "step coded: quant='int9'"]
    assert lines[0].endswith("chain.toml: these are wrong:")
    assert [any(line.startswith(f"  {begin}") for line in lines) for begin in begins] == [True] * 4


def test_a_later_step_is_checked_with_the_shapes_of_the_output_before(tmp_path: Path) -> None:
    again = CHAIN.replace('verb    = "distill"', 'verb = "prune"\nmodel = "{pruned}"\nkeep = { ffn = 192 }\n#')
    text = again.partition("student")[0]
    assert "step trained: " in (told := refused(tmp_path, text)) and "ffn" in told and "128" in told


def test_what_needs_an_unknown_output_is_left_to_its_step(tmp_path: Path) -> None:
    text = CHAIN.replace('verb    = "distill"', 'verb = "distill"\nquant = "int4_wo"')
    told = refused(tmp_path, text.replace('target = "hf"\nquant = "int8_wo"', 'target = "hf"\nquant = "int9"'))
    assert "step coded: quant='int9' is unknown" in told and "step trained" not in told


def test_a_step_takes_the_best_rule(tmp_path: Path) -> None:
    text = ONE + 'quant = "int4:best"\nsamples = 4\nsequence = 64\ncandidates = "rtn,imatrix"\n'
    (step,) = bridge.chain(written(tmp_path, text), progress=False).steps
    (note,) = [note for note in step.report.notes if note.startswith("int4:best took")]
    assert step.passed and f"int4:best took {step.report.scheme} on" in note


def test_every_path_is_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "chain", tmp_path / "elsewhere"
    for place in (folder, elsewhere):
        place.mkdir()
    for name in ("mine", "weights"):  # the second is also a word
        shutil.copytree(LLAMA, folder / name)
    for name in ("text.txt", "recipe.toml", "c.json", "s.safetensors"):
        (folder / name).write_text("")
    monkeypatch.chdir(elsewhere)
    text = """
        [[step]]
        name = "one"
        verb = "prune"
        model = "mine"
        keep = { ffn = 128 }
        config = "c.json"
        tokenizer = "mine"
        data = "text.txt"
        importance = "s.safetensors"
        quant = "recipe.toml"
        [[step]]
        name = "two"
        verb = "prune"
        model = "mine"
        importance = "weights"
        quant = "fp8"
        [[step]]
        name = "three"
        verb = "distill"
        student = "mine"
        teacher = "mine"
        calib = "s.safetensors"
        teacher_cache = "cache"
    """
    one, two, three = read.read_chain(written(folder, text))
    for key, name in {
        "model": "mine", "config": "c.json", "tokenizer": "mine", "data": "text.txt", "importance": "s.safetensors",
        "quant": "recipe.toml",
    }.items():  # fmt: skip
        assert one.arguments[key] == str(folder / name), key
    assert (two.arguments["importance"], two.arguments["quant"]) == ("weights", "fp8")
    for key, name in {"student": "mine", "calib": "s.safetensors", "teacher_cache": "cache"}.items():
        assert three.arguments[key] == str(folder / name), key
    assert one.out == folder / "one"


def test_a_recipe_beside_the_file_is_used_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.toml").write_text('base = "int8_wo"\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = written(tmp_path, ONE + 'quant = "recipe.toml"\nverify = false\n')
    monkeypatch.chdir(elsewhere)
    assert bridge.chain(path, progress=False).steps[0].report.scheme == "recipe"
    assert not [*elsewhere.iterdir()]


def test_an_error_of_a_step_names_the_file_and_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error: BaseException = TrainingError("the loss is not finite")

    @functools.wraps(bridge.convert)
    def fails(*_: Any, **__: Any) -> None:
        raise error

    path = written(tmp_path, ONE)
    monkeypatch.setitem(read.VERBS, "convert", fails)
    with pytest.raises(TrainingError) as raised:
        bridge.chain(path, progress=False)
    assert str(raised.value) == f"{path}: step one: the loss is not finite"
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as stopped:
        bridge.chain(path, progress=False)
    assert stopped.value.__notes__ == [f"in {path}: step one"]


def test_the_config_of_a_weights_file_counts(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    shutil.copy(f"{LLAMA}/model.safetensors", tmp_path / "weights")
    shutil.copy(f"{LLAMA}/config.json", tmp_path)
    text = ONE.replace(LLAMA, "weights") + 'config = "config.json"\nverify = false\n'
    path = written(tmp_path, text)
    kept = [bridge.chain(path, progress=False).steps[0].kept for _ in range(2)]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert [*kept, bridge.chain(path, progress=False).steps[0].kept] == [False, True, False]
    assert json.loads((tmp_path / "one/config.json").read_text())["rms_norm_eps"] == 1e-3


def test_the_files_of_a_tokenizer_count(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{LLAMA}/{name}", tmp_path / "own" / name)
    path = written(tmp_path, ONE + 'tokenizer = "own"\nverify = false\n')
    kept = [bridge.chain(path, progress=False).steps[0].kept for _ in range(2)]
    (tmp_path / "own/tokenizer_config.json").write_text("{}")
    assert [*kept, bridge.chain(path, progress=False).steps[0].kept] == [False, True, False]


@pytest.mark.parametrize("name", ["made", "made/one", "made/deep"])
def test_an_output_that_is_a_file_is_refused_before_work(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    out = "made/deep/er" if name == "made/deep" else "made"
    told = refused(tmp_path, f'out = "{out}"\n{ONE}')
    assert f"step one: {tmp_path / name}: is not a directory" in told and "set `out`" in told


@pytest.mark.slow
def test_an_output_of_something_else_is_refused_before_the_first_step(tmp_path: Path) -> None:
    bridge.convert(LLAMA, "hf", "int8_wo", tmp_path / "made/coded", verify=False)
    assert "step coded of this chain did not make it" in refused(tmp_path, CHAIN)


def test_a_step_with_problems_of_its_model_keeps_its_class_of_message(tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match=r"step one: .*gone"):
        bridge.chain(written(tmp_path, ONE.replace(LLAMA, "./gone")), progress=False)


def test_all_mistakes_of_a_step_are_told(tmp_path: Path) -> None:
    path = tmp_path / "chain.toml"
    path.write_text(
        f'[[step]]\nname = "cut"\nverb = "prune"\nmodel = "{Path("examples/models/tiny-llama").absolute()}"\n'
        'keep = { layers = 4 }\n\n[[step]]\nname = "trained"\nverb = "distill"\nstudent = "{cu}"\n'
        'teacher = "../nope.txt"\nstps = 2\n\n[[step]]\nname = "coded"\nverb = "convrt"\nmodel = "{trainde}"\n'
    )
    with pytest.raises(UsageError) as raised:
        bridge.chain(path)
    said = str(raised.value)
    assert "step trained: `stps` is no argument of distill" in said and "nearest: steps" in said
    assert "student = '{cu}' names no step above" in said
    assert "step coded: verb = 'convrt'" in said and "model = '{trainde}' names no step above" in said
