"""Read config.json of a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bridge.core.errors import SourceError, UsageError
from bridge.core.files.handles import dead_link
from bridge.core.parsing.limited import load_json, parse_json

# Fields that count or measure, in transformers' spellings; other fields may say "none" or "all" by -1.
SIZES = {
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "n_routed_experts",
    "n_embd", "n_layer", "n_head", "n_positions", "d_model", "d_ff", "d_kv", "ffn_dim", "encoder_layers",
    "decoder_layers", "encoder_ffn_dim", "decoder_ffn_dim", "image_size", "patch_size", "num_channels", "num_mel_bins",
}  # fmt: skip
ROTARY, ROTARY_PARTS = ("rope_scaling", "rope_parameters"), ("rope_theta", "partial_rotary_factor")
OF_CODES = "quantization_config"  # its group_size may be -1


def as_given(entries: Mapping[str, Any]) -> str:
    """Entries of a config as a caller gives them, for a message: in Python, and at the command line."""
    return f"config={dict(entries)} (--config '{json.dumps(entries)}')"


def settle_config(config: dict[str, Any] | None, given: Any) -> dict[str, Any]:
    """Return `changed_config`; SourceError for values that no class takes, and for given entries that none reads."""
    given, stated = _given(given), config or {}
    config = changed_config(config, given)
    of = "config.json" if given is None else "the config, with what config= (--config) gives"
    check_config(config, given, stated, of)
    return config


def check_config(config: dict[str, Any], given: Any, stated: Mapping[str, Any], of: str) -> None:
    """SourceError for values of a config that no class takes, and for `given` entries that none reads.

    `stated`: the entries without the given ones, which may be anything. `of`: what the config is, in words.
    """
    from bridge.tables.architectures.arch import load_arch
    from bridge.tables.architectures.composite import TEXT_CONFIG, text_model
    from bridge.tables.architectures.meaning import impossible, not_read

    if wrong := list(_impossible(config)):
        raise SourceError(f"{of}: {', '.join(wrong)}: sizes are numbers from 0 on, and nothing is NaN; correct it")
    architecture = config["architectures"][0]
    table = load_arch(architecture)
    if table and (wrong := list(impossible(table, config, architecture))):
        raise SourceError(f"{of}: {'; '.join(wrong)}; correct it")
    text = None if table else text_model(config)
    if text and (wrong := list(impossible(text.table, text.config, text.architecture))):
        raise SourceError(f"{TEXT_CONFIG} of {of}: {'; '.join(wrong)}; correct it")
    whole = not isinstance(given, Mapping) or {"architectures", "model_type"} <= given.keys()
    if not whole and (wrong := list(not_read(given, stated, architecture))):
        raise SourceError(f"config= (--config): {'; '.join(wrong)}; correct the name, or leave it out")


def _given(given: Any) -> Any:
    """What a caller gave: text and files as their JSON object, anything else as it is."""
    if isinstance(given, str) and given.lstrip().startswith("{"):
        return read_json(given.encode(), "config= (--config)")
    return read_json(Path(given), f"config={given} (--config)") if isinstance(given, str | Path) else given


def changed_config(config: dict[str, Any] | None, given: Any) -> dict[str, Any]:
    """Return the model's config, changed or replaced by what the caller gave; it must have `architectures`.

    given: a mapping, a JSON object as text, the path of one, or a config object.
    """
    given = _given(given)
    if isinstance(given, Mapping):
        config = {**_without_outranked(config or {}, given), **given}
    elif hasattr(given, "to_dict"):
        whole = given.to_dict()
        config = {**whole, "architectures": whole.get("architectures") or (config or {}).get("architectures")}
    elif given is not None:
        raise UsageError(
            f"config= (--config) takes a dict, a config object, a JSON object or a path, not {type(given).__name__}"
        )
    if config is None:
        raise SourceError("config.json is missing; put it beside the weights, or give config= (--config)")
    config = _named_longrope(config)
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        kind = config.get("model_type")
        example = f" (model_type is {kind!r})" if kind else ""
        given_as = as_given({"architectures": [_class_of(kind) or "LlamaForCausalLM"]})
        raise SourceError(
            f"config.json has no architectures{example}: the model class is unknown; give the class that it was saved "
            f"from: {given_as}"
        )
    return config


def _without_outranked(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its rotary entries changed so that those of the caller count, as transformers ranks them.

    It takes `rope_scaling` before `rope_parameters`, and what is in either before `rope_theta` beside it.
    """
    kept = dict(config)  # in its order
    parts = {name: value for name in ROTARY_PARTS if (value := given.get(name)) is not None}
    if given.get("rope_parameters"):
        kept.pop("rope_scaling", None)
    elif given.get("rope_scaling") and isinstance(before := kept.pop("rope_parameters", None), Mapping):
        kept |= {name: before[name] for name in ROTARY_PARTS if name in before and name not in given}
    for name in ROTARY:
        entry = kept.get(name)
        if name in given or not isinstance(entry, Mapping) or not parts:
            continue
        if any(isinstance(value, Mapping) for value in entry.values()):
            raise UsageError(
                f"config= (--config): {', '.join(parts)}: {name} of config.json has one for each kind of layers; give "
                f"{name} whole"
            )
        kept[name] = {**entry, **{part: value for part, value in parts.items() if part in entry}}
    return kept


def _named_longrope(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the rotary type `su` under the name that it has had since transformers 4.44, longrope."""
    for name in ROTARY:
        entry = config.get(name)
        kinds = [key for key in ("rope_type", "type") if isinstance(entry, Mapping) and entry.get(key) == "su"]
        if kinds:
            config = {**config, name: {**config[name], **dict.fromkeys(kinds, "longrope")}}
    return config


def _impossible(config: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """NaN anywhere, and sizes that are negative or infinite: `text_config.hidden_size = -1`.

    Other fields may be infinite: `time_step_limit` of Mamba 2 is.
    """
    for name, value in config.items():
        if isinstance(value, Mapping) and name != OF_CODES:
            yield from _impossible(value, f"{at}{name}.")
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, int | float) and not isinstance(number, bool):
                least = 0 if name in SIZES else -math.inf
                if not least <= number <= math.inf or (name in SIZES and number == math.inf):
                    yield f"{at}{name} = {value}"
                    break


def _class_of(model_type: Any) -> str:
    """The class with a head that transformers has for a model type; "" if it knows none, or is not installed."""
    if not isinstance(model_type, str):
        return ""
    try:
        from transformers.models.auto import modeling_auto
    except ImportError:
        return ""
    for names in ("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_MASKED_LM", "MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL"):
        name = getattr(modeling_auto, f"{names}_MAPPING_NAMES").get(model_type)
        if isinstance(name, str):
            return name
    return ""


def config_file(root: Path) -> dict[str, Any] | None:
    """Return the content of a directory's config.json; None without one."""
    path = root / "config.json"
    if dead := dead_link(path):
        raise SourceError(f"config.json: {dead}; get the file again")
    return read_json(path) if path.is_file() else None


def read_json(file: Path | bytes, where: str = "") -> dict[str, Any]:
    """Return the JSON object of a file, or of its content; SourceError if it is none. `where`: its name in messages."""
    name = where or ("" if isinstance(file, bytes) else file.name)  # a remote file has a path of its own class
    try:
        content = parse_json(file) if isinstance(file, bytes) else load_json(file)
    except (ValueError, OSError) as error:
        raise SourceError(f"{name}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise SourceError(f"{name}: must hold a JSON object, not {type(content).__name__}")
    return content
