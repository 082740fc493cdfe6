"""An environment in which an example's package is installed, by what its pyproject.toml says; runs nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path


def install(package: Path, site: Path) -> dict[str, str]:
    """Write what pip would of a package's metadata into `site`, and return variables under which Python finds both."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(points))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(package)])}


def run(environment: dict[str, str], *words: str) -> str:
    """What Python says with these words, which must go well."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
