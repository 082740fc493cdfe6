"""The type of each tensor in llama.cpp's file types.

What llama-quantize chooses (llama-quant.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from bridge.core.dtypes import DTYPES

HALF = "float16"  # of rows that no block divides
# What rows have that a type's blocks of 256 do not divide.
NARROWER = {
    "q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0", "iq4_xs": "iq4_nl",
}  # fmt: skip
_VALUES = ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight")
_EIGHT = 8  # Mixtral's experts, for which llama.cpp has rules
_WIDE = 4  # query heads for one of keys, from which the matrix of values is small


class Place(NamedTuple):
    """A tensor's number among the model's of its kind, and how many there are."""

    at: int
    of: int

    @property
    def more_bits(self) -> bool:
        """The first and the last eighth, and every third between."""
        eighth = self.of // 8
        return self.at < eighth or self.at >= 7 * self.of // 8 or (self.at - eighth) % 3 == 2


@dataclass(frozen=True)
class ModelFacts:
    """What the choice depends on. `grouped`: query heads for one of keys. `seventy`: llama.cpp calls it a 70B model.

    `values`: layers with a matrix of values, or of queries, keys and values, in their order.
    """

    layers: int
    grouped: int
    experts: int = 0
    tied: bool = False
    seventy: bool = False
    weighted: bool = False
    values: tuple[int, ...] = ()


_Rule = tuple[Callable[[Place, ModelFacts], bool], str]


def _always(place: Place, model: ModelFacts) -> bool:
    return True


def _more_bits(place: Place, model: ModelFacts) -> bool:
    return place.more_bits


def _grouped(place: Place, model: ModelFacts) -> bool:
    return model.grouped >= _WIDE


def _first(count: int) -> Callable[[Place, ModelFacts], bool]:
    return lambda place, model: place.at < count


def _share(part: int, weighted: bool | None = None) -> Callable[[Place, ModelFacts], bool]:
    """The first such part of the layers; with, or without, an importance matrix alone if `weighted` says so."""
    return lambda place, model: place.at < place.of // part and weighted in (None, model.weighted)


@dataclass(frozen=True)
class FileType:
    """llama.cpp's number of it, the type of most tensors, and which others have another one: the first rule that fits.

    `values`, `down`: of matrices of values and of the MLP's last. `output`: of attention's last, "" for `kind`.
    `eight`: the same of a model with eight experts.
    """

    number: int
    kind: str
    values: tuple[_Rule, ...] = ()
    down: tuple[_Rule, ...] = ()
    output: str = ""
    eight: str = ""


_MORE = ((_more_bits, "q6_k"),)
_SPARED = ((_share(8, weighted=False), "q5_k"),)
FILE_TYPES = {
    "q4_0": FileType(2, "q4_0", down=((_share(8, weighted=True), "q4_1"),)),
    "q4_1": FileType(3, "q4_1"),
    "q8_0": FileType(7, "q8_0"),
    "q5_0": FileType(8, "q5_0", down=((_share(8, weighted=True), "q5_1"),)),
    "q5_1": FileType(9, "q5_1"),
    "q2_k": FileType(
        10, "q2_k", ((_grouped, "q4_k"), (_always, "q3_k")), ((_always, "q3_k"),), output="q3_k", eight="q5_k"
    ),
    "q3_k_s": FileType(11, "q3_k", eight="q5_k"),
    "q3_k_m": FileType(
        12, "q3_k", ((_first(2), "q5_k"), (_always, "q4_k")), ((_share(16), "q5_k"), (_always, "q4_k")), "q4_k", "q5_k"
    ),
    "q3_k_l": FileType(13, "q3_k", ((_always, "q5_k"),), ((_always, "q5_k"),), output="q5_k"),
    "q4_k_s": FileType(14, "q4_k", ((_first(4), "q5_k"),), ((_share(8), "q5_k"),), eight="q5_k"),
    "q4_k_m": FileType(15, "q4_k", _MORE, _MORE, eight="q5_k"),
    "q5_k_s": FileType(16, "q5_k"),
    "q5_k_m": FileType(17, "q5_k", _MORE, _MORE),
    "q6_k": FileType(18, "q6_k"),
    "iq4_nl": FileType(25, "iq4_nl", ((_grouped, "q5_k"),), _SPARED, eight="q5_k"),
    "iq4_xs": FileType(30, "iq4_xs", ((_grouped, "q5_k"),), _SPARED, eight="q5_k"),
}


def file_type_of(scheme: str) -> str:
    """The file type that a scheme of one block type is by name, "" if llama.cpp has none; `q4_k` is every matrix."""
    name = scheme.removesuffix("_imatrix")
    return name if name in FILE_TYPES else ""


def is_values(tensor: str) -> bool:
    """Whether llama.cpp gives a tensor the types of the matrix of values."""
    return tensor.endswith(_VALUES)


def tensor_type(file_type: str, tensor: str, width: int, model: ModelFacts) -> str:
    """The type of a matrix whose rows have `width` values; "" if no type that llama-quantize takes for it fits."""
    kind = _wanted(FILE_TYPES[file_type], tensor, width, model)
    if width % DTYPES[kind].block == 0:
        return kind
    if kind not in NARROWER:
        return ""
    return HALF if width % DTYPES[NARROWER[kind]].block else NARROWER[kind]


def _wanted(file: FileType, tensor: str, width: int, model: ModelFacts) -> str:
    """The type by the tensor's name, before its width is asked."""
    head = tensor == "output.weight" or (model.tied and tensor == "token_embd.weight")
    if head:
        return "q8_0" if file.kind == "q8_0" or width % DTYPES[file.kind].block else "q6_k"
    found = re.match(r"blk\.(\d+)\.", tensor)
    layer = int(found[1]) if found else 0
    if is_values(tensor):
        return _of_values(file, Place(model.values.index(layer), len(model.values)), model)
    if "attn_k.weight" in tensor and model.experts == _EIGHT:
        return "q8_0"
    if "ffn_down" in tensor:
        return _ruled(file.down, Place(layer, model.layers), model) or file.kind
    if "attn_output.weight" in tensor:
        return (file.eight if model.experts == _EIGHT else file.output) or file.kind
    return file.kind


def _of_values(file: FileType, place: Place, model: ModelFacts) -> str:
    if model.experts == _EIGHT:
        return "q8_0"
    kind = _ruled(file.values, place, model) or file.kind
    return "q5_k" if model.seventy and kind in ("q3_k", "q4_k") else kind


def _ruled(rules: tuple[_Rule, ...], place: Place, model: ModelFacts) -> str:
    return next((kind for holds, kind in rules if holds(place, model)), "")
