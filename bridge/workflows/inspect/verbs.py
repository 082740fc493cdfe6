"""The verbs inspect and inspecting."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bridge.api.plans import scheme_of
from bridge.api.request import unwarned_data_of, warn_of
from bridge.api.words import SchemeName
from bridge.calibration.data import BATCH, Data, Sampling
from bridge.calibration.reference_outputs import runner
from bridge.calibration.requirements import check_device_here
from bridge.core.errors import InspectError, UsageError, warn
from bridge.core.places import is_remote
from bridge.core.progress import Progress
from bridge.core.progress_bar import callback_of, shows_progress
from bridge.core.remote.opening import written_at
from bridge.core.text import number
from bridge.core.version import __version__
from bridge.planning.structure import structure_of
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Scheme
from bridge.reporting.make import link_inspection
from bridge.sources.opening import open_source
from bridge.sources.pruned.opening import pruned_again
from bridge.sources.source import Source
from bridge.workflows.inspect.changes.simulation import as_written, formats_by_role, formats_of, simulated
from bridge.workflows.inspect.collect import Schemes
from bridge.workflows.inspect.config.arguments import check_arguments, check_live, check_out
from bridge.workflows.inspect.config.layers import CONV1D, LINEAR, Layer
from bridge.workflows.inspect.config.listing import layers_of
from bridge.workflows.inspect.config.resolve import Routing, load_routing
from bridge.workflows.inspect.features.classes import declared, load_features
from bridge.workflows.inspect.features.dumps import check_place, dumps_of
from bridge.workflows.inspect.ranks import ranks_of, together
from bridge.workflows.inspect.result import Inspection
from bridge.workflows.inspect.run import run_batches
from bridge.workflows.inspect.save import StepsFile, save
from bridge.workflows.inspect.session import Session, Sink, without_roles
from bridge.workflows.inspect.tracked import finder_of, first_bad, told
from bridge.workflows.inspect.twin import scheme_of_output
from bridge.workflows.inspect.watch import BACKWARD

Config = str | Path | Mapping[str, Any] | None
FeatureDirs = str | Path | Sequence[str | Path] | None


@shows_progress
def inspect(
    model: Any,
    config: Config = None,
    *,
    against: str | Path | None = None,
    quant: SchemeName | str | Path | Scheme | None = None,
    calib: Calibration | str | Path | None = None,
    data: Any = None,
    steps: int | None = None,
    gradients: bool = False,
    nan: bool = False,
    cost: bool = False,
    out: str | Path | None = None,
    sink: Sink | None = None,
    samples: int | None = None,
    sequence: int | None = None,
    field: str | None = None,
    device: str | None = None,
    tokenizer: Any = None,
    overwrite: bool = False,
    feature_dirs: FeatureDirs = None,
    progress: Progress | bool | None = None,
) -> Inspection:
    """Run a model on data and record statistics of its tensors, or compare a quantized model with it.

    Without `against`, each batch of the data is a step. The config says which layers and tensors are looked at, when
    and for which statistics; what quantizing a tensor would lose is computed by the encoder of conversions. Without
    `quant` the model's outputs stay as they are, but for what a feature changes (FakeQuant); with it, the model runs
    quantized, and an activation is seen as its layer receives it, with the errors of the layers before. All mistakes of
    a config are told before the model is loaded.

    With `against`, the model and what was written of it run one after the other, and 64 to 127 tokens of each module's
    output are compared: `accumulated` with all errors before it, `alone` with the source's input and the codes of that
    input. A matrix that is bad alone makes an error; one that is bad accumulated only, passes it on.

    Args:
        model: what `convert` takes. A directory that `convert` wrote for target "hf" is dequantized, and its scheme and
            static scales are those of the run: its inputs are quantized.
        config: a config.yaml of TransformerEngine's debug features, or its content; None looks at activation and weight
            of every matrix under `quant`, else under fp8, int8, nvfp4 and mxfp8.
        against: what `convert` wrote of the model for target "hf"; of what follows only nan, data and out with it.
        quant: the scheme that the run simulates, also that of statistics that name none: weights and inputs of each
            matrix that conversions quantize are quantized and dequantized. DisableQuantizationLayer takes layers out.
        calib: a calibration, whose amax of inputs are the static scales; SmoothQuant and AWQ take their pre-scales and
            clips of it. Without one, static scales are those of each tensor, and a note says so.
        data: what `calibrate` takes; None takes the embedded text.
        steps: batches to run at most; one has at most 8 rows of text, and held-out rows run as well.
        gradients: also run the next-token loss backward, for `gradient`, `dgrad` and `wgrad`.
        nan: look for the module that makes the first NaN or infinity, which reads every value; with `against` in what
            was written.
        cost: run the batches once more without statistics, and measure the time and kept bytes of each module.
        out: a directory for inspect.html, inspect.json and statistics.csv; None writes nothing. The report of `against`
            then links the page.
        sink: called as sink(name, value, step), as in `inspecting`.
        samples, sequence: rows of text and their tokens, as in `calibrate`.
        overwrite: replace an inspection in `out`.
        feature_dirs: folders of Python files with feature classes that the config names; their code runs.

    Raises:
        InspectError: mistakes of the config, all of them; a layer that the model has not; what a feature class raises.
        VerifyError: bridge did not write `against`, or made it from another model.
        UsageError: arguments that do not go together.
        WriteError: `out` exists.
        CannotRun: transformers cannot run the output.

    >>> seen = bridge.inspect("examples/models/tiny-llama", quant="int4_wo", samples=4)
    >>> worst = seen.worst("sqnr", n=1)[0]
    >>> worst.tensor, 15 < worst.value < 25  # dB
    ('weight', True)
    """
    callback = callback_of(progress)
    check_arguments(out, sink, feature_dirs)
    check_device_here(device)
    place = None if out is None else Path(out)
    if place is not None:
        check_out(place, overwrite)
    sampling = Sampling(samples, sequence, field)
    if against is not None:
        own = {
            "config": config, "quant": quant, "calib": calib, "steps": steps, "gradients": gradients or None,
            "device": device, "feature_dirs": feature_dirs, "cost": cost or None, "sink": sink,
        }  # fmt: skip
        if given := [name for name, value in own.items() if value is not None]:
            raise UsageError(f"{given[0]}= does not go with against= (--against), which compares with what was written")
        found = _beside(model, written_at(against), data, sampling, tokenizer, nan, callback)
        if place is not None:
            save(found, place, overwrite)
            if not is_remote(against):
                link_inspection(Path(against), place)
        return found
    if steps is not None and (type(steps) is not int or steps < 1):
        raise UsageError(f"steps={steps!r} (--steps): expected a positive whole number")
    source = open_source(model, tokenizer=tokenizer)
    structure = structure_of(source)
    wrote, saved = scheme_of_output(model) if quant is None else (None, None)
    scheme = scheme_of(wrote or quant, None, structure, source)
    classes = load_features(feature_dirs)
    skeleton = source.load_skeleton()
    layers = layers_of(skeleton, source)
    routing = load_routing(config, layers, scheme, declared(classes))
    check_place(routing, place)
    _check_backward(routing, gradients, source)
    made = _data_of(source, data, sampling)
    formats = formats_of(scheme, structure.sites, skeleton, source.specs) if scheme else None
    calibration = _calibration(calib) or saved
    schemes = Schemes(scheme, formats, _static(calibration, layers, scheme))
    quantized = simulated(layers, formats, calibration, schemes) if formats else {}
    if wrote and scheme:
        quantized = as_written(quantized, scheme, schemes)
    whole = len((*made.batches, *made.held_out))
    _check_due(routing, min(whole, steps or whole))
    dumps = dumps_of(routing, place, overwrite)
    about = {"model": source.name, **_about_data(made), **_about(routing, scheme)}
    session = partial(
        Session, routing=routing, schemes=schemes, about=about, sink=sink, simulated=quantized, dumps=dumps, own=classes
    )
    try:
        found = run_batches(source, session, made, steps, gradients, device, callback, nan=nan, cost=cost)
        if steps and steps > whole:
            few = f"steps={steps} (--steps): the data make {number(whole, 'step')}; give more rows (--samples)"
            found = replace(found, notes=(*found.notes, few))
        if place is not None:
            save(found, place, overwrite, dumps)
    finally:
        if dumps:
            dumps.remove()
    return found


def _check_backward(routing: Routing, gradients: bool, source: Source) -> None:
    """Tensors of a backward pass need gradients, and these a model that predicts the next token."""
    if backward := sorted({route.tensor for route in routing.routes} & {*BACKWARD}) if not gradients else []:
        raise InspectError(f"{', '.join(backward)}: only a backward pass makes it; pass gradients=True (--gradients)")
    if gradients and not _predicts(source):
        raise InspectError(
            f"{source.where}: gradients=True (--gradients) needs a model that predicts the next token; run a loss "
            "of yours inside bridge.inspecting"
        )


def _check_due(routing: Routing, count: int) -> None:
    """InspectError if nothing is due in `count` steps."""
    if not any(routing.due(step) for step in range(count)):
        raise InspectError(
            f"nothing is due in the {number(count, 'step')} that run: a step is a batch of data=, or of at most "
            f"{BATCH} rows of text; give more rows (samples=, --samples), or an earlier start_step or freq"
        )


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
    ranks = ranks_of(group)
    directory = None if out is None else Path(out)
    place = None if ranks and ranks.rank else directory
    with together(ranks):
        if place is not None:
            check_out(place, overwrite)
        scheme = None if quant is None else load_scheme(quant)
        classes = load_features(feature_dirs)
        calibration = _calibration(calib)
        layers = layers_of(model)
    every = ranks.every_layer(layers) if ranks else layers
    with together(ranks):
        routing = load_routing(config, every, scheme, declared(classes))
        check_place(routing, directory)
        if scheme and (scheme.rules or scheme.only):
            raise InspectError(
                f"quant={scheme.name}: has rules for layers, which a live model does not tell; name a scheme, or pass "
                "the model to bridge.inspect"
            )
        schemes = Schemes(scheme, None, _static(calibration, every, scheme))
        quantized = simulated(layers, formats_by_role(scheme, layers), calibration, schemes) if scheme else {}
        dumps = dumps_of(routing, directory, overwrite)
    about = {"model": type(model).__name__, **_about(routing, scheme)}
    heard = None if ranks and ranks.rank else sink
    ended = False
    with finder_of(model, nan) as finder:
        with ExitStack() as undo:
            with together(ranks):
                steps = StepsFile(place, overwrite) if place is not None else None
                if steps:
                    undo.callback(steps.remove)
                parts = schemes, about, heard, steps, quantized, dumps, classes, ranks, finder
                session = Session(model, routing, *parts)
                undo.callback(session.detach)
            undo.pop_all()
        try:
            yield session
            ended = True
        finally:
            session.detach()
            others = ranks if ended else None  # after an error they may not come here
            if dumps and others:
                dumps.gather(others.objects((dumps.files, platform.node())), first=place is not None)
            with together(others if dumps else None):
                if place is not None and (session.records or nan or (dumps and dumps.files)):
                    save(session.inspection, place, overwrite, dumps)
                elif place is not None and ended:
                    warn(_unwritten(place, session.current))
            if steps:
                steps.remove()
            if dumps and directory:
                if others and place is None:
                    dumps.keep(directory)
                dumps.clear()


def _unwritten(out: Path, steps: int) -> str:
    """Why an inspection of a loop has nothing."""
    told = f"nothing was seen in {number(steps, 'step')}" if steps else "session.step() was never called"
    return f"{out}: is not written: {told}"


def _predicts(source: Source) -> bool:
    name = str((source.config.get("architectures") or [""])[0])
    return "ForCausalLM" in name or name.endswith("LMHeadModel")


def _beside(
    model: Any, directory: Path, data: Any, sampling: Sampling, tokenizer: Any, nan: bool, progress: Progress
) -> Inspection:
    """Compare an output with its source."""
    from bridge.workflows.inspect.side_by_side import side_by_side
    from bridge.workflows.inspect.twin import plan_of_output, twin_of

    source = pruned_again(open_source(model, tokenizer=tokenizer), directory)
    plan = plan_of_output(directory, source)
    made = _data_of(source, data, sampling)
    progress(0, 2, "load")
    live, twin = source.load_model(), twin_of(directory, source)
    progress(1, 2, "run both")
    batches = (*made.batches, *made.held_out)
    rows = side_by_side(live, twin.model, batches, roles_of(live, source))
    bad = first_bad(twin.model, batches, runner(twin.model)) if nan else None
    progress(2, 2, "run both")
    about = {
        "model": source.name, "against": str(directory), "scheme": plan.scheme, "plan": plan.digest,
        **_about_data(made), "qbridge": __version__,
    }  # fmt: skip
    if not rows:
        raise InspectError(f"{source.where}: no module gives a row for each token of the data, so none is compared")
    notes = (
        *twin.notes,
        *(told(bad, len(batches)) if nan else ()),
        *without_roles([row.role for row in rows if row.alone]),
    )
    return Inspection(about, (), tuple(rows), notes, first_bad=bad)


def roles_of(model: Any, source: Source) -> dict[str, str]:
    """The roles of the modules of a live model that multiply by a matrix; "" where no table has them."""
    return {layer.module: layer.role for layer in layers_of(model, source) if layer.kind in (LINEAR, CONV1D)}


def _data_of(source: Source, data: Any, sampling: Sampling) -> Data:
    made = unwarned_data_of(source, data, sampling)
    if not made.batches or made.forward_loop:
        why = made.missing or "for a forward_loop use bridge.inspecting"
        raise UsageError(f"data= (--data): a model is inspected on batches: {why}")
    if data is not None:
        warn_of(made)
    return made


def _calibration(calib: Calibration | str | Path | None) -> Calibration | None:
    return calib if calib is None or isinstance(calib, Calibration) else Calibration.load(Path(calib))


def _static(found: Calibration | None, layers: Sequence[Layer], scheme: Scheme | None) -> dict[str, float]:
    """Amax of inputs by layer; none of smoothed inputs. InspectError for a calibration that nothing here takes."""
    if found is None:
        return {}
    if found.smoothing_amax or found.awq_scale or found.pre_scale:
        if scheme is None or not any(form.prescales for form in scheme.formats):
            raise InspectError(
                "calib= (--calib): its amax are of smoothed inputs, and the model has its own; leave it out, or pass "
                "the quant= (--quant) that it was made for"
            )
        return {}
    amax = {module: float(value.max()) for module, value in found.input_amax.items()}
    if not amax.keys() & {layer.name for layer in layers}:
        raise InspectError("calib= (--calib): has the amax of no layer of this model; calibrate this model")
    return amax


def _about_data(data: Data) -> dict[str, str]:
    count = len((*data.batches, *data.held_out))
    tokens = f", rows of {data.sequence:,} tokens" if data.sequence else ""
    return {"data": f"{data.name}: {number(count, 'batch', 'batches')}{tokens}", "data digest": data.digest}


def _about(routing: Routing, scheme: Scheme | None) -> dict[str, str]:
    return {"qbridge": __version__, "config": routing.digest, **({"scheme": scheme.name} if scheme else {})}
