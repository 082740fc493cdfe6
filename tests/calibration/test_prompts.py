"""Prompts that calibrate a denoiser: where they come from, and what is said if they cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from bridge.calibration.data import Sampling, prepare
from bridge.core.errors import CalibrationError, UsageError
from bridge.sources.live_models import prompts
from bridge.sources.opening import open_source

STEPS = 2


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    root = tmp_path / "pipeline" / "transformer"
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps({"_class_name": "DiTTransformer2DModel"}))
    save_file({"weight": np.zeros((2, 3), np.float32)}, root / "diffusion_pytorch_model.safetensors")
    index = {"_class_name": "DiTPipeline", "transformer": ["diffusers", "DiTTransformer2DModel"]}
    (root.parent / "model_index.json").write_text(json.dumps(index))
    return root.parent


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that the pipeline, which does not run here, would be given."""
    given: list[str] = []

    def recorded(_: Any, words: list[str]) -> list[list[dict[str, Any]]]:
        given.extend(words)
        return [[{"hidden_states": torch.full((2, 3), at + 0.5)}] * STEPS for at, _ in enumerate(words)]

    monkeypatch.setattr(prompts, "recorded", recorded)
    return given


def test_a_text_file_has_a_prompt_a_line_and_the_last_is_held_out(
    pipeline: Path, asked: list[str], tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("a cat\n\n  a dog \na boat\n")
    data = prepare(tmp_path / "prompts.txt", open_source(pipeline))
    assert asked == ["a cat", "a dog", "a boat"]
    assert (len(data.batches), data.samples, data.name) == (2 * STEPS, 2, "2 prompts of 20 steps each")
    assert float(data.held_out[0]["hidden_states"][0, 0]) == 2.5


def test_samples_is_the_number_of_prompts(pipeline: Path, asked: list[str]) -> None:
    assert prepare(["a", "b", "c", "d"], open_source(pipeline), Sampling(2)).samples == 2
    assert asked == ["a", "b", "c"]


def test_without_data_the_embedded_prompts_are_used(pipeline: Path, asked: list[str]) -> None:
    assert prepare(None, open_source(pipeline)).samples == 8
    assert asked == prompts.PROMPTS[:9] and len({*prompts.PROMPTS}) == len(prompts.PROMPTS)


def test_one_prompt_is_too_few(pipeline: Path) -> None:
    with pytest.raises(CalibrationError, match="one prompt cannot both calibrate and be held out"):
        prepare(["a cat"], open_source(pipeline))


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        (Sampling("auto"), "a pipeline takes a number of prompts"),
        (Sampling(sequence=64), "a pipeline takes whole prompts"),
        (Sampling(field="text"), "names a key of JSONL records"),
    ],
)
def test_what_prompts_have_no_use_for_is_refused(pipeline: Path, sampling: Sampling, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        prepare(["a cat", "a dog"], open_source(pipeline), sampling)


def test_one_batch_is_cut_along_its_rows_alone(pipeline: Path) -> None:
    places = torch.zeros(9, 3)
    batch = {"img_ids": places, "hidden_states": torch.ones(4, 9, 2), "timestep": torch.ones(4)}
    data = prepare(batch, open_source(pipeline / "transformer"))
    shapes = [{name: tuple(t.shape) for name, t in part.items()} for part in (*data.batches, *data.held_out)]
    assert shapes == [{"img_ids": (9, 3), "hidden_states": (rows, 9, 2), "timestep": (rows,)} for rows in (3, 1)]
    assert data.samples == 3


def test_a_denoiser_alone_takes_batches(pipeline: Path) -> None:
    alone = open_source(pipeline / "transformer")
    assert "DiTTransformer2DModel alone takes no prompts; give the directory" in prepare(None, alone).missing
    with pytest.raises(CalibrationError, match=r"or batches of its inputs in Python: data=\["):
        prepare(["a cat", "a dog"], alone)
    batch = {"hidden_states": torch.ones(2, 3), "timestep": torch.ones(2)}
    assert len(prepare([batch, batch, batch], alone).batches) == 2


def test_a_loader_without_a_length_gives_batches(pipeline: Path) -> None:
    class Rows(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from [{"hidden_states": torch.zeros(4), "timestep": torch.zeros(1)}] * 3

    loader = torch.utils.data.DataLoader(Rows(), batch_size=1)
    assert len(prepare(loader, open_source(pipeline / "transformer")).batches) == 2


def test_inputs_are_kept_by_name_and_a_step_has_all_rows() -> None:
    batches: list[dict[str, Any]] = []

    def forward(sample: Any, timestep: Any, added: Any = None, return_dict: bool = True) -> None:
        """Only its signature is looked at."""

    hook = prompts._keep(SimpleNamespace(forward=forward), batches)
    more = {"added": {"ids": torch.ones(2)}, "img_ids": torch.ones(9, 3), "return_dict": 0}
    hook(None, (torch.ones(2, 3),), {"timestep": torch.tensor(5.0), **more})
    assert {name: tuple(value.shape) for name, value in batches[0].items()} == {
        "sample": (2, 3), "timestep": (2,), "img_ids": (9, 3), "added.ids": (2,),
    }  # fmt: skip
