"""Protocols of a target that writes, checks and runs an output."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bridge.core.values import Program
from bridge.planning.target import Planner
from bridge.targets.generation import Generator

if TYPE_CHECKING:
    import numpy as np

    from bridge.planning.plan import Plan
    from bridge.sources.source import Source
    from bridge.streaming.context import ConversionContext, WriteResult


LOG_PROBABILITIES = "log probabilities"  # the name of an output that is the logits less a number for each position


class Runnable(Protocol):
    """A written model, loaded: `run` returns outputs by name; `substitute` says what runs if not the file itself."""

    outputs: list[str]
    substitute: str

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]: ...


class Target(Planner, Protocol):
    """The interface of a target to a conversion."""

    loads: tuple[str, ...]
    """Globs of the files that the runtime loads; the others are for people and for `verify`."""
    align: int
    """The data of its files begin at a multiple of this many bytes."""
    runs: bool
    """True if `convert` runs the output; otherwise only `verify` does, and only calibration loads a framework."""
    loaded_by: tuple[Program, ...]
    """Programs and their versions that load the output, and how that is known."""

    def file_metadata(self, plan: Plan, source: Source) -> Mapping[str, Any]:
        """Metadata in the header of its files; the same for the same plan and source."""

    def lint(self, directory: Path, plan: Plan) -> list[str]:
        """Check a written model against the runtime's rules; return a message for each violation."""

    def audit(self, directory: Path) -> list[str]:
        """Check the values that can be checked without the source; reads every weight."""

    def runtime(self, directory: Path) -> Any:
        """Load a written model to run it here (see `Runnable`); VerifyError says why it cannot be run."""

    def why_no_generator(self, directory: Path) -> str:
        """Why no program here generates text from an output, and which does elsewhere ("" if `generator` loads it)."""

    def generator(self, directory: Path) -> Generator:
        """Load a written language model to generate text; CannotRun if none can here."""

    def layer_errors(
        self, directory: Path, plan: Plan, source: Source, batch: Mapping[str, np.ndarray], runtime: Any
    ) -> tuple[tuple[str, float], ...]:
        """The error that each quantized module adds to its own output, relative L2, the worst first.

        `runtime`: what `runtime(directory)` loaded.
        """

    def why_not_loaded(self, plan: Plan) -> str:
        """Why no program loads the output, whatever its formats ("" if they decide)."""

    def check_machine(self, plan: Plan, memory: int | None) -> None:
        """UsageError if this machine, or `memory` bytes of it, cannot do what follows the stream."""

    def next_command(self, plan: Plan) -> str:
        """A command that serves, builds or trains what was written to `{out}`; "" if there is none."""

    def write(self, context: ConversionContext, directory: Path) -> WriteResult:
        """Write the model into an empty directory; the caller publishes it afterwards."""
