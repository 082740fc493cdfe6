"""The batches of a walk: their forwards, which pause at each block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bridge.calibration.job import CalibrationJob
from bridge.calibration.modelopt import simulates
from bridge.calibration.reference_outputs import Answers, runner
from bridge.calibration.walk.blocks import Block
from bridge.calibration.walk.diagnose import blame, has_nan, why_block_nan
from bridge.calibration.walk.forwards import Batch, outputs_of
from bridge.calibration.walk.model import WalkModel
from bridge.calibration.walk.offloaded import Offloaded, storages
from bridge.calibration.walk.options import Options
from bridge.calibration.walk.workers.join import join_answers
from bridge.calibration.walk.workers.processes import share_of
from bridge.core.errors import BridgeError, CalibrationError
from bridge.core.progress import Progress


class Streams:
    """The forwards of a walk; those that wait at a block run through it together.

    `held`: of the held-out inputs through the unquantized model. `data`: of the calibration data, once for each of the
    scheme's streams of activations. `quantized`: of the held-out inputs through the quantized model. `keeps_outputs`:
    batches keep what the last block put out, for the journal. `source_answers` and `answers`: both models' outputs.
    """

    def __init__(self, job: CalibrationJob, options: Options, model: WalkModel, keeps_outputs: bool) -> None:
        self._model, self._workers, self.keeps_outputs = model, job.workers, keeps_outputs
        self._watch, self._probe, self._spill = options.watch, options.probe, options.spill
        self._shared: set[int] = set()
        held_out, plain = job.data.held_out, model.plain.model
        self.source_answers = Answers(held_out, plain)
        simulated = held_out and not (options.watch or options.probe) and simulates(job.scheme)
        self.answers = Answers(held_out, plain) if simulated else None
        run, run_fake = runner(plain, model.device), runner(model.fake.model, model.device)
        self.held = self._batches(held_out if options.probe else self.source_answers.batches, run)
        self.data = [self._batches(job.data.batches, run_fake) for _ in range(model.quantizers.schedule.count)]
        self.quantized = self._batches(self.answers.batches if self.answers else (), run_fake)
        own = len(share_of(job.data.batches, job.workers))
        runs = len(model.quantizers.schedule.streams) * own + len(self.held) + len(self.quantized)
        self.progress = WalkProgress(job.progress, {block: model.plain.size(block) for block in model.blocks}, runs)

    def _batches(self, inputs: Iterable[Mapping[str, Any]], run: Callable[[Mapping[str, Any]], Any]) -> list[Batch]:
        """This process's share of some inputs, with their forwards."""
        shares = share_of([*inputs], self._workers)
        return [Batch(at, one, run, Offloaded(self._model.device, self._shared)) for at, one in shares]

    @property
    def all(self) -> list[Batch]:
        return [*self.held, *(batch for stream in self.data for batch in stream), *self.quantized]

    def start(self) -> None:
        """Let all forwards run to their first block."""
        self._shared |= storages(self._model.plain.rest, (batch.inputs for batch in self.all))
        for batch in self.all:
            self.go_on(batch)

    def close(self) -> None:
        """End the forwards that wait."""
        for batch in self.all:
            batch.forward.close()

    def next_block(self) -> Block | None:
        """The first block at which a batch waits, here or in another process; None after the last one."""
        blocks = self._model.blocks
        order = min((batch.forward.block.order for batch in self.all if batch.forward.block), default=len(blocks))
        first = min(self._workers.agree(order)) if self._workers else order
        return blocks[first] if first < len(blocks) else None

    @staticmethod
    def waiting(batches: Iterable[Batch], block: Block) -> list[Batch]:
        """Those of some batches that wait at a block."""
        return [batch for batch in batches if batch.forward.block is block]

    def release(self, *values: Any) -> None:
        """Drop the pages of activations in files from memory."""
        if self._spill:
            self._spill.release(*values)

    def run(
        self, batches: Iterable[Batch], module: Any, block: Block, last: bool = True, stop_at_nan: bool = False
    ) -> None:
        """Run a block for every batch that waits at it; `last`: go on with the outputs."""
        experts, waiting = self._model.cuts.get(block), self.waiting(batches, block)
        for batch in waiting if experts else ():
            batch.offloaded.restore()
        for batch, output in experts.run(waiting, module) if experts else outputs_of(waiting, module, self._watch):
            self.release(batch.forward.args, batch.forward.kwargs)
            self.progress.step(block)
            early = batch in self.held
            if stop_at_nan and not early and has_nan(output):
                raise CalibrationError(self.why_nan(block, batch) or blame(block.name, "NaN"))
            if last or early:
                self.go_on(batch, output)
            else:
                batch.offloaded.offload()

    def begin_held(self, block: Block) -> None:
        """Run the held-out inputs up to the experts of a block: one reading of these is for them and the data."""
        experts, waiting = self._model.cuts[block], self.waiting(self.held, block)
        for batch in waiting:
            batch.offloaded.restore()
        experts.begin(waiting, self._model.plain.modules[block.name])

    def probe(self, block: Block, run: Callable[..., Any]) -> None:
        """Let a probe run a block for the held-out inputs."""
        for batch in self.waiting(self.held, block):
            batch.offloaded.restore()
            with self.blamed(batch, block):
                output = run(batch.inputs, batch.forward.args, batch.forward.kwargs)
            self.progress.step(block)
            self.go_on(batch, output)

    def go_on(self, batch: Batch, output: Any = None) -> None:
        """Let a forward run to its next block; at its end keep the answers."""
        batch.offloaded.restore()
        with self.blamed(batch):
            batch.forward.resume(output)
        if batch.forward.block is not None:
            batch.output = output if self.keeps_outputs else None
            batch.offloaded.offload(batch.forward.args, batch.forward.kwargs, batch.output)
            if self._spill:
                self._spill.keep(output, batch.forward.args, batch.forward.kwargs)
        else:
            batch.output = None
            if self._probe and batch in self.held:
                self._probe.finish(batch.inputs, batch.forward.result)
            elif batch in self.held:
                self.source_answers.take(batch.at, batch.forward.result)
            elif self.answers and batch in self.quantized:
                self.answers.sampled = self.source_answers.sampled
                self.answers.take(batch.at, batch.forward.result)
            batch.forward.result = None

    def join_answers(self) -> None:
        """Give every process the answers to all held-out inputs."""
        for answers in filter(None, (self.source_answers, self.answers)):
            join_answers(answers, self._workers)

    def why_nan(self, block: Block, batch: Batch) -> str:
        """Which module of the plain block makes a NaN or an infinity of a batch; "" if none does."""
        module, experts = self._model.plain.modules[block.name], self._model.cuts.get(block)
        if experts:
            experts.close()
        runs = experts.run([batch], module) if experts else outputs_of([batch], module)
        return why_block_nan(block.name, module, runs, experts.tensors() if experts else ())

    @contextmanager
    def blamed(self, batch: Batch | None = None, block: Block | None = None) -> Iterator[None]:
        """Turn an error of the model's own code into a CalibrationError about its inputs."""
        try:
            yield
        except BridgeError:
            raise
        except Exception as error:
            inputs = (batch or next(iter(self.all))).inputs if batch or self.all else {}
            raise CalibrationError(self._model.why_refused(inputs, error, block)) from error


class WalkProgress:
    """Reports the work done: a run of a batch through a block counts the block's parameters, in thousands."""

    def __init__(self, report: Progress, sizes: Mapping[Block, int], runs: int) -> None:
        self._report, self._sizes = report, {block: 1 + (count >> 10) for block, count in sizes.items()}
        self._runs, self._done, self._total = runs, 0, sum(self._sizes.values()) * runs

    def skip(self, blocks: Iterable[Block]) -> None:
        """Count blocks that an earlier run finished."""
        self._done += sum(self._sizes[block] for block in blocks) * self._runs

    def step(self, block: Block) -> None:
        """Count one batch through a block, and report."""
        self._done += self._sizes[block]
        self._report(min(self._done, self._total), self._total, "calibrate")
