"""XLM, which asks whether a text is longer than the batch."""

from __future__ import annotations

from typing import Any

from bridge.targets.onnx.export.family import Family


class _Lengths:
    """Of texts with a mask, by which XLM reads no more than that none is longer than the batch."""

    def __init__(self, ids: Any) -> None:
        self.shape, self.device = ids.shape[:1], ids.device

    def size(self, axis: int) -> Any:
        return self.shape[axis]

    def max(self) -> _Lengths:
        return self

    def item(self) -> int:
        return 0


def _xlm(self: Any, input_ids: Any = None, attention_mask: Any = None, **given: Any) -> Any:
    given["lengths"] = _Lengths(input_ids)
    return type(self).forward(self, input_ids, attention_mask=attention_mask, **given)


FAMILY = Family(methods={"XLMModel": {"forward": _xlm}})
