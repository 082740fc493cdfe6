"""What nvdlfw-inspect and TransformerEngine answer to configs; run as a script it makes the answers anew.

pip download nvdlfw-inspect==0.2.2 transformer_engine==2.20.2 --no-deps --dest WHEELS
python -m tests.oracles.inspect_config_golden WHEELS

The answers are those of their own code, taken from the wheels: `LayerSpec` and `is_layer_in_cfg` (which layers a
section selects), `TEConfigAPIMapper` (options for a tensor and a GEMM), `next_enabled_iter` and
`enable_logging_at_current_step` (schedules). Nothing of them is installed.
"""

from __future__ import annotations

import ast
import copy
import itertools
import json
import re
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GOLDEN = Path(__file__).with_name("inspect_config.json")
VERSIONS = {"nvdlfw_inspect": "0.2.2", "transformer_engine": "2.20.2"}
STEPS = 14  # of each schedule
GEMMS, TENSORS = ("fprop", "dgrad", "wgrad"), ("activation", "weight", "gradient", "output", "dgrad", "wgrad")

NAMES = [
    "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.layers.3.self_attn.q_proj",
    "model.layers.12.mlp.down_proj", "decoder.1.layernorm_mlp.fc1", "decoder.2.layernorm_mlp.fc2", "lm_head",
    "transformer_layer.layernorm_mlp.fc1", "layers.1.experts.2.w1",
]  # fmt: skip
SELECTORS: list[dict[str, Any]] = [
    {"layer_name_regex_pattern": r".*(fc1|self_attn).*"},
    {"layer_name_regex_pattern": r"^decoder", "layer_types": ["down_proj"], "layer_numbers": [3]},
    {"layer_types": ["fc1", "q_proj"]},
    {"layer_types": ["all"]},
    {"layer_types": "all"},
    {"layer_types": ["layers.0"], "layer_numbers": "all"},
    {"layer_numbers": [3]},
    {"layer_numbers": [0, "1-3"]},
    {"layer_numbers": [0, "1-3"], "layer_types": ["q_proj", "fc2"]},
    {"layer_numbers": 3},
    {"layer_numbers": "1-3"},
    {"exact_layer_names": ["lm_head", "decoder.1.layernorm_mlp.fc1"]},
]
WORDS: list[dict[str, Any]] = [
    {"tensors": ["activation", "weight"], "stats": ["min"], "freq": 2},
    {"tensors": ["wgrad"]},
    {"stats": ["max"], "tensors_struct": [{"tensor": "weight", "stats": ["min"]}, {"tensor": "dgrad", "freq": 3}]},
    {"tensors_struct": [{"tensor": "weight", "freq": 2}, {"tensor": "weight", "freq": 5}], "freq": 9},
    {"gemms": ["fprop", "dgrad"], "tensors": ["activation", "weight"], "quant_format": "FP8E4M3"},
    {
        "gemms": ["wgrad"], "quant_format": "FP8E4M3",
        "tensors_struct": [{"tensor": "gradient", "quant_format": "FP8E5M2"}, {"tensor": "activation"}],
    },
    {
        "quant_format": "FP8E4M3",
        "gemms_struct": [
            {"gemm": "fprop", "tensors": ["activation", "weight"]},
            {"gemm": "dgrad", "tensors": ["gradient"], "quant_format": "FP8E5M2"},
        ],
    },
    {
        "quant_format": "FP8E4M3", "extra": 1,
        "gemms_struct": [
            {
                "gemm": "wgrad", "extra": 2,
                "tensors_struct": [{"tensor": "gradient", "quant_format": "FP8E5M2", "extra": 3}, {"tensor": "wgrad"}],
            },
            {"gemm": "wgrad", "tensors": ["activation"]},
        ],
    },
]  # fmt: skip
SCHEDULES: list[dict[str, Any]] = [
    {"freq": freq, **steps}
    for freq, steps in itertools.product(
        (1, 2, 3, 5),
        (
            {}, {"start_step": 4}, {"end_step": 6}, {"start_step": 3, "end_step": 7}, {"start_step": 5, "end_step": 5},
            {"start_end_list": [[0, 2], [6, 9]]}, {"start_end_list": [[6, 9], [0, 2]]},
            {"start_end_list": [[1, 8], [2, 4], [10, 11]]}, {"start_end_list": [[3, 3]], "start_step": 0},
        ),
    )
]  # fmt: skip


def main(wheels: Path) -> None:
    inspect = _Wheel(next(wheels.glob(f"nvdlfw_inspect-{VERSIONS['nvdlfw_inspect']}-*.whl")))
    engine = _Wheel(next(wheels.glob(f"transformer_engine-{VERSIONS['transformer_engine']}-*.whl")))
    answers = {
        "versions": VERSIONS,
        "selectors": _selectors(inspect),
        "options": _options(inspect, engine),
        "schedules": _schedules(inspect, engine),
    }
    GOLDEN.write_text(json.dumps(answers, indent=1) + "\n")


class _Wheel:
    """Definitions of a wheel's modules, without what they import."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)

    def take(self, module: str, names: list[str], **given: Any) -> dict[str, Any]:
        tree = ast.parse(self._archive.read(module))
        tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
        scope = {"re": re, "copy": copy, **given}
        exec(compile(ast.fix_missing_locations(tree), module, "exec"), scope)
        return scope


def _selectors(inspect: _Wheel) -> list[dict[str, Any]]:
    import abc
    import inspect as reflection

    names = ["BaseSpec", "spec_attribute_iterator", "set_all_spec_attributes", "LayerSpec", "is_layer_in_cfg"]
    annotation = SimpleNamespace(ConfigSpec=object)
    scope = inspect.take(
        "nvdlfw_inspect/config_manager.py", names, inspect=reflection, abstractmethod=abc.abstractmethod,
        ConfigSpec=annotation,
    )  # fmt: skip
    answers = []
    for words in SELECTORS:
        spec = scope["LayerSpec"]()
        try:
            spec.initialize(copy.deepcopy(words))
            spec.verify_validity()
        except (TypeError, ValueError, AssertionError) as error:
            answers.append({"layers": words, "error": type(error).__name__})
            continue
        section = SimpleNamespace(layers=spec)
        answers.append({"layers": words, "matches": {name: _matches(scope, name, section) for name in NAMES}})
    return answers


def _matches(scope: dict[str, Any], name: str, section: Any) -> bool | str:
    try:
        return bool(scope["is_layer_in_cfg"](name, section))
    except (IndexError, ValueError) as error:
        return type(error).__name__


def _options(inspect: _Wheel, engine: _Wheel) -> list[dict[str, Any]]:
    import abc

    log = SimpleNamespace(log_message=lambda *_, **__: None)
    levels = SimpleNamespace(ERROR=0)
    base = inspect.take(
        "nvdlfw_inspect/base.py", ["BaseConfigAPIMapper"], ABC=abc.ABC, abstractmethod=abc.abstractmethod,
        debug_api=log, logging=levels,
    )  # fmt: skip
    mapper = engine.take(
        "transformer_engine/debug/features/api.py", ["TEConfigAPIMapper"],
        BaseConfigAPIMapper=base["BaseConfigAPIMapper"],
    )["TEConfigAPIMapper"]()  # fmt: skip
    answers = []
    for words in WORDS:
        by_place = {}
        for gemm, tensor in itertools.product(("", *GEMMS), ("", *TENSORS)):
            if not gemm and not tensor:
                continue
            asked = {"gemm": gemm, "tensor_name": tensor}
            parsing = {"gemm_parsing": bool(gemm), "tensor_parsing": bool(tensor)}
            try:
                status, options = mapper.parse_config_and_api({"enabled": True, **words}, **parsing, **asked)
            except ValueError:
                continue  # it needs tensors or GEMMs that the words do not name
            by_place[f"{tensor},{gemm}"] = options if status else None
        answers.append({"words": words, "options": by_place})
    return answers


def _schedules(inspect: _Wheel, engine: _Wheel) -> list[dict[str, Any]]:
    path = "transformer_engine/debug/features/utils/__init__.py"
    following = engine.take(path, ["next_enabled_iter"])["next_enabled_iter"]
    generic = inspect.take("nvdlfw_inspect/logging.py", ["enable_logging_at_current_step"])
    answers = []
    for words in SCHEDULES:
        start, end, pairs = (words.get(key) for key in ("start_step", "end_step", "start_end_list"))
        pairs = copy.deepcopy(pairs)
        asked = [following(start, end, pairs, words["freq"], step) for step in range(STEPS)]
        plain = [
            generic["enable_logging_at_current_step"](
                step, words["freq"], start or 0, -1 if end is None else end, pairs
            )
            for step in range(STEPS)
        ]  # fmt: skip
        answers.append({"words": words, "asked": asked, "generic": plain})
    return answers


if __name__ == "__main__":
    main(Path(sys.argv[1]))
