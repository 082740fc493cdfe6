"""Unpacks vLLM's wheel into this environment without its shared objects and CUDA headers: `make oracles`."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

COMPILED = ("third_party/deep_gemm/include/", "third_party/fmha_sm100/cutlass/", "vllm/vllm-rs")


def unpack(folder: Path) -> None:
    """Unpack the one wheel of a folder."""
    (wheel,) = folder.glob("vllm-*.whl")
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".so") and ".data/" not in name]
        names = [name for name in names if not any(part in name for part in COMPILED)]
        archive.extractall(sysconfig.get_paths()["purelib"], names)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
