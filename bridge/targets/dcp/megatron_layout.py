"""Layout of a Megatron-Core checkpoint: steps, run_config.yaml and extra states."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from bridge.core.formats.dcp_index import Slab, slab_of, whole
from bridge.core.values import TensorSpec
from bridge.planning.drafts import without_promise
from bridge.planning.plan import Plan
from bridge.planning.target import Draft, Drafted
from bridge.sources.configs.derive import DRAFTS
from bridge.tables.architectures.structure import match_table
from bridge.tables.dialects.dialect import load_dialect
from bridge.tables.dialects.layout import locate
from bridge.targets.dcp.run_config import check, model_section
from bridge.targets.dcp.steps import Drafting
from bridge.targets.dialect_steps import with_drafts

STATE = "._extra_state"
LINEAR = ("linear_", "eh_proj")  # how modules of the local spec that have a state begin
CORE = "core_attention"  # has a state in Transformer Engine, but no weights
EXPERTS = ".experts.experts."
_LAYER = re.compile(r"^(.*\b)layers\.(?:\d+\.)?")


class Layout:
    """One model in Megatron's names."""

    def __init__(self, config: Mapping[str, Any], specs: Mapping[str, TensorSpec], vocab_multiple: int) -> None:
        self._matched, self._dialect = match_table(config, specs), load_dialect("megatron")
        self._config, self._multiple = self._matched.config, vocab_multiple
        self._roles = locate(self._matched)
        # As the family's own program trains it: if Hugging Face stores norms less one, so does Megatron.
        self._centered = self._roles["final.norm.weight", None, None][0].shift == 1

    def drafted(self, draft: Draft) -> Drafted:
        """Make the steps; PlanError if Megatron-Core's configuration cannot express the model."""
        names = {"vocab_multiple": self._multiple, "centered": int(self._centered)}
        also = () if draft.options.spec == "te" else (self._dialect.architectures[self._matched.architecture],)
        whole_match, drafts = with_drafts(draft, self._dialect, self._matched)
        drafted = Drafting(draft, self._dialect, whole_match, drafts, names, stacks=True, also=also).drafted()
        if not drafted.problems:
            specs = whole(output.spec for step in drafted.steps for output in step.outputs)
            check(self._section(specs), self._with_number(specs), self._matched, specs)
        return drafted

    def run_config(self, plan: Plan) -> bytes:
        """Content of run_config.yaml."""
        section = self._section(whole(output.spec for output in plan.outputs))
        content = {"_target_": "megatron.bridge.training.config.ConfigContainer", "model": section}
        return str(yaml.safe_dump(content)).encode()

    def _section(self, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
        return model_section(
            self._with_number(specs),
            self._matched,
            self._roles,
            centered=self._centered,
            vocab_multiple=self._multiple,
            dtype=specs["embedding.word_embeddings.weight"].dtype,
        )

    def _with_number(self, specs: Iterable[str]) -> dict[str, Any]:
        """The config with the number of draft layers that tensors are of."""
        count = len({self._dialect.draft_number(name) for name in specs} - {None})
        return {**self._config, DRAFTS: count} if count else without_promise(self._config, ())


def extra_states(plan: Plan) -> list[str]:
    """Names of the states that a strict load needs: one for each module and layer, and for each expert."""
    spec, dialect = plan.options["spec"], load_dialect("megatron")
    states: dict[str, None] = {}
    for output in plan.outputs:
        slab = slab_of(output.spec.name)
        module, _, part = slab.whole.rpartition(".")
        if part != "weight":  # a norm, named after the linear that follows it, which the local spec may lack
            continue
        core = f"{module.rpartition('.')[0]}.{CORE}" if module.endswith("linear_proj") else ""
        for state in (f"{module}{STATE}", f"{core}{STATE}"):
            if _has_state(dialect.after_last(state, 0), spec, dialect.ignored[""]):
                experts = output.spec.shape[1 if slab.count else 0] if EXPERTS in module else 0
                states |= dict.fromkeys(f"{state}/{shard}" for shard in _shards(slab, experts))
    return list(states)


def _has_state(state: str, spec: str, ignored: Mapping[str, str]) -> bool:
    """True if Megatron's table lists the state and the spec has it; no load reads the head's."""
    known = _LAYER.sub(r"\1layers.{l}.", state) in ignored and not state.startswith("output_layer")
    return known and (spec == "te" or state.split(".")[-2].startswith(LINEAR))


def _shards(slab: Slab, experts: int) -> Iterator[str]:
    """Megatron-Core's names of an object's shards: index on the axes of layers and experts, and their lengths."""
    layer, layers = ([str(slab.number)], [str(slab.count)]) if slab.count else ([], [])
    for expert in range(experts or 1):
        at, of = ([*layer, str(expert)], [*layers, str(experts)]) if experts else (layer or ["0"], layers or ["1"])
        yield f"shard_{'.'.join(at)}_{'.'.join(of)}"


def lint(directory: Path) -> list[str]:
    """Check the other files that a load reads: the backends and the common state."""
    try:
        backend = json.loads((directory / "metadata.json").read_text()).get("sharded_backend")
    except (OSError, ValueError, AttributeError) as error:
        return [f"error [metadata.json] {error}"]
    findings = [] if backend == "torch_dist" else [f"error [metadata.json] sharded_backend is {backend!r}"]
    if not (directory / "common.pt").is_file():
        findings.append("error [common.pt] is missing; Megatron-Core loads it first")
    return findings
