"""Faults of a model: draft layers, output heads, names, the index."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from bridge.core.errors import BridgeError
from bridge.core.text import SHOWN, first_of, fold_layers, listed, named, number
from bridge.planning.drafts import drafts_among, lacking, promised, unpromised
from bridge.planning.eagle import eagle_problems, is_eagle
from bridge.sources.opening import open_source
from bridge.streaming.run import equal_bits
from bridge.tables.architectures.arch import arch_file, row_names
from bridge.tables.architectures.by_table import structure_by_table
from bridge.tables.architectures.match import architecture_of
from bridge.workflows.doctor.checkpoint import INDEX, OTHERS, SINGLE, Checkpoint, safetensors
from bridge.workflows.doctor.finding import COMMAND, Finding

AGAIN = "get the checkpoint again"
GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
HEADS, EMBEDDINGS = (
    ("lm_head", "embed_out", "output", "output_layer", "proj_out"),
    ("embed_tokens", "wte", "embed_in", "word_embeddings"),
)


def fit(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Tensors that config.json asks for and that are not there, or have another shape, if a table says it."""
    known = checkpoint.config.get("architectures")
    if not known or "fc.weight" in checkpoint.specs:
        return  # EAGLE's drafts have the class of the model beside them
    try:
        source = open_source(checkpoint.directory)
        structure_by_table(source.config, source.specs)
    except BridgeError as error:
        if where := tuple(re.findall(r"^  (?:missing|shape) +(\S+)", str(error), re.MULTILINE)):
            what = "not there, or not in the shape that config.json gives"
            yield Finding("tensors", what, where, "get the checkpoint again, or the config.json that belongs to it")


def draft_layers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Draft layers and drafts of EAGLE that are not whole, and layers that the config does not promise."""
    if checkpoint.config.get("architectures") and is_eagle(checkpoint.config):
        if problems := eagle_problems(checkpoint.config, checkpoint.specs, checkpoint.weights.read):
            yield Finding("drafts", str(listed("", problems)).removeprefix(": "), (), AGAIN)
        return
    if missing := lacking(checkpoint.config, checkpoint.specs):
        said = "the config promises draft layers that" if promised(checkpoint.config) else "draft layers"
        what = f"{said} are not whole: {first_of(fold_layers(missing), SHOWN)}"
        none = not drafts_among(checkpoint.specs, checkpoint.config)
        yield Finding("drafts", what, (), COMMAND if none else f"{AGAIN}, or remove the rest of the layer", none)
    drafts = drafts_among(checkpoint.specs, checkpoint.config)
    if extra := unpromised(checkpoint.config, drafts):
        count = number(promised(checkpoint.config), "draft layer")
        what = f"is of a layer after those that the config counts: it promises {count or 'none'}"
        mend = "set num_nextn_predict_layers in config.json if it drafts; `qbridge convert` leaves the layer out"
        yield Finding("drafts-unpromised", what, tuple(extra), mend)


def heads(checkpoint: Checkpoint) -> tuple[str, str]:
    """The names of the output head's and of the embedding's matrix; "" without one."""
    weights = [name for name in checkpoint.specs if name.endswith(".weight")]
    head = next((n for n in weights if n.split(".")[-2] in HEADS and ".layers." not in n), "")
    return head, next((n for n in weights if n.split(".")[-2] in EMBEDDINGS and ".layers." not in n), "")


def ties(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a config that say whether the head is tied."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    return [part for part in parts if isinstance(part.get("tie_word_embeddings"), bool)]


def output_head(checkpoint: Checkpoint) -> Iterator[Finding]:
    """A head beside the embedding that the config ties it to, or none where it ties nothing."""
    said = ties(checkpoint.config)
    generates = any(str(name).endswith(GENERATES) for name in checkpoint.config.get("architectures") or ())
    if not said or not generates:
        return
    head, embedding = heads(checkpoint)
    tied = bool(said[0]["tie_word_embeddings"])
    if tied and head and embedding:
        weights, specs = checkpoint.weights, checkpoint.specs
        if equal_bits(weights, specs[head], weights, specs[embedding]):
            yield Finding("head-twice", "is stored beside the embedding that it is tied to", (head,), repairs=True)
        else:
            what = f"differs from {embedding}, and the config ties them: programs disagree on which of them counts"
            yield Finding("head-differs", what, (head,), repairs=True)
    # drafts of EAGLE take the head of their model, and `fc` joins hidden states and tokens
    own = "fc.weight" in checkpoint.specs or any(word in HEADS for name in checkpoint.specs for word in name.split("."))
    if not tied and embedding and not own:
        what = "tie_word_embeddings is false, and there is no output head"
        mend = f"{COMMAND}, which ties it to the embedding: right if it was trained so, else get the checkpoint again"
        yield Finding("head-missing", what, (), mend, repairs=True)


def memory_names(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Names that a model has in memory and not in a checkpoint: those of wrappers, and those that no table has."""
    wrapped = tuple(own for name, own in checkpoint.stored.items() if name != own)
    if wrapped:
        yield Finding("names", "has names of wrappers of the trainer in it", wrapped, repairs=True)
    table = arch_file(architecture_of(checkpoint.config)) if checkpoint.config.get("architectures") else None
    if table is None or checkpoint.method:
        return
    known = {_kind(name) for name in row_names(table)}
    prefix = str(table.data.get("prefix", ""))
    known |= {name.removeprefix(prefix) for name in known}
    unknown = [n for n in checkpoint.specs if _kind(n) not in known and n not in drafts_among([n], checkpoint.config)]
    in_memory = [n for n in unknown if "language_model" in n or ".experts." in n]
    if in_memory:
        what = "is a name in the model in memory: other programs may read those of checkpoints alone"
        mend = "give the tensors to a model that was loaded from names of checkpoints, and save it with save_pretrained"
        yield Finding("memory-names", what, tuple(in_memory), mend)


def _kind(name: str) -> str:
    """A name without numbers, or a row's without placeholders."""
    return ".".join("{}" if word.isdecimal() or word.startswith("{") else word for word in name.split("."))


def files(checkpoint: Checkpoint) -> Iterator[Finding]:
    """An index that is missing or does not agree with its files, tensors that are twice there, files beside them."""
    shards, placed = checkpoint.files, checkpoint.placed
    lost = {*placed.values()} - {*shards}
    beside = [name for name in safetensors(checkpoint.directory) if name not in shards]
    two = checkpoint.index is not None and SINGLE in beside
    if checkpoint.twice:
        yield Finding("index", "is in more than one file, or more than one tensor", checkpoint.twice, AGAIN)
    if two:
        what = f"transformers reads {SINGLE}, and servers the files that {INDEX} names: two checkpoints"
        yield Finding("index", what, (), "keep one of them")
    elif others := [name for name in beside if not name.startswith(OTHERS)]:
        what = f"{INDEX} does not name it" if checkpoint.index is not None else f"not read beside {named(shards)}"
        yield Finding("other-files", what, tuple(others), "none needed: no program reads it")
    whole = {*shards} == {SINGLE} and {*placed} <= {*shards[SINGLE].specs}
    if lost:
        what = f"{INDEX} names {named(lost)}, which are not in the directory"
        if whole:
            yield Finding("index", f"{what}; {SINGLE} has every tensor of it", repairs=True)
        else:
            yield Finding("index", what, (), AGAIN)
    if checkpoint.twice or lost or two:
        return
    if checkpoint.index is None:
        if {*shards} != {SINGLE}:
            what = f"without {INDEX} only {SINGLE} is loaded, and the weights are in {named(shards)}"
            yield Finding("index", what, repairs=True)
        return
    right = {name for name, file in placed.items() if name in shards[file].specs}
    held = {own: file for file, shard in shards.items() for own in shard.specs}
    if stale := [name for name in placed if name not in held]:
        yield Finding("index", f"{INDEX} names it, and no file has it", tuple(stale), repairs=True)
    if out := [name for name in held if name not in right]:
        what = f"{INDEX} does not place it in {first_of(sorted({held[name] for name in out}), 3)}, which has it"
        yield Finding("index", what, tuple(out), repairs=True)
    metadata = checkpoint.index.get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    total = total_size(checkpoint)
    if said is not None and said != total:
        what = f"{INDEX} says {said} bytes, the tensors have {total}"
        yield Finding("index-size", what, repairs=True)


def total_size(checkpoint: Checkpoint) -> int:
    """Bytes of all tensors."""
    return sum(spec.nbytes for shard in checkpoint.files.values() for spec in shard.specs.values())
