"""Attacks one target with bytes that coverage leads to: `python -m tests.fuzz.guided pickles --seconds 60`.

Needs `pip install atheris` (libFuzzer; wheels for Linux), which is no part of `dev`. It pays where a parser is ours and
takes bytes: headers, pickles, records, metadata, archives. What it finds is kept as a file, and goes into
`test_found.py` with its reason.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.fuzz.cage import Cage
from tests.fuzz.case import Target, attack, keep

PARSERS = (
    "bridge.core",
    "bridge.sources",
    "bridge.tables",
    "bridge.quant",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir(), "attack-found"))
    asked = parser.parse_args()
    try:
        import atheris  # type: ignore[import-untyped]
    except ImportError:
        sys.exit("coverage-guided attacks need atheris: pip install atheris")
    with atheris.instrument_imports(include=list(PARSERS)):
        from tests.fuzz.targets import target

        aim = target(asked.target)
    work = Path(tempfile.mkdtemp(prefix="attack-"))  # libFuzzer ends the process itself: nobody comes back to remove it
    root, seeds = work / "model", work / "seeds"
    for folder in (root, seeds):
        folder.mkdir()
    aim.make(root)
    (seeds / "valid").write_bytes((root / aim.main).read_bytes())
    survive = _surviving(aim, root, asked.keep.absolute() / aim.name)
    atheris.Setup([sys.argv[0], str(seeds), f"-max_total_time={asked.seconds}", f"-artifact_prefix={work}/"], survive)
    atheris.Fuzz()


def _surviving(aim: Target, root: Path, into: Path):  # type: ignore[no-untyped-def]
    """What libFuzzer calls with bytes; an exception ends it, and the case is kept."""
    cage = Cage()

    def survive(data: bytes) -> None:
        case = {aim.main: data}
        try:
            attack(aim, root, case, cage)
        except Exception:
            print(f"kept in {keep(root, case, into)}", file=sys.stderr)
            raise

    return survive


if __name__ == "__main__":
    main()
