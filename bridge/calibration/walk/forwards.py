"""Run a model's own forward for one batch, paused at every block.

Each forward has a thread that runs only while the caller waits for it, so nothing runs at the same time and the order
is fixed. What a model does between its blocks (masks, rotary tables, an encoder's states) stays its own business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from bridge.calibration.walk.blocks import Block
from bridge.calibration.walk.offloaded import Offloaded
from bridge.calibration.walk.options import Watch
from bridge.core.errors import CalibrationError

REMEDY = (
    "run the whole model: give memory= (--memory) enough for it, as `qbridge plan` says, in one process (workers=1, or "
    "without torchrun)"
)
STANDS_FOR = "_stands_for"  # attribute of a stand-in's parameter: its live name
_HARMLESS = ("__get__", "size", "dim", "numel", "stride", "element_size", "is_floating_point")
_running = threading.local()


class _Abandoned(BaseException):
    """Unwinds a forward that is not needed any more."""


class Forward:
    """One forward. `block`, `args` and `kwargs`: where it waits and with what; `block` is None at its end.

    `result`: what the model returned.
    """

    def __init__(self, run: Callable[[], Any]) -> None:
        self.block: Block | None = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: Mapping[str, Any] = {}
        self.result: Any = None
        self._run = run
        self._error: BaseException | None = None
        self._output: Any = None
        self._abandoned = False
        self._mine, self._callers = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work, daemon=True, name="paused forward")
        self._thread.start()

    def resume(self, output: Any = None) -> None:
        """Go on with the output of the block, to the next block or the end; errors of the model are raised here."""
        self._output, self.args, self.kwargs, self.block = output, (), {}, None
        del output
        self._mine.release()
        self._callers.acquire()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End a forward that waits."""
        if self._thread.is_alive():
            self._abandoned = True
            self._mine.release()
            self._thread.join()

    def pause(self, block: Block, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Hand out the arguments of a block, and wait for its output; called by the forward itself."""
        self.block, self.args, self.kwargs = block, args, kwargs
        del args, kwargs
        self._callers.release()
        self._mine.acquire()
        if self._abandoned:
            raise _Abandoned
        output, self._output = self._output, None
        return output

    def _work(self) -> None:
        self._mine.acquire()
        try:
            if not self._abandoned:
                _running.forward = self
                with _Unplaced():
                    self.result = self._run()
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._callers.release()


class Batch:
    """A batch, its forward, and what the last block put out for it; `offloaded`: its activations while it waits."""

    def __init__(
        self, at: int, inputs: Mapping[str, Any], run: Callable[[Mapping[str, Any]], Any], offloaded: Offloaded
    ) -> None:
        self.at, self.inputs, self.offloaded = at, inputs, offloaded
        self.output: Any = None  # of the last block
        self.forward = Forward(partial(run, inputs))


def outputs_of(waiting: Iterable[Batch], module: Any, watch: Watch | None = None) -> Iterator[tuple[Batch, Any]]:
    """Run a block for each batch that waits at it; `watch` sees its inputs before."""
    for batch in waiting:
        batch.offloaded.restore()
        if watch:
            watch.begin(batch.inputs)
        yield batch, module(*batch.forward.args, **batch.forward.kwargs)


def pausing(block: Block) -> Callable[..., Any]:
    """Return the forward of a block's stand-in: it pauses the forward that calls it."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        current: Forward = _running.forward
        return current.pause(block, args, kwargs)

    return forward


class _Unplaced(TorchFunctionMode):
    """Refuses a parameter of a block that is used outside the block: it has no values there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__name__", "") not in _HARMLESS:
            for value in (*args, *given.values()):
                name = getattr(value, STANDS_FOR, "") if isinstance(value, Parameter) else ""
                if name or (isinstance(value, Parameter) and value.is_meta):
                    raise CalibrationError(
                        f"{name or 'a parameter'} is used outside its module (by {getattr(func, '__name__', func)}), "
                        f"where the model cannot be cut into blocks; {REMEDY}"
                    )
        return func(*args, **given)
