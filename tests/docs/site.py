"""The built site, made once a test run: `mkdocs build` in strict mode, where every warning is an error."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.blocks import ROOT

PAGES = ROOT / "docs" / "pages"


def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site's directory; of several workers of xdist one builds, the others wait."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    site = shared / "site"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (site / "sitemap.xml").exists():
            build(site)
    return site


def build(site: Path) -> None:
    """What `make docs` runs, into another directory."""
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
