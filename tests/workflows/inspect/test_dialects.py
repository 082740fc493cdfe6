"""Megatron-Core, torchtitan and transformers tell the same numbers of the same weights and tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bridge.sources.opening import open_source  # noqa: E402
from tests.oracles import inspect_layers_process, megatron_oracle, torchtitan_oracle  # noqa: E402
from tests.oracles.inspect_layers_process import seen  # noqa: E402

Seen = dict[tuple[int | None, str, str, str], float]
OVER = {"min": min, "max": max, "numel": sum, "l1_norm": sum, "l2_norm": lambda values: math.hypot(*values)}


def as_in_transformers(theirs: Seen, ours: Seen) -> Seen:
    """What transformers' parts tell, joined as the others join matrices: one input; weights side by side."""
    joined: Seen = {}
    for number, role, tensor, stat in theirs:
        parts = [ours[number, part, tensor, stat] for part in role.split(" + ")]
        if tensor == "activation":
            assert len(set(parts)) == 1
            joined[number, role, tensor, stat] = parts[0]
        else:
            joined[number, role, tensor, stat] = float(OVER[stat](parts))
    return joined


def in_transformers(source: Any, ids: Any) -> Seen:
    model = source.load_model().eval()
    return seen(model, lambda: model(torch.from_numpy(ids)))


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["megatron", "torchtitan"])
def test_statistics_of_the_same_weights_agree(dialect: str, tmp_path: Path) -> None:
    if dialect == "megatron":
        made: Any = megatron_oracle.family("llama")
        source = open_source(made.save(tmp_path / "weights", spec="local"))
        theirs = megatron_oracle._ask(1, 1, inspect_layers_process.seen_in_megatron, "llama")[0]
    else:
        made = torchtitan_oracle.family("llama3", "0.3")
        source = open_source(made.save(tmp_path), config=made.config_hf)
        task = inspect_layers_process.seen_in_torchtitan, "llama3", "0.3", made.native, made.ids
        theirs = torchtitan_oracle._process("0.3").submit(*task).result()
    ours = as_in_transformers(theirs, in_transformers(source, made.ids))
    assert len(theirs) == 3 * (4 if dialect == "megatron" else 5) * (3 * 5 + 1)
    for key, value in theirs.items():  # weights are the same; activations come from other orders of additions
        exact = key[2] == "weight" and key[3] in ("min", "max", "numel")
        assert value == (ours[key] if exact else pytest.approx(ours[key], rel=2e-5)), key
