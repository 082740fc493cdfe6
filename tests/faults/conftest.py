"""One process that has imported everything, for all tests of faults, and what their commands read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.stand import Stand
from tests.faults.struck import built


@pytest.fixture(scope="session")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    folder = tmp_path_factory.mktemp("faults")
    running = Stand(built(folder), folder)
    yield running
    running.close()
