"""Cuts with `importance="minitron", order="importance"` are those of ModelOpt 0.35, which NeMo's own functions call.

Two things differ on purpose. 0.35 scores a group by a head of each group, since it takes the wrong axis for the
groups; with that view mended, bytes are equal. And it sorts groups as soon as their number is given, even the one that
there is: bridge leaves them in their places, which changes no answer.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import bridge
from bridge.calibration.data import prepare
from bridge.sources.opening import open_source
from tests import once
from tests.oracles import minitron_process, nemo_modules, nemo_prune_process
from tests.workflows.prune.test_modelopt_prune import BATCHES, NAMES, in_megatron, random_model, sizes_of

NAMED = NAMES | {"kv_heads": "num_query_groups"}
WITHOUT_HEADS: tuple[dict[str, int], ...] = ({"ffn": 40}, {"hidden": 48}, {"layers": 2}, {"ffn": 52, "hidden": 36})
ONE_GROUP = (
    {"heads": 2, "kv_heads": 1},
    {"heads": 3, "kv_heads": 1},
    {"ffn": 52, "hidden": 36, "heads": 2, "kv_heads": 1, "layers": 1},
)
EVERY_GROUP = {"heads": 4, "kv_heads": 2}
CELLS = [(keep, False) for keep in (*WITHOUT_HEADS, *ONE_GROUP)] + [(keep, True) for keep in (*ONE_GROUP, EVERY_GROUP)]
ATTENTION = ("self_attention.linear_qkv.weight", "self_attention.linear_proj.weight")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not minitron_process.HOME.is_dir(), reason="ModelOpt 0.35 is not installed here; install it with: make oracles"
    ),
]


@pytest.mark.parametrize("keep", WITHOUT_HEADS, ids=str)
def test_a_cut_without_heads_equals_modelopts_to_the_byte(keep: dict[str, int]) -> None:
    ours, theirs = both(keep, right_view=False)
    assert differing(ours, theirs) == []


@pytest.mark.parametrize("keep", ONE_GROUP, ids=str)
def test_a_cut_of_groups_equals_modelopts_where_its_view_is_mended(keep: dict[str, int]) -> None:
    ours, theirs = both(keep, right_view=True)
    assert differing(ours, theirs) == []
    _, as_it_is = both(keep, right_view=False)
    other = differing(ours, as_it_is)  # the layers where the wrong view chose another group
    assert other and all(name.endswith(ATTENTION) for name in other)


def test_groups_that_all_stay_are_in_their_places_and_hold_modelopts_heads() -> None:
    ours, theirs = both(EVERY_GROUP, right_view=True)
    assert differing(ours, theirs) and differing(*map(without_order, (ours, theirs))) == []


@pytest.mark.skipif(
    not nemo_modules.HOME.is_dir(), reason="NeMo's modules are not installed here; install them with: make oracles"
)
@pytest.mark.parametrize("given", nemo_prune_process.CASES, ids=str)
def test_a_live_model_is_pruned_as_by_nemos_own_function(given: dict[str, Any]) -> None:
    """Fields of the config too. The view of groups is mended in ModelOpt, and nothing in NeMo."""
    answers = json.loads((once.directory("NeMo's prune_language_model", ask_nemo) / "out").read_text())
    found = answers[nemo_prune_process.CASES.index(given)]
    layers = given.get("target_num_layers", 4 - len(given.get("drop_layers", ())))
    assert found == {"tensors": 3 + 6 * layers, "missing": [], "differing": [], "fields": []}


def both(keep: dict[str, int], right_view: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The tensors that bridge keeps, and those that ModelOpt keeps, by Megatron's names."""
    theirs, sizes = answers()[CELLS.index((keep, right_view))]
    ours = bridge.pruned(
        random_model("llama"), keep, data=BATCHES, importance="minitron", order="importance", progress=False
    )
    made = in_megatron(ours)
    assert {name: array.shape for name, array in made.items()} == {name: array.shape for name, array in theirs.items()}
    assert sizes_of(ours.config).items() <= (sizes | {"num_moe_experts": None}).items()
    return made, theirs


def answers() -> Any:
    """Every cell's, from one process."""
    return pickle.loads((once.directory("ModelOpt 0.35", ask) / "out").read_bytes())


def ask(root: Path) -> None:
    source = open_source(random_model("llama"))
    ids = [batch["input_ids"].numpy() for batch in prepare(BATCHES, source).batches]
    cells = [({NAMED[dim]: size for dim, size in keep.items()}, right_view) for keep, right_view in CELLS]
    (root / "job").write_bytes(pickle.dumps([("llama", in_megatron(source), ids, *cell) for cell in cells]))
    run("minitron_process", *(root / name for name in ("store", "job", "out")))


def ask_nemo(root: Path) -> None:
    run("nemo_prune_process", root / "store", root / "out")


def run(process: str, *given: Path) -> None:
    command = [sys.executable, "-m", f"tests.oracles.{process}", *map(str, given)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def differing(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> list[str]:
    return [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]


def without_order(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same with the groups of attention sorted by their values."""

    def sort(name: str, array: np.ndarray) -> np.ndarray:
        if not name.endswith(ATTENTION):
            return array
        rows = array if name.endswith(ATTENTION[0]) else array.T
        groups = rows.reshape(EVERY_GROUP["kv_heads"], -1)
        return groups[np.lexsort(groups.T[::-1])]

    return {name: sort(name, array) for name, array in tensors.items()}
