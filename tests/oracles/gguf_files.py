"""GGUF files by gguf-py: of every type, split, with keys that ours never writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Changed = Mapping[str, Any]


def rewritten(
    path: Path,
    out: Path,
    kinds: Mapping[str, str] | None = None,
    keys: Changed | None = None,
    shards: int = 1,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a GGUF file anew by gguf-py.

    kinds: tensor -> its type, as "Q5_1"; gguf-py quantizes it.  keys: changed keys, None leaves one out.
    tensors: other values of a tensor.
    shards: parts that tensors are spread over, as llama-gguf-split names them; the first is returned.
    """
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    most = -(-len(reader.tensors) // shards) if shards > 1 else 0
    writer = gguf.GGUFWriter(out, architecture, split_max_tensors=most)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name in (keys or {}):
            continue
        sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub)
    for name, value in (keys or {}).items():
        if name == "general.architecture":
            writer.kv_data[0][name].value = value
        elif value is not None:
            # llama.cpp loads no INT32 where it wants a whole number
            whole = type(value) is int and value >= 0
            kind = gguf.GGUFValueType.UINT32 if whole else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(
                name, value, kind, gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            )
    for tensor in reader.tensors:
        kind = gguf.GGMLQuantizationType[(kinds or {}).get(tensor.name, tensor.tensor_type.name)]
        if tensors and tensor.name in tensors:
            writer.add_tensor(tensor.name, tensors[tensor.name])
        elif kind == tensor.tensor_type:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=kind)
        else:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file(path=out)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out if shards == 1 else out.with_name(f"{out.stem}-00001-of-{shards:05d}.gguf")
