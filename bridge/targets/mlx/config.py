"""config.json of an MLX checkpoint, as mlx-lm's classes read it.

What a class of mlx-lm fixes is a row of `mappings/runtimes/mlx.toml`; `problems` says where a config is otherwise.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from bridge.core.mappings import find_table_file, read_table
from bridge.core.values import main_dtype
from bridge.planning.plan import Plan
from bridge.sources.configs.rope import rope_of
from bridge.sources.source import Source
from bridge.tables.architectures.match import Matched
from bridge.tables.architectures.meaning import FULL, INSTEAD, SLIDING
from bridge.tables.architectures.structure import match_table
from bridge.tables.llama_cpp import Graph, read_graphs
from bridge.targets.config_json import generation_settings, restated
from bridge.targets.mlx.layout import Mode, mode_of

NOT_WRITTEN = ("_name_or_path", "vision_config", "quantization", "quantization_config")
OTHER_TARGET = "take target hf or trt"


@cache
def classes() -> Mapping[str, Graph]:
    """Architecture -> what mlx-lm's class of it computes in any case."""
    path = find_table_file("runtimes", "mlx")
    assert path
    return read_graphs(read_table(path))


def problems(matched: Matched) -> Iterator[str]:
    """What mlx-lm would compute differently from the model, each with what to do."""
    known, config = classes()[matched.architecture], matched.config
    name = f"mlx-lm's {known.name}"
    act = config.get(known.activation, known.activations[-1])
    if act is not None and act not in known.activations:
        yield f"{known.activation} is {act!r}; {name} computes {known.activations[0]}; {INSTEAD}"
    roles = {role for entry, _, _ in matched.placed.values() for role in entry.roles}
    biases = {role for role in roles if role.endswith(".bias") and "norm" not in role}
    if more := sorted(biases.difference(known.biases)):
        yield f"{name} has no {', '.join(more)}; {OTHER_TARGET}"
    for formula, problem in known.refuse:
        values = {**matched.table.computes, **config}
        if formula.value({name: values.get(name) for name in formula.names} | dict(matched.names)):
            yield f"{problem}; {OTHER_TARGET}"
    rope = rope_of(config, known.theta)
    if rope.kind not in ("default", *known.scalings):
        said = f"rope_type {rope.kind!r} is not read by {name}; known: {', '.join(('default', *known.scalings))}"
        yield f"{said}; {OTHER_TARGET}"
    yield from (f"{field} is null; {name} caps logits in any case; {INSTEAD}" for field in _uncapped(config, known))
    if known.every and not _has_pattern(config, int(str(matched.names["layers"])), known.every):
        yield f"layer_types is not {name}'s pattern: every layer number {known.every} attends to everything; {INSTEAD}"


def window_notes(matched: Matched) -> list[str]:
    """Sentences on windows that mlx-lm's class does not have."""
    known, config = classes()[matched.architecture], matched.config
    window, context = config.get("sliding_window"), config.get("max_position_embeddings")
    kinds = config.get("layer_types")
    if known.window or known.every or not window or not config.get("use_sliding_window", True):
        return []
    if (isinstance(context, int) and window >= context) or (kinds is not None and SLIDING not in kinds):
        return []
    return [
        f"attention has a window of {window}; mlx-lm's {known.name} attends to every token, so longer prompts differ"
    ]


def config_file(plan: Plan, source: Source) -> bytes:
    """The content of config.json."""
    config, side_files = source.config, source.side_files
    matched = match_table(config, source.specs)
    known, values = classes()[plan.architecture], {**matched.table.computes, **config, **matched.names}
    main = main_dtype(plan.sources.values())
    written = {name: value for name, value in config.items() if name not in NOT_WRITTEN}
    if plan.options["dtype"] != main:
        written = restated(written, plan.options["dtype"])
    written |= _rotary(config, known)
    for name, formula in known.counts.items():  # fields that the class cannot do without
        if written.get(name) is None:
            written[name] = formula.value({one: values.get(one) for one in formula.names})
    written["tie_word_embeddings"] = bool(plan.tied)
    if end := generation_settings(side_files).get("eos_token_id"):
        written["eos_token_id"] = end
    if entries := quantization(plan):
        written["quantization"] = written["quantization_config"] = entries
    return json.dumps(dict(sorted(written.items())), indent=4).encode()


def quantization(plan: Plan) -> dict[str, Any]:
    """`quantization`: the mode of most modules, and those that have another; {} if nothing is quantized."""
    modes: dict[str, Mode] = {}
    for step in plan.quantized:
        mode = mode_of(step.format.weight[0]) if step.format else None
        assert mode
        modes[step.outputs[0].spec.name.removesuffix(".weight")] = mode
    if not modes:
        return {}
    ((most, _),) = Counter(modes.values()).most_common(1)
    return most.entry() | {module: mode.entry() for module, mode in modes.items() if mode != most}


def _rotary(config: Mapping[str, Any], known: Graph) -> dict[str, Any]:
    """Rotary entries where its classes look for them: beside the others, not in `rope_parameters` of transformers 5."""
    given = config.get("rope_parameters")
    if not given:
        return {}
    rope = rope_of(config, known.theta)
    fields: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.kind != "default":
        fields["rope_scaling"] = {"rope_type": rope.kind, **rope.scaling}
    if isinstance(given.get(FULL), Mapping):
        fields |= {"rope_local_base_freq": rope.local, "sliding_window_pattern": known.every}
    return fields


def _uncapped(config: Mapping[str, Any], known: Graph) -> list[str]:
    return [field for field in known.softcaps if config.get(field, 1) is None]


def _has_pattern(config: Mapping[str, Any], layers: int, every: int) -> bool:
    given = config.get("layer_types")
    want = [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(layers)]
    return given is None or list(given) == want
