"""Faults of scales: of fused matrices, of inputs, of the KV cache."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from bridge.core.text import number
from bridge.planning.joined_and_cut import is_refit
from bridge.sources.quantized.parts import KV_SUFFIXES, QuantizedWeight
from bridge.workflows.doctor.checkpoint import Checkpoint
from bridge.workflows.doctor.finding import Finding

CALIBRATE = "no file has it: quantize the model again, with data"
# last components of names that some writers or servers give scales of queries, keys, values and probabilities
_CACHE = re.compile(r"(?:k|v|kv|q|key|value|prob)(?:_cache)?_(?:scale|scaling_factor)|(?:prob_)?output_scale")
_OLD = (".kv_scale", ".q_proj.output_scale", ".self_attn.prob_output_scale")  # servers read them too
RENAME = "rename scales of keys and values to k_proj.k_scale and v_proj.v_scale"
_IN_SERVER = re.compile(r"(.+\.\w*att\w*)\.attn\.([kv])_scale")  # the parameter in models of vLLM and SGLang


def above(weight: QuantizedWeight) -> float:
    """The factor of NVFP4's block scales, whatever way it is stored."""
    stored = float(weight.number("scale_2"))
    return 1 / stored if weight.reciprocal and stored else stored


def unequal(checkpoint: Checkpoint) -> Iterator[list[QuantizedWeight]]:
    """Fused groups of NVFP4 whose scales above the blocks differ; all of them can be read."""
    for group in checkpoint.fused():
        if not group[0].format.weight[0].two_level or not all("scale_2" in weight.parts for weight in group):
            continue
        scales = [above(weight) for weight in group]
        if len(set(scales)) > 1 and all(math.isfinite(scale) and scale > 0 for scale in scales):
            yield group


def global_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    """NVFP4 scales above the blocks that differ in a fused group, and FP8 scales of whole tensors that do."""
    groups = list(unequal(checkpoint))
    if groups:
        worst = max(max(map(above, group)) / min(map(above, group)) for group in groups)
        names = tuple(weight.parts["scale_2"].spec.name for group in groups for weight in group)
        what = f"differ in {number(len(groups), 'fused group')}, up to {worst:.3g} times; servers hold one for all"
        yield Finding("global-scales", what, names, repairs=True)
    names, worst = (), 1.0
    for group in checkpoint.fused():
        if is_refit(group[0].format):
            scales = [float(weight.number("scale")) for weight in group]
            if min(scales) > 0 and max(scales) > min(scales):
                names += tuple(weight.parts["scale"].spec.name for weight in group)
                worst = max(worst, max(scales) / min(scales))
    if names:
        what = f"scales of fused FP8 matrices differ, up to {worst:.3g} times: servers round their codes again"
        yield Finding("tensor-scales", what, names, "none needed: it would round the same codes here")


def input_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Static scales of inputs that are missing, zero, negative, NaN or infinite."""
    missing, wrong = [], []
    static = checkpoint.section.get("activation_scheme") == "static"
    for module, weight in checkpoint.modules.items():
        entry = weight.format.input
        needed = static if checkpoint.method == "fp8" else bool(entry and entry.static)
        part = weight.parts.get("input_scale")
        if part is None:
            missing += [module] if needed else []
        elif not 0 < float(weight.number("input_scale")) < math.inf:
            wrong.append(part.spec.name)
    if missing:
        what = "the inputs are quantized with a stored scale, and it is missing"
        yield Finding("input-scales-missing", what, tuple(missing), CALIBRATE)
    if wrong:
        yield Finding("input-scales-invalid", "is zero, negative, NaN or infinite", tuple(wrong), CALIBRATE)


def is_cache_scale(name: str) -> bool:
    """Whether a name is that of a scale of the KV cache, in any writer's words."""
    return _CACHE.fullmatch(name.rpartition(".")[2]) is not None


def cache_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Names that are those of parameters in a server -> the names that servers read in checkpoints."""
    of_parts = checkpoint.method == "modelopt"
    renamed = {}
    for name in checkpoint.specs:
        if match := _IN_SERVER.fullmatch(name):
            of = f"{match[2]}_proj." if of_parts else ""
            renamed[name] = f"{match[1]}.{of}{match[2]}_scale"
    return renamed


def cache_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Scales of keys and values under other names, that the config does not announce, or that it announces alone."""
    read = tuple(suffix for suffixes in KV_SUFFIXES.values() for suffix in suffixes)
    in_server = cache_names(checkpoint)
    cache = [name for name in checkpoint.specs if is_cache_scale(name)]
    old = [name for name in cache if name.endswith(_OLD) and name not in in_server]
    unread = [name for name in cache if not name.endswith((*read, *_OLD))]
    if in_server:
        what = "is the name of a parameter in a server, not in a checkpoint: the scale is dropped"
        yield Finding("kv-names", what, tuple(in_server), repairs=True)
    if old:
        yield Finding("kv-other-names", "is a name of a scale that some servers read", tuple(old), RENAME)
    if unread:
        yield Finding("kv-unknown-names", "is no name of a KV scale that is known here", tuple(unread), RENAME)
    kept = [name for name in cache if name.endswith((*read, ".kv_scale"))]
    if kept and checkpoint.method and not declared(checkpoint):
        what = "scales of keys and values, and no kv_cache_scheme in the config: they are dropped"
        yield Finding("kv-undeclared", what, tuple(kept), "add kv_cache_scheme, or start the server with its fp8 cache")
    if not cache and declared(checkpoint):
        yield Finding("kv-missing", "the config says that the KV cache has scales, and none is there", (), CALIBRATE)


def declared(checkpoint: Checkpoint) -> bool:
    """Whether the config says that keys and values have stored scales."""
    inner: Mapping[str, Any] = (checkpoint.modelopt or {}).get("quantization") or {}
    scheme = checkpoint.section.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return not scheme.get("dynamic")
    return bool(checkpoint.section.get("kv_cache_quant_algo") or inner.get("kv_cache_quant_algo"))
