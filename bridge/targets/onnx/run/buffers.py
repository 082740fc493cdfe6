"""Run decoders whose caches are buffers of one length."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from bridge.core.errors import CannotRun
from bridge.targets.onnx.run.runtime import PAST, WRITE_INDICES, Runtime, past_of

STEPS = 3  # tokens that are read one by one, behind the second half of a text


class SteppedRuntime(Runtime):
    """A decoder with buffers: half of a text is a prompt, the other half is read with buffers, its end by tokens."""

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As `Runtime.run`, with the logits of all tokens together and the buffers of the last step."""
        ids = feeds.get("input_ids")
        known = WRITE_INDICES in feeds or any(name.startswith(PAST) for name in feeds)
        if known or ids is None or ids.shape[1] < 2 * STEPS + 2:
            return super().run(feeds)
        mask = feeds.get("attention_mask", np.ones_like(ids))
        tokens = ids.shape[1]
        bounds = [0, tokens // 2, *range(tokens - STEPS, tokens + 1)]
        rows: list[np.ndarray] = []
        out: dict[str, np.ndarray] = {}
        for first, last in pairwise(bounds):
            new = {name: array[:, first:last] for name, array in feeds.items()}
            places = {WRITE_INDICES: np.full(len(ids), first)}
            out = super().run({**new, **past_of(out), **places, "attention_mask": mask[:, :last]})
            rows.append(out[self.outputs[0]])
        return out | {self.outputs[0]: np.concatenate(rows, axis=1)}


def fill_buffers(feeds: dict[str, np.ndarray], length: int) -> None:
    """Extend a mask that ends with the newest token to the buffer's length, in place, and say where new tokens go.

    Without `write_indices` as many tokens as the mask has more than `input_ids` are in each row's buffer.
    """
    mask, new = feeds["attention_mask"], feeds["input_ids"].shape[1]
    tokens = mask.shape[1]
    if tokens > length:
        raise CannotRun(f"the text has {tokens} tokens, and the buffers of the graph hold {length}: give a shorter one")
    if tokens < length or new == length:
        feeds.setdefault(WRITE_INDICES, np.full(len(mask), tokens - new, np.int64))
    feeds["attention_mask"] = np.pad(mask, ((0, 0), (0, length - tokens)))
