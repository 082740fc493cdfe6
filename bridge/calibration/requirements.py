"""Check that data and device are there before a model is loaded."""

from __future__ import annotations

from bridge.calibration.data import Data
from bridge.core.errors import CalibrationError, UsageError
from bridge.core.text import number
from bridge.quant.schemes.scheme import Scheme


def check_device(scheme: Scheme, device: str | None) -> None:
    """CalibrationError if CUDA is asked for or needed but absent; loads torch, no model."""
    check_device_name(device)
    if not (scheme.needs_cuda or str(device or "").startswith("cuda")):
        return
    import torch

    if torch.cuda.is_available():
        return
    why = scheme.needs_cuda or f"device={device!r} was asked for"
    raise CalibrationError(
        f"scheme {scheme.name}: no CUDA device here, and {why}; calibrate on a machine with one and pass its saved "
        "calibration (calib=), or choose another scheme"
    )


def check_device_name(device: str | None) -> None:
    """UsageError for a device that is neither the CPU nor CUDA."""
    if str(device or "cpu").partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r} is unknown; known: cpu, cuda, cuda:0 ...")


def check_device_here(device: str | None) -> None:
    """UsageError for a device that is unknown or not here; a CPU loads nothing."""
    check_device_name(device)
    name, _, index = str(device or "cpu").partition(":")
    if name != "cuda":
        return
    import torch

    count = torch.cuda.device_count()
    if not count or (index and not (index.isdecimal() and int(index) < count)):
        raise UsageError(
            f"device={device!r} (--device): {number(count, 'CUDA device')} here; "
            + (f"known: cuda:0 to cuda:{count - 1}" if count else "leave it out, to run on the CPU")
        )


def check_data(scheme: Scheme, data: Data) -> None:
    """CalibrationError if a scheme needs data and there are none."""
    if not data.batches and data.forward_loop is None and scheme.needs_calibration:
        raise CalibrationError(f"scheme {scheme.name} needs statistics of activations: {data.missing}")
