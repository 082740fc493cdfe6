"""A model without weights is built and run with caches of its own; other threads see no difference."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, wraps
from typing import Any

import pytest
import torch

from bridge.sources.live_models.meta_device import build_meta
from bridge.sources.live_models.own_caches import own_caches


def wrapped(function: Any) -> Any:
    """Hide the cached function in a closure, as transformers does."""
    cached = lru_cache(maxsize=4)(function)

    @wraps(function)
    def call(*args: Any) -> Any:
        return cached(*args)

    return call


class Anchors:
    @staticmethod
    @lru_cache
    def plain(size: int) -> torch.Tensor:
        return torch.ones(size)

    @classmethod
    @lru_cache
    def of_class(cls, size: int) -> torch.Tensor:
        return torch.ones(size)

    @lru_cache  # noqa: B019  what is tested
    def method(self, size: int) -> torch.Tensor:
        return torch.ones(size)

    @wrapped
    def decorated(self, size: int) -> torch.Tensor:
        return torch.ones(size)


@lru_cache
def alone(size: int) -> torch.Tensor:
    return torch.ones(size)


hidden = wrapped(alone.__wrapped__)
ANCHORS = Anchors()
WAYS = {
    "function": lambda: alone(3),
    "in a decorator": lambda: hidden(3),
    "static method": lambda: Anchors.plain(3),
    "class method": lambda: Anchors.of_class(3),
    "method": lambda: ANCHORS.method(3),
    "method in a decorator": lambda: ANCHORS.decorated(3),
    "imported elsewhere": lambda: sys.modules["elsewhere"].alone(3),
}


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = types.ModuleType("elsewhere")
    vars(module).update(torch=torch, alone=alone)
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    yield


@pytest.mark.parametrize("way", WAYS)
def test_a_cache_is_this_threads_own_and_the_callers_is_as_it_was(way: str) -> None:
    call = WAYS[way]
    kept = call()
    with own_caches(), ThreadPoolExecutor(1) as pool:
        mine = call()
        assert mine is not kept
        assert call() is mine  # two readers of one tensor still read one
        assert pool.submit(call).result() is kept
    assert call() is kept


def test_a_function_of_a_module_that_grew_or_was_loaded_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with own_caches():
        pass
    monkeypatch.setattr(sys.modules["elsewhere"], "later", wrapped(alone.__wrapped__), raising=False)
    kept = sys.modules["elsewhere"].later(3)
    with own_caches():
        assert sys.modules["elsewhere"].later(3) is not kept
    monkeypatch.setitem(sys.modules, "elsewhere", types.ModuleType("elsewhere"))
    vars(sys.modules["elsewhere"]).update(torch=torch, alone=hidden)  # as many names as before: another module
    kept = sys.modules["elsewhere"].alone(3)
    with own_caches():
        assert sys.modules["elsewhere"].alone(3) is not kept


def test_a_class_that_replaces_one_of_the_same_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        cell = types.FunctionType((lambda size: torch.ones(size)).__code__, {"torch": torch, "__name__": "elsewhere"})
        again = type("Again", (), {"__module__": "elsewhere", "of": staticmethod(lru_cache(cell))})
        monkeypatch.setattr(sys.modules["elsewhere"], "Again", again, raising=False)
        kept = again.of(3)  # type: ignore[attr-defined]
        with own_caches():
            assert again.of(3) is not kept  # type: ignore[attr-defined]


def test_a_class_that_a_notebook_defines_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "torch", torch, raising=False)
    for _ in range(2):  # the second time in place of the first: nothing was loaded, no module has grown
        cell = types.FunctionType((lambda size: torch.ones(size)).__code__, {"torch": torch, "__name__": "__main__"})
        again = type("Again", (), {"__module__": "__main__", "of": staticmethod(lru_cache(cell))})
        monkeypatch.setattr(sys.modules["__main__"], "Again", again, raising=False)
        kept = again.of(3)
        with own_caches():
            assert again.of(3) is not kept


def test_all_is_put_back_after_an_error() -> None:
    before = [vars(Anchors)[name] for name in ("plain", "of_class", "method")]
    with pytest.raises(RuntimeError), own_caches():
        assert [vars(Anchors)[name] for name in ("plain", "of_class", "method")] != before
        raise RuntimeError
    assert [vars(Anchors)[name] for name in ("plain", "of_class", "method")] == before


def test_what_a_function_is_asked_about_its_cache_still_answers() -> None:
    with own_caches():
        assert alone.cache_parameters() == {"maxsize": 128, "typed": False}


def test_parameters_of_another_thread_stay_where_they_are_while_a_model_is_built_without_weights() -> None:
    class Building(torch.nn.Linear):
        def __init__(self, config: Any) -> None:
            super().__init__(2, 3)
            with ThreadPoolExecutor(1) as pool:
                config.other = pool.submit(torch.nn.Linear, 2, 3).result()

    config = types.SimpleNamespace()
    assert build_meta(config, Building, torch.float32).weight.is_meta
    assert not config.other.weight.is_meta
