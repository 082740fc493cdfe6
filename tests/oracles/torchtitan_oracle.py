"""torchtitan's own adapters, both ways, for tiny models of both naming eras, and its checkpoint directories."""

from __future__ import annotations

import atexit
import functools
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.models.torchtitan_families import CONFIGS, EVERY
from tests.oracles import torchtitan_process
from tests.oracles.server import processes

ERAS = ("0.2", "0.3")
MODELS = [*((name, era) for era in ERAS for name in CONFIGS), ("gpt_oss", "0.3"), ("llama4", "0.2")]


@dataclass(frozen=True)
class Made:
    """One model: its native tensors, and what torchtitan's adapter makes of them."""

    era: str
    name: str
    config_hf: dict[str, Any]
    native: dict[str, np.ndarray]
    hf: dict[str, np.ndarray]  # the adapter's to_hf of native
    ids: np.ndarray
    logits: np.ndarray  # of torchtitan's own forward

    def from_hf(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The adapter's way back."""
        return _process(self.era).submit(torchtitan_process.from_hf, self.era, self.name, state).result()

    def load_and_run(self, directory: Path, config: dict[str, Any] | None = None) -> np.ndarray:
        """Logits of torchtitan's own model that loads a distributed checkpoint, every tensor of its state.

        config: of transformers, whose numbers the run gives the model.
        """
        arguments = (self.era, self.name, str(directory), self.ids, config)
        return np.asarray(_process(self.era).submit(torchtitan_process.load_and_run, *arguments).result())

    def save(self, directory: Path, *, dtype: torch.dtype = torch.float32, training: bool = False) -> Path:
        """Write and return `step-10` as torchtitan does, on request with what else a training run stores."""
        import torch.distributed.checkpoint as dcp

        state: dict[str, Any] = {key: torch.from_numpy(array).to(dtype) for key, array in self.native.items()}
        if training:
            moments = {f"{key}.exp_avg": tensor * 0.1 for key, tensor in state.items()}
            state |= {"optimizer": {"state": moments, "param_groups": {"lr": 1e-3}}}
            state |= {"train_state": {"step": torch.tensor(10)}, "lr_scheduler": {"last_epoch": 10}}
        step = directory / "step-10"
        dcp.save(state, storage_writer=dcp.FileSystemWriter(step), no_dist=True)
        return step


@functools.cache
def family(name: str, era: str = "0.3") -> Made:
    """The model with its weights; the same in every run."""
    native, hf, ids, logits = _process(era).submit(torchtitan_process.made, era, name).result()
    return Made(era, name, EVERY[name], native, hf, ids, logits)


def drafts_from_hf(state: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list[str]]:
    """The tensors of a DeepSeek-V3 with one draft layer by torchtitan 0.3's adapter, and the names of its own state."""
    return _process("0.3").submit(torchtitan_process.drafts_from_hf, state).result()


@functools.cache
def _process(era: str) -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, processes(), torchtitan_process.start, (era,))
    atexit.register(pool.shutdown)
    return pool
