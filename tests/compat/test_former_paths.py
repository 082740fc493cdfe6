"""The paths that pages named before `bridge.compat` was there give the same functions."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import bridge.compat

FORMER = {
    "bridge.api.fp8_casts": ("bridge.compat.fp8_casts", "per_block_cast_to_fp8"),
    "bridge.api.nemo_configs": ("bridge.compat.nemo_configs", "ExportConfig"),
    "bridge.api.nemo_distill": ("bridge.compat.nemo_distill", "teacher_provider"),
    "bridge.workflows.prune.nemo": ("bridge.compat.nemo_prune", "PruningConfig"),
}


@pytest.mark.parametrize("path", FORMER)
def test_a_former_path_gives_the_same_names(path: str) -> None:
    now, name = FORMER[path]
    module = importlib.import_module(path)
    assert getattr(module, name) is getattr(importlib.import_module(now), name)
    with pytest.raises(AttributeError):
        _ = module.no_such_name


def test_bridge_compat_has_every_name_as_the_same_object() -> None:
    pytest.importorskip("torch")
    for name in bridge.compat.__all__:
        home = importlib.import_module(bridge.compat.HOME[name])
        assert getattr(bridge.compat, name) is getattr(home, name)
    own = {"tripy", "nemo", "nemo_prune", "nemo_distill", "fp8_casts"}
    assert {home.rpartition(".")[2] for home in bridge.compat.HOME.values()} == own | {"nemo_configs"}
    assert dir(bridge.compat) == bridge.compat.__all__
    with pytest.raises(AttributeError, match=r"bridge\.compat has no 'Quantiser'"):
        _ = bridge.compat.Quantiser


def test_bridge_compat_loads_nothing_by_itself() -> None:
    code = (
        "import sys, bridge.compat; print([m for m in sys.modules if m.startswith('bridge.')], 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "['bridge.compat'] False\n"
