"""What an operation takes, from `mappings/speed.toml`."""

from __future__ import annotations

from bridge.planning.estimate import read_speeds
from docs.generate.matrix import table


def speeds() -> str:
    """A row for each operation: nanoseconds of the processor a value, to write and to verify it."""
    found = read_speeds()
    names = [name for name in found.write if name not in ("once", "tensor")]
    rows = [[f"`{name}`", f"{found.write[name]:.1f}", f"{found.verify[name]:.1f}"] for name in sorted(names)]
    return table(["operation", "write, ns a value", "verify, ns a value"], rows)
