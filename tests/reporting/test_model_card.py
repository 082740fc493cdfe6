"""The model card: the source's words stay, one section is ours, and equal runs write equal bytes."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

import bridge
from bridge.reporting.model_card import BEGIN, END, section, with_section
from tests.cli.test_show import full
from tests.models.sources_made import made_llama

TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
CARD = "---\nlicense: apache-2.0\n---\r\n# A model\n\nWritten by “somebody”.\n"


@pytest.mark.parametrize("before", ["", CARD, CARD.rstrip(), "\ufeffx", "a\n" + END, f"half {BEGIN} of a section"])
def test_what_a_card_says_stays_and_the_section_comes_once(before: str) -> None:
    card = with_section(before, "one")
    assert card.startswith(before.rstrip()) and card.endswith(f"{BEGIN}\none\n{END}\n")
    again = with_section(card, "two")
    assert again == card.replace("one", "two")


def test_a_section_in_the_middle_is_replaced_where_it_is() -> None:
    assert with_section(f"a\n{BEGIN}\nold\n{END}\nb\n", "new") == f"a\n{BEGIN}\nnew\n{END}\nb\n"


def test_the_section_holds_the_facts_and_nothing_of_the_machine() -> None:
    report = dataclasses.replace(
        full(), out="/home/somebody/out", made_from={"source": "/home/somebody/in", "architecture": "A"}
    )
    said = section(report)
    for words in (
        "| codes | 9 | 10 |",
        "FAILED",
        "283.25",
        "`layers.0.experts.1`",
        "zero: floor",
        "| architecture | A |",
    ):
        assert words in said, words
    assert "somebody" not in said
    again = dataclasses.replace(
        report, out="elsewhere", seconds={"plan": 9.0}, peak_memory=1, made_from={"architecture": "A"}
    )
    assert section(again) == said


def test_a_name_cannot_leave_its_cell() -> None:
    said = section(dataclasses.replace(full(), skipped={"a|b`c <img src=x>\n# heading": "tied"}))
    row = next(line for line in said.splitlines() if "tied" in line)
    assert row == "| 1 | tied | `` a\\|b`c <img src=x>, # heading `` |"
    assert "\n# heading" not in said


@pytest.mark.parametrize("target", ["hf", "trtllm", "tripy"])
def test_equal_runs_write_equal_cards(target: str, tmp_path: Path) -> None:
    source = made_llama("float16")
    source.config = {**source.config, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    cards = []
    for name in ("one", "another"):
        bridge.convert(source, target, "int8_wo", tmp_path / name)
        cards.append((tmp_path / name / "README.md").read_bytes())
    assert cards[0] == cards[1] and b"int8_wo" in cards[0] and str(tmp_path).encode() not in cards[0]


def test_the_card_of_the_source_is_carried_and_converted_again_says_the_last_conversion(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "source")
    (tmp_path / "source" / "README.md").write_bytes(CARD.encode())
    bridge.convert(tmp_path / "source", "hf", "int8_wo", tmp_path / "quantized", verify=False)
    bridge.convert(tmp_path / "quantized", "hf", "none", tmp_path / "back", verify=False)
    first, second = ((tmp_path / name / "README.md").read_bytes().decode() for name in ("quantized", "back"))
    assert first.startswith(CARD) and second.startswith(CARD)
    assert "int8_wo" in first and first.count(BEGIN) == second.count(BEGIN) == 1
    assert "Scheme `none`" in second and "int8_wo" not in second
