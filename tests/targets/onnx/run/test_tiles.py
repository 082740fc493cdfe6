"""LLaVA-NeXT and LLaVA-OneVision, which read images as tiles: rows of features, and graphs, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel, image_size_to_num_patches
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

import bridge
from bridge.core.errors import VerifyError
from bridge.targets.onnx.files import GENAI, TILE_ROWS
from bridge.targets.onnx.run.multimodal import MultiModal
from bridge.targets.onnx.run.tiles import Tiling
from bridge.verification.outputs import relative_l2
from tests import once
from tests.models.tiled_family import SIZES, save_llava_next
from tests.sweep import seeing
from tests.sweep.build import build

pytest.importorskip("PIL")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graphs_once")]
TOLERANCE = 5e-6  # float32 sums in another order
PIXELS, SIDE, WIDTH = 32, 4, 5


@pytest.mark.parametrize(("model", "most"), [(LlavaNextModel, 0), (LlavaOnevisionModel, 9), (LlavaOnevisionModel, 1)])
def test_rows_of_images_of_any_size_are_those_of_transformers(model: Any, most: int) -> None:
    """Wide, high and tiny images; with one tile, too, which has no lines."""
    random = np.random.default_rng(most)
    every = [[PIXELS * down, PIXELS * across] for down in range(1, 7) for across in range(1, 7)]
    for size in random.integers(5, 400, (60, 2)).tolist():
        sizes = [every[at] for at in sorted(random.choice(len(every), 36 if most == 9 else 6, replace=False))]
        tiling = Tiling(tuple(map(tuple, sizes)), PIXELS, SIDE, most)
        assert tiling.count(size) == image_size_to_num_patches(size, sizes, PIXELS)
        config = SimpleNamespace(
            vision_config=SimpleNamespace(image_size=PIXELS, patch_size=PIXELS // SIDE), image_grid_pinpoints=sizes
        )
        told = {"vision_aspect_ratio": f"anyres_max_{most}"} if most else {"vision_feature_select_strategy": "full"}
        for tiles in (tiling.count(size), 1):
            features = torch.from_numpy(random.standard_normal((tiles, SIDE**2, WIDTH), np.float32))
            line = torch.from_numpy(random.standard_normal(WIDTH, np.float32))
            packed, _ = model.pack_image_features(
                SimpleNamespace(config=config), [features], [size], image_newline=line, **told
            )
            rows, weights = tiling.rows(size, tiles)
            known = torch.cat([features.flatten(0, 1), line[None]]).numpy()
            np.testing.assert_allclose((known[rows] * weights[..., None]).sum(1), packed[0], atol=2e-5)


def source() -> Path:
    return once.directory("tiny-llava-next", save_llava_next)


def model() -> Any:
    return transformers.LlavaNextForConditionalGeneration.from_pretrained(source(), dtype=torch.float32)


def converted(scheme: str | None) -> Path:
    """An output, made once a run; it must pass its own verification, with images of two sizes."""

    def make(directory: Path) -> None:
        looked = seeing.seen(model(), torch.Generator().manual_seed(1))
        ids = torch.randint(5, 300, (2, 64), generator=torch.Generator().manual_seed(2))
        tiling = Tiling(tuple(map(tuple, SIZES)), 24, 3, 0)
        for row, size in zip(ids, looked["image_sizes"].tolist(), strict=True):
            row[3 : 3 + len(tiling.rows(size, tiling.count(size))[0])] = model().config.image_token_id
        data = [{"input_ids": ids, **looked}]
        report = bridge.convert(source(), "trt", scheme, directory / "out", data=data, progress=False)
        assert report.passed, report

    return once.directory(f"llava-next-{scheme}", make) / "out"


def test_prompts_steps_padding_and_texts_alone_equal_transformers() -> None:
    far = seeing.distances(model(), converted(None))
    assert far.keys() == {"logits", "steps", "padded", "text"}
    assert all(error < TOLERANCE for error in far.values()), far


def test_the_manifest_says_how_tiles_are_joined() -> None:
    vision = json.loads((converted(None) / GENAI).read_text())["model"]["vision"]
    assert {name: vision[name] for name in vision if name.startswith("tile_")} == {
        "tile_sizes": SIZES, "tile_pixels": 24, "tile_side": 3, "tile_features": 0,
    }  # fmt: skip
    assert TILE_ROWS in vision["inputs"]


def test_images_without_their_sizes_are_refused() -> None:
    given = {"input_ids": np.full((1, 8), 7), "pixel_values": np.zeros((1, 3, 3, 24, 24), np.float32)}
    with pytest.raises(VerifyError, match=r"image_sizes \(height, width\) are missing beside pixel_values"):
        MultiModal(converted(None)).run(given)


@pytest.mark.product
def test_a_quantized_decoder_stays_near() -> None:
    far = seeing.distances(model(), converted("int8_wo"))
    assert 1e-4 < far["logits"] < 0.2, far


@pytest.mark.parametrize("size", [(30, 40), (90, 20), (10, 75)])
def test_run_answers_a_text_with_an_image_of_any_size_as_transformers_does(size: Any, tmp_path: Path) -> None:
    from PIL import Image

    height, width = size
    for name, least, most in (("any", 0, 256), ("light", 250, 256), ("dark", 0, 30)):
        pixels = np.random.default_rng(1).integers(least, most, (height + len(name), width, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    files = [tmp_path / "any.png", tmp_path / "light.png"]
    text = "The value <image> of the <image> function"
    processor = transformers.AutoProcessor.from_pretrained(source())
    given = processor(text=text, images=[Image.open(file) for file in files], return_tensors="pt")
    wanted = model().generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None)
    answer = bridge.run(converted(None), text, image=files, tokens=8)
    assert list(answer.ids) == wanted[0, answer.prompt_tokens :].tolist()
    other = bridge.run(converted(None), text, image=[files[0], tmp_path / "dark.png"], tokens=8)
    assert other.ids != answer.ids, "images make a difference"


@pytest.mark.product
def test_several_images_of_a_row_have_one_tile_each(tmp_path: Path) -> None:
    """LLaVA-OneVision, where `batch_num_images` says so."""
    seer = build("LlavaOnevisionForConditionalGeneration", torch.float32)
    bridge.convert(seer, "trt", None, tmp_path / "out", verify=False, progress=False)
    looked = seeing.seen(seer, torch.Generator().manual_seed(3)) | {"batch_num_images": torch.tensor([2])}
    ids = torch.full((1, 50), 7)
    ids[0, 3:20], ids[0, 25:42] = seer.config.image_token_id, seer.config.image_token_id
    with torch.no_grad():
        want = seer(input_ids=ids, **looked).logits.numpy()
    given = {name: tensor.numpy() for name, tensor in looked.items()}
    got = MultiModal(tmp_path / "out").run({"input_ids": ids.numpy(), **given})
    assert relative_l2(got["logits"], want) < TOLERANCE
