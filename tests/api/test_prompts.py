"""What a prompt with images says if a package lacks, or a file is no image."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bridge.api import prompts, run
from bridge.core.errors import CannotRun, UsageError

Image = pytest.importorskip("PIL.Image")
# transformers' words, the lines as it breaks them
TORCHVISION = """
Qwen2VLVideoProcessor requires the Torchvision library but it was not found in your environment. Check out the
installation page: https://pytorch.org/get-started/locally/ and follow the ones that match your environment.
"""
NUM2WORDS = "Package `num2words` is required to run SmolVLM processor. Install it with `pip install num2words`."


@pytest.mark.parametrize(("said", "lacks"), [(TORCHVISION, "torchvision"), (NUM2WORDS, "num2words")])
def test_the_package_that_a_processor_lacks_is_named(said: str, lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def refuse(*_: Any, **__: Any) -> Any:
        raise ImportError(said)

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", refuse)
    with pytest.raises(CannotRun) as caught:
        prompts.with_images(Path("out"), "what?", ["cat.png"])
    assert f"out: the processor of images lacks {lacks}: " in str(caught.value)
    assert str(caught.value).endswith(f"hint   pip install {lacks}")
    assert " ".join(said.split()) in str(caught.value)


def _picture(path: Path) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path.read_bytes()


def test_an_image_of_too_many_pixels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _picture(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(UsageError, match=r"large\.png: too large an image: .*1200 pixels.*; give a smaller one"):
        prompts._opened(tmp_path / "large.png")


def test_an_image_with_a_broken_chunk_is_refused(tmp_path: Path) -> None:
    whole = _picture(tmp_path / "broken.png")
    at = whole.index(b"IDAT")
    half = whole[at + 4 : at + 1004]
    chunk = len(half).to_bytes(4, "big") + b"IDAT" + half + zlib.crc32(b"IDAT" + half).to_bytes(4, "big")
    (tmp_path / "broken.png").write_bytes(whole[: at - 4] + chunk + bytes(40))
    with pytest.raises(UsageError, match=r"broken\.png: not a readable image: .*; give a PNG or a JPEG"):
        prompts._opened(tmp_path / "broken.png")


def test_an_image_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.png: there is no such image"):
        prompts._opened(tmp_path / "none.png")


class Processor:
    """Keeps what it is asked; its template is a list of what was said."""

    chat_template, image_processor, feature_extractor = "a template", None, SimpleNamespace(sampling_rate=16000)

    def apply_chat_template(self, said: Any, **_: Any) -> str:
        return json.dumps(said)

    def __call__(self, text: str, audio: Any = None, **_: Any) -> dict[str, Any]:
        self.text = text
        return {"input_ids": np.zeros((1, 1), np.int64)}


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_what_the_system_says_is_in_a_chat_with_an_image_or_a_sound(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, words = Processor(), SimpleNamespace(directory=tmp_path)
    monkeypatch.setattr(prompts, "_processor", lambda *_, **__: processor)
    monkeypatch.setattr(prompts, "_opened", lambda path: path)
    monkeypatch.setattr(prompts, "read_sound", lambda path, rate: np.zeros(4, np.float32))
    monkeypatch.setattr(run, "check_sees", lambda _: None)
    monkeypatch.setattr(run, "check_hears", lambda _: None)
    files = {"image": (["a.png"], []), "audio": ([], ["a.wav"])}[kind]
    run._prompt(words, "Seer", "what?", *files, run.chat_of("what?", "Be brief."))  # type: ignore[arg-type]
    system, user = json.loads(processor.text)
    assert system == {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert user == {"role": "user", "content": [{"type": kind}, {"type": "text", "text": "what?"}]}
