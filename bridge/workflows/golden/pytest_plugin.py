"""A plugin for pytest: the fixture `golden` holds what a user's suite converts to a golden; must load nothing itself.

    def test_the_checkpoint_is_the_one_we_shipped(golden, tmp_path):
        bridge.convert("llama", "hf", "fp8_pc_pt", out=tmp_path / "out")
        golden("golden/llama-fp8", tmp_path / "out")          # or: golden("golden/llama-fp8", model="llama")

`pytest --golden-reason "the new rounding"` records goldens that moved, and those that are not there yet.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OPTION = "--golden-reason"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records."""
    parser.getgroup("qbridge").addoption(
        OPTION, metavar="TEXT", default="", help="record goldens that moved or are missing; the reason is kept in them"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Fail the test with what moved: `golden(directory, out)`; paths are relative to the file of the test."""
    reason = str(request.config.getoption(OPTION))
    here = request.path.parent

    def hold(directory: str | Path, out: str | Path | None = None, *, run: bool | None = None, **how: Any) -> None:
        from bridge.errors import BridgeError
        from bridge.golden.verbs import check, record

        kept, out = here / directory, None if out is None else here / out
        try:
            if reason and out is not None:
                record(out, kept, reason=reason, run=run is not False)
                return
            moved = check(kept, out, run=run, **how)
        except BridgeError as error:
            pytest.fail(str(error), pytrace=False)
        if not moved.passed:
            pytest.fail(f"{moved}\n{OPTION} TEXT records it as it is now", pytrace=False)

    return hold
