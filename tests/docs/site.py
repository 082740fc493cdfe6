"""The built site, made once a test run: `mkdocs build` in strict mode, where every warning is an error."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tests import forks
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


BUILD = """
import os
os.environ["NO_MKDOCS_2_WARNING"] = "1"
from mkdocs.__main__ import cli
cli(["build", "--quiet", "--strict", "--site-dir", {site!r}])
"""


def build(site: Path) -> None:
    """What `make docs` runs, into another directory; in a fork, since pages hold what conversions and errors say."""
    code, said = forks.python(BUILD.format(site=str(site)), ROOT, 600)
    assert code == 0, said
