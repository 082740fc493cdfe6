"""The model card: the source's words stay, one section is ours, and equal runs write equal bytes."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import bridge
from bridge.reporting.card_metadata import metadata, pipeline, with_metadata
from bridge.reporting.model_card import BEGIN, END, section, with_section
from bridge.reporting.report import Report, cost, report_lines
from bridge.targets.tasks import tasks
from bridge.verification.parity import Evaluation
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
    words = CARD.partition("---\r\n")[2]
    assert words in first and words in second
    assert ModelCard(first).data.license == ModelCard(second).data.license == "apache-2.0"
    assert "int8_wo" in first and first.count(BEGIN) == second.count(BEGIN) == 1
    assert "Scheme `none`" in second and "int8_wo" not in second


def test_the_hub_reads_what_a_model_was_made_of() -> None:
    """The hub's own reader: without `base_model` and `quantized_by` a quantized model stands alone there."""
    made = {"source": "TinyLlama/TinyLlama-1.1B-Chat-v1.0@main", "architecture": "LlamaForCausalLM"}
    report = dataclasses.replace(full(), target="hf", quantized=7, made_from=made)
    card = with_metadata(CARD.replace("---\r\n", "base_model: other\ntags:\n- a\n---\r\n"), metadata(report))
    found = ModelCard(card)
    assert found.data.to_dict() == {
        "license": "apache-2.0", "tags": ["a"], "base_model": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "base_model_relation": "quantized", "library_name": "transformers", "pipeline_tag": "text-generation",
        "quantized_by": "qbridge",
    }  # fmt: skip
    assert found.text.strip() == "# A model\n\nWritten by \u201csomebody\u201d."
    assert with_metadata(card, metadata(report)) == card
    local = dataclasses.replace(report, made_from=made | {"source": "/home/me/llama"}, quantized=0, target="trt")
    assert metadata(local) == {"pipeline_tag": "text-generation"}


@pytest.mark.parametrize("head", ["", "no metadata\n---\nwords\n", "---\nnever closed\n", "---\n---\n"])
def test_a_card_without_metadata_gets_them_and_keeps_its_words(head: str) -> None:
    card = with_metadata(head, {"quantized_by": "yes"})
    assert ModelCard(card).data.to_dict() == {"quantized_by": "yes"}
    assert card.endswith(head.removeprefix("---\n---\n"))


# https://huggingface.co/tasks, as huggingface.js lists them in `pipelines.ts`
PIPELINES = """
" text-classification token-classification table-question-answering question-answering
zero-shot-classification translation summarization feature-extraction text-generation fill-mask
sentence-similarity text-to-speech text-to-audio automatic-speech-recognition audio-to-audio
audio-classification audio-text-to-text depth-estimation image-classification object-detection
image-segmentation text-to-image image-to-text image-to-image image-to-video video-classification
reinforcement-learning robotics visual-question-answering document-question-answering
zero-shot-image-classification graph-ml mask-generation zero-shot-object-detection image-feature-extraction
image-text-to-text keypoint-detection any-to-any
"""


@pytest.mark.parametrize("task", tasks())
def test_tasks_have_the_words_of_the_hub(task: str) -> None:
    for ending in tasks()[task].classes:
        assert pipeline(f"A{ending}") in {*PIPELINES.split(), ""}, ending


def full_with_cost() -> Report:
    """The same after an evaluation."""
    found = Evaluation(1234, 512, 0.1, 0.01, 0.1, 0.01, 0.9, 11.0, 10.0, "float32")
    return dataclasses.replace(full(), parity=dataclasses.replace(full().parity, evaluation=found))


def test_a_card_has_the_name_the_command_and_the_figures_with_their_tokens(tmp_path: Path) -> None:
    report = bridge.convert(TINY, "hf", "fp8", tmp_path / "any-name")
    card = (tmp_path / "any-name" / "README.md").read_text()
    assert "\n# tiny-llama-fp8-hf\n" in card and "vllm serve tiny-llama-fp8-hf" in card, card
    loaded = [tmp_path / "any-name" / name for name in ("model.safetensors", "config.json")]
    assert report.bytes == sum(path.stat().st_size for path in loaded)
    assert f"Cost: `{cost(report)}`." in card and "Measured" not in card
    said = section(full())
    assert f"Measured on {full().parity.outputs[0].positions:,} tokens" in said
    evaluated = full_with_cost()
    assert f"Cost: `{cost(evaluated)}`." in section(evaluated) and "1,234 tokens" in cost(evaluated)
    assert card.count("# tiny-llama-fp8-hf") == 1


@pytest.mark.parametrize("target", ["hf", "gguf"])
def test_a_command_that_needs_a_tokenizer_says_that_there_is_none(target: str, tmp_path: Path) -> None:
    (tmp_path / "mute").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "mute" / name).write_bytes((TINY / name).read_bytes())
    said = {}
    for source in (TINY, tmp_path / "mute"):
        quant = "int8_wo" if target == "hf" else "q8_0"
        report = bridge.convert(source, target, quant, tmp_path / f"{source.name}-out", verify=False)
        said[source.name] = [str(line) for line in report_lines(report) if "needs a tokenizer" in str(line)]
    assert said[TINY.name] == [] and bool(said["mute"]) is (target == "hf")  # llama-server reads GGUF's own
