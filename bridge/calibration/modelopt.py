"""Calibration with ModelOpt, the only module that imports it; never changes the caller's model.

ModelOpt works on a twin: a deep copy of the module tree whose parameters lie over the same memory. So the original
keeps its classes, hooks, flags and weights whatever happens (an exception, Ctrl-C), and no weight is copied, except
those that SmoothQuant and AWQ divide by their pre-scales.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.errors import CalibrationError, UsageError, fold_layers
from bridge.quant.answers import Run, as_arrays, perplexity, pick, runner, sample
from bridge.quant.calibration import Calibration, HeldOut, Provenance
from bridge.quant.data import Data
from bridge.quant.quantizers import Wire, numeric_cfg, quant_cfg, wires
from bridge.quant.routing import Routing
from bridge.quant.scheme import Scheme, is_calibrated, is_static
from bridge.quant.statistics import (
    Twin,
    raise_inputs,
    read_statistics,
    smoothable,
    smoothquant_scales,
    weight_amax,
)
from bridge.values import Structure

if TYPE_CHECKING:
    from bridge.sources import Source
    from bridge.sources.live import Origin

Progress = Callable[[int, int, str], None]
_PASSES = {"max": 1, "smoothquant": 1, "awq": 2}  # runs of the whole data


@dataclass(frozen=True)
class FakeQuantized:
    """A twin whose forward is ModelOpt's fake-quantized one, and the statistics that it was quantized with.

    `plain` is the model that it lies over; `wires` and `attention` (live names) tell where its quantizers are.
    """

    model: Any
    calibration: Calibration
    plain: Any
    wires: tuple[Wire, ...]
    attention: tuple[str, ...]


def fake_quantize(
    source: Source,
    structure: Structure,
    scheme: Scheme,
    data: Data,
    *,
    device: str | None = None,
    progress: Progress | None = None,
    least: float = 0.0,
) -> FakeQuantized:
    """Run the model of `source` with ModelOpt; the model stays as it is.

    The twin lies over the model's memory: a weight that is changed there later is changed in the twin, too.
    `least`: the amax of an input is raised to it where it is smaller.

    Raises:
        CalibrationError: before the model is loaded where data or CUDA are missing.
    """
    check_device(scheme, device)
    if not data.batches and data.forward_loop is None and scheme.needs_calibration:
        raise CalibrationError(f"scheme {scheme.name} needs statistics of activations: {data.missing}")
    scheme = scheme.bound(structure.sites)
    model = source.load_model()
    from bridge.sources.live import live_names

    origins = live_names(model, source.specs)
    report = progress or (lambda done, total, text: None)
    twin = _calibrated(model, scheme, structure, data, origins, device, report)
    raised = raise_inputs(twin, least)
    statistics, applied = read_statistics(twin, scheme)
    held = _held_out(model, twin, scheme, data, report) if data.held_out else None
    provenance = Provenance(
        scheme=scheme.name,
        scheme_digest=scheme.digest,
        architecture=structure.architecture,
        model=fingerprint(structure, source),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        data_digest=data.digest,
        samples=data.samples,
        sequence=data.sequence,
        versions={name: _version(name) for name in ("nvidia-modelopt", "qbridge", "torch", "transformers")},
    )
    calibration = Calibration(provenance=provenance, **statistics, applied=(*raised, *applied), held_out=held)
    return FakeQuantized(twin.model, calibration, model, twin.wires, tuple(twin.attention))


def check_device(scheme: Scheme, device: str | None) -> None:
    """CalibrationError where CUDA is asked for or needed, and is not there; loads torch, no model."""
    if str(device or "cpu").partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r} is unknown; known: cpu, cuda, cuda:0 ...")
    if not (scheme.needs_cuda or str(device or "").startswith("cuda")):
        return
    import torch

    if torch.cuda.is_available():
        return
    why = scheme.needs_cuda or f"device={device!r} was asked for"
    raise CalibrationError(
        f"scheme {scheme.name}: no CUDA device here, and {why}; calibrate on a machine with one and pass its saved "
        "calibration (calib=), or choose another scheme"
    )


def _calibrated(
    model: Any,
    scheme: Scheme,
    structure: Structure,
    data: Data,
    origins: Mapping[str, Origin],
    device: str | None,
    report: Progress,
) -> Twin:
    """A twin of `model` that ModelOpt has quantized and calibrated."""
    mtq = _modelopt()
    import torch

    formats = {site.module: scheme.format_of(site) for site in structure.sites}
    from bridge.sources.live import tied_names

    wired = wires(structure.sites, formats, origins, tied_names(model))
    live = _attention(structure, origins) if scheme.kv else {}
    twin = _twin(model, {w.module for w in wired if w.format.prescales}, torch)
    if device is not None:
        twin = twin.to(device)
    routing = Routing(wired)
    loop = routing.first(_loop(data, report, _passes(wired)))
    before = {
        w.module: weight_amax(twin.get_submodule(w.module), w.site.layout)
        for w in wired
        if w.format.algorithm == "smoothquant"
    }
    with quiet(), torch.no_grad():
        _run(mtq, twin, scheme, wired, live, loop)
        _check_hooked(twin, wired, live)
        scales = smoothquant_scales(twin, before, dict(scheme.options).get("alpha", 1.0))
    return Twin(twin, tuple(wired), live, scales, routing.tokens)


def _modelopt() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import modelopt.torch.quantization as mtq
    except ImportError as cause:
        raise CalibrationError(
            f"calibration needs ModelOpt, which cannot be imported ({cause}); `pip install 'qbridge[calibrate]'`, or "
            "pass a saved calibration"
        ) from cause
    return mtq


def _twin(model: Any, smoothed: set[str], torch: Any) -> Any:
    """Copy the module tree over the same memory; the modules in `smoothed` get weights of their own, untied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = torch.nn.Parameter(parameter.detach(), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().clone()
    twin = copy.deepcopy(model, memo).eval()
    for name in sorted(smoothed):
        module = twin.get_submodule(name)
        if isinstance(getattr(module, "weight", None), torch.nn.Parameter):
            module.weight = torch.nn.Parameter(module.weight.detach().clone(), requires_grad=False)
    return twin


def _run(
    mtq: Any, twin: Any, scheme: Scheme, wired: Sequence[Wire], live: Mapping[str, str], loop: Callable[[Any], None]
) -> None:
    """Convert the twin and calibrate it, once for each algorithm: an algorithm treats every enabled quantizer alike.

    "max" comes first, while the weights are still those of the model. The KV cache is calibrated with the only
    algorithm there is, as ModelOpt's presets do (AWQ searches with the cache quantized), by "max" where there are more.
    """
    names = [name for name, _ in twin.named_modules()]
    used = {w.format.algorithm for w in wired}
    cache = next(iter(used)) if len(used) == 1 else "max"
    used |= {cache} if live else set()
    enabled: list[str] = []
    for algorithm in (a for a in ("max", "smoothquant", "awq") if a in used):
        part = [w for w in wired if w.format.algorithm == algorithm]
        kv = scheme.kv if algorithm == cache else None
        config = quant_cfg(part, list(live) if kv else [], kv, names)
        static = any(is_calibrated(w.format) for w in part) or bool(kv and live and is_static(kv))
        forward, method = loop if static else None, _method(algorithm, scheme)
        if algorithm == "smoothquant" and dict(scheme.options).get("alpha", 1.0) < 1:
            forward = _smoothable(loop, {w.module for w in part})
        if not enabled:
            mtq.quantize(twin, {"quant_cfg": config, "algorithm": method}, forward)
        else:
            mtq.set_quantizer_attributes_partial(twin, "*", {"enable": False})
            mtq.set_quantizer_by_cfg(twin, config[1:])
            mtq.calibrate(twin, method, forward)
        enabled += [entry["quantizer_name"] for entry in config[1:]]
    for pattern in enabled if len(used) > 1 else []:
        mtq.set_quantizer_attributes_partial(twin, pattern, {"enable": True})


def _smoothable(loop: Callable[[Any], None], modules: set[str]) -> Callable[[Any], None]:
    def run(model: Any) -> None:
        loop(model)
        smoothable(model, modules)

    return run


def _method(algorithm: str, scheme: Scheme) -> dict[str, Any]:
    options = dict(scheme.options)
    if algorithm == "smoothquant":
        return {"method": "smoothquant", "alpha": options.get("alpha", 1.0)}
    if algorithm == "awq":
        # debug keeps the float32 scale that the weight was multiplied by; the buffer is rounded to the model's dtype
        return {"method": "awq_lite", "alpha_step": options.get("alpha_step", 0.1), "debug": True}
    return {"method": "max"}


def _loop(data: Data, report: Progress, passes: int) -> Callable[[Any], None]:
    """The data as ModelOpt's forward_loop; what a user's own loop prints still reaches the terminal."""
    done, total, terminal = 0, passes * len(data.batches), sys.stdout

    def loop(model: Any) -> None:
        nonlocal done
        if data.forward_loop is not None:
            with contextlib.redirect_stdout(terminal):
                data.forward_loop(model)
            return
        run = runner(model)
        for batch in data.batches:
            run(batch)
            done += 1
            report(done, total, "calibrate")

    return loop


def _passes(wired: Sequence[Wire]) -> int:
    return sum(_PASSES[a] for a in {w.format.algorithm for w in wired if is_calibrated(w.format)}) or 1


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep ModelOpt's prints and warnings off the terminal, and say so where it is ModelOpt that fails."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except AssertionError as cause:
        said = str(cause).strip().splitlines() or ["an assertion failed"]
        raise CalibrationError(
            f"ModelOpt refused: {said[0][:300]}; a NaN or an infinity among the activations is the usual reason: "
            "check the weights and the data, or calibrate in bfloat16 or float32"
        ) from cause
    except (IndexError, KeyError, AttributeError, NotImplementedError) as cause:
        raise CalibrationError(
            f"ModelOpt failed on this model ({type(cause).__name__}: {str(cause)[:300]}); choose a scheme that needs "
            "no calibration, or keep the modules it cannot hook with a recipe (--debug shows where)"
        ) from cause


def _check_hooked(twin: Any, wired: Sequence[Wire], live: Mapping[str, str]) -> None:
    """CalibrationError where ModelOpt put no quantizer: it skips modules it does not know without a word."""
    present = {name for name, module in twin.named_modules() if hasattr(module, "is_enabled")}
    lost = [w.site.module for w in wired if w.weight_quantizer not in present]
    lost += [w.site.module for w in wired if w.format.input is not None and w.input_quantizer not in present]
    if lost:
        kinds = sorted({type(twin.get_submodule(w.module)).__name__ for w in wired if w.site.module in lost})
        raise CalibrationError(
            f"ModelOpt cannot quantize {', '.join(fold_layers(dict.fromkeys(lost)))} ({', '.join(kinds)}); keep them "
            'with a recipe (quant = "none")'
        )
    blind = [name for name in live if f"{name}.k_bmm_quantizer" not in present]
    if blind:
        kind = type(twin.get_submodule(blind[0])).__name__
        raise CalibrationError(
            f"ModelOpt cannot quantize the KV cache of {kind} ({', '.join(fold_layers(blind))}); drop kv="
        )


def _attention(structure: Structure, origins: Mapping[str, Origin]) -> dict[str, str]:
    from bridge.sources.live import live_modules

    wanted = set(structure.attention)
    found = {live: ours for live, names in live_modules(origins).items() for ours in names if ours in wanted}
    if lost := wanted - set(found.values()):
        raise CalibrationError(
            f"the model in memory lacks the attention modules {', '.join(fold_layers(sorted(lost)))}"
        )
    return found


def _held_out(model: Any, twin: Twin, scheme: Scheme, data: Data, report: Progress) -> HeldOut:
    """What both models answer to the held-out inputs; ModelOpt's only where its kernels run."""
    import torch

    batches, total = data.held_out, 2 * len(data.held_out)
    done = 0

    def counted(run: Run) -> Run:
        def step(batch: Mapping[str, Any]) -> Any:
            nonlocal done
            output = run(batch)
            done += 1
            report(min(done, total), total, "run the held-out inputs")
            return output

        return step

    source = counted(runner(model))
    first = source(batches[0])
    rows, columns = sample(first, batches[0])
    ours, loss = pick(first, rows, columns), perplexity(source, batches, model)
    theirs, loss_quantized = np.empty((rows.size, 0), np.float32), None
    if not scheme.simulation_needs_cuda or torch.cuda.is_available():
        quantized = counted(runner(twin.model))
        with quiet():
            theirs = pick(quantized(batches[0]), rows, columns)
            loss_quantized = perplexity(quantized, batches, model)
    return HeldOut(as_arrays(batches), rows, columns, ours, theirs, loss, loss_quantized)


def gradient_scores(
    made: FakeQuantized, units: Sequence[Sequence[str]], batches: Sequence[Mapping[str, Any]], loss: Callable[..., Any]
) -> list[float]:
    """ModelOpt's own estimate of what quantizing each of `units` (live modules) costs: (dloss/dy * error of y) squared.

    One run and its backward a batch for all of them. The wires of `made` have one format, calibrated by max; its twin
    stays as it is. A unit that ModelOpt does not score is a CalibrationError.
    """
    mtq = _modelopt()
    import torch

    form, inside = made.wires[0].format, {name for unit in units for name in unit}
    device = next(made.model.parameters()).device
    twin = _twin(made.plain, set(), torch).to(device)
    entries = [{"quantizer_name": "*weight_quantizer*", "cfg": numeric_cfg(form.weight[0], weight=True)}]
    if form.input:
        entries.append({"quantizer_name": "*input_quantizer*", "cfg": numeric_cfg(form.input, weight=False)})
    config = {"quant_cfg": [{"quantizer_name": "*", "enable": False}, *entries], "algorithm": {"method": "max"}}
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        _, state = mtq.auto_quantize(
            twin,
            {"effective_bits": 16.0},  # what it would choose is not asked for
            [config],
            data_loader=[{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches],
            forward_step=lambda model, batch: model(**batch, use_cache=False).logits,
            loss_func=loss,
            num_calib_steps=len(batches),
            num_score_steps=len(batches),
            disabled_layers=[name for name, _ in twin.named_modules() if name and name not in inside],
        )
    scored = {name: stats for stats in state["candidate_stats"].values() for name in stats["module_names"]}
    if lost := inside - set(scored):
        raise CalibrationError(f"ModelOpt does not score {', '.join(fold_layers(sorted(lost)))}; use method='kl'")
    groups = [{id(scored[name]): scored[name] for name in unit}.values() for unit in units]
    return [sum(float(stats["scores"][0]) for stats in group) for group in groups]


def fingerprint(structure: Structure, source: Source) -> str:
    """Digest of architecture and tensor specs: what a calibration belongs to. The weights do not enter it."""
    said = repr((structure.architecture, sorted((s.name, s.shape, s.dtype) for s in source.specs.values())))
    return hashlib.sha256(said.encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def dataset_tools() -> Any:
    """ModelOpt's module of calibration data and forward loops, for the door of that name."""
    _modelopt()
    from modelopt.torch.utils import dataset_utils

    return dataset_utils
