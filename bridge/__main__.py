"""The entry point of the command.

A signal during imports ends it with one line.
"""

from __future__ import annotations

import os
import sys
from _signal import SIG_DFL, SIG_IGN, SIGINT, SIGTERM, signal  # type: ignore[import-not-found]  # `signal` imports enum and more: 5 ms


def main() -> None:
    """Entry point of the console command."""
    for number in (SIGINT, SIGTERM):
        signal(number, _stop)
    from bridge.cli.main import main as run

    try:
        run()
    finally:  # the exit code is fixed; a KeyboardInterrupt would end an `atexit` callback with a traceback
        signal(SIGINT, SIG_IGN)
        signal(SIGTERM, SIG_DFL)


def _stop(number: int, frame: object) -> None:
    """End at once: imports leave nothing to clean up, and a verb has its own handler."""
    try:
        name = "SIGINT" if number == SIGINT else "SIGTERM"
        os.write(sys.stderr.fileno(), f"stopped by {name}; nothing half-written is left\n".encode())
    finally:
        os._exit(128 + number)


if __name__ == "__main__":
    main()
