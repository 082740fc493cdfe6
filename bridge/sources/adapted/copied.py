"""A base model with its LoRA adapter as separate files (`adapter="keep"`)."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

from bridge.core.text import listed
from bridge.sources.adapted.adapter import Adapter
from bridge.sources.adapted.settings import CONFIG
from bridge.sources.source import Source, Wrapped

FOLDER = "adapter"


class CopiedAdapterSource(Wrapped):
    """`base` as it is, with the adapter's files in a folder of their own."""

    adapter_is_copied = True

    def __init__(self, base: Source, adapter: Adapter) -> None:
        super().__init__(base)
        self.adapter: Adapter = adapter
        self.name = f"{base.name}-{adapter.name}"
        self.quantized, self.calibration = base.quantized, base.calibration

    @property
    def note(self) -> str:
        """The adapter, its settings, and where its files go."""
        return f"adapter {self.adapter.where}: {self.adapter.settings.words}, kept in {FOLDER}/"

    @cached_property
    def side_files(self) -> dict[str, Path | bytes]:
        """The base's, with the adapter over the directory that `adapter/` lies in."""
        adapter = self.adapter
        weights: Path | bytes = adapter.file()
        if adapter.root and (stored := adapter.root / "adapter_model.safetensors").is_file():
            weights = stored
        own = {f"{FOLDER}/{name}": file for name, file in (adapter.side_files or {}).items()}
        files = {f"{FOLDER}/{CONFIG}": adapter.settings.over(".."), f"{FOLDER}/adapter_model.safetensors": weights}
        return {**self.base.side_files, **files, **own}

    def served(self, command: str) -> str:
        """The command of a server with the adapter, "" if that server is not known to load one."""
        rank, at = self.adapter.settings.largest_rank, f"{self.adapter.name}={{out}}/{FOLDER}"
        if command.startswith("vllm serve"):
            return f"{command} --enable-lora --max-lora-rank {_vllm_rank(rank)} --lora-modules {at}"
        if "sglang" in command:
            return f"{command} --enable-lora --max-lora-rank {rank} --lora-paths {at}"
        return ""

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the base's and of the adapter."""
        return hashlib.sha256(f"{self.base.fingerprint} beside {self.adapter.digest}".encode()).hexdigest()


def check_copied_adapter(adapter: Adapter) -> None:
    """SourceError for what vLLM 0.33, SGLang 0.5 and TensorRT-LLM do not apply beside a base."""
    settings = adapter.settings
    heads = {"classifier", "score"}
    others = [name for name in settings.modules_to_save if name not in heads]
    problems = []
    if settings.dora:
        problems.append("DoRA, which vLLM, SGLang and TensorRT-LLM do not apply")
    if settings.lora_bias or settings.bias != "none":
        problems.append("trained biases, which vLLM does not apply")
    if others:
        problems.append(f"modules_to_save={others}, which vLLM does not load beside a base")
    if problems:
        raise listed(adapter.where, [f"{problem}; merge it: adapter='merge' (--adapter merge)" for problem in problems])


def _vllm_rank(rank: int) -> int:
    """The least rank that vLLM has buffers for."""
    return next((size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)
