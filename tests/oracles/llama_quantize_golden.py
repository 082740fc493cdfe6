"""Write llama_quantize.json, the types that llama-quantize chooses.

    python -m tests.oracles.llama_quantize_golden DIRECTORY

DIRECTORY has libllama and libggml, as bins/linux-x64 of the npm package @node-llama-cpp/linux-x64 does; 3.21.1 made the
file. Of each model it has the rows of each matrix and, by file type, a letter for the type of each, see `LETTERS`; "+"
behind a file type: with an importance matrix.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import bridge
from bridge.targets.gguf.file_types import FILE_TYPES
from tests.models.gguf_families import save

KEPT = Path(__file__).parent / "llama_quantize.json"
LETTERS = {
    "a": "q4_0", "b": "q4_1", "c": "q5_0", "d": "q5_1", "e": "q8_0", "f": "q2_k", "g": "q3_k", "h": "q4_k", "i": "q5_k",
    "j": "q6_k", "k": "iq4_nl", "l": "iq4_xs",
}  # fmt: skip
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_hidden_layers": 17}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": ("llama", WIDE | {"num_key_value_heads": 2}),
    "narrow": ("qwen3", {}),
    "tied": ("qwen2", WIDE | {"num_key_value_heads": 4, "num_hidden_layers": 9}),
    "joined": ("phi3", WIDE | {"num_key_value_heads": 4, "num_hidden_layers": 9}),
    "eight": ("mixtral", WIDE | {"num_key_value_heads": 4, "num_local_experts": 8, "num_hidden_layers": 9}),
    "experts": ("qwen3moe", WIDE | {"num_key_value_heads": 4, "moe_intermediate_size": 256, "num_hidden_layers": 9}),
}


DRY_RUN = 5  # among the switches
LINE = re.compile(r"\[ *\d+/ *\d+\] (\S+) [^\n]*-> [^\n]*\((\w+)\)")


class _Params(ctypes.Structure):
    _fields_ = [
        ("threads", ctypes.c_int32), ("file_type", ctypes.c_int), ("output", ctypes.c_int), ("embedding", ctypes.c_int),
        ("switches", ctypes.c_bool * 6), ("importance", ctypes.c_void_p), ("rest", ctypes.c_void_p * 3),
    ]  # fmt: skip


class _Importance(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("values", ctypes.POINTER(ctypes.c_float)), ("count", ctypes.c_size_t)]


def _library(folder: Path) -> ctypes.CDLL:
    def load(name: str) -> ctypes.CDLL:
        return ctypes.CDLL(str(next(folder.glob(f"{name}*.so"))), mode=ctypes.RTLD_GLOBAL)

    load("libggml-base")
    load("libggml.v").ggml_backend_load_all_from_path(str(folder).encode())
    library = load("libllama.v")
    library.llama_model_quantize_default_params.restype = _Params
    library.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(_Params)]
    return library


def _types(library: ctypes.CDLL, source: Path, file_type: str, weighted: bool) -> dict[str, str]:
    """Matrix -> its type after llama-quantize, from the log of a dry run."""
    params = library.llama_model_quantize_default_params()
    params.threads, params.file_type, params.switches[DRY_RUN] = 1, FILE_TYPES[file_type].number, True
    shapes = {t.name: t.shape for t in gguf.GGUFReader(source).tensors if len(t.shape) > 1}  # `in` first
    arrays = {name: np.ones(int(np.prod([shape[0], *shape[2:]])), np.float32) for name, shape in shapes.items()}
    entries = (_Importance * (len(arrays) + 1))()
    for at, (name, array) in enumerate(arrays.items()):
        entries[at] = (name.encode(), array.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), array.size)
    params.importance = ctypes.cast(entries, ctypes.c_void_p) if weighted else None
    said: list[str] = []
    listen = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
        lambda level, text, user: said.append(text.decode())
    )
    library.llama_log_set(listen, None)
    assert library.llama_model_quantize(str(source).encode(), b"", params) == 0, file_type
    return {found[1]: found[2].lower() for found in LINE.finditer("".join(said))}


def main(folder: Path) -> None:
    library, kept = _library(folder), {}
    letters = {kind: letter for letter, kind in LETTERS.items()}
    with tempfile.TemporaryDirectory() as made:
        for name, (family, changed) in MODELS.items():
            work = Path(made) / name
            model = str(save(family, work / "model", **changed))
            bridge.convert(model, "gguf", out=work / "plain", dtype="fp32", verify=False)
            source = work / "plain" / "model.gguf"
            rows = {t.name: int(t.shape[0]) for t in gguf.GGUFReader(source).tensors if len(t.shape) > 1}
            rows = {tensor: width for tensor, width in rows.items() if "ffn_gate_inp" not in tensor}
            types = {}
            for file_type in FILE_TYPES:
                for weighted in (False, True):
                    found = _types(library, source, file_type, weighted)
                    types[file_type + "+" * weighted] = "".join(letters[found[tensor]] for tensor in rows)
            kept[name] = {"rows": rows, "types": types}
            print(name, flush=True)
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
