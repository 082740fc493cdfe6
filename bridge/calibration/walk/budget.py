"""Decide from headers whether to calibrate block by block."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge.calibration.algorithms.clips import LOSSES, search_bytes
from bridge.calibration.algorithms.sizes import (
    EXPERTS,
    LAYER,
    block_of,
    changed_values,
    codes_bytes,
    hessian_sizes,
    matrices_of,
    widest,
)
from bridge.calibration.data import BATCH, DEFAULT, HELD_OUT, SEQUENCE, Data, Sampling
from bridge.calibration.quantizers import is_unknown, known_formats
from bridge.calibration.requirements import sampling_for
from bridge.calibration.schedule import schedule_of
from bridge.core.errors import CalibrationError, UsageError
from bridge.core.machine import available_memory
from bridge.core.text import size
from bridge.core.values import Format, Site, TensorSpec, main_dtype
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.configs.positions import positions

WHOLE = 1.3  # ModelOpt's copies of single matrices, and what `from_pretrained` keeps while it builds a model
LEARNED = 20  # bytes of SignRound for each value of a block: weight, offset and its start in float32, codes, gradients
SLACK = 1.25
BASE = 300 << 20  # what one block takes apart from its bytes: pieces that are read, small modules, ModelOpt's objects
USED = 0.8  # of the free memory, without memory=
HELD = 2  # tensors of activations that a forward holds: the embeddings, until its end, and what its last block put out
AT_ONCE = 3  # and of a batch that runs: the input of a block, its output, and what is being written
STAYS = 1 << 20  # bytes; smaller activations stay on a device: moving them takes longer than it saves
EXPERT = 8  # in bytes of its weights: one that runs, one that is read ahead, and ModelOpt's copies of the first
_KEYS = (
    ("hidden_size", "n_embd", "d_model"),
    ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim"),
    ("vocab_size",),
    ("num_experts_per_tok", "moe_topk", "top_k"),
)
_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Tokens:
    """How much data runs: the most positions of one batch, and all positions of batches and held-out inputs."""

    batch: int
    calibrated: int
    held_out: int


@dataclass(frozen=True)
class Room:
    """What fits into memory: `block`, bytes of a block that is read whole. `least`: memory= for the largest, whole."""

    block: int
    least: int


def default_tokens(scheme: Scheme, config: Mapping[str, Any], sampling: Sampling = DEFAULT) -> Tokens:
    """Return the positions of rows that are cut from text; their number is the scheme's, unless `sampling` has one.

    >>> from bridge.quant.schemes.load import load_scheme
    >>> default_tokens(load_scheme("int8_sq"), {"max_position_embeddings": 64})
    Tokens(batch=512, calibrated=8192, held_out=1024)
    """
    rows, wanted = sampling_for(sampling, scheme).rows, sampling.sequence or SEQUENCE
    length = min(wanted, positions(config) or wanted)
    return Tokens(BATCH * length, rows * length, -(-rows // HELD_OUT) * length)


def tokens_of(data: Data) -> Tokens:
    """Return the positions of data; of a batch without ids those of its first tensor's leading axes."""

    def positions(batch: Mapping[str, Any]) -> int:
        tensor = batch.get("input_ids", next(iter(batch.values())))
        return int(tensor.shape[0] * (tensor.shape[1] if tensor.ndim > 1 else 1))

    held = [positions(batch) for batch in data.held_out]
    kept = [positions(batch) for batch in data.batches]
    return Tokens(max([*kept, *held], default=0), sum(kept), sum(held))


@dataclass(frozen=True)
class Parts:
    """What a run part by part takes. `largest`: the name of the largest part, of `nbytes`.

    `held`: bytes with activations between parts in memory; `in_files`: with them in files.
    """

    largest: str
    nbytes: int
    held: int
    in_files: int

    def __str__(self) -> str:
        files = f"; {size(self.in_files)} with activations in files" if self.in_files < 0.9 * self.held else ""
        return f"(the largest is {self.largest}, {size(self.nbytes)}{files})"


@dataclass(frozen=True)
class Need:
    """Bytes that a calibration takes: with the whole model, block by block, and with a layer's experts one by one.

    `states`: activations between blocks. `experts`: as `blocks` without any. `codes`: of the codes and scales that are
    chosen, which a run by blocks keeps in a file; part of `whole`. `offloaded`: of the states, what a device leaves to
    the memory of its host while it waits. `walks`: the model runs block by block whatever memory there is.
    """

    whole: int
    states: int
    blocks: Parts
    experts: Parts
    codes: int = 0
    offloaded: int = 0
    walks: bool = False

    def share(self, budget: int) -> int:
        """Return how many bytes of the activations stay in memory, if a budget is at least `least`."""
        way = self.experts if self.cuts(budget) else self.blocks
        return self.states if budget >= way.held else min(self.states, max(0, int((budget - way.in_files) / SLACK)))

    def cuts(self, budget: int) -> bool:
        """Whether layers do not fit into a budget, so that their experts run one by one."""
        return budget < self.blocks.in_files

    def line(self) -> str:
        """The figures, for a plan; of a small model one, because blocks would save nothing."""
        if self.walks:
            return f"calibration takes {size(self.blocks.held)} block by block {self.blocks}"
        if self.least >= self.whole:
            return f"calibration takes {size(self.whole)} of memory for the whole model"
        line = (
            f"calibration takes {size(self.whole)} with the whole model in memory, {size(self.blocks.held)} block by "
            f"block {self.blocks}"
        )
        if self.experts.largest != self.blocks.largest:
            line += f", {size(self.experts.held)} expert by expert {self.experts}"
        return line

    @property
    def least(self) -> int:
        """What a calibration takes at least."""
        return min(self.whole, self.blocks.in_files, self.experts.in_files)

    @property
    def on_device(self) -> Need:
        """The same on a device, where waiting activations have no files."""
        blocks, experts = (
            replace(way, held=way.in_files) if self.offloaded else replace(way, in_files=way.held)
            for way in (self.blocks, self.experts)
        )
        return replace(self, blocks=blocks, experts=experts)

    @property
    def uncut(self) -> Need:
        """The same without experts one by one."""
        return replace(self, experts=self.blocks)

    def room(self, budget: int) -> Room | None:
        """What fits into `budget`; None if every block does."""
        if not self.cuts(budget):
            return None
        spare = int((budget - self.experts.held) / SLACK)
        return Room(self.experts.nbytes + max(0, spare), self.blocks.in_files)


def calibration_need(
    specs: Mapping[str, TensorSpec],
    config: Mapping[str, Any],
    scheme: Scheme,
    tokens: Tokens | None = None,
    sites: Sequence[Site] = (),
) -> Need:
    """Return what a calibration takes, from headers. `tokens`: of its data; None for the embedded text.

    `sites`: those that the scheme is bound to; without them every matrix of a layer counts as one of each format.
    """
    tokens = tokens or default_tokens(scheme, config)
    width, inner, vocabulary, chosen = (_number(config, keys) for keys in _KEYS)
    item = _ITEM.get(main_dtype(specs.values()), 4)
    inside = tokens.batch * max(vocabulary, AT_ONCE * inner) * item  # logits of the head; gate, up and product
    algorithms = {form.algorithm for form in scheme.formats}
    awq = algorithms & {"awq", "awq_full"}
    states = HELD * (tokens.calibrated * streams_of(scheme, sites) + 2 * tokens.held_out) * width * item
    running = min(states, AT_ONCE * tokens.batch * width * item)
    # a forward that pauses at experts keeps its residual, their inputs and their sum; grouped_mm their rows in float32
    paused = 3 * max(tokens.calibrated, tokens.held_out) * width * item + tokens.held_out * chosen * width * 4
    smoothed = 3 * max((spec.nbytes for spec in specs.values() if len(spec.shape) == 2), default=0) if awq else 0
    matrices, total = matrices_of(specs, scheme, sites), sum(spec.nbytes for spec in specs.values())
    clipped, codes = widest(matrices), codes_bytes(matrices)
    product, losses = (2 * search_bytes(clipped), LOSSES / item) if clipped else (0, 0.0)
    hessians, copies = hessian_sizes(matrices)
    whole = int((WHOLE + losses) * total) + stacked_bytes(specs.values()) + product + inside
    whole += sum(hessians.values()) + copies + codes + changed_values(matrices) * item
    learns = any(form.learned for form in scheme.formats)
    learned = int(LEARNED / item * max(block_sizes(specs.values()).values())) if learns and specs else 0
    rest = learned + smoothed + product + inside + BASE + max(hessians.values(), default=0) + copies

    def parts(sizes: Mapping[str, int], waiting: int = 0) -> Parts:
        name = max(sizes, key=lambda key: sizes[key])
        most = sizes[name]
        both = (int(SLACK * (most + held + waiting) + losses * most) + rest for held in (states, running))
        return Parts(name, most, *both)

    blocks, experts = parts(block_sizes(specs.values())), parts(part_sizes(specs.values()), paused)
    offloaded = states if tokens.batch * width * item >= STAYS else 0
    walks = any(form.ordered for form in scheme.formats) and not scheme.needs_modelopt
    made = Need(whole, states, blocks, experts, codes, offloaded, walks)
    # an importance matrix is collected from whole layers, as are clips and codes
    looks = any(form.watched or form.clipped or form.chosen for form in scheme.formats)
    return made if experts.in_files < blocks.in_files and not looks else made.uncut


def streams_of(scheme: Scheme, sites: Sequence[Site] = ()) -> int:
    """Return how many streams of activations the data have in a model with `sites`, or with sites of each format.

    ModelOpt does not see what it has no quantizer for; an importance matrix takes one stream.
    """
    found = known_formats(sites, scheme).values() if sites else scheme.formats
    formats = [form for form in found if isinstance(form, Format) and not is_unknown(form)]
    learned = 3 * any(form.learned for form in scheme.formats)  # two streams, and the outputs of one block
    return max(1, learned, schedule_of(scheme, formats, scheme.kv is not None).count)


def measuring_need(
    specs: Mapping[str, TensorSpec], config: Mapping[str, Any], schemes: Iterable[Scheme], tokens: Tokens
) -> Need:
    """Return what measuring units in several schemes takes: in one whole model, and in blocks, scheme after scheme.

    Weights that calibration changes are held twice, and so are logits.
    """
    logits = 2 * tokens.batch * _number(config, ("vocab_size",)) * 4
    found, changing = [], 0
    for scheme in schemes:
        need = calibration_need(specs, config, scheme, tokens)
        twice = any(form.changes_weights for form in scheme.formats)
        changing += twice
        blocks = need.blocks
        more = logits + blocks.nbytes * twice
        blocks = replace(blocks, held=blocks.held + more, in_files=blocks.in_files + more)
        found.append(replace(need, blocks=blocks).uncut)
    most = max(found, key=lambda need: need.blocks.held)
    again = max(0, changing - 1) * sum(spec.nbytes for spec in specs.values())
    whole = max(need.whole for need in found) + logits + again
    return replace(most, whole=whole)


def block_sizes(specs: Iterable[TensorSpec]) -> dict[str, int]:
    """Return bytes by block: a layer, or a tensor outside the layers.

    >>> block_sizes([TensorSpec("model.layers.3.mlp.up.weight", (2, 2), "float32")])
    {'model.layers.3': 16}
    """
    sizes = Counter[str]()
    for spec in specs:
        sizes[block_of(spec.name)] += spec.nbytes
    return dict(sizes)


def stacked_bytes(specs: Iterable[TensorSpec]) -> int:
    """Return bytes of experts with a tensor each, which transformers stacks while it loads a model.

    Both copies are in memory then, and glibc keeps the first: its heap has 412 MB free after a Qwen3-MoE of 414 MB.

    >>> stacked_bytes([TensorSpec("model.layers.3.mlp.experts.0.up_proj.weight", (2, 2), "float32")])
    16
    """
    matched = ((spec, EXPERTS.match(spec.name)) for spec in specs)
    return sum(spec.nbytes for spec, match in matched if match and match["number"])


def part_sizes(specs: Iterable[TensorSpec]) -> dict[str, int]:
    """Return bytes by block, of a layer with experts without them and with what one of them takes.

    >>> up = [TensorSpec(f"model.layers.3.mlp.experts.{e}.up_proj.weight", (2, 2), "float32") for e in range(8)]
    >>> part_sizes([TensorSpec("model.layers.3.mlp.gate.weight", (8, 2), "float32"), *up])
    {'model.layers.3 with one expert of 8 at a time': 192}
    """
    dense = Counter[str]()
    experts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for spec in specs:
        name, stack = block_of(spec.name), EXPERTS.match(spec.name) if LAYER.match(spec.name) else None
        if stack and stack["number"]:
            experts[name][stack["number"]] += spec.nbytes
        elif stack and len(spec.shape) > 1 and not spec.across:
            for number in range(spec.shape[0]):
                experts[name][str(number)] += spec.nbytes // spec.shape[0]
        else:
            dense[name] += spec.nbytes
    cut = {
        f"{name} with one expert of {len(own)} at a time": dense.pop(name, 0) + EXPERT * max(own.values())
        for name, own in experts.items()
    }
    return dict(dense) | cut


def by_blocks(found: Need, memory: int | None, free: int, driven: bool = False, resident: bool = False) -> bool:
    """Whether to calibrate block by block; an error if neither way fits.

    `memory`: what the caller allows, else part of `free`. `driven`: a forward_loop runs the whole model. `resident`:
    the model is in memory already, so that only the caller's own limit sends it through in blocks.
    """
    budget = memory_of(memory, free)
    if found.whole <= budget or (memory is None and (driven or resident)):
        return False
    if driven:
        raise CalibrationError(
            f"a forward_loop runs the whole model, which takes {size(found.whole)} of memory, more than "
            f"memory={size(budget)} (--memory); give batches as data=, which run block by block, or more memory"
        )
    least, part = found.least, found.experts
    if least > budget:
        given = f"memory={size(budget)} (--memory)" if memory is not None else f"{size(budget)}, what is free here,"
        raise UsageError(
            f"{given} is too little to calibrate: {part.largest} has {size(part.nbytes)}, and with its "
            f"activations it takes {size(least)}; give at least {least} bytes, fewer samples= (--samples), or a saved "
            "calibration (calib=)"
        )
    return True


def memory_of(memory: int | None, free: int) -> int:
    """Return the bytes that a calibration may take: what the caller allows, else part of what is free."""
    return int(free * USED) if memory is None else memory


def choice(found: Need, memory: int | None) -> str:
    """Both figures, and which way a calibration goes with `memory` or with what is free here."""
    given = available_memory() if memory is None else memory
    try:
        way, budget = "the whole model at once", memory_of(memory, given)
        if by_blocks(found, memory, given) or found.walks:
            way = "expert by expert" if found.cuts(budget) else "block by block"
            if spilled := found.states - found.share(budget):
                way += f", with {size(spilled)} of activations in files beside the output"
    except UsageError:
        way = "not at all"
    return f"{found.line()}; with {size(given)} {'free here' if memory is None else 'given'}: {way}"


def _number(config: Mapping[str, Any], keys: Iterable[str]) -> int:
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config
    return next((int(config[key]) for key in keys if type(config.get(key)) is int), 0)
