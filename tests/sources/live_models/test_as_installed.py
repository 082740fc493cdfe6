"""Whether the code of models in a process is what is installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, activations, modeling_rope_utils, modeling_utils
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.models.llama import modeling_llama

from bridge.core.errors import SourceError
from bridge.core.output import provenance
from bridge.sources.live_models import as_installed, diffusion
from bridge.sources.live_models.as_installed import is_as_installed, replaced

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.fixture(autouse=True)
def loaded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(as_installed, "models_are_as_installed", lambda: True)


def is_kept(config: dict[str, Any] = CONFIG, cls: type = LlamaForCausalLM) -> bool:
    return is_as_installed(("torch",), config, lambda _: cls)


def foreign(*_: object) -> None:
    """A function of another package."""


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """As a decorator that copies the names of what it wraps."""

    def inner(*arguments: Any) -> Any:
        return function(*arguments)

    inner.__module__, inner.__qualname__ = function.__module__, function.__qualname__
    return inner


def test_code_of_transformers_alone_is_as_installed() -> None:
    assert replaced() == []
    assert is_kept()


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (modeling_llama, "rotate_half", foreign),
        (modeling_llama, "rotate_half", wrapped(modeling_llama.rotate_half)),
        (modeling_llama, "LlamaMLP", type("LlamaMLP", (modeling_llama.LlamaMLP,), {"__module__": "somebody"})),
        (modeling_llama.LlamaMLP, "forward", foreign),
        (modeling_llama.LlamaMLP, "forward", staticmethod(foreign)),
        (modeling_llama.LlamaMLP, "forward", property(foreign)),
    ],
    ids=["function", "wrapped", "class", "method", "static method", "property"],
)
def test_a_replaced_function_method_or_class_is_seen(
    owner: Any, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, value)
    (seen,) = replaced()
    assert seen.endswith(name)
    assert seen.startswith(modeling_llama.__name__)
    assert not is_kept()


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        (modeling_utils.ALL_ATTENTION_FUNCTIONS, "sdpa", foreign),
        (modeling_utils.AttentionInterface._global_mapping, "sdpa", foreign),
        (activations.ACT2FN, "silu", type("Mine", (), {"__module__": "somebody"})),
        (activations.ACT2FN, "gelu_10", (type("Mine", (), {"__module__": "somebody"}), {"min": -10})),
        (modeling_rope_utils.ROPE_INIT_FUNCTIONS, "linear", foreign),
    ],
    ids=["attention", "attention of all", "activation", "activation with arguments", "rotary embedding"],
)
def test_a_replaced_entry_of_a_table_is_seen(
    table: Any, key: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(table, key, value)
    assert replaced() and all(seen.endswith(f"[{key}]") for seen in replaced())
    assert not is_kept()


def test_a_class_that_was_registered_for_a_config_of_transformers_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = type("Mine", (), {"__module__": "somebody"})
    monkeypatch.setitem(MODEL_MAPPING._extra_content, MistralConfig, mine)
    assert replaced() == ["MODEL_MAPPING[MistralConfig]"]
    monkeypatch.setitem(MODEL_MAPPING._extra_content, mine, mine)  # of no model that is converted
    monkeypatch.delitem(MODEL_MAPPING._extra_content, MistralConfig)
    assert replaced() == []


def test_the_class_that_is_built_must_be_of_transformers_or_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_kept(cls=type("Mine", (LlamaForCausalLM,), {"__module__": "somebody"}))
    assert not is_kept({"model_type": "of nobody"})
    monkeypatch.setattr(LlamaConfig, "__module__", "somebody")
    assert not is_kept()


def test_a_model_of_diffusers_is_known_by_its_own_class(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"_class_name": "DiTTransformer2DModel"}
    for module, kept in (("diffusers.models.dit", True), ("somebody.models", False)):
        cls = type("DiTTransformer2DModel", (), {"__module__": module})
        monkeypatch.setattr(diffusion, "diffusion_class", lambda _, cls=cls: cls)
        assert is_kept(config) == kept

    def absent(_: object) -> type:
        raise SourceError("diffusers is not installed")

    monkeypatch.setattr(diffusion, "diffusion_class", absent)
    assert not is_kept(config)


def test_an_editable_package_is_not_as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "origin", lambda name: "editable" if name == "torch" else "")
    assert not is_kept()


@pytest.mark.parametrize("name", ["transformers", "diffusers"])
def test_who_loads_the_code_of_models_first_is_known(name: str) -> None:
    code = (
        "from bridge.core.version import loads_transformers, models_are_as_installed as clean\n"
        "import sys, types\n"
        "before = clean()\n"
        "if {ours}: loads_transformers()\n"
        "sys.modules['{name}'] = types.ModuleType('{name}')\n"
        "loads_transformers()\n"
        "print(before, clean())"
    )
    for ours in (True, False):
        command = [sys.executable, "-c", code.format(ours=ours, name=name)]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.stdout.split() == ["True", str(ours)], run.stderr
