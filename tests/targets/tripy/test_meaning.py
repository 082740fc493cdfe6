"""A config with one entry changed: the ready module computes what transformers does, or the entry is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

import bridge
from bridge.core.errors import BridgeError
from tests.covering import grid
from tests.models.changed_configs import changed, changes, rewrite, switches, table_of
from tests.targets.tripy.models import MODELS, answer, expected, filled, filled_model, ids, relative
from tests.targets.tripy.test_modules import TOLERANCE

FAMILIES = ("gpt2-bare", "llama-bare", "mistral", "qwen2", "qwen3", "bert")
EVERY = sorted({change for family in FAMILIES for change in changes(MODELS[family][0])})


def has(family: str, change: str) -> bool:
    return change in changes(MODELS[family][0])


def make(family: str, change: str, directory: Path) -> None:
    """Save a model of one layer with the changed config."""
    name, given = MODELS[family]
    one = given | {"n_layer" if "n_layer" in given else "num_hidden_layers": 1}
    one.pop("layer_types", None)
    config = getattr(transformers, name).config_class(**one)
    entries = changed(name, config.to_dict() | {"architectures": [name]}, change)
    parts = {field: value for field, value in entries.items() if field in switches(table_of(name))}
    filled_model(name, one | parts).save_pretrained(directory)
    rewrite(directory, entries)


@grid({"family": FAMILIES, "change": EVERY}, valid=has)
def test_the_ready_module_computes_a_changed_config_or_it_is_refused(
    family: str, change: str, tp: Any, tmp_path: Path
) -> None:
    try:
        make(family, change, tmp_path / "source")
        source = getattr(transformers, MODELS[family][0]).from_pretrained(tmp_path / "source").eval()
        wanted = expected(source, ids())
    except Exception as error:  # its own class refuses the config
        assert "validat" in repr(error).lower() or "should be used as a decoder" in str(error), error
        return
    word = "rope_type" if change.startswith("rope:") else change
    report = bridge.convert(tmp_path / "source", "tripy", out=tmp_path / "out", verify=False)
    told = any(word in note for note in report.notes)
    try:
        module = filled(tmp_path / "out")
    except BridgeError as error:
        assert told and word in str(error), error
        return
    assert not told
    assert relative(answer(module, tp, ids()), wanted) <= TOLERANCE
