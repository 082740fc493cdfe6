"""Export a config as a float ONNX graph without weights.

Downloads nothing, and runs no code from the hub. `torch.onnx.export` on the whole model is not used: its optimizer
reads weights, its fallbacks try a failing export three times, and identical layers are exported repeatedly. Here a few
layers are exported and the rest is stamped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from bridge.core.dtypes import FLOATS
from bridge.core.dtypes import dtype as dtype_row
from bridge.core.errors import BridgeError, ExportError, UsageError
from bridge.core.machine import without_collection
from bridge.core.text import grouped
from bridge.sources.configs.diffusion import is_diffusion
from bridge.sources.live_models import diffusion, meta_device
from bridge.sources.live_models.meta_device import resolve_config
from bridge.targets.onnx.export.family import families_of, replace_methods
from bridge.targets.onnx.export.float_graph import PATCHES, PLACES, TEXT, Graph
from bridge.targets.onnx.export.layers import Layers, cut_layers, find_layers
from bridge.targets.onnx.export.naming import name_by_structure
from bridge.targets.onnx.export.recurrent.loops import expand
from bridge.targets.onnx.export.stamp import KV, MODULE, SLOT, Refused, stamp_layers
from bridge.targets.onnx.export.tasks import choose_task, model_class
from bridge.targets.onnx.export.traced import free, trace
from bridge.targets.onnx.export.translate import to_onnx
from bridge.targets.onnx.formats import IR_VERSIONS
from bridge.targets.tasks import tasks

_SCOPES = "pkg.torch.onnx.name_scopes"
_PREFIX = "model."  # the wrapper's attribute


def export_graph(
    config: Any,
    *,
    task: str | None = None,
    dtype: str = "float32",
    opset: int = 21,
    cache: bool = True,
    stamp: bool = True,
    part: str = "",
    image: tuple[int, int] | None = None,
    pooling: str = "",
    stacked: bool = False,
    tensors: Collection[str] = (),
    progress: Callable[[str], None] | None = None,
) -> Graph:
    """Export the graph of `config` (a transformers config, or the content of config.json).

    opset: attention is ONNX's operator from 23 on, and MatMul, Softmax and MatMul before.
    part: which graph of a task that has several (`Task.parts`). image: height and width, if the config gives none.
    pooling: "mean", "mean normalized", ...: adds the output `sentence_embedding` to states of tokens.
    stacked: the checkpoint has the experts of a layer in one tensor, so their gate and up are one matrix.
    tensors: the checkpoint's names; without them, no matrices are one that transformers has apart.

    >>> graph = export_graph({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})  # doctest: +SKIP
    """
    if opset not in IR_VERSIONS:
        raise UsageError(f"opset {opset} cannot be exported; known: {', '.join(map(str, IR_VERSIONS))}")
    row = dtype_row(dtype).name
    if row not in FLOATS:
        raise UsageError(f"a graph in {row} cannot be exported; known: {', '.join(FLOATS)}")
    tell = progress or (lambda _: None)
    with meta_device.quiet(), without_collection():
        diffuses = is_diffusion(config)
        resolved = dict(config) if diffuses else resolve_config(config)
        known = resolved["architectures"] if diffuses else getattr(resolved, "architectures", None)
        architecture = (known or ["a config without `architectures`"])[0]
        name = task if task is not None and task in tasks() else choose_task(task, architecture)
        return _Run(resolved, name, row, opset, cache, part, image, pooling, stacked, tensors, tell).graph(stamp)


@dataclass(frozen=True)
class _Run:
    config: Any
    task: str
    dtype: str
    opset: int
    cache: bool
    part: str
    image: tuple[int, int] | None
    pooling: str
    stacked: bool
    tensors: Collection[str]
    tell: Callable[[str], None]

    def graph(self, stamp: bool) -> Graph:
        if is_diffusion(self.config):
            model = diffusion.build(self.config, self.dtype, "cpu", "target trt").eval()
            return self._finish(
                *self._export(self.config, model), "blocks of a denoiser read the step, and are not stamped"
            )
        config, model = self._build()
        text = config.get_text_config()
        layers = self._layers(model, text)
        count = len(layers.kinds) if layers else getattr(text, "num_hidden_layers", 0) or 0
        several = f"layers of {self.part}.onnx are not compared" if self.part else "no list of layers to stamp"
        note = "" if layers or self.part == "embedding" else several
        keep = layers.representatives() if layers else []
        if not stamp:
            note = "not asked for"
        elif layers and len(keep) == count > 2:
            note = "no kind of layer occurs more than twice"
        elif layers and len(keep) < count:
            try:
                cut_layers(model, text, layers, keep)
                self.tell(f"export {len(keep)} of {count} layers")
                few, tied = self._export(config, model)
                stamp_layers(few, layers, keep)
                return self._finish(few, tied, "")
            except Refused as refused:
                note = str(refused)
            except ExportError as error:
                if not isinstance(error.__cause__, LookupError | AttributeError | TypeError | ValueError):
                    raise  # torch's own refusal, which the whole model would meet as well
                note = "the model cannot be cut to fewer layers"
            config, model = self._build()
        self.tell(f"export {count} layers")
        whole, tied = self._export(config, model)
        return self._finish(whole, tied, note)

    def _layers(self, model: Any, text: Any) -> Layers | None:
        """The layers that may be stamped: those of one graph, or of a decoder that reads embeddings."""
        if not self.part:
            return find_layers(model, text)
        if self.part == "decoder" and "embedding" in tasks()[self.task].parts:
            return find_layers(model, text, model.get_decoder())
        return None

    def _build(self) -> tuple[Any, Any]:
        import copy

        import torch

        config = copy.deepcopy(self.config)
        cls = model_class(config, self.task)
        try:
            return config, meta_device.build_meta(config, cls, getattr(torch, self.dtype))
        except BridgeError:
            raise
        except Exception as error:
            raise ExportError(
                f"{cls.__name__}: transformers cannot build it from this config: {_short(error)}"
            ) from error

    def _export(self, config: Any, model: Any) -> tuple[ir.Model, dict[str, str]]:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental import _config as experimental
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        from bridge.sources.live_models.own_caches import own_caches
        from bridge.targets.onnx.export.calls.denoiser import denoiser_call, drop_squeezes
        from bridge.targets.onnx.export.recurrent.replace import recurrences_as_nodes
        from bridge.targets.onnx.export.torch_functions import always_clamped, real_rope

        diffuses = is_diffusion(config)
        if not diffuses:
            self._replace(model)
        counted = any(family.counted for family in families_of(model))
        env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=counted)
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
        meta_device.make_fake(model, mode)
        tied = _ties(model)
        try:
            oblivious = experimental.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
            clamped = always_clamped(self.dtype)
            with own_caches(), real_rope(model), recurrences_as_nodes(model), torch.no_grad(), oblivious, clamped:
                call = denoiser_call(model, mode) if diffuses else self._call(model, mode)
                program = trace(call)
                graph = to_onnx(program, self.opset)
                free(program)
                if diffuses:
                    drop_squeezes(graph)
        except BridgeError:
            raise
        except Exception as error:
            raise ExportError(
                f"{type(model).__name__}: torch cannot export this architecture\n  reason {_short(error)}\n"
                "  hint   convert it with target `hf`, which needs no graph"
            ) from error
        _name(graph, call)
        optimize(graph)
        _mark(graph, call)
        return graph, tied

    def _replace(self, model: Any) -> None:
        """Put what can be exported in place of modules and methods that cannot."""
        from bridge.targets.onnx.export.experts import unstack_experts
        from bridge.targets.onnx.export.joined import join_linears

        join_linears(model, self.tensors)
        replace_methods(model)
        unstack_experts(model, self.stacked)
        meta_device.settle_rope(model)
        meta_device.settle_positions(model)

    def _call(self, model: Any, mode: Any) -> Any:
        """The calling convention of the model's graph."""
        import torch

        from bridge.targets.onnx.export.calls.encoder_decoder import part_call
        from bridge.targets.onnx.export.calls.images import image_call, question_call
        from bridge.targets.onnx.export.calls.multimodal import multimodal_call
        from bridge.targets.onnx.export.calls.pairs import pair_call
        from bridge.targets.onnx.export.calls.sound import sound_call
        from bridge.targets.onnx.export.calls.text import text_call

        task, dtype = tasks()[self.task], getattr(torch, self.dtype)
        if self.part:
            several = part_call if "encoder" in task.parts else multimodal_call
            return several(model, task, self.part, mode, dtype, self.image)
        if "pixel_mask" in task.inputs:
            return question_call(model, task, mode, dtype)
        if task.pairs:
            return pair_call(model, task, mode, dtype, self.image)
        if model.main_input_name == "pixel_values":
            return image_call(model, task, mode, dtype, self.image)
        if model.main_input_name in ("input_values", "input_features"):
            return sound_call(model, task, mode, dtype)
        return text_call(model, task, mode, dtype, cache=self.cache, pooling=self.pooling)

    def _finish(self, model: ir.Model, tied: dict[str, str], note: str) -> Graph:
        model.ir_version = IR_VERSIONS[self.opset]
        model.producer_name, model.producer_version = "bridge", ""
        expand(model)
        values = model.graph.initializers
        for alias, name in tied.items():
            if alias in values and name not in values:
                value = values.pop(alias)
                value.name = name
                values[name] = value
        name_by_structure(model)
        weights = {name: name for name, value in values.items() if value.const_value is None}
        text = None if is_diffusion(self.config) else self.config.get_text_config()
        entries = {name: getattr(text, name) for name in TEXT if hasattr(text, name)}
        entries |= {name: getattr(self.config, name) for name in PLACES if hasattr(self.config, name)}
        tower = getattr(self.config, "vision_config", None)
        entries |= {name: getattr(tower, name) for name in PATCHES if hasattr(tower, name)}
        return Graph(model, weights, note, {alias: name for alias, name in tied.items() if name in weights}, entries)


def _ties(model: Any) -> dict[str, str]:
    """Alias -> the name in a checkpoint: by transformers' table of ties if it lists one, else the first name."""
    stored = getattr(model, "all_tied_weights_keys", None) or {}
    tied: dict[str, str] = {}
    for parameters in grouped(model.named_parameters(remove_duplicate=False), lambda named: id(named[1])):
        names = [name for name, _ in parameters]
        source = next((n for n in names if n not in stored), names[0])
        tied.update({n: source for n in names if n != source})
    return tied


def _name(model: ir.Model, call: Any) -> None:
    """Give inputs, outputs, axes and initializers the names that users know; drop the data of fake tensors."""
    graph = model.graph
    if len(graph.inputs) != len(call.inputs) or len(graph.outputs) != len(call.outputs):
        raise ExportError(
            f"torch exported {len(graph.inputs)} inputs and {len(graph.outputs)} outputs, expected "
            f"{len(call.inputs)} and {len(call.outputs)}: the architecture drops or repeats some; use target hf"
        )
    symbols: dict[str, str] = {}
    for value, (name, axes) in zip(graph.inputs, call.inputs.items(), strict=True):
        for dim, axis in zip(value.shape or (), axes, strict=True):
            if isinstance(axis, str) and isinstance(dim, ir.SymbolicDim) and dim.value:
                symbols.setdefault(dim.value, axis)
        value.name = name
        value.shape = ir.Shape(axes)
    for node in graph:
        for value in node.outputs:
            _rename_axes(value, symbols)
    for value, (name, axes) in zip(graph.outputs, call.outputs.items(), strict=True):
        value.name = name
        value.shape = ir.Shape(axes)
    for old in list(graph.initializers):
        value = graph.initializers.pop(old)
        value.name = old.removeprefix(_PREFIX)
        if _is_fake(value.const_value):
            value.const_value = None
        graph.initializers[value.name] = value


def _rename_axes(value: ir.Value, symbols: dict[str, str]) -> None:
    if value.shape is None:
        return
    dims: list[Any] = []
    for dim in value.shape:
        text = getattr(dim, "value", dim)
        if isinstance(text, str):
            text = re.sub(r"[A-Za-z_]\w*", lambda m: symbols.get(m.group(), m.group()), text)
            if sorted(text.split(" + ")) == ["past_sequence", "sequence"]:
                text = "total_sequence"
        dims.append(text)
    value.shape = ir.Shape(dims)


def _is_fake(tensor: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    raw = getattr(tensor, "raw", None)
    return isinstance(raw, FakeTensor) or isinstance(getattr(raw, "data", None), FakeTensor)


def optimize(model: ir.Model) -> None:
    """Fold constants and rewrite without reading weights; ExportError if a weight is lost."""
    from onnxscript.optimizer import optimize_ir

    before = {n for n, v in model.graph.initializers.items() if v.const_value is None and v.uses()}
    optimize_ir(model)
    lost = before - set(model.graph.initializers)
    if lost:
        raise ExportError(f"the optimizer lost weights: {', '.join(sorted(lost))}; use target hf")


def _mark(model: ir.Model, call: Any) -> None:
    """Keep only the module's name of the exporter's metadata; the rest has local paths and stack traces.

    K and V are marked where they leave the cache; outputs that only served to find them are dropped.
    """
    import ast

    graph = model.graph
    for node in graph:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
        node.metadata_props.clear()
        node.doc_string = None
        if len(scopes) > 1:
            # torch's hook for the input shapes is not a module
            module = scopes[-2].removeprefix(_PREFIX)
            node.metadata_props[MODULE] = "" if module.startswith("_empty_nn_module") else module
        for value in node.outputs:
            value.metadata_props.clear()
            value.doc_string = None
    for value in (*graph.inputs, *graph.initializers.values()):
        value.metadata_props.clear()
    for value, name in zip(list(graph.outputs), call.outputs, strict=True):
        if SLOT.fullmatch(name):
            value.metadata_props[KV] = name.removeprefix("present.")
        if name in call.taps:
            graph.outputs.remove(value)
    graph.metadata_props.clear()
    model.metadata_props.clear()


def _short(error: BaseException) -> str:
    """Up to two lines of torch's reason, which is a page with a stack trace and advice for torch's developers."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: " + " ".join(lines[:2])[:300]
