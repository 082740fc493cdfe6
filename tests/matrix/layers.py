"""Other versions of packages, each installed once in a folder of its own, in front of the environment's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "matrix"
PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


class NotRun(Exception):
    """This machine cannot install or start a cell."""


def layers(requirements: list[str]) -> list[Path]:
    """The folders of what pip would change here for `requirements`: their own and what they need, no more."""
    if not requirements:
        return []
    plan = json.loads(_pip("--dry-run", "--report", "-", *requirements))
    return [_installed(f"{item['metadata']['name']}=={item['metadata']['version']}") for item in plan["install"]]


def environment(folders: list[Path]) -> dict[str, str]:
    """The variables of a process that finds `folders` first, and the shared objects of NVIDIA's wheels in them."""
    objects = [path for folder in folders for path in folder.glob("nvidia/*/lib")]
    paths = {"PYTHONPATH": [*folders, ROOT], "LD_LIBRARY_PATH": objects}
    return {**os.environ, **{name: os.pathsep.join(map(str, found)) for name, found in paths.items()}}


def _installed(requirement: str) -> Path:
    """The folder of one package; it appears when it is complete."""
    folder = FOLDER / requirement.replace("==", "-")
    if not folder.exists():
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        _pip("--no-deps", "--no-compile", "--no-cache-dir", "--target", str(part), requirement)
        part.rename(folder)
    return folder


def _pip(*words: str) -> str:
    done = subprocess.run([*PIP, *words], capture_output=True, text=True, timeout=1800)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise NotRun(errors[-1].removeprefix("ERROR: "))
    return done.stdout
