"""Generate tokens with a written graph in ONNX Runtime.

Keys and values of one run are bound to the next one's inputs, so that Python never copies them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.errors import CannotRun, VerifyError, first_line
from bridge.targets.generation import Chooser, Settings
from bridge.targets.onnx.run.runtime import PAST, PRESENT, empty_extents, open_session

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
