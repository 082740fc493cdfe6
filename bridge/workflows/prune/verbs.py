"""The verbs pruned and prune."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from bridge.api.plans import plan
from bridge.api.request import data_of, unwarned_data_of
from bridge.api.sensitivity.budget import is_automatic
from bridge.api.verbs import convert
from bridge.api.words import SchemeName, TargetName, TargetOptions
from bridge.calibration.data import Sampling
from bridge.core.addresses import is_remote
from bridge.core.errors import CalibrationError, UsageError, warn
from bridge.core.output.replace import check_free, recover
from bridge.core.progress import Progress
from bridge.core.progress_bar import callback_of, shows_progress
from bridge.core.text import nearest, number
from bridge.planning.memory import RUN_BYTES_PER_VALUE
from bridge.planning.structure import structure_of
from bridge.quant.schemes.scheme import Scheme
from bridge.reporting.report import Report
from bridge.sources.configs.positions import positions
from bridge.sources.opening import open_source
from bridge.sources.pruned.opening import Cut, plan_cut, plan_sparse
from bridge.sources.pruned.scores import ByPlace, Scores
from bridge.sources.pruned.source import PrunedSource
from bridge.sources.pruned.sparse import check_sparse
from bridge.sources.source import Source

SAMPLES, SEQUENCE = 64, 256  # 16 rows keep 93 % of the same channels
IMPORTANCE = ("output", "minitron", "weights")
ORDERS = ("source", "importance")


def sampling_of(source: Source, samples: int | None, sequence: int | None, field: str | None) -> Sampling:
    """What a user asks for, or as much as the model has positions for."""
    limit = positions(source.config) or SEQUENCE
    return Sampling(samples or SAMPLES, sequence or min(SEQUENCE, limit), field)


@shows_progress
def pruned(
    model: Any,
    keep: Mapping[str, int | str] | None = None,
    *,
    drop_layers: Sequence[int] | None = None,
    data: Any = None,
    importance: str | Scores | Path = "output",
    repair: bool = False,
    order: str = "source",
    sparse: str | None = None,
    sparse_method: str = "sparsegpt",
    config: Mapping[str, Any] | str | Path | None = None,
    tokenizer: Any = None,
    samples: int | None = None,
    sequence: int | None = None,
    field: str | None = None,
    device: str | None = None,
    progress: Progress | bool | None = None,
) -> PrunedSource:
    """Return a smaller model as a source, for `convert` and every other verb; its weights are cut while they are read.

    Args:
        model: what `convert` takes; not quantized.
        keep: dim -> its new size, or a share: {"ffn": "75%", "heads": 24}. The dims are hidden, ffn, heads, kv_heads,
            layers, experts, moe_ffn, shared_ffn and vocab, as far as the model has them. A share of a width or of vocab
            is rounded down to a multiple of 64, of heads to one of their groups. vocab keeps the tokens that are most
            frequent in `data`, special ones and what makes them, and cuts the tokenizer.
        drop_layers: numbers of layers to leave out, from 0; no data are needed for that.
        data: what the model runs on for scores and repair, as `calibrate` takes it; None takes the embedded text.
        importance: what is kept. "output": what adds most to the output of the matrix that reads it. "minitron":
            ModelOpt's norm of activations. "weights": from weights alone, without a run. Or saved `Scores`.
        repair: fit the matrices that read fewer channels, heads or experts' channels to what they gave before, by least
            squares; takes five tokens a channel.
        order: "source" keeps the order; "importance" sorts channels, heads and experts by score, as ModelOpt does.
        sparse: "2:4" sets two of every four weights along the input of each matrix of the layers to zero; sizes stay.
        sparse_method: "sparsegpt" chooses zeros by the loss of the matrix's output, and the other weights make up for
            them; "wanda" by magnitude times the norm of the input; "magnitude" without a run.
        samples, sequence: rows of tokens to run; None takes 64 of 256.

    Raises:
        PlanError: a size does not fit the model or its config; all problems at once, before a weight is read.
        CalibrationError: the data are missing, or too few to repair with.

    >>> smaller = bridge.pruned("examples/models/tiny-llama", {"ffn": "50%"}, importance="weights")
    >>> smaller.specs["model.layers.0.mlp.down_proj.weight"].shape
    (128, 192)
    """
    scores = check_choice(keep, drop_layers, importance, repair, order, sparse, sparse_method)
    source = open_source(model, config, tokenizer)
    if sparse is not None:
        sampling = sampling_of(source, samples, sequence, field)
        return made_sparse(source, sparse_method, data, sampling, device, progress)
    cut = plan_cut(source, keep, drop_layers)
    by_importance = order == "importance"
    if scores:
        scores.check(source.fingerprint)
    data = list(data) if isinstance(data, Iterator) else data  # it may be read twice
    tokens = _token_scores(cut, data, field) if not (scores and "vocab" in scores.scores) else {}
    if scores or not cut.dims:
        return cut.pruned({**(scores.scores if scores else {}), **tokens}, by_importance)
    if importance == "weights":
        from bridge.sources.pruned.weight_scores import weight_scores

        return cut.pruned({**weight_scores(cut), **tokens}, by_importance)
    from bridge.calibration.importance.measure import measure_scores
    from bridge.verification.change import measure_change

    prepared = data_of(source, data, sampling_of(source, samples, sequence, field))
    made = measure_scores(
        cut, structure_of(source), replace(prepared, held_out=()), importance=str(importance), repair=repair,
        by_importance=by_importance, device=device, progress=callback_of(progress),
    )  # fmt: skip
    if made.thin:
        warn(
            f"{number(len(made.thin), 'expert')} had too few tokens to be repaired, and keep their values; give more "
            "samples= (--samples)"
        )
    smaller = cut.pruned({**made.scores, **tokens}, by_importance, made.repaired)
    if not tokens:  # `prune` measures one of fewer tokens, on rows that its own tokenizer cuts
        measure_change(smaller, prepared, device)
    return smaller


def check_choice(
    keep: Mapping[str, int | str] | None,
    drop_layers: Sequence[int] | None,
    importance: str | Scores | Path,
    repair: bool,
    order: str,
    sparse: str | None,
    sparse_method: str,
) -> Scores | None:
    """UsageError for what no model can be pruned by, before one is opened; returns the scores that were given."""
    if sparse is not None:
        cut_too = keep is not None or drop_layers is not None or repair or order != "source" or importance != "output"
        check_sparse(sparse, sparse_method, cut_too)
        return None
    if order not in ORDERS:
        raise UsageError(f"order={order!r} (--order): unknown; {nearest(order, ORDERS)}")
    scores = given_scores(importance)
    if scores and repair:
        raise UsageError("repair=True (--repair) needs a run on data, and scores were given; leave one of them out")
    if repair and importance == "weights":
        raise UsageError('repair=True (--repair) needs a run on data, and importance="weights" has none')
    return scores


def plan_prune(
    arguments: Mapping[str, Any], opened: Mapping[str, Source | None], take: Callable[..., Any], complete: bool
) -> tuple[Source | None, int, int]:
    """Check the arguments of `prune` from headers: the smaller model, None if not known; bytes in memory, on disk.

    opened: the models by argument, None for one that is not known yet. take: calls a function, and returns None if that
    has a problem, which it notes. complete: arguments besides those of the pruning have no problem.
    """
    a, source = arguments, opened["model"]
    keys = ("keep", "drop_layers", "importance", "repair", "order", "sparse", "sparse_method")
    scores = take(check_choice, *(a[key] for key in keys))
    if source is None:
        return None, 0, 0
    if a["sparse"]:
        take(plan_sparse, source, a["sparse_method"])
        smaller: Source | None = source
    else:
        cut = take(plan_cut, source, a["keep"], a["drop_layers"])
        smaller = cut.outline() if cut else None
    if scores:
        take(scores.check, source.fingerprint)
    if smaller is None or not complete:
        return smaller, run_memory(source), 0
    quant = None if is_automatic(a["quant"]) else a["quant"]
    planned = take(partial(plan, smaller, a["target"], quant, memory=a["memory"], **a["options"]))
    if not (scores or a["drop_layers"] or a["importance"] == "weights" or a["sparse_method"] == "magnitude"):
        take(check_data, source, a["data"], sampling_of(source, a["samples"], a["sequence"], a["field"]))
    return smaller, run_memory(source), planned.disk if planned else 0


def check_data(source: Source, data: Any, sampling: Sampling) -> None:
    """Raise an error for data that a model cannot run on."""
    if missing := unwarned_data_of(source, data, sampling).missing:
        raise CalibrationError(missing)


def run_memory(source: Source) -> int:
    """Bytes that a model takes when it runs."""
    return RUN_BYTES_PER_VALUE * sum(spec.size for spec in source.specs.values())


def _token_scores(cut: Cut, data: Any, field: str | None) -> ByPlace:
    """How often the data have each token, if tokens go."""
    if not cut.vocabulary:
        return {}
    from bridge.calibration.importance.tokens import token_counts

    return {"vocab": {(None, None): token_counts(cut.source, cut.vocabulary, data, Sampling(SAMPLES, SEQUENCE, field))}}


def given_scores(importance: str | Scores | Path) -> Scores | None:
    """Scores that were given, or saved in a file; `Scores.check` tells whether they are of a model."""
    if isinstance(importance, Scores):
        return importance
    if isinstance(importance, Path) or str(importance).endswith(".safetensors"):
        return Scores.load(importance)
    if importance in IMPORTANCE:
        return None
    raise UsageError(f"importance={importance!r} (--importance): unknown; {nearest(str(importance), IMPORTANCE)}")


@shows_progress
def prune(
    model: Any,
    keep: Mapping[str, int | str] | None = None,
    out: str | Path | None = None,
    *,
    target: TargetName | str = "hf",
    quant: SchemeName | str | Path | Scheme | None = None,
    drop_layers: Sequence[int] | None = None,
    data: Any = None,
    importance: str | Scores | Path = "output",
    repair: bool = False,
    order: str = "source",
    sparse: str | None = None,
    sparse_method: str = "sparsegpt",
    config: Mapping[str, Any] | str | Path | None = None,
    tokenizer: Any = None,
    samples: int | None = None,
    sequence: int | None = None,
    field: str | None = None,
    device: str | None = None,
    verify: bool = True,
    overwrite: bool = False,
    resume: bool = True,
    progress: Progress | bool | None = None,
    memory: int | str | None = None,
    workers: int | None = None,
    **options: Unpack[TargetOptions],
) -> Report:
    """Prune a model as `pruned` does, and write it as `convert` does.

    Args:
        workers: processes that share the calibration of `quant`, as `calibrate` takes it; each of them prunes.

    >>> report = bridge.prune("examples/models/tiny-llama", {"layers": 4}, "four-layers", importance="output")
    >>> report.passed
    True
    """
    if out is not None and not is_remote(out):  # the run of the model comes first
        recover(Path(out))
        check_free(Path(out), overwrite)
    source, calibrates = open_source(model, config, tokenizer), is_automatic(quant)
    data = list(data) if isinstance(data, Iterator) else data  # it may be read twice
    if not calibrates:  # before the run: what a smaller model cannot be written as is refused
        sizes = keep if sparse else keep or {}
        planned = plan(source, target, quant, keep=sizes, drop_layers=drop_layers, sparse=sparse, **options)
        calibrates = bool(planned.calibration)
    smaller = pruned(
        source, keep, drop_layers=drop_layers, data=data, importance=importance, repair=repair, order=order,
        sparse=sparse, sparse_method=sparse_method, samples=samples, sequence=sequence, field=field, device=device,
        progress=progress,
    )  # fmt: skip
    measures = verify and not smaller.perplexity and smaller.can_run
    given: dict[str, Any] = {"data": data, "field": field} if calibrates or measures else {}
    given |= {"device": device} if calibrates else {}
    return convert(
        smaller, target, quant, out, verify=verify, overwrite=overwrite,
        resume=resume, progress=progress, memory=memory, workers=workers, **given, **options,
    )  # fmt: skip


def made_sparse(
    source: Source,
    method: str,
    data: Any,
    sampling: Sampling,
    device: str | None,
    progress: Progress | bool | None,
) -> PrunedSource:
    """Return the model with two zeros in every four weights of its layers; only magnitudes take no run."""
    cut, sparse = plan_sparse(source, method)
    if method == "magnitude":
        return cut.pruned({}, sparse=sparse)
    from bridge.calibration.importance.measure import measure_zeros
    from bridge.verification.change import measure_change

    prepared = data_of(source, data, sampling)
    made = measure_zeros(
        cut, structure_of(source), replace(prepared, held_out=()), sparse, device=device,
        progress=callback_of(progress),
    )  # fmt: skip
    if made.thin:
        warn(
            f"no token reached {number(len(made.thin), 'matrix', 'matrices')} of experts, whose zeros go by magnitude "
            "alone; give more samples= (--samples)"
        )
    sparser = cut.pruned({}, repaired=made.repaired, sparse=replace(sparse, norms=made.norms))
    measure_change(sparser, prepared, device)
    return sparser
