"""Run a written model in ONNX Runtime on the CPU.

`Runtime` turns graph optimizations off: with them FP8 and INT8 codes flip at ties, and weight-only INT8 / INT4 get
kernels with quantized activations (1e-2 error). Graphs that lack CPU kernels (bfloat16, FP4), and float16 graphs, run
as a float32 copy: the same codes and scales, float32 everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.errors import CannotRun, VerifyError, first_line
from bridge.core.version import install
from bridge.targets.generation import Chooser, Settings

PAST, PRESENT = "past_key_values.", "present."
WRITE_INDICES = "write_indices"  # input of decoders whose caches are buffers: the place of each row's first new token
TRT = "trt"  # TensorRT's own domain: FP4 and MXFP8 activations, E8M0 scales
FEEDS = {"tensor(int64)": "int64", "tensor(float)": "float32", "tensor(int32)": "int32", "tensor(bool)": "bool"}


class Runtime:
    """A written model, loaded. `substitute` says why a float32 copy runs instead of the file ("" if the file runs).

    >>> Runtime("tiny-llama-fp8").generate(np.array([[1, 2, 3]]), max_new_tokens=8).shape  # doctest: +SKIP
    (1, 11)
    """

    def __init__(self, path: str | Path, *, taps: Sequence[str] = (), outputs: bool = True) -> None:
        """Load `model.onnx` of a directory, or an .onnx file.

        `taps`: inner values to return as well, or instead of the model's `outputs`, which are not computed then.
        """
        file = Path(path)
        file = file / "model.onnx" if file.is_dir() else file
        self.session, self.substitute = open_session(file, taps, outputs=outputs)
        self.inputs = {i.name: i for i in self.session.get_inputs()}
        self.outputs = [o.name for o in self.session.get_outputs()]

    @property
    def cached(self) -> bool:
        """True if the model is a decoder with `past_key_values` inputs."""
        return any(name.startswith(PAST) for name in self.inputs)

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run once. Decoders get empty caches, full masks and consecutive positions if `feeds` lacks them."""
        given = {name: array for name, array in feeds.items() if name in self.inputs}
        full = {n: a.astype(FEEDS.get(self.inputs[n].type, a.dtype), copy=False) for n, a in given.items()}
        self._complete(full)
        missing = [name for name in self.inputs if name not in full]
        if missing:
            raise VerifyError(f"inputs {', '.join(missing)} are missing; given: {', '.join(feeds)}")
        try:
            return dict(zip(self.outputs, self.session.run(self.outputs, full), strict=True))
        except Exception as error:  # onnxruntime raises its own unrelated classes
            raise VerifyError(f"ONNX Runtime cannot run it: {first_line(error)}") from error

    def generate(self, input_ids: np.ndarray, max_new_tokens: int, stop: int | None = None) -> np.ndarray:
        """Greedy decoding: [batch, sequence] token ids in, the same with up to `max_new_tokens` appended out."""
        tokens = np.asarray(input_ids, np.int64)
        feeds: dict[str, np.ndarray] = {"input_ids": tokens}
        for _ in range(max_new_tokens):
            out = self.run(feeds)
            new = out["logits"][:, -1].argmax(-1).astype(np.int64)[:, None]
            tokens = np.concatenate([tokens, new], axis=1)
            if stop is not None and (new == stop).all():
                break
            if self.cached:
                feeds = {"input_ids": new, **past_of(out), "attention_mask": np.ones_like(tokens)}
                feeds["position_ids"] = np.full_like(new, tokens.shape[1] - 1)
                feeds[WRITE_INDICES] = np.full(len(new), tokens.shape[1] - 1)
            else:
                feeds = {"input_ids": tokens}
        return tokens

    def _complete(self, feeds: dict[str, np.ndarray]) -> None:
        first = feeds.get("input_ids", feeds.get("inputs_embeds"))
        if first is None:
            return
        batch, length = first.shape[:2]
        own = (name for name in feeds if name.startswith(PAST) and name.endswith(".key") and ".encoder." not in name)
        past = next((feeds[name].shape[2] for name in own), 0)
        places = feeds.get(WRITE_INDICES)
        if WRITE_INDICES in self.inputs:
            past = 0 if places is None else int(places.max())
        for name, entry in self.inputs.items():
            if name in feeds:
                continue
            if name == "attention_mask":
                feeds[name] = np.ones((batch, past + length), np.int64)
            elif name == "position_ids":
                feeds[name] = _positions(feeds.get("attention_mask"), batch, past, length, places)
            elif name in ("token_type_ids", "global_attention_mask"):
                feeds[name] = np.zeros((batch, length), np.int64)
            elif name.startswith(PAST):
                feeds[name] = np.zeros(empty_extents(entry.shape, batch), np.float32)
        if WRITE_INDICES in self.inputs:
            from bridge.targets.onnx.run.buffers import fill_buffers

            fill_buffers(feeds, self.inputs["attention_mask"].shape[1])


def past_of(outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a decoder keeps of earlier tokens, by the names under which the next step reads it."""
    return {n.replace(PRESENT, PAST): array for n, array in outputs.items() if n.startswith(PRESENT)}


def runs_of(substitute: str) -> str:
    """What runs of several graphs and in which program. `substitute`: of their `Runtime`."""
    import onnxruntime

    files = f"a float32 copy of the files ({substitute})" if substitute else "the files themselves"
    return f"{files} in ONNX Runtime {onnxruntime.__version__}, without optimizations"


def empty_extents(axes: Sequence[str | int], batch: int) -> tuple[int, ...]:
    """Extents of what a decoder keeps before the first token: caches are empty, states whole."""
    return (batch, *(axis if isinstance(axis, int) else 0 for axis in axes[1:]))


def open_session(
    file: Path, taps: Sequence[str] = (), *, outputs: bool = True, optimize: bool = False
) -> tuple[Any, str]:
    """Open an .onnx file, or a float32 copy of it; also return why it is a copy ("" if it is the file).

    `optimize`: with ONNX Runtime's default optimizations, but activations stay unquantized if the file has them so.
    Otherwise memory is given back after each run, for large vocabularies: gigabytes lay there while others ran.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise CannotRun(f"running a model needs onnxruntime: {install('trt')}") from error
    options = onnxruntime.SessionOptions()
    if optimize:
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    else:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_cpu_mem_arena = False
    options.log_severity_level = 3
    model, substitute = _runnable(file, taps, outputs, ("BFLOAT16",) if optimize else ("BFLOAT16", "FLOAT16"))
    if model is not None:
        folder = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(folder, str(file.parent))
    try:
        session = onnxruntime.InferenceSession(model or str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own unrelated classes
        raise VerifyError(f"{file}: ONNX Runtime cannot load it: {first_line(error)}") from error
    return session, substitute


def _positions(
    mask: np.ndarray | None, batch: int, past: int, length: int, places: np.ndarray | None = None
) -> np.ndarray:
    """Positions count unmasked tokens only, so left padding takes none. places: of each row's first new token."""
    if mask is None:
        return np.tile(np.arange(past, past + length, dtype=np.int64), (batch, 1))
    positions: np.ndarray = np.maximum(mask.cumsum(-1) - 1, 0)
    if places is None:
        return positions[:, -length:].astype(np.int64)
    return np.take_along_axis(positions, places[:, None] + np.arange(length), axis=1).astype(np.int64)


def _runnable(file: Path, taps: Sequence[str], outputs: bool, halves: Sequence[str]) -> tuple[bytes | None, str]:
    """The bytes to load instead of the file and why; (None, "") if the file itself runs.

    `outputs`: whether the model's own remain. `halves`: dtypes whose graphs are widened.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    try:
        model = ir.load(file)
    except Exception as error:  # protobuf's and onnx_ir's errors have no common base
        raise VerifyError(f"{file}: not a readable ONNX file: {first_line(error)}") from error
    reason = _reason(model, halves)
    if not reason and not taps:
        return None, ""
    if reason:
        _to_float32(model)
    values = {v.name: v for node in model.graph for v in node.outputs}
    if taps and not outputs:
        model.graph.outputs.clear()
    model.graph.outputs.extend(values[name] for name in taps)
    RemoveUnusedNodesPass()(model)
    return ir.to_proto(model).SerializeToString(), reason


def _reason(model: Any, halves: Sequence[str]) -> str:
    if any(node.domain == TRT for node in model.graph):
        raise CannotRun(
            "the graph has TensorRT's own ops, which ONNX Runtime cannot run; its weights are compared instead"
        )
    from bridge.targets.onnx.widen import is_widened

    known = [value for value in model.graph.initializers.values() if value.dtype is not None]
    kinds = {value.dtype.name for value in known}
    if any(value.dtype.name in halves and not is_widened(value) for value in known):
        return "half-precision graph"
    return "FP4 codes" if "FLOAT4E2M1" in kinds else ""


def _to_float32(model: Any) -> None:
    """Turn a half graph into float32 in place and FP4 weights into values; codes and scales stay as they are."""
    import onnx_ir as ir

    from bridge.targets.onnx.widen import HALVES, widen

    half = set(HALVES)
    stored = [value for value in model.graph.initializers.values() if value.dtype in half]
    moved = [moved for value in stored for moved in widen(model.graph, value, "float32")]
    for node in list(model.graph):
        for key in ("to", "output_dtype", "dtype"):
            attribute = node.attributes.get(key)
            is_number = attribute is not None and attribute.type == ir.AttributeType.INT
            if is_number and attribute.value in {int(h) for h in half}:
                node.attributes[key] = ir.AttrInt64(key, int(ir.DataType.FLOAT))
        for attribute in list(node.attributes.values()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in half:
                tensor = ir.tensor(attribute.value.numpy().astype(np.float32), name=attribute.value.name)
                node.attributes[attribute.name] = ir.AttrTensor(attribute.name, tensor)
        if node.op_type == "DequantizeLinear" and node.inputs[0].dtype == ir.DataType.FLOAT4E2M1:
            _unpack_fp4(model, node)
    for value in [*model.graph.inputs, *(v for node in model.graph for v in node.outputs)]:
        if value.dtype in half and value not in moved:
            value.dtype = ir.DataType.FLOAT


def _unpack_fp4(model: Any, node: Any) -> None:
    """Replace codes by values and DequantizeLinear by blocks times scale, since ONNX Runtime has no FP4 kernels."""
    import onnx_ir as ir

    codes, scale = node.inputs[0], node.inputs[1]
    axis, block = node.attributes["axis"].as_int(), node.attributes["block_size"].as_int()
    numbers = codes.const_value.numpy().astype(np.float32)
    values = ir.val(f"{codes.name}/float32", const_value=ir.tensor(numbers, name=f"{codes.name}/float32"))
    block_of = np.repeat(np.arange(codes.shape[axis] // block, dtype=np.int64), block)
    index = ir.val(f"{codes.name}/blocks", const_value=ir.tensor(block_of, name=f"{codes.name}/blocks"))
    for value in (values, index):
        model.graph.register_initializer(value)
    spread = ir.node("Gather", [scale, index], {"axis": axis}, outputs=[ir.val(f"{codes.name}/scales")])
    product = ir.node("Mul", [values, spread.outputs[0]], outputs=[ir.val(f"{codes.name}/values", ir.DataType.FLOAT)])
    model.graph.insert_before(node, [spread, product])
    ir.convenience.replace_all_uses_with(node.outputs[0], product.outputs[0])
    model.graph.remove(node, safe=True)
    del model.graph.initializers[codes.name]


FLOATS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class Generator:
    """See `bridge.targets.generation.Generator`."""

    def __init__(self, directory: Path) -> None:
        import onnxruntime

        self._session, substitute = open_session(directory / "model.onnx", optimize=True)
        file = f"a float32 copy of the file ({substitute})" if substitute else "the file itself"
        self.runs = f"{file} in ONNX Runtime {onnxruntime.__version__}"
        self._inputs = {value.name: value for value in self._session.get_inputs()}
        self._caches = [name for name in self._inputs if name.startswith(PAST)]
        self._outputs = [value.name for value in self._session.get_outputs()]
        if "input_ids" not in self._inputs or "logits" not in self._outputs:
            raise CannotRun("the graph has no inputs and outputs of a language model: input_ids, logits")

    def generate(self, ids: Sequence[int], settings: Settings) -> Iterator[int]:
        chooser = Chooser(settings)
        tokens, given = list(ids), 0
        caches = self._empty()
        for _ in range(settings.tokens):
            logits, caches = self._run(tokens, given, caches)
            token = chooser.choose(logits)
            yield token
            if token in settings.stop:
                return
            given = len(tokens) if self._caches else 0
            tokens.append(token)

    def _run(self, tokens: list[int], given: int, caches: dict[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
        """Run the tokens after the first `given`; the logits of the last, and the caches for the next run."""
        binding = self._session.io_binding()
        feeds = {
            "input_ids": np.array([tokens[given:]], np.int64),
            "attention_mask": np.ones((1, len(tokens)), np.int64),
            "position_ids": np.arange(given, len(tokens), dtype=np.int64)[None],
        }
        if WRITE_INDICES in self._inputs:
            from bridge.targets.onnx.run.buffers import fill_buffers

            feeds[WRITE_INDICES] = np.array([given], np.int64)
            fill_buffers(feeds, self._inputs["attention_mask"].shape[1])
        for name in self._inputs:
            if name in caches:  # the output of the last run, not copied
                binding.bind_ortvalue_input(name, caches[name])
            else:
                binding.bind_cpu_input(name, feeds[name])
        for name in self._outputs:
            binding.bind_output(name, "cpu")
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime raises its own unrelated classes
            raise VerifyError(f"ONNX Runtime cannot run it: {first_line(error)}") from error
        outputs = dict(zip(self._outputs, binding.get_outputs(), strict=True))
        following = {name: outputs[name.replace(PAST, PRESENT)] for name in self._caches}
        return outputs["logits"].numpy()[0, -1], following

    def _empty(self) -> dict[str, Any]:
        from onnxruntime import OrtValue

        empty = {}
        for name in self._caches:
            value = self._inputs[name]
            empty[name] = OrtValue.ortvalue_from_numpy(np.zeros(empty_extents(value.shape, 1), FLOATS[value.type]))
        return empty
