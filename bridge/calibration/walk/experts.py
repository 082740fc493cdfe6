"""Run a layer whose experts are in memory one at a time.

The layer without its experts is in memory for all batches. Its forwards pause at the experts; then each expert is read
once, runs the tokens that every batch sends to it by the module's own code, and is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bridge.calibration.quantizers import QuantizerBinding, calibrator
from bridge.calibration.walk.blocks import Block
from bridge.calibration.walk.budget import Room
from bridge.calibration.walk.forwards import Batch, Forward, pausing
from bridge.calibration.walk.routing import alone, routed, why_not
from bridge.calibration.walk.skeleton import Skeleton
from bridge.calibration.walk.weights import Weights
from bridge.core.errors import UsageError
from bridge.core.text import size
from bridge.core.values import MSE


@dataclass(frozen=True)
class Stack:
    """The experts of a layer: a module whose parameters have the expert as first axis. `block`: its live name.

    `joint`: one quantizer has the weights of all experts, so that a run that collects statistics reads every expert.
    """

    block: Block
    module: Any
    count: int
    joint: bool = False


class ByExpert:
    """Runs one layer. `stacks` are its experts, by live modules of `modules`; `layer`: the block that holds them."""

    def __init__(self, layer: Block, stacks: Sequence[Stack], weights: Weights) -> None:
        self.layer, self._weights = layer, weights
        self._stacks = {stack.block: stack for stack in stacks}
        self._begun: list[_Run] = []

    def without(self, modules: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """Return the modules that are no experts, of modules with their live names."""
        return [(name, m) for name, m in modules if not any(block.holds(name) for block in self._stacks)]

    def _experts(self, module: Any) -> dict[Block, Any]:
        """The experts in a layer: the model's own, or ModelOpt's copy of it."""
        return {block: module.get_submodule(block.name.removeprefix(f"{self.layer.name}.")) for block in self._stacks}

    def hide_weights(self, module: Any) -> None:
        """Let ModelOpt find no weights in the experts of its layer: it would calibrate all of them at once."""
        for experts in self._experts(module).values():
            experts.__dict__["iter_weights_for_calibration"] = lambda: iter(())

    def begin(self, waiting: Iterable[Batch], module: Any) -> None:
        """Run the layer for each batch that waits at it up to its experts; the next `run` goes on with these, too."""
        experts = self._experts(module)
        for block, stacked in experts.items():
            stacked.__dict__["forward"] = pausing(block)
        for batch in waiting:
            self._begun.append(_Run(batch, module, experts))
            self._begun[-1].forward.resume()

    def run(self, waiting: Iterable[Batch], module: Any) -> Iterator[tuple[Batch, Any]]:
        """Run the layer for each batch, with one reading of its experts; yield batches with its outputs."""
        try:
            self.begin(waiting, module)
            while paused := [run.forward.block for run in self._begun if run.forward.block]:
                stack = self._stacks[min(paused, key=lambda block: block.order)]
                here = [run for run in self._begun if run.forward.block is stack.block]
                for run, output in zip(here, self._run(stack, here), strict=True):
                    run.forward.resume(output)
            for run in self._begun:
                yield run.batch, run.forward.result
                run.forward.result = None
        finally:
            self.close()

    def close(self) -> None:
        """End the forwards that wait, and let the experts run as before."""
        for run in self._begun:
            run.forward.close()
            for stacked in run.experts.values():
                stacked.__dict__.pop("forward", None)
        self._begun = []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read all experts, one by one; yield their parameters by name."""
        for stack in self._stacks.values():
            for expert in range(stack.count):
                for key, tensor in self._weights.read_expert(stack.block.name, stack.module, expert).items():
                    yield f"{stack.block.name}.{key}[{expert}]", tensor

    def _run(self, stack: Stack, runs: Sequence[_Run]) -> list[torch.Tensor]:
        """Return what the experts put out for each run."""
        calls = [routed(run.experts[stack.block], run.forward.args, run.forward.kwargs) for run in runs]
        modules = {id(run.module): run.experts[stack.block] for run in runs}.values()
        collecting = [module for module in modules if stack.joint and _collects(module)]
        wanted = [e for e in range(stack.count) if collecting or any(call.takes(e) for call in calls)]
        for expert, read in self._reads(stack, wanted):
            with ExitStack() as places:
                for module in modules:
                    places.enter_context(alone(module, expert, stack.count, read))
                for call in calls:
                    if call.takes(expert):
                        call.take(expert)
                for module in collecting:
                    for weight, quantizer in type(module).iter_weights_for_calibration(module):
                        quantizer(weight)
        return [call.output() for call in calls]

    def _reads(self, stack: Stack, experts: Sequence[int]) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yield experts with their tensors on the device; the next is read while one runs."""
        read = partial(self._weights.read_expert, stack.block.name, stack.module)
        with ThreadPoolExecutor(1, thread_name_prefix="read the next expert") as pool:
            ahead = pool.submit(read, experts[0]) if experts else None
            for at, expert in enumerate(experts):
                assert ahead
                tensors = self._weights.placed(ahead.result())
                ahead = pool.submit(read, experts[at + 1]) if at + 1 < len(experts) else None
                yield expert, tensors
                del tensors


class _Run:
    """One forward of the layer. `module`: the layer that runs; `experts`: the modules in it that pause."""

    def __init__(self, batch: Batch, module: Any, experts: Mapping[Block, Any]) -> None:
        self.batch, self.module, self.experts = batch, module, experts
        given = batch.forward
        self.forward = Forward(partial(_without_gradients, module, given.args, given.kwargs))


def _without_gradients(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with torch.no_grad():  # gradients are switched by thread
        return module(*args, **kwargs)


def _collects(module: Any) -> bool:
    """Whether a quantizer of all experts' weights collects its amax."""
    return any(
        getattr(child, "_if_calib", False)
        for name, child in module.named_children()
        if name.endswith("_weight_quantizer")
    )


def cut(
    blocks: Iterable[Block],
    skeleton: Skeleton,
    bindings: Sequence[QuantizerBinding],
    weights: Weights,
    room: Room,
    where: str,
) -> dict[Block, ByExpert]:
    """Return the blocks above what fits, cut at their experts; reads no weight.

    Raises:
        UsageError: a block above it has no experts that can run one by one.
    """
    cuts, problems = {}, []
    for block in blocks:
        modules = skeleton.inside(block)
        tensors = (t for _, m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False)))
        held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if held <= room.block:
            continue
        stacks, why = _stacks(block, modules, bindings, weights)
        if stacks:
            cuts[block] = ByExpert(block, stacks, weights)
        else:
            problems.append((block.name, held, why))
    if problems:
        name, held, why = max(problems, key=lambda problem: problem[1])
        raise UsageError(
            f"{where}: {name} has {size(held)}, which is read whole: {why}; give memory= (--memory) at least "
            f"{room.least} bytes, fewer samples= (--samples), or a saved calibration (calib=)"
        )
    return cuts


def _stacks(
    layer: Block, modules: Sequence[tuple[str, Any]], bindings: Sequence[QuantizerBinding], weights: Weights
) -> tuple[list[Stack], str]:
    """Return the stacks of experts in a layer, or none and why it must be read whole."""
    stacks: list[Stack] = []
    for name, module in modules:
        # `has_gate`: the class keeps the contract of `use_experts_implementation`
        if not hasattr(module, "has_gate") or not isinstance(getattr(module, "num_experts", None), int):
            continue
        mine = [binding for binding in bindings if binding.module == name]
        if why := _why_whole(name, module, mine, weights):
            return [], f"{name} ({type(module).__name__}) cannot run expert by expert, because {why}"
        joint = any(binding.joint for binding in mine)
        stacks.append(Stack(Block(name, len(stacks), bool(mine)), module, module.num_experts, joint))
    return stacks, "" if stacks else "it holds no stack of experts as transformers makes them"


def _why_whole(name: str, module: Any, bindings: Sequence[QuantizerBinding], weights: Weights) -> str:
    if not weights.by_expert(name, module):
        return "a tensor of the checkpoint is cut across several experts"
    if any(calibrator(binding.format) == MSE for binding in bindings):
        return "ModelOpt searches the scales of all of its weights at once"
    if any(binding.joint and _per_expert(binding) for binding in bindings):
        return "ModelOpt has one quantizer with a scale of each expert"
    return why_not(module)


def _per_expert(binding: QuantizerBinding) -> bool:
    """Whether a quantizer of a whole stack keeps an amax of each expert, or of parts of it."""
    return any(numeric.per != "tensor" and numeric.scale_dtype == "float32" for numeric in binding.format.weight)
