"""The pytest fixture `golden`, which checks a conversion against a golden.

    def test_the_checkpoint_is_the_one_we_shipped(golden, tmp_path):
        bridge.convert("llama", "hf", "fp8_pc_pt", out=tmp_path / "out")
        golden("golden/llama-fp8", tmp_path / "out")          # or: golden("golden/llama-fp8", model="llama")

`pytest --golden-reason "the new rounding"` records goldens that moved or are missing. pytest imports this module in
every run, so it imports nothing else before the fixture is used.
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
        OPTION, metavar="TEXT", default="", help="record goldens that moved or are missing; they save the reason"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`golden(directory, out)` fails the test if anything moved; paths are relative to the test file."""
    reason = str(request.config.getoption(OPTION))
    here = request.path.parent

    def hold_to(directory: str | Path, out: str | Path | None = None, *, run: bool | None = None, **how: Any) -> None:
        from bridge.core.errors import BridgeError
        from bridge.workflows.golden.verbs import check, record

        path, out = here / directory, None if out is None else here / out
        try:
            if reason and out is not None:
                record(out, path, reason=reason, run=run is not False)
                return
            moved = check(path, out, run=run, **how)
        except BridgeError as error:
            pytest.fail(str(error), pytrace=False)
        if not moved.passed:
            pytest.fail(f"{moved}\n{OPTION} TEXT records the new state", pytrace=False)

    return hold_to
