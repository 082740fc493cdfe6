"""Run the graphs of a decoder that reads images by cross-attention.

Llama 3.2 Vision. What `vision.onnx` calls `present.N.encoder.key` the decoder takes as `past_key_values.N.encoder.key`,
at every step the same. A text alone has zeros in their place and none of it reads them: then these layers change
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bridge.targets.onnx.files import DECODER, EMBEDDING
from bridge.targets.onnx.names import GENAI
from bridge.targets.onnx.run.multimodal import Arrays, MultiModal
from bridge.targets.onnx.run.runtime import PAST, PRESENT

MASK = "cross_attention_mask"  # batch, tokens, images, tiles: 1 where a token reads a tile
CROSSED = ".encoder."  # in names of keys and values of cross-attention


def load_multimodal(directory: Path) -> MultiModal:
    """Load a written model that sees or hears.

    >>> load_multimodal(Path("llama-vision-fp8")).run({"input_ids": ids})["logits"].shape  # doctest: +SKIP
    (1, 17, 128256)
    """
    joined = json.loads((directory / GENAI).read_text())["model"]
    crosses = MASK in joined.get("decoder", {}).get("inputs", {})
    return CrossAttending(directory) if crosses else MultiModal(directory)


class CrossAttending(MultiModal):
    """See `MultiModal`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        joined = json.loads((directory / GENAI).read_text())["model"]
        self.positions = int(joined["decoder"]["image_positions"])

    def feeds(self, inputs: Mapping[str, np.ndarray]) -> dict[str, Mapping[str, np.ndarray]]:
        seen = {name: array for name, array in inputs.items() if name in self.tower.inputs}
        embedding = {"input_ids": inputs["input_ids"]}
        decoder = {name: array for name, array in inputs.items() if name in self.decoder.inputs}
        if seen:
            decoder |= {n.replace(PRESENT, PAST): array for n, array in self.tower.run(seen).items()}
        elif not any(CROSSED in name for name in decoder):
            decoder |= self._nothing(inputs["input_ids"])
        decoder |= self.embedding.run(embedding)
        return {**({self.file: seen} if seen else {}), EMBEDDING: embedding, DECODER: decoder}

    def _nothing(self, ids: np.ndarray) -> Arrays:
        """An image of zeros that no token reads: ONNX Runtime shares no heads among keys without positions."""
        shapes = {name: value.shape for name, value in self.decoder.inputs.items() if CROSSED in name}
        zeros = {n: np.zeros((len(ids), s[1], self.positions, s[3]), np.float32) for n, s in shapes.items()}
        return {**zeros, MASK: np.zeros((*ids.shape, 1, int(self.decoder.inputs[MASK].shape[3])), np.int64)}

    def kept(self, feeds: Mapping[str, np.ndarray], out: Arrays) -> Arrays:
        crossed = {name: array for name, array in feeds.items() if CROSSED in name}
        return {**super().kept(feeds, out), **crossed, MASK: feeds[MASK][:, -1:]}
