"""The commands that faults strike: each writes `out` from what `given` holds, over what lies there already or not."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import bridge
from bridge.core.formats.safetensors import layout
from tests.models.sources_made import CONFIG, made_llama

TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"


@dataclass(frozen=True)
class Command:
    """A command line, with `{given}` for the folder that all share. `before`: what of it lies at `out` already.

    `far`: its output, `{out}`, is an address in a bucket, and nothing of it lies here.
    `weight`: its share of the points. `manifest`: of a batch, written beside `out`, which starts so many `workers`.
    `parts`: what becomes visible by itself.
    `kinds`: of faults, where not all are worth their time.
    """

    name: str
    argv: tuple[str, ...]
    weight: int
    before: str = ""
    manifest: str = ""
    parts: tuple[str, ...] = ("out",)
    kinds: tuple[str, ...] = ()
    far: bool = False
    workers: int = 0

    def prepared(self, place: Path, given: Path, out: str = "out") -> list[str]:
        """Make the folder in which it runs; return its arguments."""
        place.mkdir()
        if self.before and out == "out":
            shutil.copytree(given / self.before, place / "out")
        if self.manifest:
            (place / "batch.toml").write_text(self.manifest.format(given=given, tiny=TINY, out=out))
        return [text.format(given=given, out=out) for text in self.argv]


def _convert(name: str, weight: int, *more: str, model: str = "{given}/llama", before: str = "") -> Command:
    return Command(name, ("convert", model, "--out", "out", "--quiet", *more), weight, before)


def _send(name: str, weight: int, *more: str, before: str = "") -> Command:
    argv = ("convert", "{given}/llama", "--target", "hf", "--quant", "int8_wo", "--out", "{out}", "--quiet", *more)
    return Command(name, argv, weight, before, kinds=("kill", "signal"), far=True)


RECORD = ("golden", "record", "{given}/written", "out", "--no-run", "--quiet")
CHECK = ("golden", "check", "{given}/golden", "--model", "{given}/llama", "--quiet")
BATCH = ("batch", "batch.toml", "--quiet")
ROWS = """
workers = 2
summary = "out/summary.json"
row = [
    {{model = "{given}/llama", target = "hf", quant = "int8_wo", shard_size = "100KB"}},
    {{model = "{given}/llama", target = "torchtitan"}},
    {{model = "{given}/llama", target = "tripy", quant = "int8_wo", dtype = "fp16"}},
]
defaults.out = "out/{{target}}"
"""
TO_A_BUCKET = """
workers = 1
summary = "out/summary.json"
row = [{{model = "{given}/llama", target = "hf", quant = "int8_wo", shard_size = "200KB", out = "{out}"}}]
"""
ONE_CALIBRATION = """
workers = 1
summary = "out/summary.json"
matrix = [{{model = "{tiny}", target = ["hf", "trtllm"], quant = "fp8"}}]
defaults = {{out = "out/{{target}}", verify = false, samples = 4, sequence = 64}}
"""
PRUNE = ("prune", "{given}/llama", "--keep", "ffn=50%", "--drop-layers", "1", "--importance", "weights")
PRUNE_REPAIRED = ("prune", str(TINY), "--keep", "ffn=96", "--repair", "--samples", "16", "--sequence", "64")
COMMANDS = (
    _convert("hf", 33, "--target", "hf", "--quant", "nvfp4_wo", "--shard-size", "100KB", "--no-verify"),
    _convert("hf, verified", 20, "--target", "hf", "--quant", "int8_wo", "--shard-size", "100KB"),
    _convert("hf over an old one", 25, "--target", "hf", "--quant", "int8_wo", "--overwrite", before="old"),
    _convert("hf, calibrated", 12, "--target", "hf", "--quant", "fp8", "--shard-size", "300KB", model=str(TINY)),
    _convert("trtllm on two ranks", 15, "--target", "trtllm", "--quant", "int8_wo", "--tp", "2", model=str(TINY)),
    _convert("tripy", 10, "--target", "tripy", "--quant", "int8_wo", model=str(TINY)),
    _convert("megatron", 10, "--target", "megatron", model=str(TINY)),
    _convert("torchtitan", 15, "--target", "torchtitan"),
    _convert("gguf", 8, "--target", "gguf", "--quant", "q8_0", "--no-verify", model=str(TINY)),
    _convert("trt", 8, "--target", "trt", "--quant", "int8_wo", model=str(TINY)),
    Command("prune", (*PRUNE, "--shard-size", "50KB", "--out", "out", "--quiet"), 12),
    Command(
        "prune, repaired", (*PRUNE_REPAIRED, "--shard-size", "500KB", "--out", "out", "--quiet"), 4, kinds=("kill",)
    ),
    Command("golden record", RECORD, 15),
    Command("golden record over an old one", (*RECORD, "--reason", "int8"), 15, "old golden"),
    Command("golden check of a new conversion", CHECK, 10),
    Command("batch", BATCH, 12, manifest=ROWS, parts=("out/hf", "out/torchtitan", "out/tripy"), workers=2),
    Command(
        "batch with one calibration",
        BATCH,
        4,
        manifest=ONE_CALIBRATION,
        parts=("out/hf", "out/trtllm"),
        kinds=("kill", "kill a worker"),
        workers=1,
    ),
    Command(
        "batch to a bucket",
        BATCH,
        8,
        manifest=TO_A_BUCKET,
        kinds=("kill",),
        far=True,
        workers=1,
    ),
    _send("hf to a bucket", 40, "--shard-size", "200KB"),
    _send("hf to a bucket over an old one", 30, "--shard-size", "200KB", "--overwrite", before="old"),
)


def named(name: str) -> Command:
    """The command of that name."""
    return next(command for command in COMMANDS if command.name == name)


def make_given(folder: Path) -> None:
    """What the commands read: a Llama in two shards, models written from it, and goldens of them."""
    folder.mkdir()
    make_checkpoint(folder / "llama")
    bridge.convert(folder / "llama", "hf", "nvfp4_wo", folder / "old", verify=False)
    bridge.convert(folder / "llama", "hf", "int8_wo", folder / "written", verify=False)
    bridge.golden.record(folder / "old", folder / "old golden", run=False)
    bridge.golden.record(folder / "written", folder / "golden", run=False)


def make_checkpoint(root: Path) -> None:
    """A random Llama in two shards."""
    root.mkdir()
    source = made_llama("bfloat16")
    names, index = sorted(source.specs), {}
    for number, part in enumerate((names[:13], names[13:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        header, offsets, size = layout([source.specs[n] for n in part], {"format": "pt"})
        data = bytearray(size)
        data[: len(header)] = header
        for name in part:
            raw = source.arrays[name].tobytes()
            data[offsets[name] : offsets[name] + len(raw)] = raw
        (root / file).write_bytes(data)
        index |= dict.fromkeys(part, file)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (root / "config.json").write_text(json.dumps(CONFIG))
