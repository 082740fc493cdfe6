"""KL divergence of a changed model's output distribution on held-out inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from bridge.calibration.reference_outputs import Run, kl, runner, unpadded, why_failed
from bridge.core.errors import CalibrationError


@dataclass(frozen=True)
class Variant:
    """A change of the model to measure: `on` applies it while its context is open, to `modules`."""

    on: Callable[[], AbstractContextManager[None]]
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Divergence:
    """Mean KL(plain || variant) of each variant in nats a token, the number of tokens, and the bytes `held` for it."""

    nats: tuple[float, ...]
    tokens: int
    held: int


def measure(
    model: Any,
    variants: Sequence[Variant],
    batches: Iterable[Mapping[str, Any]],
    report: Callable[[int, int, str], None],
) -> Divergence:
    """Run every batch unchanged and once per variant. Holds the logits and layer outputs of one batch."""
    kind = type(model).__name__
    if not has_head(kind):
        raise CalibrationError(f"{kind} has no head: its outputs are not distributions that can be compared")
    run, batches = runner(model), list(batches)
    prefix = Prefix(model, [module for variant in variants for module in variant.modules])
    sums, tokens, held, done, total = [0.0] * len(variants), 0, 0, 0, len(batches) * (len(variants) + 1)
    for batch in batches:
        plain = prefix.record(run, batch)
        rows = unpadded(plain, batch)
        if plain.reshape(-1, plain.shape[-1])[rows].isnan().any():
            why = why_failed(model, batch) or "check its weights and the data"
            raise CalibrationError(f"the unquantized model ({kind}) gives NaN for the held-out inputs: {why}")
        tokens, held = tokens + len(rows), max(held, plain.nbytes + prefix.nbytes)
        for i, variant in enumerate(variants):
            report(done := done + 1, total, "measure layers")
            with prefix.starting(prefix.first(variant.modules)), variant.on():
                sums[i] += kl(plain, run(batch), rows)
    report(total, total, "measure layers")
    return Divergence(tuple(value / tokens for value in sums), tokens, held)


def has_head(kind: str) -> bool:
    """Whether the outputs of a model's class are logits, which give a distribution."""
    return "For" in kind or kind.endswith("LMHeadModel")


def mean_next_token_loss(logits: Any, batch: Mapping[str, Any]) -> Any:
    """Mean negative log-likelihood of the next tokens without padding, as a tensor with gradients."""
    import torch

    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    labels = (ids if mask is None or mask.ndim > 2 else ids.masked_fill(mask == 0, -100))[:, 1:]
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels.flatten())


class Prefix:
    """Records the outputs of a model's layers for one batch, so that runs begin at the first quantized layer.

    The layers before that one replay their outputs: half of the work for all layers together. Results do not change.
    Models whose layers run twice, or share more than their outputs, do not allow this; that is tested with a run.
    """

    def __init__(self, model: Any, modules: Iterable[str]) -> None:
        self._name, self._layers = _layers(model, list(modules))
        self._outputs: list[list[Any]] = []
        self.works = bool(self._layers)

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(output) for outputs in self._outputs for output in outputs)

    def first(self, modules: Iterable[str]) -> int:
        """The first layer that contains one of `modules`; 0 (a whole run) if one is outside the layers."""
        numbers = [module.removeprefix(f"{self._name}.").split(".")[0] for module in modules]
        inside = all(module.startswith(f"{self._name}.") for module in modules)
        return min(map(int, numbers), default=0) if inside and self._layers else 0

    def record(self, run: Run, batch: Mapping[str, Any]) -> Any:
        """Run a batch and record the outputs of the layers."""
        if not self.works:
            return run(batch)
        self._outputs = [[] for _ in self._layers]
        with ExitStack() as hooks:
            for layer, outputs in zip(self._layers, self._outputs, strict=True):
                hook = layer.register_forward_hook(lambda *args, outputs=outputs: outputs.append(args[-1]))
                hooks.enter_context(hook)
            result = run(batch)
        self.works = all(len(outputs) == 1 for outputs in self._outputs) and self._replays(run, batch, result)
        if not self.works:
            self._outputs = []
        return result

    @contextmanager
    def starting(self, at: int) -> Iterator[None]:
        """Run with the layers before `at` replaying their recorded outputs."""
        replaced = self._layers[:at] if self.works else []
        before = [layer.__dict__.get("forward") for layer in replaced]
        try:
            for layer, (output,) in zip(replaced, self._outputs, strict=False):
                layer.forward = lambda *_, output=output, **__: output
            yield
        finally:
            for layer, forward in zip(replaced, before, strict=True):
                if forward is None:
                    layer.__dict__.pop("forward", None)
                else:
                    layer.forward = forward

    def _replays(self, run: Run, batch: Mapping[str, Any], result: Any) -> bool:
        """True if a run that replays every layer but the last gives the same result."""
        try:
            with self.starting(len(self._layers) - 1):
                return bool((run(batch) == result).all())
        except Exception:  # the last layer may need state that the replaced layers would have left
            return False


def _layers(model: Any, modules: list[str]) -> tuple[str, list[Any]]:
    """The list of layers with most of `modules`, the outer one of nested lists."""
    lists = [(name, list(module)) for name, module in model.named_modules() if type(module).__name__ == "ModuleList"]
    counted = [(sum(module.startswith(f"{name}.") for module in modules), name, layers) for name, layers in lists]
    most = max((count for count, _, _ in counted), default=0)
    return next(((name, layers) for count, name, layers in counted if count == most > 0), ("", []))


def _nbytes(output: Any) -> int:
    if isinstance(output, list | tuple):
        return sum(map(_nbytes, output))
    return int(getattr(output, "nbytes", 0))
