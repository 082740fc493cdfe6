"""Run a written checkpoint, dequantized, in the class of its model.

That is a class of `transformers` or `diffusers`, which also generates.

This tests names, layouts, scales, pre-scales and folded norms together. Activations and the KV cache are not quantized;
`substitute` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.dtypes import DTYPES, from_float32, to_float32
from bridge.core.errors import BridgeError, CannotRun
from bridge.core.output.names import GENERATION
from bridge.core.values import TensorSpec
from bridge.planning.memory import extent
from bridge.planning.plan import Layout, Output, Plan, Step
from bridge.quant.codec.decode import decode
from bridge.sources.config_json import read_json
from bridge.sources.configs.diffusion import is_diffusion, with_architecture
from bridge.sources.source import Source
from bridge.streaming.experts import decode_experts
from bridge.streaming.written import OutputReader
from bridge.targets.generation import READS, TRANSCRIBES, Settings, from_thread
from bridge.targets.hf.shards import names_of
from bridge.targets.tasks import classes_of


class Rebuilt:
    """A written checkpoint, dequantized into the source's names, shapes and dtypes, for `load_model`."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self.where = str(directory)
        config = read_json(directory / names_of(plan.files).at("config.json"))
        plain = {key: config[key] for key in config if key != "quantization_config"}
        self.config: Mapping[str, Any] = with_architecture(plain) if is_diffusion(plain) else plain
        self._output = OutputReader(plan, directory)
        steps = [step for step in plan.steps if step.layout is not Layout.SCALES]
        self._steps: dict[str, Step] = {}
        self._experts: dict[str, list[Step]] = {}  # stack -> the steps of the matrices that were cut from it
        for step in steps:
            if step.inputs[0].expert is not None:
                self._experts.setdefault(step.source, []).append(step)
            else:
                self._steps[self._name(step)] = step
        sources = [(name, plan.sources[step.source]) for name, step in self._steps.items()]
        sources += [(name, plan.sources[name]) for name in self._experts]
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(name, source.shape, source.dtype) for name, source in sources
        }

    def read(self, name: str) -> np.ndarray:
        """The storage array of one tensor: unchanged from the file, or dequantized into the source's dtype."""
        spec = self.specs[name]
        if name in self._experts:
            return self._stack(spec, self._experts[name])
        step = self._steps[name]
        outputs = {output.part: output for output in step.outputs}
        (whole,) = step.inputs
        if step.layout is not Layout.PLAIN:
            shape = spec.shape[::-1] if whole.transposed else spec.shape
            values = self._values(step, outputs, shape)
            return from_float32(np.ascontiguousarray(values.T if whole.transposed else values), spec.dtype)
        array, written = self._output.read(outputs["weight"]), outputs["weight"].spec.dtype
        array = np.ascontiguousarray(array.T) if whole.transposed else array
        return array if written == spec.dtype else from_float32(to_float32(array, written), spec.dtype)

    def _stack(self, spec: TensorSpec, steps: list[Step]) -> np.ndarray:
        """The storage array of experts that were written as matrices of their own."""
        whole = np.empty(spec.shape, DTYPES[spec.dtype].storage)
        for step in steps:
            (part,) = step.inputs
            shape = extent(part, {spec.name: spec})
            values = self._values(step, {output.part: output for output in step.outputs}, shape)
            array = from_float32(np.ascontiguousarray(values.T if part.transposed else values), spec.dtype)
            rows, cols = (slice(*(ends or (None,))) for ends in (part.rows, part.cols))
            whole[part.expert, rows, cols] = array
        return whole

    def _values(self, step: Step, outputs: Mapping[str, Output], shape: tuple[int, ...]) -> np.ndarray:
        """float32, in the axes that were coded; times the pre-scale, because the model's input is not multiplied."""
        assert step.format and step.site
        arrays = {("codes" if part == "weight" else part): self._output.read(out) for part, out in outputs.items()}
        if step.layout is Layout.EXPERTS:
            return decode_experts(step, arrays, shape)
        if step.site.stacked:  # experts under one scale: their values are rows of one matrix
            flat = (shape[0], math.prod(shape[1:]))
            return decode(arrays, step.format.weight, flat, coding=step.coding).reshape(shape)
        layout = "out_in" if step.inputs[0].transposed else step.site.layout
        values = decode(arrays, step.format.weight, shape, layout=layout, transpose=step.transpose, coding=step.coding)
        if "pre_quant_scale" in outputs:
            scale = to_float32(arrays["pre_quant_scale"], outputs["pre_quant_scale"].spec.dtype)
            values = values * (scale[:, None] if layout == "in_out" else scale)
        return values

    @staticmethod
    def _name(step: Step) -> str:
        return step.site.weight if step.site and step.layout is not Layout.PLAIN else step.outputs[0].spec.name


class Runtime:
    """See `bridge.targets.target.Runnable`."""

    def __init__(self, directory: Path) -> None:
        from bridge.targets.manifest import load_manifest

        self.outputs = ["output 0"]
        plan = load_manifest(directory).plan
        try:
            from bridge.calibration.reference_outputs import proving
            from bridge.sources.live_models.loading import load_model

            rebuilt: Any = Rebuilt(directory, plan)  # all of a Source that loading reads
            self.model = load_model(rebuilt)
            self._run = proving(self.model)
        except ImportError as error:
            raise CannotRun(f"running a checkpoint needs torch and transformers: {error}") from error
        except BridgeError as error:
            raise CannotRun(f"the written checkpoint does not load: {error}") from error
        substitute = "its weights, dequantized, in the transformers model; activations and KV cache are not quantized"
        self.substitute = substitute if plan.quantized else ""

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run once; the first output, in float32."""
        import torch

        batch = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in feeds.items()}
        return {self.outputs[0]: self._run(batch).float().numpy()}


class Generator:
    """See `bridge.targets.generation.Generator`."""

    def __init__(self, model: Any, directory: Path, decoded: bool = False) -> None:
        self.runs = "its weights, dequantized, in transformers" if decoded else "its weights in transformers"
        self.model = model
        if type(self.model).__name__ in classes_of(TRANSCRIBES) and (directory / GENERATION).is_file():
            from transformers import GenerationConfig

            # names the languages, and what is never written
            self.model.generation_config = GenerationConfig.from_pretrained(directory)
        self._seen: dict[str, Any] = {}

    @classmethod
    def of_output(cls, directory: Path) -> Generator:
        """Load a checkpoint that this target wrote."""
        runtime = Runtime(directory)
        return cls(runtime.model, directory, bool(runtime.substitute))

    @classmethod
    def of_source(cls, source: Source, directory: Path) -> Generator:
        """Load a checkpoint that is a source."""
        try:
            return cls(source.load_model(), directory)
        except ImportError as error:
            raise CannotRun(f"running a checkpoint needs torch and transformers: {error}") from error

    def look(self, inputs: Mapping[str, np.ndarray]) -> None:
        """See `bridge.targets.generation.Seeing`."""
        import torch

        tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
        self._seen = {n: t.to(self.model.dtype) if t.is_floating_point() else t for n, t in tensors.items()}

    def generate(self, ids: Sequence[int], settings: Settings) -> Iterator[int]:
        return from_thread(lambda hand: self._work(list(ids), settings, hand))

    def _work(self, ids: list[int], settings: Settings, hand: Callable[[int], bool]) -> None:
        import torch

        stream = _Stream(hand)

        def stopped(tokens: Any, *_: Any, **__: Any) -> Any:
            return torch.full((len(tokens),), stream.stopped, dtype=torch.bool)

        sampling = {"temperature": settings.temperature, "top_k": 0, "top_p": 1.0} if settings.temperature else {}
        torch.manual_seed(settings.seed)
        # of a model that reads an image or a sound alone, a prompt is what the decoder has written so far
        alone = type(self.model).__name__ in classes_of(READS, TRANSCRIBES)
        name = "decoder_input_ids" if alone else "input_ids"
        prompt = {name: torch.tensor([ids])} if ids else {}
        self.model.generate(
            **prompt, max_new_tokens=settings.tokens, do_sample=bool(sampling), streamer=stream,
            stopping_criteria=[stopped], eos_token_id=sorted(settings.stop) or None, pad_token_id=0,
            **self._seen, **sampling,
        )  # fmt: skip


class _Stream:
    """What transformers hands tokens to: the prompt first, then each new token."""

    def __init__(self, hand: Callable[[int], bool]) -> None:
        self._hand, self._begun, self.stopped = hand, False, False

    def put(self, tokens: Any) -> None:
        if self._begun:
            self.stopped = self._hand(int(tokens.flatten()[0]))
        self._begun = True

    def end(self) -> None:
        """Nothing is left to hand over."""
