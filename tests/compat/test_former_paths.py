"""The paths that pages named before `bridge.compat` was there give the same functions."""

from __future__ import annotations

import importlib

import pytest

FORMER = {
    "bridge.api.fp8_casts": ("bridge.compat.fp8_casts", "per_block_cast_to_fp8"),
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
