"""Run the graphs of a model that sees or hears.

`vision.onnx` or `speech.onnx` makes features, `embedding.onnx` puts them into the text, `decoder.onnx` continues it;
all in ONNX Runtime.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from bridge.core.errors import VerifyError
from bridge.core.text import number
from bridge.targets.generation import Chooser, Settings
from bridge.targets.onnx.files import DECODER, EMBEDDING, GENAI, SPEECH, VISION
from bridge.targets.onnx.run.runtime import Runtime, past_of, runs_of
from bridge.targets.onnx.run.tiles import COUNTS, SIZES, tiling_of

Arrays = dict[str, np.ndarray]
GRID, EXTENTS = "image_grid_thw", "spatial_shapes"  # of images in patches
MASK = "cross_attention_mask"  # batch, tokens, images, tiles: 1 where a token reads a tile
CROSSED = ".encoder."  # in names of keys and values of cross-attention


class MultiModal:
    """A written model of several graphs, loaded. `substitute`: see `Runtime`.

    >>> MultiModal(Path("llava-fp8")).run({"input_ids": ids, "pixel_values": pixels})["logits"].shape  # doctest: +SKIP
    (1, 593, 32064)
    """

    def __init__(self, directory: Path) -> None:
        joined = json.loads((directory / GENAI).read_text())["model"]
        self.kind = "image" if "image_token_id" in joined else "audio"
        self.file = VISION if self.kind == "image" else SPEECH
        self.tower, self.embedding = Runtime(directory / self.file), Runtime(directory / EMBEDDING)
        self.decoder = Runtime(directory / DECODER)
        self.substitute = self.tower.substitute or self.embedding.substitute or self.decoder.substitute
        self.outputs = self.decoder.outputs
        self.token = int(joined[f"{self.kind}_token_id"])
        self.merge = int(joined.get("vision", {}).get("spatial_merge_size", 1))
        self.tiling = tiling_of(joined.get("vision", {}))

    def run(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """Run the graphs once, with transformers' names of inputs, and `past_key_values.N.key` of earlier tokens."""
        return self.decoder.run(self.feeds(feeds)[DECODER])

    def feeds(self, inputs: Mapping[str, np.ndarray]) -> dict[str, Mapping[str, np.ndarray]]:
        """What each graph is fed of transformers' inputs; all but the decoder run."""
        seen, ids = self.read(inputs), inputs["input_ids"]
        features = self.features(seen)
        self._check_tokens(ids, len(features[f"{self.kind}_features"]))
        embedding = {"input_ids": ids, **features}
        read = {name: array for name, array in inputs.items() if name in self.decoder.inputs}
        if (three := self.places(inputs)) is not None:
            read["position_ids"] = three
        decoder = {**read, **self.embedding.run(embedding)}
        return {**({self.file: seen} if seen else {}), EMBEDDING: embedding, DECODER: decoder}

    def _check_tokens(self, ids: np.ndarray, rows: int) -> None:
        if (tokens := int((ids == self.token).sum())) != rows:
            raise VerifyError(
                f"the text has {number(tokens, f'{self.kind} token')} (id {self.token}), and what {self.file} reads "
                f"makes {number(rows, 'row')} of features; give as many tokens as the processor does"
            )

    def first_row(self, inputs: Mapping[str, np.ndarray], positions: int) -> dict[str, Arrays]:
        """What the tower is fed of the first image or sound, and the decoder of the first tokens of the first row."""
        feeds = self.feeds(inputs)
        seen = {self.file: self._apart(feeds[self.file])[0]} if self.file in feeds else {}
        graphs = {self.file: self.tower, DECODER: self.decoder}
        return {
            file: {name: _cut(array, graphs[file].inputs[name].shape, positions) for name, array in given.items()}
            for file, given in {**seen, DECODER: feeds[DECODER]}.items()
        }

    def features(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """What the embedding reads beside a text: a row an image token or a token of sound; none for a text alone."""
        names = [name for name in self.embedding.inputs if name != "input_ids"]
        if not inputs:
            return {name: np.zeros(self._extents(name, 0), np.float32) for name in names}
        each = [self._features_of(one, names) for one in self._apart(inputs)]
        return each[0] if len(each) == 1 else {n: np.concatenate([one[n] for one in each], axis=-2) for n in names}

    def _features_of(self, inputs: Mapping[str, np.ndarray], names: Sequence[str]) -> Arrays:
        """Run the tower once."""
        for name, array in inputs.items():
            extents = self.tower.inputs[name].shape
            if any(isinstance(axis, int) and axis != n for axis, n in zip(extents, array.shape, strict=False)):
                raise VerifyError(
                    f"{name} is {array.shape}, and {self.file} takes {tuple(extents)}: a graph has one size of images "
                    "and one length of sound, those of the checkpoint's config or processor"
                )
        made = self.tower.run(inputs)
        if "audio_lengths" in made:
            pairs = zip(made["audio_features"], made["audio_lengths"], strict=True)
            return {"audio_features": np.concatenate([rows[:length] for rows, length in pairs])}
        return {name: made[name].reshape(self._extents(name, -1)) for name in names}

    def _extents(self, name: str, rows: int) -> list[int]:
        """Extents of what the embedding reads, with `rows` where the number of rows stands."""
        return [axis if isinstance(axis, int) else rows for axis in self.embedding.inputs[name].shape]

    def _apart(self, inputs: Mapping[str, np.ndarray]) -> list[Mapping[str, np.ndarray]]:
        """The inputs of each image, if the tower reads one at a time."""
        if GRID in inputs:
            return list(_images(inputs))
        if EXTENTS in inputs:  # in a batch fewer patches are filled up
            pairs = zip(inputs["pixel_values"], inputs[EXTENTS], strict=True)
            return [{"pixel_values": image[None, : grid.prod()], EXTENTS: grid[None]} for image, grid in pairs]
        if self.tiling is not None:
            return list(self.tiling.images(inputs))
        pixels = inputs.get("pixel_values")
        if pixels is None or self.tower.inputs["pixel_values"].shape[0] != 1:
            return [inputs]
        sizes = inputs.get(SIZES, [pixels.shape[2:]] * len(pixels))  # in a batch smaller ones are filled up
        return [
            {"pixel_values": image[None, :, :height, :width]}
            for image, (height, width) in zip(pixels, sizes, strict=True)
        ]

    def places(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Places of tokens in three dimensions, as given or as they follow from a prompt; None for other decoders."""
        if GRID not in self.tower.inputs:
            return None
        if "position_ids" in inputs:
            return inputs["position_ids"]
        ids = inputs["input_ids"]
        grids = inputs.get(GRID, np.zeros((0, 3), np.int64))
        self._check_tokens(ids, int(grids.prod(axis=1).sum()) // self.merge**2)
        return mrope_positions(ids, inputs.get("attention_mask", np.ones_like(ids)), grids, self.token, self.merge)

    def read(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """What the tower reads of transformers' inputs; images of each row and their number become one axis."""
        read = {name: array for name, array in inputs.items() if name in self.tower.inputs}
        pixels = read.get("pixel_values")
        if pixels is not None and self.tiling is not None:
            return read | {name: inputs[name] for name in (SIZES, COUNTS) if name in inputs}
        if pixels is not None and SIZES in inputs and self.tower.inputs["pixel_values"].shape[0] == 1:
            return read | {SIZES: inputs[SIZES]}
        if pixels is None or pixels.ndim != len(self.tower.inputs["pixel_values"].shape) + 1:
            return read
        images = pixels.reshape(-1, *pixels.shape[2:])
        real = images.reshape(len(images), -1).any(axis=1)  # a row with fewer images is filled with zeros
        mask = inputs.get("pixel_attention_mask")
        if mask is not None and not mask.reshape(-1, *mask.shape[2:])[real].all():
            raise VerifyError(f"an image has padded pixels, and {self.file} reads whole images: give it another size")
        return read | {"pixel_values": images[real]}

    def step(self, inputs: Mapping[str, np.ndarray], past: Arrays) -> tuple[np.ndarray, Arrays]:
        """Logits of the last token of `inputs`, and the cache for the next step."""
        feeds = self.feeds({**inputs, **past})[DECODER]
        out = self.decoder.run(feeds)
        return out["logits"][:, -1], self.kept(feeds, out)

    def kept(self, feeds: Mapping[str, np.ndarray], out: Arrays) -> Arrays:
        """What the next step is fed of this one of the decoder, beside its tokens."""
        return past_of(out)


def _cut(array: np.ndarray, axes: Sequence[str | int], positions: int) -> np.ndarray:
    """The first row, by the names that a graph gives the axes of an input, and at most `positions` tokens of it."""
    most = {"batch": 1, "image_batch": 1, "audio_batch": 1, "sequence": positions, "total_sequence": positions}
    return array[tuple(slice(most.get(str(axis))) for axis in axes)]


def _images(inputs: Mapping[str, np.ndarray]) -> Iterator[Arrays]:
    """The patches and the grid of each image."""
    grids = inputs[GRID]
    ends = grids.prod(axis=1).cumsum()
    for grid, begin, end in zip(grids, [0, *ends], ends, strict=False):
        yield {"pixel_values": inputs["pixel_values"][begin:end], GRID: grid[None]}


class MultiModalGenerator:
    """See `bridge.targets.generation.Generator`: continues a text with images in it."""

    def __init__(self, model: MultiModal) -> None:
        self.model = model
        self.runs = runs_of(model.substitute)
        self._seen: Mapping[str, np.ndarray] = {}

    def look(self, inputs: Mapping[str, np.ndarray]) -> None:
        """See `bridge.targets.generation.Seeing`."""
        self._seen = inputs

    def generate(self, ids: Sequence[int], settings: Settings) -> Iterator[int]:
        chooser, past = Chooser(settings), Arrays()
        inputs: Mapping[str, np.ndarray] = {**self._seen, "input_ids": np.array([ids], np.int64)}
        places = self.model.places(inputs)
        for _ in range(settings.tokens):
            given = {} if places is None else {"position_ids": places}
            logits, past = self.model.step({**inputs, **given}, past)
            token = chooser.choose(logits[0])
            yield token
            if token in settings.stop:
                return
            inputs = {"input_ids": np.array([[token]], np.int64)}
            places = None if places is None else np.full((3, 1, 1), places.max() + 1)


def mrope_positions(ids: np.ndarray, mask: np.ndarray, grids: np.ndarray, token: int, merge: int) -> np.ndarray:
    """Places of tokens in time, row and column, as Qwen-VL counts them: 3, batch, sequence.

    Texts count up in all three; the tokens of an image have its rows and columns.

    `grids`: height and width of each image in patches, `merge` x `merge` of which are a token. A text goes on behind
    the largest place of the image before it. Masked tokens are at 0.

    >>> ids = np.array([[5, 9, 9, 9, 9, 5]])
    >>> mrope_positions(ids, np.ones_like(ids), np.array([[1, 4, 4]]), token=9, merge=2)[:, 0].tolist()
    [[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]
    """
    places = np.zeros((3, *ids.shape), np.int64)
    images = iter(grids)
    for row in range(len(ids)):
        at, following = int(mask[row].argmax()), 0
        while at < ids.shape[1]:
            if ids[row, at] != token:
                places[:, row, at] = following
                at, following = at + 1, following + 1
                continue
            frames, height, width = (int(extent) for extent in next(images))
            shape = (frames, height // merge, width // merge)
            own = np.indices(shape).reshape(3, -1)
            end = at + own.shape[1]
            if end > ids.shape[1] or (ids[row, at:end] != token).any():
                raise VerifyError(
                    f"row {row} of the text has fewer than {own.shape[1]} image tokens (id {token}) from token {at} "
                    f"on, where an image of {height} x {width} patches stands; place them as the processor does"
                )
            places[:, row, at:end] = own + following
            at, following = end, following + max(shape)
    return places


def load_multimodal(directory: Path) -> MultiModal:
    """Load a written model that sees or hears.

    >>> load_multimodal(Path("llama-vision-fp8")).run({"input_ids": ids})["logits"].shape  # doctest: +SKIP
    (1, 17, 128256)
    """
    joined = json.loads((directory / GENAI).read_text())["model"]
    crosses = MASK in joined.get("decoder", {}).get("inputs", {})
    return CrossAttending(directory) if crosses else MultiModal(directory)


class CrossAttending(MultiModal):
    """Graphs of a decoder that reads images by cross-attention: Llama 3.2 Vision.

    What `vision.onnx` calls `present.N.encoder.key` the decoder takes as `past_key_values.N.encoder.key`, at every step
    the same. A text alone has zeros in their place and none of it reads them: then these layers change nothing.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        joined = json.loads((directory / GENAI).read_text())["model"]
        self.positions = int(joined["decoder"]["image_positions"])

    def feeds(self, inputs: Mapping[str, np.ndarray]) -> dict[str, Mapping[str, np.ndarray]]:
        seen = {name: array for name, array in inputs.items() if name in self.tower.inputs}
        embedding = {"input_ids": inputs["input_ids"]}
        decoder = {name: array for name, array in inputs.items() if name in self.decoder.inputs}
        if seen:
            decoder |= past_of(self.tower.run(seen))
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
