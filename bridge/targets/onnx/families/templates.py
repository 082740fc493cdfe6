"""Make the archives of templates: python -m bridge.targets.onnx.families.templates [FAMILY ...]

Each graph is the export of a sentinel, a config whose sizes are all different, and different from any other number of
the graph. Run it when the exporter changes; tests compare what the archives give with exports.
"""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import tarfile
from dataclasses import dataclass, field
from typing import Any

from bridge.core.mappings import mappings
from bridge.core.version import installed
from bridge.tables.architectures.arch import load_arch
from bridge.tables.architectures.meaning import listed
from bridge.targets.onnx.export.export import export_graph
from bridge.targets.onnx.export.float_graph import plain_bytes
from bridge.targets.onnx.export.request import PACKAGES
from bridge.targets.onnx.export.templates.find import ABOUT, ENDING, FOLDER, member_name
from bridge.targets.onnx.export.templates.sizes import FOLLOWED, Family, read_sizes

# 437 = 19 * 23 heads, 874 = 2 * 437: transformers wants a multiple. All others, and what follows from them, differ.
HEADS = {"gqa": 19, "mha": 437, "mqa": 1}  # keys and values of a sentinel
SENTINEL = {
    "hidden_size": 874, "num_attention_heads": 437, "head_dim": 58, "intermediate_size": 1301, "vocab_size": 1709,
    "rms_norm_eps": 1.2345e-5, "tie_word_embeddings": False,
}  # fmt: skip
WINDOW = {"sliding_window": 2503}
SCALED = {**WINDOW, "query_pre_attn_scalar": 331}
TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True)
class Row:
    """A family: its heads and what sentinels have beside `SENTINEL`; the rest is of `Family`."""

    architecture: str
    heads: tuple[str, ...]
    entries: tuple[dict[str, Any], ...] = ({},)
    full_every: int = 1
    theta: float = 1e4
    local_theta: bool = False
    same_graph: dict[str, list[Any]] = field(default_factory=dict)


FAMILIES = {
    "llama": Row("LlamaForCausalLM", ("gqa", "mha")),
    "qwen2": Row("Qwen2ForCausalLM", ("gqa", "mha")),
    "qwen3": Row("Qwen3ForCausalLM", ("gqa", "mha")),
    "mistral": Row("MistralForCausalLM", ("gqa", "mha"), ({"sliding_window": None}, WINDOW)),
    "gemma": Row(
        "GemmaForCausalLM", ("mqa", "mha"), same_graph={"hidden_act": ["gelu"], "hidden_activation": [None, TANH]}
    ),
    "gemma2": Row("Gemma2ForCausalLM", ("gqa",), (SCALED,), 2, same_graph={"hidden_act": [TANH, "gelu"]}),
    "gemma3_text": Row("Gemma3ForCausalLM", ("mqa", "gqa"), (SCALED,), 6, 1e6, local_theta=True),
}
# (dtype, opset) that targets ask for: `trt` has attention of MatMul and Softmax, `ort` ONNX's operator
FORMS = (("float32", 21), ("float32", 23), ("float16", 21), ("bfloat16", 21))


def main() -> None:
    """Export each graph and write an archive a family."""
    for name in sys.argv[1:] or FAMILIES:
        family = family_of(name)
        members = {ABOUT: json.dumps(dataclasses.asdict(family), indent=1, sort_keys=True).encode()}
        for variant, config in family.sentinels.items():
            for dtype, opset in FORMS:
                graph = export_graph(dict(config), task="causal-lm", dtype=dtype, opset=opset)
                members[member_name(variant, dtype, opset)] = plain_bytes(graph, {})
                print(f"{name} {variant} {dtype} {opset}: {len(graph.model.graph)} nodes", flush=True)
        path = mappings() / FOLDER / f"{name}{ENDING}"
        path.parent.mkdir(exist_ok=True)
        with tarfile.open(path, "w:xz") as archive:
            for member, content in members.items():
                about = tarfile.TarInfo(member)
                about.size = len(content)
                archive.addfile(about, io.BytesIO(content))


def family_of(name: str) -> Family:
    """The family of a model type, with transformers' defaults and a sentinel for each variant."""
    row = FAMILIES[name]
    family = Family(row.architecture, defaults_of(name), {}, row.full_every, row.theta, row.local_theta, row.same_graph)
    sentinels = {}
    for heads in row.heads:
        for entries in row.entries:
            config = {"model_type": name, "architectures": [row.architecture], **SENTINEL, **entries}
            config |= {"num_key_value_heads": HEADS[heads], "num_hidden_layers": 2}
            if row.full_every > 1:
                kinds = read_sizes({**config, "num_hidden_layers": 2 * row.full_every}, family).exported_kinds
                config |= {"layer_types": list(kinds), "num_hidden_layers": len(kinds)}
            sentinels[read_sizes(config, family).variant] = config
    made_with = {package: installed(package) for package in PACKAGES}
    return dataclasses.replace(family, sentinels=sentinels, made_with=made_with)


def defaults_of(name: str) -> dict[str, Any]:
    """What transformers takes for entries that a config leaves out; None for what it computes from others."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[name]
    defaults: dict[str, Any] = json.loads(cls().to_json_string(use_diff=False))
    del defaults["transformers_version"]
    table = load_arch(FAMILIES[name].architecture)
    assert table
    followed = {*table.sized, *FOLLOWED, "rope_parameters"} - listed("without_effect")
    computed = {field.name: field.default for field in dataclasses.fields(cls) if field.name in followed}
    return defaults | {key: value for key, value in computed.items() if value is not dataclasses.MISSING}


if __name__ == "__main__":
    main()
