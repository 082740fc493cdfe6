"""Unpack a wheel for `make oracles` without its shared objects and CUDA headers: python -m tests.oracles.unpack FOLDER

FOLDER has one wheel. It goes where this environment has its packages, or into `--into`.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from zipfile import ZipFile

COMPILED = ("third_party/deep_gemm/include/", "third_party/fmha_sm100/cutlass/", "vllm/vllm-rs")


def unpack(folder: Path, into: Path) -> None:
    """Unpack the one wheel of a folder."""
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".so") and ".data/" not in name]
        names = [name for name in names if not any(part in name for part in COMPILED)]
        archive.extractall(into, names)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--into", type=Path, default=sysconfig.get_paths()["purelib"])
    unpack(**vars(parser.parse_args()))
