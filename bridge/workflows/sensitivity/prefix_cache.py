"""Lets a run begin at the first layer that differs from the last one recorded; must never change what a run answers.

What each layer of the decoder answered to a batch is kept, and given again by the layers before the first that is
quantized: half of the work for all layers together. Whether the model allows it is tried (layers that run twice, or
share more than their answer, do not).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Run = Callable[[Mapping[str, Any]], Any]


class Prefix:
    """The answers of one model's layers to one batch. `held`: bytes of them."""

    def __init__(self, model: Any, modules: Iterable[str]) -> None:
        self._name, self._layers = _layers(model, list(modules))
        self._answers: list[list[Any]] = []
        self.works = bool(self._layers)

    @property
    def held(self) -> int:
        return sum(_nbytes(answer) for answers in self._answers for answer in answers)

    def first(self, modules: Iterable[str]) -> int:
        """The first layer that holds one of `modules`; 0, a whole run, where one lies elsewhere."""
        words = [module.removeprefix(f"{self._name}.").split(".")[0] for module in modules]
        inside = all(module.startswith(f"{self._name}.") for module in modules)
        return min(map(int, words), default=0) if inside and self._layers else 0

    def record(self, run: Run, batch: Mapping[str, Any]) -> Any:
        """Run a batch and keep what the layers answer."""
        if not self.works:
            return run(batch)
        self._answers = [[] for _ in self._layers]
        hooks = [
            layer.register_forward_hook(lambda *seen, kept=kept: kept.append(seen[-1]))
            for layer, kept in zip(self._layers, self._answers, strict=True)
        ]
        try:
            answer = run(batch)
        finally:
            for hook in hooks:
                hook.remove()
        self.works = all(len(kept) == 1 for kept in self._answers) and self._again(run, batch, answer)
        if not self.works:
            self._answers = []
        return answer

    @contextmanager
    def starting(self, at: int) -> Iterator[None]:
        """Run with the layers before `at` giving their recorded answers."""
        replaced = self._layers[:at] if self.works else []
        before = [layer.__dict__.get("forward") for layer in replaced]
        try:
            for layer, (answer,) in zip(replaced, self._answers, strict=False):
                layer.forward = lambda *_, answer=answer, **__: answer
            yield
        finally:
            for layer, forward in zip(replaced, before, strict=True):
                if forward is None:
                    layer.__dict__.pop("forward", None)
                else:
                    layer.forward = forward

    def _again(self, run: Run, batch: Mapping[str, Any], answer: Any) -> bool:
        try:
            with self.starting(len(self._layers) - 1):
                return bool((run(batch) == answer).all())
        except Exception:  # whatever a layer misses that others, which did not run, should have left behind
            return False


def _layers(model: Any, modules: list[str]) -> tuple[str, list[Any]]:
    """The list of layers that holds most of `modules`, the outer one of nested lists."""
    lists = [(name, list(module)) for name, module in model.named_modules() if type(module).__name__ == "ModuleList"]
    counted = [(sum(module.startswith(f"{name}.") for module in modules), name, layers) for name, layers in lists]
    most = max((count for count, _, _ in counted), default=0)
    return next(((name, layers) for count, name, layers in counted if count == most > 0), ("", []))


def _nbytes(answer: Any) -> int:
    if isinstance(answer, list | tuple):
        return sum(map(_nbytes, answer))
    return int(getattr(answer, "nbytes", 0))
