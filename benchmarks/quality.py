"""What every scheme and every peer costs in quality: mappings/quality.toml, of which pages make tables.

    python benchmarks/quality.py                                       measure every row that is missing: hours
    python benchmarks/quality.py --only int4:gptq --model tiny-llama   measure these rows, again if they stand
    python benchmarks/quality.py --only "AutoRound 20" --packages DIR  a peer, with its packages in DIR
    python benchmarks/quality.py --only int4:gptq --draws 3            the mean over draws of calibration rows
    python benchmarks/quality.py --only int4:gptq --task               also lm_eval's accuracy (evaluation/tasks.py)
    python benchmarks/quality.py --only int4:gptq --report             also what the report of the conversion says

One row at a time, written before the next begins. The conversion is a process of its own: its processor seconds and its
peak memory count all, imports too. What it wrote is read by other programs (evaluation/reading.py) into float32, inputs
are quantized by formulas of their own (evaluation/inputs.py), and the model runs on text that calibrates nothing.

SmolLM2-135M: 8 windows of 512 tokens (evaluation/text.py), calibration on rows of 128 tokens of the other text, as many
as `convert` takes by default: 32, and 128 of our GPTQ; peers get 32, as `--samples 32` does. `dithered`: noise of half
a step of the grid that its weights lie on. Example models: 32 rows of 128 tokens of the embedded text, calibration with
the default data. all-MiniLM-L6-v2: embeddings of 100 sentences of Python's language reference. All on one thread. A
row's name is what follows `--quant`, with options of `convert`, and of the scheme: "int4:signround steps=20".
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # as a script, and as a module of tests

from benchmarks.evaluation.models import Bench, bits, megabytes
from benchmarks.evaluation.peers import PEERS
from benchmarks.evaluation.reading import read
from bridge.api.request import data_of
from bridge.api.sensitivity.budget import is_automatic
from bridge.calibration.data import Sampling
from bridge.core.errors import BridgeWarning
from bridge.core.mappings import mappings
from bridge.quant.schemes.catalog import best_names, layout_of, scheme_names
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.quality import KINDS, MODELS, PLAIN, Quality, Rows, read_quality
from bridge.targets import load_target, make_options

ACCELERATE = Path(__file__).parent.parent / ".venv" / "peft"  # `make oracles`; transformers asks for it to load GGUF
BUILD = Path(__file__).parent.parent / "build" / "quality"
DIGITS = {
    "bits": 3, "megabytes": 1, "kl": 5, "kl_error": 5, "perplexity": 2, "agreement": 4, "cosine": 5, "error": 4,
    "accuracy": 4, "reported": 4, "seconds": 1, "memory": 0,
}  # fmt: skip
HEAD = """\
# Quality of schemes and of other programs; `none` are the unquantized models. INT4 rows of SmolLM2 without another size
# are in blocks of 64. Written by `python benchmarks/quality.py`, which says how each figure is made;
# `--only ROW --model MODEL` measures one again.
"""
# A small process between: a child's peak begins with the memory of the process that it was forked from.
RUN = """
import json, resource, subprocess, sys
code = subprocess.call(sys.argv[2:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
json.dump([code, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024], open(sys.argv[1], "w"))
"""
MLX = ["--vocabulary", "keep", "--dtype", "fp16"]  # as other targets: the layers alone
FOR_MLX = ("mxfp8_wo",)  # no program loads what hf writes of it
EMPTY = (None, "", ())  # figures that were not measured
OTHER = 0.001  # of a perplexity: more than another processor moves it
REASONS = {
    "matches no weight": "it quantizes no module of this model",
    "is no multiple of": "rows of this model are no multiple of its blocks",
    "compressed-tensors has only Linear": "Conv1D has no layout with scales of either sign",
    "mlx.toml has no layout for": "MLX has no layout for this model",
    "has no layout for": "GGUF has no layout for this model",
}


@dataclass(frozen=True)
class Asked:
    """What is measured beside the figures of a row, and where a peer's packages are."""

    task: bool = False
    report: bool = False
    packages: Path | None = None


def convert_words(row: str, bench: Bench, out: Path, report: bool = False) -> list[str]:
    """The command that writes one row of a scheme."""
    name, *options = row.split()
    own = [word for word in options if word[0].isalpha() and "=" in word]  # of the scheme: a recipe names them
    options, quant = [word for word in options if word not in own], name
    if own:
        quant = str(out.parent / "recipe.toml")
        Path(quant).write_text("\n".join([f'base = "{name}"', "[options]", *own]) + "\n")
    target, best = target_of(name), layout_of(name) is not None or is_automatic(name)  # measures on data
    words = [sys.executable, "-P", "-m", "bridge", "convert", str(bench.path), "--target", target, "--quant", quant]
    words += MLX if target == "mlx" else []
    if bench.calibration and (report or best or load_scheme(name).needs_calibration):
        options += ["--data", str(bench.calibration), "--compute", "fp32"]
    verify = ["--evaluate", "2k"] if report else ["--no-verify"]  # of schemes without data no output is run else
    return [*words, *options, "--out", str(out), *verify, "--quiet", "--overwrite", "--no-resume"]


def target_of(name: str) -> str:
    """Where a row is written: llama.cpp's blocks in GGUF, and what no checkpoint of target hf holds for MLX."""
    if name.startswith(("q", "iq")):  # llama.cpp's names of its blocks and file types
        return "gguf"
    if layout_of(name) or is_automatic(name):
        return "hf"
    hf, scheme = load_target("hf"), load_scheme(name)
    fits = not any(hf.why_unsupported(form, make_options(hf, {})) for form in scheme.formats)
    return "hf" if fits and name not in FOR_MLX else "mlx"


def peer_words(row: str, bench: Bench, out: Path) -> list[str]:
    """The command that lets a peer write; it gets the rows that bridge calibrates on."""
    data = data_of(bench.source, bench.calibration, Sampling(32, 128))
    ids = [ids for batch in data.batches for ids in batch["input_ids"].tolist()]
    rows = out.parent / "rows.json"
    rows.write_text(json.dumps(ids))
    return [sys.executable, "-P", "-m", "benchmarks.evaluation.peers", row, str(bench.path), str(out), str(rows)]


def timed(words: Sequence[str], packages: Path | None) -> tuple[int, str, float, float]:
    """Run a command: its exit code, what it printed, the seconds of its processor, and its peak memory in MB."""
    root = str(Path(__file__).parent.parent)
    paths = [*([str(packages)] if packages else []), root]
    told = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    told["NUMBA_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        used = Path(folder) / "used.json"
        run = [sys.executable, "-I", "-S", "-c", RUN, str(used), *words]
        said = subprocess.run(run, env=told, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True, text=True)
        code, seconds, memory = json.loads(used.read_text())
    return code, said.stdout, seconds, memory


def measure(row: str, bench: Bench, asked: Asked) -> Quality:
    """Convert, read what was written, and run it."""
    with tempfile.TemporaryDirectory(dir=bench.build) as folder:
        out = Path(folder) / "out"
        words = peer_words(row, bench, out) if row in PEERS else convert_words(row, bench, out, asked.report)
        code, text, seconds, memory = timed(words, asked.packages)
        if code not in (0, 3):  # 3: written, and its report says that it failed
            return Quality(why=reason(text))
        graph = bool(list(out.glob("*.onnx")))
        model = out if graph else read(out, bench.path, bench.language)
        found = figures(model, bench, asked)
        found = replace(found, bits=bits(out, bench.path), megabytes=megabytes(out))
        if asked.report:  # whose verification took part of the seconds
            return replace(found, reported=reported(out))
    return replace(found, seconds=seconds, memory=memory)


def drawn(row: str, bench: Bench, asked: Asked, stands: Quality, draws: int) -> Iterator[Quality]:
    """Measure a row on the draws that do not stand, or again on the first; of each, the row with the mean KL so far."""
    kls = list(stands.draws or ([] if stands.kl is None else [stands.kl]))
    for draw in range(len(kls), draws) or range(1):
        bench.draw(draw)
        made = measure(row, bench, asked)
        if made.kl is None:  # refused, or embeddings
            yield made
            return
        kls[draw : draw + 1] = [made.kl]
        few = {} if len(kls) < 2 else {"draws": tuple(kls)}
        yield replace(Quality() if draw else made, kl=sum(kls) / len(kls), **few)
    bench.draw(0)


def figures(model: Any, bench: Bench, asked: Asked) -> Quality:
    """What the outputs of a model say, None: the source, and its answers to the task if that is asked for."""
    found = Quality(**bench.figures(model))
    if not asked.task or isinstance(model, Path):  # lm_eval runs models in memory
        return found
    from benchmarks.evaluation.tasks import accuracy

    return replace(found, accuracy=accuracy(model or bench.plain(), bench))


def same_windows(bench: Bench, plain: Quality) -> None:
    """Refuse to put rows beside those of other windows, of which the source had another perplexity."""
    now = bench.figures().get("perplexity")
    if now and plain.perplexity and abs(now / plain.perplexity - 1) > OTHER:
        raise SystemExit(
            f"{bench.model}: the source has a perplexity of {now:.2f}, and of {plain.perplexity:.2f} in the table, "
            f"whose rows have other windows; measure `{PLAIN}` and all its rows again, or give another --table"
        )


def reported(out: Path) -> float | None:
    """By how many nats a token the loss rose, by the report of the conversion."""
    rows = json.loads((out / "report.json").read_text())["parity"]["outputs"]
    said = [row for row in rows if row["reference"] == "source" and row["perplexity"]]
    return math.log(said[0]["perplexity"] / said[0]["reference_perplexity"]) if said else None


def reason(text: str) -> str:
    """Why a conversion was refused; an error that is none of the known refusals ends the run."""
    for part, why in REASONS.items():
        if part in text:
            return why
    raise SystemExit(f"an unknown reason not to measure:\n{text[-3000:]}")


def add(kind: str, row: str, model: str, quality: Quality, path: Path) -> None:
    """Put one row into the table; figures that were not measured this time stay, unless the row has a reason now."""
    found = {kind: read_quality(kind, path) for kind in KINDS}
    rows = found[kind].setdefault(row, {})
    before = Quality() if quality.why else rows.get(model, Quality())
    new = {key: value for key, value in vars(quality).items() if value not in EMPTY}
    rows[model] = replace(before, **(new if quality.why else {**new, "why": ""}))
    write(found, path)


def write(found: Mapping[str, Rows], path: Path) -> None:
    """Write all rows: the unquantized models, schemes by the alphabet, then peers as they are listed."""
    lines = [HEAD]
    for kind in KINDS:
        rows = found[kind]
        order = (
            sorted(rows, key=lambda name: (name != PLAIN, name))
            if kind == KINDS[0]
            else [n for n in PEERS if n in rows]
        )
        for name in order:
            lines.append(f"[{kind}.{name if name.replace('_', '').isalnum() else json.dumps(name)}]")
            lines += [_line(model, rows[name][model]) for model in MODELS if model in rows[name]] + [""]
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join(lines), encoding="utf-8")
    partial.replace(path)


def _line(model: str, quality: Quality) -> str:
    figures = [f"{key} = {_figure(key, value)}" for key, value in vars(quality).items() if value not in EMPTY]
    return f"{model} = {{ {', '.join(figures)} }}"


def _figure(key: str, value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, tuple):
        return json.dumps([round(one, DIGITS["kl"]) for one in value])
    return repr(round(value, DIGITS[key]) if DIGITS[key] else round(value))


def main(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    sys.path.append(str(ACCELERATE))
    warnings.simplefilter("ignore", BridgeWarning)  # the default text is meant
    given.build.mkdir(parents=True, exist_ok=True)
    path = given.table or mappings() / "quality.toml"
    every = [PLAIN, *scheme_names(), *best_names(), *PEERS]
    asked = Asked(given.task, given.report, given.packages)
    for model in given.model:
        bench = Bench(model, given.build)
        if PLAIN not in (given.only or ()):
            same_windows(bench, read_quality(path=path).get(PLAIN, {}).get(model, Quality()))
        for row in given.only or every:
            kind = KINDS[row in PEERS]
            stands = read_quality(kind, path).get(row, {}).get(model)
            if stands and not given.only:
                continue
            if row == PLAIN:
                made: Iterable[Quality] = [replace(figures(None, bench, asked), megabytes=megabytes(bench.path))]
            else:
                made = drawn(row, bench, asked, stands or Quality(), given.draws)
            for quality in made:
                print(kind, row, _line(model, quality), flush=True)
                add(kind, row, model, quality, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ROW", help="schemes with their options, or peers")
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--packages", type=Path, help="a folder of a peer's packages")
    parser.add_argument("--draws", type=int, default=1, help="of calibration rows; those that stand are not repeated")
    parser.add_argument("--task", action="store_true", help="also accuracy on the items of evaluation/tasks.py")
    parser.add_argument("--report", action="store_true", help="also the rise of the loss that the report says")
    parser.add_argument("--build", type=Path, default=BUILD, help="where models, text and outputs are kept")
    parser.add_argument("--table", type=Path, help="the table to write; default: mappings/quality.toml")
    main(parser.parse_args())
