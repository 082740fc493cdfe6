"""The stored results of the sweep hold: a family of each kind in `make test`, all of them in `make test-all`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.needs import needs
from tests.sweep.build import KINDS
from tests.sweep.cell import CELLS, ENDS, run
from tests.sweep.decoded import decode
from tests.sweep.results import counts, read, write

needs("modelopt")

# A kind is met by its first target and scheme; the rest of the product waits for `make test-all`.
OF_A_KIND = {
    "decoders": ("BloomForCausalLM", "hf nvfp4_wo"),
    "experts in half precision": ("Glm4MoeForCausalLM", "trt engine"),  # its router computes in float32
    "dual towers": ("SiglipModel", "hf nvfp4_wo"),
    "encoder-decoders": ("T5ForConditionalGeneration", "hf nvfp4_wo"),
    "encoders": ("MPNetForMaskedLM", "hf int4_awq"),  # ModelOpt's values are others, and wrong
    "experts": ("GraniteMoeForCausalLM", "hf nvfp4_wo"),
    "hybrids": ("Lfm2MoeForCausalLM", "hf int4_awq"),
    "multimodal": ("LlavaForConditionalGeneration", "hf nvfp4_wo"),
    "speech": ("Wav2Vec2ForCTC", "hf int4_awq"),
    "vision": ("SwinForImageClassification", "trt"),
}


STORED = {name: row for rows in read().values() for name, row in rows.items()}


def test_every_family_that_was_swept_has_a_result_of_each_cell() -> None:
    assert all(set(families) == set(KINDS[kind]) for kind, families in read().items())
    swept = {cell for row in STORED.values() for cell in row}
    assert swept <= set(CELLS)
    for families in read().values():  # of a kind all families have run, or none
        (cells,) = {frozenset(row) for row in families.values()}
        assert cells >= swept - {"trt engine"}
    assert {ended["end"] for row in STORED.values() for ended in row.values()} <= set(ENDS)


def test_results_are_added_by_kind_family_and_cell(tmp_path: Path) -> None:
    file = tmp_path / "last.json"
    write(file, "vision", "B", "trt", {"end": "right", "words": ""})
    write(file, "decoders", "A", "trt", {"end": "refused", "words": "why"})
    write(file, "vision", "B", "trt", {"end": "refused", "words": "why"})
    assert list(read(file)) == ["decoders", "vision"]
    assert counts(read(file)) == "trt: 2 refused"


def test_int4_is_decoded_from_pairs_of_rows_scales_and_pre_scales() -> None:
    stored = {
        "a.weight": torch.tensor([[0x71, 0x8F]], dtype=torch.uint8),  # rows (1, -1) and (7, -8)
        "a.weight_scale": torch.tensor([[2.0], [0.5]]),
        "a.pre_quant_scale": torch.tensor([1.0, 3.0]),
    }
    assert decode(stored, "a").tolist() == [[2.0, -6.0], [3.5, -12.0]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "cell"),
    [
        pytest.param(name, cell, marks=[] if (name, cell) in OF_A_KIND.values() else pytest.mark.product)
        for name in STORED
        for cell in STORED[name]
    ],
)
def test_a_cell_ends_as_the_last_sweep_says(family: str, cell: str, tmp_path: Path) -> None:
    ended = run(family, cell, tmp_path)
    assert ended.end == STORED[family][cell]["end"], ended.words
