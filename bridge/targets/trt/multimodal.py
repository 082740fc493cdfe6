"""Run the graphs of a model that sees, in ONNX Runtime.

`vision.onnx` makes features of images, `embedding.onnx` puts them into the text, and `decoder.onnx` continues it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from bridge.core.errors import VerifyError
from bridge.core.text import number
from bridge.targets.generation import Chooser, Settings
from bridge.targets.trt.files import DECODER, EMBEDDING, VISION
from bridge.targets.trt.genai_config import GENAI
from bridge.targets.trt.runtime import PAST, PRESENT, Runtime

Arrays = dict[str, np.ndarray]
EMBEDS, FEATURES = "inputs_embeds", "image_features"


class MultiModal:
    """A written model of several graphs, loaded. `substitute`: see `Runtime`.

    >>> MultiModal(Path("llava-fp8")).run({"input_ids": ids, "pixel_values": pixels})["logits"].shape  # doctest: +SKIP
    (1, 593, 32064)
    """

    def __init__(self, directory: Path) -> None:
        self.vision, self.embedding = Runtime(directory / VISION), Runtime(directory / EMBEDDING)
        self.decoder = Runtime(directory / DECODER)
        self.substitute = self.vision.substitute or self.embedding.substitute or self.decoder.substitute
        self.outputs = self.decoder.outputs
        self.token = int(json.loads((directory / GENAI).read_text())["model"]["image_token_id"])
        self.width = int(self.embedding.inputs[FEATURES].shape[-1])

    def run(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """Run the graphs once, with transformers' names of inputs, and `past_key_values.N.key` of earlier tokens."""
        return self.decoder.run(self.feeds(feeds)[DECODER])

    def feeds(self, inputs: Mapping[str, np.ndarray]) -> dict[str, Mapping[str, np.ndarray]]:
        """What each graph is fed of transformers' inputs; all but the decoder run."""
        seen = {name: array for name, array in inputs.items() if name in self.vision.inputs}
        features = self.features(seen)
        ids = inputs["input_ids"]
        places = int((ids == self.token).sum())
        if places != len(features):
            raise VerifyError(
                f"the text has {number(places, 'image token')} (id {self.token}), and the images make "
                f"{number(len(features), 'row')} of features; give as many tokens as the processor does"
            )
        embedding = {"input_ids": ids, FEATURES: features}
        read = {name: array for name, array in inputs.items() if name in self.decoder.inputs}
        decoder = {**read, EMBEDS: self.embedding.run(embedding)[EMBEDS]}
        return {**({VISION: seen} if seen else {}), EMBEDDING: embedding, DECODER: decoder}

    def features(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Features of images, one row an image token; no row without images."""
        if not inputs:
            return np.zeros((0, self.width), np.float32)
        for name, array in inputs.items():
            axes = self.vision.inputs[name].shape
            if any(isinstance(axis, int) and axis != n for axis, n in zip(axes, array.shape, strict=False)):
                raise VerifyError(
                    f"{name} is {array.shape}, and {VISION} takes {tuple(axes)}: its images have one size, that of the "
                    "checkpoint's config or processor"
                )
        return self.vision.run(inputs)[FEATURES]

    def step(self, inputs: Mapping[str, np.ndarray], past: Arrays) -> tuple[np.ndarray, Arrays]:
        """Logits of the last token of `inputs`, and the cache for the next step."""
        out = self.run({**inputs, **past})
        return out["logits"][:, -1], {n.replace(PRESENT, PAST): a for n, a in out.items() if n.startswith(PRESENT)}


def first_rows(directory: Path, batch: Mapping[str, np.ndarray]) -> dict[Path, Mapping[str, np.ndarray]]:
    """Graph -> what it is fed of the first row of a batch, of the first image."""
    return {
        directory / file: {name: array[:1] for name, array in feeds.items()}
        for file, feeds in MultiModal(directory).feeds(batch).items()
        if file != EMBEDDING
    }


class MultiModalGenerator:
    """See `bridge.targets.generation.Generator`: continues a text with images in it."""

    def __init__(self, directory: Path) -> None:
        import onnxruntime

        self.model = MultiModal(directory)
        why = self.model.substitute
        file = f"a float32 copy of the files ({why})" if why else "the files themselves"
        self.runs = f"{file} in ONNX Runtime {onnxruntime.__version__}, without optimizations"
        self._seen: Mapping[str, np.ndarray] = {}

    def look(self, inputs: Mapping[str, np.ndarray]) -> None:
        """See `bridge.targets.generation.Seeing`."""
        self._seen = inputs

    def generate(self, ids: Sequence[int], settings: Settings) -> Iterator[int]:
        chooser, past = Chooser(settings), Arrays()
        inputs: Mapping[str, np.ndarray] = {**self._seen, "input_ids": np.array([ids], np.int64)}
        for _ in range(settings.tokens):
            logits, past = self.model.step(inputs, past)
            token = chooser.choose(logits[0])
            yield token
            if token in settings.stop:
                return
            inputs = {"input_ids": np.array([[token]], np.int64)}
