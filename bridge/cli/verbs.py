"""Commands that only call the package's verb of the same name."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import bridge
from bridge.cli.flags import FLAGS
from bridge.cli.terminal import BELOW, Exit, Terminal
from bridge.cli.verb import EXITS, Words, shared, verb
from bridge.core.addresses import is_remote
from bridge.core.errors import UsageError


@verb(
    "qbridge convert meta-llama/Llama-3.1-8B --target hf --quant fp8",
    "model target runtime quant candidates out calib data samples sequence field kv group zero_points rotate device "
    "compute config tokenizer base adapter overwrite resume verbose verify evaluate gate memory json quiet debug",
    exits=EXITS, for_target=True, silent=shared,
)  # fmt: skip
def convert(terminal: Terminal, **given: Any) -> None:
    """Convert a model to the target's format.

    A partial output is never published. Processes of `torchrun` share the calibration.
    """
    _print_report(terminal, bridge.convert(**given, progress=terminal.progress))


@verb(
    "qbridge plan meta-llama/Llama-3.1-8B --target trt --quant nvfp4",
    "model target runtime quant candidates out kv group zero_points rotate config base adapter memory keep drop_layers "
    "sparse overwrite every json debug",
    for_target=True,
)
def plan(terminal: Terminal, every: bool, **given: Any) -> None:
    """Print what `convert` would write, from headers alone.

    Each kind of weight, or with --all each tensor: its shape, dtype, bytes and expression; what stays unquantized and
    why; memory and disk; how long it would take on this machine, and what limits it. With --out also whether that may
    be written, and what would be uploaded; nothing there is changed.
    """
    terminal.progress(0, 0, "plan")  # torch's import takes seconds if an architecture has no table
    result = bridge.plan(**given)
    here = bridge.estimate(result, given["model"])
    if terminal.json:
        estimate = {"seconds": here.seconds, "bound": here.bound, **vars(here)}
        from bridge.reporting.plan_table import uploaded

        upload = {"upload": uploaded(result, given["out"])} if is_remote(given["out"]) else {}
        terminal.print_json({**result.to_dict(), "digest": result.digest, "estimate": estimate, **upload})
        return
    from bridge.reporting.columns import line
    from bridge.reporting.plan_table import plan_table, upload_line

    sent = [line("upload", upload_line(result, given["out"]))] if is_remote(given["out"]) else []
    terminal.print(plan_table(result, every), line("here", str(here)), *sent)


@verb(
    "qbridge calibrate MODEL --quant fp8 --out fp8.safetensors",
    "model quant candidates out data samples sequence field kv group zero_points rotate device compute config "
    "tokenizer base memory overwrite verbose quiet debug",
    silent=shared,
)
def calibrate(terminal: Terminal, model: str, quant: str, out: Path, overwrite: bool, **given: Any) -> None:
    """Run a model once and save its statistics.

    ModelOpt collects them, except importance matrices. One calibration serves every target. Processes of `torchrun`
    share the data.
    """
    from bridge.core.output.directory import check_file_free

    first = not shared(given)
    if first:
        check_file_free(out, overwrite, "a calibration", ".safetensors")
    partial = out.with_name(f"{out.name}.partial")
    calibration = bridge.calibrate(model, quant, **given, partial=partial, progress=terminal.progress)
    if not first:
        return
    calibration.save(out)
    if terminal.quiet:
        return
    from bridge.cli.show import calibration_table
    from bridge.reporting.columns import line

    target = "gguf" if calibration.input_square else "hf"
    words = ["qbridge", "convert", model, "--target", target, "--quant", quant, "--calib", str(out)]
    for name in ("kv", "group", "rotate", "config", "tokenizer"):
        words += [f"--{name}", str(given[name])] if given[name] else []
    words += ["--zero-points"] if given["zero_points"] else []
    result = [calibration_table(calibration)] if terminal.verbose else calibration.lines()
    terminal.print(*result, line("written", str(out)), line("next", shlex.join(words)))


@verb(
    "qbridge verify llama-fp8 --against meta-llama/Llama-3.1-8B",
    "out against data tokenizer base evaluate gate json verbose quiet debug",
    exits=EXITS,
)
def verify(terminal: Terminal, **given: Any) -> None:
    """Compare a written model with its source and run it."""
    _print_report(terminal, bridge.verify(**given, progress=terminal.progress))


@verb("qbridge engine llama-fp8 --gpu rtx4090,rtx5090", "model gpu profile out memory quiet json debug")
def engine(terminal: Terminal, **given: Any) -> None:
    """Build TensorRT engines of a written model, without a GPU.

    TensorRT for RTX builds one engine of each graph for all GPUs that are named. `engine.json` names the engines, what
    they are bound to, and what each quantized matrix was compiled to.
    """
    built = bridge.engine(**given, progress=terminal.progress)
    if terminal.json:
        terminal.print_json(dataclasses.asdict(built))
    elif not terminal.quiet:
        terminal.print(*built.lines())


@verb(
    "qbridge prune MODEL --keep ffn=75% --repair --out small",
    "model keep drop_layers out target quant data importance repair order sparse sparse_method samples sequence field "
    "device config tokenizer memory overwrite resume verify verbose json quiet debug",
    for_target=True,
)
def prune(terminal: Terminal, **given: Any) -> None:
    """Write a model with fewer channels, heads or layers.

    What is left out adds least to the output on the data. Only rows and columns that stay are read.
    """
    _print_report(terminal, bridge.prune(**given, progress=terminal.progress))


@verb(
    "qbridge distill small MODEL --data corpus.txt --out trained",
    "student teacher data out target quant steps batch sequence lr temperature pairs top_k teacher_cache calib field "
    "seed save_every eval_every device memory workers overwrite resume verify verbose json quiet debug",
    for_target=True,
    silent=shared,
)
def distill(terminal: Terminal, **given: Any) -> None:
    """Train a model to answer as another one does.

    With --quant it is trained with the codes that are written.
    """
    _print_report(terminal, bridge.distill(**given, progress=terminal.progress))


def _print_report(terminal: Terminal, report: bridge.Report) -> None:
    from bridge.reporting.report import report_table

    terminal.finish(report, report_table(report, terminal.verbose))


@verb(
    "qbridge search MODEL --parameters 60% --dims ffn,heads,layers",
    "model parameters bytes latency dims quant data importance repair scores samples sequence field device config "
    "tokenizer overwrite json quiet debug",
)
def search(terminal: Terminal, scores: Path | None, overwrite: bool, **given: Any) -> None:
    """Find the pruned sizes that cost least within a budget.

    Each size of each dim is measured alone on held-out text; combinations of them are chosen by the sums, and the best
    are measured. The last line is the command that prunes.
    """
    from bridge.core.output.directory import check_file_free
    from bridge.workflows.prune.searched import searched_table

    sizes = {kind: given.pop(kind) for kind in ("parameters", "bytes", "latency")}
    budget = {kind: size for kind, size in sizes.items() if size is not None}
    if len(budget) != 1:
        raise UsageError("give one of --parameters, --bytes and --latency, as in --parameters 60%")
    if scores is not None:
        if given["repair"]:
            raise UsageError(f"--scores {scores}: a repair leaves no scores; leave one of the two out")
        check_file_free(scores, overwrite, "a file of scores", ".safetensors")
    result = bridge.search(budget=budget, **given, progress=terminal.progress)
    path = str(result.scores.save(scores)) if scores is not None and result.scores else ""
    terminal.show(lambda: result.to_json(path), searched_table(result, path))


@verb(
    "qbridge sensitivity MODEL --quant int4_awq,fp8 --budget 4.8bits",
    "model quant data target runtime budget fallback method ranking out samples sequence field kv rotate device "
    "compute memory config tokenizer overwrite json quiet debug",
)
def sensitivity(terminal: Terminal, out: Path | None, overwrite: bool, **given: Any) -> None:
    """Rank layers by the cost of quantizing each one alone.

    The cost is the divergence of the model's output distribution on held-out text; with --method block, the error of a
    block's output, which takes the memory of a block. With a budget, a recipe excludes layers from the scheme, or gives
    each layer one of several schemes, so that the sum of costs is the least possible.
    """
    from bridge.api.sensitivity.budget import is_automatic
    from bridge.core.output.directory import check_file_free

    if given["ranking"] is not None:
        check_file_free(Path(given["ranking"]), overwrite, "a ranking", ".json")
    if out is not None:
        if given["budget"] is None and not is_automatic(given["quant"]):
            raise UsageError(f"--out {out}: a recipe needs --budget, for example 6.5bits or kl=0.01")
        check_file_free(out, overwrite, "a recipe", ".toml")
    result = bridge.sensitivity(**given, progress=terminal.progress)
    if out is not None:
        result.save(out, overwrite)
    terminal.show(result.to_json, result, *([f"written: {out}"] if out else []))


@verb(
    "qbridge inspect MODEL --against OUT --out seen",
    "model against config quant calib data out feature_dirs steps gradients nan cost worst samples sequence field "
    "device tokenizer overwrite json quiet debug",
)
def inspect(terminal: Terminal, worst: int, **given: Any) -> None:
    """Show where a model loses most, layer by layer.

    With --against each module is compared with the source's: alone, with the source's input, and with all errors
    before it. Without, the model runs, and statistics of its tensors are recorded. The exit code is 3 if a NaN or an
    infinity was seen.
    """
    from bridge.workflows.inspect.result import inspection_table

    seen = bridge.inspect(**given, progress=terminal.progress)
    terminal.show(seen.to_json, inspection_table(seen, worst, given["out"]))
    if not seen.finite:
        raise Exit(BELOW)


@verb("qbridge repair DIR --out NEW", "directory out overwrite resume json quiet debug", exits=EXITS)
def repair(terminal: Terminal, **given: Any) -> None:
    """Mend a checkpoint that another program wrote.

    `qbridge check DIR` says what is wrong with it. What needs no source is mended in a new directory: the index, heads,
    lists of unquantized modules, promises of draft layers, names, NVFP4 scales of fused matrices. The exit code is 3 if
    an error is left.
    """
    result = bridge.repair(**given, progress=terminal.progress)
    terminal.finish(result, str(result))


def _is_chain(words: Words) -> bool:
    return bool(words["out"].endswith(".toml"))


@verb(
    'qbridge run llama-fp8 "The capital of France is"',
    "out text tokens chat system beside temperature seed image audio overwrite resume json debug",
    silent=lambda words: _is_chain(words) and shared(words),
)
def run(terminal: Terminal, out: str, text: str | None, overwrite: bool, resume: bool, **given: Any) -> None:
    """Continue a text with a model, talk with it, or run a chain.

    The last line has the tokens per second, and with what the model ran.
    """
    if out.endswith(".toml"):
        if text is not None:
            raise UsageError(f"{out} is a chain of steps, which takes no text")
        for name in ("image", "audio", "chat", "system", "beside"):
            if given[name]:
                flag = FLAGS[name].names or f"--{name}"
                raise UsageError(f"{out} is a chain of steps, which takes no {flag}; leave it out")
        chain = bridge.chain(out, overwrite=overwrite, resume=resume, progress=terminal.progress)
        terminal.finish(chain, "\n".join(chain.lines()))
        return
    if text is None and given["chat"] and not terminal.json:
        from bridge.cli.conversation import talk

        return talk(terminal, out, **given)
    if text is None and not given["image"] and not given["audio"]:
        raise UsageError(f'give the text that {out} continues: qbridge run {out} "The capital of France is"')
    terminal.progress(0, 0, "load")
    alone = not terminal.json and given["beside"] is None
    result = bridge.run(out, text or "", **given, stream=terminal.write if alone else None)
    if terminal.json:
        terminal.print(result.to_json())
    elif result.beside is None:
        terminal.print(f"\n{result}")
    else:
        from bridge.cli.conversation import columns

        terminal.print(columns({out: result, given["beside"]: result.beside}))
