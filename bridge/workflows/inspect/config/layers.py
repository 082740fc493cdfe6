"""The layers of a model that can be inspected, and their names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

LINEAR, CONV1D, CONV, EXPERT = "linear", "conv1d", "conv", "expert"  # kinds of layers
MATRICES = ("linear", "head", "router")  # kinds of roles that a layer may have
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # parts that torch puts into names
_NUMBER = re.compile(r"(?<!fc)(?<!\d)\d+")  # not that of `fc1`, as in nvdlfw-inspect


@dataclass(frozen=True)
class Layer:
    """A matrix of the model: its name in configs and results, its roles (several if fused), its number, its kind.

    `module`, `parameter`: where the live model has its weight. `expert`: its index in a stack, None outside one.
    `turned`: whether the weight is stored [in, out]. `fixed`: why what its GEMMs take cannot be changed; "" if it can.
    """

    name: str
    roles: tuple[str, ...] = ()
    number: int | None = None
    kind: str = LINEAR
    module: str = ""
    parameter: str = "weight"
    expert: int | None = None
    turned: bool = False
    fixed: str = field(default="", compare=False)

    @property
    def role(self) -> str:
        """Its roles in one text, "" without any: "attn.q + attn.k + attn.v" for a fused matrix."""
        return " + ".join(role.removesuffix(".weight") for role in self.roles)


@dataclass(frozen=True)
class Meaning:
    """What a table says of a live parameter, or of one expert of a stack."""

    roles: tuple[str, ...]
    number: int | None
    turned: bool = False


def clean(name: str) -> str:
    """A live name without the parts that wrappers of single layers put into it.

    >>> clean("layers.0._orig_mod.attention.wq")
    'layers.0.attention.wq'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def expert_name(module: str, expert: int, parameter: str) -> str:
    """The name of a layer that is one expert of a stack.

    >>> expert_name("layers.0.mlp.experts", 3, "gate_up_proj")
    'layers.0.mlp.experts.3.gate_up_proj'
    """
    return f"{module}.{expert}.{parameter}"


def number_in(name: str) -> int | None:
    """The first number of a name, which is its layer's where no table says so.

    >>> number_in("decoder.layers.3.mlp.fc1"), number_in("transformer_layer.layernorm_mlp.fc1")
    (3, None)
    """
    match = _NUMBER.search(name)
    return int(match[0]) if match else None
