"""NeMo's `Quantizer`, with NeMo 1's or 2's configs, for what `bridge.convert` takes.

Only translates configs and calls; `bridge` quantizes. Intended differences from NeMo:

- `quantize` leaves the caller's model as it is and returns a second one over the same memory; `export` takes that one.
  Of a live GPTModel of Megatron-Core, also in NeMo's models, it is the transformers model of its weights, which takes
  its memory again. `forward_loop` then runs the caller's model, and the tokens that reach it calibrate the second.
- `quant_cfg` is ModelOpt's preset, without what the configs change; a changed one is refused, not ignored.
- `sq_alpha` is read for NeMo 1 only. NeMo 2 does not read its field: it uses ModelOpt's 1, and 0.5 for Gemma.
- The KV cache is quantized where attention reads it, as in NeMo 2; NeMo 1 quantizes the outputs of the projection.
- Without `forward_loop`, NeMo's datasets (`cnn_dailymail`, `wikitext`) are replaced by the text that comes with bridge,
  so that no network is needed. Another `calibration_dataset` (a file or a dataset id) is cut as the config says.
- No sample is generated (`sample_output`, `generate_sample`): the report's parity says more.
- The tokenizer is saved next to the weights, as transformers does.
"""

from __future__ import annotations

import copy
import sys
import tarfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bridge.api.plans import plan, scheme_of
from bridge.api.verbs import convert, fake_quantize
from bridge.compat.live_megatron import recorded
from bridge.compat.nemo_configs import DTYPES, SCHEMES, ExportConfig, QuantizationConfig, QuantizerError, presets, read
from bridge.core.errors import BridgeError, SourceError, WriteError, drop_notes
from bridge.planning.structure import structure_of
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.scheme import Scheme
from bridge.reporting.make import save
from bridge.reporting.report import Report
from bridge.sources.live_models.megatron import gpt_model
from bridge.sources.opening import open_source
from bridge.sources.source import Source
from bridge.tables.architectures.match import architecture_of
from bridge.tables.dialects.dialect import load_dialect

__all__ = ["ExportConfig", "QuantizationConfig", "Quantizer", "QuantizerError"]

NEMO_DATASETS = (None, "cnn_dailymail", "wikitext")  # NeMo's own, on the hub
# Lower bound for the amax of inputs of NeMo's GPT: NeMo found that squared ReLU is calibrated too low.
MIN_AMAX = {"fp8": 0.01 * 448, "int8_sq": 0.01 * 127}
BLOCK = 128  # NeMo 2's awq_block_size, and that of the presets
COARSE_AWQ = ("gemma", "mpt")  # their W4A8 overflows in TensorRT-LLM if AWQ searches in fine steps (NeMo 2)


@dataclass(frozen=True)
class _Quantized:
    """The result of `quantize`, and its source."""

    model: Any
    source: Source
    scheme: Scheme
    calibration: Calibration


class Quantizer:
    """Quantize a model by the first config and write it by the second.

    The configs are mappings (OmegaConf's too) or objects with attributes, with the keys of NeMo 1 or 2.

    >>> quantizer = Quantizer(QuantizationConfig("fp8"), ExportConfig("llama-fp8"))
    >>> model = quantizer.quantize(model, forward_loop)  # doctest: +SKIP
    >>> quantizer.export(model)  # doctest: +SKIP
    """

    def __init__(self, quantization_config: Any, export_config: Any) -> None:
        """Check both configs; QuantizerError (an AssertionError) lists all problems.

        With a null `algorithm`, `export` writes the model as it is; without `export_config`, `export` fails.
        """
        self.quantization_config = quantization_config
        self.export_config = export_config
        self._quantization, self._export, self._decoder = read(quantization_config, export_config)
        self._algorithm: str | None = self._quantization["algorithm"]
        self._target: str = (self._export or {}).get("export_format", "trtllm")
        self._quantized: _Quantized | None = None

    @cached_property
    def quant_cfg(self) -> Any:
        """A copy of ModelOpt's preset of the algorithm, None for a null one."""
        return None if self._algorithm is None else copy.deepcopy(presets()[self._algorithm])

    @staticmethod
    def modify_model_config(model_cfg: Any) -> Any:
        """Change NeMo 1's model config as its quantization needs it, and return it."""
        closed = type(model_cfg).__module__.startswith("omegaconf.")  # its configs may refuse new keys
        keyed, changes = isinstance(model_cfg, Mapping), {"name": "modelopt", "apply_rope_fusion": False}
        with sys.modules["omegaconf"].open_dict(model_cfg) if closed else nullcontext():
            if model_cfg.get("sequence_parallel") if keyed else getattr(model_cfg, "sequence_parallel", False):
                changes["sequence_parallel"] = False
            for key, value in changes.items():
                if keyed:
                    model_cfg[key] = value
                else:
                    setattr(model_cfg, key, value)
        return model_cfg

    def quantize(self, model: Any, forward_loop: Callable[[Any], Any] | None = None) -> Any:
        """Return ModelOpt's fake-quantized model, calibrated by `forward_loop(model)`; `model` stays as it is.

        A model that cannot be exported is refused before it runs. An exception of `forward_loop` is passed on; nothing
        is quantized then. A null `algorithm` is an error, as in NeMo 1; with NeMo 2's configs `model` is returned, as
        in NeMo 2.
        """
        if self._algorithm is None:
            if self._is_nemo_2:
                return model
            raise QuantizerError("algorithm is null: there is nothing to quantize; export(model) writes it as it is")
        if "quant_cfg" in vars(self) and self.quant_cfg != presets()[self._algorithm]:
            raise QuantizerError(
                "quant_cfg was changed, which is not followed; set what the configs have, or write a recipe (TOML) and "
                "call bridge.convert(model, target, quant='recipe.toml', calib=forward_loop)"
            )
        source = _open(model)
        decoder = self._decoder_type(source)
        scheme = self._scheme(decoder, source)
        self._check_export(source, scheme)
        samples = sequence = None
        data: Any = forward_loop
        if forward_loop is not None and (gpt := gpt_model(model)) is not None:
            data = recorded(gpt, lambda: forward_loop(model))
        if forward_loop is None and self._quantization.get("calibration_dataset") not in NEMO_DATASETS:
            data = self._quantization["calibration_dataset"]
            samples = self._quantization.get("calibration_dataset_size")
            sequence = self._quantization.get("calibration_seq_len")
        least = MIN_AMAX.get(self._algorithm, 0.0) if decoder == "gpt" else 0.0
        result = fake_quantize(source, scheme, data, samples, sequence, least)
        self._quantized = _Quantized(result.model, source, scheme, result.calibration)
        return result.model

    def export(self, model: Any) -> Report:
        """Write the model that `quantize` returned; with `compress` as one uncompressed tar."""
        if self._export is None:
            raise QuantizerError("export: no export_config was given to the Quantizer")
        quantized = self._quantized
        if self._algorithm is None:
            source = _open(model)
            self._decoder_type(source)
            return self._write(source, None, None)
        if quantized is None:
            raise QuantizerError("export: nothing is quantized yet; call model = quantizer.quantize(model, loop) first")
        if model is not quantized.model:
            raise QuantizerError(
                f"export: this {type(model).__name__} is not the model that quantize returned last (the one given to "
                "quantize stays unquantized); write quantizer.export(quantizer.quantize(model, loop))"
            )
        return self._write(quantized.source, quantized.scheme, quantized.calibration)

    @property
    def _is_nemo_2(self) -> bool:
        return "kv_cache_qformat" in self._quantization

    def _decoder_type(self, source: Source) -> str | None:
        """TensorRT-LLM's name for the architecture, else the config's `decoder_type`."""
        architecture, given = architecture_of(source.config), self._decoder
        known = load_dialect("trtllm").architectures.get(architecture)
        if given and known and given != known:
            raise QuantizerError(f"decoder_type is {given!r}, but {architecture} is of type {known!r}; leave it out")
        return known or given

    def _scheme(self, decoder: str | None, source: Source) -> Scheme:
        """bridge's scheme for the algorithm, as `convert` takes its name, changed by the config."""
        assert self._algorithm is not None
        config, name = self._quantization, self._algorithm
        scheme = scheme_of(SCHEMES[name], self._kv(decoder), structure_of(source), source)
        assert scheme is not None
        # NeMo 2's default is no wish for a size that cannot be
        if "awq" in name and config.get("awq_block_size") and not (config["awq_block_size"] == BLOCK and scheme.note):
            block = replace(scheme.weight[0], block=(config["awq_block_size"],))
            scheme = replace(scheme, weight=(block, *scheme.weight[1:]), note="")
        if name == "int8":  # ModelOpt's INT8_DEFAULT_CFG does not smooth; bridge's int8 does
            summary = scheme.summary.replace(", smoothed", ", not smoothed")
            scheme = replace(scheme, name="int8_max", summary=summary, algorithm="max", options=())
        options = dict(scheme.options)
        if name == "int8_sq" and self._is_nemo_2:
            options |= {"alpha": 0.5} if decoder == "gemma" else {}
        elif name == "int8_sq" and config.get("sq_alpha") is not None:
            options["alpha"] = float(config["sq_alpha"])
        if name == "w4a8_awq" and decoder in COARSE_AWQ and self._is_nemo_2:
            options["alpha_step"] = 1.0
        return replace(scheme, options=tuple(sorted(options.items())))

    def _kv(self, decoder: str | None) -> str | None:
        """NeMo's rule: the config decides; by default quantize the cache unless INT8 is used or the model is a GPT."""
        enabled = self._quantization.get("enable_kv_cache")
        if not ("int8" not in str(self._algorithm) and decoder != "gpt" if enabled is None else enabled):
            return None
        default = "int8" if self._algorithm == "int8_sq" else "fp8"
        return str(self._quantization.get("kv_cache_qformat", default))

    def _options(self) -> dict[str, Any]:
        export = self._export or {}
        options = {"dtype": DTYPES[export.get("dtype", "bf16")]}
        if self._target == "trtllm":
            options |= {"tp": export.get("inference_tp", 1), "pp": export.get("inference_pp", 1)}
        return options

    def _check_export(self, source: Source, scheme: Scheme | None) -> None:
        """Raise what makes the export impossible; reads no weight."""
        if self._export is not None:
            _check_free(Path(self._export["path"]))
            plan(source, self._target, scheme, **self._options())

    def _write(self, source: Source, scheme: Scheme | None, calibration: Calibration | None) -> Report:
        assert self._export is not None
        export, out = self._export, Path(self._export["path"])
        _check_free(out)

        def write(directory: Path) -> Report:
            return convert(source, self._target, scheme, directory, calib=calibration, **self._options())

        if not export.get("compress"):
            return write(out)
        self._check_export(source, scheme)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as work:
                directory, archive = Path(work, "model"), Path(work, "archive")
                try:
                    report = replace(write(directory), out=str(out))
                except BaseException as error:  # what a conversion keeps goes with this directory
                    drop_notes(error, work)
                    raise
                save(report, directory)
                _pack(directory, archive)
                archive.replace(out)
        except OSError as error:
            raise WriteError(f"{out}: {error.strerror}; nothing was kept") from error
        return report


def __getattr__(name: str) -> Any:
    if name == "QUANT_CFG_CHOICES":
        return presets()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _check_free(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise WriteError(f"{out} exists already; remove it, or set another path (save_path) in export_config")


def _open(model: Any) -> Source:
    """`model` as a source, with the tokenizer of the place that it was loaded from, if there is one."""
    from bridge.sources.memory import MemorySource

    theirs = any(base.__module__.partition(".")[0] in ("nemo", "megatron") for base in type(model).__mro__)
    if theirs and gpt_model(model) is None:
        raise SourceError(
            f"{type(model).__name__}: of the modules of NeMo and Megatron, only those that hold one GPTModel of "
            "Megatron-Core are read; give that, the transformers model (`.model` of an HFAutoModelForCausalLM), or a "
            "checkpoint"
        )
    source = open_source(model)
    if not isinstance(source, MemorySource):
        return source
    try:
        tokenizer = source.load_tokenizer()
    except BridgeError:
        return source
    # if a directory has no tokenizer, transformers may build one without a vocabulary
    words = tokenizer("words", add_special_tokens=False)["input_ids"]
    return open_source(model, tokenizer=tokenizer) if words else source


def _pack(directory: Path, archive: Path) -> None:
    """Write a plain tar of `directory` with members `./...`, sorted by name, without owner or time."""

    def bare(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(archive, "w") as tar:
        for path in sorted(directory.rglob("*")):
            tar.add(path, arcname=f"./{path.relative_to(directory).as_posix()}", recursive=False, filter=bare)
