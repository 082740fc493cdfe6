"""Put a block's tensors in place: the inverse of `live_names`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from bridge.calibration.algorithms.clips import set_aside
from bridge.calibration.quantizers import QuantizerBinding
from bridge.core.dtypes import DTYPES
from bridge.core.errors import CalibrationError, SourceError
from bridge.core.text import named
from bridge.sources.live_models.checkpoint_names import LiveSlice, Origin, live_parts, tied_names
from bridge.sources.live_models.loading import as_tensor
from bridge.sources.source import Source

PIECE = 16 << 20  # bytes of rows that are read and then cast or cut


class Weights:
    """Reads tensors of `source` into the modules of a model without weights."""

    def __init__(self, source: Source, model: Any, origins: Mapping[str, Origin], device: Any) -> None:
        self._source, self._origins, self._device = source, origins, device
        self._stored = live_parts(origins)
        self._parts = {live: [*dict.fromkeys(parts.values())] for live, parts in self._stored.items()}
        self._tied = tied_names(model)
        self._shapes = {live: tuple(tensor.shape) for live, tensor in model.state_dict().items()}
        self._check(model)

    def _check(self, model: Any) -> None:
        """Refuse before any read what cannot be put into place."""
        where, kind = self._source.where, type(model).__name__
        if computed := [name for name, origin in self._origins.items() if origin.computed]:
            raise CalibrationError(
                f"{where}: {named(computed)} are more than cut and joined while they are loaded, so that {kind} cannot "
                "be calibrated block by block; give memory= (--memory) for the whole model"
            )
        missing = [
            live
            for live, tensor in model.state_dict(keep_vars=True).items()
            if tensor.is_meta and self._canonical(live) not in self._parts
        ]
        if missing:
            raise SourceError(
                f"{where}: {kind} needs {named(missing)}, which the checkpoint lacks; "
                "it would be left random: is `architectures` in config.json right?"
            )

    def _canonical(self, live: str) -> str:
        """The live tensor that is read for `live`: a tied head and its embedding are one tensor of a checkpoint."""
        return live if live in self._parts else self._tied.get(live, live)

    def read(self, modules: Iterable[tuple[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the live tensors that these modules hold themselves; another thread may call it."""
        wanted = {self._canonical(live): tensor for _, _, live, tensor in _slots(modules)}
        read = {live: torch.empty(t.shape, dtype=t.dtype) for live, t in wanted.items() if live in self._parts}
        for name in dict.fromkeys(name for live in read for name in self._parts[live]):
            self._read(name, read)
        return read

    def by_expert(self, name: str, module: Any) -> bool:
        """Whether every expert of the stacks in `module` has tensors, or first rows of tensors, of its own."""
        return all(
            self._origins[stored].ref is not None
            and (part.expert is not None or (_rows_are_experts(part, shape) and not self._source.specs[stored].across))
            for _, _, live, tensor in _slots([(name, module)])
            for shape in [tuple(tensor.shape)]
            for part, stored in self._stored[live].items()
        )

    def read_expert(self, name: str, module: Any, expert: int) -> dict[str, torch.Tensor]:
        """Return one expert of the stacks in `module`, by parameter, with a first axis of one."""
        read = {}
        for _, key, live, tensor in _slots([(name, module)]):
            read[key] = out = torch.empty((1, *tensor.shape[1:]), dtype=tensor.dtype)
            for part, stored in self._stored[live].items():
                if part.expert == expert:
                    own = replace(part, index=(0, *part.index[1:]))
                    self._copy(self._origins[stored], own, 0, own.of(out))
                elif part.expert is None:
                    own = replace(part, index=((0, 1), *part.index[1:])) if part.index else part
                    self._copy(self._origins[stored], own, 0, own.of(out), expert)
        return read

    def placed(self, read: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors on the device of the model."""
        return {key: tensor.to(self._device) for key, tensor in read.items()}

    def place(self, modules: Iterable[tuple[str, Any]], read: dict[str, torch.Tensor]) -> None:
        """Put tensors that were read into place, on the device; `read` is emptied."""
        placed = {live: read.pop(live).to(self._device) for live in [*read]}
        for owner, key, live, tensor in list(_slots(modules)):
            value = placed.get(self._canonical(live))
            if key in owner._buffers:
                owner._buffers[key] = tensor.to(self._device) if value is None else value
            elif value is not None:
                owner._parameters[key] = torch.nn.Parameter(value, requires_grad=False)

    def _read(self, name: str, targets: Mapping[str, torch.Tensor]) -> None:
        origin = self._origins[name]
        begin = 0
        for part in origin.parts:
            if part.live in targets:
                self._copy(origin, part, begin, part.of(targets[part.live]))
            if len(origin.parts) > 1:
                begin += _extent(part, origin.axis, self._shapes[part.live])

    def _copy(self, origin: Origin, part: LiveSlice, begin: int, out: torch.Tensor, row: int = 0) -> None:
        """Copy a part of a stored tensor, from `begin` on along the axis of joining and from `row` on, into `out`."""
        name = origin.spec.name
        dtype = self._source.specs[name].dtype  # the origin has the dtype in the model
        if not out.ndim:
            out.copy_(as_tensor(self._source.read(name), dtype))
            return
        joined = len(origin.parts) > 1
        first = begin if joined and origin.axis == 0 else row
        cut = joined and origin.axis != 0
        rows = out.shape[0]
        if not cut and out.is_contiguous() and str(out.dtype) == f"torch.{dtype}" and out.numel():
            view = out.view(getattr(torch, DTYPES[dtype].storage)).numpy()
            got = self._source.read_rows(name, first, first + rows, view)
            if got is not view and got.ctypes.data != view.ctypes.data:
                view[...] = got
            return
        width = max(1, out.numel() // max(rows, 1) * out.element_size())
        step = max(1, PIECE // width)
        for at in range(0, rows, step):
            end = min(at + step, rows)
            piece = as_tensor(self._source.read_rows(name, first + at, first + end), dtype)
            if cut:
                piece = piece.narrow(origin.axis, begin, out.shape[origin.axis])
            out[at:end].copy_(piece)


def _rows_are_experts(part: LiveSlice, shape: tuple[int, ...]) -> bool:
    """Whether a stored tensor holds all experts of a live stack along its first axis."""
    return not part.index or (part.index[0], part.order[0]) == ((0, shape[0]), 0)


def _extent(part: LiveSlice, axis: int, shape: tuple[int, ...]) -> int:
    if not part.index:
        return shape[axis]
    kept = [at for at in part.index if isinstance(at, tuple)]
    low, high = kept[part.order[axis]]
    return high - low


class Ahead:
    """Reads the next block in a thread while another runs."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="read the next block")
        self._next: tuple[str, Future[dict[str, torch.Tensor]]] | None = None

    def start(self, name: str, modules: Sequence[tuple[str, Any]]) -> None:
        """Begin to read a block, unless that is done."""
        if self._next is None:
            self._next = name, self._pool.submit(self._weights.read, modules)

    def take(self, name: str, modules: Sequence[tuple[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the tensors of a block; those of another that was read in vain are dropped."""
        ahead, self._next = self._next, None
        if ahead is not None and ahead[0] == name:
            return ahead[1].result()
        return self._weights.read(modules)

    def close(self) -> None:
        """Wait for a read that has begun."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def share(modules: Iterable[tuple[str, Any]], others: Iterable[tuple[str, Any]]) -> None:
    """Give modules the parameters and buffers of others of the same names."""
    given = dict(others)
    for name, module in modules:
        module._parameters.update(given[name]._parameters)
        module._buffers.update(given[name]._buffers)


def drop(modules: Iterable[tuple[str, Any]]) -> None:
    """Free the memory of parameters; shape and dtype stay. Cycles in ModelOpt's objects keep modules alive for long."""
    for _, module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), False)


def drop_quantizers(root: Any, bindings: Sequence[QuantizerBinding]) -> None:
    """Free what the weight quantizers of a finished block, their calibrators and ModelOpt's searches hold.

    They stay alive with the modules: a quarter of the bytes of the model with nvfp4_local_hessian in bfloat16.
    """
    for binding in bindings:
        for quantizer in root.get_submodule(binding.weight_quantizer).modules():
            quantizer._buffers.clear()
            if hasattr(quantizer, "_calibrator"):
                quantizer._calibrator = None
    set_aside(root, bindings)


def _slots(modules: Iterable[tuple[str, Any]]) -> Iterator[tuple[Any, str, str, torch.Tensor]]:
    """Yield owner, key, live name and tensor of every parameter and buffer of the modules themselves."""
    for name, owner in modules:
        for key, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None:
                yield owner, key, f"{name}.{key}" if name else key, tensor
