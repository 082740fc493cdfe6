"""megatron-core on a CPU: tiny models of each family, their logits, their checkpoints as each of its users lays them
out, and the way back. Processes of their own answer, one a rank, since megatron keeps its ranks in globals.
"""

from __future__ import annotations

import atexit
import functools
import io
import tarfile
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from tests.models.megatron_configs import megatron_lm, nemo1, nemo2
from tests.models.megatron_families import EVERY, Family, te_name
from tests.oracles import megatron_bridge_process, megatron_process
from tests.oracles.server import processes

KINDS = ("bridge", "nemo2", "nemo1", "nemo1-dist", "megatron-lm", "megatron-lm-legacy")
PREFIX = {"nemo2": "module.", "nemo1": "model.", "nemo1-dist": "model."}


@dataclass(frozen=True)
class Made:
    """A family's model with its weights, and what it answers."""

    name: str
    config_hf: dict[str, Any]
    ids: np.ndarray
    logits: np.ndarray  # of the real vocabulary
    state: dict[str, np.ndarray]  # of the whole module, names of the local spec, vocabulary padded

    def save(self, directory: Path, kind: str = "bridge", **options: Any) -> Path:
        """Write the checkpoint as `kind` does, and return what its user would name.

        Options: `layers` (`stacked`; `single`, a name a layer; `singleton`, which also parts experts, gate and up),
        `tp`, `pp`, `spec` (`te`, `local`), `dtype`, `optimizer`, `streams` (a file of a rank's state dict also holds a
        `_extra_state` a linear, as older Transformer Engines have it there: an `io.BytesIO`).
        """
        known = {"layers": "stacked", "tp": 1, "pp": 1, "spec": "te", "dtype": "float32"}
        known |= {"optimizer": False, "streams": False}
        assert kind in KINDS and set(options) <= set(known), (kind, options)
        directory.mkdir(parents=True, exist_ok=True)
        return _SAVE[kind](EVERY[self.name], self.name, directory, known | options)

    def native(self, spec: str = "te") -> dict[str, np.ndarray]:
        """The tensors by the names of a module of that spec."""
        family = EVERY[self.name]
        if spec == "local":
            return self.state
        return {te_name(key, family, family.grouped): array for key, array in self.state.items()}


@functools.cache
def family(name: str) -> Made:
    """Build the family's model and let it answer; the same in every run."""
    ids, logits, state = _ask(1, 1, megatron_process.made, name)[0]
    return Made(name, EVERY[name].hf, ids, logits, state)


def load_and_run(
    directory: Path,
    name: str,
    prefix: str = "",
    layers: str = "stacked",
    strict: str = "assume_ok_unexpected",
    *,
    spec: str = "te",
    grouped: bool = False,
    tp: int = 1,
) -> np.ndarray:
    """Logits of a torch_dist directory that megatron-core loads itself into the family's model, every tensor of it,
    shared by `tp` ranks.
    """
    arguments = (name, str(directory), family(name).ids, prefix, layers, strict, spec, grouped)
    return _ask(tp, 1, megatron_process.load_and_run, *arguments)[0]


def run_written(directory: Path, ids: np.ndarray) -> np.ndarray:
    """Logits of the model that run_config.yaml in a directory describes, with the weights there."""
    return np.asarray(_ask(1, 1, megatron_process.run_written, str(directory), ids)[0])


def drafted(name: str, spec: str) -> list[str]:
    """Names in megatron-core's checkpoint of the tensors of a layer that predicts one token more."""
    found: list[str] = _ask(1, 1, megatron_process.drafted, name, spec)[0]
    return found


def drafts(directory: Path, name: str, spec: str = "te", saves: bool = False) -> np.ndarray:
    """Logits of a layer that predicts one token more: of a model that is saved to a torch_dist directory, or loaded
    from one, every tensor of it.
    """
    return np.asarray(_ask(1, 1, megatron_process.drafts, name, str(directory), spec, saves)[0])


def quantized(directory: Path, name: str, scheme: str = "FP8_DEFAULT_CFG") -> dict[str, np.ndarray]:
    """Write Megatron-Bridge's directory of the family quantized by ModelOpt, calibrated on its ids; return the amax
    that ModelOpt holds, by the names of the local spec.
    """
    iteration = directory / "iter_0000100"
    found = _ask(1, 1, megatron_process.quantized, name, str(iteration), scheme)[0]
    _beside(name, directory, 1, 1)
    return found


def bridged(name: str) -> dict[str, np.ndarray]:
    """The family's tensors under Hugging Face names, by Megatron-Bridge's own mappings."""
    return in_bridge().submit(megatron_bridge_process.to_hf, name, family(name).state).result()


def bridge_differs(name: str) -> list[str]:
    """What Megatron-Bridge derives otherwise than the family says, from the family's Hugging Face config."""
    return in_bridge().submit(megatron_bridge_process.differing, name).result()


@functools.cache
def _scratch() -> Path:
    holder = tempfile.TemporaryDirectory(prefix="megatron-")
    _HELD.append(holder)
    return Path(holder.name)


_HELD: list[Any] = []  # removed when the interpreter ends


def close() -> None:
    """End the processes: each has some twenty threads of gloo, which look for work a hundred times a second."""
    _ranks.cache_clear()
    in_bridge.cache_clear()
    while _POOLS:
        _POOLS.pop().shutdown()


_POOLS: list[ProcessPoolExecutor] = []
atexit.register(close)


@functools.cache
def _ranks(tp: int, pp: int) -> list[ProcessPoolExecutor]:
    store = tempfile.mktemp(prefix=f"store-{tp}-{pp}-", dir=_scratch())  # gloo makes the file
    return [_process(megatron_process.start, rank, tp, pp, store) for rank in range(tp * pp)]


@functools.cache
def in_bridge() -> ProcessPoolExecutor:
    """The process that has Megatron-Bridge, and stand-ins for Transformer Engine."""
    return _process(megatron_bridge_process.start, tempfile.mktemp(prefix="store-bridge-", dir=_scratch()))


def _process(initializer: Callable[..., None], *args: Any) -> ProcessPoolExecutor:
    _POOLS.append(ProcessPoolExecutor(1, processes(), initializer, args))
    return _POOLS[-1]


def _ask(tp: int, pp: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Every rank's answer; they run at once, since they wait for each other."""
    return [future.result() for future in [pool.submit(function, *args) for pool in _ranks(tp, pp)]]


@functools.cache
def _source(name: str, spec: str) -> str:
    """A plain checkpoint of one rank, from which ranks and grouped experts take their weights."""
    directory = str(_scratch() / f"source-{name}-{spec}")
    _ask(1, 1, megatron_process.save, name, directory, None, _options({"layers": "stacked", "spec": spec}))
    return directory


def _options(options: dict[str, Any], prefix: str = "", plain: bool = False, **common: Any) -> dict[str, Any]:
    plainly = {"spec": "te", "dtype": "float32", "optimizer": False, "prefix": prefix, "plain_norms": plain}
    return plainly | options | {"common": common}


def _dist(
    name: str, directory: Path, options: dict[str, Any], prefix: str = "", plain: bool = False, **common: Any
) -> None:
    arguments = (name, str(directory), _source(name, options["spec"]), _options(options, prefix, plain, **common))
    _ask(options["tp"], options["pp"], megatron_process.save, *arguments)


def _parts(made: Family, name: str, options: dict[str, Any], prefix: str, plain: bool) -> dict[tuple[int, int], Any]:
    """Each rank's state dict, by its tensor and pipeline number."""
    found = {}
    for tp, pp, state in _ask(options["tp"], options["pp"], megatron_process.part, name, _source(name, "te")):
        tensors: dict[str, Any] = {}
        for key, array in state.items():
            tensor = torch.from_numpy(array + np.float32(plain and "layernorm" in key))
            key = te_name(key, made, made.grouped) if options["spec"] == "te" else key
            tensors[prefix + key] = tensor.to(getattr(torch, options["dtype"]))
            if options["streams"] and "linear" in key:
                tensors[f"{prefix}{key.rpartition('.')[0]}._extra_state"] = io.BytesIO(b"recipe")
        found[tp, pp] = tensors
    return found


def _save_bridge(made: Family, name: str, directory: Path, options: dict[str, Any]) -> Path:
    _dist(name, directory / "iter_0000100", options, checkpoint_version=3.0, iteration=100)
    _beside(name, directory, options["tp"], options["pp"])
    return directory


def _beside(name: str, directory: Path, tp: int, pp: int) -> None:
    """What Megatron-Bridge writes besides tensors."""
    iteration = directory / "iter_0000100"
    written = in_bridge().submit(megatron_bridge_process.run_config, name, tp, pp).result()
    (iteration / "run_config.yaml").write_text(written)
    train_state = {"step": torch.tensor(100, dtype=torch.int32), "do_train": torch.tensor(True)}
    for path in (iteration / "train_state.pt", directory / "latest_train_state.pt"):
        torch.save(train_state, path)
    (directory / "latest_checkpointed_iteration.txt").write_text("100")


def _save_nemo2(made: Family, name: str, directory: Path, options: dict[str, Any]) -> Path:
    _dist(name, directory / "weights", options, PREFIX["nemo2"], global_step=100, epoch=0)
    (directory / "context").mkdir()
    (directory / "context/model.yaml").write_text(yaml.safe_dump(nemo2(made)))
    return directory


def _save_nemo1(made: Family, name: str, directory: Path, options: dict[str, Any], dist: bool = False) -> Path:
    tp, pp, plain = options["tp"], options["pp"], made.hf["model_type"] == "gemma"
    with tempfile.TemporaryDirectory() as unpacked:
        root = Path(unpacked)
        if dist:
            _dist(name, root / "model_weights", options, PREFIX["nemo1"], plain)
        else:
            for (t, p), state in _parts(made, name, options, PREFIX["nemo1"], plain).items():
                where = f"tp_rank_{t:02d}_pp_rank_{p:03d}" if pp > 1 else f"mp_rank_{t:02d}" if tp > 1 else "."
                (root / where).mkdir(exist_ok=True)
                torch.save(state, root / where / "model_weights.ckpt")
        (root / "model_config.yaml").write_text(yaml.safe_dump(nemo1(made, tp, pp)))
        return _tar(root, directory / f"{name}.nemo")


def _tar(root: Path, out: Path) -> Path:
    """As NeMo packs: not compressed, members begin with `./`."""
    with tarfile.open(out, "w:") as archive:
        archive.add(root, arcname=".")
    return out


def _save_megatron_lm(made: Family, name: str, directory: Path, options: dict[str, Any]) -> Path:
    args = megatron_lm(made, options["tp"], options["pp"])
    _dist(name, directory / "iter_0000100", options, args=args, checkpoint_version=3.0, iteration=100)
    (directory / "latest_checkpointed_iteration.txt").write_text("100")
    return directory


def _save_legacy(made: Family, name: str, directory: Path, options: dict[str, Any]) -> Path:
    args = megatron_lm(made, options["tp"], options["pp"])
    for (t, p), state in _parts(made, name, options, "", False).items():
        where = directory / "iter_0000100" / (f"mp_rank_{t:02d}_{p:03d}" if options["pp"] > 1 else f"mp_rank_{t:02d}")
        where.mkdir(parents=True)
        whole = {"args": args, "checkpoint_version": 3.0, "iteration": 100, "model": state}
        torch.save(whole, where / "model_optim_rng.pt")
    (directory / "latest_checkpointed_iteration.txt").write_text("100")
    return directory


_SAVE: dict[str, Callable[..., Path]] = {
    "bridge": _save_bridge,
    "nemo2": _save_nemo2,
    "nemo1": _save_nemo1,
    "nemo1-dist": functools.partial(_save_nemo1, dist=True),
    "megatron-lm": _save_megatron_lm,
    "megatron-lm-legacy": _save_legacy,
}
