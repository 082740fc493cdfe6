"""The site, for tests that look at it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.site import built


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory)
