"""NeMo's `Quantizer`, of NeMo 1 and 2, for `transformers` models: its words in bridge's; must never quantize by itself.

Words that mean the same here and there are taken as they are. Where bridge departs on purpose:

- `quantize` leaves the caller's model as it is and returns another over the same memory; `export` takes that one.
- `sq_alpha` is NeMo 1's; NeMo 2 has the field and does not read it: ModelOpt's 1 is taken, and 0.5 for Gemma.
- The KV cache is quantized where attention reads it, as in NeMo 2; NeMo 1 quantizes the outputs of the projection.
- Without `forward_loop` NeMo's data sets (`cnn_dailymail`, `wikitext`) stand for the text that comes with bridge, so
  that no network is needed; another `calibration_dataset`, a file or a data set's id, is cut as the config says.
- No sample is generated (`sample_output`, `generate_sample`): the report's parity says more.
- The tokenizer lies beside the weights, as transformers saves it.
"""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from bridge.doors.nemo_configs import DTYPES, SCHEMES, ExportConfig, QuantizationConfig, QuantizerError, read
from bridge.errors import BridgeError, SourceError, WriteError

if TYPE_CHECKING:
    from bridge.quant.calibration import Calibration
    from bridge.quant.scheme import Scheme
    from bridge.report import Report
    from bridge.sources import Source

__all__ = ["ExportConfig", "QuantizationConfig", "Quantizer", "QuantizerError"]

TEXTS = (None, "cnn_dailymail", "wikitext")  # NeMo's own, on the hub
# NeMo found squared ReLU to be calibrated too low: amax of the inputs of its GPT is at least this.
LEAST = {"fp8": 0.01 * 448, "int8_sq": 0.01 * 127}
COARSE = ("gemma", "mpt")  # whose W4A8 overflows in TensorRT-LLM where AWQ searches finely (NeMo 2)


@dataclass(frozen=True)
class _Quantized:
    """What `quantize` made, and of what."""

    model: Any
    source: Source
    scheme: Scheme
    calibration: Calibration


class Quantizer:
    """Quantize a model as the first config says, and write it as the second says.

    The configs are mappings (OmegaConf's too) or objects with attributes, in the words of NeMo 1 or 2.

    >>> quantizer = Quantizer(QuantizationConfig("fp8"), ExportConfig("llama-fp8"))
    >>> model = quantizer.quantize(model, forward_loop)  # doctest: +SKIP
    >>> quantizer.export(model)  # doctest: +SKIP
    """

    def __init__(self, quantization_config: Any, export_config: Any) -> None:
        """Check both configs; QuantizerError (an AssertionError) says all that is wrong with them.

        A null `algorithm` exports the model as it is; without `export_config` there is nothing to export to.
        """
        self.quantization_config = quantization_config
        self.export_config = export_config
        said = read(quantization_config, export_config)
        self._quantization, self._export, self._said_decoder = said.quantization, said.export, said.decoder
        self._algorithm: str | None = said.quantization["algorithm"]
        self._quantized: _Quantized | None = None

    @staticmethod
    def modify_model_config(model_cfg: Any) -> Any:
        """Set in NeMo 1's model config what its quantization needs, and return it."""
        if type(model_cfg).__module__.startswith("omegaconf."):  # whose configs may be closed to new keys
            with sys.modules["omegaconf"].open_dict(model_cfg):
                return _modify(model_cfg)
        return _modify(model_cfg)

    def quantize(self, model: Any, forward_loop: Callable[[Any], Any] | None = None) -> Any:
        """Return ModelOpt's fake-quantized model, calibrated by `forward_loop(model)`; `model` stays as it is.

        What cannot be exported is refused before the model runs. What `forward_loop` raises passes through as it is,
        and nothing is quantized then. A null `algorithm` is an error as in NeMo 1, and returns `model` as in NeMo 2
        where the configs are NeMo 2's.
        """
        from bridge.api import fake_quantize

        if self._algorithm is None:
            if self._is_nemo_2:
                return model
            raise QuantizerError("algorithm is null: there is nothing to quantize; export(model) writes it as it is")
        source = _open(model)
        decoder = self._decoder_type(source)
        scheme = self._scheme(decoder)
        self._refuse(source, scheme)
        samples = sequence = None
        data: Any = forward_loop
        if forward_loop is None and self._quantization.get("calibration_dataset") not in TEXTS:
            data = self._quantization["calibration_dataset"]
            samples = self._quantization.get("calibration_dataset_size")
            sequence = self._quantization.get("calibration_seq_len")
        least = LEAST.get(self._algorithm, 0.0) if decoder == "gpt" else 0.0
        found = fake_quantize(source, scheme, data, samples, sequence, least)
        self._quantized = _Quantized(found.model, source, scheme, found.calibration)
        return found.model

    def export(self, model: Any) -> Report:
        """Write what `quantize` returned, whole or not at all; with `compress` as one uncompressed tar."""
        if self._export is None:
            raise QuantizerError("export: no export_config was given to the Quantizer")
        done = self._quantized
        if self._algorithm is None:
            source = _open(model)
            self._decoder_type(source)
            return self._write(source, None, None)
        if done is None:
            raise QuantizerError("export: nothing is quantized yet; call model = quantizer.quantize(model, loop) first")
        if model is not done.model:
            raise QuantizerError(
                f"export: this {type(model).__name__} is not the model that quantize returned last (the one given to "
                "quantize stays unquantized); write quantizer.export(quantizer.quantize(model, loop))"
            )
        return self._write(done.source, done.scheme, done.calibration)

    @property
    def _is_nemo_2(self) -> bool:
        return "kv_cache_qformat" in self._quantization

    def _decoder_type(self, source: Source) -> str | None:
        """TensorRT-LLM's word for the architecture, None where it has none and none was said."""
        from bridge.tables.dialect import load_dialect
        from bridge.tables.match import architecture_of

        architecture, said = architecture_of(source.config), self._said_decoder
        found = load_dialect("trtllm").architectures.get(architecture)
        if said and found and said != found:
            raise QuantizerError(f"decoder_type is {said!r}, but {architecture} is of type {found!r}; leave it out")
        return found or said

    def _scheme(self, decoder: str | None) -> Scheme:
        """bridge's scheme of the algorithm, with what the config changes of it."""
        from bridge.quant.scheme import load_scheme

        assert self._algorithm is not None
        said, name = self._quantization, self._algorithm
        scheme = load_scheme(SCHEMES[name], kv=self._kv(decoder))
        if "awq" in name and said.get("awq_block_size"):
            block = replace(scheme.weight[0], block=(said["awq_block_size"],))
            scheme = replace(scheme, weight=(block, *scheme.weight[1:]))
        if name == "int8":  # ModelOpt's INT8_DEFAULT_CFG, which does not smooth as bridge's does
            words = scheme.summary.replace(", smoothed", ", not smoothed")
            scheme = replace(scheme, name="int8_max", summary=words, algorithm="max", options=())
        options = dict(scheme.options)
        if name == "int8_sq" and self._is_nemo_2:
            options |= {"alpha": 0.5} if decoder == "gemma" else {}
        elif name == "int8_sq" and said.get("sq_alpha") is not None:
            options["alpha"] = float(said["sq_alpha"])
        if name == "w4a8_awq" and decoder in COARSE and self._is_nemo_2:
            options["alpha_step"] = 1.0
        return replace(scheme, options=tuple(sorted(options.items())))

    def _kv(self, decoder: str | None) -> str | None:
        """NeMo's rule: the cache is quantized unless the algorithm is one of INT8 or the model a GPT, or as told."""
        told = self._quantization.get("enable_kv_cache")
        if not ("int8" not in str(self._algorithm) and decoder != "gpt" if told is None else told):
            return None
        default = "int8" if self._algorithm == "int8_sq" else "fp8"
        return str(self._quantization.get("kv_cache_qformat", default))

    def _options(self) -> dict[str, Any]:
        said = self._export or {}
        options = {"dtype": DTYPES[said.get("dtype", "bf16")]}
        if said.get("export_format", "trtllm") == "trtllm":
            options |= {"tp": said.get("inference_tp", 1), "pp": said.get("inference_pp", 1)}
        return options

    def _refuse(self, source: Source, scheme: Scheme | None) -> None:
        """Raise what speaks against the export, reading no weight."""
        from bridge.api import plan

        if self._export is not None:
            _check_free(Path(self._export["path"]))
            plan(source, self._export.get("export_format", "trtllm"), scheme, **self._options())

    def _write(self, source: Source, scheme: Scheme | None, calibration: Calibration | None) -> Report:
        from bridge.api import convert

        assert self._export is not None
        said, out = self._export, Path(self._export["path"])
        _check_free(out)

        def write(directory: Path) -> Report:
            target = said.get("export_format", "trtllm")
            return convert(source, target, scheme, directory, calib=calibration, **self._options())

        if not said.get("compress"):
            return write(out)
        self._refuse(source, scheme)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as work:
                directory, archive = Path(work, "model"), Path(work, "archive")
                report = replace(write(directory), out=str(out))
                report.save(directory)
                _pack(directory, archive)
                archive.replace(out)
        except OSError as error:
            raise WriteError(f"{out}: {error.strerror}; nothing was kept") from error
        return report


def _check_free(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise WriteError(f"{out} exists already; remove it, or set another path (save_path) in export_config")


def _open(model: Any) -> Source:
    """`model` as a source, with the tokenizer of the place that it was loaded from, where there is one."""
    from bridge.sources import open_source
    from bridge.sources.memory import MemorySource

    if any(base.__module__.partition(".")[0] in ("nemo", "megatron") for base in type(model).__mro__):
        raise SourceError(
            f"{type(model).__name__}: modules of NeMo and Megatron are not read yet; give the transformers model (of "
            "HFAutoModelForCausalLM its `.model`), or the directory of a Hugging Face checkpoint"
        )
    source = open_source(model)
    if not isinstance(source, MemorySource):
        return source
    try:
        tokenizer = source.load_tokenizer()
    except BridgeError:
        return source
    # where a directory has no tokenizer, transformers may make one without words
    words = tokenizer("words", add_special_tokens=False)["input_ids"]
    return open_source(model, tokenizer=tokenizer) if words else source


def _modify(cfg: Any) -> Any:
    said = {"name": "modelopt", "apply_rope_fusion": False}
    keyed = isinstance(cfg, Mapping)
    if cfg.get("sequence_parallel") if keyed else getattr(cfg, "sequence_parallel", False):
        said["sequence_parallel"] = False
    for key, value in said.items():
        if keyed:
            cfg[key] = value
        else:
            setattr(cfg, key, value)
    return cfg


def _pack(directory: Path, archive: Path) -> None:
    """A plain tar of `directory` with members `./...`, in the order of their names and without an owner or a time."""

    def bare(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(archive, "w") as tar:
        for path in sorted(directory.rglob("*")):
            tar.add(path, arcname=f"./{path.relative_to(directory).as_posix()}", recursive=False, filter=bare)
