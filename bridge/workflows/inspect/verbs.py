"""The verb inspect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge.api.plans import scheme_of
from bridge.api.request import unwarned_data_of, warn_of
from bridge.api.words import SchemeName
from bridge.calibration.data import BATCH, Data, Sampling
from bridge.calibration.reference_outputs import runner
from bridge.calibration.requirements import check_device_here
from bridge.core.addresses import is_remote
from bridge.core.errors import InspectError, UsageError
from bridge.core.progress import Progress
from bridge.core.progress_bar import callback_of, shows_progress
from bridge.core.remote.opening import written_at
from bridge.core.text import number
from bridge.core.version import __version__
from bridge.planning.structure import structure_of
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.scheme import Scheme
from bridge.reporting.make import link_inspection
from bridge.sources.opening import open_source
from bridge.sources.pruned.opening import pruned_again
from bridge.sources.rotated.opening import rotated
from bridge.sources.source import Source
from bridge.workflows.inspect.changes.simulation import as_written, formats_of, simulated
from bridge.workflows.inspect.collect import Schemes
from bridge.workflows.inspect.dumps import check_place, dumps_of
from bridge.workflows.inspect.hooks.watch import BACKWARD
from bridge.workflows.inspect.language import Config, FeatureDirs, open_language
from bridge.workflows.inspect.layers import CONV1D, LINEAR, Layer, layers_of
from bridge.workflows.inspect.result import Inspection
from bridge.workflows.inspect.routes import Routing
from bridge.workflows.inspect.run import Passes, first_bad, run_batches
from bridge.workflows.inspect.save import check_arguments, check_out, save
from bridge.workflows.inspect.session import Outputs, Setup, Sink, nothing_found, without_roles
from bridge.workflows.inspect.written_model import scheme_of_output


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
        against: what `convert` wrote of the model for target "hf"; only nan, data, steps and out go with it.
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
    sampling, passes = Sampling(samples, sequence, field), Passes(steps, gradients, device, nan, cost)
    if against is not None:
        own = {
            "config": config, "quant": quant, "calib": calib, "gradients": gradients or None,
            "device": device, "feature_dirs": feature_dirs, "cost": cost or None, "sink": sink,
        }  # fmt: skip
        if given := [name for name, value in own.items() if value is not None]:
            raise UsageError(f"{given[0]}= does not go with against= (--against), which compares with what was written")
        found = _compare_written(model, written_at(against), data, sampling, tokenizer, passes, callback)
        if place is not None:
            save(found, place, overwrite)
            if not is_remote(against):
                link_inspection(Path(against), place)
        return found
    source = open_source(model, tokenizer=tokenizer)
    structure = structure_of(source)
    wrote, saved = scheme_of_output(model) if quant is None else (None, None)
    scheme = scheme_of(wrote or quant, None, structure, source)
    language = open_language(feature_dirs)
    skeleton = source.load_skeleton()
    layers = layers_of(skeleton, source)
    routing = language.routing(config, layers, scheme)
    check_place(routing, place)
    _check_backward(routing, gradients, source)
    made = _data_of(source, data, sampling)
    formats = formats_of(scheme, structure.sites, skeleton, source.specs) if scheme else None
    calibration = calibration_of(calib) or saved
    schemes = Schemes(scheme, formats, static_amax(calibration, layers, scheme))
    quantized = simulated(layers, formats, calibration, schemes) if formats else {}
    if wrote and scheme:  # its weights are quantized
        quantized = as_written(quantized, scheme, schemes)
    whole = len((*made.batches, *made.held_out))
    _check_due(routing, min(whole, steps or whole))
    dumps = dumps_of(routing, place, overwrite)
    about = {"model": source.name, **_about_data(made), **about_session(routing, scheme)}
    setup = Setup(routing, schemes, about, quantized, language.features(routing, frozenset(quantized)))
    try:
        found = run_batches(source, setup, Outputs(sink, dumps=dumps), made, passes, callback)
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


def _predicts(source: Source) -> bool:
    name = str((source.config.get("architectures") or [""])[0])
    return "ForCausalLM" in name or name.endswith("LMHeadModel")


def _compare_written(
    model: Any, directory: Path, data: Any, sampling: Sampling, tokenizer: Any, passes: Passes, progress: Progress
) -> Inspection:
    """Compare an output with its source."""
    from bridge.targets.manifest import load_manifest
    from bridge.workflows.inspect.side_by_side import side_by_side
    from bridge.workflows.inspect.written_model import load_written, plan_of_output

    rotation = load_manifest(directory).plan.rotation
    source = rotated(pruned_again(open_source(model, tokenizer=tokenizer), directory), rotation or None)
    plan = plan_of_output(directory, source)
    made = _data_of(source, data, sampling)
    progress(0, 2, "load")
    live, twin = source.load_model(), load_written(directory, source)
    progress(1, 2, "run both")
    batches = passes.of(made)
    rows = side_by_side(live, twin.model, batches, roles_of(live, source))
    bad = first_bad(twin.model, batches, runner(twin.model)) if passes.nan else None
    progress(2, 2, "run both")
    about = {
        "model": source.name, "against": str(directory), "scheme": plan.scheme, "plan": plan.digest,
        **_about_data(made), "qbridge": __version__,
    }  # fmt: skip
    if not rows:
        raise InspectError(f"{source.where}: no module gives a row for each token of the data, so none is compared")
    notes = (
        *twin.notes,
        *passes.few(len(batches)),
        *(nothing_found(bad, len(batches)) if passes.nan else ()),
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


def calibration_of(calib: Calibration | str | Path | None) -> Calibration | None:
    """A calibration that was given, or saved in a file."""
    return calib if calib is None or isinstance(calib, Calibration) else Calibration.load(Path(calib))


def static_amax(found: Calibration | None, layers: Sequence[Layer], scheme: Scheme | None) -> dict[str, float]:
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


def about_session(routing: Routing, scheme: Scheme | None) -> dict[str, str]:
    """What an inspection says of its version, config and scheme."""
    return {"qbridge": __version__, "config": routing.digest, **({"scheme": scheme.name} if scheme else {})}
