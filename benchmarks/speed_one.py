"""One run of `qbridge` that writes the seconds of its stages to a file.

    python -m benchmarks.speed_one FILE convert ...

It imports nothing that the command does not, so that start-up is the command's own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def main() -> None:
    from bridge.api.conversion import Clock

    seconds: dict[str, list[float]] = {}
    stage = Clock.stage

    @contextmanager
    def timed(clock: Clock, name: str) -> Iterator[None]:
        processor, wall = time.process_time(), time.perf_counter()
        with stage(clock, name):
            yield
        seconds[name] = [time.process_time() - processor, time.perf_counter() - wall]

    Clock.stage = timed  # type: ignore[method-assign]
    from bridge.__main__ import main as command

    file, sys.argv[1:] = sys.argv[1], sys.argv[2:]
    try:
        command()
    finally:
        import json
        from pathlib import Path

        Path(file).write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
