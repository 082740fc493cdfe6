"""The verb inspecting."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.api.words import SchemeName
from bridge.core.errors import InspectError, UsageError, warn
from bridge.core.text import described, number
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Scheme
from bridge.workflows.inspect.changes.simulation import formats_by_role, simulated
from bridge.workflows.inspect.collect import Schemes
from bridge.workflows.inspect.dumps import check_place, dumps_of
from bridge.workflows.inspect.language import Config, FeatureDirs, open_language
from bridge.workflows.inspect.layers import layers_of
from bridge.workflows.inspect.ranks import Ranks, ranks_of, together
from bridge.workflows.inspect.run import finder_of
from bridge.workflows.inspect.save import StepsFile, check_arguments, check_out, save
from bridge.workflows.inspect.session import Outputs, Session, Setup, Sink
from bridge.workflows.inspect.verbs import about_session, calibration_of, static_amax

if TYPE_CHECKING:
    from bridge.tracker.finite import NanFinder


@contextmanager
def inspecting(
    model: Any,
    config: Config = None,
    *,
    quant: SchemeName | str | Path | Scheme | None = None,
    calib: Calibration | str | Path | None = None,
    nan: bool = False,
    out: str | Path | None = None,
    overwrite: bool = False,
    sink: Sink | None = None,
    feature_dirs: FeatureDirs = None,
    group: Any = None,
) -> Iterator[Session]:
    """Inspect a live model in a loop of the caller's, which ends each step with `session.step()`.

    Outputs and gradients have the same bits as without, unless `quant` or a feature changes them; a step at which
    nothing is due has no hooks. Leaving the block, also by an exception, takes everything off the model;
    `session.inspection` has what was told.

    Args:
        model: a torch module: of transformers, of Megatron-Core or torchtitan (with roles), or any other (by names).
        config, quant, calib: as in `inspect`. With `quant` the model runs quantized at each step, its weights quantized
            anew; heads and routers that a table knows, convolutions, experts inside one module and classes with a GEMM
            of their own run as they are. Gradients go straight through: dgrad takes the quantized weight, wgrad the
            quantized activation.
        nan: as in `inspect`; hooks then stay on every module at every step.
        out: as in `inspect`, written at the end; until then each step adds its lines to NAME.steps.jsonl beside it.
        sink: called as sink(name, value, step), as TensorBoard's `add_scalar`; a name is LAYER_TENSOR_STATISTIC.
        feature_dirs: as in `inspect`.
        group: processes of `torch.distributed` that run the same model on other data; None takes all. They make the
            same steps, have the statistics of all their data, of weights their own; rank 0 writes `out` and
            calls `sink`.

    Raises:
        InspectError: mistakes of the config, all of them; a layer that the model has not.
        WriteError: `out` exists.

    >>> import torch
    >>> live = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    >>> stats = {"LogTensorStats": {"enabled": True, "tensors": ["wgrad"], "stats": ["l2_norm"]}}
    >>> config = {"all": {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": stats}}
    >>> with bridge.inspecting(live, config) as session:
    ...     for _ in range(2):
    ...         live(torch.ones(3, 8)).sum().backward()
    ...         told = session.step()
    >>> [record.layer for record in session.inspection.records]
    ['0', '1', '0', '1']
    """
    check_live(model)
    check_arguments(out, sink, feature_dirs)
    to = Destination(None if out is None else Path(out), overwrite, ranks_of(group))
    loop = _prepare(model, config, quant, calib, sink, feature_dirs, to)
    ended = False
    with finder_of(model, nan) as finder:
        session = loop.begin(model, finder)
        try:
            yield session
            ended = True
        finally:
            loop.end(session, ended, nan)


@dataclass(frozen=True)
class Destination:
    """The directory of an inspection, and the processes that share the loop. `out`: the same in all of them."""

    out: Path | None
    overwrite: bool
    ranks: Ranks | None

    @property
    def own(self) -> Path | None:
        """The directory, in the one process that writes it."""
        return None if self.ranks and self.ranks.rank else self.out


@dataclass(frozen=True)
class Loop:
    """An inspection of a caller's loop: what its session looks at, and where results go."""

    setup: Setup
    outputs: Outputs
    to: Destination

    def begin(self, model: Any, finder: NanFinder | None) -> Session:
        """Put a session on the model; if one process cannot, none does."""
        with ExitStack() as undo:
            with together(self.to.ranks):
                outputs = self.outputs
                if self.to.own is not None:
                    steps = StepsFile(self.to.own, self.to.overwrite)
                    undo.callback(steps.remove)
                    outputs = Outputs(outputs.sink, steps, outputs.dumps)
                session = Session(model, self.setup, outputs, self.to.ranks, finder)
                undo.callback(session.detach)
            undo.pop_all()
        return session

    def end(self, session: Session, ended: bool, nan: bool) -> None:
        """Take the session off, and write what it saw. `ended`: the caller's block raised no error."""
        place, dumps = self.to.own, self.outputs.dumps
        session.detach()
        others = self.to.ranks if ended else None  # after an error they may not come here
        if dumps and others:
            dumps.gather(others.objects((dumps.files, platform.node())), first=place is not None)
        with together(others if dumps else None):
            if place is not None and (session.records or nan or (dumps and dumps.files)):
                save(session.inspection, place, self.to.overwrite, dumps)
            elif place is not None and ended:
                warn(_unwritten(place, session.current))
        if session.outputs.steps:
            session.outputs.steps.remove()
        if dumps and self.to.out:
            if others and place is None:
                dumps.keep(self.to.out)
            dumps.clear()


def _prepare(
    model: Any, config: Config, quant: Any, calib: Any, sink: Sink | None, feature_dirs: FeatureDirs, to: Destination
) -> Loop:
    """Check everything before a hook is set, in each process; an error of one is one of all."""
    ranks = to.ranks
    with together(ranks):
        if to.own is not None:
            check_out(to.own, to.overwrite)
        scheme = None if quant is None else load_scheme(quant)
        language = open_language(feature_dirs)
        calibration = calibration_of(calib)
        layers = layers_of(model)
    every = ranks.every_layer(layers) if ranks else layers
    with together(ranks):
        routing = language.routing(config, every, scheme)
        check_place(routing, to.out)
        if scheme and (scheme.rules or scheme.only):
            raise InspectError(
                f"quant={scheme.name}: has rules for layers, which a live model does not tell; name a scheme, or pass "
                "the model to bridge.inspect"
            )
        schemes = Schemes(scheme, None, static_amax(calibration, every, scheme))
        quantized = simulated(layers, formats_by_role(scheme, layers), calibration, schemes) if scheme else {}
        dumps = dumps_of(routing, to.out, to.overwrite)
    about: Mapping[str, str] = {"model": type(model).__name__, **about_session(routing, scheme)}
    setup = Setup(routing, schemes, about, quantized, language.features(routing, frozenset(quantized)))
    return Loop(setup, Outputs(None if ranks and ranks.rank else sink, dumps=dumps), to)


def check_live(model: Any) -> None:
    """UsageError for what is no torch module."""
    if not callable(getattr(model, "named_modules", None)):
        raise UsageError(
            f"inspecting: model = {described(model)}: expected a torch module; bridge.inspect takes the path of a model"
        )


def _unwritten(out: Path, steps: int) -> str:
    """Why an inspection of a loop has nothing."""
    told = f"nothing was seen in {number(steps, 'step')}" if steps else "session.step() was never called"
    return f"{out}: is not written: {told}"
