"""Translate a scheme into ModelOpt's `quant_cfg` list over live module names.

All quantizers are disabled first, then exactly those of the sites are enabled. ModelOpt's presets are not used: they
also quantize the inputs of LayerNorm and other modules without weights, which no target stores (on all-MiniLM-L6-v2
they lower the cosine of sentence embeddings from 0.98 to 0.70 under INT8).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from bridge.calibration.algorithms.columns import BACKEND
from bridge.core.dtypes import SEARCHED
from bridge.core.errors import CalibrationError
from bridge.core.text import fold_layers
from bridge.core.values import AFFINE, BY_SIGN, MSE, NARROW, WEIGHTED, Format, Numeric, Site

if TYPE_CHECKING:
    from bridge.quant.schemes.scheme import Scheme
    from bridge.sources.live_models.checkpoint_names import Origin

_BITS: dict[str, int | tuple[int, int]] = {"float8_e4m3fn": (4, 3), "int8": 8, "int4": 4, "float4_e2m1fn": (2, 1)}
_SCALE_BITS = {"float8_e4m3fn": (4, 3), "float8_e8m0fnu": (8, 0)}


@dataclass(frozen=True)
class QuantizerBinding:
    """One site and the quantizers of its live module; experts of a stack share the input's.

    `rows`: of the live matrix that are the site's, None for all; sites in one matrix share its quantizers. `joint`: one
    quantizer has the weights of all experts, as ModelOpt's of stacks that the model has as [in, out].
    """

    site: Site
    format: Format
    module: str
    parameter: str
    expert: int | None = None
    rows: tuple[int, int] | None = field(default=None, compare=False)
    joint: bool = False

    @property
    def weight_quantizer(self) -> str:
        if self.joint:
            return f"{self.module}.{self.parameter}_weight_quantizer"
        if self.expert is not None:
            return f"{self.module}.{self.parameter}_weight_quantizers.{self.expert}"
        return f"{self.module}.weight_quantizer"

    @property
    def input_quantizer(self) -> str:
        own = self.expert is None and not self.site.stacked
        name = "input_quantizer" if own else f"{self.parameter}_input_quantizer"
        return f"{self.module}.{name}"


def known_formats(sites: Iterable[Site], scheme: Scheme) -> dict[str, Format | str]:
    """Module -> its format, or why ModelOpt sees it unquantized: it does not have llama.cpp's numerics, nor our rules.

    Nor does it see convolutions in blocks of weights, which no target writes: its answers are compared with those of
    what is written. Of FP4's blocks whose scales we choose it measures the inputs, and of INT4's it searches
    pre-scales, as if the scales were those of amax.
    """
    formats = {site.module: _without_our_scales(scheme.format_of(site)) for site in sites}
    searched = {m for m, form in formats.items() if isinstance(form, Format) and is_unknown(form)}
    unwritten = {
        site.module
        for site in sites
        if site.layout == "conv" and isinstance(form := formats[site.module], Format) and _is_in_blocks(form)
    }
    why = dict.fromkeys(unwritten, "convolution: block scales need a matrix")
    why |= dict.fromkeys(searched, "coded without ModelOpt")
    return formats | why


def _without_our_scales(form: Format | str) -> Format | str:
    ours = isinstance(form, Format) and form.weight[0].search
    if not isinstance(form, Format) or not (ours == WEIGHTED or (form.prescales and ours in BY_SIGN)):
        return form
    algorithm = form.algorithm if form.prescales else "max"
    return replace(form, weight=tuple(replace(one, search="") for one in form.weight), algorithm=algorithm)


def is_unknown(form: Format) -> bool:
    """Whether ModelOpt has no quantizer for the weights of a format."""
    return form.weight[0].dtype in (*SEARCHED, *AFFINE, *NARROW) or form.weight[0].search in BY_SIGN


def _is_in_blocks(form: Format) -> bool:
    """Whether only weights are quantized, in blocks."""
    return form.input is None and any(numeric.per == "block" for numeric in form.weight)


def bind(
    sites: Iterable[Site], formats: Mapping[str, Format | str], origins: Mapping[str, Origin], tied: Mapping[str, str]
) -> list[QuantizerBinding]:
    """Find the live module of every quantized site; a site in several live matrices has one binding for each.

    `formats` is by module, `tied` maps live aliases to their live tensor. CalibrationError lists sites whose weight the
    live model does not have.
    """
    bindings: list[QuantizerBinding] = []
    lost: list[str] = []
    unclear: list[str] = []
    for site in sites:
        form = formats[site.module]
        if not isinstance(form, Format):
            continue
        origin = origins.get(site.weight)
        if origin is None:
            lost.append(site.module)
            continue
        if form.clipped and (origin.ref is None or (origin.ref.rows and site.layout != "out_in")):
            unclear.append(site.module)
        for part in origin.parts:
            module, _, parameter = _own(site, part.live, tied).rpartition(".")
            # a stack is indexed by the expert; other parts are a matrix or a range of its rows
            turned = part.order[-2:] in ((1, 0), (2, 1))  # stored otherwise than the model has it
            joint = turned if part.expert is not None else site.stacked and (site.layout == "stack_in_out") != turned
            every = range(origin.spec.shape[0]) if site.stacked and not joint else (part.expert,)
            for expert in every:
                binding = QuantizerBinding(site, form, module, parameter, expert, part.rows, joint)
                if binding not in bindings[-len(origin.parts) :]:
                    bindings.append(binding)
    if lost:
        raise CalibrationError(
            f"the model in memory lacks modules that the plan quantizes: {', '.join(fold_layers(lost))}"
        )
    if unclear:
        raise CalibrationError(
            f"the model in memory has other matrices than {', '.join(fold_layers(unclear))}, so that the clips of "
            'their blocks are unknown; write a recipe that gives them quant = "int4_awq"'
        )
    return bindings


def _own(site: Site, live: str, tied: Mapping[str, str]) -> str:
    # a tied output head is its own module: its input is quantized, not that of the embedding with the same weight
    canonical = tied.get(live, live)
    names = [live, canonical, *(alias for alias, stored in tied.items() if stored == canonical)]
    leaf = site.module.rpartition(".")[2]
    return next((name for name in names if name.split(".")[-2:-1] == [leaf]), live)


def quant_cfg(
    bindings: Sequence[QuantizerBinding], attention: Sequence[str], kv: Numeric | None, modules: Iterable[str]
) -> list[dict[str, Any]]:
    """Return ModelOpt's list. `modules`: all live modules, so that a glob is used only if it matches nothing else."""
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    named: dict[str, Any] = {}
    for binding in bindings:
        weight = [numeric_cfg(numeric, weight=True) for numeric in binding.format.weight]
        if binding.format.rescaled:
            static = {"type": "static"}
            weight = [setting | {"block_sizes": setting["block_sizes"] | static, "backend": None} for setting in weight]
        if binding.format.compensated:
            weight = [setting | {"backend": BACKEND} for setting in weight]
        settings = {binding.weight_quantizer: weight[0] if len(weight) == 1 else weight}
        if binding.format.input is not None:
            settings[binding.input_quantizer] = numeric_cfg(binding.format.input, weight=False)
        for name, setting in settings.items():
            if named.setdefault(name, setting) != setting:
                raise CalibrationError(f"{name}: sites that share this quantizer ask for different formats")
    if kv is not None:
        for module in attention:
            named |= {f"{module}.{letter}_bmm_quantizer": numeric_cfg(kv, weight=False) for letter in "kv"}
    others = {f"{module}.{name}" for module in modules for name in ("weight_quantizer", "input_quantizer")} - set(named)
    for pattern, setting in _globbed(named, others):
        entries.append({"quantizer_name": pattern, "cfg": setting})
    return entries


@contextmanager
def hidden_from_modelopt(root: Any, bindings: Sequence[QuantizerBinding]) -> Iterator[None]:
    """Hide modules that ModelOpt breaks or fails on while it makes modules quantizable, and that hold no site."""
    sites = {binding.module for binding in bindings}
    hidden: list[tuple[Any, str, Any]] = []
    for name, parent in root.named_modules():
        for key, child in parent._modules.items():
            path = f"{name}.{key}" if name else key
            if child is not None and _is_broken(child) and not any(f"{site}.".startswith(f"{path}.") for site in sites):
                hidden.append((parent, key, child))
    for parent, key, child in hidden:
        parent._modules[key] = _hide(child)
    try:
        yield
    finally:
        for parent, key, child in hidden:
            parent._modules[key] = child


def _hide(module: Any) -> Any:
    """Return a stand-in that shows the attributes of a module, and none of its children, parameters and buffers."""
    from torch.nn import Module

    class Hidden(Module):
        def __getattr__(self, name: str) -> Any:
            return getattr(module, name)

    return Hidden()


@contextmanager
def registering(plugins: set[Any], cache: bool) -> Iterator[None]:
    """Let ModelOpt make attention quantizable only with `cache`: its classes fail in Parakeet, RoFormer and Bloom."""
    attention = {one for one in plugins if one.__name__ == "register_hf_attentions_on_the_fly"}
    left = set() if cache else attention
    plugins.difference_update(left)
    try:
        yield
    finally:
        plugins.update(left)


@contextmanager
def without_deprecations(root: Any) -> Iterator[None]:
    """Take transformers' decorator of renamed arguments off attention, which ModelOpt 0.47 cannot rewrite with it."""
    kinds = {type(module) for module in root.modules()}
    forwards = {cls: forward for cls in kinds if hasattr(forward := vars(cls).get("forward"), "__wrapped__")}
    renamed = {cls: f for cls, f in forwards.items() if f.__code__.co_filename.endswith("deprecation.py")}
    for cls, forward in renamed.items():
        cls.forward = forward.__wrapped__
    try:
        yield
    finally:
        for cls, forward in renamed.items():
            cls.forward = forward


def _is_broken(module: Any) -> bool:
    """Whether ModelOpt 0.47 cannot convert a module: a weight computed by weight norm, or the experts of Dbrx.

    Of those it makes matrices of another shape than transformers 5 multiplies with.
    """
    from torch.nn.utils.parametrize import is_parametrized

    return is_parametrized(module) or type(module).__name__ == "DbrxFFN"


def check_hooked(fake: Any, bindings: Sequence[QuantizerBinding], live: Mapping[str, str]) -> None:
    """CalibrationError if ModelOpt put no quantizer: it skips unknown modules silently."""
    present = {name for name, module in fake.named_modules() if hasattr(module, "is_enabled")}
    lost = [w.site.module for w in bindings if w.weight_quantizer not in present]
    lost += [w.site.module for w in bindings if w.format.input is not None and w.input_quantizer not in present]
    if lost:
        kinds = sorted({type(fake.get_submodule(w.module)).__name__ for w in bindings if w.site.module in lost})
        raise CalibrationError(
            f"ModelOpt cannot quantize {', '.join(fold_layers(dict.fromkeys(lost)))} ({', '.join(kinds)}); keep them "
            'with a recipe (quant = "none")'
        )
    blind = [name for name in live if f"{name}.k_bmm_quantizer" not in present]
    if blind:
        kind = type(fake.get_submodule(blind[0])).__name__
        raise CalibrationError(
            f"ModelOpt cannot quantize the KV cache of {kind} ({', '.join(fold_layers(blind))}); drop kv="
        )


def calibrator(form: Format) -> str:
    """The algorithm by which ModelOpt calibrates a format; for NVFP4 it searches with CUDA only, and amax stands in."""
    first = form.weight[0]
    return MSE if (form.algorithm, first.dtype, first.search) == ("max", "int4", MSE) else form.algorithm


def numeric_cfg(numeric: Numeric, weight: bool) -> dict[str, Any]:
    """Return ModelOpt's quantizer attributes of one numeric."""
    if numeric.constant:
        return numeric_cfg(replace(numeric, constant=0.0), weight) | {"constant_amax": numeric.constant}
    bits = _BITS[numeric.dtype]
    if numeric.per == "tensor":
        return {"num_bits": bits, "axis": None}
    if numeric.per == "channel":
        return {"num_bits": bits, "axis": 0 if weight else -1}
    if numeric.per == "token":
        return {"num_bits": bits, "axis": None, "type": "dynamic", "block_sizes": {-1: None}}
    sizes: dict[int | str, Any] = dict(zip((-1, -2), reversed(numeric.block), strict=False))
    if numeric.scale_dtype == "float32" and numeric.dynamic:
        return {"num_bits": bits, "type": "dynamic", "block_sizes": sizes | {"type": "dynamic"}, "backend": BACKEND}
    if numeric.scale_dtype == "float32":
        return {"num_bits": bits, "axis": None, "block_sizes": sizes | {"type": "static"}}
    sizes |= {"type": "dynamic", "scale_bits": _SCALE_BITS[numeric.scale_dtype]}
    return {"num_bits": bits, "block_sizes": sizes} | ({"backend": BACKEND} if numeric.two_level else {})


def _globbed(named: Mapping[str, Any], others: Iterable[str]) -> list[tuple[str, Any]]:
    """Return one glob over the layers if it matches nothing else, exact names otherwise.

    ModelOpt matches every entry against every quantizer: thousands of exact names would take minutes. A quantizer that
    two entries match gets its list of numerics twice, so globs never overlap, even if they agree.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, setting in named.items():
        glob = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        groups.setdefault((glob, repr(setting)), []).append(name)
    known = [*named, *others]
    entries: list[tuple[str, Any]] = []
    for (glob, _), names in groups.items():
        hit = sum(1 for name in known if fnmatchcase(name, glob))
        entries += [(pattern, named[names[0]]) for pattern in ([glob] if hit == len(names) else names)]
    return entries
