"""Target `hf`: the unified Hugging Face checkpoint.

vLLM, SGLang, TensorRT-LLM and transformers load it. Tensors keep the source's names, so an architecture needs no table.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.errors import UsageError
from bridge.core.output.names import GENERATION, STEM
from bridge.core.text import byte_count, fold_problems, nearest
from bridge.core.values import EITHER, LLM_COMPRESSOR, Format, Numeric, Program, Site, Structure, TensorSpec, main_dtype
from bridge.planning.contract_files import load_runtime, runtimes
from bridge.planning.contracts import verdict
from bridge.planning.drafts import check_choice, without_promise
from bridge.planning.make import CHOSEN_CODES
from bridge.planning.plan import Plan
from bridge.planning.target import Draft, Drafted
from bridge.sources.config_json import as_given
from bridge.sources.configs.diffusion import is_diffusion
from bridge.targets.checkpoint import StreamedTarget, check_ranks, float_dtype, option, write_checkpoint
from bridge.targets.config_json import generation_config, generation_problems, restated
from bridge.targets.hf.shards import index, names_of
from bridge.targets.hf.spelling import SPELLINGS, spelling
from bridge.targets.hf.steps import Drafting
from bridge.targets.tasks import classes_of

if TYPE_CHECKING:
    from bridge.quant.schemes.scheme import Scheme
    from bridge.sources.source import Source
    from bridge.streaming.context import ConversionContext, WriteResult
    from bridge.targets.generation import Generator

GENERATE = "import sys, transformers as t; print(t.pipeline('text-generation', sys.argv[1])('The sun is'))"
# program -> its command, and its flag for ranks; that of the program that was asked for comes first, then in this order
SERVERS = {
    "vllm": ("vllm serve {out}", "--tensor-parallel-size"),
    "sglang": ("python -m sglang.launch_server --model-path {out}", "--tp-size"),
    "trtllm": ("trtllm-serve {out}", "--tp_size"),
    "transformers": (f'python -c "{GENERATE}" {{out}}', ""),
}
DEFAULT_FORMAT, COMPRESSED = "modelopt", "compressed-tensors"
ZERO_POINTS = (COMPRESSED, "awq")  # what vLLM has kernels for: Marlin's uint4 with a zero point while it runs
_ANY = Site("", "", "out_in")
UNTIED = "the head is quantized and no longer tied to the embedding: config.json has tie_word_embeddings false"
NO_CLASS = (
    "config.json has no model_type, by which transformers, and servers with it, find the class; add it, or give "
    f"{as_given({'model_type': '...'})}"
)
UNFOLDED = "pre_quant_scale stays a tensor beside the weights, since no norm feeds these modules alone"


@dataclass(frozen=True)
class HfOptions:
    """Options of target `hf`."""

    format: str | None = option(
        None,
        f"one of {', '.join(SPELLINGS)}; default: the first that holds the scheme and that a program loads",
        tuple(SPELLINGS),
    )
    shard_size: str = option("10GB", "maximum size of a weight file: 300MB, 10GB")
    allow_split: bool = option(
        False, "let a recipe keep some of q, k, v, of gate, up, or of a layer's experts; servers refuse it"
    )
    own_scales: bool = option(
        False, "fp8: a weight scale for each of q, k, v, gate, up, as ModelOpt writes; servers then quantize again"
    )
    tp: int = option(1, "ranks that will share each layer (tensor parallelism): only checked, files are the same")
    dtype: str | None = option(None, "fp16, bf16, fp32: round first; default: source's")
    drafts: str = option("keep", "draft layers (MTP): keep as stored, quantize, or drop, also from config.json")


class Hf(StreamedTarget):
    """See `bridge.targets.Target`."""

    name = "hf"
    writes = (
        "model*.safetensors", "model.safetensors.index.json", "config.json", GENERATION, "hf_quant_config.json",
        f"{STEM}*.safetensors", f"{STEM}.safetensors.index.json",
    )  # fmt: skip
    loads = (
        "model*.safetensors", "model.safetensors.index.json", "config.json", f"{STEM}*.safetensors",
        f"{STEM}.safetensors.index.json", "*/*.safetensors", "*/*.safetensors.index.json", "*/config.json",
    )  # fmt: skip
    metadata: Mapping[str, str] = {"format": "pt"}
    Options = HfOptions
    roundings = (LLM_COMPRESSOR,)
    zero_points = True
    loaded_by = (
        Program(
            "vLLM, SGLang, TensorRT-LLM (PyTorch backend)",
            "versions that read the unified checkpoint of ModelOpt 0.47",
            "every file equals the one that ModelOpt's `export_hf_checkpoint` writes, byte for byte, except for a "
            "named list; the loaders and models of vLLM 0.33 and SGLang 0.5.23 read it on a CPU; their GPU kernels "
            "and TensorRT-LLM were not run",
            ("tests/targets/hf/test_hf_parity.py", "tests/targets/hf/test_vllm.py", "tests/targets/hf/test_sglang.py"),
        ),
        Program(
            "diffusers (`from_single_file` with its BFLQuantizationConfig)",
            "0.42",
            "its loader reads fp8_pc_pt and nvfp4 of Flux, SD3, Wan and UNets on a CPU, and gives the outputs of the "
            "written weights; its GPU kernels were not run",
            ("tests/targets/hf/test_diffusion.py",),
        ),
        Program(
            "vLLM, transformers (`--format compressed-tensors`)",
            "compressed-tensors 0.20, transformers 5.20 to 5.23",
            "tensors and config equal llm-compressor 0.14's; transformers loads them and gives the logits of the "
            "written weights; vLLM's loader and models read them on a CPU; its GPU kernels were not run",
            ("tests/targets/hf/test_compressed.py", "tests/targets/hf/test_folding.py"),
        ),
        Program(
            "vLLM (`--format awq`, `--format gptq`, `--format deepseek`)",
            "vLLM 0.33",
            "words equal those of vLLM's own packing functions; its kernels' arithmetic, written out in torch, and "
            "transformers' dequantization of FP8 blocks give the weights that are read back; its loader and models "
            "read them on a CPU; its GPU kernels were not run",
            ("tests/targets/hf/test_weight_only.py",),
        ),
    )

    def resolve(
        self, options: HfOptions, structure: Structure, scheme: Scheme | None, specs: Mapping[str, TensorSpec]
    ) -> HfOptions:
        if options.format is None:
            options = dataclasses.replace(options, format=_format_for(scheme, structure))
        elif options.format not in SPELLINGS:
            raise UsageError(f"format {options.format!r} is unknown; {nearest(options.format, SPELLINGS)}")
        check_choice(options.drafts, scheme)
        byte_count(options.shard_size, "shard_size")
        check_ranks(tp=options.tp)
        return dataclasses.replace(options, dtype=float_dtype(options.dtype, specs, "that weights can be rounded to"))

    def why_unsupported(self, format_: Format, options: HfOptions) -> str:
        known = SPELLINGS if options.format is None else [options.format]
        whys = [_why_lacking(name, format_) for name in known]
        return "" if "" in whys else whys[0]

    def why_kv_unsupported(self, kv: Numeric, structure: Structure, options: HfOptions) -> str:
        if not structure.attention:
            return f"{structure.architecture} has no attention module with a cache"
        return spelling(options.format or DEFAULT_FORMAT).why_kv_unsupported(kv)

    def methods(self, options: HfOptions) -> tuple[str, ...]:
        """The `quant_method` that the output names."""
        return ({"deepseek": "fp8"}.get(options.format or "", options.format or DEFAULT_FORMAT),)

    def why_stack_unsupported(self, format_: Format, site: Site, options: HfOptions) -> str:
        return ""

    def why_kept(self, format_: Format, site: Site) -> str:
        return "convolution: unified checkpoints hold quantized matrices only" if site.layout == "conv" else ""

    def draft(self, draft: Draft) -> Drafted:
        drafted = Drafting(draft, spelling(draft.options.format)).drafted()
        drafted.problems += generation_problems(draft.side_files)
        coded = "AutoConfig" in (draft.config.get("auto_map") or {})
        if not (draft.config.get("model_type") or coded or is_diffusion(draft.config)):
            drafted.notes.append(NO_CLASS)
        return drafted

    def why_not_loaded(self, plan: Plan) -> str:
        return NO_CLASS if NO_CLASS in plan.notes else ""

    def notes(self, structure: Structure, options: HfOptions) -> tuple[str, ...]:
        if not structure.ungrouped:
            return ()
        return (f"unknown which modules read the same input: {structure.ungrouped}; none of them share a scale",)

    def lint(self, directory: Path, plan: Plan) -> list[str]:
        from bridge.targets.hf.lint import lint

        here = directory / names_of(plan.files).folder
        return [*lint(here), *_altered(here, plan)]

    def runtime(self, directory: Path) -> Any:
        from bridge.targets.hf.runtime import Runtime

        return Runtime(directory)

    def why_no_generator(self, directory: Path) -> str:
        return ""

    def generator(self, directory: Path) -> Generator:
        from bridge.targets.hf import runtime

        return runtime.Generator.of_output(directory)

    def next_command(self, plan: Plan) -> str:
        """The command of a program that loads it, for a language model."""
        if self.why_not_loaded(plan) or not plan.architecture.endswith(classes_of("causal-lm")):
            return ""
        loading = (name for name in SERVERS if not verdict(load_runtime(name), plan).why_not)
        program = plan.program or next(loading, "")
        if program not in SERVERS:
            return ""
        command, ranks = SERVERS[program]
        return f"{command} {ranks} {plan.options['tp']}" if ranks and plan.options["tp"] > 1 else command

    def files(self, plan: Plan, source: Source) -> dict[str, bytes]:
        """What stands beside the weights: configuration, index, generation_config.json."""
        names = names_of(plan.files)
        config = without_promise(source.config, (output.spec.name for output in plan.outputs))
        dtype = plan.options["dtype"]
        if dtype != main_dtype(plan.sources.values()):
            config = restated(config, dtype)
        files = {names.at(name): content for name, content in _config_files(plan, config).items()}
        if len(plan.files) > 1:
            count = sum(
                o.spec.size for o in plan.outputs if o.part == "weight"
            )  # without scales, like `num_parameters`
            files[names.index] = index(plan.files, {"total_parameters": count})
        if GENERATION in source.side_files:
            files[GENERATION] = generation_config(source.side_files[GENERATION])
        return files

    def write(self, context: ConversionContext, directory: Path) -> WriteResult:
        files = self.files(context.plan, context.source)
        written = write_checkpoint(context, directory, files)
        return dataclasses.replace(written, notes=(*written.notes, *_deviations(context.plan)))


def _format_for(scheme: Scheme | None, structure: Structure) -> str:
    """The first format that holds a scheme's formats and its KV cache and that a program loads; else the first that
    holds them; one that says why, if none does.

    compressed-tensors comes first for scales of either sign, which ModelOpt's keeps positive, if it has the matrices.
    """
    if scheme is None:
        return DEFAULT_FORMAT
    stored = getattr(scheme, "modules", {})  # of a quantized source
    wanted = {*stored.values()} or {*scheme.formats}
    either = any(numeric.search == EITHER for format_ in wanted for numeric in format_.weight)
    first = [COMPRESSED] if either and all(site.layout != "in_out" for site in structure.sites) else []
    holding = []
    for name in [*first, *SPELLINGS]:
        lacks_cache = scheme.kv is not None and spelling(name).why_kv_unsupported(scheme.kv)
        if not lacks_cache and not any(_why_lacking(name, format_) for format_ in wanted):
            holding.append(name)
    contracts = [one for program in runtimes() for one in program.contracts if one.target == "hf"]
    read = {one.options.get("format") for one in contracts if not one.lacks(wanted, structure.architecture)}
    smoothed = any(format_.prescales for format_ in wanted)
    if holding and smoothed and any(site.stacked or site.expert is not None for site in structure.sites):
        return holding[0]  # other formats have no place for the pre-scales of experts
    if holding:
        return next((name for name in holding if name in read), holding[0])
    others = any(format_.rounding or format_.weight[0].zero_points for format_ in wanted)
    return COMPRESSED if others else DEFAULT_FORMAT


def _why_lacking(name: str, format_: Format) -> str:
    """Why checkpoints of a format of target hf do not hold a format of a weight; "" if they do."""
    if format_.rounding and name != COMPRESSED:
        return f"--format {name} has no numbers of {format_.rounding}; leave --format out, or use {COMPRESSED}"
    if format_.weight[0].zero_points and name not in ZERO_POINTS:
        return f"--format {name} has no zero points here; leave --format out, or use {' or '.join(ZERO_POINTS)}"
    if why := spelling(name).why_unsupported(format_):
        return why
    either = format_.ordered and format_.weight[0].search == EITHER  # of FP4 all scales are positive
    if either and not spelling(name).coding(format_, _ANY, "float16", "float16").signed:
        return CHOSEN_CODES
    return ""


def _config_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    """The spelling's files, with the entries that are carried in their sections."""
    files = spelling(plan.options["format"]).config_files(plan, config)
    for name, content in files.items() if plan.carried else ():
        whole = json.loads(content)
        whole["quantization_config" if "quantization_config" in whole else "quantization"] |= plan.carried
        files[name] = json.dumps(whole, indent=4).encode()
    return files


def _altered(directory: Path, plan: Plan) -> list[str]:
    """An error if config.json says another thing about the quantized tensors than when it was written."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return []  # an error of lint already
    files = _config_files(plan, config)
    written = json.loads(files["config.json"]).get("quantization_config")
    if config.get("quantization_config") == written:
        return []
    return ["error [config] config.json: quantization_config was changed after it was written; convert again"]


def _deviations(plan: Plan) -> list[str]:
    """Sentences on what a user who knows ModelOpt's files would not expect in these."""
    notes = []
    if plan.untied:
        notes.append(("", UNTIED))
    for step in plan.quantized:
        smoothed = step.format and step.format.algorithm in ("awq", "awq_full") and len(step.unified) > 1
        if step.site and smoothed and any(output.part == "pre_quant_scale" for output in step.outputs):
            notes.append((step.site.module, UNFOLDED))
    for step in plan.steps if plan.quantized else ():
        if step.site and not step.format and step.site.layout == "in_out":
            notes.append((step.site.module, "unquantized Conv1D weights stay [in, out]"))
    return fold_problems(notes)


TARGET = Hf()
