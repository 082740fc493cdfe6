"""Target `torchtitan`: the distributed checkpoint from which torchtitan starts training."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.errors import UsageError
from bridge.core.values import Program, Structure
from bridge.planning.target import Draft, Drafted
from bridge.sources.config_json import as_given
from bridge.tables.architectures.meaning import FULL, INSTEAD, window_of
from bridge.targets.checkpoint import option, write_checkpoint
from bridge.targets.dcp.target import DRAFTS, HELP, DcpTarget, written_config

if TYPE_CHECKING:
    from bridge.planning.plan import Plan
    from bridge.streaming.context import ConversionContext, WriteResult
    from bridge.tables.architectures.arch import ArchTable
    from bridge.tables.architectures.match import Matched

ERAS = ("0.3", "0.2")
ZERO_BIAS = "expert_bias is written as zeros: torchtitan balances experts with it in training; the model has none"
MISTRAL_WINDOW = 4096  # transformers' default
WINDOWLESS = "torchtitan's llama3, which this would be, sees every token before"


@dataclass(frozen=True)
class TorchtitanOptions:
    """Options of target `torchtitan`."""

    era: str = option(ERAS[0], f"tensor names of torchtitan {' or '.join(ERAS)}")
    dtype: str | None = option(None, HELP)
    drafts: str | None = option(None, DRAFTS.format("torchtitan's model"))


class Torchtitan(DcpTarget):
    """See `bridge.targets.Target`."""

    name = "torchtitan"
    loader = "torchtitan"
    writes = (".metadata", "__*.distcp", "config.json")
    loads = (".metadata", "__*.distcp")
    Options = TorchtitanOptions
    loaded_by = (
        Program(
            "torchtitan",
            "0.3.0, and 0.2.2 with `--era 0.2`",
            "its own state-dict adapters give the same tensors; torch 2.13's distributed checkpoint loads them",
            ("tests/targets/dcp/test_torchtitan.py",),
        ),
    )

    def resolve(self, options: TorchtitanOptions, structure: Structure, scheme: Any, specs: Any) -> Any:
        if str(options.era) not in ERAS:
            raise UsageError(f"era {options.era!r} is unknown; known: {', '.join(ERAS)}")
        return super().resolve(options, structure, scheme, specs)

    def why_no_drafts(self, known: bool, options: TorchtitanOptions) -> str:
        old = str(options.era) != ERAS[0]
        return (
            f"torchtitan {options.era} has no draft layers" if known and old else super().why_no_drafts(known, options)
        )

    def next_command(self, plan: Plan) -> str:
        return "./run_train.sh --checkpoint.enable --checkpoint.initial_load_path {out} ..."

    def draft(self, draft: Draft) -> Drafted:
        from bridge.tables.architectures.structure import match_table
        from bridge.tables.dialects.dialect import load_dialect
        from bridge.targets.dcp.steps import Drafting
        from bridge.targets.dialect_steps import with_drafts

        matched, dialect = match_table(draft.config, draft.specs), load_dialect(self.name)
        era, layout = str(draft.options.era), dialect.architectures.get(matched.architecture, "")
        also = () if era == ERAS[0] else ("", layout)
        whole, drafts = with_drafts(draft, dialect, matched)
        drafted = Drafting(draft, dialect, whole, drafts, also=also, biased=True).drafted()
        window = window_of(draft.config, MISTRAL_WINDOW)
        if matched.architecture.startswith("Mistral") and window:
            give = as_given({"sliding_window": None})
            drafted.problems.append(("", f"sliding_window = {window}: {WINDOWLESS}; give {give}"))
        model = dialect.file.section("models").get(layout, {})
        if (only := model.get("era", era)) != era:
            drafted.problems.append(("", f"torchtitan {era} has no model for it, {only} has; give era={only!r}"))
        drafted.problems += [("config.json", text) for text in _rope(matched, model["rope"])]
        if "unlike" in model and (fields := dict(_unlike(draft.config, matched.table))):
            drafted.problems.append(("", f"{model['unlike']}; give {as_given(fields)}"))
        if not drafted.problems:
            drafted.notes.append(_of_the_run(matched, dialect.followed(matched.architecture), drafts.count))
        drafted.notes += [ZERO_BIAS] * any(not step.source for step in drafted.steps)
        return drafted

    def notes(self, structure: Structure, options: TorchtitanOptions) -> tuple[str, ...]:
        return (f"names of torchtitan {options.era}, which reads checkpoints from <dump>/checkpoint/step-<N>",)

    def write(self, context: ConversionContext, directory: Path) -> WriteResult:
        from bridge.core.formats.dcp_index import index_files

        config = written_config(context.plan, context.source.config)
        return write_checkpoint(context, directory, {"config.json": config, **index_files(context.plan.files)})


def _of_the_run(matched: Matched, followed: Iterable[str], drafts: int) -> str:
    """A note of the numbers that the run must give torchtitan's model, since its tensors do not tell them."""
    from bridge.sources.configs.rope import rope_of

    rope = rope_of(matched.config)
    scaled = ", ".join(f"{name} {value}" for name, value in rope.scaling.items()) if rope.kind != "default" else ""
    whole = set() if window_of(matched.config) else {"sliding_window"}
    told = sorted(name for name in {*followed} - whole if matched.config.get(name) is not None)
    given = [f"{name} = {matched.config[name]}" for name in told]
    given += [f"num_mtp_layers = {drafts}"] if drafts else []
    given += [f"rope_theta = {rope.theta}", *([f"{rope.kind} ({scaled})"] if scaled else [])]
    return f"torchtitan reads no config.json, which is for other programs; its flavor must have {', '.join(given)}"


def _rope(matched: Matched, kinds: Collection[str]) -> Iterator[str]:
    """Yield what torchtitan's rotary positions, of `kinds`, do not compute."""
    from bridge.sources.configs.rope import rope_of
    from bridge.tables.architectures.meaning import PARTIAL, malformed_rope

    if any(malformed_rope(matched.config)):
        return
    rope = rope_of(matched.config, share=float(str(matched.table.computes.get(PARTIAL) or 1)))
    if rope.kind not in kinds:
        yield f"rope_type is {rope.kind!r}; torchtitan's model has {' and '.join(kinds)}; {INSTEAD}"
    if rope.share != 1:
        yield f"{PARTIAL} is {rope.share}; torchtitan's model turns whole heads; {INSTEAD}"
    if rope.kind == "yarn" and "kv_rank" in matched.names and not _is_of_scores(rope.scaling):
        lacks = "without equal mscale and mscale_all_dim"
        yield f"rope_type is 'yarn' {lacks}; torchtitan's model scales scores alone; {INSTEAD}"


def _is_of_scores(scaling: Mapping[str, Any]) -> bool:
    """Whether YaRN scales scores and no rotary positions (`DeepseekV3Attention` and YaRN of transformers 5.23)."""
    return bool(scaling.get("mscale")) and scaling.get("mscale") == scaling.get("mscale_all_dim")


def _unlike(config: Mapping[str, Any], table: ArchTable) -> Iterator[tuple[str, Any]]:
    """Yield fields that make another model than torchtitan's, as `Llama4TextConfig` reads them, with values of that."""
    given = {**table.computes, **config}
    layers, interval = int(config["num_hidden_layers"]), max(1, int(given["no_rope_layer_interval"]))
    rotary = given["no_rope_layers"] or [(layer + 1) % interval for layer in range(layers)]
    kinds = given["layer_types"] or ["chunked_attention" if turns else FULL for turns in rotary]
    for name in ("use_qk_norm", "attn_temperature_tuning"):
        if given[name]:
            yield name, False
    if not all(rotary):
        yield "no_rope_layers", [1] * layers
    if {*kinds} != {FULL}:
        yield "layer_types", [FULL] * layers


TARGET = Torchtitan()
