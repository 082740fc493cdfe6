"""WAV files of every width against the samples that were written, and what is refused."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest

from bridge.api.sounds import read_sound
from bridge.core.errors import UsageError

RATE = 16000


def write(path: Path, samples: np.ndarray, width: int = 2, channels: int = 1, rate: int = RATE) -> Path:
    """`samples` from -1 to 1 as whole numbers of `width` bytes."""
    whole = np.round(samples * (2.0 ** (8 * width - 1) - 1)).astype(np.int64)
    data = (
        (whole + 128).astype(np.uint8) if width == 1 else whole.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width]
    )
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data.tobytes())
    return path


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_are_those_that_were_written_and_channels_are_averaged(
    width: int, channels: int, tmp_path: Path
) -> None:
    samples = np.random.default_rng(1).uniform(-1, 1, (50, channels))
    samples[0] = -1
    got = read_sound(write(tmp_path / "sound.wav", samples.reshape(-1), width, channels), RATE)
    assert got.dtype == np.float32 and got.shape == (50,)
    np.testing.assert_allclose(got, samples.mean(1), atol=2.5 / 2 ** (8 * width - 1) + 1e-7)


def test_what_cannot_be_heard_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    slow = write(tmp_path / "slow.wav", np.zeros(50), rate=8000)
    with pytest.raises(UsageError, match=r"slow\.wav: 8000 samples a second, and the model hears 16000; convert it"):
        read_sound(slow, RATE)
    (tmp_path / "no.wav").write_bytes(b"no sound")
    with pytest.raises(UsageError, match=r"no\.wav: not a WAV file of whole numbers: .*; convert it: ffmpeg -i"):
        read_sound(tmp_path / "no.wav", RATE)
    with pytest.raises(UsageError, match=r"none\.wav: there is no such sound"):
        read_sound(tmp_path / "none.wav", RATE)
    with pytest.raises(UsageError, match=r"empty\.wav: it has no samples"):
        read_sound(write(tmp_path / "empty.wav", np.zeros(0)), RATE)
