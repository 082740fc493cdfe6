"""Calibrate with ModelOpt; the only module that imports it.

ModelOpt works on a fake-quantized copy (`fake`): a deep copy of the module tree whose parameters share the memory of
the original. So the caller's model keeps its classes, hooks, flags and weights after an exception or Ctrl-C, and no
weight is copied, except those that SmoothQuant and AWQ divide by their pre-scales.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import io
import itertools
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.calibration.algorithms.clips import contiguous, set_aside, take_clips
from bridge.calibration.algorithms.codes import collect_codes, with_weights_digest
from bridge.calibration.algorithms.columns import install
from bridge.calibration.data import Data
from bridge.calibration.job import CalibrationJob
from bridge.calibration.quantizers import (
    QuantizerBinding,
    bind,
    calibrator,
    check_hooked,
    hidden_from_modelopt,
    known_formats,
    quant_cfg,
    registering,
    without_deprecations,
)
from bridge.calibration.reference_outputs import Answers, blaming, held_out_of, reads_held_out, runner
from bridge.calibration.requirements import check_data, check_device
from bridge.calibration.schedule import PASSES, Quantizers, method_of, schedule_of
from bridge.calibration.statistics import (
    CODES,
    SCALES,
    ExpertTokens,
    FakeModel,
    collect,
    isolate,
    raise_inputs,
    settle_statistics,
    smoothable,
    smoothquant_scales,
    weight_amax,
)
from bridge.calibration.walk.toggles import own_weights
from bridge.core.errors import CalibrationError
from bridge.core.progress import Progress
from bridge.core.ranges import check_versions
from bridge.core.text import fold_layers
from bridge.core.values import Structure
from bridge.core.version import install as install_extra
from bridge.core.version import loads_transformers, versions_of
from bridge.quant.calibration import Calibration, HeldOut, Provenance
from bridge.quant.describe import chosen_words, smoothed_words
from bridge.quant.schemes.scheme import Scheme, is_calibrated, is_measured
from bridge.sources.source import Source

if TYPE_CHECKING:
    from bridge.sources.live_models.checkpoint_names import Origin
PACKAGES = ("nvidia-modelopt", "qbridge", "torch", "transformers")


@dataclass(frozen=True)
class FakeQuantized:
    """A fake-quantized copy of a model, and the statistics that it was quantized with.

    `plain` is the model whose memory it shares; `bindings` and `attention` (live names) tell where its quantizers are.
    """

    model: Any
    calibration: Calibration
    plain: Any
    bindings: tuple[QuantizerBinding, ...]
    attention: tuple[str, ...]


def fake_quantize(job: CalibrationJob, least: float = 0.0) -> FakeQuantized:
    """Run the whole model with ModelOpt; the model is not changed.

    The copy shares the model's memory: a weight that is changed later is changed in the copy, too.
    `least`: the lower bound of the amax of an input.

    Raises:
        CalibrationError: before the model is loaded if data or CUDA are missing.
    """
    source, scheme, data = job.source, job.scheme, job.data
    check_device(scheme, job.device)
    check_data(scheme, data)
    from bridge.sources.live_models.checkpoint_names import live_names, tied_names

    model = source.load_model()
    origins = live_names(model, source.specs)
    quantizers = quantizers_of(job.structure, scheme, origins, tied_names(model))
    bindings = quantizers.bindings
    copied = copy_modules(model, {w.module for w in bindings if w.format.changes_weights}, job.device)
    loop = loop_over(data, model, job.progress, len(quantizers.schedule.streams))
    fake = calibrate_root(copied, quantizers, loop)
    raised = raise_inputs(fake, least)
    seen = collect(fake) | collect_codes(fake.model, bindings, origins)
    statistics, applied = settle_statistics(seen, quantizers, job)
    held = _held_out(model, fake, job) if reads_held_out(model, data) else None
    chosen = {*seen[CODES], *seen[SCALES]}
    provenance = with_weights_digest(provenance_of(job, model), source, job.structure, chosen)
    calibration = Calibration(provenance=provenance, **statistics, applied=(*raised, *applied), held_out=held)
    return FakeQuantized(fake.model, calibration, model, tuple(bindings), tuple(quantizers.attention))


def provenance_of(job: CalibrationJob, model: Any, used: Sequence[str] = PACKAGES) -> Provenance:
    """Return what a calibration was made from. `model`: as it runs; `used`: the packages that took part."""
    return Provenance(
        scheme=job.scheme.name,
        scheme_digest=job.scheme.digest,
        architecture=job.structure.architecture,
        model=fingerprint(job.structure, job.source),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        data_digest=job.data.digest,
        samples=job.data.samples,
        sequence=job.data.sequence,
        versions=versions_of(used),
        codes=chosen_words(job.scheme.formats),
        smoothed=smoothed_words(job.scheme.formats),
        rotation=job.source.rotation,
        text=job.data.text,
    )


def import_frameworks(with_modelopt: bool) -> None:
    """Import what running a model needs, so that its seconds are not those of a stage; CalibrationError if absent."""
    check_versions("calibrate")
    loads_transformers()
    if with_modelopt:
        modelopt()
    with contextlib.suppress(ImportError):  # a scheme that needs it raises its own error
        import torch  # noqa: F401
        import transformers  # noqa: F401


def quantizers_of(
    structure: Structure, scheme: Scheme, origins: Mapping[str, Origin], tied: Mapping[str, str]
) -> Quantizers:
    """Return the quantizers of all sites, and of the attention modules whose cache is quantized."""
    bindings = bind(structure.sites, known_formats(structure.sites, scheme), origins, tied)
    attention = _attention(structure, origins) if scheme.kv else {}
    schedule = schedule_of(scheme, [binding.format for binding in bindings], bool(attention))
    return Quantizers(scheme, bindings, attention, schedule)


def calibrate_root(root: Any, quantizers: Quantizers, loop: Callable[[Any], None]) -> FakeModel:
    """Convert a model, or the part of one that `root` holds, and calibrate it; `loop` runs the data through it.

    `quantizers`: those that lie in `root`. Its weights change where `Format.changes_weights`.
    """
    mtq = modelopt()
    import torch
    from modelopt.torch.kernels.quantization import gemm

    from bridge.calibration.algorithms.fp4 import in_place_of_kernels

    scheme, bindings = quantizers.scheme, quantizers.bindings
    routing = ExpertTokens(bindings)
    before = {
        w.module: weight_amax(root.get_submodule(w.module), w.site.layout)
        for w in bindings
        if w.format.algorithm == "smoothquant"
    }
    with quiet(), torch.no_grad(), in_place_of_kernels(gemm):
        _run(mtq, root, quantizers, routing.first(loop))
        check_hooked(root, bindings, quantizers.attention)
        scales = smoothquant_scales(root, before, dict(scheme.options).get("alpha", 1.0))
        clips = take_clips(root, bindings)
    return FakeModel(root, quantizers, scales, routing.tokens, clips)


def register_modules(model: Any, cache: bool) -> None:
    """Let ModelOpt find the classes that it quantizes in a whole model: it asks some for layer 0 by name.

    `cache`: attention gets quantizers, too.
    """
    modelopt()
    from modelopt.torch.quantization.plugins.custom import register_custom_model_plugins_on_the_fly

    with quiet(), registering(_plugins(), cache):
        register_custom_model_plugins_on_the_fly(model)


def _plugins() -> set[Any]:
    """What ModelOpt runs to make modules of whole models quantizable."""
    from modelopt.torch.quantization.plugins import custom

    plugins: set[Any] = custom.CUSTOM_MODEL_PLUGINS
    return plugins


def modelopt() -> Any:
    """Import ModelOpt's quantization; CalibrationError if it is absent."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import modelopt.torch.quantization as mtq
            from modelopt.torch.quantization import model_calib
            from modelopt.torch.quantization.nn.modules import tensor_quantizer
            from modelopt.torch.quantization.utils import calib_utils
    except ImportError as cause:
        raise CalibrationError(
            f"calibration needs ModelOpt, which cannot be imported ({cause}); {install_extra('calibrate')}, or "
            "pass a saved calibration"
        ) from cause
    install(tensor_quantizer, calib_utils, model_calib)
    return mtq


def copy_modules(model: Any, changed: Collection[str] = (), device: str | None = None) -> Any:
    """Copy the module tree but share its memory; modules in `changed` get weights of their own, untied.

    `device`: where the copy goes, which has its own memory there; None leaves it with the model.
    """
    import torch

    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = torch.nn.Parameter(parameter.detach(), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().clone()
    fake = copy.deepcopy(model, memo).eval()
    own_weights(fake, changed)
    return fake if device is None else fake.to(device)


def _run(mtq: Any, root: Any, quantizers: Quantizers, loop: Callable[[Any], None]) -> None:
    """Convert the modules and calibrate them once per algorithm.

    An algorithm that runs the data elsewhere in the model runs them here, too: the next block needs the activations.
    """
    scheme, schedule, bindings = quantizers.scheme, quantizers.schedule, quantizers.bindings
    live = list(quantizers.attention)
    names = [name for name, _ in root.named_modules()]
    enabled: list[str] = []
    searched: list[tuple[Any, str, Any]] = []
    with hidden_from_modelopt(root, bindings), without_deprecations(root), registering(_plugins(), cache=bool(live)):
        mtq.quantize(root, {"quant_cfg": quant_cfg([], [], None, names), "algorithm": None})
    isolate(root)
    for algorithm in schedule.algorithms:
        part = [w for w in bindings if calibrator(w.format) == algorithm]
        kv = scheme.kv if live and algorithm == schedule.cache else None
        config = quant_cfg(part, live if kv else [], kv, names)
        static = any(is_calibrated(w.format) for w in part) or is_measured(kv)
        widest = max((root.get_submodule(w.module).weight.shape[1] for w in part if w.format.clipped), default=0)
        forward, method = loop if static else None, method_of(algorithm, scheme, widest)
        if algorithm == "smoothquant" and dict(scheme.options).get("alpha", 1.0) < 1:
            forward = smoothable(loop, {w.module for w in part})
        elif static and widest:
            forward = contiguous(loop, {w.module for w in part if w.format.clipped})
        mtq.set_quantizer_attributes_partial(root, "*", {"enable": False})
        if algorithm in schedule.forwards and not static:
            for _ in range(PASSES[algorithm]):
                loop(root)
        if config[1:]:
            mtq.set_quantizer_by_cfg(root, config[1:])
            cache_alone = algorithm == "gptq" and not part  # ModelOpt's GPTQ omits its second run without a matrix
            mtq.calibrate(root, {"method": "max"} if cache_alone else method, forward)
            if cache_alone:
                loop(root)
        searched += set_aside(root, part)
        enabled += [entry["quantizer_name"] for entry in config[1:]]
    for module, name, search in searched:
        setattr(module, name, search)
    for pattern in enabled if len(schedule.algorithms) > 1 else []:
        mtq.set_quantizer_attributes_partial(root, pattern, {"enable": True})


def loop_over(data: Data, plain: Any, report: Progress, runs: int = 1) -> Callable[[Any], None]:
    """Return the data as ModelOpt's forward_loop, which is called `runs` times; a user's own loop prints as before."""
    done, total, terminal = 0, runs * len(data.batches), sys.stdout

    def loop(model: Any) -> None:
        nonlocal done
        if data.forward_loop is not None:
            with contextlib.redirect_stdout(terminal):
                data.forward_loop(model)
            return
        run = blaming(runner(model), plain)
        for batch in data.batches:
            run(batch)
            done += 1
            report(done, total, "calibrate")

    return loop


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep ModelOpt's prints and warnings off the terminal, and turn its failures into a CalibrationError."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except AssertionError as cause:
        lines = str(cause).strip().splitlines() or ["an assertion failed"]
        raise CalibrationError(
            f"ModelOpt refused: {lines[0][:300]}; a NaN or an infinity among the activations is the usual reason: "
            "check the weights and the data, or calibrate in bfloat16 or float32"
        ) from cause
    except (IndexError, KeyError, AttributeError, NotImplementedError) as cause:
        raise CalibrationError(
            f"ModelOpt failed on this model ({type(cause).__name__}: {str(cause)[:300]}); choose a scheme that needs "
            "no calibration, or keep the modules it cannot hook with a recipe (--debug shows where)"
        ) from cause


def of_modelopt(error: Exception) -> bool:
    """Whether `quiet` made an error of one that ModelOpt raised."""
    return isinstance(error, CalibrationError) and str(error).startswith("ModelOpt ")


def _attention(structure: Structure, origins: Mapping[str, Origin]) -> dict[str, str]:
    from bridge.sources.live_models.checkpoint_names import live_modules

    names = set(structure.attention)
    live = {live: ours for live, all_ours in live_modules(origins).items() for ours in all_ours if ours in names}
    if lost := names - set(live.values()):
        raise CalibrationError(
            f"the model in memory lacks the attention modules {', '.join(fold_layers(sorted(lost)))}"
        )
    return live


def _held_out(model: Any, fake: FakeModel, job: CalibrationJob) -> HeldOut:
    """Run both models on the held-out inputs; ModelOpt's only if its kernels run here."""
    batches, simulated = job.data.held_out, simulates(job.scheme)
    source, quantized, steps = Answers(batches, model), None, itertools.count(1)
    total = len(source.batches) * (2 if simulated else 1)

    def done() -> None:
        job.progress(next(steps), total, "run the held-out inputs")

    source.take_all(runner(model), done)
    if simulated:
        with quiet():
            quantized = Answers(batches, model, source.sampled).take_all(runner(fake.model), done)
    return held_out_of(job.data, source, quantized)


def simulates(scheme: Scheme) -> bool:
    """Whether ModelOpt's fake-quantized model runs on this machine."""
    import torch

    return not scheme.not_simulated and (not scheme.simulation_needs_cuda or torch.cuda.is_available())


def fingerprint(structure: Structure, source: Source) -> str:
    """Digest of architecture and tensor specs, without weights: the model that a calibration belongs to."""
    text = repr((structure.architecture, sorted((s.name, s.shape, s.dtype) for s in source.specs.values())))
    return hashlib.sha256(text.encode()).hexdigest()


def part(name: str) -> Any:
    """Return a module of ModelOpt, such as `torch.opt`."""
    modelopt()
    return importlib.import_module(f"modelopt.{name}")
