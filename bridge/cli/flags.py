"""Every argument and flag of the command line, in one table.

The name of a row is that of the parameter in Python, of `bridge.convert` for example. A row `VERB.PARAMETER` is for one
verb, which has another text, type or default. A test compares the table with the signatures of the verbs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.api.words import TargetOptions
from bridge.core.errors import UsageError
from bridge.core.text import byte_count

REQUIRED: Any = ...


@dataclass(frozen=True)
class Flag:
    """One row of the table."""

    help: str
    kind: type = str
    """What a word is read as; a `bool` takes no word."""
    default: Any = None
    """That of the verb. A `bool` that is true by default is the flag `--no-NAME`."""
    names: str = ""
    """The spellings, `--quiet -q`, if they are not `--NAME`."""
    metavar: str | None = None
    """What stands for the word in the help: `N|auto`; `<int>` without it."""
    min: int | None = None
    several: bool = False
    """May be repeated: the verb gets a list, or None."""
    read: Callable[[Any], Any] | None = None
    """Makes the verb's value of a word that is given."""
    complete: Callable[[str], list[str]] | None = None
    """The words that begin so, for the shell."""
    argument: bool = False
    """A word without a flag, by position."""
    alone: bool = False
    """Also without its word, which is then "true": `--engine`, `--engine rtx4090`; `--cache/--no-cache`: "false"."""


def word(metavar: str, help: str, kind: type = str, default: Any = REQUIRED, several: bool = False) -> Flag:
    """Make the row of a word that has a position in place of a flag."""
    return Flag(help, kind, default, metavar=metavar, several=several, argument=True)


def switch(help: str, names: str = "", default: bool | None = False) -> Flag:
    """Make the row of a flag without a word."""
    return Flag(help, bool, default, names)


def complete_target(begin: str) -> list[str]:
    """Complete the name of a target, or of a program that stands for one."""
    from bridge.planning.contract_files import runtime_names
    from bridge.targets import ALIASES, target_names

    return [name for name in dict.fromkeys((*target_names(), *ALIASES, *runtime_names())) if name.startswith(begin)]


def _complete_runtime(begin: str) -> list[str]:
    from bridge.planning.contract_files import runtime_names

    return [name for name in runtime_names() if name.startswith(begin)]


def _complete_scheme(begin: str) -> list[str]:
    from bridge.quant.schemes.catalog import best_names, scheme_names

    return [name for name in (*scheme_names(), *best_names()) if name.startswith(begin)]


def _complete_kv(begin: str) -> list[str]:
    from bridge.quant.schemes.catalog import kv_names

    return [name for name in kv_names() if name.startswith(begin)]


def _complete_shown(begin: str) -> list[str]:
    from bridge.core.mappings import table_files

    lists = ("schemes", "targets", "architectures", "runtimes", "environment")
    return [name for name in (*lists, *(path.stem for path in table_files("arch"))) if name.startswith(begin)] + (
        _complete_scheme(begin) if begin else []
    )


def _complete_rotation(begin: str) -> list[str]:
    from bridge.sources.rotated.opening import ROTATIONS

    return [name for name in ROTATIONS if name.startswith(begin)]


def _complete_gpu(begin: str) -> list[str]:
    from bridge.targets.trt.gpus import gpu_names

    done, comma, last = begin.rpartition(",")
    return [f"{done}{comma}{name}" for name in gpu_names() if name.startswith(last)]


def _count_or_auto(samples: str) -> Any:
    """The value of --samples: a number where it is one; the verbs refuse other words than "auto"."""
    return int(samples) if samples and samples.isdecimal() else samples


def _sizes(keep: list[str]) -> dict[str, int | str]:
    """The dims and sizes of `--keep`."""
    sizes: dict[str, int | str] = {}
    for text in keep:
        dim, equals, size = text.partition("=")
        if not equals or not dim.strip() or not size.strip():
            raise UsageError(f"--keep {text}: give a dim and its size, as in ffn=75%")
        if dim.strip() in sizes:
            raise UsageError(f"--keep {text}: {dim.strip()} is given twice")
        sizes[dim.strip()] = size.strip()
    return sizes


def _numbers(text: str) -> list[int]:
    """The layers of `--drop-layers`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--drop-layers {text}: give numbers with commas between them, as in 3,4") from None


def _pairs(text: str) -> str | list[tuple[int, int]] | None:
    """The pairs of layers of `--pairs`."""
    if text in ("norm", "none"):
        return None if text == "none" else text
    try:
        return [(int(student), int(teacher)) for student, teacher in (part.split(":") for part in text.split(","))]
    except ValueError:
        raise UsageError(f"--pairs {text}: give norm, none, or pairs of layers, as in 1:2,3:5") from None


def _schemes(quant: str) -> str | list[str]:
    """One scheme, or those that commas are between; `auto:` has commas of its own."""
    return quant.split(",") if "," in quant and not quant.startswith("auto:") else quant


def _dims(dims: str) -> list[str]:
    return [dim.strip() for dim in dims.split(",")]


_MEMORY = "bytes that the run may take, without those of imports: 2GB, 512MiB"
_OUT = "a directory that `convert` wrote, or its address"
_TARGET = Flag("what to write", default="hf", complete=complete_target)

# fmt: off
FLAGS = {
    # the model, and what is written
    "model": word("MODEL", "a directory, a hub id or an address"),
    "distill.student": word("MODEL", "a directory, a hub id or an address"),
    "teacher": word("TEACHER", "a model with the same vocabulary"),
    "golden.check.model": Flag("instead of OUT: convert this model again"),
    "base": Flag("the model under a LoRA adapter; default: the one that the adapter names"),
    "adapter": Flag(
        "MODEL is a LoRA adapter: merge it into its base (default), or write the base and keep it in OUT/adapter",
        metavar="merge|keep"
    ),
    "config": Flag("JSON object, or a file of one, in place of entries of config.json"),
    "inspect.config": Flag("config.yaml of what to look at; default: activations, weights", metavar="FILE"),
    "tokenizer": Flag("directory or hub id of the tokenizer; default: the model's"),
    "target": Flag("the format to write: see `qbridge show targets`", default=REQUIRED, complete=complete_target),
    "prune.target": _TARGET,
    "distill.target": _TARGET,
    "sensitivity.target": Flag("what the recipe is for; default: hf", complete=complete_target),
    "runtime": Flag(
        "the program that will load it: vllm, sglang ... (`qbridge show runtimes`)",
        names="--for", complete=_complete_runtime
    ),
    "out": word("OUT", _OUT),
    "convert.out": Flag("directory or address to write; default: MODEL-SCHEME-TARGET"),
    "plan.out": Flag("directory or address that `convert` would write, to see whether it may"),
    "prune.out": Flag("directory to write; default: MODEL-pruned-SCHEME-TARGET"),
    "distill.out": Flag("directory to write; default: MODEL-distilled"),
    "repair.out": Flag("a new directory for the mended checkpoint", default=REQUIRED, metavar="NEW"),
    "calibrate.out": Flag("file to write: NAME.safetensors", Path, REQUIRED),
    "ranking": Flag("JSON file for what was measured, before a recipe is chosen", Path),
    "sensitivity.out": Flag("recipe to write: NAME.toml, for --quant of the other verbs", Path),
    "inspect.out": Flag("directory for inspect.html, .json and .csv", metavar="DIR"),
    "run.out": word("OUT", "a written model, or a chain of steps (.toml)"),
    "golden.check.out": word("[OUT]", _OUT, default=None),
    "build": Flag(
        "GPUs: build engines of target trt's outputs, name what each matrix compiles to, and remove them",
        complete=_complete_gpu
    ),
    "engine.model": word("DIR", "what `convert` wrote for target trt"),
    "engine.out": Flag("a new directory for the engines; default: beside the graphs", Path, metavar="NEW"),
    "gpu": Flag(
        "GPUs or architectures: rtx4090,rtx5090, l40s, sm89, ada; default: this machine's, by the full TensorRT",
        complete=_complete_gpu
    ),
    "profile": Flag(
        "least, usual and largest extent of axes: batch=1:4:16,past_sequence=0:512:4095", metavar="AXIS=MIN:OPT:MAX,..."
    ),
    "overwrite": switch("replace OUT, if bridge wrote it"),
    "repair.overwrite": switch("replace NEW, if `repair` wrote it"),
    "calibrate.overwrite": switch("replace OUT"),
    "sensitivity.overwrite": switch("replace OUT"),
    "search.overwrite": switch("replace the file of --scores"),
    "inspect.overwrite": switch("replace an inspection in DIR"),
    "run.overwrite": switch("of a chain: replace what is there"),
    "resume": switch("discard what an unfinished run left", default=True),
    "batch.resume": switch("run finished rows again, discard leftovers", default=True),
    "run.resume": switch("of a chain: begin all steps again", default=True),
    "verify": switch("do not re-read and run the output", default=True),

    # quantization
    "quant": Flag("scheme name (`qbridge show schemes`) or recipe file; default: none", complete=_complete_scheme),
    "convert.quant": Flag(
        "scheme name (`qbridge show schemes`), recipe file, or auto:4.8bits (chosen per layer); default: none",
        complete=_complete_scheme
    ),
    "calibrate.quant": Flag(
        "scheme name (`qbridge show schemes`) or recipe file", default=REQUIRED, complete=_complete_scheme
    ),
    "sensitivity.quant": Flag(
        "scheme name, recipe file, or schemes to choose from: int4_awq,fp8",
        default=REQUIRED, read=_schemes, complete=_complete_scheme
    ),
    "golden.record.quant": Flag("the recipe that OUT was converted with, if any"),
    "kv": Flag("the KV cache: fp8, int8, nvfp4; fp8_cast, nvfp4_cast need no calibration", complete=_complete_kv),
    "group": Flag("values in a block of integer weights: 32, 64 or 128; default: the scheme's", int),
    "zero_points": switch("a zero point in each block of INT4 weights: target hf, compressed-tensors or awq"),
    "rotate": Flag(
        "fold a rotation into the weights, the function stays: hadamard; hadamard:stream, hadamard:heads: a part of it",
        complete=_complete_rotation
    ),
    "budget": Flag("6.5bits per weight on average, 7GB of weights, or kl=0.01 nats per token"),
    "fallback": Flag("scheme of excluded layers; default: unquantized", complete=_complete_scheme),
    "method": Flag(
        "kl: one run per layer; modelopt: ModelOpt's gradient scores, in one run; block: errors of blocks, with one "
        "block in memory", default="kl"
    ),

    # calibration and other runs of the model
    "calib": Flag("a saved calibration; none: a name such as int4:best measures nothing"),
    "candidates": Flag("rules that int4:best measures; default: all that are possible", metavar="RULE,RULE"),
    "distill.calib": Flag("saved calibration of the student, for --quant"),
    "inspect.calib": Flag("saved calibration, for static scales, SmoothQuant and AWQ"),
    "golden.check.calib": Flag("with --model: another calibration than the golden's"),
    "data": Flag("text or JSONL file, dataset id; default: the embedded text"),
    "samples": Flag(
        "number of calibration sequences; default: 32, 128 for SmoothQuant and int4:gptq",
        metavar="N|auto",
        read=_count_or_auto,
    ),
    "sensitivity.samples": Flag("number of calibration sequences; default: 32", int, min=1),
    "prune.samples": Flag("number of sequences to run; default: 64", int, min=1),
    "search.samples": Flag("number of sequences to run; default: 64", int, min=1),
    "inspect.samples": Flag("number of sequences to run; default: 32", int, min=1),
    "sequence": Flag("tokens per sequence; default: 128", int, min=1),
    "prune.sequence": Flag("tokens per sequence; default: 256", int, min=1),
    "search.sequence": Flag("tokens per sequence; default: 256", int, min=1),
    "distill.sequence": Flag("tokens in a row", int, 512, min=2),
    "field": Flag("key of a JSONL record that holds its text or chat"),
    "device": Flag("where calibration runs: cpu, cuda, cuda:1"),
    "evaluate": Flag("run the output on so many tokens of text, 20k; default: 2,048 or more of what is run"),
    "gate": Flag("kl=0.1: the most nats a token that a language model may cost; cosine: judge by logits, as before"),
    "compute": Flag("fp32: calibrate in float32; default: the model's dtype"),
    "sensitivity.compute": Flag("fp32: measure in float32; default: float32 where it is faster, for method kl"),
    "memory": Flag(_MEMORY),
    "convert.memory": Flag(_MEMORY, read=byte_count),
    "prune.memory": Flag(_MEMORY, read=byte_count),
    "batch.memory": Flag("for all rows together: 16GB; default: free memory", read=byte_count),

    # pruning and searching
    "keep": Flag(
        "size of a dim: ffn=75%, heads=24, hidden, kv_heads, layers, experts, moe_ffn, shared_ffn, vocab",
        metavar="DIM=SIZE", several=True, read=_sizes
    ),
    "drop_layers": Flag("numbers of layers to leave out, from 0", metavar="N,N", read=_numbers),
    "sparse": Flag("set two of every four weights to zero; all sizes stay", metavar="2:4"),
    "sparse_method": Flag("sparsegpt, wanda, or magnitude (without a run)", default="sparsegpt"),
    "importance": Flag("output, minitron (ModelOpt's), weights (without a run), or a file of scores", default="output"),
    "repair": switch("fit the matrices that read fewer channels by least squares"),
    "search.repair": switch("repair each candidate by least squares before it is measured"),
    "order": Flag("of what is kept: source, or importance, as ModelOpt sorts", default="source"),
    "parameters": Flag("budget: a share of all values, 60%, or a number of them", metavar="SIZE"),
    "bytes": Flag("budget: tensors as written with --quant: 3GB, 50%", metavar="SIZE"),
    "latency": Flag("budget: bytes of weights that one decoded token reads: 70%", metavar="SHARE"),
    "dims": Flag("dims that may change; default: all", metavar="DIM,DIM", read=_dims),
    "scores": Flag("file to write scores to, so that prune keeps the same parts: NAME.safetensors", Path),

    # training
    "steps": Flag("steps of training", int, 1000, min=1),
    "batch": Flag("rows in a step", int, 8, min=1),
    "lr": Flag("the largest learning rate", float, 1e-4),
    "distill.temperature": Flag("softens the probabilities of both", float, 1.0),
    "pairs": Flag("hidden states: norm, none, or pairs of layers", default="norm", metavar="S:T,S:T", read=_pairs),
    "top_k": Flag("the teacher's likeliest ids; default: all", int, min=1),
    "teacher_cache": Flag("directory of the teacher's answers: it runs once"),
    "distill.seed": Flag("of the order of rows; default: 0", int, 0, min=0),
    "save_every": Flag("steps between saved states", int, 100, min=1),
    "eval_every": Flag("steps between evaluations", int, 100, min=1),
    "workers": Flag("processes that share a batch, as torchrun starts them", int, min=1),

    # inspecting and running
    "inspect.against": Flag("what `convert` wrote of MODEL for target hf, to compare with it", metavar="OUT"),
    "feature_dirs": Flag(
        "folder of Python files with feature classes; repeat it", names="--features", metavar="DIR", several=True
    ),
    "inspect.steps": Flag("batches of at most 8 rows to run, held-out ones too; default: all", int, min=1),
    "gradients": switch("also run the next-token loss backward"),
    "nan": switch("name the module that makes the first NaN or infinity"),
    "cost": switch("also measure time and memory of each module"),
    "worst": Flag("lines to print, shared by the schemes", int, 10, min=1),
    "text": word("[TEXT]", "what the model continues", default=None),
    "tokens": Flag("number of tokens at most", int, 64),
    "chat": switch("put TEXT into the model's chat template; without TEXT: a conversation"),
    "system": Flag("what the system says first, in a chat"),
    "beside": Flag("another output, or the source: its text stands beside", names="--with", metavar="MODEL"),
    "temperature": Flag("0 takes the most likely token; above 0, tokens are drawn", float, 0.0),
    "seed": Flag("of the random numbers", int, 0),
    "image": Flag("for a model that sees; may be repeated", metavar="FILE", several=True),
    "audio": Flag("a WAV, for a model that hears", metavar="FILE", several=True),

    # batches, goldens, tables, the cache
    "manifest": word("MANIFEST", "TOML with [[row]] and [[matrix]] tables", Path),
    "only": Flag("name of a row, or a glob; may be repeated", several=True),
    "engine": Flag("local, or ray for a cluster; default: the manifest's"),
    "batch.workers": Flag("rows at the same time; default: one per core", int, min=1),
    "dry_run": switch("plan every row, write nothing"),
    "strict": switch("run no row if one of them cannot run", "--strict/--no-strict", None),
    "against": Flag("the model it was made from: a directory, a hub id or an address", default=REQUIRED),
    "directory": word("GOLDEN", "the golden: a small directory for version control", Path),
    "repair.directory": word("DIR", "a local directory with config.json and safetensors"),
    "reason": Flag("why an existing golden changes; saved in its history", default=""),
    "golden.record.against": Flag("verify OUT against this model first"),
    "tolerance": Flag("allowed difference of later outputs, relative L2", float),
    "golden.record.run": switch("record bytes only, run nothing", default=True),
    "golden.check.run": switch("run the model; default: only if a byte moved", "--run/--no-run", None),
    "work": Flag("with --model: where to convert; default: the system's temporary directory", Path),
    "a": word("A", "a golden, or a directory that `convert` wrote, or its address"),
    "b": word("B", "another one"),
    "paths": word(
        "[PATH]...", "written models, checkpoints, .onnx and .gguf files, recipes, tables", default=None, several=True
    ),
    "what": Flag(
        "schemes, targets, architectures, runtimes, environment; a scheme, table, output or file",
        default=REQUIRED, metavar="WHAT", argument=True, complete=_complete_shown
    ),
    "plan.every": switch("one line per tensor instead of one per kind of layer", "--all"),
    "show.every": switch("every scheme; one line per tensor; every spelling of a dialect", "--all"),
    "show.runtime": Flag("the program that loads schemes: vllm, sglang ...", names="--for", complete=_complete_runtime),
    "dialect": Flag("a dialect, such as megatron, to show next to an architecture's table"),
    "clear": switch("remove all of it; it is made again if needed"),

    # what is printed
    "json": switch("print JSON on stdout instead of tables"),
    "quiet": switch("no progress, no result", "--quiet -q"),
    "verbose": switch("every table of the report, not the verdict alone", "--verbose -v"),
    "debug": switch("show tracebacks and framework output"),
}
# fmt: on


def flag_of(verb: str, name: str) -> Flag:
    """The row of a verb's parameter: its own, or the one that verbs share."""
    own = FLAGS.get(f"{verb}.{name}")
    return own or FLAGS[name]


def in_flags(text: str) -> str:
    """A message with Python's arguments as this command line has them: `calib=` is `--calib`, `kv='fp8'` is `--kv fp8`.

    A call, `bridge.convert(model, quant="fp8")`, stays as it is.
    """
    own = [name for name, flag in FLAGS.items() if "." not in name and not flag.argument]
    names = "|".join(sorted({*own, *TargetOptions.__annotations__}, key=len, reverse=True))
    value = r"""'[^'\n]*'|"[^"\n]*"|\{[^\n]*?\}(?= \(--)|\{[^{}\n]*\}|(?!torch\.|tp\.|np\.)[\w./:-]*"""
    both = re.compile(rf"(?<![\w./-])(?P<name>{names})=(?P<value>{value}) \((?P<flag>--[^)\n]*)\)")
    alone = re.compile(rf"(?<![\w./-])(?P<name>{names})=(?P<value>{value})(?![={{\[(])")

    def flag(match: re.Match[str]) -> str:
        name, given = match["name"].replace("_", "-"), match["value"]
        if given in ("True", "False"):
            return f"--{'no-' if given == 'False' else ''}{name}"
        if given.startswith("{"):  # an object as Python writes it
            words = {"None": "null", "True": "true", "False": "false", "'": '"'}
            given = "'" + re.sub("None|True|False|'", lambda word: words[word[0]], given) + "'"
        plain = given[1:-1] if re.fullmatch(r"""(['"])[\w.:/,-]+\1""", given) else given
        return f"--{name} {plain}".rstrip()

    def written(match: re.Match[str]) -> str:
        return match["flag"] if " " in match["flag"] or not match["value"] else flag(match)

    parts = re.split(r"(\b[\w.]+\([^)\n]+\))", text)
    parts[::2] = [alone.sub(flag, both.sub(written, part)) for part in parts[::2]]
    return "".join(parts)
