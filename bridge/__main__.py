"""Where the command begins: a signal ends it in one line until the verb is done; must import nothing before."""

from __future__ import annotations

import os
import sys
from _signal import SIG_DFL, SIG_IGN, SIGINT, SIGTERM, signal  # type: ignore[import-not-found]  # `signal` loads enum and more, for 5 ms


def main() -> None:
    """Entry point of the console command."""
    for number in (SIGINT, SIGTERM):
        signal(number, _stop)
    from bridge.cli import main as run

    try:
        run()
    finally:  # the exit code holds; a KeyboardInterrupt would end a callback of `atexit` half-way, with a traceback
        signal(SIGINT, SIG_IGN)
        signal(SIGTERM, SIG_DFL)


def _stop(number: int, frame: object) -> None:
    """End at once: imports have begun nothing, and a verb has a handler of its own."""
    try:
        name = "SIGINT" if number == SIGINT else "SIGTERM"
        os.write(sys.stderr.fileno(), f"stopped by {name}; nothing half-written is left\n".encode())
    finally:
        os._exit(128 + number)


if __name__ == "__main__":
    main()
