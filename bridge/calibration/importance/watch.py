"""Watch a model run, and sum what scores its parts.

Experts are seen in transformers' eager implementation, where each is a matrix product with a part of a stacked weight.
Their inputs count times the router's weight, since that is what reaches the output.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch.nn.functional import cosine_similarity, linear
from torch.overrides import TorchFunctionMode

from bridge.calibration.importance.readers import Norm, Reader
from bridge.calibration.importance.sums import Channels
from bridge.calibration.walk.options import Watch

PRODUCTS = (linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
Key = TypeVar("Key")
Settle = Callable[[Reader, Channels, Any], None]


class ScoreWatch(Watch):
    """Sums over the run of a model, by matrix, norm and layer.

    `settle` gets a matrix with its sums and its live weight [out, in] as soon as no more data pass it, so that a Gram
    matrix (`gram`) lives no longer than its block. Positions that the attention mask leaves out do not count.
    """

    def __init__(
        self,
        readers: tuple[Reader, ...],
        norms: tuple[Norm, ...],
        layers: Mapping[str, int],
        gram: bool,
        settle: Settle,
    ) -> None:
        modules = {r.module for r in readers} | {n.module for n in norms} | {*layers}
        super().__init__(modules, any(reader.expert is not None for reader in readers))
        self._readers, self._norms, self._layers = readers, norms, layers
        self._gram, self._settle = gram, settle
        self._sums: defaultdict[Reader, Channels] = defaultdict(Channels)
        self._same: dict[Reader, Reader] = {}  # of those that read the same input: the first, which has their sums
        self._last: tuple[Any, Reader] | None = None  # the input that was seen last
        self._mask: Any = None  # of the batch that runs [batch, sequence]; None if it leaves nothing out
        self._pooled: dict[Reader, tuple[Any, int]] = {}  # of a call's stacked experts: sum of |x|, tokens
        self._weights: dict[str, Any] = {}  # experts' module -> its call's experts and router weights [tokens, top k]
        self.norms: defaultdict[str, Channels] = defaultdict(Channels)
        self.influence: dict[int, float] = {}
        self.expert_norms: dict[tuple[int, int], tuple[float, int]] = {}  # layer, expert -> sum of norms, tokens

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Take the mask of the batch that runs next."""
        mask = inputs.get("attention_mask")
        self._mask = None if mask is None or mask.ndim != 2 or mask.all() else mask.bool()

    def run(self, loop: Callable[[Any], None], model: Any) -> None:
        """Run the loop, watched; its model may be a part that holds some of the modules."""
        held = dict(model.named_modules())
        with torch.no_grad(), self._hooked(held):
            loop(model)
        self._last = None
        self._settle_all(held)

    @contextmanager
    def _hooked(self, held: Mapping[str, Any]) -> Iterator[None]:
        experts: dict[int, Reader] = {}
        biases: dict[Reader, Any] = {}
        with ExitStack() as stack:

            def hook(module: Any, made: Any, before: bool) -> None:
                register = module.register_forward_pre_hook if before else module.register_forward_hook
                stack.enter_context(register(made, with_kwargs=True))

            for reader in self._readers:
                if reader.module not in held:
                    continue
                module = held[reader.module]
                if reader.expert is None:
                    hook(module, partial(self._read, reader), True)
                else:
                    weight = getattr(module, reader.parameter)
                    at = weight.data_ptr() + reader.expert * weight.stride(0) * weight.element_size()
                    if at in experts:  # gate and up are one matrix there
                        self._same[reader] = experts[at]
                        continue
                    experts[at] = reader
                    if reader.bias:
                        biases[reader] = getattr(module, reader.bias)[reader.expert]
            for name in {reader.module for reader in experts.values()}:
                hook(held[name], partial(self._routed, name), True)
                hook(held[name], self._ran, False)
            for norm in self._norms:
                if norm.module in held:
                    hook(held[norm.module], partial(self._normed, norm.module), False)
            for name, layer in self._layers.items():
                if name in held:
                    hook(held[name], partial(self._passed, layer), False)
            stack.enter_context(ExpertCalls(experts, partial(self._of_expert, biases)))
            yield

    def _read(self, reader: Reader, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        if reader in self._same:
            return
        if self._last and self._last[0] is x and reader not in self._sums:  # query, key and value
            self._same[reader] = self._last[1]
            return
        self._last = x, reader
        self._sums[reader].add(x, self._gram or reader.dim == "heads", self._mask)  # a head is many channels

    def _routed(self, name: str, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the experts of each token and their weights while the experts run."""
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        chosen = next((x for x in given if not x.is_floating_point()), None)
        alike = (x for x in given if x.is_floating_point() and chosen is not None and x.shape == chosen.shape)
        weights = next(alike, None)
        self._weights[name] = None if weights is None else (chosen, weights)

    def _of_expert(self, biases: Mapping[Reader, Any], reader: Reader, x: Any, out: Any) -> None:
        if reader in biases:
            out = out + biases[reader]  # added after the product
        routed = self._weights.get(reader.module)
        if routed is not None:
            chosen, weights = routed  # tokens come by choice, then by number
            here = reader.expert == chosen.T
            share = weights.T[here][:, None].to(x.dtype)
            x, out = x * share, out * share
            if self._mask is not None:
                kept = self._mask.reshape(-1)[here.nonzero()[:, 1]]
                x, out = x[kept], out[kept]
        self._sums[reader].add(x, self._gram, pooled=reader.stacked)
        if reader.stacked:
            first = replace(reader, expert=0)  # has the sum for all
            total, tokens = self._pooled.get(first, (0, 0))
            self._pooled[first] = total + x.float().abs().sum(0), tokens + len(x)
        key = (reader.layer, reader.expert or 0)
        norm, count = self.expert_norms.get(key, (0.0, 0))
        norms = torch.linalg.vector_norm(out.float(), dim=-1).sum().item()
        self.expert_norms[key] = norm + norms, count + len(out)

    def _ran(self, module: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add what the experts of a call had together."""
        for reader, (total, tokens) in self._pooled.items():
            self._sums[reader].add_pooled(total, tokens)
        self._pooled.clear()

    def _normed(self, name: str, module: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.norms[name].add(out, False, self._mask)

    def _passed(self, layer: int, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        out = out if isinstance(out, torch.Tensor) else out[0]
        alike = cosine_similarity(x.to(torch.float32), out.to(torch.float32), dim=2)
        score = 1 - (alike if self._mask is None else alike[self._mask]).mean()
        self.influence[layer] = self.influence.get(layer, 0.0) + score.item()

    def _settle_all(self, held: Mapping[str, Any]) -> None:
        here = [reader for reader in self._readers if reader.module in held]
        for reader in here:
            weight = reader.part.of(getattr(held[reader.module], reader.parameter).detach())
            weight = weight if reader.expert is None or weight.ndim == 2 else weight[reader.expert]
            sums = self._sums.get(self._same.get(reader, reader), Channels())
            self._settle(reader, sums, weight.T if reader.turned else weight)
        for reader in here:
            self._sums.pop(reader, None)


class ExpertCalls(TorchFunctionMode, Generic[Key]):
    """Hands on input and output of one of `products` if its weight begins at a known address."""

    def __init__(
        self, known: Mapping[int, Key], seen: Callable[[Key, Any, Any], None], products: Collection[Any] = PRODUCTS
    ) -> None:
        super().__init__()
        self._known, self._seen, self._products = known, seen, products

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._known and func in self._products and len(args) > 1 and (reader := self._known.get(args[1].data_ptr())):
            self._seen(reader, args[0], result)
        return result
