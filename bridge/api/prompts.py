"""Make a prompt that has images, with the processor of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.errors import CannotRun, SourceError, UsageError, first_line

if TYPE_CHECKING:
    import numpy as np


# What processors import beside transformers: those with a video processor need torchvision, SmolVLM's num2words, too.
_PACKAGES = ("torchvision", "num2words", "pillow", "sentencepiece")


def with_images(
    directory: Path, text: str, images: Sequence[str | Path], *, chat: bool
) -> tuple[list[int], dict[str, np.ndarray]]:
    """The ids of a prompt, and what the processor makes of the images. `chat`: in the model's chat template."""
    processor = _processor(directory)
    pictures = [_opened(Path(image)) for image in images]
    if chat:
        said = [{"role": "user", "content": [*[{"type": "image"}] * len(images), {"type": "text", "text": text}]}]
        try:
            text = processor.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise errors of their own
            raise SourceError(f"{directory}: the chat template refused the text and its images: {error}") from error
    try:
        made = dict(processor(text=text, images=pictures, return_tensors="np", add_special_tokens=not chat))
    except Exception as error:  # processors raise errors of their own
        word = getattr(processor, "image_token", "its image token")
        raise UsageError(
            f"the processor of {directory} refused the text and its images: {first_line(error)}\n"
            f"  hint   write {word} into the text for each image, or use chat=True (--chat)"
        ) from error
    return made.pop("input_ids")[0].tolist(), made


def image_alone(directory: Path, images: Sequence[str | Path]) -> dict[str, np.ndarray]:
    """What the image processor makes of the one image that a model reads without a text."""
    if len(images) != 1:
        raise UsageError(f"the model reads one image, and {len(images)} were given; give one: image= (--image)")
    return dict(_processor(directory, "AutoImageProcessor")(images=_opened(Path(images[0])), return_tensors="np"))


def _processor(directory: Path, kind: str = "AutoProcessor") -> Any:
    import transformers

    try:
        processor = getattr(transformers, kind).from_pretrained(str(directory), trust_remote_code=False)
    except ImportError as error:
        said = " ".join(str(error).split())
        lacking = [name for name in _PACKAGES if name in said.lower()]
        remedy = f"pip install {' '.join(lacking)}" if lacking else "install what it names"
        what = " and ".join(lacking) or "a package"
        raise CannotRun(f"{directory}: the processor of images lacks {what}: {said}\n  hint   {remedy}") from error
    except Exception as error:
        raise SourceError(
            f"{directory}: the processor of images cannot be loaded: {first_line(error)}; copy the model's "
            "preprocessor_config.json and processor_config.json there"
        ) from error
    if kind == "AutoProcessor" and not hasattr(processor, "image_processor"):
        raise SourceError(
            f"{directory}: the checkpoint has no processor of images; copy the model's preprocessor_config.json and "
            "processor_config.json there"
        )
    return processor


def _opened(path: Path) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise CannotRun("reading images needs pillow: pip install pillow") from error
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except FileNotFoundError as error:
        raise UsageError(f"{path}: there is no such image") from error
    except Image.DecompressionBombError as error:
        raise UsageError(f"{path}: too large an image: {error}; give a smaller one") from error
    except (OSError, SyntaxError, ValueError) as error:  # pillow raises all of them for broken files
        raise UsageError(f"{path}: not a readable image: {error}; give a PNG or a JPEG") from error
