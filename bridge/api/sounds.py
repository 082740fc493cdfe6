"""Read sound from WAV files, with the standard library."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.core.errors import UsageError

if TYPE_CHECKING:
    import numpy as np


def read_sound(path: Path, rate: int) -> np.ndarray:
    """Samples from -1 to 1 (float32) of a WAV file of `rate` samples a second; its channels are averaged.

    UsageError for other files; it has the command that converts them.
    """
    import numpy as np

    convert = f"convert it: ffmpeg -i {path} -ar {rate} -ac 1 -c:a pcm_s16le OUT.wav"
    try:
        with wave.open(str(path)) as file:
            width, channels, found = file.getsampwidth(), file.getnchannels(), file.getframerate()
            data = file.readframes(file.getnframes())
    except FileNotFoundError as error:
        raise UsageError(f"{path}: there is no such sound") from error
    except (OSError, EOFError, wave.Error) as error:
        raise UsageError(f"{path}: not a WAV file of whole numbers: {error or 'it ends early'}; {convert}") from error
    if found != rate:
        raise UsageError(f"{path}: {found} samples a second, and the model hears {rate}; {convert}")
    data = data[: len(data) // (width * channels) * width * channels]
    if not data:
        raise UsageError(f"{path}: it has no samples; give another file")
    if width == 1:  # the only unsigned one
        samples = (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    else:
        wide = np.zeros((len(data) // width, 4), np.uint8)
        wide[:, 4 - width :] = np.frombuffer(data, np.uint8).reshape(-1, width)
        samples = (wide.view("<i4")[:, 0] / 2**31).astype(np.float32)
    mean: np.ndarray = samples.reshape(-1, channels).mean(axis=1, dtype=np.float32)
    return mean
