"""Headers, JSON, YAML and TOML that are nested, long, contradictory, or ask for objects of Python's."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.corpus.entry import Entry, always
from tests.fuzz.mutate import json_text
from tests.fuzz.targets import configs, headers, indices, quantized, recipes, tables, yamls


def header(tree: Any, data: int = 0, length: int | None = None) -> bytes:
    """A safetensors file with this header."""
    text = tree if isinstance(tree, bytes) else json_text(tree)
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


def _row(shape: list[int], offsets: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


SAFETENSORS: dict[str, bytes] = {
    "overlap": header({"a": _row([2], [0, 8]), "b": _row([2], [4, 12])}, 12),
    "hole": header({"a": _row([1], [4, 8])}, 8),
    "the same bytes twice": header({"a": _row([2], [0, 8]), "b": _row([2], [0, 8])}, 8),
    "beyond the end": header({"a": _row([4], [0, 16])}, 8),
    "header of 2**63": header({}, 64, 1 << 63),
    "header of 2**64 - 1": header({}, 64, (1 << 64) - 1),
    "header of 100 MB": header({}, 64, 100_000_000),
    "one name twice": header(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1
    ),
    "100,000 names twice": header(b"{" + b",".join(b'"%d":0,"%d":0' % (n, n) for n in range(100_000)) + b"}"),
    "product that wraps": header({"a": _row([1 << 32, 1 << 32], [0, 0])}),
    "extents beside a zero": header({"a": _row([0, 1 << 62, 1 << 62], [0, 0])}),
    "2000 axes": header({"a": _row([1] * 2000, [0, 4])}, 4),
    "negative": header({"a": _row([-1, -4], [0, 16])}, 16),
    "extent of 4000 digits": header(b'{"a":{"dtype":"F32","shape":[' + b"9" * 4000 + b',9],"data_offsets":[0,4]}}', 4),
    "number of 1 MB": header(b'{"a":' + b"9" * 1_000_000 + b"}"),
    "nested": header(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "nested dtype": header(b'{"a":{"dtype":' + b"[" * 900 + b"]" * 900 + b',"shape":[],"data_offsets":[0,4]}}', 4),
    "empty lists": header(b'{"a":[' + b"[]," * 5_000_000 + b"[]]}"),
    "empty objects": header(b'{"a":[' + b"{}," * 5_000_000 + b"{}]}"),
    "name of 5 MB": header(b'{"' + b"a" * 5_000_000 + b'":0}'),
    "name that steers a terminal": header({"\x1b]0;x\x07\x1b[2J": 0}),
    "metadata that is none": header({"__metadata__": {"a": {"b": 1}}}),
    "infinite": header(b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,0]}}'),
}
INDEX: dict[str, bytes] = {
    "nested": b"[" * 300_000,
    "nested map": b'{"weight_map":' * 2000,
    "outside": b'{"weight_map":{"a":"../model.safetensors"}}',
    "absolute": b'{"weight_map":{"a":"/etc/passwd"}}',
    "long name": json.dumps({"weight_map": {"a": "x" * 100_000}}).encode(),
    "null byte": json.dumps({"weight_map": {"a": "model\0.safetensors"}}).encode(),
    "empty objects": b"[" + b"{}," * 5_000_000 + b"{}]",
    "number": b'{"weight_map":' + b"9" * 2_000_000 + b"}",
    "itself": json.dumps({"weight_map": {"a": indices.FILE}}).encode(),
}


def _with(key: str, value: object) -> Callable[[dict[str, Any]], bytes]:
    return lambda config: json.dumps(config | {key: value}).encode()


_BIG = {"num_hidden_layers": 10**12, "num_attention_heads": 10**9, "vocab_size": 10**30, "hidden_size": 10**38}
CONFIG: dict[str, Callable[[dict[str, Any]], bytes]] = {
    **{f"{key} of {value}": _with(key, value) for key, value in _BIG.items()},
    "layer types without end": lambda c: json.dumps(c | {"layer_types": ["full_attention"] * 1_000_000}).encode(),
    "architecture as a path": lambda c: json.dumps(c | {"architectures": ["../../../etc/passwd"]}).encode(),
    "architecture of 1 MB": lambda c: json.dumps(c | {"architectures": ["x" * 1_000_000]}).encode(),
    "remote code": lambda c: json.dumps(
        c | {"architectures": ["X"], "auto_map": {"AutoModelForCausalLM": "evil--x.Y"}}
    ).encode(),
    "nested": lambda c: b'{"a":' * 100_000,
}
_GROUP = {"targets": ["re:(a|a)*(\\w|.)*$!"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
QUANTIZED = {
    "expression that never ends": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"g": _GROUP},
    },
    "expression of many": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"g": _GROUP | {"targets": ["re:" + ".*" * 12 + "!"]}},
    },
    "block of nothing": {"quant_method": "fp8", "weight_block_size": [0, 0]},
    "block without end": {"quant_method": "fp8", "weight_block_size": [2**62, 2**62]},
}
_RUN = "!!python/object/apply:{} ['touch attacked']"
YAML: dict[str, bytes] = {
    **{
        name: f"a: {_RUN.format(name)}\n".encode()
        for name in ("os.system", "subprocess.Popen", "builtins.eval", "posix.system", "builtins.exec")
    },
    "object new": b"a: !!python/object/new:subprocess.Popen [['touch', 'attacked']]",
    "name": b"a: !!python/name:os.system",
    "module": b"a: !!python/module:subprocess",
    "full tag": b"a: !<tag:yaml.org,2002:python/object/apply:os.system> [x]",
    "target": b"a: {_target_: os.system, command: touch attacked}",
    "tag directive": b"%TAG !p! tag:yaml.org,2002:python/\n---\na: !p!name:os.system x",
    "laughs": b"a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"a%d: &a%d [*a%d,*a%d,*a%d,*a%d,*a%d,*a%d]\n" % ((n, n) + (n - 1,) * 6) for n in range(1, 14)),
    "itself": b"&a [*a]",
    "nested flow": b"[" * 50_000,
    "nested blocks": b"- " * 20_000,
    "merges": b"a: &a {x: 1}\nb: {<<: [" + b"*a," * 200_000 + b"]}",
    "number": b"a: " + b"9" * 900_000,
    "sixties": b"a: " + b"1:" * 100_000 + b"1",
    "long": b"#" * (2 << 20),
    "keys": b"? [a, b]\n: 1",
    "twice": b"a: 1\na: 2",
}
HARMLESS = ("number", "merges", "sixties")  # long numbers are an error or a word, merges stay data
TOML: dict[str, bytes] = {
    "nested": b"a = " + b"[" * 100_000,
    "nested tables": b"a = " + b"{a = " * 5000,
    "number": b"a = " + b"9" * 100_000,
    "long": b"#" * (2 << 20),
    "dotted": b".".join([b"a"] * 20_000) + b" = 1",
    "headers": b"".join(b"[a%d]\n" % n for n in range(50_000)),
    "twice": b"a = 1\na = 2",
    "date": b"a = 9999-99-99",
    "surrogate": b'a = "\\ud800"',
    "other bytes": b"\xff\xfe",
    "key of 500 kB": b"a" * 500_000 + b" = 1",
}


def entries() -> Iterator[Entry]:
    for name, data in SAFETENSORS.items():
        yield _one(f"safetensors: {name}", headers.FILE, data, headers.read)
    for name, data in INDEX.items():
        yield _one(f"index: {name}", indices.FILE, data, indices.read)
    for name, data in YAML.items():
        yield _one(f"yaml: {name}", yamls.FILE, data, yamls.read, name not in HARMLESS)
    for name, data in TOML.items():
        yield _one(f"recipe: {name}", recipes.FILE, data, recipes.read)
        yield Entry(f"table: {name}", always({tables.FILE: data, tables.DIALECT: data}), tables.read)
    yield from _made()


def _made() -> Iterator[Entry]:
    """What lies beside a whole model."""
    for name, change in CONFIG.items():
        refused = name != "layer types without end"  # long, and no harm in it
        yield Entry(f"config: {name}", _beside(configs, change), configs.read, refused)
    for name, section in QUANTIZED.items():
        change = _with("quantization_config", section)
        yield Entry(f"quantized: {name}", _beside(quantized, change), quantized.read)


def _beside(target: Any, change: Callable[[dict[str, Any]], bytes]) -> Callable[[Path], dict[str, bytes]]:
    def files(canary: Path) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as work:
            target.make(Path(work))
            found = {path.name: path.read_bytes() for path in Path(work).iterdir()}
        return found | {target.FILE: change(json.loads(found[target.FILE]))}

    return files


def _one(name: str, file: str, data: bytes, read: Callable[[Path], Any], refused: bool = True) -> Entry:
    return Entry(name, always({file: data}), read, refused)
