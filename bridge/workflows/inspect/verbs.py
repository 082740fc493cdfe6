"""The verb inspect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bridge.api.request import unwarned_data_of, warn_of
from bridge.calibration.data import Sampling
from bridge.core.errors import UsageError
from bridge.core.output.replace import check_free
from bridge.core.progress import Progress
from bridge.core.progress_bar import callback_of, shows_progress
from bridge.core.remote.opening import written_at
from bridge.core.version import __version__
from bridge.sources.opening import open_source
from bridge.sources.pruned.opening import pruned_again
from bridge.workflows.inspect.result import MARK, Inspection
from bridge.workflows.inspect.save import save


@shows_progress
def inspect(
    model: Any,
    *,
    against: str | Path,
    data: Any = None,
    out: str | Path | None = None,
    samples: int | None = None,
    sequence: int | None = None,
    field: str | None = None,
    tokenizer: Any = None,
    overwrite: bool = False,
    progress: Progress | bool | None = None,
) -> Inspection:
    """Compare each module of a quantized model with that of its source, on the same inputs.

    Both models run, one after the other, and 64 tokens of each module's output are kept. `accumulated` is the error of
    an output with all errors before it; `alone` is that of one matrix, with the codes of its input, on the input that
    the source has there. So a matrix that is bad alone makes an error, and one that is bad accumulated only passes it
    on.

    Args:
        model: the source, what `convert` takes.
        against: what `convert` wrote of it for target "hf".
        data: what `calibrate` takes; None takes the embedded text.
        out: a directory for inspect.html, inspect.json and statistics.csv; None writes nothing.
        samples, sequence: rows of text and their tokens, as in `calibrate`.
        overwrite: replace an inspection in `out`.

    Raises:
        VerifyError: bridge did not write `against`, or made it from another model.
        UsageError: it is of another target.
        WriteError: `out` exists.
        CannotRun: transformers cannot run one of the two.

    >>> report = bridge.convert("examples/models/tiny-llama", "hf", "int4_wo", "to-inspect", verify=False)
    >>> seen = bridge.inspect("examples/models/tiny-llama", against="to-inspect", samples=4)
    >>> worst = min(seen.compared, key=lambda row: row.alone.sqnr if row.alone and row.alone.sqnr else 99)
    >>> 10 < worst.alone.sqnr < 25  # dB
    True
    """
    from bridge.workflows.inspect.side_by_side import side_by_side
    from bridge.workflows.inspect.twin import plan_of_output, twin_of

    callback, directory = callback_of(progress), written_at(against)
    place = None if out is None else Path(out)
    if place is not None:
        check_free(place, overwrite, MARK)
    source = pruned_again(open_source(model, tokenizer=tokenizer), directory)
    plan = plan_of_output(directory, source)
    made = unwarned_data_of(source, data, Sampling(samples, sequence, field))
    batches = (*made.batches, *made.held_out)
    if not batches or made.forward_loop:
        raise UsageError(
            f"data= (--data): two models are compared on batches: {made.missing or 'a forward_loop has none'}"
        )
    if data is not None:
        warn_of(made)
    callback(0, 3, "load")
    live, twin = source.load_model(), twin_of(directory, source)
    callback(1, 3, "run both")
    rows = side_by_side(live, twin.model, batches, matrices_of(live))
    about = {
        "model": source.name, "against": str(against), "scheme": plan.scheme, "plan": plan.digest,
        "data": made.digest, "qbridge": __version__,
    }  # fmt: skip
    found = Inspection(about, (), tuple(rows), twin.notes)
    callback(2, 3, "write")
    if place is not None:
        save(found, place, overwrite)
    callback(3, 3, "write")
    return found


def matrices_of(model: Any) -> list[str]:
    """Names of the modules of a live model that multiply by a matrix."""
    from bridge.workflows.inspect.gemms import can_change

    return [name for name, module in model.named_modules() if can_change(module)]
