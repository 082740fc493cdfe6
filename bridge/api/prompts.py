"""Make a prompt with images or sounds, with a checkpoint's processor."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.api.sounds import read_sound
from bridge.core.errors import CannotRun, SourceError, UsageError, first_line

if TYPE_CHECKING:
    import numpy as np


# What processors import beside transformers: those with a video processor need torchvision, SmolVLM's num2words, too.
_PACKAGES = ("torchvision", "num2words", "pillow", "sentencepiece")


def with_images(
    directory: Path, text: str, images: Sequence[str | Path], said: Sequence[Mapping[str, str]] = ()
) -> tuple[list[int], dict[str, np.ndarray]]:
    """The ids of a prompt, and what the processor makes of the images.

    `said`: the messages of a chat, the last of which is `text`; they go through the model's chat template.
    """
    processor = _processor(directory)
    return _made(directory, processor, text, "image", {"images": [_opened(Path(image)) for image in images]}, said)


def with_sounds(
    directory: Path, text: str, sounds: Sequence[str | Path], said: Sequence[Mapping[str, str]] = ()
) -> tuple[list[int], dict[str, np.ndarray]]:
    """As `with_images`, of sounds."""
    processor = _processor(directory, what="sound")
    if "audio" not in inspect.signature(type(processor).__call__).parameters:
        raise CannotRun(
            f"{directory}: {type(processor).__name__} takes no sound beside a text; make its inputs with transformers, "
            "and feed the graphs from your program, as genai_config.json joins them"
        )
    heard = _heard(processor.feature_extractor, sounds)
    return _made(directory, processor, text, "audio", heard, said)


def image_alone(directory: Path, images: Sequence[str | Path], text: str) -> tuple[str, dict[str, np.ndarray]]:
    """What the image processor makes of the one image that a model reads, and the text that its answer begins with.

    Pix2Struct reads a question as pixels: where its processor asks for one, `text` is written above the image.
    """
    if len(images) != 1:
        raise UsageError(f"the model reads one image, and {len(images)} were given; give one: image= (--image)")
    processor = _processor(directory, "AutoImageProcessor")
    asked = {"header_text": text} if getattr(processor, "is_vqa", False) else {}
    try:
        made = dict(processor(images=_opened(Path(images[0])), **asked, return_tensors="np"))
    except Exception as error:  # processors raise errors of their own
        raise UsageError(f"the processor of {directory} refused the image: {first_line(error)}") from error
    return "" if asked else text, made


def sound_alone(directory: Path, sounds: Sequence[str | Path]) -> dict[str, np.ndarray]:
    """What the feature extractor makes of the one sound that a model writes down."""
    if len(sounds) != 1:
        raise UsageError(f"the model hears one sound, and {len(sounds)} were given; give one: audio= (--audio)")
    extractor = _processor(directory, "AutoFeatureExtractor", "sound")
    heard = _heard(extractor, sounds)
    return dict(extractor(heard.pop("audio")[0], **heard, return_tensors="np"))


def _heard(extractor: Any, sounds: Sequence[str | Path]) -> dict[str, Any]:
    """Samples of the files, at the rate that a feature extractor takes; none longer than it hears at once."""
    rate = int(extractor.sampling_rate)
    samples = [read_sound(Path(sound), rate) for sound in sounds]
    most = getattr(extractor, "n_samples", None)  # Whisper's cuts what is behind them off
    for sound, made in zip(sounds, samples, strict=True):
        if most is not None and len(made) > most:
            raise UsageError(
                f"{sound}: {len(made) / rate:.1f} seconds, and the model hears {most / rate:g} at once; cut the file: "
                f"ffmpeg -i {sound} -f segment -segment_time {most / rate:g} part-%d.wav"
            )
    return {"audio": samples, "sampling_rate": rate}


def _made(
    directory: Path,
    processor: Any,
    text: str,
    kind: str,
    given: Mapping[str, Any],
    said: Sequence[Mapping[str, str]],
) -> tuple[list[int], dict[str, np.ndarray]]:
    """The ids of a prompt with files of one kind, "image" or "audio", and what the processor makes of these."""
    of, media = ("images", given["images"]) if kind == "image" else ("sound", given["audio"])
    if said:
        if not getattr(processor, "chat_template", None):
            raise UsageError(f"{directory}: the processor has no chat template; leave out chat=True (--chat)")
        shown: list[dict[str, str]] = [{"type": kind}] * len(media)  # before what the user says last
        texts = [{"type": "text", "text": one["content"]} for one in said]
        chat = [{**one, "content": [content]} for one, content in zip(said, texts, strict=True)]
        chat[-1] = {**said[-1], "content": [*shown, texts[-1]]}
        try:
            text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise errors of their own
            raise SourceError(f"{directory}: the chat template refused the text and its {of}: {error}") from error
    try:
        made = dict(processor(text=text, **given, return_tensors="np", add_special_tokens=not said))
    except Exception as error:  # processors raise errors of their own
        word = getattr(processor, f"{kind}_token", f"its {kind} token")
        raise UsageError(
            f"the processor of {directory} refused the text and its {of}: {first_line(error)}\n"
            f"  hint   write {word} into the text for each {'image' if kind == 'image' else 'sound'}, or use chat=True "
            "(--chat)"
        ) from error
    return made.pop("input_ids")[0].tolist(), made


def _processor(directory: Path, kind: str = "AutoProcessor", what: str = "images") -> Any:
    import transformers

    try:
        processor = getattr(transformers, kind).from_pretrained(str(directory), trust_remote_code=False)
    except ImportError as error:
        said = " ".join(str(error).split())
        lacking = [name for name in _PACKAGES if name in said.lower()]
        remedy = f"pip install {' '.join(lacking)}" if lacking else "install what it names"
        packages = " and ".join(lacking) or "a package"
        raise CannotRun(f"{directory}: the processor of {what} lacks {packages}: {said}\n  hint   {remedy}") from error
    except Exception as error:
        raise SourceError(
            f"{directory}: the processor of {what} cannot be loaded: {first_line(error)}; copy the model's "
            "preprocessor_config.json and processor_config.json there"
        ) from error
    part = "image_processor" if what == "images" else "feature_extractor"
    if kind == "AutoProcessor" and not hasattr(processor, part):
        raise SourceError(
            f"{directory}: the checkpoint has no processor of {what}; copy the model's preprocessor_config.json and "
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
