"""NeMo's functions for pruning, under their names.

Scores are ModelOpt's (`importance="minitron"`, `order="importance"`), but heads of a group are scored by their own
channels: ModelOpt 0.35 views them in a wrong order. Intended differences from NeMo:

- A transformers model stays as it is, and the pruned one is returned. A live Megatron-Core model is pruned in place.
- What NeMo ignores is an error: layers that are not there or twice, no target, sizes of Mamba for another model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bridge.core.errors import UsageError, warn
from bridge.sources.pruned.source import PrunedSource
from bridge.workflows.prune.verbs import prune as write
from bridge.workflows.prune.verbs import pruned

__all__ = ["PruningConfig", "prune", "prune_language_model"]

DIMS = {
    "target_ffn_hidden_size": "ffn",
    "target_hidden_size": "hidden",
    "target_num_attention_heads": "heads",
    "target_num_query_groups": "kv_heads",
    "target_num_layers": "layers",
}
MAMBA = ("target_mamba_num_heads", "target_mamba_head_dim")


class PruningValueError(UsageError, ValueError):
    """A wrong pruning config, where NeMo raises ValueError."""


class PruningAssertionError(UsageError, AssertionError):
    """A wrong pruning config, where ModelOpt or NeMo assert."""


@dataclass
class PruningConfig:
    """Sizes after pruning, None for those that stay; or `drop_layers`, numbers from 1."""

    target_ffn_hidden_size: int | None = None
    target_hidden_size: int | None = None
    target_num_attention_heads: int | None = None
    target_num_query_groups: int | None = None
    target_mamba_num_heads: int | None = None
    target_mamba_head_dim: int | None = None
    target_num_layers: int | None = None
    drop_layers: Sequence[int] | None = None

    def __post_init__(self) -> None:
        sizes = [field.name for field in fields(self) if field.name != "drop_layers" and getattr(self, field.name)]
        if self.drop_layers and sizes:
            raise PruningValueError(f"drop_layers cannot be used with other pruning parameters ({', '.join(sizes)})")

    @property
    def keep(self) -> dict[str, int | str]:
        """Dim -> size, as `bridge.pruned` takes them."""
        return {dim: size for name, dim in DIMS.items() if (size := getattr(self, name)) is not None}

    @property
    def dropped(self) -> list[int] | None:
        """Numbers of layers to drop, from 0; None without any."""
        if not self.drop_layers:
            return None
        if wrong := [number for number in self.drop_layers if number < 1]:
            raise PruningAssertionError(f"drop_layers counts from 1, and has {wrong}")
        return [number - 1 for number in self.drop_layers]

    def check(self) -> None:
        """Refuse what NeMo or ModelOpt refuse, and what they ignore."""
        if mamba := [name for name in MAMBA if getattr(self, name) is not None]:
            raise PruningValueError(f"{', '.join(mamba)}: bridge prunes no state-space layers; leave it out")
        keep, dropped = self.keep, self.dropped
        if not keep and not dropped:
            raise PruningValueError("the config names no size and no layer, so nothing would be pruned; set a target_")
        if ("heads" in keep) != ("kv_heads" in keep):
            raise PruningAssertionError(
                "target_num_attention_heads and target_num_query_groups should be provided together; give both, also "
                "if one of them stays"
            )
        if "heads" in keep and int(keep["heads"]) % int(keep["kv_heads"]):
            raise PruningAssertionError(
                f"target_num_attention_heads {keep['heads']} must be divisible by target_num_query_groups "
                f"{keep['kv_heads']}"
            )


def prune_language_model(
    model: Any, pruning_config: PruningConfig, data_module: Any = None, trainer: Any = None
) -> Any:
    """Prune a GPTModel of Megatron-Core in place, or return a pruned transformers model; that one stays as it is.

    Args:
        model: a live GPTModel of Megatron-Core that is whole (TP 1, PP 1), a transformers model, or what
            `bridge.convert` takes.
        data_module: what the model runs on, as `bridge.calibrate` takes it; not needed to drop layers.
        trainer: of NeMo; not used.

    Raises:
        PlanError: a size that the model or its config cannot have; layers that are not there, or twice, or all.
        ValueError, AssertionError: where NeMo and ModelOpt raise them, as UsageError too.
    """
    pruning_config.check()
    if pruning_config.keep and data_module is None:
        raise PruningAssertionError("data_module is required to score what stays; give texts, a file or batches")

    def cut(whole: Any) -> PrunedSource:
        return pruned(
            whole, pruning_config.keep or None, drop_layers=pruning_config.dropped, data=data_module,
            importance="minitron", order="importance", progress=False,
        )  # fmt: skip

    if any(kind.__module__.startswith("megatron.") for kind in type(model).__mro__):
        from bridge.workflows.prune.live_megatron import prune_in_place

        return prune_in_place(model, cut)
    source = cut(model)
    if hasattr(model, "state_dict"):
        warn(f"{type(model).__name__} in memory stays as it is; the pruned model is returned")
    return source.load_model()


def prune(
    nemo_checkpoint: str,
    save_path: str,
    pruning_config: PruningConfig,
    devices: int = 1,
    num_nodes: int = 1,
    tp_size: int = 1,
    pp_size: int = 1,
    num_layers_in_first_pipeline_stage: int | None = None,
    num_layers_in_last_pipeline_stage: int | None = None,
    num_train_samples: int = 1024,
    data: Any = None,
    tokenizer_path: str | None = None,
    legacy_ckpt: bool = False,
) -> str:
    """Write a pruned checkpoint for Megatron-Core to `save_path`, and return that path: NeMo's `llm.prune`.

    Args:
        nemo_checkpoint: any model that `bridge.convert` takes, of NeMo or not.
        num_train_samples: rows of `data` to run, one block of the model in memory at a time.
        data: what the model runs on, as `bridge.calibrate` takes it; not needed to drop layers.
        devices, num_nodes, tp_size, pp_size and stages: of NeMo; one process prunes models of any size here.
        legacy_ckpt: of NeMo; old checkpoints are read without it.
    """
    pruning_config.check()
    if pruning_config.keep and data is None:
        raise PruningAssertionError("data is required to score what stays; give texts, a file or batches")
    if max(devices, num_nodes, tp_size, pp_size) > 1:
        warn("one process prunes here, block by block; devices, num_nodes, tp_size and pp_size are not used")
    write(
        nemo_checkpoint, pruning_config.keep or None, Path(save_path), target="megatron", data=data,
        drop_layers=pruning_config.dropped, importance="minitron", order="importance", tokenizer=tokenizer_path,
        samples=num_train_samples if pruning_config.keep else None,
    )  # fmt: skip
    return save_path
