"""Tables of classes with a text model inside: entries of the configs, mistakes, and what the command line says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from bridge.cli.check import check_paths
from bridge.cli.show import describe
from bridge.core.errors import TableError, UsageError
from bridge.core.mappings import parse_table, read_table, table_files
from bridge.tables.architectures.composite import entry, parse_composite, problems_of_composite
from tests.tables.composites import HUB

FILES = {path.stem: path for path in table_files("composites")}
CLASSES = {name: parse_composite(read_table(path)) for name, path in FILES.items()}


@pytest.mark.parametrize("name", FILES)
def test_entries_are_those_of_transformers_with_its_defaults(name: str) -> None:
    own = {here: theirs for theirs, here in HUB.items()}
    for architecture in CLASSES[name].architectures:
        config = json.loads(
            getattr(transformers, own.get(architecture, architecture)).config_class().to_json_string(use_diff=False)
        )
        assert {field: config[field] for field in CLASSES[name].outer} == CLASSES[name].outer
        for path in (*CLASSES[name].dims.values(), *CLASSES[name].only):
            assert entry(config, path) is not None, path
        assert config["text_config"]["model_type"] in CLASSES[name].text


def test_every_table_is_free_of_problems() -> None:
    assert [problem for table in CLASSES.values() for problem in problems_of_composite(table)] == []


TABLE = """architectures = ["SeesForCausalLM"]
reads = "images"
[text]
llama = "LlamaForCausalLM"
[names]
"model." = "model.language_model."
[outer]
tie_word_embeddings = false
[dims]
depth = "vision_config.depth"
[carried]
"model.visual.norm.weight" = "vector(depth)"
"model.visual.{depth}.weight" = "linear(depth, 2 * depth)"
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[outer]", "[outr]", "unknown key `outr`"),
        ('["SeesForCausalLM"]', "[]", "no `architectures`"),
        ('"images"', '"tables"', "`reads` says what the tower reads"),
        ("LlamaForCausalLM", "LlamaForCausalLN", "no file of mappings/arch lists `LlamaForCausalLN`"),
        ('llama = "LlamaForCausalLM"', "", r"\[text\] is empty"),
        ('"model." = "model.language_model."', "", r"\[names\] is empty"),
        ('"vision_config.depth"', "27", r"a value of \[dims\] is a string"),
        ("linear(depth", "matrix(depth", "`matrix.*is not what a tensor is"),
        ("linear(depth, ", "linear(", "a tensor with 1 axis is no linear"),
        ("{depth}", "{l}", "index `l` is no number of"),
        ("2 * depth", "2 * deep", "deep"),
        ("visual.norm.", "visual.{depth}.norm.", "the first tensor is one of the whole tower"),
    ],
)
def test_a_mistake_of_a_composite_table_is_named_with_its_line(old: str, new: str, says: str) -> None:
    assert old in TABLE
    with pytest.raises(TableError, match=says):
        parse_composite(parse_table(TABLE.replace(old, new), "sees.toml"))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("SeesForCausalLM", "LlamaModel", "`LlamaModel` is also listed in mappings/arch"),
        ("[carried]", 'width = "vision_config.width"\n[carried]', "dim `width` is unused"),
        ("tie_word_embeddings", "tied_words", "the text model has no field `tied_words`"),
        ('"model." =', '"modell." =', "no row of the text model begins with `modell.`"),
        ("model.visual.{depth}.weight", "model.language_model.norm.weight", "the text model has a row of this name"),
        ("{depth}.weight", "{depth}.kernel", "the name of a linear ends with .weight"),
        ("[dims]", '[live]\n"model.tower." = "tower."\n[dims]', "no row begins with `model.tower.`"),
    ],
)
def test_what_parsing_does_not_see_is_found_by_check(old: str, new: str, says: str, tmp_path: Path) -> None:
    assert not [*problems_of_composite(parse_composite(parse_table(TABLE, "sees.toml")))]
    (tmp_path / "sees.toml").write_text(TABLE.replace(old, new))
    assert any(says in str(problem) for problem in check_paths([str(tmp_path / "sees.toml")]))


def test_show_lists_tower_and_text_model() -> None:
    lines, _ = describe("Qwen3_5ForConditionalGeneration")
    assert lines == describe("qwen3_5_vl")[0]
    rows = {line["tensor"]: line["roles"] for line in lines}
    assert rows["model.visual.blocks.{depth}.attn.qkv.weight"] == "linear(3 * width, width)"
    assert rows["model.language_model.layers.{l}.mlp.up_proj.weight"] == "mlp.up.weight"
    assert describe("architectures")[0]["qwen3_5_vl"] == ["Qwen3_5ForConditionalGeneration"]
    with pytest.raises(UsageError, match="no dialect has a layout for it"):
        describe("qwen3_5_vl", dialect="megatron")
