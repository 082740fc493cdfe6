"""Score what `convert` wrote and its source on tasks of lm-evaluation-harness, side by side.

    python examples/evaluate/evaluate.py OUT --against MODEL                            # the small tasks of this folder
    python examples/evaluate/evaluate.py OUT --against MODEL --tasks arc_easy,hellaswag --limit 200
    python examples/evaluate/evaluate.py OUT --against MODEL --print                    # only the two commands

Both run in the same program, vLLM (`--in vllm`) or transformers (`--in hf`); target ort runs in onnxruntime-genai, and
its source in transformers. A program of which the report of OUT says that it does not load it is refused.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
INSTALL = 'pip install "lm_eval[hf]>=0.4.13"'
# What runs an output -> lm_eval's name of it, and the name of the program in a report.
PROGRAMS = {"vllm": "vLLM", "hf": "transformers", "onnxruntime-genai": "onnxruntime-genai"}


def command(model: str, program: str, tasks: str, limit: int | None, results: str) -> list[str]:
    """The command that scores one model."""
    words = [sys.executable, "-m", "lm_eval", "run", "--model", program, "--model_args", f"pretrained={model}"]
    words += ["--tasks", *tasks.split(","), "--include_path", str(HERE), "--batch_size", "8", "--output_path", results]
    return words + (["--limit", str(limit)] if limit else [])


def check_loads(out: Path, program: str) -> None:
    """Refuse a program that would load other weights, or none: its scores would be of another model."""
    rows = json.loads((out / "report.json").read_text())["programs"]
    known = [row for row in rows if row["program"].startswith(f"{PROGRAMS[program]} ")]
    if not known:
        names = ", ".join(row["program"] for row in rows) or "none"
        raise SystemExit(f"{out}: its report says nothing of {PROGRAMS[program]}; programs that it names: {names}")
    for row in known:
        if row["how"] == "no":
            raise SystemExit(f"{out}: {row['program']} does not load it: {row['where']}")


def scores(model: str, program: str, given: argparse.Namespace) -> dict[tuple[str, str], float]:
    """(task, metric) -> the value."""
    with tempfile.TemporaryDirectory() as folder:
        words = command(model, program, given.tasks, given.limit, f"{folder}/results.json")
        if code := subprocess.run(words, check=False).returncode:
            raise SystemExit(f"lm_eval ended with exit code {code}: {shlex.join(words)}")
        (path,) = Path(folder).rglob("results*.json")
        results: dict[str, dict[str, Any]] = json.loads(path.read_text())["results"]
    return {
        (task, name.removesuffix(",none")): value
        for task, metrics in results.items()
        for name, value in metrics.items()
        if isinstance(value, float) and "stderr" not in name
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", required=True, help="the source")
    parser.add_argument("--tasks", default="word_order,sentences", help="with commas between them")
    parser.add_argument("--in", dest="program", choices=PROGRAMS, help="default: vllm if it is installed, else hf")
    parser.add_argument("--limit", type=int, help="documents of each task")
    parser.add_argument("--print", action="store_true", help="print the commands, and run nothing")
    given = parser.parse_args()
    if missing := [name for name in ("bridge.json", "report.json") if not (given.out / name).is_file()]:
        raise SystemExit(f"{given.out}: has no {missing[0]}; give a directory that `qbridge convert` wrote")
    target = json.loads((given.out / "bridge.json").read_text())["plan"]["target"]
    default = "onnxruntime-genai" if target == "ort" else "vllm" if find_spec("vllm") else "hf"
    program = given.program or default
    check_loads(given.out, program)
    pairs = [(given.against, "hf" if target == "ort" else program), (str(given.out), program)]
    if given.print:
        for model, name in pairs:
            print(shlex.join(command(model, name, given.tasks, given.limit, "results.json")))
        return
    if find_spec("lm_eval") is None:
        raise SystemExit(f"lm_eval is not installed: {INSTALL}")
    source, written = (scores(model, name, given) for model, name in pairs)
    print(f"\n{'task':24} {'metric':18} {'source':>9} {'written':>9} {'change':>9}")
    for (task, metric), value in source.items():
        there = written[task, metric]
        print(f"{task:24} {metric:18} {value:9.4f} {there:9.4f} {there - value:+9.4f}")


if __name__ == "__main__":
    main()
