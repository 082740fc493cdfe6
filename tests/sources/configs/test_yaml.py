"""YAML of others is data: nothing runs, nothing explodes, and numbers are numbers."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import omegaconf
import pytest
import yaml

from bridge.core.errors import SourceError
from bridge.sources.configs.yaml_data import read_yaml

# Each line stands for nine times the one before: 9**29 values in a kilobyte, as aliases and as merged keys.
NINE = [", ".join([f"*a{n - 1}"] * 9) for n in range(1, 30)]
ALIASES = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{nine}]" for n, nine in enumerate(NINE, 1))])
MERGED = "\n".join(["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [{nine}]}}" for n, nine in enumerate(NINE, 1))])
PROGRAMS = {
    "!!python/object/apply:os.system ['touch ran']": "os.system",
    "!!python/object/new:subprocess.Popen [['touch', 'ran']]": "subprocess.Popen",
    "!!python/name:os.system ''": "os.system",
    "{_target_: builtins.eval, _args_: ['1']}": "builtins.eval",
}
ATTACKS = (
    "!!python/module:antigravity ''",
    "!!python/object:argparse.Namespace {a: 1}",
    "!custom {a: [1, 2]}",
)


@pytest.mark.parametrize("text", ATTACKS)
def test_a_tag_is_a_word(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = read_yaml(f"a: {text}", "x.yaml")["a"]
    assert found["_tag_"].endswith(text.split(" ")[0].lstrip("!")) and "_value_" in found
    assert "antigravity" not in sys.modules
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", PROGRAMS)
def test_what_runs_programs_is_told_wherever_it_stands(text: str) -> None:
    with pytest.raises(SourceError, match=f"asks for {PROGRAMS[text]} in line 2, by which a file can run programs"):
        read_yaml(f"a: 1\nb: [{text}]", "x.yaml")


def test_plain_data_reads_as_pyyaml_reads_it() -> None:
    text = "a: [1, 0x10, 1_000, -2.5, .inf, ~, yes, 'no', 2024-01-02]\nb: {c: &x [1, 2], d: *x}\n? 3\n: e\nf: |\n  g\n"
    wanted = yaml.safe_load(text)
    wanted["a"][-1] = "2024-01-02"  # no configuration has dates
    assert read_yaml(text, "x.yaml") == wanted
    assert read_yaml("", "x.yaml") is None


@pytest.mark.parametrize(
    ("text", "value"), [("1e-5", 1e-5), ("1E+6", 1e6), ("-3e4", -3e4), ("'1e-5'", "1e-5"), ("e5", "e5")]
)
def test_floats_need_no_dot(text: str, value: object) -> None:
    assert read_yaml(f"a: {text}", "x.yaml") == {"a": value}


def test_omegaconf_and_safe_dump_are_read_back() -> None:
    data = {"eps": 1e-05, "base": 1e6, "none": None, "names": ["a", "1.5e+5"], "deep": {"x": {"y": [1.5, True]}}}
    assert read_yaml(omegaconf.OmegaConf.to_yaml(omegaconf.OmegaConf.create(data)), "x.yaml") == data
    assert read_yaml(yaml.safe_dump(data), "x.yaml") == data
    assert read_yaml("a: !!python/tuple [4095, 0]", "x.yaml") == {"a": [4095, 0]}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (ALIASES, "stands for more than"),
        (MERGED, "stands for more than"),
        ("&a [*a]", "nested"),
        ("[" * 5000, "nested too deep"),
        ("[" * 100 + "]" * 100, "nested more than 64 deep"),
        ("[" + "x," * 120_000 + "]", "has more than 100000 values"),
        ("a" * 2_000_000, "2000000 bytes; a configuration has at most"),
        ("a: 1\na: 2", "key 'a' twice, the second time in line 2"),
        ("? [1]\n: 2", "key that is not a word"),
        ("a: [1", "cannot be read as YAML"),
        ("a: *nobody", "undefined alias"),
        ("a: 1\n---\nb: 2", "expected a single document"),
        ("a: " + "9" * 10_000, "has '9{40}' in line 1, which is not of type int"),
        ("a: 1\nb: !!bool foo", "has 'foo' in line 2, which is not of type bool"),
        ("a: !!int ''", "has '' in line 1, which is not of type int"),
        ("a: !!float _", "has '_' in line 1, which is not of type float"),
        ("a: !!int '0x'", "has '0x' in line 1, which is not of type int"),
        ("a: \x00", "cannot be read as YAML"),
    ],
)
def test_what_is_no_configuration_is_refused(text: str, why: str) -> None:
    with pytest.raises(SourceError, match=why) as error:
        read_yaml(text, "x.yaml")
    assert str(error.value).startswith("x.yaml: ")


@pytest.mark.slow
def test_a_bomb_takes_no_memory() -> None:
    tracemalloc.start()
    with pytest.raises(SourceError):
        read_yaml(ALIASES, "x.yaml")
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(SourceError, match="cannot be read as YAML"):
        read_yaml(b"\xff\xfe\x00\xd8", "x.yaml")


def test_no_framework_is_imported() -> None:
    ask = "[m for m in ('torch', 'transformers', 'megatron') if m in sys.modules]"
    code = f"import sys, bridge.sources.configs; print({ask})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
